"""From the native records to sentences: what went wrong, where in the PTX and the source, and who waits for what."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence

import numpy as np

from sandbox.artifact import Launch
from sandbox.devices.cpu import layout as L
from sandbox.devices.cpu.ptx_ast import Instr
from sandbox.devices.cpu.record import Record, Region
from sandbox.devices.cpu.translate import Translated
from sandbox.verdict import Failure

RULES = {
    L.F_BOUNDS: ("out-of-bounds", "accesses {size} bytes at {addr}, outside every buffer"),
    L.F_ALIGN: ("misaligned", "accesses {addr}, which is not aligned to {size} bytes"),
    L.F_MBAR: (
        "mbarrier-invalid",
        "uses {addr} as an mbarrier, which is not initialised or was overwritten",
    ),
    L.F_MBAR_COUNT: (
        "mbarrier-count",
        "counts {size} at mbarrier {addr}, beyond what its phase still expects",
    ),
    L.F_BARRIER: (
        "barrier-count",
        "arrives at barrier {raw} for {size} threads, which does not fit the others or the rules",
    ),
    L.F_TRAP: ("trap", "traps, or touches shared memory of a block that has ended"),
    L.F_WARP: (
        "warp-mask",
        "executes a warp-wide instruction with mask {addr} that does not name it or all lanes",
    ),
    L.F_BULK: ("bulk-size", "copies {size} bytes, which the instruction does not allow"),
    L.H_BUDGET: ("budget", "did not end within the instruction budget"),
    L.H_LIVELOCK: ("livelock", "keeps polling and nothing else can run"),
    L.H_DEADLOCK: ("deadlock", "cannot go on: every thread waits and nothing can wake one"),
}
STATES = {
    L.MEET: "for the rest of their warp", L.BAR: "at a barrier", L.CLUSTER: "at the cluster barrier",
    L.WATCH: "for a word to change", L.MBAR: "for an mbarrier's phase", L.YIELD: "in a loop", L.READY: "to run",
}  # fmt: skip
MAX_GROUPS = 8


def place(instr: Instr | None) -> tuple[str, dict[str, object]]:
    """Words and fields that say where an instruction is."""
    if instr is None:
        return "", {}
    where: dict[str, object] = {"ptx_line": instr.line, "instruction": instr.opcode}
    text = f"`{instr.opcode}` (PTX line {instr.line}"
    if instr.source is not None:
        where |= {"file": instr.source[0], "line": instr.source[1]}
        text += f", {instr.source[0]}:{instr.source[1]}"
    return text + ")", where


def address(value: int, launch: Launch, regions: Sequence[Region]) -> str:
    """An address by name: the nearest buffer and the distance, or the offset in shared memory."""
    value &= (1 << 64) - 1
    if value >> 32 == L.SHARED_TAG or value < 1 << 32 and not _near(value, regions):
        low = value & 0xFFFFFFFF
        rank, off = low >> L.RANK_SHIFT, (low & ((1 << L.RANK_SHIFT) - 1)) - L.SMEM_START
        return f"shared memory byte {off}" + (f" of cluster rank {rank}" if launch.cluster else "")
    if value >> 32 == L.LOCAL_TAG:
        return f"local memory byte {value & 0xFFFFFFFF}"
    best = None
    for r in regions:
        gap = r.base - value if value < r.base else max(0, value - (r.base + r.size) + 1)
        if best is None or gap < best[0]:
            best = (gap, r)
    if best is None:
        return f"address {value:#x}"
    gap, r = best
    if gap == 0:
        return f"{r.name} byte {value - r.base}"
    if gap > 1 << 30:
        return f"address {value:#x}, near no buffer"
    side = (
        f"{r.base - value} bytes before"
        if value < r.base
        else f"byte {value - r.base}, past the end of"
    )
    return f"{side} {r.name} ({r.size} bytes)"


def _near(value: int, regions: Sequence[Region]) -> bool:
    """Whether a buffer is close by: this machine may place buffers below 4 GiB, where shared addresses lie too."""
    return any(r.base - (1 << 16) <= value < r.base + r.size + (1 << 16) for r in regions)


def coordinates(linear: int, shape: tuple[int, int, int]) -> str:
    x, y, _ = shape
    values = (linear % x, linear // x % y, linear // (x * y))
    return str(values[0]) if shape[1] == shape[2] == 1 else str(values)


def site_of(kernel: Translated, index: int) -> Instr | None:
    return kernel.sites[index] if 0 <= index < len(kernel.sites) else None


def failure(
    record: Record, kernel: Translated, launch: Launch, regions: Sequence[Region]
) -> Failure:
    """The failure that stopped a launch."""
    code = record.get(L.C_STATUS)
    rule, sentence = RULES.get(code, ("fault", "failed"))
    block, thread = record.get(L.C_BLOCK), record.get(L.C_THREAD)
    raw = record.get(L.C_ADDR)
    text, where = place(site_of(kernel, record.get(L.C_SITE)))
    shown = f"{raw:#x}" if code == L.F_WARP else address(raw, launch, regions)
    what = sentence.format(size=record.get(L.C_SIZE), addr=shown, raw=raw)
    where |= {"kernel": launch.kernel}
    if code in (L.H_DEADLOCK, L.H_LIVELOCK, L.H_BUDGET):
        who = waiting(record, kernel, launch, regions)
        return Failure(rule, f"kernel {launch.kernel[:80]} {what}. {who}", where)
    where |= {"block": block, "thread": thread, "address": raw}
    message = (
        f"kernel {launch.kernel[:80]}, block {coordinates(block, launch.grid)}, thread "
        f"{coordinates(thread, launch.block)} {what}{' at ' + text if text else ''}"
    )
    return Failure(rule, message, where)


def waiting(record: Record, kernel: Translated, launch: Launch, regions: Sequence[Region]) -> str:
    """Who waits for what: groups of threads by instruction and state."""
    slots, threads = record.get(L.C_NSLOTS), record.get(L.C_THREADS)
    groups: Counter[tuple[int, int, str]] = Counter()
    first: dict[tuple[int, int, str], tuple[int, int]] = {}
    for s in range(slots):
        b = record.get(L.C_SLOTS) + s * L.B_BYTES
        if not _word(b + L.B_STATE):
            continue
        base = _word(b + L.B_THREADS)
        for i in range(threads):
            t = base + i * record.get(L.C_TSTRIDE)
            state = _word(t + L.T_STATE)
            if state == L.DONE:
                continue
            key = (_word(t + L.T_SITE), state, _detail(record, b, t, state, launch, regions))
            groups[key] += 1
            first.setdefault(key, (_word(b + L.B_LINEAR), i))
    parts = []
    for key, count in groups.most_common(MAX_GROUPS):
        site, state, detail = key
        text, _ = place(site_of(kernel, site))
        block, thread = first[key]
        verb = "s wait" if count > 1 else " waits"
        parts.append(
            f"{count} thread{verb} {detail or STATES.get(state, '')} at {text or 'the start'}"
            f" (first: block {coordinates(block, launch.grid)}, thread {coordinates(thread, launch.block)})"
        )
    left = record.get(L.C_NCLUSTERS) - record.get(L.C_NEXT)
    if left > 0:
        parts.append(
            f"{left} block{'s' if left > 1 else ''} could not start because those that wait hold all slots"
        )
    more = len(groups) - MAX_GROUPS
    return "; ".join(parts) + (f"; and {more} more groups" if more > 0 else "") + "."


def _detail(
    record: Record, b: int, t: int, state: int, launch: Launch, regions: Sequence[Region]
) -> str:
    a = _word(t + L.T_A)
    if state == L.BAR:
        bar = b + L.B_BARS + a * L.BAR_BYTES
        expected = _word(bar + 8)
        return f"at barrier {a} ({_word(bar)} of {_word(b + L.B_LIVE) if expected < 0 else expected} arrived)"
    if state == L.MBAR:
        slot, off = _shared_home(record, a)
        word = _word(a) & ((1 << 64) - 1)
        pending, tx = word & 0xFFFFF, ((word >> 40) & 0x3FFFFF) - (1 << 21)
        return (
            f"for parity {_word(t + L.T_B)} of the mbarrier at shared memory byte {off}"
            f" (pending: {pending} arrivals, {tx} bytes)"
        )
    if state == L.WATCH:
        value = _word(t + L.T_B)
        slot, off = _shared_home(record, a)
        name = f"shared memory byte {off}" if slot is not None else address(a, launch, regions)
        return f"for {name} to change from {value}"
    if state == L.MEET:
        return f"for lanes of mask {_word(t + L.T_MASK) & 0xFFFFFFFF:#010x} of their warp"
    return ""


def _shared_home(record: Record, host: int) -> tuple[int | None, int]:
    """Slot and offset of a host address in shared memory."""
    size = record.get(L.C_SMEM)
    for s in range(record.get(L.C_NSLOTS)):
        base = _word(record.get(L.C_SLOTS) + s * L.B_BYTES + L.B_SMEM)
        if base <= host < base + size:
            return s, host - base
    return None, 0


def findings(
    record: Record, kernel: Translated, launch: Launch, regions: Sequence[Region], found: np.ndarray
) -> list[Failure]:
    """What the runtime noticed without stopping."""
    out = []
    for i in range(record.get(L.C_NFOUND)):
        kind, site, addr, size, block, thread, extra, agent = (int(x) for x in found[i])
        text, where = place(site_of(kernel, site))
        where |= {"kernel": launch.kernel, "block": block, "thread": thread}
        who = f"block {coordinates(block, launch.grid)}, thread {coordinates(thread, launch.block)}"
        if kind == L.N_UNWRITTEN:
            rule, what = (
                "unwritten-read",
                f"reads {size} bytes of {address(addr, launch, regions)} that nothing wrote",
            )
        elif kind == L.N_SHFL:
            rule, what = "shfl-source", f"takes a value from lane {addr}, which does not take part"
        else:
            rule = "race"
            other, _ = place(site_of(kernel, extra))
            warps = -(-record.get(L.C_THREADS) // 32)
            by = (
                f"warp {agent % warps} of block number {agent // warps} (in the order they started)"
            )
            what = f"races on {address(addr, launch, regions)} with {other or 'another access'} of {by}"
        out.append(Failure(rule, f"kernel {launch.kernel[:80]}, {who} {what} at {text}", where))
    return out


def _word(at: int) -> int:
    return int(ctypes.c_int64.from_address(at).value)
