"""Node `plan`: opens a round. Asks the proposer for directions, numbers the candidates, writes the
plan down.

Round 0 is the seed alone. Also the view of the run that proposers get. It judges nothing.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from agent import difference, search
from agent.difference import Side
from agent.lessons import earlier
from agent.models.base import ModelError, StopRun
from agent.review.remarks import remarks
from agent.state import Deps, RunState
from agent.types import Direction, Situation, Tried
from agent.workspace import read_json, write_json

MOST_COMPARED, MOST_CHANGES, LONGEST_CHANGE = 4, 16, 300


def plan(state: RunState, deps: Deps) -> dict[str, Any]:
    """The next round's number and candidates, or a reason to stop."""
    round = state.get("round", -1) + 1
    begin = state.get("next", 0)
    path = deps.files.plan(round)
    written = read_json(path)
    if written is None:
        try:
            directions = _directions(state, deps, round)
        except StopRun as stop:
            deps.reporter.say(str(stop))
            return {"seqs": [], "stop": stop.reason}
        except ModelError as error:
            deps.reporter.say(f"no plan for round {round}: {error}")
            return {"seqs": [], "stop": "provider"}
        if not directions:
            return {"seqs": [], "stop": "exhausted"}
        written = {"round": round, "begin": begin, "directions": [asdict(d) for d in directions]}
        write_json(path, written)
    begin = written["begin"]
    seqs = list(range(begin, begin + len(written["directions"])))
    deps.reporter.round(round, seqs)
    return {"round": round, "next": begin + len(seqs), "seqs": seqs}


def _directions(state: RunState, deps: Deps, round: int) -> tuple[Direction, ...]:
    if round == 0:
        return (Direction("the seed", "what the run starts from"),)
    deps.ledger.check()
    s = situation(deps, round, state["incumbent"])
    if s.k == 0:
        return ()
    return deps.proposer.plan(s, deps.calls(f"plan-{round}"))[: s.k]


def situation(deps: Deps, round: int, incumbent: int) -> Situation:
    """What a proposer sees when `round` begins: the record before it, never its own round's."""
    history = tuple(t for t in deps.queries.history(deps.task.run) if t.round < round)
    best = next(t for t in history if t.seq == incumbent)
    lessons: list[str] = earlier(deps.queries, deps.task.run, deps.task)
    for past in range(1, round):
        lessons += read_json(deps.files.lessons(past)) or []
    lessons += remarks(deps.queries.decisions(deps.task.run))
    count = sum(t.seq > 0 for t in history)
    return Situation(
        task=deps.task, round=round, k=search.width(deps.settings.limits, deps.settings.k, count),
        incumbent=best, incumbent_source=deps.workspace.text(best.source), history=history,
        lessons=tuple(lessons), seed=deps.settings.seed, changes=_changes(deps, history),
    )  # fmt: skip


def _changes(deps: Deps, history: tuple[Tried, ...]) -> tuple[str, ...]:
    """Every number of the latest round's candidates that differs from the parent's, with the places of the source."""
    last = max((t.round for t in history), default=0)
    by_seq = {t.seq: t for t in history}
    out = []
    for t in [t for t in history if t.round == last and t.round > 0][:MOST_COMPARED]:
        parent = by_seq.get(t.parent) if t.parent is not None else None
        if parent is None:
            continue
        sides = [Side(deps.workspace.text(x.source), x.verdict) for x in (parent, t)]
        told = [x[:LONGEST_CHANGE] for x in difference.lines(sides[0], sides[1])[:MOST_CHANGES]]
        out += [f"candidate {t.seq} against {parent.seq}: {x}" for x in told]
    return tuple(out)


def direction_of(deps: Deps, round: int, seq: int) -> Direction:
    """The direction that the plan gave to a candidate."""
    written = read_json(deps.files.plan(round))
    return Direction(**written["directions"][seq - written["begin"]])
