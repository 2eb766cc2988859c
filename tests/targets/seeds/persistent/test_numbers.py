"""Persistent candidates against the reference on the cpu device: prepared once, then step after step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sandbox import artifact_store
from sandbox.artifact import Artifact
from sandbox.compile_client import CompileClient
from sandbox.devices.cpu.device import CpuDevice
from sandbox.jobs import CompileJob
from targets.kimi_k3 import sizes
from targets.kimi_k3.reference import IDS
from targets.kimi_k3.seeds import persistent
from tests.targets.seeds.harness import REFERENCE, Case, Step, check, distance, placed


def built(compiler: CompileClient, case: Case, part: str = "") -> Artifact:
    w = case.workload()
    text = persistent.source(part or case.part)
    job = CompileJob(text, case.target, w.key, w.dims, w.buffers, "sm_90a", case.tunables)
    outcome = compiler.compile(job)
    assert outcome.failure is None and outcome.artifact, outcome.failure
    return artifact_store.load(outcome.artifact)


def verify(artifact: Artifact, case: Case, seed: int = 5) -> None:
    """Each step beside the oracle; what is persistent goes on from step to step, as boxes and counters must."""
    torch.set_num_threads(1)
    w = case.workload()
    program = CpuDevice().load(artifact)
    values = {**REFERENCE.weights(w, seed, "cpu"), **REFERENCE.states(w, seed, "cpu")}
    kept = [b for b in artifact.buffers if b.lifetime == "persistent"]
    lasting = {b.name: torch.zeros(b.shape, dtype=torch.int32) for b in kept if b.init == "zero"}
    unwritten = frozenset(b.name for b in artifact.buffers if b.group in ("workspace", "outputs"))
    for number in range(case.steps):
        values |= REFERENCE.inputs(w, seed, number, "cpu")
        got = placed(artifact, {**values, **lasting})
        if number == 0:
            program.bind("prepare", got, unwritten).launch()
        program.bind("step", got, unwritten - set(lasting)).launch()
        forced = {IDS: got[IDS]} if IDS in got else None
        oracle = REFERENCE.run(w, values, "oracle", forced)
        runs = [REFERENCE.run(w, values, s, forced).tensors for s in REFERENCE.schedules]
        floats = {n: x for n, x in oracle.tensors.items() if x.is_floating_point()}
        band = {n: max(distance(r[n], x) for r in runs) for n, x in floats.items()}
        check(Step(values, got, oracle, band, program.findings()))
        lasting = {b.name: got[b.name] for b in kept}
        values = {**values, **{n: got[n] for n in values if n.startswith("states.")}}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["latent-moe", "kda", "decode"])
def test_two_steps_in_a_row(compiler: CompileClient, part: str) -> None:
    """An odd number of instances, so that the boxes change halves from step to step; the fourth layer has MLA."""
    layers = 5 if part == "decode" else 3
    case = Case(part, preset="tiny-tp2", layers=layers, steps=2, tunables={"ctas": 4})
    verify(built(compiler, case), case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "extra"),
    [
        (4, {"ctas": 12, "tile_stages": 3, "in_flight": 2}),
        (8, {"ctas": 4, "tile_stages": 2, "tile_bytes": 14336}),
        (2, {"ctas": 8, "tile_stages": 4, "in_flight": 0, "tile_warps": 8}),
    ],
    ids=["unequal", "cut", "eight-warps"],
)
def test_several_tokens_two_steps_in_a_row(
    compiler: CompileClient, rows: int, extra: dict[str, int]
) -> None:
    """Some of eight columns of the tensor-core products are tokens; CTAs have unequal rows and parts of a head (12), a
    token's state rows do not fit in a stage (14336 bytes), or those of several do.
    """
    case = Case("kda", rows=rows, preset="tiny-tp2", layers=3, steps=2, tunables=extra)
    verify(built(compiler, case), case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "ctas", "packed"), [(1, 4, 1), (1, 4, 0), (8, 8, 1), (8, 4, 0), (2, 16, 1)]
)
def test_tiles_of_the_latent_moe(
    compiler: CompileClient, rows: int, ctas: int, packed: int
) -> None:
    """One token has boxes without fences and a warp that routes; several share experts, and each its own routing. Eight
    CTAs have two tiles of w2 each, which warps take by turns. Codes lie as they are or as `prepare` packs them.
    """
    tunables = {"ctas": ctas, "packed": packed}
    case = Case("latent-moe", rows, "tiny-tp2", layers=3, steps=2, tunables=tunables)
    artifact = built(compiler, case, "latent-moe-tiles")
    verify(artifact, case)
    ptx = artifact.step.ptx
    if rows > 1:  # behind a fence, but for experts' two stages; one arrival tells of the routing
        fences = ptx.count("fence.proxy.async.shared::cta")
        assert fences == ptx.count("mbarrier.arrive.shared") - 3


def races(artifact: Artifact, case: Case, order: int) -> list[str]:
    """What a step shows that has every access followed, in that order of blocks and warps."""
    torch.set_num_threads(1)
    w = case.workload()
    program = CpuDevice(order, "exact").load(artifact)
    values = {**REFERENCE.weights(w, 5, "cpu"), **REFERENCE.states(w, 5, "cpu")}
    kept = [b for b in artifact.buffers if b.lifetime == "persistent"]
    zeros = {b.name: torch.zeros(b.shape, dtype=torch.int32) for b in kept if b.init == "zero"}
    got = placed(artifact, {**values, **zeros, **REFERENCE.inputs(w, 5, 0, "cpu")})
    unwritten = frozenset(b.name for b in artifact.buffers if b.group in ("workspace", "outputs"))
    program.bind("prepare", got, unwritten).launch()
    program.bind("step", got, unwritten - set(zeros)).launch()
    return [f.message for f in program.findings() if f.rule == "race"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "rows", "orders"),
    [
        ("kda", 1, (1, 2)),
        ("kda", 2, (1,)),
        ("kda", 8, (2,)),
        ("latent-moe-tiles", 1, (1, 2)),
        ("latent-moe-tiles", 8, (2,)),
    ],
)
def test_what_boxes_do_not_order_does_not_race(
    compiler: CompileClient, part: str, rows: int, orders: tuple[int, ...]
) -> None:
    """Boxes and hints order nothing but themselves: taps and counters move after the last edge, which does, and who
    routes is told by its own CTA that the last routing is used. Of tokens that want the same expert one lists it.
    """
    target = part.removesuffix("-tiles")
    stages = {"tile_stages": 2, "tile_bytes": 14336} if part == "kda" else {}
    case = Case(target, rows, preset="tiny", layers=2, steps=1, tunables={"ctas": 4, **stages})
    artifact = built(compiler, case, part)
    assert all(races(artifact, case, order) == [] for order in orders)


@pytest.mark.slow
def test_a_thread_may_have_several_vectors_of_kda_output(
    compiler: CompileClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty heads are 480 vectors of eight columns for 448 threads, as are the 48 of a rank of `tp2`."""
    tiny = sizes.PRESETS["tiny"]
    wide = replace(tiny, sizes=replace(tiny.sizes, kda_heads=30))
    monkeypatch.setitem(sizes.PRESETS, "wide", wide)
    case = Case("kda", preset="wide", layers=1, tunables={"ctas": 32, "ring_stages": 3})
    verify(built(compiler, case), case)
