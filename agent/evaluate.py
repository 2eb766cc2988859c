"""Nodes `compile`, `judge` and `confirm`: a version's way from source to verdict, through the
sandbox's services.

Failures come back as verdicts. Each result is on disk before the node returns. `confirm` has a
seeming winner judged again by a fresh process at a higher tier: nothing is promoted on one look.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from agent import observe, search
from agent.config import deadline
from agent.models.base import StopRun, Unavailable
from agent.outcome import Ending, Judged, best, end_step, ended, judged
from agent.search import Spent
from agent.state import CandidateState, Deps
from agent.winners import write_winner
from agent.workspace import read_json, write_json
from sandbox.jobs import CompileJob, CompileOutcome, Judge, JudgeJob
from sandbox.strict import Malformed
from sandbox.verdict import Failure, Status, Tier, Verdict

INFRA_RETRIES = 2


def compile(state: CandidateState, deps: Deps) -> dict[str, Any]:
    """Source to artifact."""
    seq, step = state["seq"], state["step"]
    if read_json(deps.files.compiled(seq, step)) is None:
        deps.reporter.status(seq, "compiling")
        _compile(deps, seq, step)
    if read_json(deps.files.compiled(seq, step))["verdict"] is None:
        return {"go": "judge"}
    return {"go": after_failure(state, deps)}


def _compile(deps: Deps, seq: int, step: int) -> None:
    proposal = read_json(deps.files.proposal(seq, step))
    outcome = _infra_retried(deps, compile_job(deps, proposal))
    _seed_must_be_judged(seq, outcome.status, outcome.failure)
    if outcome.artifact is None:
        status = outcome.status or Status.INFRA
        message = outcome.failure.message if outcome.failure else "no artifact and no reason"
        ending = Ending(
            status, "compile", message, outcome.isolation, outcome.seconds, outcome.failure
        )
        end_step(deps, seq, step, ending)
        return
    try:
        artifact = deps.workspace.keep_artifact(outcome.artifact)
    except Malformed as error:
        end_step(
            deps, seq, step, Ending(Status.PLAN_ERROR, "artifact", str(error), outcome.isolation)
        )
        return
    write_json(
        deps.files.compiled(seq, step),
        {
            "artifact": artifact.sha256, "ptx": artifact.ptx_sha256, "verdict": None,
            "declared": {k: list(v) for k, v in outcome.tunables.items()},
            "tunables": dict(artifact.tunables), "isolation": dict(outcome.isolation),
            "seconds": dict(outcome.seconds), "cached": outcome.cached,
        },
    )  # fmt: skip


def _seed_must_be_judged(seq: int, status: Status | None, failure: Failure | None) -> None:
    """Without the seed's verdict there is no run: a machine's failure ends the session, not the run.

    Raises Unavailable, before anything is written, so that a resumed run tries again.
    """
    if seq == 0 and status is Status.INFRA:
        raise Unavailable(
            f"the seed cannot be judged here: {failure.message if failure else status}"
        )


def compile_job(deps: Deps, proposal: Mapping[str, Any]) -> CompileJob:
    task = deps.task
    return CompileJob(
        source=deps.workspace.text(proposal["source"]), target=task.target, workload=task.workload,
        dims=task.dims, buffers=task.buffers, arch=task.arch, tunables=proposal["tunables"],
    )  # fmt: skip


def _infra_retried(deps: Deps, job: CompileJob) -> CompileOutcome:
    outcome = deps.compiler.compile(job)
    for _ in range(INFRA_RETRIES):
        if outcome.artifact is not None or outcome.status is not Status.INFRA:
            break
        outcome = deps.compiler.compile(job)
    return outcome


def after_failure(state: CandidateState, deps: Deps) -> str:
    """Where a version that did not pass goes: repair, the next tuning, or the end."""
    seq = state["seq"]
    rows = judged(deps, seq)
    if any(r.verdict.status is Status.PASSED for r in rows):
        return "tune"
    repairs = state["step"]
    last = rows[-1].verdict.status
    if seq and last in search.REPAIRABLE and repairs < deps.settings.repairs:
        return "repair"
    return "confirm"


def judge(state: CandidateState, deps: Deps) -> dict[str, Any]:
    """Artifact to verdict at the first tier, against the incumbent. Raises Waiting."""
    seq, step = state["seq"], state["step"]
    path = deps.files.judged(seq, step, deps.settings.tier)
    out: dict[str, Any] = {}
    if read_json(path) is None:
        compiled = read_json(deps.files.compiled(seq, step))
        twin = _twin(state, deps, compiled["ptx"])
        if twin is not None:
            whose = "an earlier version" if twin["seq"] == seq else f"candidate {twin['seq']}"
            deps.reporter.status(seq, f"the same machine work as {whose}")
            row = {"verdict": twin["blob"], "duplicate_of": twin["seq"], "gpu_seconds": 0.0}
        else:
            deps.reporter.status(seq, "judging")
            job = judge_job(state, deps, compiled, deps.settings.tier)
            verdict, seconds, stop = _judge(deps, deps.judge, job)
            verdict, more = _observe(deps, (seq, step), job, verdict, deps.judge)
            seconds += more
            if stop and not seq:
                raise StopRun(stop, f"the seed was not judged: {stop}")
            _seed_must_be_judged(seq, verdict.status, verdict.failure)
            out = {"stop": stop} if stop else {}
            row = {"verdict": deps.workspace.put_verdict(verdict), "gpu_seconds": seconds}
        write_json(path, row)
        if twin is None:
            deps.reporter.verdict(seq, step, deps.workspace.verdict(row["verdict"]))
    passed = deps.workspace.verdict(read_json(path)["verdict"]).status is Status.PASSED
    go = ("tune" if seq else "confirm") if passed else after_failure(state, deps)
    return {**out, "go": "confirm" if out else go}


def _twin(state: CandidateState, deps: Deps, ptx: str) -> dict[str, Any] | None:
    """An earlier verdict of the same machine work: never measured twice until noise wins.

    What looked better than an incumbent that has since been replaced is judged again.
    """
    if state["seq"]:
        winner = read_json(deps.files.result(state["incumbent"]))
        if winner["ptx"] == ptx:
            return {"seq": state["incumbent"], "blob": winner["verdict"]}
    found = deps.queries.judged_ptx(deps.task.run, ptx)
    if found is not None and not search.better(deps.workspace.verdict(found["blob"])):
        return found
    for row in judged(deps, state["seq"]):
        compiled = read_json(deps.files.compiled(state["seq"], row.step))
        if compiled.get("ptx") == ptx and row.verdict.status.cacheable:
            return {"seq": state["seq"], "blob": row.blob}
    return None


def judge_job(
    state: CandidateState, deps: Deps, compiled: Mapping[str, Any], tier: Tier
) -> JudgeJob:
    incumbent = None
    if state["seq"]:
        winner = read_json(deps.files.result(state["incumbent"]))
        incumbent = deps.workspace.artifact(winner["artifact"])
    options = deps.settings.options
    return JudgeJob(
        artifact=deps.workspace.artifact(compiled["artifact"]), target=deps.task.target,
        options={
            "preset": options.preset, "layers": options.layers, "rows": options.rows,
            "context": options.context, "extra": dict(options.extra),
        },
        device=deps.task.device, tier=tier, incumbent=incumbent,
        deadline_s=deadline(tier, deps.settings.deadline_s, deps.task.device), compile_isolation=compiled["isolation"],
    )  # fmt: skip


def _judge(deps: Deps, service: Judge, job: JudgeJob) -> tuple[Verdict, float, str]:
    """The verdict, the seconds charged to the GPU budget, and a stop reason or ''."""
    for attempt in range(INFRA_RETRIES + 1):
        try:
            # The lock first: whoever held it has been charged when the budget is looked at.
            with deps.gpu, deps.ledger.reserve(Spent(gpu_seconds=0.0)) as use:
                began = time.monotonic()
                verdict = service.judge(job)
                seconds = float(verdict.seconds.get("held", time.monotonic() - began))
                charged = 0.0 if verdict.status is Status.INFRA else seconds
                use(Spent(gpu_seconds=charged))
        except StopRun as stop:
            ending = Ending(Status.CANCELLED, stop.reason, str(stop), job.compile_isolation)
            return ended(deps, ending), 0.0, stop.reason
        if verdict.status is not Status.INFRA or attempt == INFRA_RETRIES:
            return verdict, charged, ""
    raise AssertionError("unreachable")


def _observe(
    deps: Deps, version: tuple[int, int], job: JudgeJob, verdict: Verdict, service: Judge
) -> tuple[Verdict, float]:
    """The verdict with a timeline where the source marks phases, and the GPU seconds that took."""
    proposal = read_json(deps.files.proposal(*version))
    compile_ = compile_job(deps, proposal)
    if verdict.status is not Status.PASSED or not observe.marks_phases(compile_.source):
        return verdict, 0.0
    deps.reporter.status(version[0], "looking inside")
    before = float(verdict.seconds.get("held", 0.0))
    try:
        with deps.gpu, deps.ledger.reserve(Spent(gpu_seconds=0.0)) as use:
            seen = observe.timeline(verdict, compile_, job, (deps.compiler, service))
            seconds = float(seen.seconds.get("held", 0.0)) - before
            use(Spent(gpu_seconds=seconds))
    except StopRun:
        return verdict, 0.0
    return seen, seconds


def confirm(state: CandidateState, deps: Deps) -> dict[str, Any]:
    """The candidate's last word. Raises Waiting."""
    seq = state["seq"]
    if read_json(deps.files.result(seq)) is None:
        top = best(judged(deps, seq))
        tier = deps.settings.confirm
        out: dict[str, Any] = {}
        if seq and search.better(top.verdict) and top.duplicate_of is None and top.tier != tier:
            deps.reporter.status(seq, f"confirming at {tier}")
            out = _confirm(state, deps, top)
        rows = judged(deps, seq)
        top = next(r for r in reversed(rows) if r.step == top.step)
        write_json(deps.files.result(seq), _result(state, deps, top, rows))
        _save_verified(state, deps)
        deps.reporter.status(seq, "done")
        return {**out, "done": [seq]}
    return {"done": [seq]}


