"""What threads of several warps and blocks do together: atomics, asynchronous copies, clusters, grid barriers."""

# ruff: noqa: E501  (PTX and tables read better with one thought a line)

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sandbox.devices.base import Refused
from sandbox.devices.cpu.device import CpuDevice
from tests.sandbox.devices.cpu.harness import Shape, artifact, kernel, run
from tests.sandbox.devices.cpu.operands import LOADS

SMEM = ".extern .shared .align 128 .b8 sm[];"


@pytest.mark.parametrize("op,start,values,want", [
    ("add.u32", 5, list(range(32)), 5 + 496), ("max.s32", -7, [-i for i in range(32)], 0),
    ("min.u32", 100, list(range(40, 72)), 40), ("and.b32", -1, [~(1 << i) for i in range(32)], 0),
    ("or.b32", 0, [1 << (i % 31) for i in range(32)], 0x7FFFFFFF), ("xor.b32", 3, [7] * 32, 3),
    ("inc.u32", 30, [30] * 32, 0), ("dec.u32", 0, [40] * 32, 9), ("exch.b32", 1, [9] * 32, 9),
])  # fmt: skip
def test_atomics(op: str, start: int, values: list[int], want: int) -> None:
    x = torch.tensor(values).to(torch.int32)
    acc = torch.tensor([start], dtype=torch.int32)
    run(kernel(f"{LOADS} atom.global.{op} %r2, [%rd101], %r1; ret;", "pp"), [x, acc])
    assert int(acc) == want


def test_cas_loop_locks_out_other_lanes_and_blocks() -> None:
    lock, count = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    body = """
    L: atom.global.acquire.gpu.cas.b32 %r1, [%rd100], 0, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra L;
    ld.global.u32 %r2, [%rd101]; add.u32 %r2, %r2, 1; st.global.u32 [%rd101], %r2;
    atom.global.release.gpu.exch.b32 %r3, [%rd100], 0; ret;
    """
    ran = run(
        kernel(body, "pp"),
        [lock, count],
        Shape(grid=(3, 1, 1), block=(64, 1, 1)),
        device=CpuDevice(mode="exact", seed=3),
    )
    assert int(count) == 192 and int(lock) == 0
    assert ran.program.findings() == ()


def test_float_and_vector_reductions() -> None:
    acc = torch.zeros(4)
    body = """
    cvt.rn.f32.u32 %r1, %r99; mov.b32 %r2, 0f3F800000;
    red.global.add.v4.f32 [%rd100], {%r1, %r2, %r1, %r2}; red.relaxed.gpu.global.add.f32 [%rd100+4], %r2; ret;
    """
    run(kernel(body, "p"), [acc])
    assert acc.tolist() == [496.0, 64.0, 496.0, 32.0]


