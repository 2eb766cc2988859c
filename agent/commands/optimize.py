"""`optimize` and `resume`: start a run or go on with one, show it live, end with a summary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from agent import interrupts, seats, trajectory
from agent.commands import common
from agent.commands.dryrun import dry_run as show_dry_run
from agent.config import KEYS, PROPOSERS, RunSettings, has_gpu
from agent.elsewhere import FolderJudge
from agent.ids import new_run_id
from agent.locks import hold
from agent.render import Screen
from agent.runner import (
    Ended,
    Run,
    Services,
    Session,
    advance,
    create,
    load_settings,
    make_ledger,
    save_settings,
    with_limits,
)
from agent.search import Limits
from agent.services import DEFAULT_ARCH, Wanted, start, start_compiler
from agent.store import Queries, Store
from agent.summary import exit_code, summarise
from agent.versions import versions
from agent.workspace import Place, check_writable
from sandbox.verdict import Tier

# Interpreting a step takes minutes: a first answer soon, more on request.
CPU_ROUNDS, CPU_WIDTH = 2, 2


KEPT = ("the run's", "the run's", "the run's")
OPEN = ("none", "none, but 3 with --rounds", "0.9")
USUAL = ("8; cpu 2; external none", "3; external none without --rounds", "0.9")


def limit_options(usual: tuple[str, str, str]) -> Callable[[Any], Any]:
    """`usual`: what help says is the default of rounds, patience and the share of the floor."""

    def add(f: Any) -> Any:
        for option in reversed((
            click.option("--rounds", type=click.IntRange(0), default=None, help=f"Rounds.  [default: {usual[0]}]"),
            click.option("--max-candidates", type=click.IntRange(1), default=None,
                         help="Candidates in all, besides what the run starts from."),
            click.option("--max-usd", type=click.FloatRange(0), default=None, help="Dollars for models."),
            click.option("--max-tokens", type=click.IntRange(1), default=None, help="Tokens in and out."),
            click.option("--max-minutes", type=click.FloatRange(0), default=None, help="Time at work."),
            click.option("--max-gpu-seconds", type=click.FloatRange(0), default=None, help="Time judging."),
            click.option("--stop-at", type=click.FloatRange(0, 1), default=None,
                         help=f"Share of the byte floor that is enough.  [default: {usual[2]}]"),
            click.option("--patience", type=click.IntRange(1), default=None,
                         help=f"Rounds without a promotion before it stops.  [default: {usual[1]}]"),
        )):  # fmt: skip
            f = option(f)
        return f

    return add


@click.command()
@common.workload_options
@common.machine_options
@common.workers_option
@common.kind_option
@click.option("--proposer", type=click.Choice(PROPOSERS), default=None,
              help="Who writes candidates.  [default: a provider with a key, else tuner]")  # fmt: skip
@click.option("--model", default=None, help="Model of the provider.")
@click.option("--base-url", default=None, help="A compatible server.")
@click.option("--candidates", "k", type=click.IntRange(1, 64), default=None,
              help="Candidates a round.  [default: 3; cpu 2; external 1]")  # fmt: skip
@limit_options(USUAL)
@click.option(
    "--repairs", type=click.IntRange(0, 10), default=2, help="Repairs of a broken candidate."
)
@click.option("--tunings", type=click.IntRange(0, 64), default=None,
              help="Further points of a passed candidate's TUNABLES.  [default: 3 for a model, else 0]")  # fmt: skip
@click.option("--confirm", type=click.Choice([t.value for t in (Tier.FULL, Tier.PROMOTE)]),
              default="promote", help="Tier a winner must pass in a fresh judge.")  # fmt: skip
@click.option("--start", type=click.Path(exists=True, dir_okay=False), default=None,
              help="A kernel to start from.  [default: the target's seed]")  # fmt: skip
@click.option("--folder", type=click.Path(file_okay=False), default=None,
              help="Where `external` finds candidate.py.")  # fmt: skip
@click.option(
    "--replay",
    "replay_run",
    default=None,
    metavar="RUN",
    help="Run, or folder of a recorded one, whose proposals `replay` takes.",
)
@click.option(
    "--wait/--no-wait", default=True, help="Wait for external proposals, or stop and be resumed."
)
@click.option(
    "--judge-elsewhere", is_flag=True, help="Compile here; verdicts come by `kernelgen record`."
)
@click.option("--seed", type=int, default=0, help="Of the tuner's choices.")
@click.option(
    "--deadline",
    type=click.FloatRange(1),
    default=None,
    help="Seconds a screen may take; full 4 times, promote 8 times that.  [default: 120; cpu 900]",
)
@click.option(
    "--dry-run", is_flag=True, help="Show the first prompt, sizes and a cost estimate; run nothing."
)
@common.db_option
@common.out_option
@common.json_option
def optimize(**asked: Any) -> int:
    """Look for a faster kernel of a target until it has converged or a budget is spent.

    \b
    Examples:
      kernelgen optimize --target kimi-k3-decode
      kernelgen optimize --target kimi-k3-decode --preset tp8 --proposer tuner --rounds 6
      kernelgen optimize --target kimi-k3-kda --proposer anthropic --max-usd 20 --candidates 4
      kernelgen optimize --target kimi-k3-mla --proposer external --no-wait
      kernelgen optimize --target kimi-k3-mla --workers ray --candidates 8

    Exit codes: 0 something better was promoted, 1 nothing better was found, 3 a budget is spent or
    a proposal is awaited, 4 the device or toolchain is missing, 130 interrupted.
    """
    settings = settings_of(asked)
    place = common.place_of(asked["db"], asked["out"])
    if settings.replay:
        settings = replace(settings, replay=_recorded(place, settings.replay))
    if asked["dry_run"]:
        return show_dry_run(place, settings, asked["as_json"])
    console = common.talk()
    console.print(opening(settings, asked["proposer"]), soft_wrap=True, markup=False)
    seats.make_model(settings)  # a missing key shows before anything is started
    check_writable(place)
    run = click.get_current_context().meta[common.RUN] = new_run_id()
    services, settings = _services(place, settings, run, asked["workers"])
    with closing(services):
        create(place, settings, versions(), run)
        console.print(f"run {run}", markup=False)
        with hold(place.workspace.run(run)):
            return _work(place, run, settings, services, asked["as_json"])


@click.command()
@click.argument("run")
@limit_options(KEPT)
@click.option(
    "--no-wait/--wait", "no_wait", default=None, help="Change how external proposals are awaited."
)
@common.workers_option
@common.db_option
@common.out_option
@common.json_option
def resume(**asked: Any) -> int:
    """Go on with a run that was killed, interrupted, is waiting, or has spent a budget.

    No answer that was paid for is asked again and no verdict is lost (docs/model-calls.md says
    exactly what that means). Limits given here replace the run's.

    \b
    Examples:
      kernelgen resume last
      kernelgen resume 01JD3V --rounds 20 --max-usd 40
    """
    place, queries = common.recorded(asked["db"], asked["out"])
    row = queries.run(asked["run"])
    if row["kind"] != "optimize":
        raise common.Usage(f"run {row['id']} is of `{row['kind']}`: only runs of `optimize` go on")
    run = row["id"]
    check_writable(place)
    with hold(place.workspace.run(run)):  # before anything is started or changed
        settings = with_limits(load_settings(place, run), **_limits(asked))
        if asked["no_wait"] is not None:
            settings = replace(settings, wait=not asked["no_wait"])
        common.talk().print(
            f"run {run} goes on: {opening(settings, settings.proposer)}",
            soft_wrap=True,
            markup=False,
        )
        services, settings = _services(place, settings, run, asked["workers"])
        with closing(services):
            save_settings(place, run, settings)
            return _work(place, run, settings, services, asked["as_json"])


def _recorded(place: Place, name: str) -> str:
    """The whole id of a run, for `last` would mean the new one once that is recorded; or the folder that `trajectory`
    wrote. Raises Usage.
    """
    if (Path(name) / trajectory.NAME).is_file():
        return str(Path(name).absolute())
    return str(common.recorded(place.db, place.out)[1].run(name)["id"])


def settings_of(asked: dict[str, Any]) -> RunSettings:
    """Settings from the command line. Raises Usage, UnknownTarget, UnknownOption."""
    target = common.find_target(asked["target"])
    common.check_workers(asked, asked["device"])
    if len(asked["kinds"]) > 1:
        raise common.Usage("a run is judged on one kind of device: give one --kind")
    if asked["workers"] and asked["judge_elsewhere"]:
        raise common.Usage("--judge-elsewhere and --workers exclude each other")
    proposer = asked["proposer"] or ("replay" if asked["replay_run"] else seats.default_proposer())
    if proposer == "replay" and not asked["replay_run"]:
        raise common.Usage("--proposer replay needs --replay RUN")
    options = common.chosen(target, asked["device"], asked)
    target.workload(options)
    k, tunings = asked["k"], asked["tunings"]
    usual = 1 if proposer == "external" else CPU_WIDTH if asked["device"] == "cpu" else 3
    limits = Limits(**{k: v for k, v in _limits(asked).items() if v is not None})
    if asked["rounds"] is None and asked["device"] == "cpu":
        limits = replace(limits, rounds=CPU_ROUNDS)
    if proposer == "external" and asked["rounds"] is None:
        limits = replace(limits, rounds=None, patience=asked["patience"])
    return RunSettings(
        target=common.full_name(asked["target"]), options=options, device=asked["device"],
        arch=asked["arch"] or "", proposer=proposer,
        model=asked["model"] or seats.DEFAULT_MODELS.get(proposer, ""),
        base_url=asked["base_url"] or "", k=k or usual,
        repairs=asked["repairs"],
        tunings=tunings if tunings is not None else (3 if proposer in KEYS else 0),
        confirm=Tier(asked["confirm"]), limits=limits, seed=asked["seed"], wait=asked["wait"],
        folder=str(Path(asked["folder"]).absolute()) if asked["folder"] else "",
        replay=asked["replay_run"] or "", elsewhere=asked["judge_elsewhere"],
        deadline_s=asked["deadline"], start=str(Path(asked["start"]).absolute()) if asked["start"] else "",
        sandbox=asked["sandbox"] or "", trust_this_code=asked["trust_this_code"],
        kind=next(iter(asked["kinds"]), ""),
    )  # fmt: skip


def _limits(asked: dict[str, Any]) -> dict[str, Any]:
    return {
        "rounds": asked["rounds"], "candidates": asked["max_candidates"], "usd": asked["max_usd"],
        "tokens": asked["max_tokens"], "minutes": asked["max_minutes"],
        "gpu_seconds": asked["max_gpu_seconds"], "stop_at": asked["stop_at"],
        "patience": asked["patience"],
    }  # fmt: skip


def opening(s: RunSettings, asked_proposer: str | None) -> str:
    """The first line: what will run, and what was chosen for want of something better."""
    device = s.device
    if s.device == "cpu" and not has_gpu():
        device = "cpu (no GPU here: times are modelled, not measured)"
    proposer = f"{s.proposer} {s.model}".strip()
    if asked_proposer is None and s.proposer == "tuner":
        proposer = "tuner (no key for a model is set)"
    limits = ", ".join(f"{k} {v:g}" for k, v in vars(s.limits).items() if v is not None)
    return (
        f"optimize {s.target}, preset {s.options.preset}, device {device}, proposer {proposer}, "
        f"{s.k} candidates a round; until {limits}"
    )


def _services(place: Place, s: RunSettings, run: str, workers: str) -> tuple[Services, RunSettings]:
    """Running services, and settings with the architecture and kind of the device. Raises Unavailable."""
    wanted = Wanted(
        s.device, s.arch, s.sandbox, s.trust_this_code, s.k, workers=workers,
        kinds=(s.kind,) if s.kind else (), scope=run,
    )  # fmt: skip
    if s.elsewhere:
        settings = replace(s, arch=s.arch or DEFAULT_ARCH)
        judge = FolderJudge(place.workspace.run(run))
        return start_compiler(wanted, place.workspace, judge), settings
    services, facts = start(wanted, place.workspace)
    if services.note:
        words = f"workers {workers}: {services.note}; they judge on {services.kind}"
        common.talk().print(words, soft_wrap=True, markup=False)
    arch = s.arch or str(facts.get("arch") or DEFAULT_ARCH)
    return services, replace(s, arch=arch, kind=services.kind or s.kind)


def _work(place: Place, run: str, s: RunSettings, services: Services, as_json: bool) -> int:
    console = common.talk()
    ledger = make_ledger(place, run, s)
    screen = Screen(console, f"{s.target} on {s.device}, run {run}", ledger)
    queries = Queries(Store(place.db), place.workspace)
    screen.recall(queries.history(run), queries.run(run)["rounds"] + 1)
    session = Session(place, screen)
    with interrupts.draining(session.stop, services.close) as came:
        party = seats.seat(run, s, session, ledger.check)
        with screen:
            ended: Ended = advance(Run(run, s, session, services, party, ledger))
        summary = summarise(place, ended, s)
        common.emit(as_json, summary.data, summary.text)
        return exit_code(ended, came())
