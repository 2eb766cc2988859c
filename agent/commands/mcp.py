"""`mcp`: coding agents drive a run, over stdio or over HTTP on this machine."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import click

from agent import interrupts
from agent.commands import common
from agent.commands.optimize import OPEN, limit_options, opening, settings_of
from agent.config import RunSettings, settings_from_json
from agent.mcp import stdio
from agent.mcp.driver import Driver, Opened
from agent.mcp.http import HOST, PATH, SHORTEST_TOKEN, TOKEN_VARIABLE, bind, serve
from agent.mcp.server import build
from agent.mcp.stdio import Server
from agent.runner import create, load_settings, save_settings, with_limits
from agent.services import DEFAULT_ARCH, Wanted, start
from agent.store import Queries, Store
from agent.versions import versions
from agent.workspace import Place

LIMITS = {
    "rounds": "rounds", "max_candidates": "candidates", "max_usd": "usd", "max_tokens": "tokens",
    "max_minutes": "minutes", "max_gpu_seconds": "gpu_seconds", "stop_at": "stop_at",
    "patience": "patience",
}  # fmt: skip
# What `optimize` asks besides and an author outside has no use for.
REST: dict[str, Any] = {
    "proposer": "external", "model": None, "base_url": None, "k": None, "repairs": 0,
    "tunings": None, "confirm": "promote", "replay_run": None, "wait": True,
    "judge_elsewhere": False, "seed": 0, "workers": "", "kinds": (),
}  # fmt: skip


@dataclass(frozen=True)
class Wish:
    """What is to be opened. `run` None: one of these settings, `new` whatever there is."""

    run: str | None
    settings: RunSettings
    new: bool = False
    only_submit: bool = False


def workload_options(f: Any) -> Any:
    """As of `optimize`, but none is required: a run brings its own."""
    for option in reversed((
        click.option("--target", default=None, help="Go on with its latest run of these settings, or begin one."),
        click.option("--preset", default=None, help="Sizes.  [default: tiny on cpu, tp8 on cuda]"),
        click.option("--layers", type=click.IntRange(1), default=None, help="Number of layers."),
        click.option("--rows", type=click.IntRange(1), default=None, help="Tokens a step (M)."),
        click.option("--context", type=click.IntRange(0), default=None, help="Tokens in the caches."),
        click.option("--option", "extra", multiple=True, metavar="NAME=VALUE", help="A target's own option."),
        click.option("--start", type=click.Path(exists=True, dir_okay=False), default=None,
                     help="A kernel to start from.  [default: the target's seed]"),
        click.option("--folder", type=click.Path(file_okay=False), default=None,
                     help="Where submissions lie.  [default: in the run's folder]"),
        click.option("--deadline", type=click.FloatRange(1), default=None,
                     help="Seconds a screen may take."),
    )):  # fmt: skip
        f = option(f)
    return f


@click.command("mcp")
@click.argument("run", required=False)
@workload_options
@common.machine_options
@limit_options(OPEN)
@click.option("--new", is_flag=True, help="Begin a run even if there is one already.")
@click.option("--http", is_flag=True, help="Streamable HTTP on this machine instead of stdio.")
@click.option("--port", type=click.IntRange(0, 65535), default=8809, help="0 takes a free one.")
@click.option("--only-submit", is_flag=True,
              help="Judge nothing here: `optimize` or `resume` works on the run.")  # fmt: skip
@common.db_option
@common.out_option
def mcp_(**asked: Any) -> int:
    """Let coding agents read the task, hand in kernels and get verdicts, as an MCP server.

    Several servers may share a run: whichever is free judges what was handed in. With --http the
    token is that of KERNELGEN_MCP_TOKEN, or a new one; it is printed with the address.

    \b
    Examples:
      kernelgen mcp --target kimi-k3-kda --preset tp8
      kernelgen mcp last --max-candidates 40
      KERNELGEN_MCP_TOKEN=$(openssl rand -hex 16) kernelgen mcp last --http
    """
    if bool(asked["run"]) == bool(asked["target"]):
        raise common.Usage("name a RUN, or --target for one")
    place = common.place_of(asked["db"], asked["out"])
    run, settings = found(place, asked)
    # Stdout may be the protocol's: all talk goes to stderr.
    common.talk().print(
        f"run {run} goes on" if run else opening(settings, "external"), markup=False, soft_wrap=True
    )
    wanted = Wish(run, settings, asked["new"], asked["only_submit"])
    driver = Driver(place, lambda: begin(place, wanted))
    server = build(driver)
    try:
        if asked["http"]:
            _http(driver, server, asked["port"])
        else:
            stdio.serve(server, driver.start)
    except KeyboardInterrupt:
        common.complain(interrupts.DRAINING)
        return 130
    finally:
        driver.stop()
        driver.join()
    return 0


def _http(driver: Driver, server: Server, port: int) -> None:
    """Raises Usage, OSError (the port is taken)."""
    token = token_of(os.environ.get(TOKEN_VARIABLE))
    with bind(port) as bound:
        click.echo(f"http://{HOST}:{bound.getsockname()[1]}{PATH}")
        click.echo(f"Authorization: Bearer {token}")
        driver.start()
        serve(server, bound, token)


def token_of(given: str | None) -> str:
    """Raises Usage for one that is easily guessed."""
    if given is None:
        return secrets.token_urlsafe(32)
    if len(given) < SHORTEST_TOKEN or not given.isascii() or given.split() != [given]:
        raise common.Usage(
            f"{TOKEN_VARIABLE} needs {SHORTEST_TOKEN} ASCII characters or more, without spaces"
        )
    return given


def found(place: Place, asked: dict[str, Any]) -> tuple[str | None, RunSettings]:
    """The run that is meant, or None and the settings of one to begin. Raises Usage, NotFound."""
    if asked["run"]:
        if not place.db.exists():
            raise common.Usage(f"there is no record {place.db}")
        row = Queries(Store(place.db), place.workspace).run(asked["run"])
        if row["proposer"] != "external":
            raise common.Usage(f"run {row['id']} is driven by {row['proposer']}, not from outside")
        run, settings = str(row["id"]), load_settings(place, row["id"])
    else:
        wanted = settings_of({**asked, **REST})
        latest = None if asked["new"] else latest_run(place, wanted)
        if latest is None:
            return None, wanted
        run, settings = latest, load_settings(place, latest)
    limits = {ours: asked[theirs] for theirs, ours in LIMITS.items()}
    return run, with_limits(settings, **limits)


def latest_run(place: Place, wanted: RunSettings) -> str | None:
    """The latest run of the same settings, ended or not: starting a server again buys no second
    budget. Limits may differ, and an architecture that was not asked for.
    """
    if not place.db.exists():
        return None
    for row in Queries(Store(place.db), place.workspace).runs(wanted.target):
        if row["proposer"] != "external" or row["kind"] != "optimize":
            continue
        theirs = settings_from_json(json.loads(row["settings"]))
        alike = replace(wanted, limits=theirs.limits, arch=wanted.arch or theirs.arch)
        if alike == theirs:
            return str(row["id"])
    return None


def begin(place: Place, w: Wish) -> Opened:
    """Services and the run. Raises Unavailable."""
    if w.only_submit or w.settings.elsewhere:
        arch = w.settings.arch or DEFAULT_ARCH
        return Opened(ensure(place, w, arch)[0], None)
    s = w.settings
    wanted = Wanted(s.device, s.arch, s.sandbox, s.trust_this_code, s.k)
    services, facts = start(wanted, place.workspace)
    try:
        run, changed = ensure(place, w, s.arch or str(facts.get("arch") or DEFAULT_ARCH))
    except BaseException:
        services.close()
        raise
    return Opened(run, services, reopen=changed)


def ensure(place: Place, w: Wish, arch: str) -> tuple[str, bool]:
    """The run, begun if need be, and whether its limits were changed. One process at a time: of
    two servers started together one begins the run and the other joins it.
    """
    with _alone(place):
        run = w.run if w.run or w.new else latest_run(place, w.settings)
        if run is None:
            return create(place, replace(w.settings, arch=arch), versions()), False
        if w.run is None or w.settings == load_settings(place, run):
            return run, False
        save_settings(place, run, w.settings)
        return run, True


@contextmanager
def _alone(place: Place) -> Iterator[None]:
    root = place.workspace.root
    root.mkdir(parents=True, exist_ok=True)
    fd = os.open(root / "mcp.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
