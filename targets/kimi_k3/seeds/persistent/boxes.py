"""Boxes: what CTAs send each other says itself that it is there.

An element that is all ones is empty; no result of bf16 or f32 arithmetic has these bits. No counters here.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import low
from targets.kimi_k3.seeds.persistent.device import Ctx, field, vector, words_at
from targets.kimi_k3.seeds.persistent.fields import COUNT, F

FFNS, KDAS, LAYERS, MLAS = 0, 1, 2, 3


@cute.jit
def turn_of(c: Ctx, number: Int32, what: cutlass.Constexpr = FFNS):
    """The half of its boxes that FFN, KDA, layer or MLA `number` of the launch uses: in turn, across launches too."""
    return (c.base[2 + what] + number) & 1


@cute.jit
def box(c: Ctx, name: cutlass.Constexpr, turn: Int32, op: cutlass.Constexpr):
    """Address of a box for this turn (0 or 1)."""
    start, size, n = op.boxes[name]
    return c.mail + start + Int64(turn) * op.box_bytes(size, n)


@cute.jit
def post(c: Ctx, name: cutlass.Constexpr, turn: Int32, i: Int32, x: Float32, op: cutlass.Constexpr):
    """x into element i of a box; its place for the other turn is emptied, which all have read by now.

    One thread has an element always, so emptying and filling it keep their order.
    """
    size = op.boxes[name][1]
    here = box(c, name, turn, op) + Int64(i) * size
    there = box(c, name, 1 - turn, op) + Int64(i) * size
    if cutlass.const_expr(size == 2):
        cute.arch.inline_ptx(
            """{
            .reg .b16 h, e;
            cvt.rn.bf16.f32 h, {$r1};
            mov.b16 e, 0xFFFF;
            st.relaxed.gpu.global.b16 [{$r0}], h;
            st.relaxed.gpu.global.b16 [{$r2}], e;
            }""",
            read_only_args=[here, x, there],
        )
    else:
        cute.arch.inline_ptx(
            """{
            .reg .b32 e;
            mov.b32 e, 0xFFFFFFFF;
            st.relaxed.gpu.global.f32 [{$r0}], {$r1};
            st.relaxed.gpu.global.b32 [{$r2}], e;
            }""",
            read_only_args=[here, x, there],
        )


def registers(n, first, step):
    """The operand of a vector instruction: n registers of inline PTX from number `first` on."""
    return "{" + ", ".join("{$r" + str(first + step * k) + "}" for k in range(n)) + "}"


@cute.jit
def send_some(here: Int64, r: cute.Tensor, n: cutlass.Constexpr):
    """n = 2 or 4 f32 at once: r[n] to `here`; somebody empties its place for the other turn (`empty_some`)."""
    cute.arch.inline_ptx(
        f"st.relaxed.gpu.global.v{n}.f32 [{{$r0}}], {registers(n, 1, 1)};",
        read_only_args=[here, *(r[k] for k in range(n))],
    )


@cute.jit
def send_words(here: Int64, r: cute.Tensor, n: cutlass.Constexpr):
    """As `send_some`: n = 1, 2 or 4 words, two bf16 or f16 each."""
    size = ".v" + str(n) if n > 1 else ""
    value = registers(n, 1, 1) if n > 1 else "{$r1}"
    cute.arch.inline_ptx(
        f"st.relaxed.gpu.global{size}.b32 [{{$r0}}], {value};",
        read_only_args=[here, *(r[k] for k in range(n))],
    )


@cute.jit
def empty_some(there: Int64, n: cutlass.Constexpr):
    """n = 1, 2 or 4 words of a box are emptied."""
    size = ".v" + str(n) if n > 1 else ""
    value = registers(n, 1, 0) if n > 1 else "{$r1}"
    cute.arch.inline_ptx(
        f"st.relaxed.gpu.global{size}.b32 [{{$r0}}], {value};",
        read_only_args=[there, Uint32(0xFFFFFFFF)],
    )


@cute.jit
def peek(address: Int64, r: cute.Tensor):
    """r[4 words] = 16 bytes of a box, whether they are there or not."""
    words = cute.arch.inline_ptx(
        "ld.relaxed.gpu.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )
    for e in cutlass.range_constexpr(4):
        r[e] = words[e]


@cute.jit
def empty(r: cute.Tensor, size: cutlass.Constexpr):
    """Whether one of the elements in four words is empty: a half of ~w that is zero borrows from its highest bit."""
    found = Uint32(0)
    for e in cutlass.range_constexpr(4):
        if cutlass.const_expr(size == 2):
            found = found | ((~r[e] - Uint32(0x00010001)) & r[e] & Uint32(0x80008000))
        else:
            found = found | (Uint32(1) if r[e] == Uint32(0xFFFFFFFF) else Uint32(0))
    return found != Uint32(0)


@cute.jit
def insist(address: Int64, r: cute.Tensor, size: cutlass.Constexpr, op: cutlass.Constexpr):
    """After `peek`: again until all elements are there."""
    if cutlass.const_expr(op.spin == 0):
        while empty(r, size):
            peek(address, r)
    else:
        turns = Int32(0)
        while empty(r, size) and turns < op.spin:
            peek(address, r)
            turns += 1


@cute.jit
def peek_half(address: Int64):
    """The bits of one bf16."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 h; ld.relaxed.gpu.global.b16 h, [{$r0}]; cvt.u32.u16 {$w0}, h; }",
        write_only_types=[Uint32],
        read_only_args=[address],
    )


@cute.jit
def insist_half(address: Int64, x: Uint32, op: cutlass.Constexpr):
    turns = Int32(0)
    while x == Uint32(0xFFFF) and (op.spin == 0 or turns < op.spin):
        x = peek_half(address)
        turns += 1
    return low(x)


@cute.jit
def wide_box(c: Ctx, start: Int64, r: cute.Tensor, op: cutlass.Constexpr):
    """r words [4, per]: this thread's columns of a box of `hidden` elements."""
    g = op.wide
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            peek(start + Int64(vector(c, v, g)) * 16, r[None, v])
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            insist(start + Int64(vector(c, v, g)) * 16, r[None, v], 2, op)


@cute.jit
def gathered_from(
    c: Ctx, start: Int64, layer: Int32, rY: cute.Tensor, own: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """rY words [4, per]: the first `own` columns from a box, the others as they came from other ranks."""
    g = op.wide
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i < own // 8:
            peek(start + Int64(i) * 16, rY[None, v])
        elif i < g.vecs:
            if cutlass.const_expr(own < op.d.hidden):
                words_at(field(c, layer, F["remote_delta"], COUNT), i - own // 8, rY[None, v])
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i < own // 8:
            insist(start + Int64(i) * 16, rY[None, v], 2, op)
