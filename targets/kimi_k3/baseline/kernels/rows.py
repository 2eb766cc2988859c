"""Work on whole rows: the AttnRes step (prefix, bank, mix, norm), and the router's selection. One program a row."""

import triton
import triton.language as tl

from targets.kimi_k3.baseline.kernels.common import begin, begin_open, bf, fetch, sigmoid


@triton.jit
def absorb_source(best, total, mixed, v, weight, eps, H: tl.constexpr):
    """One more source of the softmax mix, online: (largest score, sum of weights, weighted sum)."""
    score = tl.sum(v * weight, 0) / tl.sqrt(tl.sum(v * v, 0) / H + eps)
    higher = tl.maximum(best, score)
    keep = tl.exp(best - higher)
    p = tl.exp(score - higher)
    return higher, total * keep + p, mixed * keep + v * p


@triton.jit
def absorb_bank(
    best, total, mixed, old, new, m, weight, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr, SOURCES: tl.constexpr,
):  # fmt: skip
    """The first SOURCES bank rows of request m: OLD earlier ones, then new ones."""
    c = tl.arange(0, BLOCK)
    for s in tl.static_range(SOURCES):
        if s < OLD:
            at = old + (m * OLD + s) * H
        else:
            at = new + (m * NEW + s - OLD) * H
        v = tl.load(at + c, mask=c < H, other=0.0).to(tl.float32)
        best, total, mixed = absorb_source(best, total, mixed, v, weight, eps, H)
    return best, total, mixed


