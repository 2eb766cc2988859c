"""Element types that cross the trust boundary, by the names PTX and this project use.

Not a tensor library: only names and sizes, so that every process can share it without torch.
"""

from __future__ import annotations

ITEM_BYTES = {
    "f64": 8, "f32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1,
    "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u64": 8, "u32": 4, "u16": 2, "u8": 1,
}  # fmt: skip


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense row-major tensor. Raises KeyError for an unknown dtype."""
    total = ITEM_BYTES[dtype]
    for extent in shape:
        total *= extent
    return total
