"""Kernels in CuTe DSL in styles that the seeds do not use, for the cpu device: each a host function of tensors.

Compiled by the test in a process of its own; nothing here knows the device.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

THREADS = 128


@cute.kernel
def saxpy_kernel(x: cute.Tensor, y: cute.Tensor, a: cutlass.Constexpr):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    i = bid * THREADS + tid
    if i < cute.size(x):
        y[i] = x[i] * a + y[i]


@cute.jit
def saxpy(x: cute.Tensor, y: cute.Tensor, stream):
    saxpy_kernel(x, y, 3.0).launch(
        grid=(cute.ceil_div(cute.size(x), THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.kernel
def softmax_kernel(x: cute.Tensor, y: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    lane, warp = tid % 32, tid // 32
    part = cutlass.Array(Float32, 8, space=cutlass.AddressSpace.smem, alignment=16)
    v = x[row, tid]
    m = cute.arch.warp_reduction_max(v)
    if lane == 0:
        part[warp] = m
    cute.arch.sync_threads()
    m = cute.arch.fmax(cute.arch.fmax(part[0], part[1]), cute.arch.fmax(part[2], part[3]))
    e = cute.math.exp2((v - m) * 1.4426950408889634, fastmath=True)
    s = cute.arch.warp_reduction_sum(e)
    if lane == 0:
        part[4 + warp] = s
    cute.arch.sync_threads()
    y[row, tid] = e / (part[4] + part[5] + part[6] + part[7])


@cute.jit
def softmax(x: cute.Tensor, y: cute.Tensor, stream):
    softmax_kernel(x, y).launch(grid=(x.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def transpose_kernel(x: cute.Tensor, y: cute.Tensor):
    tx, ty, _ = cute.arch.thread_idx()
    bx, by, _ = cute.arch.block_idx()
    tile = cutlass.Array(Float32, 16 * 17, space=cutlass.AddressSpace.smem, alignment=16)
    tile[ty * 17 + tx] = x[by * 16 + ty, bx * 16 + tx]
    cute.arch.sync_threads()
    y[bx * 16 + ty, by * 16 + tx] = tile[tx * 17 + ty]


@cute.jit
def transpose(x: cute.Tensor, y: cute.Tensor, stream):
    transpose_kernel(x, y).launch(
        grid=(x.shape[1] // 16, x.shape[0] // 16, 1), block=(16, 16, 1), stream=stream
    )


@cute.kernel
def histogram_kernel(x: cute.Tensor, h: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    v = x[bid * THREADS + tid]
    cute.arch.atomic_add(h.iterator + v % 16, Int32(1), sem="relaxed", scope="gpu")


@cute.jit
def histogram(x: cute.Tensor, h: cute.Tensor, stream):
    histogram_kernel(x, h).launch(
        grid=(cute.size(x) // THREADS, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.kernel
def scan_kernel(x: cute.Tensor, y: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    s = cutlass.Array(Int32, 2 * THREADS, space=cutlass.AddressSpace.smem, alignment=16)
    s[tid] = x[tid]
    cute.arch.sync_threads()
    for k in cutlass.range_constexpr(7):
        v = s[(k % 2) * THREADS + tid]
        if tid >= (1 << k):
            v = v + s[(k % 2) * THREADS + tid - (1 << k)]
        s[((k + 1) % 2) * THREADS + tid] = v
        cute.arch.sync_threads()
    y[tid] = s[THREADS + tid]


@cute.jit
def scan(x: cute.Tensor, y: cute.Tensor, stream):
    scan_kernel(x, y).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def norm_kernel(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    xr = cute.make_rmem_tensor((8,), BFloat16)
    part = cutlass.Array(Float32, 1, space=cutlass.AddressSpace.smem, alignment=16)
    gx = cute.logical_divide(x, (None, 8))
    cute.autovec_copy(gx[row, (None, tid)], xr)
    v = xr.load().to(Float32)
    s = cute.arch.warp_reduction_sum((v * v).reduce(cute.ReductionOp.ADD, Float32(0.0), 0))
    if tid == 0:
        part[0] = s
    cute.arch.sync_threads()
    r = cute.math.rsqrt(part[0] / 256.0 + 1e-5, fastmath=True)
    for i in cutlass.range_constexpr(8):
        y[row, tid * 8 + i] = (Float32(xr[i]) * r * Float32(w[tid * 8 + i])).to(BFloat16)


@cute.jit
def norm(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, stream):
    norm_kernel(x, w, y).launch(grid=(x.shape[0], 1, 1), block=(32, 1, 1), stream=stream)


@cute.kernel
def pick_kernel(x: cute.Tensor, y: cute.Tensor):
    """A data-dependent loop with divergence: steps of the Collatz sequence."""
    tid, _, _ = cute.arch.thread_idx()
    v = x[tid]
    n = Int32(0)
    while v != 1:
        if v % 2 == 0:
            v = v // 2
        else:
            v = 3 * v + 1
        n += 1
    y[tid] = n


@cute.jit
def pick(x: cute.Tensor, y: cute.Tensor, stream):
    pick_kernel(x, y).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def last_kernel(x: cute.Tensor, part: cute.Tensor, ticket: cute.Tensor, y: cute.Tensor):
    """The block that arrives last adds up the others' sums."""
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    gid, _, _ = cute.arch.grid_dim()
    flag = cutlass.Array(Int32, 1, space=cutlass.AddressSpace.smem, alignment=4)
    s = cute.arch.warp_reduction_sum(x[bid * 32 + tid])
    if tid == 0:
        part[bid] = s
        flag[0] = cute.arch.atomic_add(ticket.iterator, Int32(1), sem="acq_rel", scope="gpu")
    cute.arch.sync_threads()
    if flag[0] == gid - 1:
        if tid == 0:
            total = Float32(0.0)
            for i in cutlass.range(gid):
                total += cute.arch.load(part.iterator + i, Float32, cop="cg")
            y[0] = total


@cute.jit
def last(x: cute.Tensor, part: cute.Tensor, ticket: cute.Tensor, y: cute.Tensor, stream):
    last_kernel(x, part, ticket, y).launch(
        grid=(part.shape[0], 1, 1), block=(32, 1, 1), stream=stream
    )


@cute.kernel
def convert_kernel(x: cute.Tensor, y: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    y[tid] = x[tid].to(cutlass.Float16)


@cute.jit
def convert(x: cute.Tensor, y: cute.Tensor, stream):
    convert_kernel(x, y).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def stencil_kernel(x: cute.Tensor, y: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    n = cute.size(x)
    left = tid - 1 if tid > 0 else n - 1
    right = tid + 1 if tid < n - 1 else 0
    y[tid] = 0.25 * x[left] + 0.5 * x[tid] + 0.25 * x[right]


@cute.jit
def stencil(x: cute.Tensor, y: cute.Tensor, stream):
    stencil_kernel(x, y).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)
