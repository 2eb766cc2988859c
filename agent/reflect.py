"""Node `reflect`: lessons of the round just recorded, and whether another one should begin.

What the record shows comes first (`agent.lessons`), then the proposer's own words, kept as such. The decision is
`agent.search.stop_reason`'s.
"""

from __future__ import annotations

from typing import Any

from agent import lessons, search
from agent.models.base import ModelError, StopRun
from agent.plan import situation
from agent.search import Progress
from agent.state import Deps, RunState
from agent.types import Situation
from agent.workspace import read_json, write_json
from sandbox.verdict import Status, Verdict


def reflect(state: RunState, deps: Deps) -> dict[str, Any]:
    if state.get("stop"):
        return {}
    best = deps.workspace.verdict(read_json(deps.files.result(state["incumbent"]))["verdict"])
    if best.status is not Status.PASSED:
        return {"stop": "seed_failed"}
    round = state["round"]
    out: dict[str, Any] = {}
    path = deps.files.lessons(round)
    if round and read_json(path) is None:
        s = situation(deps, round + 1, state["incumbent"])
        try:
            said = list(deps.proposer.reflect(s, deps.calls(f"reflect-{round}")))
            write_json(path, [*_shown(deps, s, round), *said])
        except StopRun as stop:
            out["stop"] = stop.reason
        except ModelError as error:
            deps.reporter.say(f"no lessons from round {round}: {error}")
            write_json(path, _shown(deps, s, round))
    return out or {"stop": _reason(state, deps, best)}


def _shown(deps: Deps, s: Situation, round: int) -> list[str]:
    """Predicted against measured, candidate by candidate."""
    tried = [t for t in s.history if t.round == round]
    return [x.text() for x in lessons.of_round(deps.task, tried, s.history)]


def _reason(state: RunState, deps: Deps, best: Verdict) -> str:
    progress = Progress(
        round=state["round"], candidates=state["next"] - 1, stale=state.get("stale", 0),
        fraction=search.fraction(best),
        infra_in_a_row=state.get("infra", 0),
    )  # fmt: skip
    return search.stop_reason(deps.settings.limits, progress, deps.ledger.spent) or ""
