"""Instructions of a whole warp: votes, elections, reductions, matrix products and their fragments."""

# ruff: noqa: E501  (PTX and tables read better with one thought a line)

from __future__ import annotations

import pytest
import torch

from tests.sandbox.devices.cpu.harness import Shape, kernel, run
from tests.sandbox.devices.cpu.operands import LOADS

SMEM = ".extern .shared .align 128 .b8 sm[];"


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
