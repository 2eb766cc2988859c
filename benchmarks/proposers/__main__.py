"""Scores any proposer on a fixed set of small targets: `python benchmarks/proposers --proposer tuner -o scores/tuner`.

Each target is one `kernelgen optimize` with the same limits; what follows `--` goes to it as it is (`-- --model NAME
--max-usd 5`). `--replay DIR` plays the candidates of an earlier score again instead, to compare judges or devices. DIR
gets the record (runs.db), scores.json and a table. It starts kernelgen and reads the record; it measures nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from score import Score, score, table, total
from tasks import SETS, Task

from agent.store import Queries, Store
from agent.workspace import Place

NOT_STARTED = (2, 4)  # exit codes: usage, device or toolchain missing


@dataclass(frozen=True)
class Bench:
    """`replayed`: task -> run of the record to play again."""

    folder: Path
    device: str
    proposer: str
    rounds: int
    width: int
    more: tuple[str, ...]
    replayed: dict[str, str]

    @property
    def db(self) -> Path:
        return self.folder / "runs.db"

    @property
    def queries(self) -> Queries:
        place = Place(self.db, self.folder / "kernels_out")
        return Queries(Store(place.db), place.workspace)


def command(b: Bench, task: Task) -> list[str]:
    who = ["--proposer", b.proposer]
    if b.replayed:
        who = ["--proposer", "replay", "--replay", b.replayed[task.name]]
    return [
        sys.executable, "-m", "agent.cli", "optimize", *task.options(b.device), *who, "--rounds", str(b.rounds),
        "--candidates", str(b.width), "--db", str(b.db), "--out", str(b.folder / "kernels_out"), "--json", *b.more,
    ]  # fmt: skip


def run(b: Bench, task: Task) -> Score | None:
    """One task to its end. A run that was begun and stopped counts as far as it came."""
    before = {r["id"] for r in b.queries.runs()} if b.db.exists() else set()
    done = subprocess.run(command(b, task), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode in NOT_STARTED or not b.db.exists():
        print(f"{task.name}: kernelgen ended with {done.returncode}", file=sys.stderr)
        return None
    new = [r for r in b.queries.runs() if r["id"] not in before]
    return scored(b.queries, task.name, new[0]["id"]) if new else None


def scored(queries: Queries, task: str, run: str) -> Score | None:
    when = {r["seq"]: r["created"] or "" for r in queries.candidates(run)}
    return score(task, run, queries.history(run), queries.calls(run), when)


def earlier(folder: Path, out: Path) -> dict[str, str]:
    """The record of an earlier score, copied so that its runs can be played again; task -> run."""
    found = json.loads((folder / "scores.json").read_text())
    for name in ("runs.db", ".kernelgen"):
        source = folder / name
        if source.is_dir():
            shutil.copytree(source, out / name)
        else:
            shutil.copy(source, out / name)
    return {s["task"]: s["run"] for s in found["scores"]}


def arguments(argv: list[str] | None) -> tuple[argparse.Namespace, tuple[str, ...]]:
    given = sys.argv[1:] if argv is None else argv
    mine, _, more = (
        (given, "", [])
        if "--" not in given
        else (given[: given.index("--")], "--", given[given.index("--") + 1 :])
    )
    parser = argparse.ArgumentParser(
        prog="benchmarks/proposers", description=(__doc__ or "").splitlines()[0]
    )
    option = parser.add_argument
    option("--proposer", default="tuner", help="openai, anthropic, external or tuner")
    option("--replay", type=Path, help="folder of an earlier score")
    option("--set", dest="tasks", default="small-1", choices=sorted(SETS))
    option("--only", action="append", default=[], help="one task of the set; may be repeated")
    option("--device", default="cpu", help="cpu (tiny sizes, modelled) or cuda (tp8, measured)")
    option("--rounds", type=int, default=4)
    option("--candidates", type=int, default=2, help="of a round")
    option("-o", "--output", type=Path, required=True)
    return parser.parse_args(mine), tuple(more)


def main(argv: list[str] | None = None) -> int:
    asked, more = arguments(argv)
    if asked.output.exists() and any(asked.output.iterdir()):
        print(f"{asked.output} is not empty", file=sys.stderr)
        return 2
    asked.output.mkdir(parents=True, exist_ok=True)
    replayed = earlier(asked.replay, asked.output) if asked.replay else {}
    b = Bench(
        asked.output, asked.device, asked.proposer, asked.rounds, asked.candidates, more, replayed
    )
    tasks = [t for t in SETS[asked.tasks] if not asked.only or t.name in asked.only]
    tasks = [t for t in tasks if not replayed or t.name in replayed]
    found = [s for t in tasks if (s := run(b, t)) is not None]
    who = "replay" if replayed else asked.proposer
    data = {
        "set": asked.tasks, "proposer": who, "options": list(more), "device": asked.device, "rounds": asked.rounds,
        "candidates": asked.candidates, "scores": [s.to_json() for s in found], "total": total(found),
    }  # fmt: skip
    (asked.output / "scores.json").write_text(json.dumps(data, indent=1))
    (asked.output / "table.txt").write_text(table(found) + "\n")
    print(table(found))
    return 0 if len(found) == len(tasks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
