"""w1 and w3 of the routed experts in the tile kernel: stages of eight rows of each, sums over the warps, h."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import situ
from targets.kimi_k3.seeds.latent_moe_codes import pair_up
from targets.kimi_k3.seeds.persistent.boxes import peek
from targets.kimi_k3.seeds.persistent.device import consumers, field
from targets.kimi_k3.seeds.persistent.ring import bulk, stage_done, stage_free, stage_full
from targets.kimi_k3.seeds.persistent.stages import share
from targets.kimi_k3.seeds.persistent.tile_boxes import place, send, sure, to_vec
from targets.kimi_k3.seeds.persistent.tile_codes import CODE_SCALE_T, unit_times, wanted
from targets.kimi_k3.seeds.persistent.tile_device import COUNT_T, T, Tiles, within
from targets.kimi_k3.seeds.persistent.tile_plan import CODE_TILE
from targets.kimi_k3.seeds.persistent.tile_rows import sum_of


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
    """rL[4, 4, chunks]: this lane's groups of its token's latent, own and on their way."""
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
    """c.vec = hs, then the latent, own and pairs in the order of `spread`; of a single token. A barrier."""
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
        if c.tid + v * op.threads < vecs:
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
def hold_unit(c: Tiles, rC: cute.Tensor, mask: Int32, held: Int32, op: cutlass.Constexpr):
    """part[16 (held + n) + row, warp] for the n-th token that wants this expert."""
    octet = c.lane // 4
    if cutlass.const_expr(op.tokens > 1):
        hold_two(c, rC, mask, held, op)
    elif c.lane % 4 == 0:
        c.part[(held * 16 + octet) * op.stride + c.warp] = rC[0, 0]
        c.part[(held * 16 + octet + 8) * op.stride + c.warp] = rC[2, 0]


@cute.jit
def hold_two(c: Tiles, rC: cute.Tensor, mask: Int32, held: Int32, op: cutlass.Constexpr):
    """`hold_unit` of a lane's two tokens: one place, the second one's behind the first's if that one wants the expert;
    stores under predicates, since every warp does this for every stage. Bits of tokens that are none are zero."""
    first = c.lane % 4 * 2
    n = held + cute.arch.popc(mask & ((Int32(1) << first) - 1))
    here = (n * 16 + c.lane // 4) * op.stride + c.warp
    apart, lower = 64 * op.stride, 32 * op.stride
    cute.arch.inline_ptx(
        f"""{{
        .reg .pred p, q;
        .reg .b32 one, next;
        and.b32 one, {{$r1}}, 1;
        setp.ne.b32 p, one, 0;
        mad.lo.s32 next, one, {apart}, {{$r0}};
        and.b32 one, {{$r1}}, 2;
        setp.ne.b32 q, one, 0;
        @p st.shared.f32 [{{$r0}}], {{$r2}};
        @p st.shared.f32 [{{$r0}} + {lower}], {{$r4}};
        @q st.shared.f32 [next], {{$r3}};
        @q st.shared.f32 [next + {lower}], {{$r5}};
        }}""",
        read_only_args=[
            Int32((c.part.iterator + here).toint()), mask >> first, rC[0, 0], rC[1, 0], rC[2, 0], rC[3, 0]
        ],
    )  # fmt: skip


@cute.jit
def send_hidden(c: Tiles, layer: Int32, held: Int32, op: cutlass.Constexpr):
    """bf(SiTU(gate, up)) of what was held; eight elements in the order in which `spread` makes its pairs."""
    consumers(op)
    for i in cutlass.range(c.tid, held * CODE_TILE, op.threads, unroll=1):
        n, r = i // CODE_TILE, i % CODE_TILE
        gate = sum_of(c, n * 16 + 2 * r, op.up_active, op) * CODE_SCALE_T
        up = sum_of(c, n * 16 + 2 * r + 1, op.up_active, op) * CODE_SCALE_T
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
