"""Routed experts of the decode step: MXFP4 rows from the ring, spread to bf16 in registers and multiplied there.

w1 and w3: every warp has the same columns of all rows, so that x stays in its registers and no warp waits for another;
four lanes have a pair of rows. w2: a unit is sixteen rows of an expert, and units are dealt to warps in turn.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32

from targets.kimi_k3.seeds.common import round_bf16, situ
from targets.kimi_k3.seeds.latent_moe import pair_up, scale_word
from targets.kimi_k3.seeds.persistent.device import (
    Ctx,
    ahead,
    box,
    consumers,
    diagonal,
    field,
    gathered,
    insist,
    mma_rows,
    peek,
    post,
    stage_done,
    stage_full,
    view,
    words_at,
)
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.moe_experts import CODE_SCALE, load_group, stage_hidden
from targets.kimi_k3.seeds.persistent.plan import STRIDE, share


@cute.jit
def codes(c: Ctx, at_code: Int32, at_scale: Int32):
    """(codes, factor) of a group of 32: four words from the ring, 16 bytes times `at_code` in."""
    rW = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    cute.autovec_copy(cute.local_tile(c.ring, (4,), (at_code,)), rW)
    byte = cute.recast_tensor(c.ring, Uint8)[at_scale]
    return rW, scale_word(Uint32(byte) & Uint32(0xFF))


@cute.jit
def eight(word: Uint32, factor: Uint32):
    """Eight codes -> four bf16 pairs, codes (j, j + 4) in pair j, times 2^-62 and the group's factor.

    A product with two bits set makes two copies of each nibble: one has the magnitude in place, the other the sign.
    Products run beside the logic, of which there is too little.
    """
    return cute.arch.inline_ptx(
        """{
        .reg .b32 a, b, c, d, h;
        shr.u32 h, {$r0}, 8;
        and.b32 a, {$r0}, 0x000F000F;
        and.b32 b, {$r0}, 0x00F000F0;
        and.b32 c, h, 0x000F000F;
        and.b32 d, h, 0x00F000F0;
        mul.lo.u32 a, a, 0x1040;
        mul.lo.u32 b, b, 0x0104;
        mul.lo.u32 c, c, 0x1040;
        mul.lo.u32 d, d, 0x0104;
        and.b32 a, a, 0x81C081C0;
        and.b32 b, b, 0x81C081C0;
        and.b32 c, c, 0x81C081C0;
        and.b32 d, d, 0x81C081C0;
        mul.rn.bf16x2 {$w0}, a, {$r1};
        mul.rn.bf16x2 {$w1}, b, {$r1};
        mul.rn.bf16x2 {$w2}, c, {$r1};
        mul.rn.bf16x2 {$w3}, d, {$r1};
        }""",
        write_only_types=[Uint32] * 4,
        read_only_args=[word, factor],
    )


@cute.jit
def couple(rC: cute.Tensor, a: tuple, b: tuple, rX: cute.Tensor):
    """rC += a group of row a and one of row b times the same 32 columns of x, rX words [4, 4]; times 2^-62."""
    for i in cutlass.range_constexpr(4):
        mma_rows(rC, eight(a[0][i], a[1]), eight(b[0][i], b[1]), rX[None, i])


@cute.jit
def my_chunk(c: Ctx, v: cutlass.Constexpr, op: cutlass.Constexpr):
    """Which 128 columns this lane has as its v-th; odd rows take neighbours in the other order, for the banks."""
    shift = v
    if cutlass.const_expr(op.up_chunks % 2 == 0):
        shift = v + (c.lane // 4 % 2) * (1 - 2 * (v % 2))
    return c.warp * op.up_chunks + shift


@cute.jit
def load_latent(c: Ctx, layer: Int32, turn: Int32, op: cutlass.Constexpr):
    """rL[4, 4, chunks]: this lane's groups of the latent, own and gathered, pairs in the order of `eight`."""
    d = op.d
    rL = cute.make_rmem_tensor(cute.make_layout((4, 4, op.up_chunks)), Uint32)
    rL.fill(0)
    own = d.latent_rows // 8
    start = box(c, "latent", turn, op)
    if c.warp < op.up_warps:
        for v in cutlass.range_constexpr(op.up_chunks):
            for k in cutlass.range_constexpr(4):
                i = (my_chunk(c, v, op) * 4 + c.lane % 4) * 4 + k
                if i < own:
                    peek(start + Int64(i) * 16, rL[None, k, v])
                elif cutlass.const_expr(d.latent_rows < d.latent):
                    words_at(field(c, layer, F["remote_latent"], COUNT), i - own, rL[None, k, v])
        for v in cutlass.range_constexpr(op.up_chunks):
            for k in cutlass.range_constexpr(4):
                i = (my_chunk(c, v, op) * 4 + c.lane % 4) * 4 + k
                if i < own:
                    insist(start + Int64(i) * 16, rL[None, k, v], 2, op)
                pair_up(rL[None, k, v])
    return rL


