"""Single integer and bit instructions against Python, on random and on awkward operands. All cases of a table share
a kernel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.sandbox.devices.cpu.operands import M32, M64, compute, signed, words

Int = Callable[[int, int, int], int]


def prmt(a: int, b: int, c: int) -> int:
    both, out = b << 32 | a, 0
    for i in range(4):
        s = c >> 4 * i & 15
        byte = both >> 8 * (s & 7) & 255
        out |= (255 if byte & 128 else 0) << 8 * i if s & 8 else byte << 8 * i
    return out


def bfe(v: int, p: int, n: int, sign: bool, bits: int = 32) -> int:
    p, n = p & 255, n & 255
    value = signed(v, bits) if sign else v
    field = value >> p
    if n == 0:
        return 0
    if n >= bits:
        return field
    field &= (1 << n) - 1
    if sign and value >> min(p + n - 1, bits - 1) & 1:
        field -= 1 << n
    return field


def bfi(a: int, b: int, p: int, n: int) -> int:
    p, n = p & 255, n & 255
    mask = ((1 << n) - 1) << p & M32
    return b & ~mask | a << p & mask


def dp4a(a: int, b: int, c: int, sa: bool, sb: bool) -> int:
    total = c
    for i in range(4):
        x, y = a >> 8 * i & 255, b >> 8 * i & 255
        total += (signed(x, 8) if sa else x) * (signed(y, 8) if sb else y)
    return total


def divide(a: int, b: int) -> int:
    return -1 if b == 0 else int(abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def shift(a: int, n: int, how: str) -> int:
    n = min(n, 64)
    return (
        {"l": a << n, "r": a >> n, "s": signed(a) >> n}[how]
        if n < 64
        else (-1 if how == "s" and signed(a) < 0 else 0)
    )


INTEGER: dict[str, Int] = {
    "add.s32 %ro, %ra, %rb;": lambda a, b, c: a + b,
    "sub.s32 %ro, %ra, %rb;": lambda a, b, c: a - b,
    "add.sat.s32 %ro, %ra, %rb;": lambda a, b, c: max(-(1 << 31), min((1 << 31) - 1, signed(a) + signed(b))),
    "mul.lo.s32 %ro, %ra, %rb;": lambda a, b, c: a * b,
    "mul.hi.s32 %ro, %ra, %rb;": lambda a, b, c: signed(a) * signed(b) >> 32,
    "mul.hi.u32 %ro, %ra, %rb;": lambda a, b, c: a * b >> 32,
    "mad.lo.s32 %ro, %ra, %rb, %rc;": lambda a, b, c: a * b + c,
    "mad.hi.u32 %ro, %ra, %rb, %rc;": lambda a, b, c: (a * b >> 32) + c,
    "div.u32 %ro, %ra, %rb;": lambda a, b, c: a // b if b else M32,
    "div.s32 %ro, %ra, %rb;": lambda a, b, c: divide(signed(a), signed(b)),
    "rem.u32 %ro, %ra, %rb;": lambda a, b, c: a % b if b else M32,
    "rem.s32 %ro, %ra, %rb;": lambda a, b, c: signed(a) - divide(signed(a), signed(b)) * signed(b) if b else M32,
    "min.s32 %ro, %ra, %rb;": lambda a, b, c: min(signed(a), signed(b)),
    "max.u32 %ro, %ra, %rb;": lambda a, b, c: max(a, b),
    "abs.s32 %ro, %ra;": lambda a, b, c: abs(signed(a)),
    "neg.s32 %ro, %ra;": lambda a, b, c: -a,
    "and.b32 %ro, %ra, %rb;": lambda a, b, c: a & b,
    "or.b32 %ro, %ra, %rb;": lambda a, b, c: a | b,
    "xor.b32 %ro, %ra, %rb;": lambda a, b, c: a ^ b,
    "not.b32 %ro, %ra;": lambda a, b, c: ~a,
    "cnot.b32 %ro, %ra;": lambda a, b, c: int(a == 0),
    "shl.b32 %ro, %ra, %rb;": lambda a, b, c: shift(a, b, "l"),
    "shr.u32 %ro, %ra, %rb;": lambda a, b, c: shift(a, b, "r"),
    "shr.s32 %ro, %ra, %rb;": lambda a, b, c: shift(a, b, "s"),
    "shl.b32 %ro, %ra, 7;": lambda a, b, c: a << 7,
    "shf.l.wrap.b32 %ro, %ra, %rb, %rc;": lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32,
    "shf.r.wrap.b32 %ro, %ra, %rb, %rc;": lambda a, b, c: (b << 32 | a) >> (c & 31),
    "shf.l.clamp.b32 %ro, %ra, %rb, %rc;": lambda a, b, c: ((b << 32 | a) << min(c, 32)) >> 32,
    "shf.r.clamp.b32 %ro, %ra, %rb, %rc;": lambda a, b, c: (b << 32 | a) >> min(c, 32),
    "lop3.b32 %ro, %ra, %rb, %rc, 0xEA;": lambda a, b, c: a & b | c,
    "lop3.b32 %ro, %ra, %rb, %rc, 0x96;": lambda a, b, c: a ^ b ^ c,
    "lop3.b32 %ro, %ra, %rb, %rc, 0xCA;": lambda a, b, c: a & b | ~a & c,
    "prmt.b32 %ro, %ra, %rb, %rc;": prmt,
    "prmt.b32 %ro, %ra, %rb, 0x5410;": lambda a, b, c: prmt(a, b, 0x5410),
    "prmt.b32 %ro, %ra, %rb, 0x9BE3;": lambda a, b, c: prmt(a, b, 0x9BE3),
    "bfe.u32 %ro, %ra, %rb, %rc;": lambda a, b, c: bfe(a, b, c, False),
    "bfe.s32 %ro, %ra, %rb, %rc;": lambda a, b, c: bfe(a, b, c, True),
    "bfi.b32 %ro, %ra, %rb, %rc, %ra;": lambda a, b, c: bfi(a, b, c, a),
    "bfi.b32 %ro, %ra, %rb, 5, 9;": lambda a, b, c: bfi(a, b, 5, 9),
    "popc.b32 %ro, %ra;": lambda a, b, c: a.bit_count(),
    "clz.b32 %ro, %ra;": lambda a, b, c: 32 - a.bit_length(),
    "brev.b32 %ro, %ra;": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "bfind.u32 %ro, %ra;": lambda a, b, c: a.bit_length() - 1,
    "bfind.s32 %ro, %ra;": lambda a, b, c: (a if signed(a) >= 0 else ~a & M32).bit_length() - 1,
    "dp4a.u32.s32 %ro, %ra, %rb, %rc;": lambda a, b, c: dp4a(a, b, c, False, True),
    "dp4a.s32.s32 %ro, %ra, %rb, %rc;": lambda a, b, c: dp4a(a, b, c, True, True),
    "sad.s32 %ro, %ra, %rb, %rc;": lambda a, b, c: abs(signed(a) - signed(b)) + c,
    "setp.lt.s32 q0, %ra, %rb; selp.b32 %ro, %rc, 5, q0;": lambda a, b, c: c if signed(a) < signed(b) else 5,
    "setp.hi.u32 q0, %ra, %rb; selp.b32 %ro, 1, 0, q0;": lambda a, b, c: int(a > b),
    "setp.ge.u32 q0, %ra, %rb; setp.lt.and.s32 q1, %ra, %rc, q0; selp.b32 %ro, 1, 0, q1;":
        lambda a, b, c: int(a >= b and signed(a) < signed(c)),
    "setp.eq.s32 q0|q1, %ra, %rb; selp.b32 %ro, 1, 0, q1;": lambda a, b, c: int(a != b),
    "set.gt.u32.s32 %ro, %ra, %rb;": lambda a, b, c: M32 if signed(a) > signed(b) else 0,
    "slct.s32.s32 %ro, %ra, %rb, %rc;": lambda a, b, c: a if signed(c) >= 0 else b,
    "mov.b32 {h0, h1}, %ra; mov.b32 %ro, {h1, h0};": lambda a, b, c: a >> 16 | a << 16,
    "cvt.u32.u8 %ro, %ra;": lambda a, b, c: a & 255,
    "cvt.s32.s8 %ro, %ra;": lambda a, b, c: signed(a, 8),
    "cvt.s32.s16 %ro, %ra;": lambda a, b, c: signed(a, 16),
    "cvt.sat.u8.s32 x0, %ra; cvt.u32.u8 %ro, x0;": lambda a, b, c: max(0, min(255, signed(a))),
    "mul.wide.s32 %rdo, %ra, %rb;": lambda a, b, c: signed(a) * signed(b),
    "mul.wide.u32 %rdo, %ra, %rb;": lambda a, b, c: a * b,
    "mad.wide.u32 %rdo, %ra, %rb, %rda;": lambda a, b, c: a * b + (b << 32 | a),
    "add.s64 %rdo, %rda, %rdb;": lambda a, b, c: (b << 32 | a) + (c << 32 | b),
    "mul.hi.u64 %rdo, %rda, %rdb;": lambda a, b, c: (b << 32 | a) * (c << 32 | b) >> 64,
    "mul.lo.s64 %rdo, %rda, %rdb;": lambda a, b, c: (b << 32 | a) * (c << 32 | b),
    "shr.s64 %rdo, %rda, 13;": lambda a, b, c: signed(b << 32 | a, 64) >> 13,
    "shl.b64 %rdo, %rda, %rc;": lambda a, b, c: (b << 32 | a) << c if c < 64 else 0,
    "cvt.s64.s32 %rdo, %ra;": lambda a, b, c: signed(a),
    "popc.b64 %ro, %rda;": lambda a, b, c: (b << 32 | a).bit_count(),
    "bfe.u64 %rdo, %rda, 17, 30;": lambda a, b, c: (b << 32 | a) >> 17 & (1 << 30) - 1,
    "max.s64 %rdo, %rda, %rdb;": lambda a, b, c: max(signed(b << 32 | a, 64), signed(c << 32 | b, 64)),
    "rem.u64 %rdo, %rda, %rdb;": lambda a, b, c: (b << 32 | a) % (c << 32 | b) if c << 32 | b else M64,
}  # fmt: skip


def test_integer_and_bit_instructions() -> None:
    a, b, c = words(1), words(2), words(3)
    b[::3], c[::3], c[1::3] = b[::3] % 40, c[::3] % 40, c[1::3] % 32
    got = compute(list(INTEGER), a, b, c)
    for row, (text, f) in zip(got, INTEGER.items(), strict=True):
        mask = M64 if "%rdo" in text else M32
        want = np.array(
            [f(int(x), int(y), int(z)) & mask for x, y, z in zip(a, b, c, strict=True)], np.uint64
        )
        bad = np.nonzero(row != want)[0]
        assert bad.size == 0, (
            text,
            [hex(int(v[bad[0]])) for v in (a, b, c)],
            hex(int(row[bad[0]])),
            hex(int(want[bad[0]])),
        )
