"""What a CTA of a persistent kernel does first: shared memory, mbarriers, the table of addresses."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from kernelgen import timeline

from targets.kimi_k3.seeds.common import smem
from targets.kimi_k3.seeds.persistent.device import Ctx
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.stages import STRIDE


def further_bars(op):
    """mbarriers behind `Ctx.routed` by which consumers tell the warp that chooses experts, where there is one."""
    return 2 if getattr(op, "units", False) else 0


@cute.jit
def open_cta(
    layers: tuple,
    mSync: cute.Tensor,
    mMail: Any,
    phases: Any,
    names: cutlass.Constexpr,
    kinds: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
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
    more = further_bars(op)
    bars = smem(Int64, (2 * op.stages + 1 + more,), (1,)).iterator
    c = Ctx(
        tid, warp, tid % 32, cta, ring, bars, bars + op.stages, bars + 2 * op.stages,
        smem(Float32, (op.part_rows * STRIDE,), (1,)), smem(Float32, (op.reductions * STRIDE,), (1,)),
        smem(Int64, (d.layers * COUNT,), (1,)), smem(Int32, (d.topk,), (1,)), smem(Float32, (d.topk,), (1,)),
        smem(Float32, (-(-d.hidden_local // op.ctas),), (1,)), smem(Uint32, (op.pool // 4,), (1,)),
        mSync.iterator, smem(Int32, (8,), (1,)),
        Int64(0) if cutlass.const_expr(mMail is None) else mMail.iterator.toint(),
        timeline.track(phases, cta, tid == 0), timeline.track(phases, op.ctas + cta, tid == op.threads),
        smem(Int32, (160,), (1,)) if cutlass.const_expr(op.kept) else None,
        smem(Uint32, (op.kept_words,), (1,)) if cutlass.const_expr(op.kept_words > 0) else None,
    )  # fmt: skip
    if tid < 8:
        c.base[tid] = mSync[96 + tid]
    if tid == 0:
        for s in cutlass.range_constexpr(op.stages):
            cute.arch.mbarrier_init(c.full + s, 1)
            cute.arch.mbarrier_init(c.empty + s, op.warps)
        cute.arch.mbarrier_init(c.routed, 1)
        for s in cutlass.range_constexpr(more):
            cute.arch.mbarrier_init(c.routed + 1 + s, 1)
    for n in cutlass.range_constexpr(d.layers):
        if tid == 32 * (n % op.warps):
            for i in cutlass.range_constexpr(len(names[n])):
                c.tab[n * COUNT + F[names[n][i]]] = layers[n][i].iterator.toint()
            c.tab[n * COUNT + F["kind"]] = Int64(kinds[n])
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return c


def lasting(op):
    """Workspace that goes on from launch to launch: boxes and counters."""
    return {
        "mail": ("i32", (op.mail_words,), "undefined", "persistent"),
        "sync": ("i32", (128,), "zero", "persistent"),
    }


@cute.kernel
def empty_kernel(mMail: cute.Tensor):
    """All boxes empty; grid (words / 128), 128 threads."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    i = cta * 128 + tid
    if i < cute.size(mMail):
        mMail[i] = Int32(-1)


@cute.jit
def empty_boxes(mMail: cute.Tensor, stream):
    empty_kernel(mMail).launch(
        grid=(cute.ceil_div(cute.size(mMail), 128), 1, 1), block=(128, 1, 1), stream=stream
    )
