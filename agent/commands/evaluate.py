"""`compile` and `evaluate`: files by hand, from source to artifact, and on to a verdict."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from agent import offline
from agent.commands import common
from agent.config import deadline
from agent.locks import hold
from agent.offline import Found, Setting
from agent.runner import Services
from agent.services import DEFAULT_ARCH, Wanted, in_order, start, start_compiler, start_each
from agent.views import verdict_lines
from agent.workspace import Place
from sandbox import artifact_store
from sandbox.verdict import Status, Tier

TIERS = click.Choice([t.value for t in Tier])


def tunables_of(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, Any]:
    """NAME=VALUE pairs; values are Python literals, or text."""
    out: dict[str, Any] = {}
    for item in values:
        name, equals, text = item.partition("=")
        if not equals or not name.isidentifier():
            raise click.BadParameter(f"{item!r} is not NAME=VALUE", ctx, param)
        try:
            out[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            out[name] = text
    return out


tunable_option = click.option(
    "--tunable", "tunables", multiple=True, metavar="NAME=VALUE", callback=tunables_of,
    help="Choose a value that the file's TUNABLES declares.",
)  # fmt: skip


def _source(file: str, target: str, tunables: dict[str, Any]) -> offline.File:
    """Raises Usage for a file that is not there."""
    try:
        return offline.read(file, target, tunables)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise common.Usage(f"{file}: {error.strerror}") from error


@click.command("compile")
@click.argument("file")
@common.workload_options
@click.option(
    "--arch",
    default=DEFAULT_ARCH,
    type=click.Choice(["sm_90a", "sm_100a", "sm_103a"]),
    help="Architecture.",
)
@click.option("--sandbox", default=None, type=click.Choice(["strict", "landlock", "seccomp", "weak", "none"]),
              help="Isolation.  [default: the strongest that works]")  # fmt: skip
@click.option("--trust-this-code", is_flag=True, help="Allow --sandbox none.")
@tunable_option
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), default=Path("."),
              help="Folder that gets the artifact's folder, named by its hash.")  # fmt: skip
@common.db_option
@common.json_option
def compile_(file: str, **asked: Any) -> int:
    """Compile FILE in the jail (`seed` for the target's seed) and write its artifact.

    \b
    Examples:
      kernelgen compile --target kimi-k3-decode seed -o out
      kernelgen compile --target kimi-k3-gemv mine.py --tunable threads=256 --arch sm_100a -o out
    """
    target = common.find_target(asked["target"])
    name = common.full_name(asked["target"])
    workload = target.workload(common.chosen(target, "cpu", asked))
    source = _source(file, name, asked["tunables"])
    place = common.place_of(asked["db"], None)
    wanted = Wanted("cpu", asked["arch"], asked["sandbox"] or "", asked["trust_this_code"])
    services = start_compiler(wanted, place.workspace)
    try:
        setting = Setting(name, workload, "cpu", asked["arch"])
        outcome = offline.compile_file(services, setting, source)
    finally:
        services.close()
    data: dict[str, Any] = {
        "file": file, "status": str(outcome.status) if outcome.status else None, "artifact": None,
        "failure": None, "tunables": {k: list(v) for k, v in outcome.tunables.items()},
        "isolation": dict(outcome.isolation), "cached": outcome.cached,
        "seconds": dict(outcome.seconds),
    }  # fmt: skip
    if outcome.artifact is None:
        failure = outcome.failure
        data["failure"] = (
            {"rule": failure.rule, "message": failure.message, "where": dict(failure.where)}
            if failure
            else None
        )
        common.emit(
            asked["as_json"],
            data,
            f"{file}: {outcome.status}: {failure.message if failure else ''}",
        )
        return 1
    artifact = artifact_store.load(outcome.artifact)
    data["artifact"] = str(artifact_store.save(artifact, asked["output"]))
    data["sha256"] = artifact.sha256
    data["launches"] = len(artifact.step.launches)
    common.emit(
        asked["as_json"], data, f"{data['artifact']}\n{data['launches']} launches, {artifact.arch}"
    )
    return 0


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@common.workload_options
@common.machine_options
@common.workers_option
@common.kind_option
@click.option("--tier", type=TIERS, default="screen", help="How thoroughly to judge.")
@click.option(
    "--against", default=None, metavar="FILE|seed", help="An incumbent to be timed against."
)
@tunable_option
@click.option(
    "--deadline",
    type=click.FloatRange(1),
    default=None,
    help="Seconds a screen may take; full 4 times, promote 8 times that.  [default: 120; cpu 900]",
)
@common.db_option
@common.json_option
def evaluate(files: tuple[str, ...], **asked: Any) -> int:
    """Compile and judge each FILE (`seed` or `-` for the target's seed) and record the verdicts.

    \b
    Examples:
      kernelgen evaluate --target kimi-k3-decode seed
      kernelgen evaluate --target kimi-k3-decode --preset tp8 --tier full mine.py --against seed
      kernelgen evaluate --target my_target.py:MyTarget kernel.py --device cpu --json
      kernelgen evaluate --target kimi-k3-gemv --device cuda --workers ray://10.0.0.1:6379 --kind h200
      --kind b200 mine.py

    On workers the files are judged side by side, on every kind of device given: one verdict for each.

    Exit code 0 only if every file passed.
    """
    common.check_workers(asked, asked["device"])
    target = common.find_target(asked["target"])
    name = common.full_name(asked["target"])
    workload = target.workload(common.chosen(target, asked["device"], asked))
    sources = [_source(f, name, asked["tunables"]) for f in files]
    rival = _source(asked["against"], name, {}) if asked["against"] else None
    place = common.place_of(asked["db"], None)
    wanted = Wanted(
        asked["device"], asked["arch"] or "", asked["sandbox"] or "", asked["trust_this_code"],
        workers=asked["workers"], kinds=asked["kinds"],
    )  # fmt: skip
    common.talk().print(
        f"evaluate {len(files)} file(s) of {name}, preset {workload.options.preset}, device {asked['device']}, "
        f"tier {asked['tier']}", soft_wrap=True, markup=False,
    )  # fmt: skip
    tier = Tier(asked["tier"])
    limit = deadline(tier, asked["deadline"], asked["device"])
    with ExitStack() as stack:
        benches = []
        if asked["workers"]:
            started = start_each(wanted, place.workspace)
        else:
            started = {asked["device"]: start(wanted, place.workspace)}
        for kind, (services, facts) in started.items():
            stack.callback(services.close)
            arch = asked["arch"] or str(facts.get("arch") or DEFAULT_ARCH)
            setting = Setting(name, workload, asked["device"], arch, tier, limit)
            benches.append(Bench(kind, services, setting, _incumbent(services, setting, rival)))
        run = offline.start_record(place, benches[0].setting)
        with hold(place.workspace.run(run)):
            return _each(Sheet(place, run, asked["as_json"]), benches, sources)


def _incumbent(services: Services, setting: Setting, rival: offline.File | None) -> Path | None:
    if rival is None:
        return None
    outcome = offline.compile_file(services, setting, rival)
    if outcome.artifact is None:
        why = outcome.failure.message if outcome.failure else outcome.status
        raise common.Usage(f"--against {rival.name} does not compile: {why}")
    return outcome.artifact


@dataclass(frozen=True)
class Bench:
    """Where files are judged, and against what. `kind` of device."""

    kind: str
    services: Services
    setting: Setting
    incumbent: Path | None

    def judge(self, file: offline.File) -> Found:
        return offline.judge_file(self.services, self.setting, file, self.incumbent)


@dataclass(frozen=True)
class Sheet:
    """Where results go."""

    place: Place
    run: str
    as_json: bool


def _each(sheet: Sheet, benches: list[Bench], sources: list[offline.File]) -> int:
    """Every file on every bench; recorded and shown in their order, whoever is done first."""
    place, run, as_json = sheet.place, sheet.run, sheet.as_json
    began = time.monotonic()
    results: list[tuple[str, Found]] = []
    for seq, (bench, found) in enumerate(_judged(benches, sources)):
        offline.record(place, run, seq, found)
        results.append((bench.kind, found))
        if not as_json:
            where = f" on {bench.kind}" if len(benches) > 1 else ""
            head = f"{found.file.name}{where} ({run}-{seq})"
            click.echo("\n".join(verdict_lines(head, found.verdict)))
    offline.finish_record(place, run, time.monotonic() - began)
    if as_json:
        rows = [
            {"file": r.file.name, "candidate": f"{run}-{i}", "kind": kind, "verdict": r.verdict.to_json(),
             "compile_seconds": dict(r.outcome.seconds), "cached": r.outcome.cached}
            for i, (kind, r) in enumerate(results)
        ]  # fmt: skip
        common.emit(True, {"run": run, "results": rows}, "")
    return 0 if all(r.verdict.status is Status.PASSED for _, r in results) else 1


def _judged(benches: list[Bench], sources: list[offline.File]) -> Iterator[tuple[Bench, Found]]:
    todo = [(b, file) for file in sources for b in benches]
    return in_order(todo, lambda it: (it[0], it[0].judge(it[1])), benches[0].services.width)
