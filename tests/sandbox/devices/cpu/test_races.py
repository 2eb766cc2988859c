"""Planted races, each found and named, and what is no race: barriers, counters, hand-overs by flags, rings."""

from __future__ import annotations

import pytest
import torch

from sandbox.devices.base import Refused
from sandbox.devices.cpu import fill
from sandbox.devices.cpu.device import CpuDevice
from tests.sandbox.devices.cpu.harness import Shape, kernel, rules, run

SMEM = ".extern .shared .align 16 .b8 sm[];"
REVERSE = """
mul.wide.u32 %rd1, %r99, 4; add.s64 %rd2, %rd100, %rd1; ld.global.b32 %r1, [%rd2];
mov.b32 %r2, sm; shl.b32 %r3, %r99, 2; add.s32 %r4, %r2, %r3; st.shared.b32 [%r4], %r1;
{barrier}
sub.s32 %r5, 508, %r3; add.s32 %r6, %r2, %r5; ld.shared.b32 %r7, [%r6]; st.global.b32 [%rd2], %r7; ret;
"""


def exact() -> CpuDevice:
    return CpuDevice(mode="exact")


@pytest.mark.parametrize(
    "barrier,expected", [("bar.sync 0;", set()), ("", {"race", "unwritten-read"})]
)
def test_a_missing_barrier_is_a_race_on_shared_memory(barrier: str, expected: set[str]) -> None:
    x = torch.arange(128, dtype=torch.int32)
    ran = run(
        kernel(REVERSE.format(barrier=barrier), "p", extra=SMEM),
        [x],
        Shape(block=(128, 1, 1), smem=512),
        device=exact(),
    )
    assert rules(ran) == expected


def test_the_race_report_names_both_instructions() -> None:
    x = torch.arange(128, dtype=torch.int32)
    ran = run(
        kernel(REVERSE.format(barrier=""), "p", extra=SMEM),
        [x],
        Shape(block=(128, 1, 1), smem=512),
        device=exact(),
    )
    race = next(f for f in ran.program.findings() if f.rule == "race")
    assert (
        "ld.shared.b32" in race.message
        and "st.shared.b32" in race.message
        and "shared memory byte" in race.message
    )


@pytest.mark.parametrize("how,races", [
    ("ld.global.u32 %r1, [%rd100]; add.u32 %r1, %r1, 1; st.global.u32 [%rd100], %r1;", True),
    ("atom.global.add.u32 %r1, [%rd100], 1;", False),
])  # fmt: skip
def test_a_race_on_a_counter_between_blocks(how: str, races: bool) -> None:
    x = torch.zeros(1, dtype=torch.int32)
    body = f"setp.ne.u32 %p1, %r99, 0; @%p1 bra E; {how} E: ret;"
    ran = run(kernel(body, "p"), [x], Shape(grid=(4, 1, 1)), device=exact())
    assert ("race" in rules(ran)) is races


PRODUCE = """
mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra CONSUME;
mul.wide.u32 %rd1, %r99, 4; add.s64 %rd2, %rd100, %rd1; st.global.u32 [%rd2], %r99;
bar.sync 0; setp.ne.u32 %p2, %r99, 0; @%p2 bra E; {signal} bra E;
CONSUME: setp.ne.u32 %p2, %r99, 0; @%p2 bra GO;
SPIN: {poll} setp.lt.u32 %p3, %r2, 1; @%p3 bra SPIN;
{after}
GO: bar.sync 0; mul.wide.u32 %rd1, %r99, 4; add.s64 %rd2, %rd100, %rd1; ld.global.u32 %r3, [%rd2];
add.s64 %rd3, %rd102, %rd1; st.global.u32 [%rd3], %r3;
E: ret;
"""


@pytest.mark.parametrize("signal,poll,after,races", [
    ("red.release.gpu.global.add.u32 [%rd101], 1;", "ld.acquire.gpu.global.b32 %r2, [%rd101];", "", False),
    ("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [%rd101], 1;", "ld.relaxed.gpu.global.b32 %r2, [%rd101];",
     "fence.acq_rel.gpu;", False),
    ("red.release.gpu.global.add.u32 [%rd101], 1;", "ld.relaxed.gpu.global.b32 %r2, [%rd101];", "", True),
    ("red.relaxed.gpu.global.add.u32 [%rd101], 1;", "ld.acquire.gpu.global.b32 %r2, [%rd101];", "", True),
])  # fmt: skip
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_data_handed_over_between_blocks(
    signal: str, poll: str, after: str, races: bool, seed: int
) -> None:
    data, flag, out = (torch.zeros(n, dtype=torch.int32) for n in (64, 1, 64))
    text = kernel(PRODUCE.format(signal=signal, poll=poll, after=after), "ppp")
    shape = Shape(grid=(2, 1, 1), block=(64, 1, 1), cooperative=True)
    ran = run(text, [data, flag, out], shape, device=CpuDevice(seed=seed, mode="exact"))
    assert torch.equal(out, torch.arange(64, dtype=torch.int32))
    assert ("race" in rules(ran)) is races


