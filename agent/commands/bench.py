"""`bench`: a kernel and every baseline over rows and contexts, as table, JSON rows and plot."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from agent import offline
from agent.bench import grid, plot, run, show
from agent.bench.rows import Context, unmeasured
from agent.commands import common
from agent.commands.evaluate import tunable_option
from agent.config import options
from agent.services import DEFAULT_ARCH, Wanted, start
from sandbox.verdict import Status
from targets.base import Target, Workload


def _numbers(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...]:
    try:
        return grid.numbers(text or "", grid.rows if param.name == "rows" else grid.number)
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r} is no list such as 1,8 or 1k,128k", ctx, param
        ) from error


@click.command()
@click.option(
    "--target", required=True, help="A name (see `kernelgen targets`) or path/to/file.py:Name."
)
@click.option("--rows", default="1,8", callback=_numbers, help="Values of M, separated by commas.")
@click.option(
    "--context", default=None, callback=_numbers, help="Tokens in the caches, such as 1k,8k,128k."
)
@click.option("--preset", default=None, help="Sizes.  [default: tiny on cpu, tp8 on cuda]")
@click.option("--row", "listed", multiple=True, metavar="PRESET:M:CONTEXT",
              help="One row, such as tp16:8:8k, in place of --preset, --rows and --context; may be repeated, and rows "
                   "are measured in this order.")  # fmt: skip
@click.option("--layers", type=click.IntRange(1), default=None, help="Number of layers.")
@common.variant_options
@click.option("--kernel", default=grid.SEED, metavar="FILE|DIR|seed",
              help="A source, a folder with artifacts (the seed's if its name is seed), or the target's seed with its "
                   "best known values.")  # fmt: skip
@tunable_option
@click.option("--baselines", default="all", help="Names separated by commas, or all.")
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=1000,
    help="Steps timed one by one for the percentiles.",
)
@click.option("--deadline", type=click.FloatRange(1), default=None,
              help="Seconds that one workload may take.  [default: 300; cpu 1800]")  # fmt: skip
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), default=None,
              help="Append each row to this file as it is measured, one JSON object a line.")  # fmt: skip
@click.option("--read", "measured", type=click.Path(exists=True, dir_okay=False, path_type=Path), multiple=True,
              help="Show rows of such files and measure nothing; may be repeated.")  # fmt: skip
@click.option("--plot", "picture", type=click.Path(dir_okay=False, path_type=Path), default=None,
              help="Draw % of floor against M and step time against context (needs matplotlib).")  # fmt: skip
@common.machine_options
@common.db_option
@common.json_option
def bench(**asked: Any) -> int:
    """Time a kernel and the baselines for every M and context; each is checked before it is timed.

    Per M and context: us and launches a layer, GB/s, % of the floor at the measured and at the
    specified rate, tokens per second, P50/P95/P99 of steps timed one by one, isolated steps with a
    warm and a cold L2, energy where the GPU counts it. On cpu times are modelled and baselines are
    not timed. Time to first token belongs to prefill and is the serving engine's to measure.

    \b
    Examples:
      kernelgen bench --target kimi-k3-decode --rows 1,8 --context 1k,8k --preset tp8 -o rows.jsonl
      kernelgen bench --target kimi-k3-decode --row tp8:1:8k --row tp16:8:8k -o rows.jsonl
      kernelgen bench --target kimi-k3-decode --read a.jsonl --read b.jsonl --plot bench.png
      kernelgen bench --target kimi-k3-decode --kernel mine.py --baselines mix,graph --plot bench.png

    Exit code 0 only if every workload was measured.
    """
    target = common.find_target(asked["target"])
    name = common.full_name(asked["target"])
    try:
        found, refused = grid.workloads(target, _asked(target, asked))
    except ValueError as error:
        raise common.Usage(f"a row is PRESET:M:CONTEXT, such as tp8:1:8k: {error}") from error
    for line in [] if asked["measured"] else refused:
        common.complain(f"refused: {line}")
    if not found:
        return 2
    if asked["measured"]:
        return _read(asked, found[0].target)
    place = common.place_of(asked["db"], None)
    cores = os.cpu_count() or 1
    parallel = max(1, min(cores - 2, len(found)))
    wanted = Wanted(
        asked["device"],
        asked["arch"] or "",
        asked["sandbox"] or "",
        asked["trust_this_code"],
        parallel,
    )
    services, facts = start(wanted, place.workspace)
    memory = facts.get("memory_bytes") if asked["device"] != "cpu" else 0
    found, more = grid.fitting(found, int(memory or 0))
    for line in more:
        common.complain(f"refused: {line}")
    rows = _refusals(asked, target.name, [*refused, *more])
    if not found:
        services.close()
        return 2
    common.talk().print(_headline(name, found, asked, facts), soft_wrap=True, markup=False)
    try:
        arch = asked["arch"] or str(facts.get("arch") or DEFAULT_ARCH)
        plan = _plan(target, name, asked, (arch, found))
        for some in run.measured(services, plan, found, parallel):
            rows += some
            if asked["output"]:
                run.append(asked["output"], some)
            common.talk().print(show.table(some), soft_wrap=True, markup=False)
    finally:
        services.close()
    if asked["picture"]:
        plot.plot(rows, asked["picture"])
    data = {"device": dict(facts), "refused": [str(r) for r in (*refused, *more)], "rows": rows}
    common.emit(asked["as_json"], data, f"{show.table(rows)}\n{show.ABOUT}")
    return 0 if all(r.get("status") == str(Status.PASSED) for r in rows) else 1


def _refusals(
    asked: dict[str, Any], target: str, refused: list[grid.Refused]
) -> list[dict[str, Any]]:
    """Rows of what is not measured, in the file too: whoever reads it later sees all that was asked for."""
    context = Context(_label(asked), _command(), None)
    why = [(r.options, (Status.UNSUPPORTED, f"refused: {r.why}")) for r in refused]
    rows = [unmeasured(target, o, context, w) for o, w in why]
    if asked["output"] and rows:
        run.append(asked["output"], rows)
    return rows


def _command() -> str:
    return shlex.join(["kernelgen", *sys.argv[1:]])


def _label(asked: dict[str, Any]) -> str:
    return grid.SEED if asked["kernel"] == grid.SEED else Path(asked["kernel"]).name


def _read(asked: dict[str, Any], target: str) -> int:
    """Rows of earlier runs on the target as one table and one plot."""
    lines = [line for file in asked["measured"] for line in file.read_text().splitlines()]
    try:
        read = [json.loads(line) for line in lines if line.strip()]
        rows = [r for r in read if r["target"] == target]
        rows.sort(key=lambda r: (r["preset"], r["m"], r["context"], r.get("us", 0.0)))
    except (ValueError, KeyError, TypeError) as error:
        raise common.Usage(f"no rows of `kernelgen bench`: {error}") from error
    if len(rows) < len(read):
        common.complain(f"{len(read) - len(rows)} rows of other targets are left out")
    if asked["picture"]:
        plot.plot(rows, asked["picture"])
    common.emit(asked["as_json"], {"rows": rows}, f"{show.table(rows)}\n{show.ABOUT}")
    return 0 if all(r.get("status") == str(Status.PASSED) for r in rows) else 1


def _asked(target: Target, asked: dict[str, Any]) -> grid.Asked | grid.Listed:
    """Raises Usage."""
    preset = asked["preset"]
    if preset is None:
        usual = "tiny" if asked["device"] == "cpu" else "tp8"
        preset = usual if usual in target.presets else target.presets[0]
    try:
        extra = (*asked["extra"], *common.shorthands(asked))
        chosen = options(preset, {"layers": asked["layers"]}, extra)
    except ValueError as error:
        raise common.Usage(str(error)) from error
    if asked["listed"]:
        return grid.Listed(chosen, asked["listed"])
    return grid.Asked(chosen, asked["rows"] or (1,), asked["context"] or (None,))


def _plan(
    target: Target, name: str, asked: dict[str, Any], on: tuple[str, list[Workload]]
) -> run.Plan:
    """Raises OSError, Malformed, Usage. `on`: architecture and workloads."""
    arch, found = on
    source = target.seed_source()
    seed = offline.File(grid.SEED, source, {**grid.best_known(source), **asked["tunables"]})
    kernel: offline.File | dict[str, Path] = seed
    if asked["kernel"] != grid.SEED:
        path = Path(asked["kernel"])
        seed = offline.File(grid.SEED, source, grid.best_known(source))
        kernel = (
            grid.artifacts_of(path)
            if path.is_dir()
            else offline.read(asked["kernel"], name, asked["tunables"])
        )
    there = tuple(getattr(target, "baselines", {}))
    baselines = (
        there if asked["baselines"] == "all" else tuple(filter(None, asked["baselines"].split(",")))
    )
    layers = getattr(target, "model_layers", None)
    whole = {layers(w.options) for w in found} if layers else {None}
    if len(whole) > 1:
        raise common.Usage("rows of models with different numbers of layers: ask for them apart")
    context = Context(_label(asked), _command(), whole.pop())
    deadline = asked["deadline"] or (1800.0 if asked["device"] == "cpu" else 300.0)
    return run.Plan(
        name, asked["device"], arch, kernel, seed, baselines, asked["steps"], deadline, context
    )


def _headline(name: str, found: list[Any], asked: dict[str, Any], facts: Any) -> str:
    on = f"{facts.get('name', '')} ({asked['device']})"
    kind = "modelled, not measured" if asked["device"] == "cpu" else "measured"
    presets = ", ".join(dict.fromkeys(w.options.preset for w in found))
    return f"bench {name} on {on}: {len(found)} workloads, preset {presets}, times {kind}"
