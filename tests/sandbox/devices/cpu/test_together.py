"""What threads do together: votes, reductions, matrices, atomics, asynchronous copies, clusters, grid barriers."""

# ruff: noqa: E501  (PTX and tables read better with one thought a line)

from __future__ import annotations

import pytest
import torch

from sandbox.devices.base import Refused
from sandbox.devices.cpu.device import CpuDevice
from tests.sandbox.devices.cpu.harness import Shape, kernel, run

SMEM = ".extern .shared .align 128 .b8 sm[];"
LOADS = "mul.wide.u32 %rd1, %r99, 4; add.s64 %rd2, %rd100, %rd1; ld.global.b32 %r1, [%rd2];"


def lanes(code: str, x: torch.Tensor) -> list[int]:
    """Result %r2 of each lane for its input %r1."""
    out = x.clone()
    run(kernel(f"{LOADS} {code} st.global.b32 [%rd2], %r2; ret;", "p"), [out])
    return [v & 0xFFFFFFFF for v in out.tolist()]


def test_votes_matches_and_elections() -> None:
    x = torch.tensor([i * i % 7 for i in range(32)], dtype=torch.int32)
    v = x.tolist()
    ballot = sum(1 << i for i in range(32) if v[i] > 2)
    p = "setp.gt.s32 %p1, %r1, 2;"
    assert lanes(f"{p} vote.sync.ballot.b32 %r2, %p1, -1;", x) == [ballot] * 32
    assert lanes(f"{p} vote.sync.all.pred %p2, %p1, -1; selp.b32 %r2, 1, 0, %p2;", x) == [0] * 32
    assert lanes(f"{p} vote.sync.any.pred %p2, %p1, -1; selp.b32 %r2, 1, 0, %p2;", x) == [1] * 32
    assert lanes("match.any.sync.b32 %r2, %r1, -1;", x) == [
        sum(1 << j for j in range(32) if v[j] == w) for w in v
    ]
    assert lanes("elect.sync %r2|%p1, -1; selp.b32 %r2, 100, %r2, %p1;", x) == [100] + [0] * 31


@pytest.mark.parametrize("op,f", [("add.s32", sum), ("min.s32", min), ("max.s32", max)])
def test_redux(op: str, f: object) -> None:
    x = torch.randint(-1000, 1000, (32,), dtype=torch.int32)
    assert lanes(f"redux.sync.{op} %r2, %r1, -1;", x) == [f(x.tolist()) & 0xFFFFFFFF] * 32  # type: ignore[operator]


def test_half_a_warp_reduces_while_the_other_half_does_not() -> None:
    x = torch.arange(32, dtype=torch.int32)
    code = """
    mov.b32 %r2, %r1; setp.ge.u32 %p1, %r99, 16; @%p1 bra SKIP;
    shfl.sync.bfly.b32 %r3, %r2, 8, 31, 65535; add.s32 %r2, %r2, %r3; SKIP: bar.warp.sync -1;
    """
    assert lanes(code, x) == [i + (i ^ 8) if i < 16 else i for i in range(32)]


def test_activemask_of_a_divergent_branch() -> None:
    x = torch.zeros(32, dtype=torch.int32)
    code = "mov.b32 %r2, 0; setp.ge.u32 %p1, %r99, 5; @%p1 bra J; activemask.b32 %r2; J: bar.warp.sync -1;"
    assert lanes(code, x) == [31] * 5 + [0] * 27


MMA = """
shr.u32 %r1, %r99, 2; and.b32 %r2, %r99, 3;
{loads}
mma.sync.aligned.{form} {{%r40, %r41, %r42, %r43}}, {{%r20, %r21, %r22, %r23}}, {{%r24, %r25}}, {{%r26, %r27, %r28, %r29}};
{stores} ret;
"""


