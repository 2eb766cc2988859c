"""Lowering of mma.sync. Sparse, block-scaled and one-bit forms are refused."""

from __future__ import annotations

import re

from sandbox.devices.cpu import layout as L
from sandbox.devices.cpu.emit import Mods, Unsupported
from sandbox.devices.cpu.kernel import Kernel
from sandbox.devices.cpu.lower_warp import FULL, meet, slot
from sandbox.devices.cpu.ptx_ast import Instr, Operand, Vec
from sandbox.devices.cpu.registry import lowers
from sandbox.devices.cpu.rt_mma import (
    E_BF16,
    E_E4M3,
    E_E5M2,
    E_F16,
    E_F32,
    E_F64,
    E_S4,
    E_S8,
    E_S32,
    E_TF32,
    E_U4,
    E_U8,
)  # fmt: skip

KINDS = {"f16": E_F16, "bf16": E_BF16, "tf32": E_TF32, "f64": E_F64, "e4m3": E_E4M3, "e5m2": E_E5M2, "s8": E_S8,
         "u8": E_U8, "s4": E_S4, "u4": E_U4, "f32": E_F32, "s32": E_S32}  # fmt: skip
WIDTHS = {
    "f16": 16,
    "bf16": 16,
    "tf32": 32,
    "f64": 64,
    "e4m3": 8,
    "e5m2": 8,
    "s8": 8,
    "u8": 8,
    "s4": 4,
    "u4": 4,
}
SHAPES = {
    16: {(16, 8, 8), (16, 8, 16)}, 32: {(16, 8, 4), (16, 8, 8)}, 64: {(8, 8, 4), (16, 8, 4), (16, 8, 8), (16, 8, 16)},
    8: {(16, 8, 16), (16, 8, 32), (8, 8, 16)}, 4: {(16, 8, 32), (16, 8, 64), (8, 8, 32)},
}  # fmt: skip


@lowers(
    "mma",
    "mma.sync.aligned.shape.row.col{.satfinite}: f16, bf16, tf32, e4m3, e5m2, s8, u8, s4, u4, f64",
)
def mma(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    m.need("sync")
    m.need("aligned")
    m.need("row")
    m.need("col")
    satfinite = m.take("satfinite")
    kc, kb, ka, kd = m.kind(), m.kind(), m.kind(), m.kind()
    shape = re.fullmatch(r"m(\d+)n(\d+)k(\d+)", m.kind())
    m.end()
    if (
        shape is None
        or any(x not in KINDS for x in (ka, kb, kc, kd))
        or ka not in WIDTHS
        or kb not in WIDTHS
    ):
        raise Unsupported(instr, "form")
    sizes = tuple(int(x) for x in shape.groups())
    if WIDTHS[ka] != WIDTHS[kb] or sizes not in SHAPES[WIDTHS[ka]]:
        raise Unsupported(instr, "shape")
    _, n, depth = sizes
    rows = sizes[0]
    per = 1 if WIDTHS[ka] == 64 else 32 // WIDTHS[ka]
    counts = (
        rows * depth // (32 * per),
        n * depth // (32 * per),
        _results(rows, kc),
        _results(rows, kd),
    )
    d, a, b, c = (
        _items(o, instr, count)
        for o, count in zip(instr.operands, (counts[3], *counts[:3]), strict=True)
    )
    bits = 64 if ka == "f64" else 32
    slots = {}
    for first, items in ((0, a), (8, b), (12, c)):
        for i, op in enumerate(items):
            slots[first + i] = k.resize(k.word(op, bits, instr), bits, 64)
    variant = (
        rows
        | n << 8
        | depth << 16
        | KINDS[ka] << 24
        | KINDS[kb] << 28
        | KINDS[kc] << 32
        | KINDS[kd] << 36
    )
    meet(k, instr, L.O_MMA, FULL, slots, variant | int(satfinite) << 40)
    for i, op in enumerate(d):
        k.write(op, bits, slot(k, 20 + i, bits), instr)


def _results(rows: int, kind: str) -> int:
    return rows // 8 if kind == "f16" else rows // 4


def _items(op: Operand, instr: Instr, count: int) -> tuple[Operand, ...]:
    items = op.items if isinstance(op, Vec) else (op,)
    if len(items) != count:
        raise Unsupported(instr, "operand of another length")
    return items
