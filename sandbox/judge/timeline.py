"""The timeline of one step from inside its kernels: the build with marks, run beside the artifact that was judged.

It runs after a pass, in a process of its own, and decides nothing about the candidate: outputs and states of both
builds must agree bit for bit, the price of the marks is stated, and their rows become spans for
`sandbox.judge.waterfall`. On the cpu device the order of phases is real and their lengths are shares of the modelled
step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sandbox.artifact import Artifact
from sandbox.devices.base import Bound, Device, Timer
from sandbox.judge import rig as rigs
from sandbox.judge import waterfall
from sandbox.judge.atomics import float_atomics
from sandbox.judge.case import Case, open_case, read_artifact
from sandbox.judge.clock import clock_of
from sandbox.judge.ending import Ended
from sandbox.judge.locate import Where
from sandbox.judge.observe import differs
from sandbox.judge.report import Draft, device_of
from sandbox.judge.rig import Rig, clear
from sandbox.judge.waterfall import Span, Step
from sandbox.verdict import Correctness, Failure, Outcome, Status, Verdict
from targets.reference import Tensors

ROWS, NAMES = "workspace.timeline", "constants.timeline"
REPEATS, STEPS = 9, 2
MAX_EVENTS = 12_000  # kept for the trace; all of them count in the waterfall
COARSE_NS = 100  # a global timer that ticks more slowly is made finer with the SM's own clock
MODELLED_EDGE_US = 1.0
Table = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Track:
    """Marks of one block and role: (microseconds, phase number from 0, layer), the last one its end."""

    number: int
    sm: int
    marks: tuple[tuple[float, int, int], ...]
    lost: int


@dataclass(frozen=True)
class Trace:
    """One step. `phases`: (name, kind); `blocks`: tracks of the first role, which the waterfall accounts for."""

    phases: tuple[tuple[str, str], ...]
    tracks: tuple[Track, ...]
    blocks: int


def run(draft: Draft, device: Device) -> Verdict:
    """Both builds on equal buffers. Raises Ended, Refused or Faulted."""
    job = draft.job
    assert job.timeline is not None
    with draft.phase("load"):
        draft.device = device_of(device.facts())
        case = open_case(job, device)
        plain, marked = read_artifact(job.artifact, case), read_artifact(job.timeline, case, True)
        _same_source(plain, marked)
        draft.artifact = plain.sha256
        pair = tuple(
            rigs.build(case, a, device.load(a), label)
            for a, label in ((plain, "plain"), (marked, "marked"))
        )
    with draft.phase("compare"):
        said = _compare(case, pair)
    with draft.phase("timeline"):
        draft.profile |= _observe(case, pair)
    draft.checked.append(said)
    return draft.passed(Outcome.NOT_TIMED, Correctness(1, STEPS, 0, (), (said,), ()), None)


def _same_source(plain: Artifact, marked: Artifact) -> None:
    if plain.source_sha256 != marked.source_sha256:
        raise Ended(
            Status.PLAN_ERROR, Failure("timeline", "the build with marks is of another source")
        )


def _compare(case: Case, pair: Sequence[Rig]) -> str:
    """Two steps of one trajectory on both; what they leave must have the same bits. Raises Ended."""
    on, w = case.device.torch_device, case.workload
    seed = case.seeds.of("timeline")
    made = case.reference.weights(w, seed, on)
    for r in pair:
        r.load_weights(made)
        r.set_states(case.reference.states(w, seed, on))
    exact = not any(float_atomics(r.artifact) for r in pair)
    for k in range(STEPS):
        left: list[Tensors] = []
        for r in pair:
            r.set_inputs(case.reference.inputs(w, seed, k, on))
            r.dirty("random", seed + k)
            r.launch(f"timeline step {k}")
            left.append(r.copy_out("outputs", "states"))
        found = (
            differs(left[0], left[1], Where(0, k, "build with marks", case.axes)) if exact else None
        )
        if found is not None:
            message = f"the build with marks gives other results: {found.message}"
            raise Ended(Status.WRONG, Failure("timeline", message, found.where))
    if not exact:
        return "timeline: the PTX adds floats atomically, so that the builds were not compared bit for bit"
    return f"timeline: outputs and states of the build with marks equal the artifact's bit for bit, {STEPS} steps"


def _observe(case: Case, pair: Sequence[Rig]) -> dict[str, Any]:
    clock = clock_of(case.device)
    if clock is None:
        return _modelled(case, pair)
    plain, marked = pair
    graphs = [_recorded(r) for r in pair]
    states = {n: marked.arena[n].clone() for n in marked.names("states")}
    alone: list[float] = []
    seen: list[tuple[float, Table]] = []
    for _ in range(REPEATS):
        alone.append(_cold(clock, plain, graphs[0], states))
        us = _cold(clock, marked, graphs[1], states)
        seen.append((us, _rows(marked)))
    seen.sort(key=lambda x: x[0])
    us, rows = seen[len(seen) // 2]
    facts = case.device.facts()
    rate = facts.stream_rate or facts.spec_rate or 0.0
    floor = 1e6 * case.workload.floor.bytes / rate if rate else 0.0
    trace = decode(rows, phases_of(marked.artifact), blocks_of(marked.artifact))
    return describe(trace, Step(us, floor), median(alone), us / median(alone))


def _recorded(r: Rig) -> Bound:
    r.step.launch()
    r.device.synchronize()
    return r.step.capture()


def _cold(clock: Timer, r: Rig, graph: Bound, states: Tensors) -> float:
    graph.launch()  # both builds are timed right after a step, so that clocks and code are equally warm
    for name, value in states.items():
        r.arena[name].copy_(value)
    clear(r.workspace("zero", "step"))
    if ROWS in r.arena:
        r.arena[ROWS].zero_()
    clock.flush_l2()
    return clock.time(graph.launch)


def _modelled(case: Case, pair: Sequence[Rig]) -> dict[str, Any]:
    from sandbox.devices.cpu.model import H200

    plain, marked = pair
    marked.arena[ROWS].zero_()
    marked.launch("timeline")
    us = plain.step.modelled_us() or 0.0
    order = decode(_rows(marked), phases_of(marked.artifact), blocks_of(marked.artifact))
    floor = 1e6 * case.workload.floor.bytes / H200.memory_rate
    spread = spread_out(order, us - 1e6 * H200.launch * plain.step.launches)
    return describe(spread, Step(us, floor, "modelled"), us, (marked.step.modelled_us() or us) / us)


def _rows(r: Rig) -> Table:
    return r.arena[ROWS].view(torch.int32).cpu().numpy().astype(np.int64)


def phases_of(artifact: Artifact) -> tuple[tuple[str, str], ...]:
    """Names and kinds out of the artifact, as text from a candidate. Raises Ended."""
    try:
        found = json.loads(artifact.constants.get(NAMES, b"null"))
        return tuple((str(n)[:60], str(k)[:8]) for n, k in found)[:1024]
    except (ValueError, TypeError) as error:
        raise Ended(
            Status.PLAN_ERROR, Failure("timeline", "the artifact does not name its phases")
        ) from error


def blocks_of(artifact: Artifact) -> int:
    """Tracks of the first role: the largest grid of a launch that has the rows of marks."""
    grids = [
        x.grid[0] * x.grid[1] * x.grid[2]
        for x in artifact.step.launches
        if any(r.buffer == ROWS for r in x.relocations)
    ]
    return max(grids, default=1)


def decode(rows: Table, phases: tuple[tuple[str, str], ...], blocks: int) -> Trace:
    """Rows of marks ([track, row, 4 words]; the first row holds count and SM) as tracks, times from the first mark."""
    tracks = []
    raw: list[tuple[int, int, int, Table, Table, Table]] = []
    for number in range(rows.shape[0]):
        n = int(rows[number, 0, 0])
        if n <= 0:
            continue
        kept = rows[number, 1 : min(n, rows.shape[1] - 1) + 1] & 0xFFFFFFFF
        now, ticks = kept[:, 0] | kept[:, 1] << 32, kept[:, 2]
        raw.append((number, int(rows[number, 0, 2]), max(0, n - len(kept)), now, ticks, kept[:, 3]))
    times = _sharpen([(x[3], x[4]) for x in raw])
    zero = min((float(t[0]) for t in times), default=0.0)
    for (number, sm, lost, _, _, what), t in zip(raw, times, strict=True):
        marks = tuple(
            (round((float(at) - zero) / 1e3, 4), int(w & 0xFFFF) - 1, int(w >> 16))
            for at, w in zip(t, what, strict=True)
            if 0 < int(w & 0xFFFF) <= len(phases)
        )
        tracks.append(Track(number, sm, marks, lost))
    return Trace(phases, tuple(tracks), blocks)


def _sharpen(pairs: list[tuple[Table, Table]]) -> list[npt.NDArray[np.float64]]:
    """Nanoseconds. A coarse global timer gives each track its offset; the SM's clock gives the steps between."""
    tick = math.gcd(*(int(d) for now, _ in pairs for d in np.diff(now)))
    if tick < COARSE_NS:
        return [now.astype(np.float64) for now, _ in pairs]
    unwrapped = [np.cumsum(np.diff(t, prepend=t[:1]) % (1 << 32)) for _, t in pairs]
    spans = [
        (float(n[-1] - n[0]), float(u[-1])) for (n, _), u in zip(pairs, unwrapped, strict=True)
    ]
    ticks = sum(u for _, u in spans)
    if ticks <= 0:
        return [now.astype(np.float64) for now, _ in pairs]
    slope = sum(n for n, _ in spans) / ticks
    return [
        slope * u + float(np.mean(now - slope * u))
        for (now, _), u in zip(pairs, unwrapped, strict=True)
    ]


