"""`python compile_op.py TREE MODULE`: compile an exported op with the DSL, with vLLM's own warm-up classes.

`MODULE` of `specialized_decode` instead: its prepared object, built by vLLM's own `PreparedAttnRes`, hooks included.

What those import of the rest of vLLM (which needs a build) is replaced by the least that works. Trusted code only.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any


def fake(name: str, **content: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(content)
    sys.modules[name] = module
    return module


def package(name: str, folder: Path) -> None:
    module = fake(name)
    module.__path__ = [str(folder)]


DECODE = "vllm.models.kimi_k3.nvidia.specialized_decode"


class Platform:
    """A device of the SM100 family, or none."""

    capability: tuple[int, int] | None = None

    def is_cuda(self) -> bool:
        return self.capability is not None

    def is_device_capability(self, wanted: tuple[int, int], device: int = 0) -> bool:
        return self.capability == wanted


def stand_in(root: Path) -> None:
    """Packages of the tree, and modules in place of what needs a build of vLLM."""
    for dotted in (
        "vllm", "vllm.model_executor", "vllm.model_executor.warmup", "vllm.models", "vllm.models.kimi_k3",
        "vllm.models.kimi_k3.nvidia", "vllm.models.kimi_k3.nvidia.ops", "vllm.models.kimi_k3.nvidia.ops.cute_dsl",
        "vllm.utils", "vllm.model_executor.layers", "vllm.models.kimi_k3.nvidia.ops.cute_dsl.latent_moe_tail",
    ):  # fmt: skip
        package(dotted, root / dotted.replace(".", "/"))
    sys.modules["vllm"].envs = fake("vllm.envs", VLLM_BATCH_INVARIANT=False)  # type: ignore[attr-defined]
    fake("vllm.logger", init_logger=logging.getLogger)
    fake("vllm.platforms", current_platform=Platform())
    fake("vllm.utils.import_utils", has_cutedsl=lambda: True)
    fake("vllm.model_executor.layers.linear", UnquantizedLinearMethod=object)
    fake("vllm.tracing", instrument=lambda *a, **k: lambda f: f)
    fake("vllm.utils.async_utils")


def boundary(name: str) -> dict[str, int]:
    """Build boundaries as vLLM does, on CPU tensors, and note which code each of their calls takes."""
    import cutlass.cute as cute
    import torch

    real, compiled, calls = cute.compile, [], []

    def compile_only(entry: Any, *args: Any, options: str) -> Any:
        made = real(entry, *args[:-1], CUstream(0), no_jit_engine=True)
        number = len(compiled)
        compiled.append(made.artifacts.PTX)
        return lambda *a: calls.append((number, len(a)))

    from cuda.bindings.driver import CUstream

    prepared = importlib.import_module(f"{DECODE}.cutedsl.attn_res.prepared")
    special = getattr(prepared, name)
    Platform.capability = special.CAPABILITY
    major, minor = special.CAPABILITY
    torch.cuda.get_device_capability = lambda d: (major, minor)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda d: types.SimpleNamespace(
        multi_processor_count=special.MIN_SMS
    )  # type: ignore[assignment]
    cute.compile = compile_only
    prepared.stream = special.stream = lambda device: CUstream(0)
    prepared.PreparedAttnRes._compile = lambda self, *a: (
        lambda *args: calls.append(("stock", len(args)))
    )

    def rows(*shape: int) -> torch.Tensor:
        size = 1
        for n in shape:
            size *= n
        raw = torch.zeros(size + 128, dtype=torch.bfloat16)
        first = -raw.data_ptr() // 2 % 128
        return raw[first : first + size].view(shape)

    def run(
        batch: int, aux: bool = False, eps: float = special.EPS, key: Any = (1, True, -1, False)
    ) -> Any:
        target = prepared.PreparedAttnRes([rows(special.HIDDEN) for _ in range(3)], key, (eps, eps))
        target.bind_aux()
        tensors = (rows(batch, special.HIDDEN), rows(batch, special.HIDDEN),
                   rows(batch, special.BANK, special.HIDDEN), rows(batch, special.HIDDEN))  # fmt: skip
        calls.clear()
        target.run(*tensors, rows(batch, special.HIDDEN) if aux else None)
        return calls[0][0]

    b = special.BATCH
    keys = ((0, False, 0, False), (1, True, -1, False), (special.BANK, True, -1, True))
    taken = [run(b, key=key) for key in keys]
    left = [run(b + 1), run(b, aux=True), run(b, eps=1e-3)]
    Platform.capability = (9, 0)
    special.is_supported.cache_clear()
    left.append(run(b))
    return {
        "codes": len(compiled), "entries": sum(x.count(".entry") for x in compiled),
        "taken": taken.count(0), "left": left.count("stock"),
    }  # fmt: skip


def main() -> None:
    root, name, arch = Path(sys.argv[1]), sys.argv[2], (sys.argv[3:] or ["sm_90a"])[0]
    os.environ |= {
        "CUTE_DSL_ARCH": arch, "CUTE_DSL_KEEP": "ptx", "CUTE_DSL_DISABLE_FILE_CACHING": "1",
        "CUTE_DSL_DUMP_DIR": tempfile.mkdtemp(),
    }  # fmt: skip
    stand_in(root)
    if (root / DECODE.replace(".", "/") / "cutedsl/attn_res" / name).exists():
        print(json.dumps(boundary(name)))
        return
    op = importlib.import_module(f"vllm.models.kimi_k3.nvidia.ops.cute_dsl.{name}.op")
    import cutlass.cute as cute
    from cuda.bindings.driver import CUstream

    keys = op.KERNEL.get_warmup_keys()
    entries = 0
    for key in keys:
        compiled = cute.compile(
            op.KERNEL.kernel(key), *op.KERNEL.warmup_inputs(key), CUstream(0), no_jit_engine=True
        )  # fmt: skip
        entries += compiled.artifacts.PTX.count(".entry")
    assert not op.is_supported()
    print(json.dumps({"keys": len(keys), "entries": entries}))


if __name__ == "__main__":
    main()
