"""Where a step's time goes, launch by launch: what the proposer and the reviewer look at after a pass.

A launch's share is the difference between two recorded prefixes of the plan, each timed with a cold L2, so that the
shares add up to the step and overlap between launches counts for whoever causes it. On the cpu device the shares are
modelled. Nothing here decides a verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from sandbox.artifact import Artifact
from sandbox.devices.base import Bound, Device, Timer
from sandbox.judge import kernels as code
from sandbox.judge import waterfall
from sandbox.judge.clock import clock_of
from sandbox.judge.rig import Rig, clear
from sandbox.verdict import KernelResources, short_name

REPEATS = 9
MODELLED_RATE = 4.39e12  # bytes a second of the machine that the cpu device imitates
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
    more: Mapping[str, Any] = field(default_factory=dict)


def run(
    rig: Rig, resources: Sequence[KernelResources], machine_code: code.MachineCode | None = None
) -> dict[str, Any]:
    """Profile a candidate that has passed; `machine_code` may have been begun before. Empty where times are neither
    measured nor modelled. Raises Faulted."""
    clock = clock_of(rig.device)
    split = getattr(rig.step, "prefix", None)
    if clock is None:
        return _modelled(rig)
    if split is None:
        return {}
    launches = rig.artifact.step.launches
    ends = _ends(len(launches))
    clean = {n: rig.arena[n].clone() for n in rig.names("states")}
    times = [_cold(rig.device, clock, split(end), rig) for end in ends]
    for name, value in clean.items():
        rig.arena[name].copy_(value)
    facts = rig.device.facts()
    shares = _shares(rig.artifact, ends, times, resources, facts.sms)
    rate = facts.stream_rate or facts.spec_rate
    rows = [_plain(s, rate) for s in shares]
    step = waterfall.Step(times[-1], 1e6 * rig.case.workload.floor.bytes / rate if rate else 0.0)
    return {
        "method": "differences of recorded prefixes, cold L2",
        "step_us": round(times[-1], 3),
        "launches": rows,
        "kernels": kernels(shares),
        "sass": (machine_code or code.MachineCode(rig.artifact)).table(),
        "waterfall": waterfall.of_launches(rows, step),
    }


def _modelled(rig: Rig) -> dict[str, Any]:
    """The same from the device's model of the launches that it ran last."""
    tell = getattr(rig.step, "profile", None)
    made = tell() if tell is not None else []
    if not made:
        return {}
    facts = rig.device.facts()
    rows, shares = [], []
    for n, (x, m) in enumerate(zip(rig.artifact.step.launches, made, strict=True)):
        name = short_name(x.kernel)
        more = {k: v for k, v in m.items() if k not in ("kernel", "us", "opcodes")}
        more |= code.occupancy(x, None, facts.sms)
        share = Share(n, n, name, round(m["us"], 3), x.grid, x.block, x.smem, None, more)
        shares.append(share)
        rows.append(_plain(share, None))
    total = sum(m["us"] for m in made)
    floor = 1e6 * rig.case.workload.floor.bytes / MODELLED_RATE
    opcodes: dict[str, dict[str, int]] = {}
    for x, m in zip(rig.artifact.step.launches, made, strict=True):
        table = opcodes.setdefault(short_name(x.kernel), {})
        for opcode, count in m["opcodes"].items():
            table[opcode] = table.get(opcode, 0) + count
    return {
        "method": "modelled by the cpu device, not measured",
        "step_us": round(total, 3),
        "launches": rows[:MAX_POINTS],
        "kernels": kernels(shares),
        "executed": {
            k: dict(sorted(v.items(), key=lambda y: -y[1])[:24]) for k, v in opcodes.items()
        },
        "waterfall": waterfall.of_launches(rows, waterfall.Step(total, floor, "modelled")),
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
    artifact: Artifact,
    ends: Sequence[int],
    times: Sequence[float],
    resources: Sequence[KernelResources],
    sms: int,
) -> list[Share]:
    used = code.by_kernel(resources)
    out = []
    start, before = 0, 0.0
    for end, now in zip(ends, times, strict=True):
        several = artifact.step.launches[start:end]
        x, r = several[-1], used.get(several[-1].kernel)
        size = {"memory": 0, "l2": 0}
        for launch in several:
            for level, n in code.bytes_named(artifact, launch).items():
                size[level] += n
        more = {"bytes": size["memory"], "l2_bytes": size["l2"], **code.occupancy(x, r, sms)}
        if r is not None:
            more |= {"spills": r.spill_stores + r.spill_loads, "smem_static": r.smem_static}
        out.append(
            Share(
                start, end - 1, short_name(x.kernel), round(now - before, 3), x.grid, x.block, x.smem,
                r.registers if r else None, more,
            )
        )  # fmt: skip
        start, before = end, now
    return out


def _plain(share: Share, rate: float | None) -> dict[str, Any]:
    """A row of the profile. Bytes are of what the launch names, or counted by a model: at most what it moved."""
    out: dict[str, Any] = {
        "first": share.first, "last": share.last, "kernel": share.kernel, "us": share.us, "grid": list(share.grid),
        "block": list(share.block), "smem": share.smem, "regs": share.regs, **share.more,
    }  # fmt: skip
    size = share.more.get("bytes", 0)
    if size and share.us > 0:
        out["gb_per_s"] = round(size / share.us / 1e3, 1)
        if rate:
            out["of_floor"] = round(1e6 * size / rate / share.us, 4)
    return out
