"""`review`: the queue of promoted candidates, each with its diff and its proof; approve, reject, send back.

In a terminal it asks, with colour and a pager; in a pipe it prints plain text or one JSON document.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from agent.commands import common
from agent.commands.review_screen import page
from agent.review import text
from agent.review.decide import EFFECTS, Done, Refused, decide, whoami
from agent.review.dossier import Dossier, Version, dossier, promoted, queue
from agent.review.proof import WORD, headline
from agent.store import Queries, Store
from agent.views import clean
from agent.workspace import Place

KEYS = {"a": "approve", "r": "reject", "s": "send_back"}
ASK = "[a]pprove  [r]eject  [s]end back  [d]iff again  [y] side by side  [n]ext  [q]uit"


@dataclass(frozen=True)
class Look:
    """How candidates are shown. `against`: parent, seed, or both."""

    against: tuple[str, ...]
    side: bool
    pager: bool


@click.command()
@click.argument("name", metavar="RUN|CANDIDATE")
@click.option("--all", "every", is_flag=True, help="Also those that are decided already.")
@click.option("--against", type=click.Choice(["parent", "seed", "both"]), default="both",
              help="What the diffs compare with.")  # fmt: skip
@click.option(
    "-y", "--side-by-side", "side", is_flag=True, help="Two columns instead of unified diffs."
)
@click.option("--approve", metavar="ID", help="Approve candidate ID (RUN-NUMBER or NUMBER).")
@click.option("--reject", metavar="ID", help="Reject it; needs --note.")
@click.option(
    "--send-back", metavar="ID", help="Send it back; the note reaches the proposer's next round."
)
@click.option("--note", default="", help="Why.")
@click.option("--pager/--no-pager", default=True, help="Page long output in a terminal.")
@common.db_option
@common.out_option
@common.json_option
def review(name: str, **asked: Any) -> int:
    """Look at what a run promoted, with the proof beside the diff, and decide.

    \b
    Examples:
      kernelgen review last
      kernelgen review last --side-by-side
      kernelgen review last | delta
      kernelgen review last --approve 7 --note "read the barrier twice"
      kernelgen review last --send-back 7 --note "no spin on a global word, please"

    Exit codes: 0 done, 1 nothing waits for a decision or it was refused, 2 usage.
    """
    place, queries = common.recorded(asked["db"], asked["out"])
    run, only = _named(queries, name)
    given = [(k, asked[k]) for k in ("approve", "reject", "send_back") if asked[k] is not None]
    if given:
        return _decided(place, run, given, asked)
    if asked["note"]:
        raise common.Usage("--note needs --approve, --reject or --send-back")
    every = promoted(queries, run["id"]) if asked["every"] else queue(queries, run["id"])
    seqs = every if only is None else [only]
    if not seqs:
        common.complain(
            f"no candidate of run {run['id']} waits for a decision: {_why_none(queries, run)}"
        )
        if asked["as_json"]:
            common.emit(True, {"run": run["id"], "queue": []}, "")
        return 1
    against = ("parent", "seed") if asked["against"] == "both" else (asked["against"],)
    known: dict[int, Version] = {}
    shown = [dossier(queries, run, seq, known) for seq in seqs]
    if asked["as_json"]:
        common.emit(True, {"run": run["id"], "queue": [text.as_json(d) for d in shown]}, "")
        return 0
    look = Look(against, asked["side"], asked["pager"])
    if sys.stdin.isatty() and sys.stdout.isatty():
        return _ask_all(place, shown, look)
    page(shown, look.against, look.side, pager=False)
    return 0


def _why_none(queries: Queries, run: Mapping[str, Any]) -> str:
    if promoted(queries, run["id"]):
        return "all that were promoted are decided, --all shows them"
    at_work = "; it is still at work" if run["state"] == "running" else ""
    return (
        f"nothing but the seed was promoted{at_work}. A candidate can be named: {run['id']}-NUMBER"
    )


def _named(queries: Queries, name: str) -> tuple[dict[str, Any], int | None]:
    """The run, and the one candidate if a candidate is named. Raises NotFound."""
    head, dash, tail = name.rpartition("-")
    if dash and tail.isdigit():
        row = queries.candidate(name)
        return queries.run(row["run"]), int(row["seq"])
    return queries.run(name), None


def _decided(
    place: Place, run: Mapping[str, Any], given: list[tuple[str, str]], asked: Mapping[str, Any]
) -> int:
    """The non-interactive way. Raises Usage, NotFound."""
    if len(given) > 1:
        raise common.Usage("one decision at a time")
    kind, ident = given[0]
    full = ident if "-" in ident else f"{run['id']}-{ident}"
    queries = Queries(Store(place.db), place.workspace)
    row = queries.candidate(full)
    if row["run"] != run["id"]:
        raise common.Usage(f"candidate {full} is not of run {run['id']}")
    try:
        done = decide(place, row, kind, (asked["note"], whoami()))
    except Refused as error:
        raise common.Usage(str(error)) from error
    d = done.decision
    data = {
        "run": d.run, "candidate": f"{d.run}-{d.seq}", "decision": d.kind, "note": d.note,
        "who": d.who, "date": d.date, "hashes": dict(d.hashes), "effect": done.effect,
    }  # fmt: skip
    common.emit(asked["as_json"], data, words(done))
    return 0


def words(done: Done) -> str:
    d = done.decision
    line = f"candidate {d.run}-{d.seq} {WORD[d.kind]} by {clean(d.who)}; {EFFECTS[done.effect]}"
    if d.kind == "send_back" and done.effect in ("answered", "reopened", "recorded"):
        line += f"\ngo on with: kernelgen resume {d.run}"
    if d.kind == "approve":
        line += (
            f"\nnext: kernelgen export {d.run}-{d.seq} --to bundle (or --to vllm --checkout DIR)"
        )
    return line


def _ask_all(place: Place, shown: list[Dossier], look: Look) -> int:
    """One candidate after the other, until the queue or the person is at an end."""
    talk = common.talk()
    for number, d in enumerate(shown, 1):
        page([d], look.against, look.side, look.pager)
        while True:
            talk.print(
                f"{number} of {len(shown)}: candidate {d.me.name}: {clean(headline(d))}",
                markup=False, style="bold",
            )  # fmt: skip
            key = click.prompt(ASK, default="n", show_default=False, err=True).strip().lower()[:1]
            if key == "q":
                return 0
            if key in ("d", "y"):
                page([d], look.against, key == "y", look.pager)
            elif key == "n":
                break
            elif key in KEYS and _asked(place, d, KEYS[key]):
                break
    return 0


def _asked(place: Place, d: Dossier, kind: str) -> bool:
    """True when the decision was taken."""
    note = click.prompt("note", default="", show_default=False, err=True)
    try:
        click.echo(words(decide(place, d.me.row, kind, (note, whoami()))), err=True)
    except Refused as error:
        common.complain(str(error))
        return False
    return True
