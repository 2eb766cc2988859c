"""What a winner goes through beside its judgement: compute-sanitizer on a replay of its plans, in children of its own.

One child makes the tensors and writes them down; another, confined likewise but allowed to speak to itself, runs the
tools. Nothing here is a reason for `infra`: what could not be done is said under `not verified`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox.artifact import Artifact
from sandbox.jobs import JudgeJob
from sandbox.judge import ncu, sanitize
from sandbox.judge.child import Ended
from sandbox.judge.confine import LEVELS, Room, confine, folders_of
from sandbox.judge.progress import Progress
from sandbox.verdict import Status, Tier, Verdict

if TYPE_CHECKING:
    from sandbox.judge.rounds import Place

DUMP_S = 120.0
Start = Callable[..., Ended]
Maker = Callable[["Place", JudgeJob, Path], None]


@dataclass(frozen=True)
class Tools:
    """`find` gives the program or None; `make` writes a job's tensors into a folder, in a child."""

    find: Callable[[], Path | None] = sanitize.find
    make: Maker | None = None
    total_s: float = sanitize.TOTAL_S
    counters: Callable[[], Path | None] = ncu.find


def wants(job: JudgeJob, verdict: Verdict) -> bool:
    return job.tier is Tier.PROMOTE and verdict.status is Status.PASSED and not _several(verdict)


def _several(verdict: Verdict) -> bool:
    """Launches of several ranks wait for each other: none can be replayed alone under a tool."""
    extra = verdict.device.get("extra")
    return isinstance(extra, Mapping) and int(extra.get("ranks", 1)) > 1


def counts(job: JudgeJob, verdict: Verdict) -> bool:
    """Whether Nsight Compute looks at it: winners, or with KERNELGEN_COUNTERS=all whatever has passed; `off`: none."""
    wanted = os.environ.get("KERNELGEN_COUNTERS", "winners")
    passed = verdict.status is Status.PASSED and job.timeline is None
    passed = passed and not _several(verdict)
    return passed and (wanted == "all" or (wanted == "winners" and job.tier is Tier.PROMOTE))


def count(
    start: Start, place: Place, job: JudgeJob, verdict: Verdict, tools: Tools = Tools()
) -> Verdict:
    """The verdict with what the hardware counted (`profile.ncu`), or with the reason why nothing was."""
    tool = tools.counters()
    if tool is None:
        found: Mapping[str, Any] = {
            "unavailable": "no ncu on this host: time, registers and machine code remain"
        }
        return replace(verdict, profile={**verdict.profile, "ncu": found})
    made = start(lambda p: _dump(job, place, tools.make or write_tensors, p), DUMP_S, None)
    if made.cause != "result" or made.result is None or not made.result.get("ok"):
        why = (made.result or {}).get("why") or made.log.splitlines()[-1:] or made.cause
        found = {"unavailable": f"the replay could not be prepared ({str(why)[:200]})"}
        return replace(verdict, profile={**verdict.profile, "ncu": found})
    found = {"unavailable": "not tried"}
    for level in dict.fromkeys((place.level, len(LEVELS) - 1)):
        at = replace(place, level=level)
        ended = start(lambda p, at=at: _read_counters(at, tool, p), ncu.SECONDS + 30.0, None)
        found = (ended.result or {}).get("counters") or {
            "unavailable": (ended.log.splitlines()[-1:] or [str(ended.cause)])[0][:200]
        }
        if "unavailable" not in found:
            break
    return replace(verdict, profile={**verdict.profile, "ncu": found})


def _read_counters(place: Place, tool: Path, progress: Progress) -> Mapping[str, Any]:
    """In a child: the tool over a replay."""
    _see_one_gpu(place)
    alone = sanitize.own_network()
    room = _room(place, progress, _artifact_folder(place), tool)
    isolation = confine(place.parent, room, talks=True)
    isolation |= {"network": "its own loopback" if alone else "the machine's"}
    progress.confined(isolation)
    progress.enter("ncu")
    return {"counters": ncu.collect(tool, place.scratch), "isolation": isolation}


def check(
    start: Start, place: Place, job: JudgeJob, verdict: Verdict, tools: Tools = Tools()
) -> Verdict:
    """The verdict with what the tools say. `place.scratch` is a folder for this alone."""
    tool = tools.find()
    if tool is None:
        return sanitize.absent(verdict, "no such program on this host")
    made = start(lambda p: _dump(job, place, tools.make or write_tensors, p), DUMP_S, None)
    if made.cause != "result" or made.result is None or not made.result.get("ok"):
        why = (made.result or {}).get("why") or made.log.splitlines()[-1:] or made.cause
        return sanitize.absent(verdict, f"the replay could not be prepared ({str(why)[:200]})")
    found, isolation = _climb_down(start, place, tool, tools.total_s)
    return sanitize.merge(verdict, found, isolation)