def _save_verified(state: CandidateState, deps: Deps) -> None:
    """A verified gain is in kernels_out at once: its round may never come to its end."""
    seq = state["seq"]
    result = read_json(deps.files.result(seq))
    verdict = deps.workspace.verdict(result["verdict"])
    fit = not seq and verdict.status is Status.PASSED
    if seq and result["duplicate_of"] is None:
        base = deps.workspace.verdict(read_json(deps.files.result(state["incumbent"]))["verdict"])
        fit = search.promotable(base, verdict, deps.settings.confirm)[0]
    if fit:
        write_winner(deps, seq)


def _confirm(state: CandidateState, deps: Deps, top: Judged) -> dict[str, Any]:
    """One more judgement, by a process that has judged nothing before."""
    compiled = read_json(deps.files.compiled(state["seq"], top.step))
    job = judge_job(state, deps, compiled, deps.settings.confirm)
    service = deps.fresh_judge()
    try:
        verdict, seconds, stop = _judge(deps, service, job)
        verdict, more = _observe(deps, (state["seq"], top.step), job, verdict, service)
        seconds += more
    finally:
        service.close()
    row = {"verdict": deps.workspace.put_verdict(verdict), "gpu_seconds": seconds}
    write_json(deps.files.judged(state["seq"], top.step, deps.settings.confirm), row)
    deps.reporter.verdict(state["seq"], top.step, verdict)
    return {"stop": stop} if stop else {}


def _result(state: CandidateState, deps: Deps, top: Judged, rows: list[Judged]) -> dict[str, Any]:
    seq = state["seq"]
    proposal = read_json(deps.files.proposal(seq, top.step))
    first = read_json(deps.files.proposal(seq, 0))
    compiled = read_json(deps.files.compiled(seq, top.step))
    return {
        "seq": seq, "round": state["round"], "step": top.step, "source": top.source,
        "note": proposal["note"] or first["note"], "predicted_gain": first["predicted_gain"],
        "tunables": dict(top.tunables), "declared": compiled["declared"],
        "artifact": top.artifact, "ptx": compiled.get("ptx"), "verdict": top.blob, "duplicate_of": top.duplicate_of,
        "date": deps.now(),
        "judged": [
            {"step": r.step, "blob": r.blob, "tunables": dict(r.tunables), "artifact": r.artifact,
             "duplicate_of": r.duplicate_of}
            for r in rows
        ],
    }  # fmt: skip
