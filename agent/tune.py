"""Node `tune`, and the choice of tunable values without a model: greedy and exhaustive in small
spaces, Optuna in large.

`suggest` is a pure function of what was tried. It measures nothing, and promises only never to
suggest a point twice and to end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent import search
from agent.outcome import judged
from agent.propose import keep
from agent.state import CandidateState, Deps
from agent.types import Proposal
from agent.workspace import read_json
from sandbox.verdict import Status, Verdict

Space = Mapping[str, Sequence[Any]]
Point = dict[str, Any]
SMALL = 512
ASKS_PER_POINT = 16


@dataclass(frozen=True)
class Trial:
    """A point and its time (any unit, smaller is better); None if it did not pass."""

    point: Mapping[str, Any]
    time: float | None


def size(space: Space) -> int:
    return math.prod(len(values) for values in space.values())


def default(space: Space) -> Point:
    """The first value of each."""
    return {name: values[0] for name, values in space.items()}


def suggest(space: Space, tried: Sequence[Trial], k: int, seed: int) -> list[Point]:
    """At most `k` points not tried yet; the default comes first. Empty when the space is
    exhausted.
    """
    if not space or not all(space.values()):
        return []
    seen = {_key(space, t.point) for t in tried}
    found: list[Point] = []
    if _key(space, default(space)) not in seen:
        found.append(default(space))
    more = _near if size(space) <= SMALL else _wide
    for point in more(space, tried, seed, 4 * k):
        key = _key(space, point)
        if len(found) < k and key not in seen and all(_key(space, f) != key for f in found):
            found.append(point)
    return found[:k]


def _near(space: Space, tried: Sequence[Trial], seed: int, most: int) -> list[Point]:
    """All points, nearest to the best one first; of equal distance those whose changes did well
    before.
    """
    best, effect = _best(space, tried), _effects(space, tried)
    names = list(space)
    points = [
        dict(zip(names, values, strict=True)) for values in itertools.product(*space.values())
    ]

    def order(p: Point) -> tuple[int, float, list[int]]:
        changed = [n for n in names if p[n] != best[n]]
        return len(changed), sum(effect(n, p[n]) for n in changed), [*map(names.index, changed)]

    return sorted(points, key=order)


def _wide(space: Space, tried: Sequence[Trial], seed: int, most: int) -> list[Point]:
    """Two neighbours of the best point, one of Optuna's proposals, and so on."""
    best, effect = _best(space, tried), _effects(space, tried)
    near = [
        (effect(n, value), {**best, n: value})
        for n, values in space.items()
        for value in values
        if value != best[n]
    ]
    near.sort(key=lambda item: item[0])
    seen = {_key(space, t.point) for t in tried}
    fresh = [point for _, point in near if _key(space, point) not in seen]
    asked = _asked(space, tried, seed, most)
    mixed: list[Point] = []
    while fresh or asked:
        mixed += fresh[:2] + asked[:1]
        fresh, asked = fresh[2:], asked[1:]
    return mixed


def _effects(space: Space, tried: Sequence[Trial]) -> Callable[[str, Any], float]:
    """The best time seen with a value of a tunable; a value never tried counts as the default
    did.
    """
    times = [t.time for t in tried if t.time is not None]
    first = _key(space, default(space))
    start = [t.time for t in tried if t.time is not None and _key(space, t.point) == first]
    neutral = start[0] if start else max(times, default=1.0)

    def effect(name: str, value: Any) -> float:
        values = space[name]
        same = [t for t in tried if _value(t.point, name, values) == value]
        known = [t.time for t in same if t.time is not None]
        if not same:
            return neutral
        return min(known) if known else math.inf

    return effect


def _asked(space: Space, tried: Sequence[Trial], seed: int, most: int) -> list[Point]:
    """Optuna's proposals after replaying the trials."""
    import optuna
    from optuna.distributions import CategoricalDistribution
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # Values are encoded as indices in text: tuples and mixed types are not storable as categories.
    kinds = {n: CategoricalDistribution([str(i) for i in range(len(v))]) for n, v in space.items()}
    sampler = optuna.samplers.TPESampler(
        seed=seed + len(tried), n_startup_trials=min(10, 2 * len(space) + 2), constant_liar=True
    )
    study = optuna.create_study(sampler=sampler, direction="minimize")
    for t in tried:
        params = {n: str(list(v).index(_value(t.point, n, v))) for n, v in space.items()}
        failed = t.time is None or not math.isfinite(t.time)
        study.add_trial(
            create_trial(
                params=params, distributions=dict(kinds), value=None if failed else t.time,
                state=TrialState.FAIL if failed else TrialState.COMPLETE,
            )
        )  # fmt: skip
    points = []
    for _ in range(ASKS_PER_POINT * most // 4):
        params = study.ask(dict(kinds)).params
        points.append({n: v[int(params[n])] for n, v in space.items()})
    return points


def _best(space: Space, tried: Sequence[Trial]) -> Point:
    timed = [t for t in tried if t.time is not None]
    if not timed:
        return default(space)
    point = min(timed, key=lambda t: t.time or 0.0).point
    return {n: _value(point, n, values) for n, values in space.items()}


def _value(point: Mapping[str, Any], name: str, values: Sequence[Any]) -> Any:
    value = point.get(name, values[0])
    return value if value in values else values[0]


def _key(space: Space, point: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(list(v).index(_value(point, n, v)) for n, v in space.items())


def time_of(verdict: Verdict) -> float | None:
    """Time relative to the incumbent where it was paired, which drift of clocks does not touch;
    else microseconds.
    """
    row = search.workload(verdict)
    if verdict.status is not Status.PASSED or row is None:
        return None
    ratio = row.speedup_incumbent
    return 1.0 / ratio.value if ratio is not None and ratio.value > 0 else row.us


def tune(state: CandidateState, deps: Deps) -> dict[str, Any]:
    """The next version of a passed candidate: the same source with other tunables, or the end of
    trying.
    """
    seq, step = state["seq"], state["step"]
    if read_json(deps.files.proposal(seq, step + 1)) is not None:
        return {"step": step + 1, "go": "compile"}
    rows = [r for r in judged(deps, seq)]
    source = rows[-1].source
    rows = [r for r in rows if r.source == source]
    done = sum(read_json(deps.files.proposal(seq, r.step))["kind"] == "tune" for r in rows)
    declared: dict[str, Any] = next(
        (c["declared"] for r in rows if (c := read_json(deps.files.compiled(seq, r.step)))["artifact"]),
        {},
    )  # fmt: skip
    if done >= deps.settings.tunings or not declared or deps.stopping.is_set():
        return {"go": "confirm"}
    tried = [Trial(r.tunables, time_of(r.verdict)) for r in rows]
    points = suggest(declared, tried, 1, deps.settings.seed + seq)
    if not points:
        return {"go": "confirm"}
    deps.reporter.status(seq, f"tuning {done + 1}/{deps.settings.tunings}")
    proposal = Proposal(deps.workspace.text(source), "", None, points[0])
    return keep(deps, state, step + 1, proposal, "tune")
