"""Nodes `propose` and `repair`: get a candidate's source from the proposer and write it down.

Whatever the proposer cannot give ends the candidate as data; only waiting leaves the node by an
exception. Sources are stored, never imported or run here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.lessons import for_direction
from agent.models.base import ModelError, NoProposal, Request, StopRun, WaitError
from agent.outcome import Ending, end_step, verdict_of_step
from agent.plan import direction_of, situation
from agent.state import CandidateState, Deps
from agent.types import Proposal
from agent.workspace import read_json, write_json
from sandbox.verdict import Status


def propose(state: CandidateState, deps: Deps) -> dict[str, Any]:
    """Version 0 of a candidate. Raises Waiting."""
    seq = state["seq"]
    if read_json(deps.files.proposal(seq, 0)) is not None:
        return {"step": 0, "go": "compile"}
    deps.reporter.status(seq, "proposing")
    if state["round"] == 0:
        given = deps.settings.start
        start = Proposal(
            deps.seed_source,
            f"{Path(given).name}, given to start from" if given else "the target's seed",
        )
        return keep(deps, state, 0, start, "propose")
    try:
        proposal = deps.proposer.propose(request(state, deps))
    except (NoProposal, StopRun, ModelError) as error:
        return _none(deps, state, error)
    return keep(deps, state, 0, proposal, "propose")


def repair(state: CandidateState, deps: Deps) -> dict[str, Any]:
    """The next version of a candidate that failed, or the end of trying. Raises Waiting."""
    seq, step = state["seq"], state["step"]
    if read_json(deps.files.proposal(seq, step + 1)) is not None:
        return {"step": step + 1, "go": "compile"}
    written = read_json(deps.files.proposal(seq, step))
    failed = verdict_of_step(deps, seq, step)
    deps.reporter.status(seq, f"repairing {failed.status}")
    try:
        source = deps.workspace.text(written["source"])
        proposal = deps.proposer.repair(request(state, deps), source, failed)
    except (NoProposal, ModelError):
        return {"go": "confirm"}
    except StopRun as stop:
        return {"go": "confirm", "stop": stop.reason}
    if proposal is None:
        return {"go": "confirm"}
    return keep(deps, state, step + 1, proposal, "repair")


def request(state: CandidateState, deps: Deps) -> Request:
    seq, round = state["seq"], state["round"]
    written = read_json(deps.files.plan(round))
    direction = direction_of(deps, round, seq)
    s = situation(deps, round, state["incumbent"])
    s = replace(s, lessons=for_direction(s.lessons, direction))
    parent = next((t for t in s.history if t.seq == direction.parent), s.incumbent)
    return Request(
        situation=s, seq=seq, slot=seq - written["begin"], direction=direction,
        parent_source=deps.workspace.text(parent.source), calls=deps.calls(f"candidate-{seq}"),
    )  # fmt: skip


def keep(
    deps: Deps, state: CandidateState, step: int, proposal: Proposal, kind: str
) -> dict[str, Any]:
    """Write a version down; from here on a resumed run finds it."""
    write_json(
        deps.files.proposal(state["seq"], step),
        {
            "kind": kind, "source": deps.workspace.put(proposal.source), "note": proposal.note,
            "predicted_gain": proposal.predicted_gain, "tunables": dict(proposal.tunables),
            "date": deps.now(),
        },
    )  # fmt: skip
    return {"step": step, "go": "compile"}


def _none(deps: Deps, state: CandidateState, error: Exception) -> dict[str, Any]:
    """The candidate ends without a source: cancelled, infra, or rejected for a void answer."""
    status, rule = Status.REJECTED, "no_proposal"
    out: dict[str, Any] = {"go": "confirm"}
    if isinstance(error, StopRun):
        status, rule = Status.CANCELLED, error.reason
        out["stop"] = error.reason
    elif isinstance(error, WaitError):
        status, rule = Status.INFRA, "provider"
    keep(deps, state, 0, Proposal("", "no proposal"), "propose")
    end_step(deps, state["seq"], 0, Ending(status, rule, str(error)))
    return {**out, "step": 0}