@triton.jit
def attn_res_kernel(
    prefix, delta, prefix_out, old, new, mix, norm, out, eps, ahead, M,
    H: tl.constexpr, BLOCK: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr, SOURCES: tl.constexpr,
    ROW: tl.constexpr, ADD: tl.constexpr, CLOSING: tl.constexpr, EARLY: tl.constexpr, CHUNKS: tl.constexpr,
    STRIDE: tl.constexpr, LANES: tl.constexpr, OPEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """P = bf(prefix + delta) with ADD, else prefix; stored, and to row ROW of the new bank rows if it is >= 0.

    out = bf(RMS(m; norm)), m the mix of SOURCES bank rows (OLD earlier ones, then new ones) and P; CLOSING rounds m
    first. `mix` is f32 norm * proj. EARLY: the launch before writes no bank row, so they are mixed while it runs.
    Grid (M), with CHUNKS > 0 more programs that fetch `ahead`.
    """
    m = tl.program_id(0)
    if CHUNKS > 0:
        if m >= M:
            fetch(ahead, m - M, CHUNKS, STRIDE, LANES)
            return
    c = tl.arange(0, BLOCK)
    mask = c < H
    weight = tl.load(mix + c, mask=mask, other=0.0)
    scale = tl.load(norm + c, mask=mask, other=0.0).to(tl.float32)
    best = -1e30
    total = 0.0
    mixed = tl.zeros([BLOCK], dtype=tl.float32)
    if EARLY:
        best, total, mixed = absorb_bank(
            best, total, mixed, old, new, m, weight, eps, H, BLOCK, OLD, NEW, SOURCES
        )
    begin_open(PDL, OPEN)
    p = tl.load(prefix + m * H + c, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        p = bf(p + tl.load(delta + m * H + c, mask=mask, other=0.0).to(tl.float32))
    if not EARLY:
        best, total, mixed = absorb_bank(
            best, total, mixed, old, new, m, weight, eps, H, BLOCK, OLD, NEW, SOURCES
        )
    best, total, mixed = absorb_source(best, total, mixed, p, weight, eps, H)
    mixed = mixed / total
    if CLOSING:
        mixed = bf(mixed)
    y = mixed / tl.sqrt(tl.sum(mixed * mixed, 0) / H + eps) * scale
    tl.store(out + m * H + c, y.to(tl.bfloat16), mask=mask)
    tl.store(prefix_out + m * H + c, p.to(tl.bfloat16), mask=mask)
    if ROW >= 0:
        tl.store(new + (m * NEW + ROW) * H + c, p.to(tl.bfloat16), mask=mask)


@triton.jit
def norm_kernel(
    x, stride, weight, out, eps, W: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out bf16 [M, W] = bf(RMS(x; weight)), rows of x `stride` apart. Grid (M)."""
    m = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    mask = c < W
    scale = tl.load(weight + c, mask=mask, other=0.0).to(tl.float32)
    begin(PDL)
    v = tl.load(x + m * stride + c, mask=mask, other=0.0).to(tl.float32)
    y = v / tl.sqrt(tl.sum(v * v, 0) / W + eps) * scale
    tl.store(out + m * W + c, y.to(tl.bfloat16), mask=mask)


@triton.jit
def select_kernel(
    logits, remote, bias, ids, weights,
    EXPERTS: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr, TOPK: tl.constexpr, TP: tl.constexpr,
    RAW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ids i32 [M, TOPK] by descending sg(logit) + bias, ties to the lower id, NaN last; weights bf16 from the scores,
    with RAW f32 scores sg(logit) instead.

    Score and id share a 64-bit key, so that each maximum is one reduction. Grid (M).
    """
    m = tl.program_id(0)
    e = tl.arange(0, BLOCK)
    lane = tl.arange(0, TP)
    offset = tl.load(bias + e, mask=e < EXPERTS, other=0.0)
    begin(PDL)
    s, key = expert_key(logits, remote, m, e, offset, EXPERTS, OWN, BLOCK)
    chosen = tl.zeros([TP], dtype=tl.int32)
    score = tl.zeros([TP], dtype=tl.float32)
    for rank in tl.static_range(TOPK):
        top = tl.max(key, 0)
        mine = key == top
        expert = (BLOCK - 1 - (top & 0xFFFFFFFF)).to(tl.int32)
        chosen = tl.where(lane == rank, expert, chosen)
        score = tl.where(lane == rank, tl.sum(tl.where(mine, s, 0.0), 0), score)
        key = tl.where(mine, -9223372036854775807, key)
    tl.store(ids + m * TOPK + lane, chosen, mask=lane < TOPK)
    if RAW:
        tl.store(weights + m * TOPK + lane, score, mask=lane < TOPK)
    else:
        share = score / (tl.sum(score, 0) + 1e-20)
        tl.store(weights + m * TOPK + lane, share.to(tl.bfloat16), mask=lane < TOPK)


@triton.jit
def rank_kernel(
    logits, remote, bias, ids, scores, ahead,
    EXPERTS: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr, BE: tl.constexpr, BO: tl.constexpr,
    TOPK: tl.constexpr, PLACES: tl.constexpr, CHUNKS: tl.constexpr, STRIDE: tl.constexpr, LANES: tl.constexpr,
    OPEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `select_kernel`, by counting for BE experts how many come before each; scores f32 [M, TOPK] are sg(logit).

    Grid (PLACES, M), PLACES of EXPERTS / BE, with CHUNKS > 0 more programs that fetch `ahead`.
    """
    pid = tl.program_id(0)
    m = tl.program_id(1)
    if CHUNKS > 0:
        if pid >= PLACES:
            if m == 0:
                fetch(ahead, pid - PLACES, CHUNKS, STRIDE, LANES)
            return
    e = pid * BE + tl.arange(0, BE)
    offset = tl.load(bias + e, mask=e < EXPERTS, other=0.0)
    begin_open(PDL, OPEN)
    s, key = expert_key(logits, remote, m, e, offset, EXPERTS, OWN, BLOCK)
    before = tl.zeros([BE, BO], dtype=tl.int32)
    for first in tl.static_range(0, BLOCK, BO):
        o = first + tl.arange(0, BO)
        theirs = tl.load(bias + o, mask=o < EXPERTS, other=0.0)
        _, other = expert_key(logits, remote, m, o, theirs, EXPERTS, OWN, BLOCK)
        before += (other[None, :] > key[:, None]).to(tl.int32)
    rank = tl.sum(before, 1)
    chosen = (rank < TOPK) & (e < EXPERTS)
    tl.store(ids + m * TOPK + rank, e, mask=chosen)
    tl.store(scores + m * TOPK + rank, s, mask=chosen)


@triton.jit
def expert_key(
    logits, remote, m, e, offset, EXPERTS: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr
):
    """sg(logit) of experts e, and a number that orders them: by sg(logit) + offset, then the lower id, NaN last."""
    x = tl.load(logits + m * OWN + e, mask=e < OWN, other=0.0)
    if OWN < EXPERTS:
        theirs = (e >= OWN) & (e < EXPERTS)
        x += tl.load(remote + m * (EXPERTS - OWN) + e - OWN, mask=theirs, other=0.0)
    s = sigmoid(x)
    z = s + offset
    bad = z != z
    s = tl.where(bad, 0.0, s)
    bits = tl.cast(tl.where(bad, -float("inf"), z) + 0.0, tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = (order.to(tl.int64) << 32) | (BLOCK - 1 - e).to(tl.int64)
    return s, tl.where(e < EXPERTS, key, -9223372036854775807)
