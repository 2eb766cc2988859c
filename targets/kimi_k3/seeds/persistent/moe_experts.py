"""Routed MXFP4 experts in the persistent kernel, one token."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32

from targets.kimi_k3.seeds.common import round_bf16, situ
from targets.kimi_k3.seeds.latent_moe_codes import expand, pair_up, scale_word
from targets.kimi_k3.seeds.persistent.boxes import box, insist, peek, post
from targets.kimi_k3.seeds.persistent.device import Ctx, ahead, consumers, field, view, words_at
from targets.kimi_k3.seeds.persistent.exchange import look_either, take_either, tell_rank
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.ring import stage_done, stage_full
from targets.kimi_k3.seeds.persistent.row_products import diagonal, diagonal_sum, mma_rows
from targets.kimi_k3.seeds.persistent.stages import STRIDE, share

CODE_SCALE = 2.0**62
"""Expanded codes are 2^-62 of their value."""


@cute.jit
def group(c: Ctx, at_code: Int32, at_scale: Int32):
    """(codes, scale) of one group of 32: four words from the ring, 16 bytes times `at_code` in, and their factor."""
    rW = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    cute.autovec_copy(cute.local_tile(c.ring, (4,), (at_code,)), rW)
    byte = cute.recast_tensor(c.ring, Uint8)[at_scale]
    return rW, scale_word(Uint32(byte) & Uint32(0xFF))


@cute.jit
def groups_times(rC: cute.Tensor, a: tuple, b: tuple, rX: cute.Tensor):
    """rC += a group of row a and one of row b times the same 32 columns of x, rX words [4, 4]; times 2^-62."""
    for i in cutlass.range_constexpr(4):
        mma_rows(rC, expand(a[0][i], a[1]), expand(b[0][i], b[1]), rX[None, i])


@cute.jit
def experts_up(c: Ctx, layer: Int32, turn: Int32, it: Int32, op: cutlass.Constexpr):
    """h [slot, row] = bf(SiTU(w1 layer, w3 layer)) of this CTA's pairs of rows. A warp has a pair, a lane whole groups.

    Pairs are dealt to warps in turn without regard to stages, so that those without a pair in one stage are at work in
    the next.
    """
    d, g = op.d, op.up
    groups = d.latent // 32
    turns = -(-groups // 32)
    sX = view(c, Uint32, 0, d.latent // 2)
    rX = cute.make_rmem_tensor(cute.make_layout((4, 4)), Uint32)
    rX.fill(0)
    stage_latent(c, layer, turn, sX, op)
    first, n = share(d.topk * d.expert_dim, c.cta, op.ctas, g.unit)
    at_row, end = first, first + n
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    while at_row < end:
        row = at_row % d.expert_dim
        many = end - at_row if end - at_row < g.chunk else Int32(g.chunk)
        many = many if many < d.expert_dim - row else d.expert_dim - row
        slot = stage_full(c, it, op)
        start = (c.warp + op.warps - (at_row - first) % op.warps) % op.warps
        for r in cutlass.range(start, many, op.warps, unroll=1):
            code = (slot * op.stage + r * g.code_bytes) // 16
            scale = slot * op.stage + 2 * g.chunk * g.code_bytes + r * g.scale_bytes
            rC.fill(0.0)
            for v in cutlass.range_constexpr(turns):
                j = c.lane + 32 * v
                load_group(sX, j, groups, rX)
                j = j if j < groups else groups - 1
                groups_times(
                    rC,
                    group(c, code + j, scale + j),
                    group(c, code + g.chunk * g.code_bytes // 16 + j, scale + g.chunk * g.scale_bytes + j),
                    rX,
                )  # fmt: skip
            x, y = diagonal(c, rC)
            sum = diagonal_sum(x, y)
            if c.lane < 2:
                c.part[(2 * (at_row - first + r) + c.lane) * STRIDE] = sum
        stage_done(c, slot)
        it += 1
        at_row += many
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        gate, up = c.part[2 * i * STRIDE] * CODE_SCALE, c.part[(2 * i + 1) * STRIDE] * CODE_SCALE
        post(c, "h", turn, first + i, situ(gate, up), op)
    return it


@cute.jit
def load_group(sX: cute.Tensor, j: Int32, groups: cutlass.Constexpr, rX: cute.Tensor):
    """rX words [4, 4] = group j of x, zero beyond the last; sX as `group_place` has it."""
    for i in cutlass.range_constexpr(4):
        if cutlass.const_expr(groups % 32 != 0):
            rX[None, i].fill(0)
        if j < groups:
            cute.autovec_copy(cute.local_tile(sX, (4,), (i * groups + j,)), rX[None, i])


@cute.jit
def group_place(i: Int32, groups: cutlass.Constexpr):
    """Where the i-th 16 bytes of x lie: first those of all groups, then the seconds; neighbours do not clash."""
    return i % 4 * groups + i // 4


@cute.jit
def stage_latent(c: Ctx, layer: Int32, turn: Int32, sX: cute.Tensor, op: cutlass.Constexpr):
    """sX = the latent, own and gathered, pairs in the order of `expand`: every warp needs all of it."""
    d = op.d
    vecs, own = d.latent // 8, d.latent_rows // 8
    per = -(-vecs // op.threads)
    start = box(c, "latent", turn, op)
    rL = cute.make_rmem_tensor(cute.make_layout((4, per)), Uint32)
    gathers = d.gpus > 1 and d.latent_sharded
    rIn = cute.make_rmem_tensor(cute.make_layout((8, per if gathers else 1)), Uint32)
    for v in cutlass.range_constexpr(per):
        i = c.tid + v * op.threads
        if cutlass.const_expr(gathers):
            rIn[None, v].fill(0)
            if i < vecs:
                look_either(c, "latent", layer, (start, own, i), rIn[None, v], op)
        elif i < own:
            peek(start + Int64(i) * 16, rL[None, v])
        elif i < vecs:
            if cutlass.const_expr(d.latent_rows < d.latent):
                words_at(field(c, layer, F["remote_latent"], COUNT), i - own, rL[None, v])
    for v in cutlass.range_constexpr(per):
        i = c.tid + v * op.threads
        if cutlass.const_expr(gathers):
            if i < vecs:
                take_either(c, "latent", layer, (start, own, i), rIn[None, v], rL[None, v], op)
        elif i < own:
            insist(start + Int64(i) * 16, rL[None, v], 2, op)
        if i < vecs:
            pair_up(rL[None, v])
            place = group_place(i, d.latent // 32)
            cute.autovec_copy(rL[None, v], cute.local_tile(sX, (4,), (place,)))
    consumers(op)


@cute.jit
def stage_hidden(c: Ctx, turn: Int32, sH: cute.Tensor, op: cutlass.Constexpr):
    """sH words = h of each expert as `group_place` has it, pairs in the order of `expand`."""
    vecs = op.d.topk * op.d.expert_dim // 8
    per = -(-vecs // op.threads)
    start = box(c, "h", turn, op)
    rH = cute.make_rmem_tensor(cute.make_layout((4, per)), Uint32)
    for v in cutlass.range_constexpr(per):
        i = c.tid + v * op.threads
        if i < vecs:
            peek(start + Int64(i) * 16, rH[None, v])
    for v in cutlass.range_constexpr(per):
        i = c.tid + v * op.threads
        if i < vecs:
            insist(start + Int64(i) * 16, rH[None, v], 2, op)
            pair_up(rH[None, v])
            each = op.d.expert_dim // 8
            place = i // each * each + group_place(i % each, each // 4)
            cute.autovec_copy(rH[None, v], cute.local_tile(sH, (4,), (place,)))


@cute.jit
def sixteen_rows(
    c: Ctx, place: Int32, k: Int32, r0: Int32, n: Int32, given: tuple, op: cutlass.Constexpr
):
    """sF[slot k, row] = bf(w2 h) of the rows r0 .. r0 + 15 of `n` whose piece starts at byte `place` of the ring."""
    sH, sF = given
    d, g = op.d, op.down
    groups = d.expert_dim // 32
    octet, quarter = c.lane // 4, c.lane % 4
    a = r0 + octet if r0 + octet < n else n - 1
    b = r0 + octet + 8 if r0 + octet + 8 < n else n - 1
    scales = place + op.down_rows * g.code_bytes
    rX = cute.make_rmem_tensor(cute.make_layout((4, 4)), Uint32)
    rX.fill(0)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rC.fill(0.0)
    for v in cutlass.range_constexpr(-(-groups // 4)):
        j = 4 * v + quarter
        load_group(cute.local_tile(sH, (16 * groups,), (k,)), j, groups, rX)
        j = j if j < groups else groups - 1
        groups_times(
            rC,
            group(c, (place + a * g.code_bytes) // 16 + j, scales + a * g.scale_bytes + j),
            group(c, (place + b * g.code_bytes) // 16 + j, scales + b * g.scale_bytes + j),
            rX,
        )
    x, y = diagonal(c, rC)
    if quarter == octet // 2:
        if r0 + octet < n:
            sF[k * op.down_rows + r0 + octet] = round_bf16(x * CODE_SCALE)
        if r0 + octet + 8 < n:
            sF[k * op.down_rows + r0 + octet + 8] = round_bf16(y * CODE_SCALE)


@cute.jit
def experts_down(c: Ctx, layer: Int32, turn: Int32, it: Int32, op: cutlass.Constexpr):
    """z = bf(bf(sum over slots of w_e bf(w2_e h)) + the others') of this CTA's rows.

    A warp has sixteen rows of one expert, four lanes a pair of rows (eight apart) and a lane whole groups of both, so
    that a row's sum is one element of the diagonal. Pieces are dealt to warps without regard to stages.
    """
    d, g = op.d, op.down
    first, n = share(d.latent, c.cta, op.ctas, g.unit)
    sH = view(c, Uint32, 0, d.topk * d.expert_dim // 2)
    sF = view(c, Float32, 2 * d.topk * d.expert_dim, d.topk * op.down_rows)
    if cutlass.const_expr(d.ranks > 1 and d.gpus == 1):
        remote = field(c, layer, F["remote_moe"], COUNT) + Int64(first) * 4
        rRemote = ahead(c, remote, n, op.down_rows, op)
    stage_hidden(c, turn, sH, op)
    consumers(op)
    piece = op.down_rows * (g.code_bytes + g.scale_bytes)
    units = -(-op.down_rows // 16)
    for start in cutlass.range(0, d.topk, op.down_slots, unroll=1):
        slot = stage_full(c, it, op)
        many = d.topk - start if d.topk - start < op.down_slots else Int32(op.down_slots)
        mine = (c.warp + op.warps - start * units % op.warps) % op.warps
        for unit in cutlass.range(mine, many * units, op.warps, unroll=1):
            k = unit // units
            sixteen_rows(
                c, slot * op.stage + k * piece, start + k, unit % units * 16, n, (sH, sF), op
            )
        stage_done(c, slot)
        it += 1
    consumers(op)
    for turn_ in cutlass.range_constexpr(-(-op.down_rows // op.threads)):
        i = c.tid + turn_ * op.threads
        if i < n:
            total = Float32(0.0)
            for k in cutlass.range(d.topk, unroll_full=True):
                total += c.weights[k] * sF[k * op.down_rows + i]
            if cutlass.const_expr(d.ranks > 1 and d.gpus == 1):
                total = round_bf16(total) + rRemote[turn_]
            if cutlass.const_expr(d.gpus > 1):
                tell_rank(c, "moe", layer, first + i, total)
            post(c, "z", turn, first + i, total, op)
    return it
