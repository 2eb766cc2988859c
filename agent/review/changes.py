"""Before and after, as rows: resources of kernels, time by kernel, speed-ups with their intervals.

Pure functions over verdicts; nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent import search
from sandbox.verdict import Ratio, Verdict, WorkloadTiming, short_name


@dataclass(frozen=True)
class Speedup:
    """A paired speed-up of one workload; over 1 is faster. `us`: microseconds a step of the
    candidate.
    """

    workload: str
    regime: str
    against: str
    ratio: Ratio
    us: float
    floor: str


@dataclass(frozen=True)
class KernelTime:
    """Microseconds of a step that a kernel takes, and its launches; None where it is not there."""

    kernel: str
    calls_before: int | None
    calls: int | None
    us_before: float | None
    us: float | None

    @property
    def delta(self) -> float:
        return (self.us or 0.0) - (self.us_before or 0.0)


@dataclass(frozen=True)
class Used:
    """What a version takes: ptxas's report in its verdict, and its plan's launches (kernel, smem)."""

    verdict: Verdict | None = None
    launches: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Resource:
    """One figure of a kernel before and after; None where the kernel is not there."""

    kernel: str
    what: str
    before: int | None
    after: int | None

    @property
    def changed(self) -> bool:
        return self.before != self.after


def label(w: WorkloadTiming) -> str:
    """`tp8, 16 layers, M 1, context 4096`."""
    return f"{w.preset}, {w.layers} layers, M {w.m}" + (
        f", context {w.context}" if w.context else ""
    )


def floors(w: WorkloadTiming) -> str:
    """Shares of the byte floor: at the measured rate, and at the specified one in brackets."""
    shares = (w.fraction_of_floor_measured, w.fraction_of_floor_spec)
    measured, spec = ("" if x is None else f"{x:.1%}" for x in shares)
    return f"{measured} ({spec})" if spec else measured


def speedups(v: Verdict | None) -> tuple[Speedup, ...]:
    """Every paired comparison of every timed workload."""
    rows = []
    for w in v.timing.workloads if v and v.timing else ():
        for against, ratio in search.ratios(w):
            rows.append(Speedup(label(w), w.regime, against, ratio, w.us, floors(w)))
    return tuple(rows)


def kernel_times(before: Verdict | None, after: Verdict | None) -> tuple[KernelTime, ...]:
    """Time by kernel, the largest change first; empty without profiles."""
    old, new = _profile(before), _profile(after)
    rows = [
        KernelTime(
            name, _int(old, name, "calls"), _int(new, name, "calls"), _us(old, name), _us(new, name)
        )
        for name in dict.fromkeys([*new, *old])
    ]
    return tuple(sorted(rows, key=lambda r: -abs(r.delta)))


def launches(v: Verdict | None) -> tuple[Mapping[str, Any], ...]:
    """The profile's launches in order: kernel, us, first, last, grid, block, smem, regs."""
    return tuple(v.profile.get("launches", ())) if v else ()


def resources(before: Used, after: Used) -> tuple[Resource, ...]:
    """Registers, spills, stack and shared memory, kernel by kernel; what changed comes first."""
    old, new = _figures(before), _figures(after)
    rows = [
        Resource(kernel, what, old.get((kernel, what)), new.get((kernel, what)))
        for kernel, what in dict.fromkeys([*new, *old])
    ]
    shown = [r for r in rows if r.what == "registers" or r.before or r.after]
    return tuple(sorted(shown, key=lambda r: not r.changed))


def _figures(used: Used) -> dict[tuple[str, str], int]:
    """Kernels of one name are one row: the largest figure stands for them."""
    worst: dict[tuple[str, str], int] = {}

    def note(kernel: str, what: str, value: int) -> None:
        at = (short_name(kernel), what)
        worst[at] = max(worst.get(at, 0), value)

    for r in used.verdict.resources if used.verdict else ():
        note(r.kernel, "registers", r.registers)
        note(r.kernel, "spilled on store, bytes", r.spill_stores)
        note(r.kernel, "spilled on load, bytes", r.spill_loads)
        note(r.kernel, "stack, bytes", r.stack)
        note(r.kernel, "static shared memory, bytes", r.smem_static)
    for x in used.launches:
        note(str(x["kernel"]), "dynamic shared memory, bytes", int(x["smem"]))
    return worst


def _profile(v: Verdict | None) -> dict[str, Mapping[str, Any]]:
    return {str(k["kernel"]): k for k in v.profile.get("kernels", ())} if v else {}


def _int(rows: Mapping[str, Mapping[str, Any]], name: str, key: str) -> int | None:
    return int(rows[name][key]) if name in rows else None


def _us(rows: Mapping[str, Mapping[str, Any]], name: str) -> float | None:
    return float(rows[name]["us"]) if name in rows else None
