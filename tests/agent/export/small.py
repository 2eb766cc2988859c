"""A small target with everything that an export has to carry, its kernels as PTX and as Python, and a record of it.

prepare: workspace.packed = 2 w (persistent)
step: acc += x (acc: zero, every step);  y = acc packed + s;  s = y;  copy = constants.table
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agent.ids import new_run_id
from agent.store import Queries, Store
from agent.store.store import CandidateRow, JudgedRow, RunRow
from agent.workspace import Place
from sandbox import artifact_store
from sandbox.artifact import Artifact, Buffer, Launch, LaunchPlan, Relocation
from sandbox.verdict import (
    Correctness,
    Outcome,
    Ratio,
    Status,
    TensorCheck,
    Tier,
    Timing,
    Trust,
    Verdict,
    WorkloadTiming,
)  # fmt: skip
from targets.base import Floor, Options, Workload
from targets.reference import Expected, Tensors

N = 256
TARGET = f"{Path(__file__)}:Small"
SOURCE = '"""A small kernel."""\n'
TABLE = np.arange(N, dtype=np.float32)
BUFFERS = tuple(
    Buffer(n, "f32", (N,), align=16) for n in ("inputs.x", "weights.w", "states.s", "outputs.y", "outputs.copy")
)  # fmt: skip
OWN = (
    Buffer("workspace.packed", "f32", (N,), 16, "undefined", "persistent"),
    Buffer("workspace.acc", "f32", (N,), 16, "zero", "step"),
    Buffer("constants.table", "f32", (N,), 16),
)
STEP = (
    "inputs.x", "workspace.packed", "states.s", "workspace.acc", "outputs.y", "constants.table",
    "outputs.copy",
)  # fmt: skip


@dataclass(frozen=True)
class Small:
    name: str = TARGET
    summary: str = "small"
    presets: tuple[str, ...] = ("tiny",)
    reference: str = f"{Path(__file__)}:SmallReference"

    def seed_source(self) -> str:
        return SOURCE

    def workload(self, options: Options) -> Workload:
        return Workload(
            target=self.name, options=options, layers=1, rows=1, context=1, q=1, ranks=1, dims={"n": N},
            buffers=BUFFERS, floor=Floor(4 * N, 4 * N),
        )  # fmt: skip


class SmallReference:
    schedules = ("plain",)

    def _draw(self, seed: int, which: int) -> torch.Tensor:
        return torch.randn(N, generator=torch.Generator().manual_seed(seed * 7 + which))

    def weights(self, w: Workload, seed: int, device: str) -> Tensors:
        return {"weights.w": self._draw(seed, 0)}

    def states(self, w: Workload, seed: int, device: str) -> Tensors:
        return {"states.s": self._draw(seed, 1)}

    def inputs(self, w: Workload, seed: int, step: int, device: str) -> Tensors:
        return {"inputs.x": self._draw(seed, 2 + step)}

    def run(self, w: Workload, tensors: Tensors, schedule: str, forced: Any = None) -> Expected:
        kind = torch.float64 if schedule == "oracle" else torch.float32
        x, weight, s = (tensors[n].to(kind) for n in ("inputs.x", "weights.w", "states.s"))
        y = (x * 2 * weight + s).float()
        table = torch.from_numpy(TABLE.copy())
        return Expected(
            {"outputs.y": y, "states.s": y, "outputs.copy": table},
            exact=frozenset({"outputs.copy"}),
        )


def _ptx(name: str, pointers: int, body: str) -> str:
    params = ",\n".join(f"    .param .u64 p{i}" for i in range(pointers))
    loads = "".join(
        f"    ld.param.u64 %rd{i}, [p{i}];\n    add.s64 %rd{i}, %rd{i}, %rd20;\n"
        for i in range(pointers)
    )
    return (
        f".visible .entry {name}(\n{params}\n)\n{{\n    .reg .b32 %r<4>;\n    .reg .f32 %f<9>;\n"
        f"    .reg .b64 %rd<24>;\n    mov.u32 %r1, %tid.x;\n    mul.wide.u32 %rd20, %r1, 4;\n"
        f"{loads}{body}    ret;\n}}\n"
    )


PTX = ".version 8.8\n.target sm_90a\n.address_size 64\n\n" + _ptx(
    "pack", 2, "    ld.global.f32 %f1, [%rd0];\n    add.f32 %f1, %f1, %f1;\n    st.global.f32 [%rd1], %f1;\n"
) + _ptx(
    "small", 7,
    "    ld.global.f32 %f1, [%rd0];\n    ld.global.f32 %f2, [%rd1];\n    ld.global.f32 %f3, [%rd2];\n"
    "    ld.global.f32 %f4, [%rd3];\n    add.f32 %f4, %f4, %f1;\n    st.global.f32 [%rd3], %f4;\n"
    "    fma.rn.f32 %f5, %f4, %f2, %f3;\n    st.global.f32 [%rd4], %f5;\n    st.global.f32 [%rd2], %f5;\n"
    "    ld.global.f32 %f6, [%rd5];\n    st.global.f32 [%rd6], %f6;\n",
)  # fmt: skip


def _launch(kernel: str, names: tuple[str, ...]) -> Launch:
    offsets = tuple(8 * i for i in range(len(names)))
    relocations = tuple(Relocation(o, n) for o, n in zip(offsets, names, strict=True))
    return Launch(kernel, (1, 1, 1), (N, 1, 1), bytes(8 * len(names)), offsets, relocations)


def artifact() -> Artifact:
    return Artifact(
        target=TARGET, workload=Small().workload(Options("tiny", 1, 1, 1)).key, arch="sm_90a",
        buffers=(*BUFFERS, *OWN), step=LaunchPlan(PTX, (_launch("small", STEP),)),
        prepare=LaunchPlan(PTX, (_launch("pack", ("weights.w", "workspace.packed")),)),
        constants={"constants.table": TABLE.tobytes()}, source_sha256="0" * 64,
        toolchain={"cutlass_dsl": "4.8.1"},
    )  # fmt: skip


def verdict(a: Artifact, kind: str = "cuda") -> Verdict:
    w = a.workload
    row = WorkloadTiming(
        a.target, str(w["preset"]), int(w["layers"]), int(w["rows"]), 1, int(w["context"]), 1,
        len(a.step.launches), 10.0, 10.0, 1.0, 2048, 0.5, None, Ratio(1.5, 1.4, 1.6), Ratio(2.0, 1.9, 2.1),
        Ratio(1.2, 1.1, 1.3), "mix",
    )  # fmt: skip
    check = TensorCheck("outputs.y", 0.0, 1e-6, 0.0, 1e-6, 0.0, 1e-6, True)
    return Verdict(
        Status.PASSED, a.target, a.sha256, {"kind": kind, "name": "NVIDIA H200", "sms": 132}, Tier.PROMOTE,
        Trust.AUDITED, {"tier": "strict"}, "2026-01-02T03:04:05Z", outcome=Outcome.BETTER,
        correctness=Correctness(2, 3, 4, (check,), ("outputs.y",), ("rows 2",)),
        timing=Timing("measured", (row,)), checked=("guard zones",), not_verified=("two GPUs",),
    )  # fmt: skip


def record(
    folder: Path, made: Artifact, source: str, decided: str = "approve"
) -> tuple[Place, Queries, str]:
    """A run of one passed candidate, with a person's decision on it ('' for none)."""
    place = Place(folder / "runs.db", folder / "kernels_out")
    store, run = Store(place.db), new_run_id()
    store.add_run(
        RunRow(
            run,
            made.target,
            "optimize",
            "cuda",
            "scripted",
            "test-model",
            made.workload,
            {},
            {},
            "2026",
        )
    )
    artifact_store.save(made, place.workspace.artifacts)
    v = verdict(made)
    judged = JudgedRow(0, v, place.workspace.put_verdict(v), dict(made.tunables), made.sha256)
    store.add_candidates(run, [CandidateRow(
        0, 0, None, "scripted", "the seed", "", None, place.workspace.put(source), dict(made.tunables), {},
        made.sha256, v, "2026", judged=(judged,), artifacts=(made,),
    )])  # fmt: skip
    store.set_run(run, incumbent=0, state="done")
    queries = Queries(store, place.workspace)
    if decided:
        hashes = {"source": place.workspace.put(source), "artifact": made.sha256}
        store.add_review(run, 0, {"round": 0, "kind": decided, "reason": "read it all", "who": "Ada <ada@example.org>",
                                  "date": "2026-01-03T00:00:00Z", "hashes": hashes})  # fmt: skip
    return place, queries, run


