"""The seeds on two ranks, judged on the cpu device: right in every protocol, and planted mistakes are caught."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from sandbox.compile_client import CompileClient
from sandbox.devices.cpu import CpuDevice
from sandbox.jobs import CompileJob, JudgeJob
from sandbox.judge import judge
from sandbox.judge.case import open_case
from sandbox.judge.checks import Checker, Moment
from sandbox.judge.locate import Where
from sandbox.verdict import Status, Tier, Verdict
from targets.base import Options, Scalar, find
from targets.kimi_k3 import seeds
from targets.kimi_k3.planted.peers import peers
from targets.kimi_k3.seeds import persistent

SIZE = Options("tiny-tp2", 3, 2)


def judged(
    compiler: CompileClient,
    target: str,
    source: str,
    tunables: Mapping[str, Scalar],
    options: Options = SIZE,
) -> Verdict:
    torch.set_num_threads(1)
    w = find(target).workload(options)
    job = CompileJob(source, target, w.key, w.dims, w.buffers, tunables=tunables)
    found = compiler.compile(job)
    assert found.artifact is not None, found.failure
    fields = {
        "preset": options.preset,
        "layers": options.layers,
        "rows": options.rows,
        "extra": dict(options.extra),
    }
    return judge.run(
        JudgeJob(found.artifact, target, fields, "cpu", Tier.SCREEN, seed=7), CpuDevice()
    )


def test_the_seed_passes(compiler: CompileClient) -> None:
    target = "kimi-k3-allreduce-attn-res"
    verdict = judged(compiler, target, find(target).seed_source(), {})
    assert verdict.status is Status.PASSED, verdict.failure
    said = " ".join(verdict.checked)
    assert "steps with the ranks apart in time" in said and "same bits on all of them" in said
    assert "without rank 0: hang (deadlock); without rank 1: hang (deadlock)" in said
    assert verdict.timing is not None and verdict.timing.workloads[0].launches == 3
    assert not verdict.findings


@pytest.mark.slow
@pytest.mark.parametrize("p", peers(), ids=lambda p: p.name)
def test_planted(compiler: CompileClient, p) -> None:  # type: ignore[no-untyped-def]
    verdict = judged(compiler, p.target, p.text(), p.tunables, p.options)
    if p.kind == "good":
        assert verdict.status is Status.PASSED, verdict.failure
    else:
        assert str(verdict.status) in p.expect, verdict.failure


def test_ranks_that_hold_other_bits_are_wrong() -> None:
    """Inside the noise band on each rank, but not the same on both."""
    torch.set_num_threads(1)
    target = "kimi-k3-allreduce-attn-res"
    fields = {"preset": "tiny-tp2", "layers": 2, "rows": 1}
    case = open_case(JudgeJob(None, target, fields, "cpu", seed=3), CpuDevice())  # type: ignore[arg-type]
    r, w = case.reference, case.workload
    given = {**r.weights(w, 1, "cpu"), **r.inputs(w, 1, 0, "cpu")}
    after = dict(r.run(w, given, "oracle").tensors)
    before = {n: torch.zeros_like(t) for n, t in after.items()}
    m = Moment(given, before, after, Where(0, 0, "test", case.axes))
    assert Checker(case).check(m) is None
    nudged = after["outputs.y.1@1"].clone()
    nudged[0, 5] = torch.nextafter(nudged[0, 5], nudged[0, 5] * 2)
    failure = Checker(case).check(replace(m, after={**after, "outputs.y.1@1": nudged}))
    assert failure is not None and failure.rule == "ranks-differ"
    assert failure.where["tensor"] == "outputs.y.1" and failure.where["rank"] == 1


STACK = seeds.source("kimi-k3-oproj-stack")


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "more"), [(1, {"eager": True}), (8, {})])
def test_one_launch_for_all_instances_passes(
    compiler: CompileClient, rows: int, more: Mapping[str, Scalar]
) -> None:
    """The variant `oproj-stack`: as many launches a step as there are ranks, the columns of a row on six CTAs."""
    options = replace(SIZE, rows=rows)
    verdict = judged(compiler, "kimi-k3-oproj-allreduce", STACK, {"ctas": 6, **more}, options)
    assert verdict.status is Status.PASSED, verdict.failure
    assert verdict.timing is not None and verdict.timing.workloads[0].launches == 1


HIGH = ("BIT = 1\n", "BIT = 1 << 9\n")
"""The step's bit of words between CTAs, where it counts: 2^-15 of a value instead of 2^-24."""


