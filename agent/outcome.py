"""A candidate's versions as they lie in the run's folder: endings without a judge, verdicts by
step, the best one.

Plain file reading and building; decisions are `agent.search`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent import search
from agent.state import Deps
from agent.workspace import read_json, write_json
from sandbox.verdict import Failure, Status, Tier, Trust, Verdict


@dataclass(frozen=True)
class Ending:
    """Why a version never reached the judge."""

    status: Status
    rule: str
    message: str
    isolation: Mapping[str, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None


@dataclass(frozen=True)
class Judged:
    """One verdict of one version."""

    step: int
    tier: str
    verdict: Verdict
    blob: str
    tunables: Mapping[str, Any]
    artifact: str | None
    source: str
    duplicate_of: int | None = None


def end_step(deps: Deps, seq: int, step: int, ending: Ending) -> Verdict:
    """Write down a version that failed before the judge, as a verdict like any other."""
    verdict = ended(deps, ending)
    write_json(
        deps.files.compiled(seq, step),
        {"artifact": None, "declared": {}, "verdict": deps.workspace.put_verdict(verdict)},
    )
    deps.reporter.verdict(seq, step, verdict)
    return verdict


def ended(deps: Deps, ending: Ending) -> Verdict:
    return Verdict(
        status=ending.status, target=deps.task.target, artifact="",
        device={"kind": deps.task.device}, tier=deps.settings.tier, trust=trust(ending.isolation),
        isolation=dict(ending.isolation), date=deps.now(),
        failure=ending.failure or Failure(ending.rule, ending.message),
        seconds={k: float(v) for k, v in ending.seconds.items()},
    )  # fmt: skip


def trust(isolation: Mapping[str, Any]) -> Trust:
    """What the compile step alone can vouch for: never `audited`, and nothing without a real
    jail.
    """
    return Trust.UNJAILED if isolation.get("tier") in (None, "weak", "none") else Trust.JUDGED


def verdict_of_step(deps: Deps, seq: int, step: int) -> Verdict:
    """The last verdict of a version. Raises LookupError."""
    return [j for j in judged(deps, seq) if j.step == step][-1].verdict


def judged(deps: Deps, seq: int) -> list[Judged]:
    """Every verdict of every version so far, in order of step and tier."""
    found = []
    step = 0
    while (proposal := read_json(deps.files.proposal(seq, step))) is not None:
        compiled = read_json(deps.files.compiled(seq, step))
        if compiled is None:
            break
        rows = [("", compiled)] if compiled["verdict"] else []
        for higher in Tier:
            row = read_json(deps.files.judged(seq, step, higher))
            rows += [(str(higher), row)] if row else []
        for tier, row in rows:
            found.append(
                Judged(
                    step=step, tier=tier, verdict=deps.workspace.verdict(row["verdict"]),
                    blob=row["verdict"], tunables=compiled.get("tunables", proposal["tunables"]),
                    artifact=compiled["artifact"], source=proposal["source"],
                    duplicate_of=row.get("duplicate_of"),
                )
            )  # fmt: skip
        step += 1
    return found


def best(rows: list[Judged]) -> Judged:
    """The version that stands for the candidate: the best passed one, else the last one tried.

    Of one version the highest tier counts. Raises LookupError if nothing was tried.
    """
    last: dict[int, Judged] = {}
    for row in rows:
        last[row.step] = row
    if not last:
        raise LookupError("no version was judged")
    passed = [r for r in last.values() if r.verdict.status is Status.PASSED]
    if not passed:
        return last[max(last)]
    return max(passed, key=lambda r: (search.rank(r.verdict), -r.step))
