"""The context of a thread of the tile kernel: where it is, the shared memory of its CTA, how all of it is set up."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.common import smem
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
