"""`export`: a judged candidate as a bundle for plain torch, or as a patch series for vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from agent import record
from agent.commands import common
from agent.ids import now
from agent.store import Queries


@click.command()
@click.argument("name", metavar="RUN|CANDIDATE")
@click.option("--to", "to", type=click.Choice(["vllm", "bundle"]), required=True,
              help="A patch series, or a package that runs from plain torch.")  # fmt: skip
@click.option("--checkout", type=click.Path(exists=True, file_okay=False, path_type=Path), default=None,
              help="vllm: a clean git checkout of 0.33 or later. A branch is made there.")  # fmt: skip
@click.option("--place", type=click.Choice(["op", "specialized-decode"]), default="op", show_default=True,
              help="vllm: a stand-alone op, or inside the specialised decode of Kimi K3 (SM100 family).")  # fmt: skip
@click.option("--pinned-dsl", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=None,
              help="vllm: Python with the DSL that vLLM pins.  [default: made once in the cache]")  # fmt: skip
@click.option(
    "--no-pinned-dsl", is_flag=True, help="vllm: do not compile with that DSL; the export says so."
)
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), default=None,
              help="Folder of the bundle or the patches.  [default: exports/NAME beside the record]")  # fmt: skip
@click.option("--arch", "archs", multiple=True, type=click.Choice(["sm_90a", "sm_100a", "sm_103a"]),
              help="bundle: compile for these too, unjudged.")  # fmt: skip
@click.option("--no-rebuild", is_flag=True, help="Do not compile again to compare hashes.")
@click.option("--force", is_flag=True, help="Export what nobody has reviewed, and say so in it.")
@common.db_option
@common.json_option
def export(name: str, **asked: Any) -> int:
    """Export a candidate (RUN-NUMBER), or the best of a run, that a person has approved.

    \b
    Examples:
      kernelgen export last --to bundle
      kernelgen export last-3 --to bundle -o my_kernel --arch sm_100a
      kernelgen export last --to vllm --checkout ~/vllm
      kernelgen export last --to vllm --checkout ~/vllm --place specialized-decode

    Nothing is pushed or sent. Kernels that cross layers go as bundles; `--to vllm` says why.
    """
    from agent.export import subject

    place, queries = common.recorded(asked["db"])
    if asked["to"] == "vllm" and asked["checkout"] is None:
        raise common.Usage("--to vllm needs --checkout DIR")
    try:
        found = subject.find(queries, name, asked["force"])
        if found.decision is None:
            _loudly(found.name)
        done = (_bundle if asked["to"] == "bundle" else _vllm)(queries, found, asked)
    except subject.ExportRefused as error:
        raise click.ClickException(str(error)) from error
    record.exported(
        place.db, found.row["run"], found.row["seq"],
        {"kind": asked["to"], "path": done["path"], "date": now()},
    )  # fmt: skip
    lines = [done["path"], *(f"  {x}" for x in done["said"])]
    common.emit(
        asked["as_json"], {"candidate": found.name, "to": asked["to"], **done}, "\n".join(lines)
    )
    return 0


def _loudly(name: str) -> None:
    common.talk().print(
        f"NOBODY HAS REVIEWED {name}. The export says so; do not submit it as it is.",
        style="bold red",
    )


def _output(asked: dict[str, Any], name: str) -> Path:
    chosen: Path | None = asked["output"]
    return (chosen or asked["db"].resolve().parent / "exports" / name).absolute()


def _rebuilt(found: Any, asked: dict[str, Any]) -> Any:
    from agent.export import rebuild

    if asked["no_rebuild"]:
        return rebuild.Rebuilt(None, ("--no-rebuild was given",))
    return rebuild.rebuild(found)


def _bundle(queries: Queries, found: Any, asked: dict[str, Any]) -> dict[str, Any]:
    from agent.export import bundle

    rebuilt = _rebuilt(found, asked)
    folder = _output(asked, found.slug)
    made = bundle.write(queries, found, bundle.Wanted(folder, asked["archs"], rebuilt))
    record = made.manifest["record"]
    said = [
        rebuilt.sentence,
        f"self-check: {record['why'] if not record['part'] else 'recorded, part ' + record['part']}",
        *made.notes,
        f"try it on the GPU: cd {made.folder} && python -m {made.package}",
    ]
    return {
        "path": str(made.folder),
        "package": made.package,
        "said": said,
        "rebuild": rebuilt.to_json(),
    }


def _vllm(queries: Queries, found: Any, asked: dict[str, Any]) -> dict[str, Any]:
    from agent.export import pinned, vllm
    from agent.export.checkout import open_checkout

    # Refusals come before the compile, which takes a while.
    vllm.place_for(found, asked["place"])
    open_checkout(asked["checkout"].resolve())
    suffix = "" if asked["place"] == "op" else f"-{asked['place']}"
    folder = _output(asked, f"{found.slug}-vllm{suffix}")
    vllm.may_write(folder)
    rebuilt = _rebuilt(found, asked)
    pin = pinned.Pinned(None, "--no-pinned-dsl was given")
    if not asked["no_pinned_dsl"]:
        common.talk().print(
            f"compiling with the DSL that vLLM pins; its environment: {asked['pinned_dsl'] or pinned.folder()}"
        )
        pin = pinned.prepare(asked["pinned_dsl"])
    wanted = vllm.Wanted(asked["checkout"].resolve(), folder, rebuilt, asked["place"], pin)
    made = vllm.write(queries, found, wanted)
    return {
        "path": str(made.folder), "branch": made.branch, "patches": list(made.patches),
        "said": list(made.said), "rebuild": rebuilt.to_json(),
    }  # fmt: skip
