"""`judge --self-test`: planted kernels through the jail and the judge, and what that says of the judge."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from agent import scores, selftest
from agent.commands import common
from agent.ids import now
from agent.services import DEFAULT_ARCH, Wanted, new_compiler, new_judge, start
from agent.versions import version
from sandbox.judge_client import ClientOptions, JudgeClient
from targets.planted import EditFailed, Planted, built_in

ROWS = "rows.jsonl"
"""In the folder of `-o`."""


def self_test(asked: dict[str, Any]) -> int:
    """Exit code 0 if the judge is as good as it should be. Raises Usage, Unavailable."""
    try:
        data = _summed_up(asked["reports"]) if asked["reports"] else _judged(asked)
    except ValueError as error:
        raise common.Usage(str(error)) from error
    head = f"judge on {data['device']}, {data['preset']}, {len(data['rows'])} kernels in {data['wall_s']:.0f} s"
    common.emit(asked["as_json"], data, f"{head}\n\n{scores.table(data)}")
    return 0 if data["ok"] else 1


def _judged(asked: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError for what `--only`, `--shard` and `--resume` cannot mean, Unavailable."""
    device = asked["device"]
    if asked["resume"] and not asked["output"]:
        raise ValueError("--resume goes on with what -o DIR holds")
    todo = selftest.chosen(built_in(), asked["only"], device)
    if asked["shard"]:
        todo = selftest.shard(todo, asked["shard"])
    if asked["seconds"] == 0 and asked["output"]:
        return _only_compiled(asked, todo)
    cores = os.cpu_count() or 1
    jobs = asked["jobs"] or (cores if device == "cpu" else 1)
    began = time.monotonic()
    sized = [selftest.resized(p, asked["preset"]) for p in todo]
    with _store(asked["output"]) as folder:
        place = common.place_of(folder / "runs.db", None)
        wanted = Wanted(device, parallel=max(jobs, cores), deadline_s=300.0)
        services, facts = start(wanted, place.workspace)
        more = _more_judges(jobs - 1, device, folder)
        try:
            arch = str(facts.get("arch") or wanted.arch)
            bench = selftest.Bench(services.compiler, [services.judge, *more], device, arch, jobs)
            compiled = _compiled(bench, sized) if device != "cpu" or asked["output"] else 0.0
            until = time.monotonic() + (
                float("inf") if asked["seconds"] is None else asked["seconds"]
            )
            log = _Log(
                folder / ROWS, {"device": facts.get("name", device), "preset": asked["preset"]}
            )
            known = log.rows(sized) if asked["resume"] else {}
            told = _progress(len(todo) - len(known))

            def heard(row: scores.Row) -> None:
                log.add(row)
                told(row)

            left = [p for p in sized if p.name not in known]
            known |= {
                r.planted.name: r
                for r in selftest.run(bench, left, heard, lambda: time.monotonic() < until)
            }
            rows = [known[p.name] for p in sized if p.name in known]
        finally:
            services.close()
            for judge_ in more:
                judge_.close()
    return _told(asked, rows, todo) | {
        "device": facts.get("name", device), "jobs": jobs, "wall_s": round(time.monotonic() - began, 1),
        "compile_wall_s": compiled,
    }  # fmt: skip


@dataclass(frozen=True)
class _Log:
    """Rows as they are known, a line each, so that a run that is cut off has lost none; `about`: on what and at which
    sizes."""

    file: Path
    about: Mapping[str, str]

    def add(self, row: scores.Row) -> None:
        line = {**self.about, "source": _digest(row.planted), "row": row.to_json()}
        with self.file.open("a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")

    def rows(self, todo: Sequence[Planted]) -> dict[str, scores.Row]:
        """The last of each kernel whose text is still the same; what could not be used then is not among them."""
        wanted = {p.name: p for p in todo}
        found: dict[str, scores.Row] = {}
        for text in self.file.read_text().splitlines() if self.file.exists() else ():
            try:
                line = json.loads(text)
                planted = wanted.get(str(line["row"]["name"]))
                same = planted and line == {**line, **self.about, "source": _digest(planted)}
            except (ValueError, KeyError, TypeError):  # the end of a run that was cut off
                continue
            if planted and same:
                found[planted.name] = scores.row_from_json(line["row"], planted)
        return {n: r for n, r in found.items() if r.fate != "broken"}


def _digest(p: Planted) -> str:
    try:
        text = p.text()
    except EditFailed:
        return ""
    return hashlib.sha256(f"{p.options} {dict(p.tunables)} {text}".encode()).hexdigest()


