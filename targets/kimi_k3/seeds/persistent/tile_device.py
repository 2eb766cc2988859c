"""Device pieces of the tile kernel: its context, boxes and edges between CTAs, tiles through the ring."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.common import mma_k32, smem
from targets.kimi_k3.seeds.persistent.device import (
    ALL,
    bulk,
    consumers,
    hint,
    insist,
    mma_rows,
    peek,
    stage_done,
    stage_free,
    stage_full,
    wait,
    within,
)
from targets.kimi_k3.seeds.persistent.fields import MOE, REMOTE

TILE_FIELDS = (*MOE, *(f"remote_{n}" for n in REMOTE), "send", "x", "y")
COUNT_T = len(TILE_FIELDS)
T = {name: i for i, name in enumerate(TILE_FIELDS)}


class Tiles(NamedTuple):
    """Where a thread is, and the shared memory of its CTA.

    ring, full, empty, routed, part, tab, sync, base, track, brought: as in `device.Ctx`; red: sums [token, warp]; own:
    shared expert's part of this CTA's columns [row, token]; mail: this step's boxes; other: those that the next step
    uses. Of expert number i of those that the tokens want: ids[i]; mask[i]: bits of its tokens; pair[i, token]: where
    its h is, or -1; share[i, token]: its weight, 0 where not wanted; count[0]: how many. origin: elements of h that the
    sums in `part` become; found: candidates of the top-k, of a single token with key and score; best: keys of lanes;
    vec: the vectors of a single token.
    """

    tid: Any
    warp: Any
    lane: Any
    cta: Any
    ring: Any
    full: Any
    empty: Any
    routed: Any
    part: Any
    red: Any
    tab: Any
    own: Any
    ids: Any
    mask: Any
    pair: Any
    share: Any
    count: Any
    origin: Any
    found: Any
    bits: Any
    key: Any
    score: Any
    best: Any
    vec: Any
    sync: Any
    base: Any
    mail: Any
    other: Any
    track: Any
    brought: Any


@cute.jit
def open_tiles(
    layers: tuple, mSync: cute.Tensor, mMail: cute.Tensor, phases: Any, names: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """The context of a thread. layers: tensors of each layer, names: their fields; ends with a barrier of the CTA."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(tid // 32)
    d = op.d
    ring = cute.make_tensor(
        cutlass.memory.SmemAllocator().allocate_tensor(
            Uint32, cute.make_layout((op.stages * op.stage // 4,)), byte_alignment=128
        ).iterator,
        cute.make_layout((op.stages * op.stage // 4,)),
    )  # fmt: skip
    bars = smem(Int64, (2 * op.stages + 2,), (1,)).iterator
    base = tuple(mSync[96 + k] for k in range(3))
    half = d.layers * op.record
    mail = mMail.iterator.toint()
    other = mail
    if cutlass.const_expr(not op.fenced):
        other = mail + Int64(1 - (base[2] & 1)) * half
        mail = mail + Int64(base[2] & 1) * half
    c = Tiles(
        tid, warp, tid % 32, cta, ring, bars, bars + op.stages, bars + 2 * op.stages,
        smem(Float32, (op.part_slots * op.stride,), (1,)), smem(Float32, (op.tokens * op.stride,), (1,)),
        smem(Int64, (d.layers * COUNT_T,), (1,)),
        smem(Float32, (-(-d.hidden_local // op.ctas) * op.tokens,), (1,)),
        smem(Int32, (op.touched,), (1,)), smem(Int32, (op.touched,), (1,)),
        smem(Int32, (op.touched * op.tokens,), (1,)), smem(Float32, (op.touched * op.tokens,), (1,)),
        smem(Int32, (4,), (1,)), smem(Int32, (op.held,), (1,)), smem(Uint16, (op.tokens * d.experts,), (1,)),
        smem(Uint32, (-(-d.experts // 32),), (1,)),
        smem(Uint32, (d.experts if op.alone else 1,), (1,)),
        smem(Float32, (d.experts if op.alone else 1,), (1,)),
        smem(Uint32, (32,), (1,)),
        smem(Uint32, (op.vector_words,), (1,)),
        mSync.iterator, base, mail, other,
        timeline.track(phases, cta, tid == 0), timeline.track(phases, op.ctas + cta, tid == op.threads),
    )  # fmt: skip
    if tid == 0:
        for s in cutlass.range_constexpr(op.stages):
            cute.arch.mbarrier_init(c.full + s, 1)
            cute.arch.mbarrier_init(c.empty + s, op.warps)
        cute.arch.mbarrier_init(c.routed, 1)
        cute.arch.mbarrier_init(c.routed + 1, 1)
    for n in cutlass.range_constexpr(d.layers):
        if tid == 32 * (n % op.warps):
            for i in cutlass.range_constexpr(len(names[n])):
                c.tab[n * COUNT_T + T[names[n][i]]] = layers[n][i].iterator.toint()
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return c


# ---- boxes and edges


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


# ---- tiles of bf16 rows


@cute.jit
def fill_tiles(
    c: Tiles, it: Int32, rows: tuple, n: Int32, g: cutlass.Constexpr, op: cutlass.Constexpr
):
    """Stages of all tiles of `n` rows; rows = two ranges (address, bytes from row to row, first row, last row of it).

    The producer's lanes have a row each.
    """
    for first in cutlass.range(0, n, g.height, unroll=1):
        many = n - first if n - first < g.height else Int32(g.height)
        r = first + c.lane
        source = Int64(0)
        for a in cutlass.range_constexpr(len(rows)):
            address, pitch, begin_, every = rows[a]
            source = (
                address + Int64((r - begin_) // every) * pitch
                if r >= begin_ and (r - begin_) % every == 0
                else source
            )
        target = c.lane // (g.height // 2) * g.block + c.lane % (g.height // 2) * g.piece
        for s in cutlass.range(g.slices, unroll=1):
            slot = stage_free(c, it, op)
            if c.lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, many * g.piece)
            cute.arch.sync_warp()
            if c.lane < many:
                bulk(c, slot, target, source + Int64(s) * g.piece, Int32(g.piece), op)
            it += 1
    return it


@cute.jit
def fill_blocks(
    c: Tiles, it: Int32, start: Int64, n: Int32, g: cutlass.Constexpr, op: cutlass.Constexpr
):
    """As `fill_tiles` for n rows that lie together and are whole in a stage: two copies a tile, as copies cost time."""
    half = g.height // 2
    for first in cutlass.range(0, n, g.height, unroll=1):
        slot = stage_free(c, it, op)
        many = n - first if n - first < g.height else Int32(g.height)
        if c.lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, many * g.piece)
        cute.arch.sync_warp()
        mine = many - c.lane * half
        mine = mine if mine < half else Int32(half)
        if c.lane < 2 and mine > 0:
            source = start + Int64(first + c.lane * half) * g.piece
            bulk(c, slot, c.lane * g.block, source, mine * g.piece, op)
        it += 1
    return it


@cute.jit
def tile_rows(c: Tiles, left: Int32, g: cutlass.Constexpr, op: cutlass.Constexpr):
    """Where this lane's rows of a tile begin in a stage, in 16 bytes; beyond `left` of them the last."""
    half = g.height // 2
    row = c.lane // 4 % 2 * half + c.lane // 8
    found = []
    for k in cutlass.range_constexpr(g.height // 8):
        r = within(row + 4 * k, left)
        found.append(r // half * (g.block // 16) + r % half * (g.piece // 16))
    return found


@cute.jit
def tile_times(
    c: Tiles, it: Int32, rX: cute.Tensor, left: Int32, g: cutlass.Constexpr, op: cutlass.Constexpr
):
    """rC[4] = a tile times x: (row g, token 2 q), (g, 2 q + 1), (g + 8, ..) of lane 4 g + q; this warp's columns. The
    tile has `left` rows, or more; rows that it has not are anything.
    """
    rC = cute.make_rmem_tensor(cute.make_layout((4, 2)), Float32)
    rC.fill(0.0)
    rA = cute.make_rmem_tensor(cute.make_layout((4, 2 * g.wide)), Uint32)
    rB = cute.make_rmem_tensor(cute.make_layout((4, 2 * g.wide)), Uint32)
    row = (c.lane // 4 % 2) * (g.block // 16) + c.lane // 8 * (g.piece // 16)
    rows = tile_rows(c, left, g, op) if cutlass.const_expr(op.tokens > 1) else [row]
    for s in cutlass.range_constexpr(g.slices):
        slot = stage_full(c, it, op)
        if c.warp < g.active:
            for j in cutlass.range_constexpr(2 * g.wide):
                column = (j // 2 * g.active * 2 + c.warp * 2 + j % 2) * 4 + c.lane % 4
                i = slot * (op.stage // 16) + rows[0] + column
                cute.autovec_copy(cute.local_tile(c.ring, (4,), (i,)), rA[None, j])
                if cutlass.const_expr(g.height == 16):
                    if cutlass.const_expr(op.tokens > 1):
                        i = slot * (op.stage // 16) + rows[1] + column
                    else:
                        i += 4 * (g.piece // 16)
                    cute.autovec_copy(cute.local_tile(c.ring, (4,), (i,)), rB[None, j])
            for j in cutlass.range_constexpr(2 * g.wide):
                x = rX[None, s * 2 * g.wide + j]
                if cutlass.const_expr(g.height == 16):
                    mma_rows(rC[None, j % 2], rA[None, j], rB[None, j], x)
                else:
                    mma_k32(rC[None, j % 2], rA[None, j], tuple(x[e] for e in range(4)))
        stage_done(c, slot)
        it += 1
    for e in cutlass.range_constexpr(4):
        rC[e, 0] = rC[e, 0] + rC[e, 1]
    return it, rC


@cute.jit
def keep(
    c: Tiles, rC: cute.Tensor, rows: tuple, first: Int32, column: Int32, op: cutlass.Constexpr
):
    """part[(first + row) tokens + token, column] = the sums of the lane's rows; rows = (g, or g and g + 8, end)."""
    for half in cutlass.range_constexpr(len(rows) - 1):
        row = rows[half]
        for e in cutlass.range_constexpr(2):
            token = c.lane % 4 * 2 + e
            if token < op.tokens and row < rows[len(rows) - 1]:
                c.part[((first + row) * op.tokens + token) * op.stride + column] = rC[2 * half + e]


@cute.jit
def sum_of(c: Tiles, i: Int32, width: cutlass.Constexpr, op: cutlass.Constexpr):
    """The sum of row i of the partial sums over `width` warps, in their order."""
    total = c.part[i * op.stride]
    for w in cutlass.range_constexpr(1, width):
        total += c.part[i * op.stride + w]
    return total


@cute.jit
def drain_tiles(
    c: Tiles, it: Int32, span: tuple, rX: cute.Tensor, g: cutlass.Constexpr, op: cutlass.Constexpr
):
    """part[(base + row) tokens + token, warp] for n rows; span = (base, n). The first half of a tile is even rows
    of the MMA, the others odd ones.
    """
    base, n = span
    for first in cutlass.range(0, n, g.height, unroll=1):
        it, rC = tile_times(c, it, rX, n - first, g, op)
        row = c.lane // 4 % 2 * (g.height // 2) + c.lane // 8
        if c.warp < g.active:
            if cutlass.const_expr(g.height == 16):
                keep(c, rC, (row, row + 4, n - first), base + first, c.warp, op)
            else:
                keep(c, rC, (row, n - first), base + first, c.warp, op)
    return it


@cute.jit
def columns_of(c: Tiles, t: cutlass.Constexpr, g: cutlass.Constexpr):
    """Which 16 bytes of a row of x this thread has as its t-th."""
    return (t // 2 * g.active * 2 + c.warp * 2 + t % 2) * 4 + c.lane % 4


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