def spans(trace: Trace, role: int = 0) -> list[Span]:
    """Phases of the blocks of one role."""
    out = []
    for t in trace.tracks:
        if t.number // trace.blocks != role:
            continue
        seen: dict[tuple[int, int], int] = {}
        for (begin, phase, layer), (end, _, _) in zip(t.marks, t.marks[1:], strict=False):
            name, kind = trace.phases[phase]
            if kind == "end":
                continue
            nth = seen.get((phase, layer), 0)
            seen[phase, layer] = nth + 1
            out.append(Span(t.number, name, kind, layer, begin, end, nth))
    return out


def spread_out(trace: Trace, us: float) -> Trace:
    """Lengths where a device knows the order of marks alone: edges cost what the model says, all other phases alike."""
    tracks = []
    for t in trace.tracks:
        kinds = [trace.phases[p][1] for _, p, _ in t.marks[:-1]]
        edge = min(MODELLED_EDGE_US, us / max(1, 2 * kinds.count("edge")))
        rest = (us - edge * kinds.count("edge")) / max(1, len(kinds) - kinds.count("edge"))
        lengths = [edge if k == "edge" else rest for k in kinds]
        at = np.concatenate([[0.0], np.cumsum(lengths)])
        moved = tuple(
            (round(float(x), 4), p, layer) for x, (_, p, layer) in zip(at, t.marks, strict=True)
        )
        tracks.append(replace(t, marks=moved))
    return replace(trace, tracks=tuple(tracks))


