"""`judge`: artifacts that were compiled anywhere, or the judge itself. `record`: verdicts from anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from agent import elsewhere, offline
from agent import record as writer
from agent.commands import common
from agent.commands.evaluate import TIERS
from agent.config import deadline
from agent.elsewhere import verdict_name
from agent.store import Queries
from agent.store.store import JudgedRow
from agent.views import verdict_lines
from agent.workspace import Place, write_bytes
from sandbox import artifact_store
from sandbox.jobs import JudgeJob
from sandbox.strict import Malformed
from sandbox.verdict import Status, Tier, Verdict


@click.command()
@click.argument("folders", nargs=-1, metavar="DIR...",
                type=click.Path(exists=True, file_okay=False, path_type=Path))  # fmt: skip
@click.option("--target", default=None, metavar="FILE.py:NAME",
              help="An own target that the artifacts may name; else only built-in targets are judged.")  # fmt: skip
@click.option("--tier", type=TIERS, default="screen", help="How thoroughly to judge.")
@click.option("--device", default=None, metavar="cuda|cuda:N|cpu", callback=common._device,
              help="Where kernels run.  [default: cuda if there is one, else cpu]")  # fmt: skip
@common.workers_option
@common.kind_option
@click.option("--against", type=click.Path(exists=True, file_okay=False, path_type=Path), default=None,
              help="An incumbent's artifact to be timed against.")  # fmt: skip
@click.option("--timeline", type=click.Path(exists=True, file_okay=False, path_type=Path), default=None,
              help="A build of the one artifact with marks: nothing is judged, both are run and compared, and the "
                   "waterfall comes out.")  # fmt: skip
@click.option(
    "--jail",
    default="",
    help="Tier of isolation it was compiled in, if you know it; else it counts as unjailed.",
)
@click.option(
    "--deadline",
    type=click.FloatRange(1),
    default=None,
    help="Seconds a screen may take; full 4 times, promote 8 times that.  [default: 120; cpu 900]",
)
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), default=None,
              help="Write <artifact>-<tier>.json here; of a self-test, keep kernels and rows here.")  # fmt: skip
@click.option("--self-test", is_flag=True, help="Score the judge with planted kernels instead.")
@click.option("--only", multiple=True, metavar="CLASS|NAME|PART",
              help="Of the planted kernels these only; may be repeated.")  # fmt: skip
@click.option("--shard", default=None, metavar="I/N",
              help="Of the planted kernels the I-th of N parts only.")  # fmt: skip
@click.option("--reports", multiple=True, metavar="FILE",
              type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Judge none: sum up what --json wrote of parts; may be repeated.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(0), default=None,
              help="Begin no planted kernel after that time; the rest counts as not reached. "
                   "0 with -o only compiles.")  # fmt: skip
@click.option("--resume", is_flag=True,
              help="Go on with a self-test: rows that -o holds of the same kernels and device count.")  # fmt: skip
@click.option("--preset", default="tiny", show_default=True, help="Sizes of the planted kernels.")
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=None,
    help="Planted kernels at a time; on a GPU they share it.  [default: cores; on a GPU 1]",
)
@common.json_option
def judge(folders: tuple[Path, ...], **asked: Any) -> int:
    """Judge artifact folders: target and workload come from the artifact, which is read as hostile
    input. A target is trusted code, so an artifact that names a file as its target is judged only
    if --target names that file too.

    \b
    Examples:
      kernelgen judge out/3f9c... --tier full
      kernelgen judge .kernelgen/artifacts/3f9c... --against .kernelgen/artifacts/77ab... -o
      verdicts
      kernelgen judge --self-test --device cpu --only barrier --only mla

    Exit code 0 only if every artifact passed. With --self-test: kernels with known mistakes, attempts to
    deceive and right but unusual kernels are compiled in the jail and judged up to tier promote; prints
    recall by class and the rate of false rejects. Exit code 0 only if every mistake was caught but for
    those declared and measured inside the noise band, and no right kernel was rejected.
    """
    if asked["self_test"] == bool(folders):
        raise common.Usage("give artifacts' folders, or --self-test")
    if asked["self_test"]:
        from agent.commands.self_test import self_test

        if asked["workers"]:
            raise common.Usage(
                "the self-test runs on this machine: --shard divides it between machines"
            )
        return self_test(asked)
    from agent.services import Wanted, judging

    if asked["timeline"] and (len(folders) > 1 or asked["against"]):
        raise common.Usage("--timeline looks at one artifact, against none")
    common.check_workers(asked, asked["device"])
    jobs = [_job(folder, asked) for folder in folders]
    verdicts: list[Verdict] = []
    with judging(
        Wanted(asked["device"], workers=asked["workers"], kinds=asked["kinds"])
    ) as judge_all:
        for job, verdict in judge_all(jobs):
            verdicts.append(verdict)
            if asked["output"]:
                text = json.dumps(verdict.to_json(), indent=1, sort_keys=True, allow_nan=False)
                name = verdict_name(
                    verdict.artifact, str(verdict.tier), asked["timeline"] is not None
                )
                write_bytes(asked["output"] / name, text.encode())
            if not asked["as_json"]:
                click.echo("\n".join(verdict_lines(job.artifact.name[:16], verdict)))
    if asked["as_json"]:
        common.emit(True, {"results": [v.to_json() for v in verdicts]}, "")
    return 0 if all(v.status is Status.PASSED for v in verdicts) else 1


def _job(folder: Path, asked: dict[str, Any]) -> JudgeJob:
    """Raises Malformed, which names the folder, UnknownTarget, UnknownOption."""
    try:
        artifact = artifact_store.load(folder)
        offline.only_trusted(artifact, asked["target"] and common.full_name(asked["target"]))
        options = offline.options_of(artifact)
    except Malformed as error:
        raise Malformed(f"{folder}:", f"{error}{_inside(folder)}") from error
    for other in ("against", "timeline"):
        if asked[other] is not None:
            try:
                artifact_store.load(asked[other])
            except Malformed as error:
                raise Malformed(f"{asked[other]}:", str(error)) from error
    return JudgeJob(
        artifact=folder.resolve(), target=artifact.target, options=offline.options_json(options),
        device=asked["device"], tier=Tier(asked["tier"]),
        incumbent=asked["against"].resolve() if asked["against"] else None,
        timeline=asked["timeline"].resolve() if asked["timeline"] else None,
        deadline_s=deadline(Tier(asked["tier"]), asked["deadline"], asked["device"]),
        compile_isolation={"tier": asked["jail"]} if asked["jail"] else {},
    )  # fmt: skip


def _inside(folder: Path) -> str:
    """A hint for who gives `compile -o`'s folder instead of the artifact's own, which lies in it."""
    if (folder / artifact_store.MANIFEST).exists():
        return ""
    found = sorted(p.parent for p in folder.glob(f"*/{artifact_store.MANIFEST}"))
    return f"; did you mean {found[0]}?" if found else ""


@click.command()
@click.argument("run")
@click.argument("files", nargs=-1, required=True, metavar="VERDICT...",
                type=click.Path(exists=True, dir_okay=False, path_type=Path))  # fmt: skip
@common.db_option
@common.json_option
def record(run: str, files: tuple[Path, ...], db: Path, as_json: bool) -> int:
    """Bring in verdicts judged on another host, matched by artifact hash.

    A verdict that the run is waiting for lets `kernelgen resume RUN` go on. A further verdict of an
    artifact that the run has already judged is kept beside the first, as evidence: shown in its place
    if the kernel did not pass, or was timed at the same tier or a higher one.

    \b
    Examples:
      kernelgen record last verdicts/3f9c...-screen.json
    """
    place, queries = common.recorded(db)
    row = queries.run(run)
    folder = place.workspace.run(row["id"])
    verdicts = [elsewhere.read_verdict(f) for f in files]
    done = []
    for path, verdict in zip(files, verdicts, strict=True):
        waited = elsewhere.accept(folder, verdict)
        if not waited:
            _beside(place, queries, row["id"], path, verdict)
        done.append(
            {
                "file": str(path),
                "artifact": verdict.artifact,
                "status": str(verdict.status),
                "awaited": waited,
            }
        )
    lines = [
        f"{d['file']}: {d['status']}, {'awaited' if d['awaited'] else 'kept as evidence'}"
        for d in done
    ]
    common.emit(as_json, {"run": row["id"], "recorded": done}, "\n".join(lines))
    return 0


def _beside(place: Place, queries: Queries, run: str, path: Path, verdict: Verdict) -> None:
    """Raises Malformed if the run never had that artifact."""
    owner = queries.artifact_owner(run, verdict.artifact)
    if owner is None:
        raise Malformed(
            path.name,
            f"is about artifact {verdict.artifact[:12] or '(none)'}, which run {run} does not have",
        )
    blob = queries.workspace.put_verdict(verdict)
    tunables = json.loads(owner["judged_tunables"] or "{}")
    judged = JudgedRow(owner["step"], verdict, blob, tunables, verdict.artifact, "imported")
    writer.evidence(place, run, owner["seq"], judged)
