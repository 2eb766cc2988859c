"""Matrix products of a few rows, y = x W^T, with what a layer needs around them fused in.

One row multiplies in float32 registers; several rows use tensor cores, padded to MP. Every program loads its first tile
of W before it waits for the launch before.
"""

import triton
import triton.language as tl

from targets.kimi_k3.baseline.kernels.common import SHIFT, begin, bf, situ


@triton.jit
def load_w(w, rows, cols, K: tl.constexpr, BK: tl.constexpr):
    """[BN, BK] of W bf16 [N, K]; zero beyond K."""
    at = w + rows[:, None] * K + cols[None, :]
    if K % BK == 0:
        tile = tl.load(at, eviction_policy="evict_first")
    else:
        tile = tl.load(at, mask=(cols < K)[None, :], other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def load_ahead(w, rows, cols, K: tl.constexpr):
    """The tile after next: nothing is read beyond K."""
    at = w + rows[:, None] * K + cols[None, :]
    return tl.load(at, mask=(cols < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def load_x(x, stride, cols, M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr):
    """[MP, BK] of x bf16 [M, >= K]; zero beyond the last row and beyond K."""
    m = tl.arange(0, MP)
    mask = (m < M)[:, None] & (cols < K)[None, :]
    return tl.load(x + m[:, None] * stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def row_scale(x, stride, eps, M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """rsqrt(mean x^2 + eps) of each row, [MP]."""
    total = tl.zeros([MP, BK], dtype=tl.float32)
    for k in range(0, K, BK):
        v = load_x(x, stride, tl.arange(0, BK) + k, M, MP, K).to(tl.float32)
        total += v * v
    return 1.0 / tl.sqrt(tl.sum(total, 1) / K + eps)


@triton.jit
def normed(tile, scale, norm, cols, K: tl.constexpr):
    """bf(x * scale * norm) of one tile."""
    weight = tl.load(norm + cols, mask=cols < K, other=0.0).to(tl.float32)
    return (tile.to(tl.float32) * scale[:, None] * weight[None, :]).to(tl.bfloat16)


@triton.jit
def multiply(acc, w, x, MP: tl.constexpr):
    """acc [BN, BK] with one row, [BN, MP] with several."""
    if MP == 1:
        acc += w.to(tl.float32) * x.to(tl.float32)
    else:
        acc = tl.dot(w, tl.trans(x), acc)
    return acc


@triton.jit
def product(
    x, stride, norm, eps, w, rows,
    M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[BN, MP] f32: the rows of W times x, normalised first with NORM. Waits for the launch before."""
    cols = tl.arange(0, BK)
    first = load_w(w, rows, cols, K, BK)
    if MP == 1 and K > BK:
        second = load_w(w, rows, cols + BK, K, BK)
    begin(PDL)
    if NORM:
        scale = row_scale(x, stride, eps, M, MP, K, BK)
    acc = tl.zeros([BN, BK if MP == 1 else MP], dtype=tl.float32)
    tile = load_x(x, stride, cols, M, MP, K)
    if NORM:
        tile = normed(tile, scale, norm, cols, K)
    acc = multiply(acc, first, tile, MP)
    if MP == 1 and K > BK:
        for k in range(BK, K, BK):
            tile = load_x(x, stride, cols + k, M, MP, K)
            if NORM:
                tile = normed(tile, scale, norm, cols + k, K)
            now = second
            second = load_ahead(w, rows, cols + k + BK, K)
            acc = multiply(acc, now, tile, MP)
    elif K > BK:
        for k in range(BK, K, BK):
            tile = load_x(x, stride, cols + k, M, MP, K)
            if NORM:
                tile = normed(tile, scale, norm, cols + k, K)
            acc = multiply(acc, load_w(w, rows, cols + k, K, BK), tile, MP)
    if MP == 1:
        acc = tl.sum(acc, 1)[:, None]
    return acc


@triton.jit
def gated_product(
    x, stride, w, gate, up,
    M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """[BN, MP] f32 = SiTU(bf(W[gate] x), bf(W[up] x)). Waits for the launch before."""
    cols = tl.arange(0, BK)
    wide: tl.constexpr = BK if MP == 1 else MP
    first_gate = load_w(w, gate, cols, K, BK)
    first_up = load_w(w, up, cols, K, BK)
    if MP == 1 and K > BK:
        next_gate = load_w(w, gate, cols + BK, K, BK)
        next_up = load_w(w, up, cols + BK, K, BK)
    begin(PDL)
    tile = load_x(x, stride, cols, M, MP, K)
    g = multiply(tl.zeros([BN, wide], dtype=tl.float32), first_gate, tile, MP)
    u = multiply(tl.zeros([BN, wide], dtype=tl.float32), first_up, tile, MP)
    if MP == 1 and K > BK:
        for k in range(BK, K, BK):
            tile = load_x(x, stride, cols + k, M, MP, K)
            now_gate = next_gate
            now_up = next_up
            next_gate = load_ahead(w, gate, cols + k + BK, K)
            next_up = load_ahead(w, up, cols + k + BK, K)
            g = multiply(g, now_gate, tile, MP)
            u = multiply(u, now_up, tile, MP)
    elif K > BK:
        for k in range(BK, K, BK):
            tile = load_x(x, stride, cols + k, M, MP, K)
            g = multiply(g, load_w(w, gate, cols + k, K, BK), tile, MP)
            u = multiply(u, load_w(w, up, cols + k, K, BK), tile, MP)
    if MP == 1:
        g = tl.sum(g, 1)[:, None]
        u = tl.sum(u, 1)[:, None]
    return situ(bf(g), bf(u))


@triton.jit
def copy_columns(
    source, target, program, start, stride, begin_at,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """target[m, begin_at + c] = source[m, c] for one block of columns of one row. With PLANES > 1 the target's row is
    f32, times SHIFT, and stored as [PLANES, WIDTH / PLANES], column c at (c % PLANES, c / PLANES)."""
    tiles: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    m = (program - start) // tiles
    c = (program - start) % tiles * BLOCK + tl.arange(0, BLOCK)
    mask = c < COLUMNS
    v = tl.load(source + m * COLUMNS + c, mask=mask, other=0.0)
    to = c + begin_at
    at = to % PLANES * (WIDTH // PLANES) + to // PLANES
    if PLANES > 1:
        tl.store(target + m * stride + at, v.to(tl.float32) * SHIFT, mask=mask)
    else:
        tl.store(target + m * stride + at, v, mask=mask)


@triton.jit
def linear_rows(
    x, stride, norm, eps, w, y, y_stride, remote, send, addend, pid,
    M: tl.constexpr, MP: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NORM: tl.constexpr, MODE: tl.constexpr, OWN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Block `pid` of `linear_kernel`."""
    n = pid * BN + tl.arange(0, BN)
    rows = tl.minimum(n, N - 1)
    acc = product(x, stride, norm, eps, w, rows, M, MP, K, BN, BK, NORM, PDL)
    m = tl.arange(0, MP)
    mask = (n < N)[:, None] & (m < M)[None, :]
    at = m[None, :] * y_stride + n[:, None]
    if MODE == "remote":
        acc = bf(acc) + tl.load(remote + m[None, :] * N + n[:, None], mask=mask, other=0.0)
    if MODE == "addend":
        other = tl.load(addend + m[None, :] * N + n[:, None], mask=mask, other=0.0)
        acc = bf(acc) + other.to(tl.float32)
    if MODE == "split":
        theirs = mask & (n >= OWN)[:, None]
        to = send + m[None, :] * (N - OWN) + n[:, None] - OWN
        tl.store(to, acc.to(tl.bfloat16), mask=theirs)
        mask = mask & (n < OWN)[:, None]
        acc = bf(acc) + tl.load(remote + m[None, :] * OWN + n[:, None], mask=mask, other=0.0)
    tl.store(y + at, acc.to(tl.bfloat16), mask=mask)


@triton.jit
def linear_kernel(
    x, stride, norm, eps, w, y, y_stride, remote, send, addend, tail,
    M: tl.constexpr, MP: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NORM: tl.constexpr, MODE: tl.constexpr, OWN: tl.constexpr, TAIL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = bf(x W^T), or by MODE: `remote`: bf(bf(..) + remote f32 [M, N]); `split`: that for the first OWN columns
    (remote [M, OWN]), the others to send [M, N - OWN]; `addend`: bf(bf(..) + addend [M, N]). TAIL > 0: further programs
    copy tail [M, TAIL] behind y's N columns."""
    pid = tl.program_id(0)
    blocks: tl.constexpr = (N + BN - 1) // BN
    if TAIL > 0:
        if pid >= blocks:
            begin(PDL)
            copy_columns(tail, y, pid, blocks, y_stride, N, TAIL, 1024, 1, N + TAIL)
    if pid < blocks:
        linear_rows(
            x, stride, norm, eps, w, y, y_stride, remote, send, addend, pid, M, MP, N, K, BN, BK, NORM, MODE, OWN, PDL
        )  # fmt: skip


@triton.jit
def ends_kernel(
    raw, y, y_stride, remote, send, addend, tail,
    N: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, OWN: tl.constexpr, TAIL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """What `linear_kernel` does after its product, for raw bf16 [M, N] that a library made. Grid (blocks, M): blocks of
    N, then blocks of TAIL."""
    pid = tl.program_id(0)
    m = tl.program_id(1)
    blocks: tl.constexpr = (N + BLOCK - 1) // BLOCK
    begin(PDL)
    if pid < blocks:
        n = pid * BLOCK + tl.arange(0, BLOCK)
        mask = n < N
        v = tl.load(raw + m * N + n, mask=mask, other=0.0).to(tl.float32)
        if MODE == "remote":
            v += tl.load(remote + m * N + n, mask=mask, other=0.0)
        if MODE == "addend":
            v += tl.load(addend + m * N + n, mask=mask, other=0.0).to(tl.float32)
        if MODE == "split":
            tl.store(send + m * (N - OWN) + n - OWN, v.to(tl.bfloat16), mask=mask & (n >= OWN))
            mask = mask & (n < OWN)
            v += tl.load(remote + m * OWN + n, mask=mask, other=0.0)
        tl.store(y + m * y_stride + n, v.to(tl.bfloat16), mask=mask)
    else:
        if TAIL > 0:
            c = (pid - blocks) * BLOCK + tl.arange(0, BLOCK)
            inside = c < TAIL
            w = tl.load(tail + m * TAIL + c, mask=inside, other=0.0)
            tl.store(y + m * y_stride + N + c, w, mask=inside)


@triton.jit
def gated_kernel(
    x, stride, w, y,
    M: tl.constexpr, MP: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y bf16 [M, N] = bf(SiTU(bf(x Wg^T), bf(x Wu^T))), w = [Wg; Wu]."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(n, N - 1)
    acc = gated_product(x, stride, w, rows, rows + N, M, MP, K, BN, BK, PDL)
    m = tl.arange(0, MP)
    mask = (n < N)[:, None] & (m < M)[None, :]
    tl.store(y + m[None, :] * N + n[:, None], acc.to(tl.bfloat16), mask=mask)


@triton.jit
def front_kernel(
    x, router, logits, down, latent, remote, gate_up, hidden,
    M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ROUTED: tl.constexpr,
    OWN: tl.constexpr, LATENT: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Everything that an FFN computes from y, in one launch: logits f32 [M, ROUTED]; the first OWN columns of the
    latent, the rest copied from remote, as f32 times SHIFT in eight planes; hidden bf16 [M, SHARED] of the shared
    expert."""
    pid = tl.program_id(0)
    m = tl.arange(0, MP)
    a: tl.constexpr = (ROUTED + BN - 1) // BN
    b: tl.constexpr = a + (OWN + BN - 1) // BN
    c: tl.constexpr = b + (SHARED + BN - 1) // BN
    if pid < a:
        n = pid * BN + tl.arange(0, BN)
        rows = tl.minimum(n, ROUTED - 1)
        acc = product(x, K, x, 0.0, router, rows, M, MP, K, BN, BK, False, PDL)
        mask = (n < ROUTED)[:, None] & (m < M)[None, :]
        tl.store(logits + m[None, :] * ROUTED + n[:, None], acc, mask=mask)
    elif pid < b:
        n = (pid - a) * BN + tl.arange(0, BN)
        rows = tl.minimum(n, OWN - 1)
        acc = product(x, K, x, 0.0, down, rows, M, MP, K, BN, BK, False, PDL)
        mask = (n < OWN)[:, None] & (m < M)[None, :]
        at = n % 8 * (LATENT // 8) + n // 8
        tl.store(latent + m[None, :] * LATENT + at[:, None], bf(acc) * SHIFT, mask=mask)
    elif pid < c:
        n = (pid - b) * BN + tl.arange(0, BN)
        rows = tl.minimum(n, SHARED - 1)
        acc = gated_product(x, K, gate_up, rows, rows + SHARED, M, MP, K, BN, BK, PDL)
        mask = (n < SHARED)[:, None] & (m < M)[None, :]
        tl.store(hidden + m[None, :] * SHARED + n[:, None], acc.to(tl.bfloat16), mask=mask)
    else:
        begin(PDL)
        if OWN < LATENT:
            copy_columns(remote, latent, pid, c, LATENT, OWN, LATENT - OWN, 1024, 8, LATENT)
