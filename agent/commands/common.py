"""What the commands share: options, output, and the exit code of each failure."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console

from agent.config import BadConfig, default_device
from agent.workspace import Place
from sandbox.strict import Malformed
from targets.base import Options, Target, UnknownOption, UnknownTarget, find

if TYPE_CHECKING:
    from agent.store import Queries

F = TypeVar("F", bound=Callable[..., Any])
SCHEMA = 1
RUN = "kernelgen.run"
"""Key of a context's `meta`: the run that a command began, for one that was called by another."""


class Usage(click.UsageError):
    """Something asked for makes no sense; exit code 2."""


def code_of(error: Exception) -> int | None:
    """The exit code of an expected failure; None for a bug, which deserves its traceback."""
    from agent.locks import RunBusy
    from agent.models.base import AuthError, StopRun, Unavailable
    from agent.store import Corrupt
    from agent.store.queries import NotFound
    from agent.workspace import Missing
    from sandbox.compile_client import NoIsolation
    from sandbox.judge_client import JudgeFailed

    if isinstance(error, click.ClickException):
        return error.exit_code
    if isinstance(error, (UnknownTarget, UnknownOption, NotFound, BadConfig, AuthError)):
        return 2
    if isinstance(error, (Unavailable, NoIsolation, JudgeFailed)):
        return 4
    if isinstance(error, (Corrupt, Missing, Malformed, RunBusy, StopRun, OSError, sqlite3.Error)):
        return 1
    return None


