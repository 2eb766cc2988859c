"""The judge's box: which device nodes of one GPU it gets and which limits suit a CUDA process.

It holds the GPU and the artifact, and no candidate Python runs in it; what is hostile there is the GPU code. Limits of
GPU memory are not made here: no group knows it, so the judge watches it per process.
"""

from __future__ import annotations

from pathlib import Path

from sandbox.box.spec import GB, Limits, Spec

SHARED_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")

# No address space limit: CUDA reserves a multiple of the device's memory. Pinned memory and the driver's own threads
# and descriptors need more than a compile does.
LIMITS = Limits(
    cpu_s=3600, address_space=None, file_bytes=4 * GB, files=8192, processes=2048, memory=64 * GB, scratch=4 * GB,
    shared=4 * GB,
)  # fmt: skip


def nodes(minor: int, dev: Path = Path("/dev")) -> tuple[Path, ...]:
    """Device nodes of the GPU with that minor number, as far as they exist.

    They must exist before the box starts: the set-uid helper that makes them is without force inside.
    """
    names = (f"nvidia{minor}", *SHARED_NODES)
    return tuple(dev / name for name in names if (dev / name).exists())


def judge_spec(worker: Path, minor: int, binds: tuple[Path, ...], limits: Limits = LIMITS) -> Spec:
    """A box for `worker` with one GPU. `binds`: the artifact and the project's own packages, read-only."""
    return Spec(
        worker, binds=binds, limits=limits, narrow=False, devices=nodes(minor),
        env={"CUDA_CACHE_DISABLE": "1", "CUDA_MODULE_LOADING": "LAZY"},
    )  # fmt: skip
