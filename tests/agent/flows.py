"""What people and runs do that may be cut off anywhere, each small enough to be killed at every change it makes.

A flow prepares a folder, works in it, and says what is there in the end; done again after a kill it must come to the
end that it would have come to undisturbed. Fakes throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent import elsewhere, fakes
from agent import record as writer
from agent.book import Book
from agent.config import RunSettings
from agent.models import inbox
from agent.models.base import Proposer
from agent.models.external import External, offer
from agent.models.inbox import Offer
from agent.models.scripted import ScriptedProposer
from agent.models.tuner import Tuner
from agent.review.decide import decide
from agent.runner import (
    Ended,
    Party,
    Run,
    Services,
    Session,
    advance,
    create,
    load_settings,
    make_ledger,
)
from agent.search import Limits
from agent.store import Queries, Store
from agent.store.store import JudgedRow
from agent.workspace import Place, write_json
from targets import base
from tests.agent import child

WIDE = fakes.SEED.replace(
    '"stages": (2, 3)}',
    '"stages": (2, 3), "unroll": (1, 2, 4, 8), "warps": (4, 8, 2, 1), "rows": (1, 2, 3, 4, 5, 6)}',
)
ROUNDS = Limits(rounds=3, stop_at=None, patience=None)


@dataclass(frozen=True)
class Flow:
    """`work` is killed, and done again; `end` is what is compared."""

    work: Callable[[Path], object]
    end: Callable[[Path], Any]
    prepare: Callable[[Path], object] = lambda folder: None


def place_of(folder: Path) -> Place:
    return Place(folder / "runs.db", folder / "kernels_out")


def queries_of(folder: Path) -> Queries:
    place = place_of(folder)
    return Queries(Store(place.db), place.workspace)


def run_of(folder: Path) -> str:
    return str(queries_of(folder).run("last")["id"])


def opened(folder: Path, settings: RunSettings, seed: str = fakes.SEED) -> str:
    """The run of the folder, made by the first who asks."""
    base._TARGETS["fake"] = lambda: fakes.FakeTarget(seed=seed)
    place = place_of(folder)
    if place.db.exists() and queries_of(folder).runs():
        return run_of(folder)
    return create(place, settings, {})


def step(folder: Path, run: str, proposer: Callable[[Session], Proposer]) -> Ended:
    place = place_of(folder)
    settings = load_settings(place, run)
    session = Session(place, child.Silent())
    judge = fakes.FakeJudge()
    services = Services(fakes.FakeCompiler(folder / "jail"), judge, fakes.FakeJudge)
    party = Party(proposer(session))
    return advance(Run(run, settings, session, services, party, make_ledger(place, run, settings)))


def in_general(**changes: Any) -> RunSettings:
    return replace(
        child.settings(), **{"model": "", "tunings": 0, "k": 1, "limits": ROUNDS, **changes}
    )


def of_tuner(folder: Path) -> None:
    """A space so large that Optuna proposes."""
    step(folder, opened(folder, in_general(proposer="tuner", k=2), WIDE), lambda s: Tuner())


def scripted(folder: Path, *us: float) -> None:
    run = opened(folder, in_general(proposer="scripted"))
    step(folder, run, lambda s: ScriptedProposer([fakes.kernel(x) for x in us]))


def author(folder: Path, hand_in: Callable[[Path, str], object]) -> None:
    """Somebody who hands a kernel in whenever the run waits for one, and knows only how many it has seen."""
    run = opened(folder, in_general(proposer="external", wait=False))
    box = folder / "box"
    place = place_of(folder)

    def sitting(s: Session) -> Proposer:
        return External(
            box, place.workspace, False, s.sleep, s.reporter.say, lambda: None, Book().stable
        )

    while step(folder, run, sitting).how == "waiting":
        seen = len(queries_of(folder).candidates(run))
        hand_in(box, fakes.kernel(100 - 10 * seen))


def by_file(folder: Path) -> None:
    author(
        folder,
        lambda box, text: offer(box, text, {"note": f"note of {len(text)}", "predicted_gain": 1.1}),
    )


def by_queue(folder: Path) -> None:
    """As a coding agent submits: again after a kill, not knowing whether it had."""
    author(
        folder, lambda box, text: inbox.submit(box, Offer(text, "a note", 1.1), lambda seq: False)
    )


def of_run(folder: Path) -> Any:
    """What the record says, but for names, times and what was lost on the way; and what lies among the winners."""
    from tests.agent.test_kill import record, winners

    notes = queries_of(folder).rows("select kind, reason, who from decisions order by id")
    return record(folder), notes, winners(folder)


def said(kind: str, over: bool = False) -> Flow:
    """A person's decision on a run that waits for it or, `over`, has been approved; given again after a kill."""

    def tell(folder: Path) -> None:
        queries = queries_of(folder)
        row = queries.candidate(f"{run_of(folder)}-1")
        decide(place_of(folder), row, kind, ("mind the barrier", "Ada"))

    def ended(folder: Path) -> Any:
        queries = queries_of(folder)
        row = queries.run("last")
        if kind == "send_back":
            scripted(folder, 80, 60)
        people = queries.rows("select kind, reason, who from decisions where who is not null")
        return row["state"], people, of_run(folder)

    def prepare(folder: Path) -> None:
        scripted(folder, 80)
        if over:
            row = queries_of(folder).candidate(f"{run_of(folder)}-1")
            decide(place_of(folder), row, "approve", ("", "Ada"))

    return Flow(tell, ended, prepare)


def bring_in(folder: Path) -> None:
    """Verdicts of another host: one that the run waits for, and one more of what it has judged."""
    queries = queries_of(folder)
    row = queries.candidate(f"{run_of(folder)}-1")
    verdict = replace(queries.workspace.verdict(row["blob"]), date="2026-02-02T00:00:00Z")
    files = queries.workspace.run(row["run"])
    elsewhere.accept(files, verdict)
    blob = queries.workspace.put_verdict(verdict)
    judged = JudgedRow(0, verdict, blob, {}, row["artifact"], "imported")
    writer.evidence(place_of(folder), row["run"], 1, judged)


def with_request(folder: Path) -> None:
    scripted(folder, 80)
    queries = queries_of(folder)
    row = queries.candidate(f"{run_of(folder)}-1")
    tier = queries.workspace.verdict(row["blob"]).tier
    ask = {"target": "fake", "device": "cpu"}
    requests = elsewhere.requests(queries.workspace.run(row["run"]))
    write_json(requests / f"{row['artifact']}-{tier}-nothing.json", ask)


def brought(folder: Path) -> Any:
    files = queries_of(folder).workspace.run(run_of(folder))
    imported = sorted(p.read_text() for p in (files.folder / "imported").glob("*.json"))
    return len(imported), [v.split('"date"')[1][:24] for v in imported], of_run(folder)


FLOWS = {
    "run": Flow(child.main, of_run),
    "tuner": Flow(of_tuner, of_run),
    "folder": Flow(by_file, of_run),
    "queue": Flow(by_queue, of_run),
    "approve": said("approve"),
    "reject": said("reject"),
    "send back": said("send_back"),
    "send back later": said("send_back", over=True),
    "record": Flow(bring_in, brought, with_request),
}