@cute.jit
def eight_pairs(
    c: Ctx, slot: Int32, r0: Int32, many: Int32, rL: cute.Tensor, op: cutlass.Constexpr
):
    """Parts of the sums of the pairs r0 .. r0 + 7 of a stage's `many`: (w1, w3) in the lanes that have them, else 0."""
    g = op.up
    row = r0 + c.lane // 4 if r0 + c.lane // 4 < many else many - 1
    code = (slot * op.stage + row * g.code_bytes) // 16
    scale = slot * op.stage + 2 * g.chunk * g.code_bytes + row * g.scale_bytes
    rC = cute.make_rmem_tensor(cute.make_layout((4, op.up_chunks)), Float32)
    rC.fill(0.0)
    for v in cutlass.range_constexpr(op.up_chunks):
        j = my_chunk(c, v, op) * 4 + c.lane % 4
        couple(
            rC[None, v],
            codes(c, code + j, scale + j),
            codes(c, code + g.chunk * g.code_bytes // 16 + j, scale + g.chunk * g.scale_bytes + j),
            rL[None, None, v],
        )
    for v in cutlass.range_constexpr(1, op.up_chunks):
        for e in cutlass.range_constexpr(4):
            rC[e, 0] = rC[e, 0] + rC[e, v]
    return diagonal(c, rC[None, 0])


@cute.jit
def pairs_up(c: Ctx, layer: Int32, turn: Int32, it: Int32, op: cutlass.Constexpr):
    """h [slot, row] = bf(SiTU(w1 latent, w3 latent)) of this CTA's pairs of rows."""
    d, g = op.d, op.up
    rL = load_latent(c, layer, turn, op)
    first, n = share(d.topk * d.expert_dim, c.cta, op.ctas, g.unit)
    at_row, end = first, first + n
    octet, mine = c.lane // 4, c.lane % 4 == c.lane // 4 // 2
    while at_row < end:
        row = at_row % d.expert_dim
        many = end - at_row if end - at_row < g.chunk else Int32(g.chunk)
        many = many if many < d.expert_dim - row else d.expert_dim - row
        slot = stage_full(c, it, op)
        if c.warp < op.up_warps:
            for r0 in cutlass.range(0, many, 8, unroll=1):
                gate, up = eight_pairs(c, slot, r0, many, rL, op)
                if mine and r0 + octet < many:
                    place = 2 * (at_row - first + r0 + octet) * STRIDE + c.warp
                    c.part[place], c.part[place + STRIDE] = gate, up
        stage_done(c, slot)
        it += 1
        at_row += many
    consumers(op)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        gate = gathered(c, 2 * i, op.up_warps) * CODE_SCALE
        up = gathered(c, 2 * i + 1, op.up_warps) * CODE_SCALE
        post(c, "h", turn, first + i, situ(gate, up), op)
    return it


@cute.jit
def unit_down(
    c: Ctx, place: Int32, k: Int32, r0: Int32, n: Int32, given: tuple, op: cutlass.Constexpr
):
    """sF[slot k, row] = bf(w2 h) of the rows r0 .. r0 + 15 of `n` of the piece at byte `place` of the ring."""
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
    for v in cutlass.range(-(-groups // 4), unroll=1):
        j = 4 * v + quarter
        load_group(cute.local_tile(sH, (16 * groups,), (k,)), j, groups, rX)
        j = j if j < groups else groups - 1
        couple(
            rC,
            codes(c, (place + a * g.code_bytes) // 16 + j, scales + a * g.scale_bytes + j),
            codes(c, (place + b * g.code_bytes) // 16 + j, scales + b * g.scale_bytes + j),
            rX,
        )
    x, y = diagonal(c, rC)
    if quarter == octet // 2:
        if r0 + octet < n:
            sF[k * op.down_rows + r0 + octet] = round_bf16(x * CODE_SCALE)
        if r0 + octet + 8 < n:
            sF[k * op.down_rows + r0 + octet + 8] = round_bf16(y * CODE_SCALE)


@cute.jit
def pieces_down(c: Ctx, layer: Int32, turn: Int32, it: Int32, op: cutlass.Constexpr):
    """z = bf(bf(sum over slots of w_e bf(w2_e h)) + the others') of this CTA's rows."""
    d, g = op.d, op.down
    first, n = share(d.latent, c.cta, op.ctas, g.unit)
    sH = view(c, Uint32, 0, d.topk * d.expert_dim // 2)
    sF = view(c, Float32, 2 * d.topk * d.expert_dim, d.topk * op.down_rows)
    if cutlass.const_expr(d.ranks > 1):
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
            place = slot * op.stage + k * piece
            unit_down(c, place, start + k, unit % units * 16, n, (sH, sF), op)
        stage_done(c, slot)
        it += 1
    consumers(op)
    for k_ in cutlass.range_constexpr(-(-op.down_rows // op.threads)):
        i = c.tid + k_ * op.threads
        if i < n:
            total = Float32(0.0)
            for k in cutlass.range(op.d.topk, unroll_full=True):
                total += c.weights[k] * sF[k * op.down_rows + i]
            if cutlass.const_expr(d.ranks > 1):
                total = round_bf16(total) + rRemote[k_]
            post(c, "z", turn, first + i, total, op)
    return it
