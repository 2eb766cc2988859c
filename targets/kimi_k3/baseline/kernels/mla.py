"""The core of absorbed MLA over the paged cache: query and insertion, split attention, the join with W_UV."""

import triton
import triton.language as tl

from targets.kimi_k3.baseline.kernels.common import begin, begin_open, bf, fetch, sigmoid


@triton.jit
def query_kernel(
    a, a_stride, kv_norm, q, w_uk, query, kv, mapping, eps, ahead,
    HEADS: tl.constexpr, LORA_Q: tl.constexpr, LORA: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
    BC: tl.constexpr, CHUNKS: tl.constexpr, STRIDE: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """query bf16 [M, HEADS, LORA + ROPE] = [bf(q_nope W_UK) | q_pe] from q bf16 [M, HEADS, NOPE + ROPE]; the last
    program of a row inserts its cache row at mapping[m] (negative: not). Grid (HEADS * LORA / BC + 1, M),
    with CHUNKS > 0 more columns that fetch `ahead`."""
    pid = tl.program_id(0)
    m = tl.program_id(1)
    parts: tl.constexpr = LORA // BC
    if CHUNKS > 0:
        if pid > HEADS * parts:
            if m == 0:
                fetch(ahead, pid - HEADS * parts - 1, CHUNKS, STRIDE, LANES)
            return
    WIDTH: tl.constexpr = LORA + ROPE
    r = tl.arange(0, ROPE)
    if pid < HEADS * parts:
        h = pid // parts
        c = pid % parts * BC + tl.arange(0, BC)
        i = tl.arange(0, NOPE)
        w = tl.load(w_uk + (h * NOPE + i)[:, None] * LORA + c[None, :]).to(tl.float32)
        begin(PDL)
        at = q + (m * HEADS + h) * (NOPE + ROPE)
        x = tl.load(at + i).to(tl.float32)
        to = query + (m * HEADS + h) * WIDTH
        tl.store(to + c, tl.sum(w * x[:, None], 0).to(tl.bfloat16))
        pe = tl.load(at + NOPE + r)
        tl.store(to + LORA + r, pe, mask=(r >= 0) & (pid % parts == 0))
    else:
        # names of its own: Triton gives a name one type in both branches
        column = tl.arange(0, LORA)
        scale = tl.load(kv_norm + column).to(tl.float32)
        begin(PDL)
        slot = tl.load(mapping + m)
        row = a + m * a_stride + LORA_Q
        v = tl.load(row + column).to(tl.float32)
        v = v / tl.sqrt(tl.sum(v * v, 0) / LORA + eps) * scale
        cached = kv + tl.maximum(slot, 0) * WIDTH
        tl.store(cached + column, v.to(tl.bfloat16), mask=(column >= 0) & (slot >= 0))
        tl.store(cached + LORA + r, tl.load(row + LORA + r), mask=(r >= 0) & (slot >= 0))


@triton.jit
def attention_kernel(
    query, kv, table, lengths, sums, stats, scale,
    HEADS: tl.constexpr, HP: tl.constexpr, LORA: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    PAGES: tl.constexpr, SPLITS: tl.constexpr, OPEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """This split's share of the pages: sums f32 [M, SPLITS, HEADS, LORA] of exp(s - max) c, stats f32 [.., 2].

    A tile is one page; HP pads the heads. An empty share gives (-1e30, 0). Grid (SPLITS, M)."""
    split = tl.program_id(0)
    m = tl.program_id(1)
    WIDTH: tl.constexpr = LORA + ROPE
    h = tl.arange(0, HP)
    c = tl.arange(0, LORA)
    r = tl.arange(0, ROPE)
    t = tl.arange(0, PAGE)
    there = (h < HEADS)[:, None]
    begin_open(PDL, OPEN)
    length = tl.load(lengths + m)
    at = query + (m * HEADS + h)[:, None] * WIDTH
    ql = tl.load(at + c[None, :], mask=there, other=0.0)
    qr = tl.load(at + LORA + r[None, :], mask=there, other=0.0)
    tiles = (length + PAGE - 1) // PAGE
    share = (tiles + SPLITS - 1) // SPLITS
    best = tl.full([HP], -1e30, dtype=tl.float32)
    total = tl.zeros([HP], dtype=tl.float32)
    acc = tl.zeros([HP, LORA], dtype=tl.float32)
    for page in range(split * share, tl.minimum(split * share + share, tiles)):
        start = tl.load(table + m * PAGES + page).to(tl.int64) * (PAGE * WIDTH)
        rows = kv + start + t[:, None] * WIDTH
        key = tl.load(rows + c[None, :])
        pe = tl.load(rows + LORA + r[None, :])
        s = (tl.dot(ql, tl.trans(key)) + tl.dot(qr, tl.trans(pe))) * scale
        s = tl.where((page * PAGE + t < length)[None, :], s, -1e30)
        higher = tl.maximum(best, tl.max(s, 1))
        p = tl.exp(s - higher[:, None])
        keep = tl.exp(best - higher)
        total = total * keep + tl.sum(p, 1)
        acc = tl.dot(p.to(tl.bfloat16), key, acc * keep[:, None])
        best = higher
    base = (m * SPLITS + split) * HEADS
    tl.store(sums + (base + h)[:, None] * LORA + c[None, :], acc, mask=there)
    tl.store(stats + (base + h) * 2, best, mask=h < HEADS)
    tl.store(stats + (base + h) * 2 + 1, total, mask=h < HEADS)


@triton.jit
def join_kernel(
    sums, stats, w_uv, a, a_stride, gate_at, lengths, out,
    HEADS: tl.constexpr, LORA: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, SPLITS: tl.constexpr,
    SP: tl.constexpr, BS: tl.constexpr, OPEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out bf16 [M, HEADS, V] = bf(bf(lat W_UV^T) * sg(gate)), lat = bf of the joined splits; zero for length 0.

    SP: SPLITS padded to a power of two; BS splits are loaded at a time. Grid (HEADS * V / BV, M)."""
    h = tl.program_id(0) // (V // BV)
    m = tl.program_id(1)
    v = tl.program_id(0) % (V // BV) * BV + tl.arange(0, BV)
    c = tl.arange(0, LORA)
    w = tl.load(w_uv + (h * V + v)[:, None] * LORA + c[None, :])
    begin_open(PDL, OPEN)
    s = tl.arange(0, SP)
    at = stats + ((m * SPLITS + s) * HEADS + h) * 2
    top = tl.max(tl.load(at, mask=s < SPLITS, other=-1e30), 0)
    each = tl.exp(tl.load(at, mask=s < SPLITS, other=-1e30) - top)
    total = tl.sum(each * tl.load(at + 1, mask=s < SPLITS, other=0.0), 0)
    acc = tl.zeros([BS, LORA], dtype=tl.float32)
    for first in range(0, SPLITS, BS):
        part = first + tl.arange(0, BS)
        inside = part < SPLITS
        row = (m * SPLITS + part) * HEADS + h
        factor = tl.exp(tl.load(stats + row * 2, mask=inside, other=-1e30) - top)
        tile = tl.load(sums + row[:, None] * LORA + c[None, :], mask=inside[:, None], other=0.0)
        acc += factor[:, None] * tile
    lat = bf(tl.sum(acc, 0) / tl.maximum(total, 1e-30))
    y = bf(tl.sum(w.to(tl.float32) * lat[None, :], 1))
    gate = tl.load(a + m * a_stride + gate_at + h * V + v).to(tl.float32)
    y = tl.where(tl.load(lengths + m) > 0, y * sigmoid(gate), 0.0)
    tl.store(out + (m * HEADS + h) * V + v, y.to(tl.bfloat16))
