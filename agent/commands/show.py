"""`show`: a run with its candidates and decisions, or one candidate with source, diff to its parent
and verdict.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import click

from agent import difference, waterfall
from agent import trace as trace_file
from agent.commands import common
from agent.difference import Side
from agent.locks import state_of
from agent.profiles import profiled
from agent.store import Queries
from agent.views import clean, columns, verdict_lines
from sandbox.verdict import Verdict

RUN_COLUMNS = {
    "seq": "candidate", "round": "round", "parent_seq": "parent", "result": "result", "us": "us a step",
    "fraction": "of floor", "speedup_incumbent": "vs best then", "predicted_gain": "predicted",
    "direction": "direction",
}  # fmt: skip


@click.command()
@click.argument("name", metavar="RUN|CANDIDATE")
@click.option("--source", "only", flag_value="source", help="The source alone.")
@click.option("--diff", "only", flag_value="diff", help="The diff to the parent alone.")
@click.option("--verdict", "only", flag_value="verdict", help="The last verdict alone, as JSON.")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), default=None, metavar="FILE",
              help="Write the timeline of a step to FILE, for ui.perfetto.dev or chrome://tracing.")  # fmt: skip
@common.db_option
@common.json_option
def show(name: str, only: str | None, trace: Path | None, db: Path, as_json: bool) -> int:
    """Show a run (its id, a unique part of it, or `last`) or a candidate (RUN-NUMBER).

    Of a candidate: verdict, waterfall of a step, what differs from its parent, and the diff.

    \b
    Examples:
      kernelgen show last
      kernelgen show last-3 --diff
      kernelgen show last-3 --trace step.json
      kernelgen show 01JD3V-0 --source > seed.py
    """
    queries = common.recorded(db)[1]
    head, dash, tail = name.rpartition("-")
    if dash and tail.isdigit():
        if trace is not None:
            return _trace(queries, queries.candidate(name), trace)
        return _candidate(queries, queries.candidate(name), only, as_json)
    if only or trace:
        only = only or "trace"
        raise common.Usage(f"--{only} needs a candidate: RUN-NUMBER")
    return _run(queries, queries.run(name), as_json)


def _run(queries: Queries, run: dict[str, Any], as_json: bool) -> int:
    run = {**run, "state": state_of(queries.workspace, run)}
    rows = queries.candidates(run["id"])
    for row in rows:
        row["result"] = row["outcome"] or row["status"]
        row["result"] += " *" if row["promoted"] else ""
        if row["duplicate_of"] is not None:
            row["result"] = f"same work as {row['duplicate_of']}"
        measured = row["fraction_of_floor_measured"]
        row["fraction"] = measured if measured is not None else row["fraction_of_floor_spec"]
    decisions = queries.decisions(run["id"])
    calls = queries.calls(run["id"])
    data: dict[str, Any] = {
        "run": {**run, "settings": json.loads(run["settings"]), "workload": json.loads(run["workload"]),
                "versions": json.loads(run["versions"])},
        "candidates": rows, "decisions": decisions, "lessons": list(queries.lessons(run["id"])),
        "calls": calls,
    }  # fmt: skip
    work = ", ".join(f"{k}={v}" for k, v in data["run"]["workload"].items())
    lines = [
        f"run {run['id']}: {run['kind']} {run['target']} ({work})",
        f"{run['state']}{', ' + run['stop'] if run['stop'] else ''}; device {run['device']}, proposer "
        f"{' '.join(filter(None, (run['proposer'], run['model'])))}, {run['elapsed'] / 60:.1f} min, "
        f"{len(calls)} model calls",
        *([clean(run["message"])] if run["message"] else []),
        "", columns(rows, RUN_COLUMNS), "",
        *(f"round {d['round']}: {d['kind']} candidate {d['seq']}: {clean(d['reason'])}" for d in decisions),
        *(f"lesson: {clean(x)}" for x in data["lessons"]),
    ]  # fmt: skip
    common.emit(as_json, data, "\n".join(lines))
    return 0


def _candidate(queries: Queries, row: dict[str, Any], only: str | None, as_json: bool) -> int:
    source = queries.workspace.text(row["source"])
    diff = _diff(queries, row, source)
    verdict = queries.workspace.verdict(row["blob"]) if row["blob"] else None
    name = f"{row['run']}-{row['seq']}"
    seen = profiled(queries, row)
    changed = _difference(queries, row, source, seen)
    data = {
        "candidate": name, **{k: row[k] for k in ("round", "status", "outcome", "direction", "note",
        "predicted_gain", "artifact", "proposer", "duplicate_of", "created")},
        "parent": None if row["parent_seq"] is None else f"{row['run']}-{row['parent_seq']}",
        "promoted": bool(row["promoted"]), "tunables": json.loads(row["tunables"] or "{}"),
        "source": source, "diff": diff, "verdict": verdict.to_json() if verdict else None,
        "verdicts": queries.verdicts(row["id"]), "waterfall": waterfall.of(seen.profile) if seen else None,
        "difference": changed,
    }  # fmt: skip
    if only and not as_json:
        shown = json.dumps(data["verdict"], indent=1) if only == "verdict" else data[only]
        click.echo(shown, nl=not str(shown).endswith("\n"))
        return 0
    lines = [
        f"candidate {name}, round {row['round']}, by {row['proposer']}: {clean(row['direction'] or '')}",
        clean(row["note"] or ""), f"tunables: {row['tunables']}",
    ]  # fmt: skip
    if row["predicted_gain"] is not None:
        lines.append(
            f"predicted: {row['predicted_gain']:.3f} x, measured: {row['speedup_incumbent'] or 'nothing'}"
        )
    if row["duplicate_of"] is not None:
        lines.append(f"the same machine work as candidate {row['duplicate_of']}: not judged again")
    lines += verdict_lines("verdict", verdict) if verdict else ["no verdict"]
    if seen is not None:
        lines += [clean(x) for x in waterfall.lines(seen.profile)]
    if changed:
        lines += ["against the parent:", *(f"  {clean(x)}" for x in changed)]
    lines += ["", clean(diff or source)]
    common.emit(as_json, data, "\n".join(lines))
    return 0


def _trace(queries: Queries, row: dict[str, Any], file: Path) -> int:
    seen = profiled(queries, row)
    name = f"{row['run']}-{row['seq']}"
    made = trace_file.chrome(seen.profile, name) if seen else None
    if made is None:
        raise common.Usage(
            f"candidate {name} has no timeline: it did not pass, or its device has no clock"
        )
    file.write_text(json.dumps(made))
    click.echo(f"{file}: {len(made['traceEvents'])} events ({made['otherData']['times']})")
    return 0


def _difference(
    queries: Queries, row: dict[str, Any], source: str, seen: Verdict | None
) -> list[str]:
    if row["parent_seq"] is None:
        return []
    parent = queries.candidate(f"{row['run']}-{row['parent_seq']}")
    before = Side(queries.workspace.text(parent["source"]), profiled(queries, parent))
    return difference.lines(before, Side(source, seen))


def _diff(queries: Queries, row: dict[str, Any], source: str) -> str:
    """Unified, against the parent; empty without one or when nothing changed."""
    if row["parent_seq"] is None:
        return ""
    parent = queries.candidate(f"{row['run']}-{row['parent_seq']}")
    before = queries.workspace.text(parent["source"])
    return "".join(
        difflib.unified_diff(
            before.splitlines(True), source.splitlines(True),
            f"a/{row['run']}-{row['parent_seq']}.py", f"b/{row['run']}-{row['seq']}.py",
        )
    )  # fmt: skip