def floats(address: int) -> Any:
    return np.frombuffer((ctypes.c_float * N).from_address(address), dtype=np.float32)


def run_small(p: list[int]) -> None:
    x, packed, s, acc, y, table, copy = (floats(a) for a in p)
    acc += x
    y[:] = acc * packed + s
    s[:] = y
    copy[:] = table


def run_pack(p: list[int]) -> None:
    floats(p[1])[:] = 2 * floats(p[0])


class FakeDriver:
    """The bundle's driver on host memory: reads parameters through the pointers, as the real one does."""

    def __init__(self, arch: str = "sm_90a", sms: int = 132, wrong: bool = False) -> None:
        self._arch, self._sms, self.wrong = arch, sms, wrong
        self.now = 7
        self.log: list[tuple[Any, ...]] = []
        self.allocations = 0

    def arch(self) -> str:
        return self._arch

    def sms(self) -> int:
        return self._sms

    def stream(self) -> int:
        return self.now

    def load(self, cubin: bytes) -> bytes:
        assert cubin[:4] == b"\x7fELF"
        return cubin

    def function(self, module: bytes, name: str, smem: int, cluster: int) -> str:
        assert b".text." + name.encode() in module
        self.log.append(("function", name, smem, cluster))
        return name

    def config(self, launch: Mapping[str, Any], pdl: bool) -> dict[str, Any]:
        return {**launch, "pdl": pdl, "stream": None}

    def set_stream(self, configs: list[dict[str, Any]], stream: int) -> None:
        for c in configs:
            c["stream"] = stream

    def launch(self, calls: list[tuple[dict[str, Any], str, int]]) -> None:
        for config, name, address in calls:
            count = len(config["param_offsets"])
            pointers = (ctypes.c_void_p * count).from_address(address)
            words = [ctypes.c_uint64.from_address(p).value for p in pointers]
            self.log.append(("launch", name, config["stream"], config["pdl"]))
            (run_small if name == "small" else run_pack)(words)
            if self.wrong and name == "small":
                floats(words[4])[3] += 1

    def clear(self, address: int, size: int, stream: int) -> None:
        self.log.append(("clear", size, stream))
        ctypes.memset(address, 0, size)


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(folder.read_text())
    return found
