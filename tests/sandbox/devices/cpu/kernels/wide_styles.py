"""More kernels in CuTe DSL in styles that the seeds do not use: tiled copies, cp.async pipelines, MMA atoms, bulk
copies with mbarriers and specialised warps, clusters, work queues, sorting by shuffles, vector reductions, online
softmax.

The tests keep what they compile to; nothing here knows the device.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp

SMEM = cutlass.AddressSpace.smem


@cute.kernel
def tiled_kernel(x: cute.Tensor, y: cute.Tensor, tiler: cutlass.Constexpr, copy: cute.TiledCopy):
    """Tiles of a matrix by a thread-value layout, through registers."""
    tid, _, _ = cute.arch.thread_idx()
    bx, by, _ = cute.arch.block_idx()
    mine = copy.get_slice(tid)
    gX = mine.partition_S(cute.local_tile(x, tiler, (by, bx)))
    gY = mine.partition_D(cute.local_tile(y, tiler, (by, bx)))
    r = cute.make_fragment_like(gX)
    cute.copy(copy, gX, r)
    r.store(r.load() * 2.0 + 1.0)
    cute.copy(copy, r, gY)


@cute.jit
def tiled(x: cute.Tensor, y: cute.Tensor, stream):
    threads = cute.make_layout((4, 32), stride=(32, 1))
    values = cute.make_layout((2, 4), stride=(4, 1))
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=128)
    copy = cute.make_tiled_copy_tv(atom, threads, values)
    tiled_kernel(x, y, (8, 128), copy).launch(
        grid=(x.shape[1] // 128, x.shape[0] // 8, 1), block=(128, 1, 1), stream=stream
    )


@cute.jit
def aligned(t: cute.Tensor):
    """Four floats that start at a multiple of 16 bytes."""
    return cute.make_tensor(t.iterator.align(16), t.layout)


@cute.kernel
def pipeline_kernel(x: cute.Tensor, y: cute.Tensor):
    """Rows in stages of cp.async, three in flight; each thread adds up four columns."""
    tid, _, _ = cute.arch.thread_idx()
    base = cutlass.Array(Float32, 3 * 128, space=SMEM, alignment=128)
    stages = cute.make_tensor(base.data_ptr(), cute.make_layout((4, 32, 3), stride=(1, 4, 128)))
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL),
        Float32,
        num_bits_per_copy=128,
    )
    g = cute.logical_divide(x, (None, 4))
    rows = x.shape[0]
    for k in cutlass.range_constexpr(2):
        cute.copy(atom, g[k, (None, tid)], aligned(stages[None, tid, k]))
        cute.arch.cp_async_commit_group()
    total = cute.make_rmem_tensor((4,), Float32)
    total.fill(0.0)
    for k in cutlass.range(rows, unroll=1):
        if k + 2 < rows:
            cute.copy(atom, g[k + 2, (None, tid)], aligned(stages[None, tid, (k + 2) % 3]))
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(2)
        total.store(total.load() + stages[None, tid, k % 3].load())
    cute.autovec_copy(total, cute.local_tile(y, (4,), (tid,)))


@cute.jit
def pipeline(x: cute.Tensor, y: cute.Tensor, stream):
    pipeline_kernel(x, y).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.kernel
def gemm_kernel(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, mma: cute.TiledMma):
    """One 16 x 8 tile a warp by an MMA atom; fragments straight from global memory."""
    tid, _, _ = cute.arch.thread_idx()
    bx, by, _ = cute.arch.block_idx()
    mine = mma.get_slice(tid)
    gA = mine.partition_A(cute.local_tile(a, (16, a.shape[1]), (by, 0)))
    gB = mine.partition_B(cute.local_tile(b, (8, b.shape[1]), (bx, 0)))
    gC = mine.partition_C(cute.local_tile(c, (16, 8), (by, bx)))
    rA, rB = mma.make_fragment_A(gA), mma.make_fragment_B(gB)
    acc = mma.make_fragment_C(gC)
    acc.fill(0.0)
    cute.autovec_copy(gA, rA)
    cute.autovec_copy(gB, rB)
    for k in cutlass.range_constexpr(cute.size(rA, mode=[2])):
        cute.gemm(mma, acc, rA[None, None, k], rB[None, None, k], acc)
    cute.autovec_copy(acc, gC)


@cute.jit
def gemm(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
    mma = cute.make_tiled_mma(warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16)))
    gemm_kernel(a, b, c, mma).launch(
        grid=(c.shape[1] // 8, c.shape[0] // 16, 1), block=(32, 1, 1), stream=stream
    )


@cute.kernel
def bytes_kernel(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    """int8 matrix product of one warp, in words: m16n8k32."""
    tid, _, _ = cute.arch.thread_idx()
    row, col = tid // 4, tid % 4
    d = cute.make_rmem_tensor((4,), Int32)
    d.fill(0)
    for k in cutlass.range(a.shape[1] // 8, unroll=1):
        out = cute.arch.inline_ptx(
            """mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {{$w0}, {$w1}, {$w2}, {$w3}},
            {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};""",
            write_only_types=[Int32] * 4,
            read_only_args=[
                a[row, 8 * k + col], a[row + 8, 8 * k + col], a[row, 8 * k + col + 4], a[row + 8, 8 * k + col + 4],
                b[row, 8 * k + col], b[row, 8 * k + col + 4], d[0], d[1], d[2], d[3],
            ],
        )  # fmt: skip
        for i in cutlass.range_constexpr(4):
            d[i] = out[i]
    for i in cutlass.range_constexpr(4):
        c[row + 8 * (i // 2), 2 * col + i % 2] = d[i]


@cute.jit
def bytes_(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
    bytes_kernel(a, b, c).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.kernel
def ring_kernel(x: cute.Tensor, y: cute.Tensor):
    """Warp 0 feeds a ring of bulk copies, warps 1 to 3 consume it; full and empty mbarriers."""
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    bars = cutlass.Array(Int64, 4, space=SMEM, alignment=8)
    data = cutlass.Array(Float32, 2 * 96, space=SMEM, alignment=128)
    full, empty = bars.data_ptr(), bars.data_ptr() + 2
    if tid == 0:
        for s in cutlass.range_constexpr(2):
            cute.arch.mbarrier_init(full + s, 1)
            cute.arch.mbarrier_init(empty + s, 3)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    turns = x.shape[1]
    if tid // 32 == 0:
        if tid == 0:
            for k in cutlass.range(turns, unroll=1):
                slot = k % 2
                if k >= 2:
                    cute.arch.mbarrier_wait(empty + slot, (k // 2 - 1) & 1)
                cute.arch.mbarrier_arrive_and_expect_tx(full + slot, 384)
                cute.arch.inline_ptx(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                    " [{$r0}], [{$r1}], {$r2}, [{$r3}];",
                    read_only_args=[
                        Int32((data.data_ptr() + slot * 96).toint()), x.iterator.toint() + Int64(bid * turns + k) * 384,
                        Int32(384), Int32((full + slot).toint()),
                    ],
                )  # fmt: skip
    else:
        total = Float32(0.0)
        for k in cutlass.range(turns, unroll=1):
            slot = k % 2
            cute.arch.mbarrier_wait(full + slot, (k // 2) & 1)
            total += data[slot * 96 + tid - 32]
            cute.arch.sync_warp()
            if tid % 32 == 0:
                cute.arch.mbarrier_arrive(empty + slot)
        y[bid, tid - 32] = total


@cute.jit
def ring(x: cute.Tensor, y: cute.Tensor, stream):
    ring_kernel(x, y).launch(grid=(x.shape[0], 1, 1), block=(128, 1, 1), stream=stream)


@cute.kernel
def cluster_kernel(x: cute.Tensor, y: cute.Tensor):
    """Four blocks of a cluster add up one row: each puts its part into the shared memory of all."""
    tid, _, _ = cute.arch.thread_idx()
    row, rank = cute.arch.block_idx()[1], cute.arch.block_idx_in_cluster()
    part = cutlass.Array(Float32, 4, space=SMEM, alignment=16)
    s = cute.arch.warp_reduction_sum(x[row, rank * 32 + tid])
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    if tid < 4:
        cute.arch.inline_ptx(
            "{ .reg .b32 a; mapa.shared::cluster.u32 a, {$r0}, {$r1}; st.shared::cluster.f32 [a], {$r2}; }",
            read_only_args=[Int32((part.data_ptr() + rank).toint()), Int32(tid), s],
        )
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    y[row, rank * 32 + tid] = x[row, rank * 32 + tid] / (part[0] + part[1] + part[2] + part[3])


@cute.jit
def cluster(x: cute.Tensor, y: cute.Tensor, stream):
    cluster_kernel(x, y).launch(
        grid=(4, x.shape[0], 1), block=(32, 1, 1), cluster=(4, 1, 1), stream=stream
    )


@cute.kernel
def queue_kernel(x: cute.Tensor, y: cute.Tensor, head: cute.Tensor):
    """Persistent blocks that draw rows of unequal length from a counter."""
    tid, _, _ = cute.arch.thread_idx()
    slot = cutlass.Array(Int32, 1, space=SMEM, alignment=4)
    row = Int32(0)
    while row < x.shape[0]:
        cute.arch.sync_threads()
        if tid == 0:
            slot[0] = cute.arch.atomic_add(head.iterator, Int32(1), sem="relaxed", scope="gpu")
        cute.arch.sync_threads()
        row = slot[0]
        if row < x.shape[0]:
            total = Int32(0)
            for i in cutlass.range(tid, row + 1, 64, unroll=1):
                total += x[row, i]
            total = cute.arch.warp_redux_sync(total, "add")
            if tid % 32 == 0:
                cute.arch.atomic_add(y.iterator + row, total, sem="relaxed", scope="gpu")


@cute.jit
def queue(x: cute.Tensor, y: cute.Tensor, head: cute.Tensor, stream):
    queue_kernel(x, y, head).launch(grid=(5, 1, 1), block=(64, 1, 1), stream=stream)


@cute.kernel
def bitonic_kernel(x: cute.Tensor, y: cute.Tensor):
    """32 keys a warp sorted by exchanges over lanes."""
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    lane = tid % 32
    v = x[bid * 64 + tid]
    for k in cutlass.range_constexpr(1, 6):
        for j in cutlass.range_constexpr(k):
            step = 1 << (k - 1 - j)
            other = cute.arch.shuffle_sync_bfly(v, step)
            small = ((lane >> k) & 1) == ((lane // step) & 1)
            low, high = (v, other) if v < other else (other, v)
            v = low if small else high
    y[bid * 64 + tid] = v


@cute.jit
def bitonic(x: cute.Tensor, y: cute.Tensor, stream):
    bitonic_kernel(x, y).launch(grid=(cute.size(x) // 64, 1, 1), block=(64, 1, 1), stream=stream)


@cute.kernel
def scatter_kernel(x: cute.Tensor, where: cute.Tensor, y: cute.Tensor):
    """Rows of four added to where an index says, by vector reductions; packed halves too."""
    tid, _, _ = cute.arch.thread_idx()
    row = where[tid]
    cute.arch.inline_ptx(
        "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[
            y.iterator.toint() + Int64(row) * 16, x[tid, 0], x[tid, 1], x[tid, 2], x[tid, 3],
        ],
    )  # fmt: skip


@cute.jit
def scatter(x: cute.Tensor, where: cute.Tensor, y: cute.Tensor, stream):
    scatter_kernel(x, where, y).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)


@cute.kernel
def online_kernel(q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, y: cute.Tensor):
    """Attention of one query a warp: scores and values in one pass, the maximum carried along."""
    tid, _, _ = cute.arch.thread_idx()
    head, _, _ = cute.arch.block_idx()
    m, s, o = -Float32.inf, Float32(0.0), Float32(0.0)
    for i in cutlass.range(k.shape[0], unroll=2):
        score = cute.arch.warp_reduction_sum(q[head, tid] * k[i, tid])
        top = cute.arch.fmax(m, score)
        old, new = cute.math.exp(m - top), cute.math.exp(score - top)
        s, o, m = s * old + new, o * old + new * v[i, tid], top
    y[head, tid] = o / s


@cute.jit
def online(q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, y: cute.Tensor, stream):
    online_kernel(q, k, v, y).launch(grid=(q.shape[0], 1, 1), block=(32, 1, 1), stream=stream)


__all__ = [
    "bitonic",
    "bytes_",
    "cluster",
    "gemm",
    "online",
    "pipeline",
    "queue",
    "ring",
    "scatter",
    "tiled",
]
