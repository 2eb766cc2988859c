"""A person's decision on a candidate: approve, reject or send back; recorded with who, when and which hashes.

Recording works while the run is at work, at rest, or years later. A decision on what the run waits
for also answers the graph's review; what follows from that is left to `kernelgen resume`. Nothing
here judges or exports.
"""

from __future__ import annotations

import getpass
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent import record
from agent.graph import Engine, engine
from agent.ids import now
from agent.locks import RunBusy, hold
from agent.runner import load_settings
from agent.store import Queries, Store
from agent.workspace import Place

KINDS = ("approve", "reject", "send_back")
LONGEST_NOTE = 8000
RESTING = ("review", "done", "spent")
"""States of the record in which nothing works on a run and nothing is left to do."""
EFFECTS = {
    "answered": "the run's review is answered", "reopened": "the run is open again",
    "busy": "the run is at work: its next round reads the note", "recorded": "recorded",
}  # fmt: skip


class Refused(Exception):
    """A decision that cannot be taken; the message says why."""


@dataclass(frozen=True)
class Decision:
    """One word of a person on a candidate. `hashes`: source, artifact, ptx, verdict (sha256)."""

    run: str
    seq: int
    kind: str
    note: str
    who: str
    date: str
    hashes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """A recorded decision and what it means for the run: `answered` (the graph had waited for it),
    `reopened`, `busy` (the run is at work; it will read the note) or `recorded`.
    """

    decision: Decision
    effect: str


def whoami() -> str:
    """The person: git's name and address, else the user's name."""
    found = []
    for key in ("user.name", "user.email"):
        try:
            done = subprocess.run(
                ["git", "config", key], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            break
        found.append(done.stdout.strip())
    name, email = (found + ["", ""])[:2]
    if name or email:
        return f"{name} <{email}>".strip() if email else name
    try:
        return os.environ.get("USER") or getpass.getuser()
    except (OSError, KeyError):
        return f"uid {os.getuid()}"


def hashes_of(queries: Queries, row: Mapping[str, Any]) -> dict[str, str]:
    """What a decision is about, of a row of `Queries.candidates`."""
    found = {"source": row["source"], "artifact": row["artifact"], "verdict": row["blob"]}
    for ptx in queries.rows(
        "select ptx_sha256 from artifacts where sha256 = :a", {"a": row["artifact"]}
    ):
        found["ptx"] = ptx["ptx_sha256"]
    return {k: v for k, v in found.items() if v}


def decisions(queries: Queries, run: str) -> tuple[Decision, ...]:
    """Every decision of a person on the run, in order."""
    found = queries.rows(
        "select d.*, c.seq from decisions d join candidates c on c.id = d.candidate"
        " where d.run = :run and d.who is not null order by d.id",
        {"run": run},
    )
    return tuple(
        Decision(
            run, d["seq"], d["kind"], d["reason"], d["who"], d["date"], json.loads(d["hashes"])
        )
        for d in found
    )


def standing(queries: Queries, row: Mapping[str, Any]) -> Decision | None:
    """The last word on a candidate, if it is about what the candidate is now.

    A verdict that came later (from another host) leaves a decision standing; another artifact or
    source does not.
    """
    own = [d for d in decisions(queries, row["run"]) if d.seq == row["seq"]]
    if not own:
        return None
    is_now = hashes_of(queries, row)
    same = all(own[-1].hashes.get(k) == is_now.get(k) for k in ("source", "artifact"))
    return own[-1] if same else None


def approved(queries: Queries, row: Mapping[str, Any]) -> Decision | None:
    """The standing approval of a row of `Queries.candidates`, or None."""
    found = standing(queries, row)
    return found if found is not None and found.kind == "approve" else None


def decide(place: Place, row: Mapping[str, Any], kind: str, said: tuple[str, str]) -> Done:
    """Record a decision on a candidate and let the run know. `said`: the note, and who says so.

    Raises Refused, Corrupt, OSError.
    """
    queries = Queries(Store(place.db), place.workspace)
    note, who = said[0].strip(), said[1]
    _check(row, kind, note)
    decision = Decision(row["run"], row["seq"], kind, note, who, now(), hashes_of(queries, row))
    run = queries.run(row["run"])
    record.reviewed(
        place.db, row["run"], row["seq"],
        {"round": run["rounds"], "kind": kind, "reason": note, "who": who, "date": decision.date,
         "hashes": decision.hashes},
    )  # fmt: skip
    return Done(decision, _tell(place, run, decision))


def _check(row: Mapping[str, Any], kind: str, note: str) -> None:
    name = f"{row['run']}-{row['seq']}"
    if kind not in KINDS:
        raise Refused(f"{kind!r} is no decision; there are {', '.join(KINDS)}")
    if kind == "approve" and row["status"] != "passed":
        raise Refused(f"candidate {name} cannot be approved: its status is {row['status']}")
    if kind != "approve" and not note:
        raise Refused(f"to {kind.replace('_', ' ')} needs a note: the proposer learns from it")
    if len(note) > LONGEST_NOTE:
        raise Refused(f"the note has {len(note)} characters, more than {LONGEST_NOTE}")


def _tell(place: Place, run: Mapping[str, Any], d: Decision) -> str:
    """Answer the graph's interrupt, or reopen a run that had ended for what was sent back."""
    if run["kind"] != "optimize":
        return "recorded"
    files = place.workspace.run(d.run)
    try:
        with hold(files), engine(place.db, d.run, load_settings(place, d.run)) as e:
            effect = _answer(e, run, d)
    except RunBusy:
        return "busy"
    except LookupError:  # the run's folder is gone: the record alone remains
        return "recorded"
    if effect != "recorded":
        back = d.kind == "send_back"
        message = f"candidate {d.seq} was sent back by {d.who}" if back else None
        record.changed(
            place.db, d.run, state="waiting" if back else "done", message=message, updated=now()
        )
    return effect


def _answer(e: Engine, run: Mapping[str, Any], d: Decision) -> str:
    """The record is behind the graph where a kill came between the two, as the same decision then
    came: it is told once more what became of the run.
    """
    e.settle()
    asked = run["state"] == "review"
    if not e.at_rest():
        if d.kind == "send_back" and run["state"] in RESTING:
            return "answered" if asked else "reopened"
        return "recorded"  # killed or waiting: the next round reads the note anyway
    at_review = e.at_review()
    if d.kind == "send_back":
        (e.answer if at_review else e.send_back)(_reply(d))
        return "answered" if at_review else "reopened"
    if d.seq != run["incumbent"] or not (at_review or asked):
        return "recorded"
    if at_review:
        e.answer(_reply(d))
    return "answered"


def _reply(d: Decision) -> dict[str, Any]:
    return {"decision": d.kind, "candidate": d.seq}
