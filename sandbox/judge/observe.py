"""One observed launch: inputs in, poison on, launch, integrity, copies of what it left. The oracle comes later.

It launches and copies; it compares only what no launch may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sandbox.judge import poison
from sandbox.judge.checks import Moment
from sandbox.judge.dtypes import bits, same_bits
from sandbox.judge.locate import Where, first_index, spell
from sandbox.judge.poison import Poison
from sandbox.judge.rig import Rig
from sandbox.verdict import Failure
from targets.reference import Tensors

KEPT_REPEATS = 4


@dataclass(frozen=True)
class Repeats:
    """How many there were, how many left other bits than the first run, and the first few as moments."""

    count: int
    differing: int
    failure: Failure | None
    some: tuple[Moment, ...]


def observe(rig: Rig, inputs: Tensors, dirt: tuple[Poison, int], where: Where) -> Moment:
    """One step from the states that the rig holds. Raises Faulted."""
    rig.set_inputs(inputs)
    rig.dirty(*dirt)
    before = rig.copy_out("outputs", "states")
    rig.launch(where.text())
    rig.check_integrity(where.text())
    return Moment(_given(rig, inputs, before), before, rig.copy_out("outputs", "states"), where)


def _given(rig: Rig, inputs: Tensors, before: Tensors) -> Tensors:
    """For the oracle: the checked weights where they lie, and the judge's own copies of the rest."""
    weights = {b.name: rig.case.here(rig.arena[b.name]) for b in rig.case.buffers("weights")}
    return {**weights, **{b.name: before[b.name] for b in rig.case.buffers("states")}, **inputs}


def again(rig: Rig, m: Moment, scratch: tuple[Poison, int], where: Where) -> Moment:
    """The same step from the same states and the same outputs before it, with other dirt in the scratch."""
    rig.set_states(m.before)
    for b in rig.case.buffers("outputs"):
        rig.arena[b.name].copy_(m.before[b.name])
    rig.dirty_scratch(*scratch)
    rig.launch(where.text())
    return Moment(m.given, m.before, rig.copy_out("outputs", "states"), where)


def repeat(rig: Rig, m: Moment, times: int) -> Repeats:
    """Persistent scratch keeps what each launch left, as in real decoding."""
    some: list[Moment] = []
    failure: Failure | None = None
    differing = 0
    for n in range(times):
        where = Where(m.where.seed, m.where.step, f"repeat {n + 1} of {times}", m.where.axes)
        kind = poison.CYCLE[n % len(poison.CYCLE)]
        reorder(rig, n)
        other = again(rig, m, (kind, rig.case.seeds.of("scratch", n)), where)
        found = difference(m, other)
        if found is not None:
            differing += 1
            failure = failure or found
        if len(some) < KEPT_REPEATS:
            some.append(other)
    return Repeats(times, differing, failure, tuple(some))


def reorder(rig: Rig, n: int) -> None:
    """Where the device decides the order of blocks and warps (cpu), draw another one for the launches that follow."""
    if rig.device.kind == "cpu":
        order = getattr(rig.program, "reorder", None)
        if order is not None:
            order(rig.case.seeds.of("order", n))


def difference(a: Moment, b: Moment) -> Failure | None:
    """The first tensor whose bits differ, and where."""
    return differs(a.after, b.after, b.where)


def differs(
    a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor], where: Where
) -> Failure | None:
    for name in a:
        if not same_bits(a[name], b[name]):
            bad = bits(a[name]) != bits(b[name])
            at = first_index(bad)
            message = (
                f"{name} differs in {int(bad.sum())} elements between two runs of one step "
                f"from the same states, first at {spell(at, where.names(name))} ({where.text()})"
            )
            return Failure("repeat", message, {"tensor": name, "first": at, "phase": where.phase})
    return None
