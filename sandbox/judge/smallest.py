"""The smallest problem on which a wrong candidate is still wrong, among those that its target offers.

It explains a failure that has been found; it decides nothing, and takes a bounded time.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from sandbox.devices.base import Faulted, Refused
from sandbox.judge.checks import Checker, Moment
from sandbox.judge.observe import observe
from sandbox.verdict import Failure

if TYPE_CHECKING:
    from sandbox.judge.trial import Trial

MOST_S = 8.0


def shrunk(trial: Trial, m: Moment, failure: Failure) -> Failure:
    """The failure with `where["smallest"]`, or as it is where the target offers nothing or nothing smaller fails."""
    offer = getattr(trial.rig.case.reference, "smaller", None)
    if offer is None:
        return failure
    case, until = trial.rig.case, time.monotonic() + MOST_S
    states = {b.name for b in case.buffers("states")}
    given = dict(m.given)
    for label, tensors in offer(case.workload, given):
        if time.monotonic() > until:
            break
        trial.rig.set_states({n: tensors[n] for n in states})
        inputs = {b.name: tensors[b.name] for b in case.buffers("inputs")}
        where = replace(m.where, phase=f"{m.where.phase}, {label}")
        try:
            found = Checker(case).check(
                observe(trial.rig, inputs, ("random", case.seeds.of("smaller", label)), where),
                "alone",
            )
        except (Faulted, Refused):
            break
        if found is not None:
            message = f"{failure.message}; smallest case found that fails: {label}"
            return Failure(failure.rule, message, {**failure.where, "smallest": label})
    return failure
