"""Timing where the device models it (cpu): exact by construction, so its intervals have no width.

A modelled time compares candidates on the same device only; it is never called measured.
"""

from __future__ import annotations

from sandbox.artifact import Artifact
from sandbox.devices.base import Program
from sandbox.judge import rig as rigs
from sandbox.judge.ranking import Timed, outcome, workload_timing
from sandbox.judge.report import Draft
from sandbox.judge.rig import Rig
from sandbox.verdict import Outcome, Ratio, Timing, WorkloadTiming


def run(rig: Rig, rival: tuple[Artifact, Program] | None, draft: Draft) -> Timed:
    us = _one_step(rig)
    if not us:
        draft.not_verified.append("time: this device models none for this plan")
        return Timed(Outcome.NOT_TIMED, None)
    ratio = None
    if rival is not None:
        other = _one_step(_prepared(rig, rival))
        ratio = None if not other else Ratio(other / us, other / us, other / us)
    row = workload_timing(rig.case, us, rig.step.launches, rig.case.workload.floor.bytes)
    row["fraction_of_floor_measured"] = None
    timing = Timing(
        "modelled", (WorkloadTiming(**row, speedup_incumbent=ratio, regime="modelled"),)
    )
    draft.not_verified.append("time on a GPU: this one is modelled")
    return Timed(outcome(ratio, None, 0.0), timing)


def _prepared(rig: Rig, rival: tuple[Artifact, Program]) -> Rig:
    case, on = rig.case, rig.case.device.torch_device
    other = rigs.build(case, *rival)
    other.load_weights(case.reference.weights(case.workload, case.seeds.of("modelled"), on))
    return other


def _one_step(rig: Rig) -> float | None:
    """Modelled time of a step on the same states and inputs for every arm."""
    case, w, on = rig.case, rig.case.workload, rig.case.device.torch_device
    seed = case.seeds.of("modelled")
    rig.set_states(case.reference.states(w, seed, on))
    rig.set_inputs(case.reference.inputs(w, seed, 0, on))
    rig.dirty("random", seed)
    rig.launch("modelled time")
    return rig.step.modelled_us()
