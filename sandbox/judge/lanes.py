"""Memory of a timed chain: inputs and outputs of its own for each step, sets of weights and states that rotate.

A step of a chain never sees inputs that another step of it saw. With weights and states below 4 x L2 there are several
sets of them, used in turn, so that they come from memory and not from cache. Everything a chain writes lies in two
allocations, so that one copy restores it and one checksum covers it, guard zones included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from sandbox.judge import poison, vary
from sandbox.judge.arena import Arena
from sandbox.judge.case import Case
from sandbox.judge.digest import checksums
from sandbox.judge.rig import copy_in, place_of
from targets.reference import Tensors

MOST_SETS = 16
ROTATE_OVER_L2 = 4
DRAWN = 8
"""Lanes of a set that the reference draws; it may do so on the host."""


def sets_needed(case: Case) -> int:
    """Copies of weights and states that exceed 4 x L2 together."""
    one = case.group_bytes("weights", "states")
    wanted = ROTATE_OVER_L2 * case.device.facts().l2_bytes * case.ranks
    if one >= wanted or one == 0:
        return 1
    return min(MOST_SETS, -(-wanted // one))


@dataclass
class Lanes:
    """`steps` lanes over `sets` sets; lane i uses set i % sets. Call `refresh` before the first chain."""

    case: Case
    steps: int
    weights: list[Mapping[str, torch.Tensor]]
    states: Arena
    inputs: Arena
    outputs: Arena
    _clean: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    _flips: dict[str, vary.Masks | None] | None = None

    @property
    def sets(self) -> int:
        return len(self.weights)

    def tensors(self, lane: int) -> dict[str, torch.Tensor]:
        """Every buffer of the target for that step, by its own name."""
        s = lane % self.sets
        out = dict(self.weights[s])
        for b in self.case.buffers("states"):
            out[b.name] = self.states[f"{s}/{b.name}"]
        for b in self.case.buffers("inputs"):
            out[b.name] = self.inputs[f"{lane}/{b.name}"]
        for b in self.case.buffers("outputs"):
            out[b.name] = self.outputs[f"{lane}/{b.name}"]
        return out

    def given(self, lane: int) -> Tensors:
        """Copies of the inputs of that lane. They must have been found unmodified (`inputs_digest`)."""
        return {
            b.name: self.case.copy(self.inputs[f"{lane}/{b.name}"])
            for b in self.case.buffers("inputs")
        }

    def refresh(self, round_: int) -> None:
        """New states and inputs for all lanes, new poison for all outputs: drawn anew at first, then by new signs
        where the signs are free (drawing is slow where the reference draws on the host)."""
        flips = self._flips
        if flips is None or flips["inputs"] is None:
            self._draw(round_)
        else:
            for name, arena in (("inputs", self.inputs), ("states", self.states)):
                mask = flips[name]
                if mask is not None:
                    self.restore()
                    vary.flip(arena, mask, self.case.seeds.of("flip", name, round_))
        kind = poison.CYCLE[round_ % 2]
        poison.fill(self.outputs.values(), kind, self.case.seeds.of("lane poison", round_))
        self._clean = {
            "states": tuple(raw.clone() for raw in self.states.raws),
            "outputs": tuple(raw.clone() for raw in self.outputs.raws),
        }

    def _draw(self, round_: int) -> None:
        """States and first lanes from the reference; the others are those with other signs, where signs are free."""
        case, w, on = self.case, self.case.workload, self.case.device.torch_device
        for s in range(self.sets):
            made = case.reference.states(w, case.seeds.of("round", round_, s), on)
            copy_in(_Prefixed(self.states, f"{s}/"), made, case.buffers("states"))
        first = min(self.steps, DRAWN * self.sets)
        self._draw_inputs(round_, range(first))
        if self._flips is None and case.ranks > 1:
            self._flips = {
                "inputs": None,
                "states": None,
            }  # ranks must keep in common what they have in common
        if self._flips is None:
            self._flips = {
                "inputs": vary.free_signs(self.inputs, self.steps) if len(self.inputs) else None,
                "states": vary.free_signs(self.states, self.sets) if len(self.states) else None,
            }
        mask = self._flips["inputs"]
        if mask is None:
            self._draw_inputs(round_, range(first, self.steps))
            return
        for lane in range(first, self.steps):
            source = _Prefixed(self.inputs, f"{lane % first}/")
            copy_in(_Prefixed(self.inputs, f"{lane}/"), source, case.buffers("inputs"))
        vary.flip(self.inputs, mask, case.seeds.of("flip", "drawn", round_))

    def _draw_inputs(self, round_: int, lanes: range) -> None:
        case = self.case
        for lane in lanes:
            seed = case.seeds.of("round", round_, lane % self.sets)
            step, on = lane // self.sets, case.device.torch_device
            inputs = case.reference.inputs(case.workload, seed, step, on)
            copy_in(_Prefixed(self.inputs, f"{lane}/"), inputs, case.buffers("inputs"))

    def restore(self) -> None:
        """States and outputs as `refresh` left them; enqueued, not waited for."""
        for name, arena in (("states", self.states), ("outputs", self.outputs)):
            for raw, clean in zip(arena.raws, self._clean[name], strict=True):
                raw.copy_(clean)

    def digest(self) -> dict[str, int]:
        """Of all that a chain may write, guard zones included."""
        seed = self.case.seeds.of("lane digest")
        raws = {**_named("states", self.states), **_named("outputs", self.outputs)}
        return checksums(raws, seed)

    def inputs_digest(self) -> dict[str, int]:
        return checksums(_named("inputs", self.inputs), self.case.seeds.of("lane inputs"))


def _named(name: str, arena: Arena) -> dict[str, torch.Tensor]:
    return {f"{name}@{rank}": raw for rank, raw in enumerate(arena.raws)}


@dataclass(frozen=True)
class _Prefixed(Mapping[str, torch.Tensor]):
    """The tensors of one lane or set under their own names."""

    arena: Arena
    prefix: str

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.arena[self.prefix + name]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return (n.removeprefix(self.prefix) for n in self.arena if n.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def build(case: Case, main: Mapping[str, torch.Tensor], steps: int) -> Lanes:
    """Allocate lanes; set 0 shares the weights of the correctness run, further sets get weights of their own."""
    sets = sets_needed(case)
    steps = -(-steps // sets) * sets
    weights: list[Mapping[str, torch.Tensor]] = [
        {b.name: main[b.name] for b in case.buffers("weights")}
    ]
    for s in range(1, sets):
        arena = Arena(
            [(b.name, b) for b in case.buffers("weights")], place_of(case, f"weights {s}")
        )
        made = case.reference.weights(
            case.workload, case.seeds.of("lane weights", s), case.device.torch_device
        )
        copy_in(arena, made, case.buffers("weights"))
        weights.append(arena)

    def together(group: str, count: int) -> Arena:
        named = [(f"{i}/{b.name}", b) for i in range(count) for b in case.buffers(group)]
        return Arena(named, place_of(case, f"lanes {group}"), together=True)

    return Lanes(
        case,
        steps,
        weights,
        together("states", sets),
        together("inputs", steps),
        together("outputs", steps),
    )
