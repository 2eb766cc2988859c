"""Boxes and edges of the tile kernel: every instance has its own boxes; with several tokens edges are fenced."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.persistent.boxes import insist, peek
from targets.kimi_k3.seeds.persistent.device import consumers, within
from targets.kimi_k3.seeds.persistent.edges import ALL, hint, wait
from targets.kimi_k3.seeds.persistent.tile_device import Tiles
from targets.kimi_k3.seeds.persistent.tile_rows import columns_of


@cute.jit
def place(c: Tiles, name: cutlass.Constexpr, layer: Int32, op: cutlass.Constexpr):
    """Address of an instance's box."""
    return c.mail + Int64(layer) * op.record + op.boxes[name][0]


@cute.jit
def send(
    c: Tiles, name: cutlass.Constexpr, layer: Int32, i: Int32, x: Float32, op: cutlass.Constexpr
):
    """x into element i of a box."""
    here = place(c, name, layer, op) + Int64(i) * op.boxes[name][1]
    if cutlass.const_expr(op.boxes[name][1] == 2):
        cute.arch.inline_ptx(
            "{ .reg .b16 h; cvt.rn.bf16.f32 h, {$r1}; st.relaxed.gpu.global.b16 [{$r0}], h; }",
            read_only_args=[here, x],
        )
    else:
        cute.arch.inline_ptx("st.relaxed.gpu.global.f32 [{$r0}], {$r1};", read_only_args=[here, x])


@cute.jit
def store16(address: Int64, r: cute.Tensor):
    cute.arch.inline_ptx(
        "st.relaxed.gpu.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, r[0], r[1], r[2], r[3]],
    )


@cute.jit
def clear(c: Tiles, layer: Int32, op: cutlass.Constexpr):
    """This CTA's share of the boxes that the next step's instance `layer` uses, emptied by one warp. A launch lies
    between.
    """
    rE = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    rE.fill(0xFFFFFFFF)
    start = c.other + Int64(layer) * op.record
    for i in cutlass.range(c.cta * 32 + c.lane, op.emptied // 16, op.ctas * 32, unroll=1):
        store16(start + Int64(i) * 16, rE)


@cute.jit
def sure(address: Int64, r: cute.Tensor, size: cutlass.Constexpr, op: cutlass.Constexpr):
    """After `peek`: until it is there, where no edge says so."""
    if cutlass.const_expr(not op.fenced):
        insist(address, r, size, op)


@cute.jit
def tell(
    c: Tiles,
    op: cutlass.Constexpr,
    line: cutlass.Constexpr = ALL,
    fenced: cutlass.Constexpr = False,
):
    """Arrive at an edge: a release with everything that the CTA's consumers wrote, or a hint where boxes say it."""
    if cutlass.const_expr(op.fenced or fenced):
        consumers(op)
        if c.tid == 0:
            cute.arch.red(
                c.sync + line, Int32(1), op="add", dtype="u32", sem="release", scope="gpu"
            )
    else:
        hint(c, op, line)


@cute.jit
def meet(c: Tiles, edge: Int32, op: cutlass.Constexpr, line: cutlass.Constexpr = ALL):
    """Wait at an edge whose boxes need no fence unless there are several tokens."""
    wait(c, edge, op, line, op.fenced, 0 if op.fenced else op.early)


@cute.jit
def leave_tiles(c: Tiles, edge: Int32, op: cutlass.Constexpr):
    """The next launch counts on from here. After the last edge, when every CTA has read where this one began."""
    if c.tid == 0 and c.cta == 0:
        state = cute.make_tensor(c.sync + 96, cute.make_layout((3,)))
        state[0] = c.base[0] + edge * op.ctas
        state[1] = c.base[1] + op.d.layers * op.ctas
        state[2] = c.base[2] + 1


@cute.jit
def to_vec(
    c: Tiles, start: Int64, first: cutlass.Constexpr, k: cutlass.Constexpr, op: cutlass.Constexpr
):
    """c.vec from 16 bytes times `first` on = a box of k bf16 of a single token, a part a thread. No barrier."""
    many = -(-k // 8 // op.threads)
    r = cute.make_rmem_tensor(cute.make_layout((4, many)), Uint32)
    for v in cutlass.range_constexpr(many):
        peek(start + Int64(within(c.tid + v * op.threads, k // 8)) * 16, r[None, v])
    for v in cutlass.range_constexpr(many):
        i = within(c.tid + v * op.threads, k // 8)
        sure(start + Int64(i) * 16, r[None, v], 2, op)
        if c.tid + v * op.threads < k // 8:
            cute.autovec_copy(r[None, v], cute.local_tile(c.vec, (4,), (first + i,)))


@cute.jit
def from_vec(c: Tiles, first: cutlass.Constexpr, g: cutlass.Constexpr):
    """rX[4, steps] as `take_box`, from c.vec."""
    rX = cute.make_rmem_tensor(cute.make_layout((4, 2 * g.spans)), Uint32)
    rX.fill(0)
    if c.lane < 4 and c.warp < g.active:
        for t in cutlass.range_constexpr(2 * g.spans):
            cute.autovec_copy(
                cute.local_tile(c.vec, (4,), (first + columns_of(c, t, g),)), rX[None, t]
            )
    return rX


@cute.jit
def take_box(c: Tiles, start: Int64, g: cutlass.Constexpr, op: cutlass.Constexpr):
    """rX[4, steps]: this lane's columns of its token, zero for tokens that are none; of a box [tokens, g.k] bf16."""
    rX = cute.make_rmem_tensor(cute.make_layout((4, 2 * g.spans)), Uint32)
    rX.fill(0)
    token = c.lane // 4
    if token < op.tokens and c.warp < g.active:
        for t in cutlass.range_constexpr(2 * g.spans):
            peek(start + Int64(token * (g.k // 8) + columns_of(c, t, g)) * 16, rX[None, t])
        for t in cutlass.range_constexpr(2 * g.spans):
            sure(start + Int64(token * (g.k // 8) + columns_of(c, t, g)) * 16, rX[None, t], 2, op)
    return rX
