"""The routed experts on MXFP4 weights for several rows: pairs (row, slot) of one expert share its codes.

Codes are read as int32 words of eight and become BF16 values, scaled, for tensor cores: in pairs of one word, so their
operands lie in eight planes in an order of their own (`column`).
Operands are BF16 values times 2^60, weights times 2^-60: exact for scales of 2^-65 to 2^61. Pairs are grouped on the
device; a launch has programs for the most tasks there may be, and those without one end.
"""

import triton
import triton.language as tl

from targets.kimi_k3.baseline.kernels.common import begin, bf, situ

LIFT = tl.constexpr(2.0**60)
"""What BF16 operands are multiplied by: codes become BF16 values of 2^-126 of theirs, and scales are given 2^66."""
UNLIFT = tl.constexpr(2.0**-40)
"""From `SHIFT` of the float32 operands to `LIFT`."""

DECODE = tl.constexpr("""
{
.reg .b32 scale, moved, bytes, bits;
mad.lo.u32 scale, $10, 0x00800080, 0x21002100;
shr.u32 moved, $8, 2;
prmt.b32 bytes, $8, moved, 0x5140;
and.b32 bits, bytes, 0x02070207;
shl.b32 bits, bits, 6;
mul.bf16x2 $0, bits, scale;
and.b32 bits, bytes, 0x20702070;
shl.b32 bits, bits, 2;
mul.bf16x2 $1, bits, scale;
prmt.b32 bytes, $8, moved, 0x7362;
and.b32 bits, bytes, 0x02070207;
shl.b32 bits, bits, 6;
mul.bf16x2 $2, bits, scale;
and.b32 bits, bytes, 0x20702070;
shl.b32 bits, bits, 2;
mul.bf16x2 $3, bits, scale;
mad.lo.u32 scale, $11, 0x00800080, 0x21002100;
shr.u32 moved, $9, 2;
prmt.b32 bytes, $9, moved, 0x5140;
and.b32 bits, bytes, 0x02070207;
shl.b32 bits, bits, 6;
mul.bf16x2 $4, bits, scale;
and.b32 bits, bytes, 0x20702070;
shl.b32 bits, bits, 2;
mul.bf16x2 $5, bits, scale;
prmt.b32 bytes, $9, moved, 0x7362;
and.b32 bits, bytes, 0x02070207;
shl.b32 bits, bits, 6;
mul.bf16x2 $6, bits, scale;
and.b32 bits, bytes, 0x20702070;
shl.b32 bits, bits, 2;
mul.bf16x2 $7, bits, scale;
}
""")
"""Two neighbouring words $8, $9 and their groups' scale bytes $10, $11 -> BF16 pairs: nibbles 0 and 2, 1 and 3, 4 and
6, 5 and 7 of the first as $0 .. $3, of the second as $4 .. $7. A byte, and above it the same one moved by two bits,
make a half in which sign and other bits of both nibbles lie as far apart as in BF16."""
REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r")