def test_a_stale_flag_lets_the_consumer_run_early() -> None:
    data, flag, out = (torch.zeros(n, dtype=torch.int32) for n in (64, 1, 64))
    flag.fill_(1)
    text = kernel(PRODUCE.format(signal="red.release.gpu.global.add.u32 [%rd101], 1;",
                                 poll="ld.acquire.gpu.global.b32 %r2, [%rd101];", after=""), "ppp")  # fmt: skip
    seen = set()
    for seed in range(6):
        data.zero_()
        flag.fill_(1)
        shape = Shape(grid=(2, 1, 1), block=(64, 1, 1), cooperative=True)
        ran = run(
            text, [data, flag, out], shape, device=CpuDevice(seed=seed, mode="exact"), undefined=[0]
        )
        seen |= rules(ran)
    assert {"race", "unwritten-read"} <= seen


FLAGS = """
mov.b32 %r1, 0; mul.wide.u32 %rd1, %r99, 64; add.s64 %rd2, %rd100, %rd1;
again: st.{order}.gpu.global.b32 [%rd2], %r99; add.s64 %rd2, %rd2, 4;
add.s32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 16; @%p1 bra again;
mov.b32 %r2, sm; shl.b32 %r3, %r99, 2; add.s32 %r4, %r2, %r3; st.shared.b32 [%r4], %r99;
bar.sync 0;
sub.s32 %r5, 4092, %r3; add.s32 %r6, %r2, %r5; ld.shared.b32 %r7, [%r6]; st.global.b32 [%rd101], %r7; ret;
"""


@pytest.mark.parametrize("order", ["relaxed", "release"])
def test_more_flags_than_the_race_check_has_room_for_are_no_races(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags without a fence order nothing and take no room; of others too many are a refusal, not a false alarm."""
    monkeypatch.setattr(fill, "MOST_OBJECTS", 0)
    flags, out = torch.zeros(1024 * 16, dtype=torch.int32), torch.zeros(1024, dtype=torch.int32)
    text = kernel(FLAGS.format(order=order), "pp", extra=SMEM).replace(
        "st.global.b32 [%rd101]",
        "mul.wide.u32 %rd3, %r99, 4; add.s64 %rd4, %rd101, %rd3; st.global.b32 [%rd4]",
    )
    shape = Shape(block=(1024, 1, 1), smem=4096)
    if order == "release":
        with pytest.raises(Refused, match="cannot follow over 8192 barriers and flags"):
            run(text, [flags, out], shape, device=exact())
        return
    assert rules(run(text, [flags, out], shape, device=exact())) == set()
    assert out.tolist() == list(range(1023, -1, -1))


RING = """
mov.b32 %r1, sm; add.s32 %r2, %r1, 128; add.s32 %r3, %r1, 136;
setp.ne.u32 %p1, %r99, 0; @%p1 bra A;
mbarrier.init.shared.b64 [%r2], 1; mbarrier.init.shared.b64 [%r3], 32;
A: bar.sync 0; setp.ge.u32 %p2, %r99, 32; @%p2 bra CONSUME; @%p1 bra E;
mov.b32 %r4, 0;
P: setp.eq.u32 %p3, %r4, 0; @%p3 bra F; sub.s32 %r5, %r4, 1; and.b32 %r5, %r5, 1;
WE: mbarrier.try_wait.parity.shared.b64 %p4, [%r3], %r5; @!%p4 bra WE;
F: mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128;
mul.wide.u32 %rd1, %r4, 128; add.s64 %rd2, %rd100, %rd1;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd2], 128, [%r2];
add.s32 %r4, %r4, 1; setp.lt.u32 %p5, %r4, 4; @%p5 bra P; bra E;
CONSUME: mov.b32 %r6, 0; sub.s32 %r7, %r99, 32; shl.b32 %r8, %r7, 2; add.s32 %r9, %r1, %r8; mov.b32 %r10, 0;
C: and.b32 %r11, %r6, 1; {full} {early}
ld.shared.b32 %r12, [%r9]; add.s32 %r10, %r10, %r12; {late}
add.s32 %r6, %r6, 1; setp.lt.u32 %p7, %r6, 4; @%p7 bra C;
mul.wide.u32 %rd3, %r7, 4; add.s64 %rd4, %rd101, %rd3; st.global.b32 [%rd4], %r10;
E: ret;
"""

FULL = "WF: mbarrier.try_wait.parity.shared.b64 %p6, [%r2], %r11; @!%p6 bra WF;"

EMPTY = "mbarrier.arrive.shared.b64 %rd5, [%r3];"


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("early,late,races", [("", EMPTY, False), (EMPTY, "", True)],
                         ids=["in order", "given back before it is read"])  # fmt: skip
def test_a_stage_of_a_ring_between_bulk_copies_and_readers(
    early: str, late: str, races: bool, seed: int
) -> None:
    """Ordered by its two mbarriers alone: neither numbers nor a barrier of the block would show it reused early."""
    x, out = torch.arange(128, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    text = kernel(
        RING.format(full=FULL, early=early, late=late), "pp", extra=SMEM.replace("16", "128")
    )
    device = CpuDevice(seed=seed, mode="exact")
    ran = run(text, [x, out], Shape(block=(64, 1, 1), smem=256), device=device)
    assert ("race" in rules(ran)) is races
    if not races:
        assert out.tolist() == x.view(4, 32).sum(0).tolist()
