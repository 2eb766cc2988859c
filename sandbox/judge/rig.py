"""A loaded artifact on buffers of its own: weights, preparation, launches with fresh poison, integrity of what it may
not write. It runs the candidate and copies what it left; it never holds an expected value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from sandbox.artifact import Artifact, Buffer
from sandbox.devices.base import Bound, Device, Faulted, Program
from sandbox.judge import liveness, poison
from sandbox.judge.arena import Arena, Place
from sandbox.judge.case import Case
from sandbox.judge.digest import checksums
from sandbox.judge.poison import Poison
from sandbox.verdict import Failure, Status
from targets.reference import Tensors

GUARD_CUDA = 64 << 10
GUARD_CPU = 4 << 10
READ_ONLY = ("inputs", "weights", "constants")


def place_of(case: Case, label: str) -> Place:
    """Guard size by device, placement and guard bytes by secret seed."""
    guard = GUARD_CUDA if case.device.torch_device != "cpu" else GUARD_CPU
    choose = case.seeds.chooser("place", label)
    each = tuple(map(case.device_of, range(case.ranks))) if case.ranks > 1 else ()
    return Place(case.device.torch_device, guard, choose, case.seeds.of("guard", label), each)


def undefined_of(artifact: Artifact) -> frozenset[str]:
    """Buffers that a step finds with no content it may use."""
    return frozenset(
        b.name for b in artifact.buffers
        if b.group == "outputs" or (b.init == "undefined" and b.lifetime == "step")
    )  # fmt: skip


@dataclass
class Rig:
    """`arena` holds every buffer of the artifact. Use: `load_weights`, then `set_states`, `set_inputs`, `launch`."""

    case: Case
    artifact: Artifact
    program: Program
    arena: Mapping[str, torch.Tensor]
    arenas: tuple[Arena, ...]
    step: Bound
    launches: int = 0
    _sums: dict[str, int] = field(default_factory=dict)

    @property
    def device(self) -> Device:
        return self.case.device

    def names(self, *groups: str) -> list[str]:
        return [b.name for b in self.artifact.buffers if b.group in groups]

    def workspace(self, init: str, lifetime: str) -> list[torch.Tensor]:
        return [
            self.arena[b.name]
            for b in self.artifact.buffers
            if (b.init, b.lifetime) == (init, lifetime)
        ]

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy weights in, then as `renew`. Raises Faulted."""
        copy_in(self.arena, weights, self.case.buffers("weights"))
        self.renew()

    def renew(self) -> None:
        """The weights have changed: set up persistent scratch and run `prepare`. Raises Faulted."""
        self._remember(READ_ONLY)
        self.reset_workspace()
        if self.artifact.prepare is not None:
            fresh = frozenset(b.name for b in self.artifact.buffers if b.init == "undefined")
            lasting = {b.name for b in self.artifact.buffers if b.lifetime == "persistent"}
            seen = {n: self.arena[n] for n in {*self.names("weights", "constants"), *lasting}}
            self.program.bind("prepare", seen, fresh).launch()
            self.device.synchronize()
            self.check_guards("prepare")
            self.check_integrity("prepare")

    def reset_workspace(self) -> None:
        """Persistent scratch as before `prepare`."""
        for t in self.workspace("zero", "persistent"):
            t.view(-1).view(torch.uint8).zero_()
        poison.fill(
            self.workspace("undefined", "persistent"), "random", self.case.seeds.of("persistent")
        )

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        copy_in(self.arena, states, self.case.buffers("states"))

    def set_inputs(self, inputs: Mapping[str, torch.Tensor]) -> None:
        copy_in(self.arena, inputs, self.case.buffers("inputs"))
        self._remember(("inputs",))

    def dirty(self, kind: Poison, seed: int) -> None:
        """Poison outputs and scratch as before a step."""
        poison.fill([self.arena[n] for n in self.names("outputs")], kind, seed)
        self.dirty_scratch(kind, seed + 1000)

    def dirty_scratch(self, kind: Poison, seed: int) -> None:
        """Poison undefined step scratch; clear the step scratch that is declared zero."""
        poison.fill(self.workspace("undefined", "step"), kind, seed)
        clear(self.workspace("zero", "step"))

    def launch(self, phase: str) -> None:
        """One step, waited for; then guards, inputs, weights and constants are checked. Raises Faulted."""
        if liveness.NAME in self.arena:  # what the step before wrote says nothing of this one
            clear([self.arena[liveness.NAME]])
        self.step.launch()
        self.launches += 1
        self.device.synchronize()
        self.check_guards(phase)

    def copy_out(self, *groups: str) -> Tensors:
        return {b.name: self.case.copy(self.arena[b.name]) for b in self.case.buffers(*groups)}

    def check_guards(self, phase: str) -> None:
        for arena in self.arenas:
            for zone in arena.broken():
                side = "before the start" if zone.offset < 0 else "beyond the end"
                message = f"{zone.buffer}: memory {side} was written, {abs(zone.offset)} bytes from the edge ({phase})"
                where = {"buffer": zone.buffer, "offset": zone.offset, "phase": phase}
                raise Faulted(Status.CHEAT, Failure("guard", message, where))

    def check_integrity(self, phase: str, groups: Iterable[str] = READ_ONLY) -> None:
        """Read-only buffers hold what the judge put there."""
        now = self._sums_of(groups)
        for name, value in now.items():
            if value != self._sums[name]:
                message = f"{name} was modified; {name.split('.', 1)[0]} are read-only ({phase})"
                raise Faulted(
                    Status.CHEAT, Failure("read-only", message, {"buffer": name, "phase": phase})
                )

    def _sums_of(self, groups: Iterable[str]) -> dict[str, int]:
        seed = self.case.seeds.of("checksum")
        return checksums({n: self.arena[n] for n in self.names(*groups)}, seed)

    def _remember(self, groups: Iterable[str]) -> None:
        self._sums.update(self._sums_of(groups))


