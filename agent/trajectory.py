"""A whole run as a folder that people read and `kernelgen replay` judges again: every proposal with its prediction, its
verdicts, its waterfall, what was decided and what was learned.

    kernels_out/<target>/<device>/<run>/
      README.md                 the course of the run in a table, and the lessons
      record.json               settings, candidates in their order, decisions, lessons, the ranking
      candidates/N.py           sources as they were handed in
      verdicts/N-TIER-STEP.json every verdict of candidate N
      waterfalls/N.txt          where a step's time went, for those that passed

It reads the record and writes that folder; it judges nothing, and artifacts are not part of it.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent import ranking, search, waterfall
from agent.profiles import profiled
from agent.store import Queries
from agent.views import clean
from agent.winners import device_slug, target_slug
from agent.workspace import Missing, Place, read_json, replace_folder
from sandbox import strict
from sandbox.verdict import Verdict

SCHEMA = 1
NAME = "record.json"
MAX_BYTES = 8 << 20
_KEPT = (
    "seq", "round", "parent_seq", "proposer", "direction", "note", "predicted_gain", "status", "outcome", "message",
    "tier", "trust", "us", "us_per_layer", "launches", "fraction_of_floor_measured", "speedup_incumbent",
    "incumbent_low", "incumbent_high", "speedup_graph", "artifact", "duplicate_of", "created",
)  # fmt: skip


class BadRecord(strict.Malformed):
    """A folder that is no record of a run, or one that was changed."""


def write(place: Place, queries: Queries, run: str, folder: Path | None = None) -> Path:
    """Write run `run`; by default beside the winners. Raises NotFound, Missing, OSError; a folder that is no
    record of a run is left as it is."""
    row = queries.run(run)
    rows = queries.candidates(row["id"])
    files: dict[str, bytes] = {}
    candidates = [_candidate(queries, c, files) for c in rows]
    candidates += _unfinished(queries, row["id"], len(rows), files)
    device = next((c["device"] for c in candidates if c["device"]), {"kind": row["device"]})
    record = {
        "schema": SCHEMA, "run": row["id"], "target": row["target"], "device": device,
        "workload": json.loads(row["workload"]), "settings": _portable(json.loads(row["settings"])),
        "versions": json.loads(row["versions"]), "proposer": row["proposer"], "model": row["model"],
        "started": row["started"], "stop": row["stop"], "candidates": candidates,
        "decisions": [
            {k: d[k] for k in ("round", "kind", "seq", "reason", "date")} for d in queries.decisions(row["id"])
        ],
        "lessons": list(queries.lessons(row["id"])),
        "ranking": list(ranking.order(ranking.results(candidates))),
    }  # fmt: skip
    files[NAME] = _pretty(record)
    files["README.md"] = readme(record).encode()
    final = folder or place.out / target_slug(row["target"]) / device_slug(device) / row["id"]
    _replace(final, files)
    return final


def read(folder: Path) -> dict[str, Any]:
    """The record of a folder, checked as far as `replay` needs it. Raises BadRecord."""
    try:
        with (folder / NAME).open("rb") as file:
            data = strict.parse(file.read(MAX_BYTES), NAME, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise BadRecord(str(folder), f"is no record of a run: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise BadRecord(str(folder / NAME), "has another form than this version writes")
    if not _sound(data):
        raise BadRecord(str(folder / NAME), "has no run, target, or settings with options")
    candidates = data.get("candidates")
    if not isinstance(candidates, list) or not candidates or not all(map(_judgeable, candidates)):
        raise BadRecord(str(folder / NAME), "lists no candidates with their status and time")
    if [c["seq"] for c in candidates] != list(range(len(candidates))):
        raise BadRecord(str(folder / NAME), "lists no candidates 0, 1, 2 and so on")
    return data


def _sound(data: Mapping[str, Any]) -> bool:
    settings = data.get("settings")
    options = settings.get("options") if isinstance(settings, dict) else None
    named = isinstance(data.get("run"), str) and isinstance(data.get("target"), str)
    return (
        named
        and isinstance(options, dict)
        and isinstance(options.get("preset"), str)
        and isinstance(options.get("extra", {}), dict)
    )


def _judgeable(candidate: Any) -> bool:
    """What `replay` reads of one."""
    if not isinstance(candidate, dict) or not isinstance(candidate.get("tunables") or {}, dict):
        return False
    timed = isinstance(candidate.get("us", ""), int | float | None)
    return timed and isinstance(candidate.get("status"), str) and "promoted" in candidate


def source(folder: Path, seq: int) -> str:
    """Raises BadRecord."""
    try:
        return (folder / "candidates" / f"{seq}.py").read_text()
    except (OSError, ValueError) as error:
        raise BadRecord(str(folder), f"has no readable candidate {seq}: {error}") from error


def _portable(settings: dict[str, Any]) -> dict[str, Any]:
    """Without the paths of the machine that it ran on."""
    return {**settings, "folder": "", "start": "", "replay": ""}


def _candidate(queries: Queries, row: Mapping[str, Any], files: dict[str, bytes]) -> dict[str, Any]:
    """The row as data; its source, verdicts and waterfall go into `files`."""
    seq = row["seq"]
    try:
        files[f"candidates/{seq}.py"] = queries.workspace.get(row["source"])
    except Missing as error:
        raise Missing(f"candidate {seq}: {error}") from error
    names: list[str] = []
    device: dict[str, Any] = {}
    for n, judged in enumerate(queries.verdicts(row["id"])):
        verdict = queries.workspace.verdict(judged["blob"])
        if judged["blob"] == row["blob"]:  # what its times are from
            device = dict(verdict.device)
        names.append(f"verdicts/{seq}-{verdict.tier}-{n}.json")
        files[names[-1]] = _pretty(verdict.to_json())
    seen = profiled(queries, row)
    lines = waterfall.lines(seen.profile) if seen is not None else []
    if lines:
        files[f"waterfalls/{seq}.txt"] = ("\n".join(map(clean, lines)) + "\n").encode()
    return {
        **{k: row[k] for k in _KEPT}, "promoted": bool(row["promoted"]), "device": device,
        "tunables": json.loads(row["tunables"] or "{}"), "source": f"candidates/{seq}.py",
        "verdicts": names, "waterfall": f"waterfalls/{seq}.txt" if lines else None,
    }  # fmt: skip


def _unfinished(
    queries: Queries, run: str, first: int, files: dict[str, bytes]
) -> list[dict[str, Any]]:
    """Candidates that the run was still at work on, cut off by a kill or an end of time: what there is of them."""
    found: list[dict[str, Any]] = []
    run_files = queries.workspace.run(run)
    for seq in itertools.count(first):
        proposed = read_json(run_files.proposal(seq, 0))
        if proposed is None or proposed.get("source") is None:
            return found
        files[f"candidates/{seq}.py"] = queries.workspace.get(proposed["source"])
        names: list[str] = []
        last: Verdict | None = None
        for tier in ("screen", "full", "promote"):
            judged = read_json(run_files.judged(seq, 0, tier))
            if judged is not None and judged.get("verdict"):
                last = queries.workspace.verdict(judged["verdict"])
                names.append(f"verdicts/{seq}-{tier}-{len(names)}.json")
                files[names[-1]] = _pretty(last.to_json())
        lines = waterfall.lines(last.profile) if last is not None else []
        if lines:
            files[f"waterfalls/{seq}.txt"] = ("\n".join(map(clean, lines)) + "\n").encode()
        found.append(
            {
                **dict.fromkeys(_KEPT), **_numbers(last), "seq": seq, "note": proposed.get("note"),
                "predicted_gain": proposed.get("predicted_gain"), "created": proposed.get("date"),
                "promoted": False, "unfinished": True, "device": dict(last.device) if last else {},
                "tunables": proposed.get("tunables") or {}, "source": f"candidates/{seq}.py",
                "verdicts": names, "waterfall": f"waterfalls/{seq}.txt" if lines else None,
            }
        )  # fmt: skip
    return found


def _numbers(v: Verdict | None) -> dict[str, Any]:
    """Of the last verdict of a candidate that has no row, as rows have them."""
    if v is None:
        return {"status": "not judged"}
    timed = search.workload(v)
    ratio = timed.speedup_incumbent if timed else None
    return {
        "status": str(v.status), "outcome": str(v.outcome) if v.outcome else None, "tier": str(v.tier),
        "trust": str(v.trust), "us": timed.us if timed else None,
        "us_per_layer": timed.us_per_layer if timed else None, "launches": timed.launches if timed else None,
        "fraction_of_floor_measured": search.fraction(v), "message": v.failure.message if v.failure else None,
        "speedup_incumbent": ratio.value if ratio else None, "incumbent_low": ratio.low if ratio else None,
        "incumbent_high": ratio.high if ratio else None,
    }  # fmt: skip


def readme(record: Mapping[str, Any]) -> str:
    """The course of the run for a reader."""
    work = ", ".join(f"{k}={v}" for k, v in record["workload"].items())
    own = " --target FILE.py:NAME" if ".py:" in record["target"] else ""
    lines = [
        f"# {record['target']}, run {record['run']}", "",
        f"- workload: {work}",
        f"- device: {record['device'].get('name') or record['device'].get('kind')}",
        f"- proposals: {record['proposer']} {record['model'] or ''}".rstrip(),
        f"- started {record['started']}; ended: {record['stop'] or 'open'}", "",
        f"Judge it again: `kernelgen replay .{own}` in this folder. Times are microseconds of a step; gains are over "
        "the incumbent of then, with 95 % intervals. Unfinished: the run was cut off before the next tier.", "",
        "| candidate | predicted | measured | us | of the floor | status | |", "|---|---|---|---|---|---|---|",
        *[_line(c) for c in record["candidates"]], "",
        f"Fastest first: {', '.join(map(str, record['ranking'])) or 'none was timed'}.",
    ]  # fmt: skip
    for c in record["candidates"]:
        lines += ["", f"## Candidate {c['seq']}", "", clean(c["note"] or "(no note)")]
        if c["message"]:
            lines += ["", f"Failure: {clean(c['message'])}"]
        if c["waterfall"]:
            lines += ["", f"Where its time goes: [{c['waterfall']}]({c['waterfall']})"]
    lines += ["", "## Decisions", ""]
    lines += [
        f"- round {d['round']}: {d['kind']} {d['seq']}: {clean(d['reason'])}"
        for d in record["decisions"]
    ]
    lines += ["", "## Lessons", "", *[f"- {clean(x)}" for x in record["lessons"] or ("(none)",)]]
    return "\n".join(lines) + "\n"


def _line(c: Mapping[str, Any]) -> str:
    gain = "-"
    if c["speedup_incumbent"] is not None:
        gain = f"{c['speedup_incumbent']:.3f}"
        if c["incumbent_low"] is not None:
            gain += f" [{c['incumbent_low']:.3f}, {c['incumbent_high']:.3f}]"
    floor = c["fraction_of_floor_measured"]
    cells = [
        str(c["seq"]), f"{c['predicted_gain']:.3f}" if c["predicted_gain"] else "-", gain,
        f"{c['us']:.2f}" if c["us"] is not None else "-", f"{floor:.1%}" if floor is not None else "-",
        f"{c['status']} ({c['tier']})",
        "unfinished" if c.get("unfinished") else "new best" if c["promoted"] and c["seq"] else "",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _replace(final: Path, files: Mapping[str, bytes]) -> None:
    """As `replace_folder`, for names with one folder in them."""
    flat = {n: d for n, d in files.items() if "/" not in n}
    with tempfile.TemporaryDirectory() as scratch:
        trees: dict[str, Path] = {}
        for name, data in files.items():
            head, slash, tail = name.partition("/")
            if slash:
                trees[head] = Path(scratch) / head
                trees[head].mkdir(exist_ok=True)
                (trees[head] / tail).write_bytes(data)
        replace_folder(final, flat, trees, NAME)


def rows_for_replay(folder: Path, queries: Queries) -> Sequence[Mapping[str, Any]]:
    """Candidates as `agent.models.replay` takes them; their sources become blobs here. Raises BadRecord."""
    found = []
    for c in read(folder)["candidates"]:
        text = source(folder, c["seq"])
        found.append({
            "seq": c["seq"], "run": folder.name, "direction": c.get("direction"), "note": c.get("note"),
            "predicted_gain": c.get("predicted_gain"), "tunables": json.dumps(c.get("tunables") or {}),
            "source": queries.workspace.put(text),
        })  # fmt: skip
    return found


def _pretty(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
