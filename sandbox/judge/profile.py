"""Where a step's time goes, launch by launch: what the proposer and the reviewer look at after a pass.

A launch's share is the difference between two recorded prefixes of the plan, each timed with a cold L2, so that the
shares add up to the step and overlap between launches counts for whoever causes it. Nothing here decides a verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from sandbox.artifact import Launch
from sandbox.devices.base import Bound, Device, Timer
from sandbox.judge.clock import clock_of
from sandbox.judge.rig import Rig, clear
from sandbox.verdict import KernelResources, short_name

REPEATS = 9
MAX_POINTS = 160  # prefixes that are timed; longer plans are cut into this many pieces


@dataclass(frozen=True)
class Share:
    """One launch, or a few in a row where the plan is long. `us`: microseconds; `regs` a thread; `smem` in bytes."""

    first: int
    last: int
    kernel: str
    us: float
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem: int
    regs: int | None


def run(rig: Rig, resources: Sequence[KernelResources]) -> dict[str, Any]:
    """Profile a candidate that has passed. Empty where times are not measured. Raises Faulted."""
    clock = clock_of(rig.device)
    split = getattr(rig.step, "prefix", None)
    if clock is None or split is None:
        return {}
    launches = rig.artifact.step.launches
    ends = _ends(len(launches))
    clean = {n: rig.arena[n].clone() for n in rig.names("states")}
    times = [_cold(rig.device, clock, split(end), rig) for end in ends]
    for name, value in clean.items():
        rig.arena[name].copy_(value)
    shares = _shares(launches, ends, times, resources)
    return {
        "method": "differences of recorded prefixes, cold L2",
        "step_us": round(times[-1], 3),
        "launches": [_plain(s) for s in shares],
        "kernels": kernels(shares),
    }


def kernels(shares: Sequence[Share]) -> list[dict[str, Any]]:
    """Sums by kernel, the costliest first: calls, microseconds, share of the step."""
    total = sum(s.us for s in shares) or 1.0
    table: dict[str, list[Share]] = {}
    for s in shares:
        table.setdefault(s.kernel, []).append(s)
    rows = [
        {
            "kernel": name, "calls": sum(s.last - s.first + 1 for s in same),
            "us": round(sum(s.us for s in same), 3), "share": round(sum(s.us for s in same) / total, 4),
        }
        for name, same in table.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda r: -float(str(r["us"])))


def _ends(n: int) -> list[int]:
    pieces = min(n, MAX_POINTS)
    return sorted({-(-n * (i + 1) // pieces) for i in range(pieces)})


def _cold(device: Device, clock: Timer, prefix: Bound, rig: Rig) -> float:
    """Median microseconds of a recorded prefix after an L2 flush; undefined scratch needs no new poison here."""
    prefix.launch()
    device.synchronize()
    graph = prefix.capture()
    times = []
    for _ in range(REPEATS):
        clear(rig.workspace("zero", "step"))
        clock.flush_l2()
        times.append(clock.time(graph.launch))
    return median(times)


def _shares(
    launches: Sequence[Launch],
    ends: Sequence[int],
    times: Sequence[float],
    resources: Sequence[KernelResources],
) -> list[Share]:
    registers = {r.kernel: r.registers for r in resources}
    out = []
    start, before = 0, 0.0
    for end, now in zip(ends, times, strict=True):
        x = launches[end - 1]
        out.append(
            Share(
                start, end - 1, short_name(x.kernel), round(now - before, 3), x.grid, x.block, x.smem,
                registers.get(x.kernel),
            )
        )  # fmt: skip
        start, before = end, now
    return out


def _plain(share: Share) -> Mapping[str, Any]:
    return {**asdict(share), "grid": list(share.grid), "block": list(share.block)}
