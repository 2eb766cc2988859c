"""Operands for tests of single instructions, random and awkward, and a kernel that runs a table of them. No tests."""

# ruff: noqa: E501  (PTX and tables read better with one thought a line)

from __future__ import annotations

import math

import numpy as np
import torch

from tests.sandbox.devices.cpu.harness import Shape, kernel, run

N = 512
M32 = (1 << 32) - 1
M64 = (1 << 64) - 1
EDGES32 = [
    0,
    1,
    2,
    31,
    32,
    33,
    255,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0x80000001,
    0xFFFFFFFF,
    0x12345678,
]
EDGE_FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, 3.5, -2.5, 1e-40, -1e-42, 1e38, -3e38, 65504.0, 65520.0, 448.0, 464.0, 470.0,
               6e-8, 1e-3, 127.5, 128.5, 2**31, -(2.0**31), 2**32, math.inf, -math.inf, math.nan]  # fmt: skip

LOADS = "mul.wide.u32 %rd1, %r99, 4; add.s64 %rd2, %rd100, %rd1; ld.global.b32 %r1, [%rd2];"
"""Element %r99 of the first buffer into %r1, its address into %rd2."""


def signed(v: int, bits: int = 32) -> int:
    v &= (1 << bits) - 1
    return v - (1 << bits) if v >> (bits - 1) else v


def words(seed: int, count: int = N) -> np.ndarray:
    rng = np.random.default_rng(seed)
    out = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    pick = rng.random(count) < 0.3
    out[pick] = rng.choice(np.array(EDGES32, np.uint32), int(pick.sum()))
    return out


def floats(seed: int, count: int = N) -> np.ndarray:
    rng = np.random.default_rng(seed)
    out = (rng.standard_normal(count) * 10.0 ** rng.integers(-6, 6, count)).astype(np.float32)
    out[: len(EDGE_FLOATS)] = rng.permutation(np.array(EDGE_FLOATS, np.float32))
    return out


def compute(cases: list[str], a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Results [case, element] as uint64. A case reads %ra %rb %rc, or %rda %rdb (64 bits), and writes %ro or %rdo."""
    code = []
    for i, case in enumerate(cases):
        wide = "%rdo" in case
        tail = (
            "st.global.b64 [%rd50], %rdo;"
            if wide
            else "cvt.u64.u32 %rdo, %ro; st.global.b64 [%rd50], %rdo;"
        )
        code.append(f"{{ .reg .b32 x<8>; .reg .b64 y<8>; .reg .b16 h<8>; .reg .pred q<8>; {case} }}\n"
                    f"mad.lo.s32 %r51, {i}, {len(a)}, %r50; mul.wide.u32 %rd51, %r51, 8; add.s64 %rd50, %rd103, %rd51; {tail}")  # fmt: skip
    body = f"""
    mov.u32 %r1, %ctaid.x; mad.lo.s32 %r50, %r1, 32, %r99; mul.wide.u32 %rd1, %r50, 4;
    add.s64 %rd2, %rd100, %rd1; ld.global.b32 %ra, [%rd2]; add.s64 %rd3, %rd101, %rd1; ld.global.b32 %rb, [%rd3];
    add.s64 %rd4, %rd102, %rd1; ld.global.b32 %rc, [%rd4]; mov.b64 %rda, {{%ra, %rb}}; mov.b64 %rdb, {{%rb, %rc}};
    {chr(10).join(code)}
    ret;
    """
    text = kernel(body, "pppp", ".reg .b32 %ra, %rb, %rc, %ro; .reg .b64 %rda, %rdb, %rdo;")
    out = torch.zeros(len(cases) * len(a), dtype=torch.int64)
    tensors = [torch.from_numpy(v.view(np.int32).copy()) for v in (a, b, c)]
    run(text, [*tensors, out], Shape(grid=(len(a) // 32, 1, 1)), labels=cases)
    return out.numpy().view(np.uint64).reshape(len(cases), len(a))
