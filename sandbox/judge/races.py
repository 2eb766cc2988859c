"""Races on the cpu device: one step of a right candidate in another order of blocks and warps, every access followed by
vector clocks.

A missing barrier rarely shows in numbers; here it is proven. Kernels that are too large to be followed are said under
`not_verified`. On cuda this is compute-sanitizer's part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sandbox.devices.base import Device, Refused
from sandbox.judge import rig as rigs
from sandbox.judge.ending import Ended
from sandbox.judge.locate import Where
from sandbox.judge.observe import observe
from sandbox.verdict import Failure, Status

if TYPE_CHECKING:
    from sandbox.judge.trial import Trial

SEED = 1
"""Order of blocks and warps, another than that of the trial."""


def probe(trial: Trial) -> None:
    """Raises Ended if accesses race; Refused or Faulted as devices do."""
    rig = trial.rig
    if rig.device.kind != "cpu":
        return
    device = _exact()
    case = replace(rig.case, device=device)
    try:
        program = device.load(rig.artifact)
        twin = rigs.build(case, rig.artifact, program, "races")
        twin.load_weights({b.name: rig.arena[b.name] for b in case.buffers("weights")})
        seed = case.seeds.of("probe", "races")
        twin.set_states(trial.states(seed))
        where = Where(0, 0, "another order of warps", case.axes)
        moment = observe(twin, trial.inputs(seed, 0), ("random", seed), where)
    except Refused as end:
        if end.status is not Status.UNSUPPORTED:
            raise
        trial.not_verified.append(f"races between warps: {end.failure.message}")
        return
    found = [f for f in program.findings() if f.rule == "race"]
    if found:
        message = f"{found[0].message} ({len(found)} such pairs of accesses)"
        raise Ended(Status.FAULT, Failure("race", message, dict(found[0].where)), trial.result())
    trial.judge(moment, "share")
    trial.checked.append("one step in another order of blocks and warps, no races between warps")


def _exact() -> Device:
    from sandbox.devices.cpu import CpuDevice

    device: Any = CpuDevice(SEED, "exact")
    made: Device = device
    return made