def _only_compiled(asked: dict[str, Any], todo: Sequence[Planted]) -> dict[str, Any]:
    """Fills the folder that is kept. No device is looked for, and none is reached."""
    began = time.monotonic()
    sized = [selftest.resized(p, asked["preset"]) for p in todo]
    with _store(asked["output"]) as folder:
        wanted = Wanted(asked["device"], parallel=os.cpu_count() or 1, deadline_s=300.0)
        place = common.place_of(folder / "runs.db", None)
        with closing(new_compiler(wanted, place.workspace)) as compiler:
            bench = selftest.Bench(compiler, [], asked["device"], wanted.arch or DEFAULT_ARCH)
            compiled = _compiled(bench, sized)
    return _told(asked, [], todo) | {
        "device": asked["device"], "jobs": 0, "wall_s": round(time.monotonic() - began, 1), "compile_wall_s": compiled,
    }  # fmt: skip


def _told(
    asked: dict[str, Any], rows: Sequence[scores.Row], todo: Sequence[Planted]
) -> dict[str, Any]:
    return _report(rows, todo) | {
        "preset": asked["preset"], "date": now(), "version": version("kernelgen"),
        "commits": sorted({r.commit for r in rows if r.commit}), "seconds": dict(selftest.spent(rows)),
        "rows": [r.to_json() for r in rows],
    }  # fmt: skip


@contextmanager
def _store(kept: Path | None) -> Iterator[Path]:
    """Where compiled kernels lie: in a folder that is kept, so that another run need not compile them, or for now."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="kernelgen-self-test-") as folder:
        yield Path(folder)


def _more_judges(count: int, device: str, folder: Path) -> list[JudgeClient]:
    """Judges beside the first. On a GPU each has a state folder, and so a lock, of its own: they share the GPU, which
    spoils times and no verdict, since none of these kernels is told from a right one by its time."""
    if device == "cpu":
        return [new_judge() for _ in range(count)]
    return [JudgeClient(ClientOptions(folder / f"judge-{os.getpid()}-{n}")) for n in range(count)]


def _compiled(bench: selftest.Bench, todo: Sequence[Planted]) -> float:
    """Compile all before any is judged, so that a GPU does not wait for the compiler. Returns the seconds."""
    began = time.monotonic()
    selftest.prepare(bench, todo, os.cpu_count() or 1)
    click.echo(f"compiled {len(todo)} kernels in {time.monotonic() - began:.1f} s", err=True)
    return round(time.monotonic() - began, 1)


def _report(rows: Sequence[scores.Row], todo: Sequence[Planted]) -> dict[str, Any]:
    data = scores.summary(rows)
    reached = {r.planted.name for r in rows}
    left = [p.name for p in todo if p.name not in reached]
    return data | {"not_reached": left, "ok": data["ok"] and not left}


def _summed_up(files: Sequence[Path]) -> dict[str, Any]:
    """Reports of parts as one. Raises ValueError where they do not fit together."""
    parts = [_read(f) for f in files]
    for name in ("device", "preset", "version"):
        if len({p[name] for p in parts}) > 1:
            raise ValueError(f"the reports differ in their {name}")
    catalogue = {p.name: p for p in built_in()}
    told = [r for part in parts for r in part["rows"]]
    names = [str(r["name"]) for r in told]
    unknown = sorted(set(names) - set(catalogue))
    twice = sorted({n for n in names if names.count(n) > 1})
    if unknown or twice:
        raise ValueError(
            f"not of this catalogue, or told twice: {', '.join([*unknown, *twice][:6])}"
        )
    rows = [scores.row_from_json(r, catalogue[str(r["name"])]) for r in told]
    left = [catalogue[n] for part in parts for n in part["not_reached"] if n in catalogue]
    return _report(rows, [*(r.planted for r in rows), *left]) | {
        "device": parts[0]["device"], "preset": parts[0]["preset"], "version": parts[0]["version"],
        "jobs": sum(p["jobs"] for p in parts), "date": min(str(p["date"]) for p in parts),
        "wall_s": max(float(p["wall_s"]) for p in parts), "seconds": dict(selftest.spent(rows)),
        "commits": sorted({r.commit for r in rows if r.commit}), "rows": [r.to_json() for r in rows],
    }  # fmt: skip


def _read(file: Path) -> Mapping[str, Any]:
    try:
        found: Any = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict) or not {"rows", "not_reached", "version"} <= found.keys():
        raise ValueError(f"{file} is no report of a self-test")
    return found


def _progress(count: int) -> Callable[[scores.Row], None]:
    """One line a kernel on stderr, as they end."""
    done = iter(range(1, count + 1))

    def heard(row: scores.Row) -> None:
        end = f"{row.status} at {row.tier}, " if row.tier else ""
        spent = sum(row.seconds.values())
        text = f"[{next(done)}/{count}] {row.planted.name}: {row.fate} ({end}{spent:.1f} s) {row.message[:200]}"
        click.echo(text.rstrip(), err=True)

    return heard
