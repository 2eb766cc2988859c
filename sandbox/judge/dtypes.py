"""Element types as torch sees them: dtype by name, bit view, spacing of floats.

Only a mapping; sizes live in `sandbox.dtypes`.
"""

from __future__ import annotations

import torch

TORCH: dict[str, torch.dtype] = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8,
    "u64": torch.uint64, "u32": torch.uint32, "u16": torch.uint16, "u8": torch.uint8,
}  # fmt: skip
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_float(dtype: str) -> bool:
    return TORCH[dtype].is_floating_point


def epsilon(dtype: str) -> float:
    """Spacing of the type at 1.0; 0 for integers."""
    return float(torch.finfo(TORCH[dtype]).eps) if is_float(dtype) else 0.0


def bits(t: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that NaN compares equal to itself. `t` is contiguous."""
    return t.view(_BITS[t.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))
