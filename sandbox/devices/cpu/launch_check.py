"""What the hardware would refuse to launch, found before anything runs. Raises Refused.

Whether the kernel itself is one that this device runs is for `translate` to say.
"""

from __future__ import annotations

import numpy as np

from sandbox.artifact import Launch
from sandbox.devices.base import Refused
from sandbox.devices.cpu.translate import Translated
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
