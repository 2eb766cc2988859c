"""Special registers: coordinates, lane masks, clocks. What this device cannot know is refused, not invented."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sandbox.devices.cpu import layout as L
from sandbox.devices.cpu.emit import Unsupported
from sandbox.devices.cpu.ptx_ast import Instr, Operand, Special

if TYPE_CHECKING:
    from sandbox.devices.cpu.kernel import Kernel

AXES = {"x": 0, "y": 8, "z": 16}
RECORDS = {
    "%tid": ("%t", L.T_TID), "%ntid": ("%c", L.C_NTID), "%ctaid": ("%b", L.B_CTAID), "%nctaid": ("%c", L.C_GRID),
    "%cluster_nctaid": ("%c", L.C_CLUSTER),
}  # fmt: skip
FIELDS = {
    "%laneid": ("%t", L.T_LANE), "%cluster_ctarank": ("%b", L.B_RANK), "%cluster_nctarank": ("%c", L.C_CLUSTERSIZE),
    "%total_smem_size": ("%c", L.C_SMEM), "%smid": ("%b", L.B_SMID),
}  # fmt: skip
NAMES = sorted([*RECORDS, *FIELDS, "%warpid", "%nwarpid", "%lanemask_lt", "%lanemask_le", "%lanemask_eq",
                "%lanemask_ge",
                "%lanemask_gt", "%cluster_ctaid", "%nclusterid", "%clusterid", "%is_explicit_cluster", "%clock",
                "%clock64",
                "%globaltimer", "%globaltimer_lo", "%globaltimer_hi", "%gridid", "%nsmid", "%dynamic_smem_size",
                "%aggr_smem_size", "WARP_SZ"])  # fmt: skip


def special(k: Kernel, op: Operand, bits: int, instr: Instr) -> str:
    """Value of a special register as iN."""
    if not isinstance(op, Special):
        raise Unsupported(instr, "operand")
    name, _, axis = op.name.partition(".")
    if name in RECORDS and axis in AXES:
        base, offset = RECORDS[name]
        return k.resize(k.field(base, offset + AXES[axis]), 64, bits)
    if axis == "" and name in FIELDS:
        return k.resize(k.field(*FIELDS[name]), 64, bits)
    value = _cluster(k, name, axis) or _computed(k, name)
    if value is None:
        raise Unsupported(instr, op.name)
    return k.resize(value, 64, bits)


def _cluster(k: Kernel, name: str, axis: str) -> str | None:
    if axis not in AXES or name not in ("%cluster_ctaid", "%clusterid", "%nclusterid"):
        return None
    size = k.field("%c", L.C_CLUSTER + AXES[axis])
    if name == "%nclusterid":
        return k.let(f"udiv i64 {k.field('%c', L.C_GRID + AXES[axis])}, {size}")
    code = "urem" if name == "%cluster_ctaid" else "udiv"
    return k.let(f"{code} i64 {k.field('%b', L.B_CTAID + AXES[axis])}, {size}")


def _computed(k: Kernel, name: str) -> str | None:
    if name == "%warpid":
        return k.let(f"lshr i64 {k.field('%t', L.T_LINEAR)}, 5")
    if name == "%nwarpid":
        return k.let(f"lshr i64 {k.let('add i64 31, ' + k.field('%c', L.C_THREADS))}, 5")
    if name.startswith("%lanemask_"):
        return _lanemask(k, name[-2:])
    if name in (
        "%clock",
        "%clock64",
        "%globaltimer",
        "%globaltimer_lo",
        "%globaltimer_hi",
        "%clock_hi",
    ):
        now = k.let(f"add i64 {k.field('%c', L.C_CLOCK)}, 32")
        k.put("%c", L.C_CLOCK, now)
        return k.let(f"lshr i64 {now}, 32") if name.endswith("_hi") else now
    constants = {"%is_explicit_cluster": None, "%gridid": 1, "%nsmid": 132}
    if name == "%is_explicit_cluster":
        return k.let(
            f"zext i1 {k.let('icmp ugt i64 ' + k.field('%c', L.C_CLUSTERSIZE) + ', 1')} to i64"
        )
    if name == "%dynamic_smem_size":
        return k.let(f"sub i64 {k.field('%c', L.C_SMEM)}, {k.placed.static_bytes}")
    if name == "%aggr_smem_size":
        return k.let(f"add i64 {k.field('%c', L.C_SMEM)}, {L.SMEM_START}")
    found = constants.get(name)
    return None if found is None else k.let(f"add i64 0, {found}")


def _lanemask(k: Kernel, how: str) -> str | None:
    lane = k.field("%t", L.T_LANE)
    one = k.let(f"shl i64 1, {lane}")
    below = k.let(f"sub i64 {one}, 1")
    upto = k.let(f"or i64 {one}, {below}")
    full = 0xFFFFFFFF
    if how == "eq":
        return one
    if how == "lt":
        return below
    if how == "le":
        return upto
    if how == "ge":
        return k.let(f"xor i64 {below}, {full}")
    return k.let(f"xor i64 {upto}, {full}") if how == "gt" else None