def said(error: Exception) -> str:
    """An expected failure in words: the file first, no numbers of the system."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    name = error.filename
    where = os.fsdecode(name) if isinstance(name, (str, bytes, os.PathLike)) else name
    return error.strerror if where is None else f"{where}: {error.strerror}"


def complain(text: str) -> None:
    """One line on stderr."""
    line = " ".join(text.split())
    click.echo(f"kernelgen: {line}", err=True)


def talk() -> Console:
    """stderr, with NO_COLOR and friends respected by rich; never wider than asked, never markup
    from data.
    """
    return Console(stderr=True, highlight=False)


def emit(as_json: bool, data: dict[str, Any], text: str) -> None:
    """The result, on stdout: one JSON document or text."""
    if as_json:
        click.echo(json.dumps({"schema": SCHEMA, **data}, indent=1, allow_nan=False))
    elif text:
        click.echo(text.rstrip("\n"))


def json_option(f: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")(f)


def db_option(f: F) -> F:
    return click.option(
        "--db", type=click.Path(dir_okay=False, path_type=Path), default=Path("runs.db"),
        envvar="KERNELGEN_DB", show_envvar=True, help="The record; files lie beside it in .kernelgen/.",
    )(f)  # fmt: skip


def out_option(f: F) -> F:
    return click.option(
        "--out", type=click.Path(file_okay=False, path_type=Path), default=None,
        envvar="KERNELGEN_OUT", show_envvar=True,
        help="Winners' folder.  [default: kernels_out beside the record]",
    )(f)  # fmt: skip


def workload_options(f: F) -> F:
    """--target, --preset, --layers, --rows, --context, --verify, --kv, --weights, --option."""
    for option in reversed((
        click.option("--target", required=True, help="A name (see `kernelgen targets`) or path/to/file.py:Name."),
        click.option("--preset", default=None, help="Sizes.  [default: tiny on cpu, tp8 on cuda]"),
        click.option("--layers", type=click.IntRange(1), default=None, help="Number of layers."),
        click.option("--rows", type=click.IntRange(1), default=None, help="Tokens a step (M)."),
        click.option("--context", type=click.IntRange(0), default=None, help="Tokens in the caches."),
        variant_options,
    )):  # fmt: skip
        f = option(f)
    return f


def variant_options(f: F) -> F:
    """--verify, --kv, --weights, --option."""
    for option in reversed((
        click.option("--verify", type=click.IntRange(2), default=None, metavar="Q",
                     help="Verification: Q tokens a request, rows of a request together (option q)."),
        click.option("--kv", default=None, metavar="FORMAT", help="Format of the latent cache (option kv)."),
        click.option("--weights", type=click.Path(exists=True, file_okay=False, resolve_path=True), default=None,
                     metavar="DIR", help="Real weights from *.safetensors (option weights)."),
        click.option("--option", "extra", multiple=True, metavar="NAME=VALUE", help="A target's own option."),
    )):  # fmt: skip
        f = option(f)
    return f


def machine_options(f: F) -> F:
    """--device, --arch, --sandbox, --trust-this-code."""
    for option in reversed((
        click.option("--device", default=None, metavar="cuda|cuda:N|cpu", callback=_device,
                     help="Where kernels run.  [default: cuda if there is one, else cpu]"),
        click.option("--arch", default=None, type=click.Choice(["sm_90a", "sm_100a", "sm_103a"]),
                     help="Architecture to compile for.  [default: the device's]"),
        click.option("--sandbox", default=None, type=click.Choice(["strict", "landlock", "seccomp", "weak", "none"]),
                     help="Isolation of candidates.  [default: the strongest that works]"),
        click.option("--trust-this-code", is_flag=True, help="Allow --sandbox none."),
    )):  # fmt: skip
        f = option(f)
    return f


def _device(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    if value is None:
        return default_device()
    head, _, index = value.partition(":")
    if head not in ("cuda", "cpu") or (index and (head == "cpu" or not index.isdigit())):
        raise click.BadParameter("is cuda, cuda:N or cpu", ctx, param)
    return value


def workers_option(f: F) -> F:
    return click.option(
        "--workers", default="local", envvar="KERNELGEN_WORKERS", show_envvar=True, callback=_workers,
        metavar="local|ray[://HOST:PORT][?judges=N]", show_default=True,
        help="Who compiles and judges: children of this process, or workers on Ray (docs/many-gpus.md).",
    )(f)  # fmt: skip


def kind_option(f: F) -> F:
    return click.option(
        "--kind", "kinds", multiple=True, metavar="NAME",
        help="Kind of device among the workers, such as h200.  [default: the only one there is]",
    )(f)  # fmt: skip


def _workers(ctx: click.Context, param: click.Parameter, value: str) -> str:
    from sandbox.workers.farm import BadAddress, parse

    try:
        return "" if parse(value) is None else value
    except BadAddress as error:
        raise click.BadParameter(str(error), ctx, param) from error


def check_workers(asked: Mapping[str, Any], device: str) -> None:
    """What makes no sense together. Raises Usage."""
    if asked["kinds"] and not asked["workers"]:
        raise Usage("--kind chooses among workers: give --workers too")
    if asked["workers"] and ":" in device:
        raise Usage("workers get their GPUs from Ray: give --device cuda without a number")


def place_of(db: Path, out: Path | None) -> Place:
    return Place(db, out or db.resolve().parent / "kernels_out")


def recorded(db: Path, out: Path | None = None) -> tuple[Place, Queries]:
    """A record that there is; nobody who asks for one makes one. Raises Usage, Corrupt, OSError."""
    from agent.store import Queries, Store

    if not db.exists():
        raise Usage(f"there is no record {db}")
    place = place_of(db, out)
    return place, Queries(Store(place.db), place.workspace)


def chosen(target: Target, device: str, asked: dict[str, Any]) -> Options:
    """The workload options, with the preset that suits the device. Raises Usage."""
    from agent.config import options

    preset = asked["preset"]
    if preset is None:
        usual = "tiny" if device == "cpu" else "tp8"
        preset = usual if usual in target.presets else target.presets[0]
    sizes = {k: asked[k] for k in ("layers", "rows", "context")}
    try:
        return options(preset, sizes, (*asked["extra"], *shorthands(asked)))
    except ValueError as error:
        raise Usage(str(error)) from error


def shorthands(asked: Mapping[str, Any]) -> tuple[str, ...]:
    """Options with a flag of their own, as NAME=VALUE."""
    flags = {"q": "verify", "kv": "kv", "weights": "weights"}
    return tuple(f"{n}={asked[flag]}" for n, flag in flags.items() if asked.get(flag) is not None)


def find_target(name: str) -> Target:
    """Raises UnknownTarget. A user's file is made absolute, so that a run can be resumed from
    elsewhere.
    """
    return find(full_name(name))


def full_name(name: str) -> str:
    path, colon, attribute = name.rpartition(":")
    if colon and path.endswith(".py"):
        return f"{os.path.abspath(path)}:{attribute}"
    return name