def _climb_down(
    start: Start, place: Place, tool: Path, total_s: float
) -> tuple[list[sanitize.Outcome], Mapping[str, Any]]:
    """memcheck under the confinement of judging children; where it cannot work there, under less. The others as it."""
    found: list[sanitize.Outcome] = []
    isolation: Mapping[str, Any] = {}
    for level in dict.fromkeys((place.level, len(LEVELS) - 1)):
        at = replace(place, level=level)
        found, isolation = _tools(start, at, (tool, sanitize.TOOLS[:1]), total_s)
        if found and found[0].state in ("clean", "found"):
            rest, isolation = _tools(start, at, (tool, sanitize.TOOLS[1:]), total_s)
            return [*found, *rest], isolation
    reason = found[0].text if found else "no result"
    return [
        *found,
        *(sanitize.Outcome(t, "failed", f"as memcheck: {reason}") for t in sanitize.TOOLS[1:]),
    ], isolation


def _tools(
    start: Start, place: Place, what: tuple[Path, tuple[str, ...]], total_s: float
) -> tuple[list[sanitize.Outcome], Mapping[str, Any]]:
    ended = start(lambda p: _watch(place, what, total_s, p), total_s + 30.0, None)
    if ended.cause != "result" or ended.result is None:
        said = ended.log.splitlines()[-1:] or [ended.cause]
        return [sanitize.Outcome(t, "failed", str(said[0])[:200]) for t in what[1]], ended.isolation
    return sanitize.from_json(ended.result.get("outcomes")), dict(ended.result.get("isolation", {}))


def _room(
    place: Place, progress: Progress, read: tuple[Path, ...], tool: Path | None = None
) -> Room:
    """`tool`: a program that will be started there, wherever it is installed."""
    keep = (progress.result_fd,)
    run = (tool.resolve().parent,) if tool else ()
    return Room(place.scratch, place.state, place.gpu, read, place.level, keep, run)


def _see_one_gpu(place: Place) -> None:
    if place.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = place.gpu
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"


def _dump(job: JudgeJob, place: Place, make: Maker, progress: Progress) -> Mapping[str, Any]:
    """In a child: the tensors of a plain step, and where the artifact lies."""
    _see_one_gpu(place)
    progress.confined(confine(place.parent, _room(place, progress, folders_of(job))))
    progress.enter("replay tensors")
    try:
        make(place, job, place.scratch)
    except Exception as error:  # told, and the verdict stands as it is
        return {"ok": False, "why": f"{type(error).__name__}: {str(error)[:200]}"}
    return {"ok": True}


def write_tensors(place: Place, job: JudgeJob, folder: Path) -> None:
    """Weights, states and inputs from the reference, as raw files. Raises ValueError where they are too large."""
    import torch

    from sandbox.judge.case import open_case, read_artifact
    from sandbox.judge.dtypes import bits

    device = place.opener(place)
    case = open_case(job, device)
    artifact = read_artifact(job.artifact, case)
    _check_size(artifact)
    w, seed, on = case.workload, case.seeds.of("sanitizer"), device.torch_device
    reference = case.reference
    with torch.inference_mode():
        for made in (
            reference.weights(w, seed, on),
            reference.states(w, seed, on),
            reference.inputs(w, seed, 0, on),
        ):
            for name, tensor in made.items():
                bits(tensor.cpu().contiguous()).numpy().tofile(folder / f"{name}.bin")
    (folder / "artifact").write_text(str(job.artifact))


def _check_size(artifact: Artifact) -> None:
    total = sum(b.nbytes for b in artifact.buffers)
    if total > sanitize.MOST_BYTES:
        raise ValueError(
            f"its buffers have {total >> 20} MB, more than {sanitize.MOST_BYTES >> 20}"
        )


def _watch(
    place: Place, what: tuple[Path, tuple[str, ...]], total_s: float, progress: Progress
) -> Mapping[str, Any]:
    """In a child: the tools, one after the other."""
    _see_one_gpu(place)
    alone = sanitize.own_network()
    isolation = confine(
        place.parent,
        _room(place, progress, _artifact_folder(place), what[0]),
        talks=True,
    )
    isolation |= {"network": "its own loopback" if alone else "the machine's"}
    progress.confined(isolation)
    progress.enter("compute-sanitizer")
    found = sanitize.run(what[0], place.scratch, what[1], total_s)
    return {"outcomes": sanitize.to_json(found), "isolation": isolation}


def _artifact_folder(place: Place) -> tuple[Path, ...]:
    return (Path((place.scratch / "artifact").read_text()),)