@pytest.mark.slow
@pytest.mark.parametrize("taken_off", [True, False])
def test_even_steps_of_the_one_launch_chain_leave_the_bits_of_odd_ones(
    compiler: CompileClient, taken_off: bool
) -> None:
    """With the bit in its lowest place a step in a few changes an element by a rounding: at sizes that are not tiny."""
    kept = (
        "    return (word & Uint32(REST)).bitcast(Float32)\n",
        "    return word.bitcast(Float32)\n",
    )
    source = STACK
    for old, new in (HIGH,) if taken_off else (HIGH, kept):
        assert source.count(old) == 1
        source = source.replace(old, new)
    verdict = judged(compiler, "kimi-k3-oproj-allreduce", source, {"ctas": 6})
    assert verdict.status is (Status.PASSED if taken_off else Status.FLAKY), verdict.failure


MISTAKES = {
    "words of the step before are taken": (
        "    return (wrong & Uint32(BIT)) != Uint32(0)\n", "    return wrong > Uint32(0xFFFFFFFF)\n",
    ),
    "the number of the step stays": (
        "post_word(boxes.epochs.iterator.toint(), c.flag)", "post_word(boxes.epochs.iterator.toint(), c.flag - 1)",
    ),
    "the other rank's partial is not awaited": (
        "        while seen != flag:\n", "        while seen > Uint32(0xFFFFFFFE):\n",
    ),
    "columns change places between the ranks": (
        "store_pair(mail_at(c.peer, c, n, i, op)", "store_pair(mail_at(c.peer, c, n, i ^ 1, op)",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_the_one_launch_chain_are_caught(compiler: CompileClient, name: str) -> None:
    old, new = MISTAKES[name]
    assert STACK.count(old) == 1
    source = STACK.replace(old, new)
    verdict = judged(compiler, "kimi-k3-oproj-allreduce", source, {"ctas": 6})
    assert verdict.status in (Status.WRONG, Status.FLAKY, Status.HANG), verdict.failure


@pytest.mark.slow
def test_the_stack_of_two_ranks_passes(compiler: CompileClient) -> None:
    """kimi-k3-decode in mode peer2: five exchanges a layer, states on both ranks."""
    options = replace(SIZE, layers=4, extra={"mode": "peer2"})
    source = find("kimi-k3-decode").seed_source()
    verdict = judged(compiler, "kimi-k3-decode", source, {}, options)
    assert verdict.status is Status.PASSED, verdict.failure
    assert verdict.correctness is not None
    names = {t.name for t in verdict.correctness.tensors}
    assert {"outputs.out", "outputs.out@1", "states.layers.3.kv@1"} <= names


@pytest.mark.slow
def test_the_persistent_step_of_two_ranks_passes(compiler: CompileClient) -> None:
    """One launch a rank for a dense layer and one with experts, with every exchange inside."""
    options = replace(SIZE, layers=2, rows=1, extra={"mode": "peer2"})
    verdict = judged(compiler, "kimi-k3-decode", persistent.source(), {"ctas": 4}, options)
    assert verdict.status is Status.PASSED, verdict.failure
    assert verdict.timing is not None and verdict.timing.workloads[0].launches == 1
    said = " ".join(verdict.checked)
    assert "without rank 0: hang (deadlock); without rank 1: hang (deadlock)" in said


@pytest.mark.slow
def test_a_persistent_step_that_counts_no_steps_is_caught(compiler: CompileClient) -> None:
    """What an earlier step left in the inbox looks new."""
    source, old = persistent.source(), "= c.base[STEPS] + 1\n"
    assert source.count(old) == 1
    options = replace(SIZE, layers=2, rows=1, extra={"mode": "peer2"})
    wrong = source.replace(old, "= c.base[STEPS]\n")
    verdict = judged(compiler, "kimi-k3-decode", wrong, {"ctas": 4}, options)
    assert verdict.status in (Status.WRONG, Status.FLAKY, Status.HANG), verdict.failure
