"""Arms of a timing run: the candidate or incumbent as a recorded chain of steps (baselines: `sandbox.judge.baselines`).

An arm only runs. The order, the clock and the comparison of outputs are `sandbox.judge.timing`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from sandbox.artifact import Artifact
from sandbox.devices.base import Bound, Program
from sandbox.judge import liveness, poison
from sandbox.judge.arena import Arena
from sandbox.judge.lanes import Lanes
from sandbox.judge.rig import Rig, clear, load_constants, place_of, undefined_of


class Arm(Protocol):
    """`steps` of one call of `replay`. `launches` of one step; 0 where nobody counts."""

    @property
    def name(self) -> str: ...
    @property
    def steps(self) -> int: ...
    @property
    def launches(self) -> int: ...
    def replay(self) -> None: ...


@dataclass
class PlanArm:
    """An artifact on the lanes, with workspace of its own for each set of weights."""

    name: str
    artifact: Artifact
    lanes: Lanes
    bounds: list[Bound]
    scratch: list[Mapping[str, torch.Tensor]]
    arenas: list[Arena]
    chain: Bound | None = None

    @property
    def steps(self) -> int:
        return self.lanes.steps

    @property
    def launches(self) -> int:
        return self.bounds[0].launches

    def step(self, lane: int) -> None:
        """One step as in `replay`: cleared scratch, then the plan's launches."""
        clear(self._scratch(lane, "zero"))
        self.bounds[lane].launch()

    def all_steps(self) -> None:
        for lane in range(self.steps):
            self.step(lane)

    def record(self) -> None:
        """Make the whole chain one replayable unit. Steps have run before: nothing is loaded while recording."""
        device = self.lanes.case.device
        self.all_steps()
        device.synchronize()
        self.chain = device.record(self.all_steps, self.launches * self.steps)

    def replay(self) -> None:
        assert self.chain is not None
        self.chain.launch()

    def dirty(self, seed: int) -> None:
        """Random values in the scratch that a step finds undefined."""
        for lane in range(self.lanes.sets):
            poison.fill(self._scratch(lane, "undefined"), "random", seed + lane)

    def _scratch(self, lane: int, init: str) -> list[torch.Tensor]:
        at = self.scratch[lane % self.lanes.sets]
        return [at[b.name] for b in self.artifact.buffers if (b.init, b.lifetime) == (init, "step")]


def plan_arm(
    name: str, loaded: tuple[Artifact, Program], lanes: Lanes, rig: Rig | None = None
) -> PlanArm:
    """Bind an artifact to every lane; `rig` lends the scratch that it has prepared on set 0."""
    artifact, program = loaded
    own = [(b.name, b) for b in artifact.buffers if b.group in ("workspace", "constants")]
    scratch: list[Mapping[str, torch.Tensor]] = []
    arenas: list[Arena] = []
    for s in range(lanes.sets):
        if s == 0 and rig is not None:
            # progress words in host memory would slow a timed step down: here they stay on the device
            scratch.append(
                {n: _on_device(rig.arena[n], n, lanes.case.device.torch_device) for n, _ in own}
            )
            continue
        arena = Arena(own, place_of(lanes.case, f"{name} scratch {s}"))
        _set_up(arena, loaded, lanes, s)
        arenas.append(arena)
        scratch.append(arena)
    undefined = undefined_of(artifact)
    bounds = [
        program.bind("step", {**lanes.tensors(i), **scratch[i % lanes.sets]}, undefined)
        for i in range(lanes.steps)
    ]
    return PlanArm(name, artifact, lanes, bounds, scratch, arenas)


def _on_device(t: torch.Tensor, name: str, device: str) -> torch.Tensor:
    return torch.zeros_like(t, device=device) if name == liveness.NAME else t


def _set_up(arena: Arena, loaded: tuple[Artifact, Program], lanes: Lanes, s: int) -> None:
    """Constants, persistent scratch and preparation on the weights of set `s`."""
    artifact, program = loaded
    load_constants(arena, artifact)
    for b in artifact.buffers:
        if b.group == "workspace" and b.init == "zero":
            clear([arena[b.name]])
        elif b.group == "workspace":
            poison.fill([arena[b.name]], "random", lanes.case.seeds.of("arm scratch", b.name))
    if artifact.prepare is not None:
        fresh = frozenset(b.name for b in artifact.buffers if b.init == "undefined")
        program.bind("prepare", {**lanes.weights[s], **arena}, fresh).launch()
        lanes.case.device.synchronize()
