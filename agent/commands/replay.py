"""`trajectory`: a run as a folder that can be kept and judged again; `replay`: judge it again and compare the order.

The proposals of a replay come from the record, never from a model; what it measures is a new run of its own.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from agent import ranking
from agent import trajectory as course
from agent.commands import common
from agent.commands.rejudge import rejudge
from agent.store import Queries, Store
from agent.workspace import Place


@click.command("trajectory")
@click.argument("run")
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), default=None,
              help="Folder to write.  [default: TARGET/DEVICE/RUN among the winners]")  # fmt: skip
@common.db_option
@common.out_option
@common.json_option
def trajectory_(run: str, output: Path | None, db: Path, out: Path | None, as_json: bool) -> int:
    """Write a RUN (its id, a unique part of it, or `last`) as a folder: proposals with their predictions, verdicts,
    waterfalls, decisions, lessons, and the ranking. `kernelgen replay FOLDER` judges it again.

    \b
    Examples:
      kernelgen trajectory last
      kernelgen trajectory 01JD3V -o records/kda
    """
    place, queries = common.recorded(db, out)
    folder = course.write(place, queries, run, output)
    ranked = course.read(folder)["ranking"]
    common.emit(as_json, {"folder": str(folder), "ranking": ranked}, str(folder))
    return 0


@click.command()
@click.argument("name", metavar="FOLDER|RUN")
@click.option("--target", default=None, metavar="FILE.py:NAME",
              help="Where an own target lies here; without it a FOLDER's must be a built-in one.")  # fmt: skip
@click.option("--preset", default=None, help="Other sizes than those of the record.")
@click.option("--layers", type=click.IntRange(1), default=None, help="Another number of layers.")
@common.machine_options
@click.option("--confirm", type=click.Choice(["full", "promote"]), default="full", show_default=True,
              help="Tier that what is better must pass.")  # fmt: skip
@click.option("--screen", is_flag=True,
              help="Judge each candidate once, at tier screen; no run is made, nothing is promoted.")  # fmt: skip
@click.option("--margin", type=click.FloatRange(0, 1), default=ranking.MARGIN, show_default=True,
              help="Recorded times closer than this share are not told apart.")  # fmt: skip
@click.option(
    "--deadline",
    type=click.FloatRange(1),
    default=None,
    help="Seconds a screen may take, as of optimize.",
)
@common.db_option
@common.out_option
@common.json_option
def replay(name: str, **asked: Any) -> int:
    """Judge the candidates of a recorded run again, in their order, and compare the ranking. A target is
    trusted code, so a FOLDER that names a file as its target is judged only with the --target given here.

    \b
    Examples:
      kernelgen replay kernels_out/kimi-k3-kda/h200/01JD3V...
      kernelgen replay last --device cpu --preset tiny --layers 2
      kernelgen replay kernels_out/kimi-k3-kda/h200/01JD3V... --screen

    On cpu times are modelled: an order that comes out there says nothing of a GPU.

    Exit codes: 0 every status is the same and no pair of times that the record and this machine tell apart has
    another order; 1 otherwise.
    """
    place = common.place_of(asked["db"], asked["out"])
    folder, recorded = _source(place, name)
    recorded = {**recorded, "target": _target(recorded["target"], asked["target"], folder)}
    new, rows = (
        (None, _screened(place, folder, recorded, asked))
        if asked["screen"]
        else _run_again(place, folder, recorded, asked)
    )
    found = ranking.compare(
        ranking.results(recorded["candidates"]), ranking.results(rows), asked["margin"]
    )
    modelled = asked["device"] == "cpu"
    data = {"run": new, "of": recorded["run"], "modelled": modelled, **found.to_json()}
    words = in_words(recorded["candidates"], rows, found)
    if modelled:
        words.insert(0, "times of now are modelled (cpu), not measured")
    common.emit(asked["as_json"], data, "\n".join(words))
    return 0 if found.same else 1


def _run_again(
    place: Place, folder: Path | None, recorded: Mapping[str, Any], asked: Mapping[str, Any]
) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """A run of its own: its id and its candidates."""
    context = click.get_current_context()
    from agent.commands.optimize import optimize

    with tempfile.TemporaryDirectory() as kept:
        first = folder / "candidates" / "0.py" if folder else Path(kept) / "0.py"
        if folder is None:  # what it started from need not be the target's seed
            first.write_bytes(place.workspace.get(recorded["candidates"][0]["source"]))
        arguments = _arguments(folder or recorded["run"], recorded, asked, first)
        with contextlib.redirect_stdout(sys.stderr):  # its summary is talk here
            optimize.main(
                arguments,
                prog_name="kernelgen optimize",
                standalone_mode=False,
                parent=context.parent,
            )
    new = context.meta[common.RUN]
    return new, Queries(Store(place.db), place.workspace).candidates(new)


def _screened(
    place: Place, folder: Path | None, recorded: Mapping[str, Any], asked: Mapping[str, Any]
) -> Sequence[Mapping[str, Any]]:
    """A run of the record goes to a folder first, as that has the sources."""
    if folder is not None:
        return rejudge(folder, recorded, asked)
    with tempfile.TemporaryDirectory() as kept:
        queries = Queries(Store(place.db), place.workspace)
        made = course.write(place, queries, recorded["run"], Path(kept) / "record")
        return rejudge(made, course.read(made), asked)


def _source(place: Place, name: str) -> tuple[Path | None, dict[str, Any]]:
    """The folder, or None for a run of the record; and what was recorded. Raises Usage, NotFound, BadRecord."""
    if Path(name).is_dir():
        return Path(name).absolute(), course.read(Path(name))
    if not place.db.exists():
        raise common.Usage(f"{name} is no folder, and there is no record {place.db}")
    queries = Queries(Store(place.db), place.workspace)
    row = queries.run(name)
    candidates = queries.candidates(row["id"])
    if not candidates:
        raise common.Usage(f"run {row['id']} has no candidates yet")
    return None, {
        "run": row["id"], "target": row["target"], "settings": json.loads(row["settings"]),
        "device": {"kind": row["device"]}, "candidates": candidates,
    }  # fmt: skip


def _target(recorded: str, given: str | None, folder: Path | None) -> str:
    """What to judge against: the record's target, or the user's file in its place. Raises Usage."""
    own = ".py:" in recorded
    if given is not None and given != recorded and not (own and ".py:" in given):
        raise common.Usage(
            f"this is a run of {recorded}, not of {given}: --target says where a target in a file lies"
        )
    if given is None and own and folder is not None:
        raise common.Usage(
            f"the record's target is the file {recorded}, which would be run: if you trust it, give"
            f" --target {recorded}, or where it lies here"
        )
    return common.full_name(given or recorded)


def _arguments(
    what: Path | str, recorded: Mapping[str, Any], asked: Mapping[str, Any], first: Path
) -> list[str]:
    """`optimize` as it was asked then, but for where it runs and when it ends: after the last proposal."""
    settings = recorded["settings"]
    options = settings["options"]
    proposals = len(recorded["candidates"]) - 1
    found = ["--target", recorded["target"], "--preset", asked["preset"] or options["preset"]]
    for key in ("layers", "rows", "context"):
        value = asked.get(key) or options.get(key)
        found += [f"--{key}", str(value)] if value is not None else []
    for key, value in options.get("extra", {}).items():
        found += ["--option", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    for key in ("device", "arch", "sandbox", "deadline"):
        found += [f"--{key}", str(asked[key])] if asked[key] is not None else []
    found += ["--trust-this-code"] if asked["trust_this_code"] else []
    found += ["--start", str(first)]
    found += [
        "--proposer",
        "replay",
        "--replay",
        str(what),
        "--candidates",
        "1",
        "--confirm",
        asked["confirm"],
    ]
    found += [
        "--rounds",
        str(proposals),
        "--patience",
        str(proposals + 1),
        "--stop-at",
        "1",
        "--repairs",
        "0",
    ]
    found += ["--db", str(asked["db"])] + (["--out", str(asked["out"])] if asked["out"] else [])
    return found


def in_words(
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    found: ranking.Comparison,
) -> list[str]:
    now = {row["seq"]: row for row in after}
    lines = ["candidate  recorded us     now us  status"]
    for row in before:
        again = now.get(row["seq"])
        status = again["status"] if again else "not judged"
        lines.append(
            f"{row['seq']:9d}  {_us(row):>11s}  {_us(again):>9s}  {row['status']} -> {status}"
        )
    lines.append(f"fastest first, recorded: {_order(found.before)}; now: {_order(found.after)}")
    if found.same and found.pairs:
        told = found.pairs - len(found.close)
        lines.append(
            f"the ranking is reproduced: {told} of {found.pairs} pairs that the record tells apart"
        )
    elif found.same:
        lines.append(
            "every candidate ended as in the record, which tells no two of them apart: no ranking"
        )
    for fast, slow in found.close:
        lines.append(f"not told apart here: {fast} was faster than {slow}")
    for fast, slow in found.swapped:
        lines.append(f"swapped: {fast} was faster than {slow}")
    lines += [f"candidate {seq} was {then} and is {is_}" for seq, then, is_ in found.changed]
    lines += [f"candidate {seq} was not judged again" for seq in found.missing]
    return lines


def _us(row: Mapping[str, Any] | None) -> str:
    return f"{row['us']:.2f}" if row and row["us"] is not None else "-"


def _order(seqs: Sequence[int]) -> str:
    return ", ".join(map(str, seqs)) or "none"
