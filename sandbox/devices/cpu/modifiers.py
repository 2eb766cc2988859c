"""Modifiers and operands that memory instructions share: state space, ordering and scope, vectors, cache hints.

It emits nothing.
"""

from __future__ import annotations

from sandbox.devices.cpu import layout as L
from sandbox.devices.cpu.emit import Mods, Unsupported
from sandbox.devices.cpu.ptx_ast import Instr, Operand, Vec

SPACES = {
    "global": L.GLOBAL, "shared": L.SHARED, "shared::cta": L.SHARED, "shared::cluster": L.SHARED, "local": L.LOCAL,
    "const": L.GLOBAL, "param": L.PARAM, "param::entry": L.PARAM, "": L.GENERIC,
}  # fmt: skip
HINT_PREFIXES = ("L1::", "L2::", "level::")
SCOPES = ("cta", "cluster", "gpu", "sys")


def space_of(m: Mods) -> int:
    """Take the state space from the modifiers; none means generic."""
    return SPACES[
        m.one(
            "global",
            "shared",
            "shared::cta",
            "shared::cluster",
            "local",
            "const",
            "param",
            "param::entry",
        )
    ]


def order_of(m: Mods) -> str:
    """Take ordering and scope; weak if there is none."""
    order = m.one("acquire", "release", "relaxed", "acq_rel", "volatile", "sc")
    m.drop(*SCOPES)
    if m.take("mmio"):
        order = order or "relaxed"
    return order or "weak"


def vector_of(m: Mods) -> int:
    name = m.one("v2", "v4", "v8")
    return int(name[1:]) if name else 1


def elements(op: Operand, count: int, instr: Instr) -> tuple[Operand, ...]:
    if count == 1:
        if isinstance(op, Vec) and len(op.items) == 1:
            return op.items
        return (op,)
    if not isinstance(op, Vec) or len(op.items) != count:
        raise Unsupported(instr, "vector of another length")
    return op.items