def describe(trace: Trace, step: Step, plain_us: float, overhead: float) -> dict[str, Any]:
    """The `timeline` and `waterfall` of a profile."""
    if not trace.tracks:
        raise Ended(Status.PLAN_ERROR, Failure("timeline", "no mark was reached in this step"))
    fall = waterfall.of_spans(spans(trace), step)
    fall |= {"plain_us": round(plain_us, 3), "overhead": round(overhead, 4)}
    lost = sum(t.lost for t in trace.tracks)
    return {"waterfall": fall, "timeline": {
        "kind": step.kind, "step_us": round(step.us, 3), "overhead": round(overhead, 4), "blocks": trace.blocks,
        "tracks_seen": len(trace.tracks), "marks_lost": lost, "phases": [list(p) for p in trace.phases],
        "tracks": [
            {"track": t.number, "role": t.number // trace.blocks, "block": t.number % trace.blocks, "sm": t.sm,
             "marks": [list(m) for m in t.marks]}
            for t in _sample(trace)
        ],
    }}  # fmt: skip


def _sample(trace: Trace) -> list[Track]:
    """Blocks evenly over the grid, all roles of each, as many as the trace may hold."""
    longest = max(len(t.marks) for t in trace.tracks)
    roles = len({t.number // trace.blocks for t in trace.tracks})
    found = sorted({t.number % trace.blocks for t in trace.tracks})
    most = max(1, MAX_EVENTS // max(1, longest * roles))
    chosen = {found[i * len(found) // min(most, len(found))] for i in range(min(most, len(found)))}
    return [t for t in trace.tracks if t.number % trace.blocks in chosen]