def fragment(bits: int) -> tuple[str, str]:
    """Loads of A (16 x k row-major), B (8 x k: column-major k x 8), C, and stores of D (16 x 8) for k = 256 / bits."""
    k = 256 // bits
    row = k * bits // 8
    lines = []
    for i in range(4):
        lines.append(f"add.u32 %r3, %r1, {8 * (i % 2)}; mul.lo.u32 %r3, %r3, {row}; mad.lo.u32 %r3, %r2, 4, %r3; "
                     f"add.u32 %r3, %r3, {16 * (i // 2)}; cvt.u64.u32 %rd1, %r3; add.s64 %rd2, %rd100, %rd1; "
                     f"ld.global.b32 %r{20 + i}, [%rd2];")  # fmt: skip
    for i in range(2):
        lines.append(f"mul.lo.u32 %r3, %r1, {row}; mad.lo.u32 %r3, %r2, 4, %r3; add.u32 %r3, %r3, {16 * i}; "
                     f"cvt.u64.u32 %rd1, %r3; add.s64 %rd2, %rd101, %rd1; ld.global.b32 %r{24 + i}, [%rd2];")  # fmt: skip
    stores = []
    for i in range(4):
        at = (f"add.u32 %r3, %r1, {8 * (i // 2)}; shl.b32 %r3, %r3, 3; mad.lo.u32 %r3, %r2, 2, %r3; "
              f"add.u32 %r3, %r3, {i % 2}; mul.wide.u32 %rd1, %r3, 4; add.s64 %rd2, %rd102, %rd1;")  # fmt: skip
        lines.append(f"{at} ld.global.b32 %r{26 + i}, [%rd2];")
        stores.append(f"{at} st.global.b32 [%rd2], %r{40 + i};")
    return "\n".join(lines), "\n".join(stores)


@pytest.mark.parametrize("name,dtype,bits", [
    ("f16", torch.float16, 16), ("bf16", torch.bfloat16, 16), ("tf32", torch.float32, 32),
    ("e4m3", torch.float8_e4m3fn, 8), ("e5m2", torch.float8_e5m2, 8),
])  # fmt: skip
def test_mma_of_floats(name: str, dtype: torch.dtype, bits: int) -> None:
    k = 256 // bits
    a, b = torch.randn(16, k).to(dtype), torch.randn(8, k).to(dtype)
    if name == "tf32":
        a, b = (t.view(torch.int32).bitwise_and(~0x1FFF).view(torch.float32) for t in (a, b))
    c = torch.randn(16, 8)
    want = (a.double() @ b.double().T + c.double()).float()
    loads, stores = fragment(bits)
    text = kernel(
        MMA.format(form=f"m16n8k{k}.row.col.f32.{name}.{name}.f32", loads=loads, stores=stores),
        "ppp",
    )
    out = c.clone()
    run(text, [a.view(torch.uint8), b.view(torch.uint8), out])
    assert torch.allclose(out, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ka,kb", [("s8", "s8"), ("u8", "s8")])
def test_mma_of_bytes_is_exact(ka: str, kb: str) -> None:
    a = torch.randint(0, 256, (16, 32), dtype=torch.uint8)
    b = torch.randint(-128, 128, (8, 32), dtype=torch.int8)
    c = torch.randint(-(1 << 20), 1 << 20, (16, 8), dtype=torch.int32)
    value = a if ka == "u8" else a.view(torch.int8)
    want = value.int() @ b.int().T + c
    loads, stores = fragment(8)
    text = kernel(
        MMA.format(form=f"m16n8k32.row.col.s32.{ka}.{kb}.s32", loads=loads, stores=stores), "ppp"
    )
    out = c.clone()
    run(text, [a, b, out])
    assert torch.equal(out, want)


@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_and_stmatrix(trans: bool) -> None:
    x = torch.randint(-30000, 30000, (32, 8), dtype=torch.int16)
    out = torch.zeros(32, 8, dtype=torch.int16)
    body = f"""
    mov.b32 %r1, sm; shl.b32 %r2, %r99, 4; add.u32 %r3, %r1, %r2; cvt.u64.u32 %rd1, %r2; add.s64 %rd2, %rd100, %rd1;
    ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd2]; st.shared.v4.b32 [%r3], {{%r4, %r5, %r6, %r7}}; bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4{".trans" if trans else ""}.shared.b16 {{%r8, %r9, %r10, %r11}}, [%r3];
    bar.warp.sync -1; stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r3], {{%r8, %r9, %r10, %r11}}; bar.warp.sync -1;
    ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r3]; add.s64 %rd3, %rd101, %rd1; st.global.v4.b32 [%rd3], {{%r4, %r5, %r6, %r7}}; ret;
    """
    run(kernel(body, "pp", extra=SMEM), [x, out], Shape(smem=512))
    blocks = x.view(4, 8, 8)
    assert torch.equal(out.view(4, 8, 8), blocks.transpose(1, 2) if trans else blocks)


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
