"""Routed experts of the tile kernel: MXFP4 rows through the ring, sixteen of them by all tokens in one MMA."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32

from targets.kimi_k3.seeds.common import round_bf16, situ
from targets.kimi_k3.seeds.latent_moe import pair_up, scale_word
from targets.kimi_k3.seeds.persistent.device import (
    at,
    bulk,
    consumers,
    field,
    gathered,
    mma_rows,
    peek,
    stage_done,
    stage_free,
    stage_full,
    words_at,
)
from targets.kimi_k3.seeds.persistent.plan import STRIDE, share
from targets.kimi_k3.seeds.persistent.tile_device import (
    COUNT_T,
    T,
    Tiles,
    place,
    send,
    sure,
    to_vec,
    within,
)
from targets.kimi_k3.seeds.persistent.tile_plan import CODE_TILE

CODE_SCALE_T = 2.0**62
"""Expanded codes are 2^-62 of their value."""

# ---- producer


@cute.jit
def wanted(c: Tiles, op: cutlass.Constexpr):
    """How many experts the tokens want."""
    found = Int32(op.d.topk)
    if cutlass.const_expr(op.tokens > 1):
        found = c.count[0]
    return found


@cute.jit
def fill_units(c: Tiles, layer: Int32, it: Int32, op: cutlass.Constexpr):
    """This CTA's stages of w1 and w3: [8 rows of w1 | 8 of w3, shifted | scales of both]. Four lanes copy."""
    d, g = op.d, op.up
    first, n = share(wanted(c, op) * op.up_units, c.cta, op.ctas)
    half = c.lane % 2
    codes, scales = CODE_TILE * g.code_bytes, CODE_TILE * g.scale_bytes
    w = field(c, layer, T["w1"], COUNT_T) if half == 0 else field(c, layer, T["w3"], COUNT_T)
    target = half * op.up_block
    size, row_bytes = Int32(codes), Int32(g.code_bytes)
    if c.lane >= 2:
        w = (
            field(c, layer, T["w1_scale"], COUNT_T)
            if half == 0
            else field(c, layer, T["w3_scale"], COUNT_T)
        )
        target = op.up_scales + half * scales
        size, row_bytes = Int32(scales), Int32(g.scale_bytes)
    for u in cutlass.range(first, first + n, unroll=1):
        slot = stage_free(c, it, op)
        row = c.ids[u // op.up_units] * d.expert_dim + u % op.up_units * CODE_TILE
        if c.lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(c.full + slot, 2 * (codes + scales))
        cute.arch.sync_warp()
        if c.lane < 4:
            bulk(c, slot, target, w + Int64(row) * row_bytes, size, op)
        it += 1
    return it


@cute.jit
def fill_pieces(c: Tiles, layer: Int32, it: Int32, op: cutlass.Constexpr):
    """This CTA's rows of w2 of every expert, `down_slots` experts a stage: [codes | scales] each. A lane an expert."""
    d, g = op.d, op.down
    first, n = share(d.latent, c.cta, op.ctas, g.unit)
    w = field(c, layer, T["w2"], COUNT_T)
    scale = field(c, layer, T["w2_scale"], COUNT_T)
    experts = wanted(c, op)
    for start in cutlass.range(0, experts, op.down_slots, unroll=1):
        slot = stage_free(c, it, op)
        many = experts - start if experts - start < op.down_slots else Int32(op.down_slots)
        if c.lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(
                c.full + slot, many * n * (g.code_bytes + g.scale_bytes)
            )
        cute.arch.sync_warp()
        for k in cutlass.range(c.lane, many, 32, unroll=1):
            row = Int64(c.ids[start + k]) * d.latent + first
            bulk(c, slot, k * op.down_piece, w + row * g.code_bytes, n * g.code_bytes, op)
            at_scale = k * op.down_piece + op.down_rows * g.code_bytes
            bulk(c, slot, at_scale, scale + row * g.scale_bytes, n * g.scale_bytes, op)
        it += 1
    return it


# ---- consumers


@cute.jit
def group_of(c: Tiles, at_code: Int32, at_scale: Int32):
    """(codes, factor) of one group of 32: four words from the ring, 16 bytes times `at_code` in."""
    rW = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    cute.autovec_copy(cute.local_tile(c.ring, (4,), (at_code,)), rW)
    byte = cute.recast_tensor(c.ring, Uint8)[at_scale]
    return rW, scale_word(Uint32(byte) & Uint32(0xFF))


@cute.jit
def spread(word: Uint32, scale: Uint32):
    """As `latent_moe.expand`, two instructions in seven cheaper: a product makes two copies of a nibble, 6 and 12 bits
    up, of which one gives the magnitude and the other the sign. Multiplications run beside the logic, which is scarce.
    """
    return cute.arch.inline_ptx(
        """{
        .reg .b32 m, y;
        and.b32 m, {$r0}, 0x000F000F;  mul.lo.u32 m, m, 0x1040;
        and.b32 m, m, 0x81C081C0;      mul.rn.bf16x2 {$w0}, m, {$r1};
        and.b32 m, {$r0}, 0x00F000F0;  mul.lo.u32 m, m, 0x104;
        and.b32 m, m, 0x81C081C0;      mul.rn.bf16x2 {$w1}, m, {$r1};
        shr.b32 y, {$r0}, 8;
        and.b32 m, y, 0x000F000F;      mul.lo.u32 m, m, 0x1040;
        and.b32 m, m, 0x81C081C0;      mul.rn.bf16x2 {$w2}, m, {$r1};
        and.b32 m, y, 0x00F000F0;      mul.lo.u32 m, m, 0x104;
        and.b32 m, m, 0x81C081C0;      mul.rn.bf16x2 {$w3}, m, {$r1};
        }""",
        write_only_types=[Uint32] * 4,
        read_only_args=[word, scale],
    )


@cute.jit
def codes_times(rC: cute.Tensor, a: tuple, b: tuple, rX: cute.Tensor):
    """rC += a group of row g and one of row g + 8 times the same 32 columns of x, rX words [4, 4]; times 2^-62."""
    for i in cutlass.range_constexpr(4):
        mma_rows(rC, spread(a[0][i], a[1]), spread(b[0][i], b[1]), rX[None, i])


@cute.jit
def latent_place(c: Tiles, k: cutlass.Constexpr, op: cutlass.Constexpr):
    """Which 16 bytes of its token's latent this lane has as its k-th."""
    return ((c.warp * op.up_chunks + k // 4) * 4 + c.lane % 4) * 4 + k % 4


@cute.jit
def latent_at(c: Tiles, layer: Int32, token: Int32, i: Int32, op: cutlass.Constexpr):
    """Address of the i-th 16 bytes of a token's latent, own or gathered."""
    own, far = op.d.latent_rows // 8, (op.d.latent - op.d.latent_rows) // 8
    address = place(c, "latent", layer, op) + Int64(token * own + i) * 16
    if cutlass.const_expr(far > 0):
        other = field(c, layer, T["remote_latent"], COUNT_T) + Int64(token * far + i - own) * 16
        address = address if i < own else other
    return address


@cute.jit
def start_latent(c: Tiles, layer: Int32, op: cutlass.Constexpr):
    """rL[4, 4, chunks]: this lane's groups of its token's latent, own and gathered, on their way."""
    rL = cute.make_rmem_tensor(cute.make_layout((4, 4, op.up_chunks)), Uint32)
    rL.fill(0)
    token = c.lane // 4
    if token < op.tokens and c.warp < op.up_active:
        for k in cutlass.range_constexpr(4 * op.up_chunks):
            peek(latent_at(c, layer, token, latent_place(c, k, op), op), rL[None, k % 4, k // 4])
    return rL


@cute.jit
def end_latent(c: Tiles, layer: Int32, rL: cute.Tensor, op: cutlass.Constexpr):
    """What `start_latent` began, complete, pairs in the order of `spread`."""
    token, own = c.lane // 4, op.d.latent_rows // 8
    if token < op.tokens and c.warp < op.up_active:
        for k in cutlass.range_constexpr(4 * op.up_chunks):
            i = latent_place(c, k, op)
            if i < own:
                address = place(c, "latent", layer, op) + Int64(token * own + i) * 16
                sure(address, rL[None, k % 4, k // 4], 2, op)
            pair_up(rL[None, k % 4, k // 4])


@cute.jit
def inner_alone(c: Tiles, layer: Int32, op: cutlass.Constexpr):
    """c.vec = hs, then the latent, own and gathered, pairs in the order of `spread`; of a single token. A barrier."""
    d = op.d
    own, vecs, first = d.latent_rows // 8, d.latent // 8, d.shared_dim // 8
    many = -(-vecs // op.threads)
    r = cute.make_rmem_tensor(cute.make_layout((4, many)), Uint32)
    start = place(c, "latent", layer, op)
    for v in cutlass.range_constexpr(many):
        i = within(c.tid + v * op.threads, vecs)
        peek(latent_at(c, layer, Int32(0), i, op), r[None, v])
    to_vec(c, place(c, "hs", layer, op), 0, d.shared_dim, op)
    for v in cutlass.range_constexpr(many):
        i = within(c.tid + v * op.threads, vecs)
        if i < own:
            sure(start + Int64(i) * 16, r[None, v], 2, op)
        pair_up(r[None, v])
        cute.autovec_copy(r[None, v], cute.local_tile(c.vec, (4,), (first + i,)))
    consumers(op)


@cute.jit
def latent_alone(c: Tiles, op: cutlass.Constexpr):
    """rL[4, 4, chunks]: the first four lanes' groups of a single token's latent, zero in the others."""
    rL = cute.make_rmem_tensor(cute.make_layout((4, 4, op.up_chunks)), Uint32)
    rL.fill(0)
    if c.lane < 4 and c.warp < op.up_active:
        for k in cutlass.range_constexpr(4 * op.up_chunks):
            i = op.d.shared_dim // 8 + latent_place(c, k, op)
            cute.autovec_copy(cute.local_tile(c.vec, (4,), (i,)), rL[None, k % 4, k // 4])
    return rL


@cute.jit
def hidden_alone(
    c: Tiles, expert: Int32, v: cutlass.Constexpr, rX: cute.Tensor, op: cutlass.Constexpr
):
    """rX[4, 4]: the first four lanes' groups of chunk v of h of expert number `expert`, of a single token."""
    group = 4 * v + c.lane % 4
    groups = op.d.expert_dim // 32
    if c.lane < 4 and group < groups:
        for k in cutlass.range_constexpr(4):
            i = (expert * groups + group) * 4 + k
            cute.autovec_copy(cute.local_tile(c.vec, (4,), (i,)), rX[None, k])


@cute.jit
def unit_times(c: Tiles, slot: Int32, rL: cute.Tensor, op: cutlass.Constexpr):
    """rC[4] of sixteen rows, even ones of w1 and odd ones of w3; this warp's columns."""
    g = op.up
    rC = cute.make_rmem_tensor(cute.make_layout((4, op.up_chunks)), Float32)
    rC.fill(0.0)
    half, i = c.lane // 4 % 2, c.lane // 8
    code = (slot * op.stage + half * op.up_block) // 16 + i * (g.code_bytes // 16)
    scale = slot * op.stage + op.up_scales + (half * CODE_TILE + i) * g.scale_bytes
    for v in cutlass.range_constexpr(op.up_chunks):
        j = (c.warp * op.up_chunks + v) * 4 + c.lane % 4
        codes_times(
            rC[None, v], group_of(c, code + j, scale + j),
            group_of(c, code + 4 * (g.code_bytes // 16) + j, scale + 4 * g.scale_bytes + j), rL[None, None, v],
        )  # fmt: skip
    for v in cutlass.range_constexpr(1, op.up_chunks):
        for e in cutlass.range_constexpr(4):
            rC[e, 0] = rC[e, 0] + rC[e, v]
    return rC


@cute.jit
def hold_unit(c: Tiles, rC: cute.Tensor, mask: Int32, held: Int32, op: cutlass.Constexpr):
    """part[16 (held + n) + row, warp] for the n-th token that wants this expert."""
    octet = c.lane // 4
    for e in cutlass.range_constexpr(2):
        token = c.lane % 4 * 2 + e
        if token < op.tokens:
            if (mask >> token) & 1 != 0:
                n = held + cute.arch.popc(mask & ((Int32(1) << token) - 1))
                c.part[(n * 16 + octet) * STRIDE + c.warp] = rC[e]
                c.part[(n * 16 + octet + 8) * STRIDE + c.warp] = rC[2 + e]


@cute.jit
def send_hidden(c: Tiles, layer: Int32, held: Int32, op: cutlass.Constexpr):
    """bf(SiTU(gate, up)) of what was held; eight elements in the order in which `spread` makes its pairs."""
    consumers(op)
    for i in cutlass.range(c.tid, held * CODE_TILE, op.threads, unroll=1):
        n, r = i // CODE_TILE, i % CODE_TILE
        gate = gathered(c, n * 16 + 2 * r, op.up_active) * CODE_SCALE_T
        up = gathered(c, n * 16 + 2 * r + 1, op.up_active) * CODE_SCALE_T
        send(c, "h", layer, c.origin[n] + r % 4 * 2 + r // 4, situ(gate, up), op)


@cute.jit
def tiles_up(c: Tiles, layer: Int32, it: Int32, rL: cute.Tensor, op: cutlass.Constexpr):
    """h [token, rank, row] = bf(SiTU(w1 latent, w3 latent)) of this CTA's stages; sums wait until `held` are there."""
    d = op.d
    first, n = share(wanted(c, op) * op.up_units, c.cta, op.ctas)
    held = Int32(0)
    for u in cutlass.range(first, first + n, unroll=1):
        i = u // op.up_units
        mask = Int32(1)
        if cutlass.const_expr(op.tokens > 1):
            mask = c.mask[i]
            if held + cute.arch.popc(mask) > op.held:
                send_hidden(c, layer, held, op)
                consumers(op)
                held = Int32(0)
        row = u % op.up_units * CODE_TILE
        slot = stage_full(c, it, op)
        if c.warp < op.up_active:
            rC = unit_times(c, slot, rL, op)
            hold_unit(c, rC, mask, held, op)
        stage_done(c, slot)
        it += 1
        if c.tid < op.tokens:
            if (mask >> c.tid) & 1 != 0:
                pair = i
                if cutlass.const_expr(op.tokens > 1):
                    pair = c.pair[i * op.tokens + c.tid]
                at_ = held + cute.arch.popc(mask & ((Int32(1) << c.tid) - 1))
                c.origin[at_] = pair * d.expert_dim + row
        held += cute.arch.popc(mask)
    send_hidden(c, layer, held, op)
    return it


@cute.jit
def load_hidden(
    c: Tiles,
    layer: Int32,
    expert: Int32,
    v: cutlass.Constexpr,
    rX: cute.Tensor,
    op: cutlass.Constexpr,
):
    """rX[4, 4]: this lane's group of chunk v of h of its token and expert number `expert`; of another expert of this
    token if that one is not wanted, whose weight is zero.
    """
    d = op.d
    groups = d.expert_dim // 32
    token, group = within(c.lane // 4, op.tokens), 4 * v + c.lane % 4
    pair = c.pair[within(expert, wanted(c, op)) * op.tokens + token]
    pair = pair if pair >= 0 else token * d.topk
    start = place(c, "h", layer, op) + Int64(pair) * (2 * d.expert_dim)
    for k in cutlass.range_constexpr(4):
        words_at(start, within(group, groups) * 4 + k, rX[None, k])
        if cutlass.const_expr(groups % 4 != 0):
            for e in cutlass.range_constexpr(4):
                rX[e, k] = rX[e, k] if group < groups else Uint32(0)


@cute.jit
def piece_times(
    c: Tiles, piece: Int32, tile: Int32, v: cutlass.Constexpr, given: tuple, op: cutlass.Constexpr
):  # fmt: skip
    """rC += chunk v of the rows 16 tile .. of the piece at byte `piece` of the ring times rX."""
    rC, rX, n = given
    g = op.down
    groups = op.d.expert_dim // 32
    a = tile * 16 + c.lane // 4
    b = a + 8 if a + 8 < n else n - 1
    a = a if a < n else n - 1
    scales = piece + op.down_rows * g.code_bytes
    j = 4 * v + c.lane % 4
    j = j if j < groups else groups - 1
    codes_times(
        rC, group_of(c, piece // 16 + a * (g.code_bytes // 16) + j, scales + a * g.scale_bytes + j),
        group_of(c, piece // 16 + b * (g.code_bytes // 16) + j, scales + b * g.scale_bytes + j), rX,
    )  # fmt: skip


@cute.jit
def weigh(c: Tiles, expert: Int32, rC: cute.Tensor, rSum: cute.Tensor, op: cutlass.Constexpr):
    """rSum[4] += weight of the expert for the lane's two tokens times bf(rC)."""
    for e in cutlass.range_constexpr(2):
        token = c.lane % 4 * 2 + e
        if token < op.tokens:
            w = c.share[expert * op.tokens + token]
            a, b = round_bf16(rC[e] * CODE_SCALE_T), round_bf16(rC[2 + e] * CODE_SCALE_T)
            rSum[e] = rSum[e] + w * a if w != Float32(0.0) else rSum[e]
            rSum[2 + e] = rSum[2 + e] + w * b if w != Float32(0.0) else rSum[2 + e]


@cute.jit
def tiles_down(c: Tiles, layer: Int32, it: Int32, rRemote: cute.Tensor, op: cutlass.Constexpr):
    """z = bf(bf(sum over experts of w_e bf(w2_e h)) + the others') of this CTA's rows.

    A warp has one tile of the rows and every `down_share`-th expert; the next expert's h is on its way meanwhile.
    """
    d, g = op.d, op.down
    first, n = share(d.latent, c.cta, op.ctas, g.unit)
    experts = wanted(c, op)
    tile, turn = c.warp % op.down_tiles, c.warp // op.down_tiles
    works = turn < op.down_share
    rX = cute.make_rmem_tensor(cute.make_layout((4, 4, op.down_chunks)), Uint32)
    rSum = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rC = cute.make_rmem_tensor(cute.make_layout((4,)), Float32)
    rSum.fill(0.0)
    rX.fill(0)
    expert = turn if works else Int32(op.touched)
    if cutlass.const_expr(op.alone):
        to_vec(c, place(c, "h", layer, op), 0, d.topk * d.expert_dim, op)
        consumers(op)
    else:
        for v in cutlass.range_constexpr(op.down_chunks):
            load_hidden(c, layer, expert, v, rX[None, None, v], op)
    for start in cutlass.range(0, experts, op.down_slots, unroll=1):
        slot = stage_full(c, it, op)
        end = start + op.down_slots if start + op.down_slots < experts else experts
        while expert < end:
            rC.fill(0.0)
            piece = slot * op.stage + (expert - start) * op.down_piece
            for v in cutlass.range_constexpr(op.down_chunks):
                if cutlass.const_expr(op.alone):
                    hidden_alone(c, expert, v, rX[None, None, v], op)
                piece_times(c, piece, tile, v, (rC, rX[None, None, v], n), op)
                if cutlass.const_expr(not op.alone):
                    load_hidden(c, layer, expert + op.down_share, v, rX[None, None, v], op)
            weigh(c, expert, rC, rSum, op)
            expert += op.down_share
        stage_done(c, slot)
        it += 1
    octet = c.lane // 4
    if works:
        for half in cutlass.range_constexpr(2):
            row = tile * 16 + octet + 8 * half
            for e in cutlass.range_constexpr(2):
                token = c.lane % 4 * 2 + e
                if token < op.tokens and row < n:
                    c.part[(row * op.tokens + token) * STRIDE + turn] = rSum[2 * half + e]
    consumers(op)
    for k in cutlass.range_constexpr(-(-op.down_rows * op.tokens // op.threads)):
        i = c.tid + k * op.threads
        if i < n * op.tokens:
            total = gathered(c, i, op.down_share)
            if cutlass.const_expr(d.ranks > 1):
                total = round_bf16(total) + rRemote[k]
            send(c, "z", layer, i % op.tokens * d.latent + first + i // op.tokens, total, op)
    return it


@cute.jit
def others_sums(c: Tiles, layer: Int32, op: cutlass.Constexpr):
    """This thread's sums of the other ranks for `tiles_down`, on their way before they are wanted."""
    d = op.d
    many = -(-op.down_rows * op.tokens // op.threads)
    r = cute.make_rmem_tensor(cute.make_layout((many,)), Float32)
    r.fill(0.0)
    if cutlass.const_expr(d.ranks > 1):
        first, n = share(d.latent, c.cta, op.ctas, op.down.unit)
        gFar = at(Float32, field(c, layer, T["remote_moe"], COUNT_T), op.tokens * d.latent)
        for k in cutlass.range_constexpr(many):
            i = within(c.tid + k * op.threads, n * op.tokens)
            r[k] = gFar[i % op.tokens * d.latent + first + i // op.tokens]
    return r