def clear(tensors: Iterable[torch.Tensor]) -> None:
    for t in tensors:
        t.view(-1).view(torch.uint8).zero_()


def copy_in(
    arena: Mapping[str, torch.Tensor], source: Mapping[str, torch.Tensor], buffers: Iterable[Buffer]
) -> None:
    """Every buffer from the reference's tensors; shape and dtype must be as declared."""
    for b in buffers:
        given = source[b.name]
        if given.dtype != arena[b.name].dtype or given.shape != arena[b.name].shape:
            raise ValueError(f"the reference gives {b.name} as {given.dtype} {list(given.shape)}")
        arena[b.name].copy_(given)


def load_constants(arena: Mapping[str, torch.Tensor], artifact: Artifact) -> None:
    for name, data in artifact.constants.items():
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        arena[name].view(-1).view(torch.uint8).copy_(raw)


def build(case: Case, artifact: Artifact, program: Program, label: str = "main") -> Rig:
    """Allocate every buffer by itself and bind the step. Raises Refused or Faulted."""
    arena = Arena([(b.name, b) for b in artifact.buffers], place_of(case, label))
    load_constants(arena, artifact)
    seen = with_progress(arena, case, artifact)
    step = program.bind("step", seen, undefined_of(artifact))
    return Rig(case, artifact, program, seen, (arena,), step)


def with_progress(
    arena: Mapping[str, torch.Tensor], case: Case, artifact: Artifact
) -> Mapping[str, torch.Tensor]:
    """The arena, with the progress words of a candidate that writes some where a watchdog can read them."""
    place = getattr(case.device, "kernel_progress", None)
    declared = next((b for b in artifact.buffers if b.name == liveness.NAME), None)
    if place is None or declared is None or case.device.kind != "cuda":
        return arena
    if declared.dtype != "i32" or declared.shape[1:] != (liveness.COLUMNS,):
        return arena
    words = place(declared.shape[0])
    return arena if words is None else {**arena, liveness.NAME: words}
