"""What the hardware would refuse to launch, found before anything runs. Raises Refused.

Whether the kernel itself is one that this device runs is for `translate` to say. Registers are not counted here: how
many a kernel takes is known when it is assembled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from sandbox.artifact import Artifact, Launch, LaunchPlan
from sandbox.devices.base import Refused
from sandbox.devices.cpu.fill import resident
from sandbox.devices.cpu.translate import Translated
from sandbox.lint import lint_ptx, must_fit, polls, stranded
from sandbox.ptx import PtxError
from sandbox.verdict import Failure, Status

MAX_SMEM = 232448


def plan_error(rule: str, message: str) -> Refused:
    return Refused(Status.PLAN_ERROR, Failure(rule, message))


def check_launch(item: Launch, kernel: Translated) -> None:
    """What the hardware would refuse to launch. Raises Refused."""
    threads = item.block[0] * item.block[1] * item.block[2]
    cluster = item.cluster or (1, 1, 1)
    wanted = kernel.entry.directives.get("reqntid")
    if wanted and tuple(wanted) + (1,) * (3 - len(wanted)) != item.block:
        raise plan_error(
            "block-size",
            f"{item.kernel[:80]} requires blocks of {wanted}, the plan has {item.block}",
        )
    most = kernel.entry.directives.get("maxntid")
    if most and threads > int(np.prod(most)):
        raise plan_error(
            "block-size", f"{item.kernel[:80]} allows {most} threads, the plan has {threads}"
        )
    if len(item.params) < kernel.entry.param_bytes:
        raise plan_error(
            "parameters", f"{item.kernel[:80]} reads {kernel.entry.param_bytes} bytes of parameters"
        )
    if any(g % c for g, c in zip(item.grid, cluster, strict=True)):
        raise plan_error("cluster-size", f"grid {item.grid} is no multiple of cluster {cluster}")
    if kernel.static_bytes + item.smem > MAX_SMEM:
        raise plan_error(
            "shared-memory", f"{kernel.static_bytes + item.smem} bytes of shared memory a block"
        )
    if any(o >= len(item.params) for o in item.param_offsets):
        raise plan_error("parameters", "offsets lie outside the parameter block")


def check_text(artifact: Artifact) -> None:
    """What the lint refuses in the PTX of its plans. Raises Refused."""
    for plan in filter(None, (artifact.step, artifact.prepare)):
        try:
            found = lint_ptx(artifact.arch, plan, artifact.instrumented)
        except PtxError as error:
            raise plan_error("ptx", f"the PTX is malformed: {error}") from error
        if found:
            raise Refused(Status.LINT, found[0])


def check_waits(plan: LaunchPlan, kernels: Mapping[str, Translated]) -> None:
    """Grids whose blocks wait for each other are resident whole, as the cuda device asks. Raises Refused."""
    try:
        lost = stranded(plan)
        polling = polls(plan.ptx) if any(x.pdl for x in plan.launches) else {}
    except PtxError as error:
        raise plan_error("ptx", f"the PTX is malformed: {error}") from error
    if lost:
        raise Refused(Status.LINT, lost[0])
    for item in plan.launches:
        if not must_fit(item, polling):
            continue
        threads, blocks = math.prod(item.block), math.prod(item.grid)
        smem = kernels[item.kernel].static_bytes + item.smem
        most = resident(threads, smem, blocks, math.prod(item.cluster or (1, 1, 1)))
        if blocks > most:
            kind = "cooperative" if item.cooperative else "waiting"
            message = f"{item.kernel[:80]}: a {kind} grid of {blocks} blocks, at most {most} are resident at once"
            raise Refused(Status.LINT, Failure("co-residency", message))
