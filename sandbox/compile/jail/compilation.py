"""One job inside the jail: write the source, import it, trace `step` and `prepare`, capture their plans.

Candidate code runs in this process, so nothing here is a check; it only turns a source into data, or into an error.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from . import capture, errors, signature, trace

Blocks = dict[str, bytes]
MODULE = "candidate"


def run(job: Mapping[str, Any], blocks: Mapping[str, bytes]) -> tuple[dict[str, Any], Blocks]:
    """Compile a job; returns the frame to send. A failure of the candidate is in the frame, never raised."""
    seconds: dict[str, float] = {}
    try:
        return _compile(job, blocks, seconds)
    except errors.Refused as refused:
        return {"ok": False, "error": refused.report(), "seconds": seconds}, {}
    except (
        BaseException
    ) as error:  # whatever the candidate raises, also SystemExit, is its own result
        return {"ok": False, "error": errors.report(error, MODULE), "seconds": seconds}, {}


def _compile(
    job: Mapping[str, Any], blocks: Mapping[str, bytes], seconds: dict[str, float]
) -> tuple[dict[str, Any], Blocks]:
    timed = _stopwatch(seconds)
    module = timed("import", lambda: _import(blocks["source"]))
    step = signature.function(module, "step")
    tunables = signature.tunables(module)
    cfg = signature.config(job, tunables)
    tensors = signature.buffers(job, json.loads(blocks["buffers"]))
    tensors += signature.workspace(module, cfg)
    constants, data = signature.constants(module, cfg)
    tensors += constants
    helper = _helper(cfg)
    marks = signature.marks(helper)
    tensors += marks
    ranks = signature.ranks_of(tensors)
    if ranks > 1 and helper:
        text = "marks are for jobs on one GPU: this target holds several"
        raise errors.Refused("rejected", "timeline-ranks", text)
    declared = [b for b in tensors if b.path.startswith(("workspace.", "constants."))]
    copies = signature.on_ranks(declared, ranks)
    tensors += copies
    functions = {"step": step}
    if hasattr(module, "prepare"):
        functions["prepare"] = signature.function(module, "prepare")
    out: Blocks = {
        f"constants.{b.path.split('.', 1)[1]}": x for b, x in zip(constants, data, strict=True)
    }
    for name, function in functions.items():
        plan = _plan(name, function, tensors)
        traced = timed(f"trace_{name}", partial(trace.compile_plan, plan, cfg))
        captures = timed(f"capture_{name}", partial(_capture, traced, plan, job))
        out[f"ptx.{name}"] = traced.ptx.encode()
        out[f"plan.{name}"] = json.dumps([c.launches for c in captures]).encode()
        for i, c in enumerate(captures):
            out[f"params.{name}.{i}"] = b"".join(c.params)
    if helper:
        out["constants.timeline"] = helper.names()
    body = {
        "ok": True,
        "plans": sorted(functions),
        "tunables": {k: list(v) for k, v in tunables.items()},
        "seconds": seconds,
    }
    out["declared"] = json.dumps([b.declaration() for b in (*declared, *copies)]).encode()
    return body, out


def _plan(name: str, function: Any, tensors: list[signature.Tensor]) -> trace.Plan:
    """What to trace, and where each rank has its tensors among those of the job."""
    ranks = signature.ranks_of(tensors)
    seen = [signature.seen_by(tensors, rank, ranks) for rank in range(ranks)]
    used = [(i, dataclasses.replace(tensors[i], path=path)) for i, path in seen[0]]
    kept = [
        k for k, (i, t) in enumerate(used)
        if name == "step" or (signature.visible_to_prepare(t) and not t.path.startswith("peers."))
    ]  # fmt: skip
    places = tuple([[numbers[k][0] for k in kept] for numbers in seen])
    return trace.Plan(name, function, [used[k] for k in kept], places)


def _helper(cfg: Any) -> Any:
    """The module of marks in an instrumented build, else None."""
    if not cfg.timeline:
        return None
    found = sys.modules.get("kernelgen.timeline")
    if found is None:
        text = (
            "an instrumented build was asked for, but the file does not import kernelgen.timeline"
        )
        raise errors.Refused("rejected", "timeline", text)
    return found


def _import(source: bytes) -> Any:
    Path(f"{MODULE}.py").write_bytes(source)
    importlib.invalidate_caches()
    return importlib.import_module(MODULE)


def _capture(
    traced: trace.Traced, plan: trace.Plan, job: Mapping[str, Any]
) -> list[capture.Recording]:
    """The plan's launches, recorded once for each set of sentinel addresses."""
    program = capture.Program(traced, {"sms": int(job["sms"])})
    out = []
    for base, stride in job["sentinels"]:
        recording = capture.Recording()
        for rank, places in enumerate(plan.places):
            one = program.record(
                [base + stride * i for i in places], rank if len(plan.places) > 1 else None
            )
            recording.launches += [[*x, *([rank] if rank else [])] for x in one.launches]
            recording.params += one.params
        out.append(recording)
    return out


def _stopwatch(seconds: dict[str, float]) -> Callable[[str, Callable[[], Any]], Any]:
    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return work()
        finally:
            seconds[name] = round(time.perf_counter() - start, 4)

    return timed
