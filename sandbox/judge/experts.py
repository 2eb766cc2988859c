"""Which experts a wrong tensor has to do with: those that wrong tokens chose and right ones did not.

A few steps on other inputs narrow them down. It explains a failure that has been found; it decides nothing, and takes a
bounded time. Only where a tensor belongs to a layer of which the choices are an output.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sandbox.devices.base import Faulted, Refused
from sandbox.judge import bands
from sandbox.judge.checks import Moment, full_mask
from sandbox.judge.observe import observe
from sandbox.verdict import Failure

if TYPE_CHECKING:
    from sandbox.judge.trial import Trial

IDS = "outputs.ids"
MOST_STEPS, MOST_S = 8, 4.0
MOST_NAMED = 3
CLEAR = 2.0
"""A token is wrong beyond so many bounds, and right within one; what lies between tells nothing."""


@dataclass
class Suspects:
    """Experts that every wrong token so far has chosen, less those of right tokens."""

    wrong: set[int] | None = None
    right: set[int] = field(default_factory=set)

    def add(self, chosen: set[int], is_wrong: bool) -> None:
        if is_wrong:
            self.wrong = chosen if self.wrong is None else self.wrong & chosen
        else:
            self.right |= chosen

    def named(self) -> list[int]:
        return sorted((self.wrong or set()) - self.right)


def named(trial: Trial, m: Moment, failure: Failure) -> Failure:
    """The failure with `where["experts"]`, or as it is."""
    layer, tensor = failure.where.get("layer"), str(failure.where.get("tensor"))
    choices = m.after.get(IDS)
    if failure.rule != "band" or choices is None or choices.ndim != 3 or layer is None:
        return failure
    axes = m.where.names(tensor)
    if not axes or axes[0] != "token" or layer >= choices.shape[0]:
        return failure
    found, until, seen = Suspects(), time.monotonic() + MOST_S, m
    for step in range(MOST_STEPS):
        _look(trial, seen, (tensor, int(layer)), found)
        if len(found.named()) <= 1 or time.monotonic() > until or step + 1 == MOST_STEPS:
            break
        try:
            seen = _another(trial, m, step)
        except (Faulted, Refused):
            break
    experts = found.named()
    if not 0 < len(experts) <= MOST_NAMED:
        return failure
    listed = f"expert{'s' * (len(experts) > 1)} {', '.join(map(str, experts))}"
    message = f"{failure.message}; wrong tokens, and no right ones, chose {listed}"
    return replace(failure, message=message, where={**failure.where, "experts": experts})


def _another(trial: Trial, m: Moment, step: int) -> Moment:
    """A step on other inputs from the same states."""
    case = trial.rig.case
    seed = case.seeds.of("experts", step)
    trial.rig.set_states({b.name: m.given[b.name] for b in case.buffers("states")})
    return observe(
        trial.rig, trial.inputs(seed, 0), ("random", seed), replace(m.where, phase="experts")
    )


def _look(trial: Trial, m: Moment, which: tuple[str, int], found: Suspects) -> None:
    """Which tokens are right and wrong in that tensor. Tokens that chose otherwise before or there tell nothing."""
    tensor, layer = which
    case = trial.rig.case
    own = case.reference.run(case.workload, m.given, "oracle")
    expected = own.tensors[tensor]
    o = bands.oracle(expected, full_mask(own.masks.get(tensor), expected))
    apart = (o.view(m.after[tensor]) - o.values).norm(dim=1) / o.scale.clamp(min=1e-300)
    limit = trial.checker.worst[tensor].rel_l2_bound
    alike = (m.after[IDS] == own.tensors[IDS])[: layer + 1].all(-1).all(0)
    for row in range(apart.shape[0]):
        token = o.cell(row)[0]
        share = float(apart[row])
        if bool(alike[token]) and not limit < share <= CLEAR * limit:
            chosen = set(own.tensors[IDS][layer, token].tolist())
            found.add(chosen, not share <= limit)