@triton.jit
def planes(words, scales):
    """i32 words [BN, BW] as eight bf16 [BN, BW] in the order of `column`, each code times 2^(its scale byte - 187);
    scales u8 [BN, BW / 4]. Triton gives an invocation two neighbours of a row."""
    wide: tl.constexpr = [words.shape[0], words.shape[1] // 4, 4]
    by = tl.broadcast_to(scales.to(tl.int32)[:, :, None], wide)
    return tl.inline_asm_elementwise(
        DECODE, REGISTERS, [words, tl.reshape(by, words.shape)],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def column(plane, entry):
    """(word, nibble) whose code is `entry` of `plane`: what DECODE leaves where."""
    return entry // 2 * 2 + plane // 4, plane // 2 % 2 * 4 + entry % 2 * 2 + plane % 2


@triton.jit
def place_of(n, WORDS: tl.constexpr):
    """Where column n lies in eight planes of WORDS entries: the inverse of `column`."""
    plane = n // 8 % 2 * 4 + n // 4 % 2 * 2 + n % 2
    return plane * WORDS + n // 16 * 2 + n // 2 % 2


@triton.jit
def group_kernel(
    ids, latent, tasks, count, members, values,
    M: tl.constexpr, TOPK: tl.constexpr, PP: tl.constexpr, EXPERTS: tl.constexpr, EP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """members i32 [EXPERTS, M]: each expert's pairs, in no order, count of them; tasks i32: how many, then for each
    where its first of up to N members lies. Also values bf16 [M, K] in the order of `column` = latent f32 [M, 8 planes
    of K / 8], nibble i in plane i, from SHIFT to LIFT.

    Grid (1 + M): one program groups, the others convert a row each.
    """
    pid = tl.program_id(0)
    begin(PDL)
    if pid == 0:
        e = tl.arange(0, EP)
        tl.store(count + e, tl.zeros([EP], dtype=tl.int32), mask=e < EXPERTS)
        tl.debug_barrier()
        pair = tl.arange(0, PP)
        there = pair < M * TOPK
        expert = tl.load(ids + pair, mask=there, other=0)
        place = tl.atomic_add(count + expert, 1, mask=there, sem="relaxed")
        tl.store(members + expert * M + place, pair, mask=there)
        first = there & (place % N == 0)
        number = tl.cumsum(first.to(tl.int32), 0)
        tl.store(tasks + number, expert * M + place, mask=first)
        tl.store(tasks, tl.max(number, 0))
    else:
        c = tl.arange(0, KP)
        row = (pid - 1) * K
        word, nibble = column(c // (K // 8), c % (K // 8))
        v = tl.load(latent + row + nibble * (K // 8) + word, mask=c < K, other=0.0)
        tl.store(values + row + c, (v * UNLIFT).to(tl.bfloat16), mask=c < K)


@triton.jit
def tile_of(w, scale, row, k, WORDS: tl.constexpr, BW: tl.constexpr):
    """`planes` of words k .. k + BW of rows of w; zero beyond WORDS."""
    j = k + tl.arange(0, BW)
    g = k // 4 + tl.arange(0, BW // 4)
    at = w + row[:, None] * WORDS + j[None, :]
    by = scale + row[:, None] * (WORDS // 4) + g[None, :]
    if WORDS % BW == 0:
        words = tl.load(at, eviction_policy="evict_first")
        scales = tl.load(by)
    else:
        words = tl.load(at, mask=(j < WORDS)[None, :], other=0, eviction_policy="evict_first")
        scales = tl.load(by, mask=(g < WORDS // 4)[None, :], other=0)
    return planes(words, scales)


@triton.jit
def operand(x, rows, there, k, PLANE: tl.constexpr, WORDS: tl.constexpr, BW: tl.constexpr):
    """[BW, N] of plane PLANE of N rows of x; zero where no pair is and beyond WORDS."""
    j = k + tl.arange(0, BW)
    mask = there[None, :] & (j < WORDS)[:, None]
    at = rows[None, :] * (8 * WORDS) + PLANE * WORDS + j[:, None]
    return tl.load(x + at, mask=mask, other=0.0)


@triton.jit
def grouped_up_kernel(
    values, tasks, count, members, w1, s1, w3, s3, hidden,
    M: tl.constexpr, TOPK: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden bf16 [M TOPK, ROWS] = bf(SiTU(w1 l, w3 l)) LIFT; values bf16 [M, K]; columns of both as `column` has them.

    Grid (M * TOPK * ROWS / BN): BN rows of both matrices of one task.
    """
    parts: tl.constexpr = ROWS // BN
    WORDS: tl.constexpr = K // 8
    task = tl.program_id(0) // parts
    begin(PDL)
    if task >= tl.load(tasks):
        return
    first = tl.load(tasks + 1 + task)
    expert = first // M
    member = tl.arange(0, N)
    there = first % M + member < tl.load(count + expert)
    pair = tl.load(members + first + member, mask=there, other=0)
    n = tl.program_id(0) % parts * BN + tl.arange(0, BN)
    row = expert * ROWS + n
    m = pair // TOPK
    gate = tl.zeros([BN, N], dtype=tl.float32)
    up = tl.zeros([BN, N], dtype=tl.float32)
    for k in range(0, WORDS, BW):
        a0, a1, a2, a3, a4, a5, a6, a7 = tile_of(w1, s1, row, k, WORDS, BW)
        b0, b1, b2, b3, b4, b5, b6, b7 = tile_of(w3, s3, row, k, WORDS, BW)
        v = operand(values, m, there, k, 0, WORDS, BW)
        gate = tl.dot(a0, v, gate)
        up = tl.dot(b0, v, up)
        v = operand(values, m, there, k, 1, WORDS, BW)
        gate = tl.dot(a1, v, gate)
        up = tl.dot(b1, v, up)
        v = operand(values, m, there, k, 2, WORDS, BW)
        gate = tl.dot(a2, v, gate)
        up = tl.dot(b2, v, up)
        v = operand(values, m, there, k, 3, WORDS, BW)
        gate = tl.dot(a3, v, gate)
        up = tl.dot(b3, v, up)
        v = operand(values, m, there, k, 4, WORDS, BW)
        gate = tl.dot(a4, v, gate)
        up = tl.dot(b4, v, up)
        v = operand(values, m, there, k, 5, WORDS, BW)
        gate = tl.dot(a5, v, gate)
        up = tl.dot(b5, v, up)
        v = operand(values, m, there, k, 6, WORDS, BW)
        gate = tl.dot(a6, v, gate)
        up = tl.dot(b6, v, up)
        v = operand(values, m, there, k, 7, WORDS, BW)
        gate = tl.dot(a7, v, gate)
        up = tl.dot(b7, v, up)
    to = hidden + pair[None, :] * ROWS + place_of(n, ROWS // 8)[:, None]
    lifted = (bf(situ(gate, up)) * LIFT).to(tl.bfloat16)
    tl.store(to, lifted, mask=there[None, :] & (n < ROWS)[:, None])


@triton.jit
def grouped_down_kernel(
    hidden, tasks, count, members, w2, s2, f,
    M: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """f bf16 [M TOPK, ROWS] = bf(w2 h), hidden as `grouped_up_kernel` leaves it, read once.

    Grid (M * TOPK * ROWS / BR): BR rows of one task, BN at a time.
    """
    parts: tl.constexpr = ROWS // BR
    WORDS: tl.constexpr = K // 8
    task = tl.program_id(0) // parts
    begin(PDL)
    if task >= tl.load(tasks):
        return
    first = tl.load(tasks + 1 + task)
    expert = first // M
    member = tl.arange(0, N)
    there = first % M + member < tl.load(count + expert)
    pair = tl.load(members + first + member, mask=there, other=0)
    v = ()
    for k in tl.static_range(0, WORDS, BW):
        for i in tl.static_range(8):
            v = v + (operand(hidden, pair, there, k, i, WORDS, BW),)
    begin_row = tl.program_id(0) % parts * BR
    for r in range(0, BR, BN):
        n = begin_row + r + tl.arange(0, BN)
        row = expert * ROWS + n
        total = tl.zeros([BN, N], dtype=tl.float32)
        for k in tl.static_range(0, WORDS, BW):
            a0, a1, a2, a3, a4, a5, a6, a7 = tile_of(w2, s2, row, k, WORDS, BW)
            total = tl.dot(a0, v[k // BW * 8], total)
            total = tl.dot(a1, v[k // BW * 8 + 1], total)
            total = tl.dot(a2, v[k // BW * 8 + 2], total)
            total = tl.dot(a3, v[k // BW * 8 + 3], total)
            total = tl.dot(a4, v[k // BW * 8 + 4], total)
            total = tl.dot(a5, v[k // BW * 8 + 5], total)
            total = tl.dot(a6, v[k // BW * 8 + 6], total)
            total = tl.dot(a7, v[k // BW * 8 + 7], total)
        to = f + pair[None, :] * ROWS + n[:, None]
        tl.store(to, total.to(tl.bfloat16), mask=there[None, :] & (n < ROWS)[:, None])


@triton.jit
def combine_kernel(
    f, scores, remote, z,
    TOPK: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, REMOTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """z bf16 [M, ROWS] = bf(bf(sum over slots of weight * f) + remote f32), weight = bf(score / sum of scores).

    Grid (ROWS / BN, M).
    """
    m = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    slot = tl.arange(0, TOPK)
    begin(PDL)
    score = tl.load(scores + m * TOPK + slot)
    share = bf(score / (tl.sum(score, 0) + 1e-20))
    v = tl.load(f + (m * TOPK + slot)[:, None] * ROWS + n[None, :]).to(tl.float32)
    y = tl.sum(v * share[:, None], 0)
    if REMOTE:
        y = bf(y) + tl.load(remote + m * ROWS + n)
    tl.store(z + m * ROWS + n, y.to(tl.bfloat16))
