"""Taps of the convolution move on when a launch ends: until then its newest q, k and v wait in the mail.

All CTAs of a head read the taps of its q and k, and copies of v take in a neighbour's. Boxes and hints would not order
those reads before a store by another CTA; the last edge of a launch, which releases and acquires, does. No arithmetic.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from targets.kimi_k3.seeds.persistent.device import Ctx, field, words_at
from targets.kimi_k3.seeds.persistent.fields import COUNT, F


@cute.jit
def fresh(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """Address of the newest of a layer: bf16 [token, q | k | v], written for tokens that have a slot."""
    return c.mail + op.fresh_at + Int64(layer) * op.fresh_bytes


@cute.jit
def move_taps(c: Ctx, slots: cute.Tensor, op: cutlass.Constexpr):
    """After the last edge. Eight channels of a token and layer at a time, dealt to the threads of all CTAs."""
    d = op.d
    layers = [n for n, kind in enumerate(d.attn) if kind == "K"]
    vectors = 3 * d.kda_dim // 8
    each = d.rows * vectors
    for i in cutlass.range(
        c.cta * op.threads + c.tid, len(layers) * each, op.ctas * op.threads, unroll=1
    ):
        layer = Int32(layers[0])
        for k in cutlass.range_constexpr(1, len(layers)):
            layer = Int32(layers[k]) if i >= k * each else layer
        slot = slots[i // vectors % d.rows]
        if slot > 0:
            taps = field(c, layer, F["state_conv"], COUNT) + Int64(slot) * (18 * d.kda_dim)
            taps += Int64(i % vectors) * 16
            rT = cute.make_rmem_tensor(cute.make_layout((4, 3)), Uint32)
            words_at(taps + 6 * d.kda_dim, Int32(0), rT[None, 0])
            words_at(taps + 12 * d.kda_dim, Int32(0), rT[None, 1])
            words_at(fresh(c, layer, op), i % each, rT[None, 2])
            for k in cutlass.range_constexpr(3):
                to = cute.make_ptr(
                    Uint32, taps + 6 * d.kda_dim * k, cute.AddressSpace.gmem, assumed_align=16
                )
                cute.autovec_copy(rT[None, k], cute.make_tensor(to, cute.make_layout((4,))))