@pytest.mark.parametrize("wait,complete", [(0, True), (1, False)])
@pytest.mark.parametrize("seed", [0, 1])
def test_cp_async_groups_land_when_waited_for(wait: int, complete: bool, seed: int) -> None:
    x, out = torch.arange(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    body = f"""
    shl.b32 %r1, %r99, 4; mov.b32 %r2, sm; add.u32 %r3, %r2, %r1; cvt.u64.u32 %rd1, %r1; add.s64 %rd2, %rd100, %rd1;
    cp.async.cg.shared.global [%r3], [%rd2], 16; cp.async.commit_group; cp.async.wait_group {wait};
    ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r3]; add.s64 %rd3, %rd101, %rd1;
    st.global.v4.b32 [%rd3], {{%r4, %r5, %r6, %r7}}; ret;
    """
    ran = run(
        kernel(body, "pp", extra=SMEM), [x, out], Shape(smem=512), device=CpuDevice(seed=seed)
    )
    if complete:
        assert torch.equal(out, x) and ran.program.findings() == ()
    elif seed == 0:  # copies complete as late as allowed
        assert [f.rule for f in ran.program.findings()] == ["unwritten-read"]


RING = """
mov.b32 %r1, sm; setp.ne.u32 %p1, %r99, 0; @%p1 bra A;
mbarrier.init.shared.b64 [%r1], 1; mbarrier.init.shared.b64 [%r1+8], 1; mbarrier.init.shared.b64 [%r1+16], 2;
mbarrier.init.shared.b64 [%r1+24], 2; fence.mbarrier_init.release.cluster; A: bar.sync 0;
shr.u32 %r2, %r99, 5; setp.eq.u32 %p2, %r2, 2; mov.b32 %r3, 0; mov.b32 %r20, 0; @!%p2 bra CONSUME;
and.b32 %r4, %r99, 31; setp.ne.u32 %p3, %r4, 0; @%p3 bra E;
P: and.b32 %r5, %r3, 1; shl.b32 %r6, %r5, 3; add.u32 %r7, %r1, %r6; shr.u32 %r8, %r3, 1; and.b32 %r8, %r8, 1; xor.b32 %r9, %r8, 1;
PW: mbarrier.try_wait.parity.shared.b64 %p4, [%r7+16], %r9; @!%p4 bra PW;
mov.b32 %r10, 256; mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r7], %r10;
shl.b32 %r11, %r5, 8; add.u32 %r12, %r1, %r11; add.u32 %r12, %r12, 128; mul.wide.u32 %rd2, %r3, 256; add.s64 %rd3, %rd100, %rd2;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r12], [%rd3], %r10, [%r7];
add.u32 %r3, %r3, 1; setp.lt.u32 %p5, %r3, 8; @%p5 bra P; bra E;
CONSUME:
C: and.b32 %r5, %r3, 1; shl.b32 %r6, %r5, 3; add.u32 %r7, %r1, %r6; shr.u32 %r8, %r3, 1; and.b32 %r8, %r8, 1;
CW: mbarrier.try_wait.parity.shared.b64 %p4, [%r7], %r8; @!%p4 bra CW;
shl.b32 %r11, %r5, 8; add.u32 %r12, %r1, %r11; shl.b32 %r13, %r99, 2; add.u32 %r12, %r12, %r13; ld.shared.b32 %r14, [%r12+128];
add.u32 %r20, %r20, %r14; bar.warp.sync -1; and.b32 %r4, %r99, 31; setp.ne.u32 %p3, %r4, 0; @%p3 bra D;
{arrive}
D: add.u32 %r3, %r3, 1; setp.lt.u32 %p5, %r3, 8; @%p5 bra C;
mul.wide.u32 %rd4, %r99, 4; add.s64 %rd5, %rd101, %rd4; st.global.b32 [%rd5], %r20;
E: ret;
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_ring_of_bulk_copies(seed: int) -> None:
    x, out = (
        torch.randint(0, 1 << 20, (8, 64), dtype=torch.int32),
        torch.zeros(64, dtype=torch.int32),
    )
    text = kernel(
        RING.format(arrive="mbarrier.arrive.shared.b64 %rd6, [%r7+16];"), "pp", extra=SMEM
    )
    ran = run(
        text,
        [x, out],
        Shape(block=(96, 1, 1), smem=1024),
        device=CpuDevice(seed=seed, mode="exact"),
    )
    assert torch.equal(out, x.sum(0, dtype=torch.int32)) and ran.program.findings() == ()


@pytest.mark.parametrize(
    "barrier,clean",
    [("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", True), ("", False)],
)
def test_distributed_shared_memory(barrier: str, clean: bool) -> None:
    out = torch.zeros(4, 32, dtype=torch.int32)
    body = f"""
    mov.u32 %r1, %cluster_ctarank; mov.b32 %r2, sm; shl.b32 %r3, %r99, 2; add.u32 %r4, %r2, %r3;
    add.u32 %r5, %r1, 1; and.b32 %r5, %r5, 3; mapa.shared::cluster.u32 %r6, %r4, %r5;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mad.lo.u32 %r7, %r1, 100, %r99; st.shared::cluster.b32 [%r6], %r7;
    {barrier}
    ld.shared.b32 %r8, [%r4]; mul.lo.u32 %r9, %r1, 128; add.u32 %r9, %r9, %r3; cvt.u64.u32 %rd1, %r9;
    add.s64 %rd2, %rd100, %rd1; st.global.b32 [%rd2], %r8; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ret;
    """
    ran = run(kernel(body, "p", extra=SMEM), [out], Shape(grid=(4, 1, 1), cluster=(4, 1, 1), smem=128),
              device=CpuDevice(mode="exact"))  # fmt: skip
    if clean:
        want = torch.tensor(
            [[(r - 1) % 4 * 100 + i for i in range(32)] for r in range(4)], dtype=torch.int32
        )
        assert torch.equal(out, want) and ran.program.findings() == ()
    else:
        assert "race" in {f.rule for f in ran.program.findings()}


GRID = """
mov.b32 %r10, 0; mov.b32 %r11, 0; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x;
L: mad.lo.s32 %r3, %r1, 32, %r99; mul.wide.u32 %rd1, %r3, 4; add.s64 %rd2, %rd100, %rd1; ld.global.b32 %r4, [%rd2];
add.u32 %r4, %r4, 1; add.u32 %r5, %r3, 32; mul.lo.u32 %r6, %r2, 32; rem.u32 %r5, %r5, %r6; mul.wide.u32 %rd3, %r5, 4;
bar.sync 0; setp.ne.u32 %p1, %r99, 0; @%p1 bra W; atom.global.release.gpu.add.u32 %r7, [%rd101], 1;
add.u32 %r11, %r11, %r2;
S: ld.acquire.gpu.global.b32 %r8, [%rd101]; setp.lt.u32 %p2, %r8, %r11; @%p2 bra S;
W: bar.sync 0; add.s64 %rd4, %rd100, %rd3; st.global.b32 [%rd4], %r4;
bar.sync 0; @%p1 bra W2; atom.global.release.gpu.add.u32 %r7, [%rd101], 1; add.u32 %r11, %r11, %r2;
S2: ld.acquire.gpu.global.b32 %r8, [%rd101]; setp.lt.u32 %p2, %r8, %r11; @%p2 bra S2;
W2: bar.sync 0; add.u32 %r10, %r10, 1; setp.lt.u32 %p3, %r10, 7; @%p3 bra L; ret;
"""


@pytest.mark.parametrize("seed", [0, 5, 8])
def test_grid_barriers_of_a_persistent_kernel(seed: int) -> None:
    x, counter = torch.arange(6 * 32, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    ran = run(
        kernel(GRID, "pp"),
        [x, counter],
        Shape(grid=(6, 1, 1), cooperative=True),
        device=CpuDevice(seed=seed, mode="exact"),
    )
    assert torch.equal(x, torch.roll(torch.arange(6 * 32, dtype=torch.int32), 7 * 32) + 7)
    assert int(counter) == 84 and ran.program.findings() == ()


def test_local_memory_and_generic_addresses() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    body = """
    .local .align 16 .b8 depot[64]; .reg .b64 %SP, %SPL; mov.b64 %SPL, depot; cvta.local.u64 %SP, %SPL;
    and.b32 %r1, %r99, 7; mul.wide.u32 %rd1, %r1, 4; add.s64 %rd2, %SP, %rd1; st.b32 [%rd2], %r99;
    add.s64 %rd3, %SPL, %rd1; ld.local.b32 %r2, [%rd3]; mul.wide.u32 %rd4, %r99, 4; add.s64 %rd5, %rd100, %rd4;
    st.b32 [%rd5], %r2; ret;
    """
    run(kernel(body, "p"), [out])
    assert out.tolist() == list(range(32))


def test_modelled_time_is_deterministic_and_grows_with_bytes() -> None:
    times = []
    for n in (1 << 12, 1 << 18, 1 << 18):
        x = torch.zeros(n, dtype=torch.float32)
        body = """
        mov.u32 %r1, %ctaid.x; mad.lo.s32 %r2, %r1, 256, %r99; mul.wide.u32 %rd1, %r2, 16; add.s64 %rd2, %rd100, %rd1;
        ld.global.v4.f32 {%r3, %r4, %r5, %r6}, [%rd2]; st.global.v4.f32 [%rd2], {%r4, %r3, %r6, %r5}; ret;
        """
        ran = run(kernel(body, "p"), [x], Shape(grid=(n // 1024, 1, 1), block=(256, 1, 1)))
        times.append(ran.bound.modelled_us())
    assert times[0] is not None and times[0] < times[1] == times[2]  # type: ignore[operator]


def test_plans_that_hardware_refuses_are_refused() -> None:
    x = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(Refused) as e:
        run(kernel("ret;", "p"), [x], Shape(grid=(3, 1, 1), cluster=(2, 1, 1)))
    assert e.value.failure.rule == "cluster-size"
    with pytest.raises(Refused) as e:
        run(kernel("ret;", "p").replace("{\n.reg", "\n.reqntid 64, 1, 1\n{\n.reg"), [x])
    assert e.value.failure.rule == "block-size"


WAITS = """
mul.wide.u32 %rd1, %r99, 4; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x; sub.u32 %r2, %r2, 1;
setp.ne.u32 %p1, %r1, %r2; @%p1 bra $S; st.relaxed.gpu.global.b32 [%rd100], 1;
$S:
ld.relaxed.gpu.global.b32 %r3, [%rd100]; setp.eq.u32 %p2, %r3, 0; @%p2 bra $S; ret;
"""


@pytest.mark.parametrize(
    ("blocks", "early", "rule"),
    [
        (264, True, None), (265, True, "co-residency"), (264, False, "spin-not-cooperative"), (1, False, None),
    ],
)  # fmt: skip
def test_blocks_that_wait_for_each_other_are_on_the_device_at_once(
    blocks: int, early: bool, rule: str | None
) -> None:
    """All wait for the last one; two of them fit on each of the 132 SMs."""
    x = torch.zeros(32, dtype=torch.int32)
    a = artifact(kernel(WAITS, "p", extra=SMEM), [x], Shape(grid=(blocks, 1, 1), smem=100 << 10))
    launches = tuple(replace(y, pdl=early) for y in a.step.launches)
    a = replace(a, step=replace(a.step, launches=launches))
    if rule is not None:
        with pytest.raises(Refused) as refused:
            CpuDevice().load(a)
        assert refused.value.failure.rule == rule
        return
    CpuDevice().load(a).bind("step", {"workspace.b0": x}).launch()
    assert int(x[0]) == 1
