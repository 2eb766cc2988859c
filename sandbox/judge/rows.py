"""One row of one tensor changed and nothing else: the step must follow as the oracle does, there and only there.

A cache row that is not read, or a weight that is kept from before, hides behind all others when everything is new.
Which rows is secret. Rows that no step sees are among those drawn: they must change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sandbox.artifact import Buffer
from sandbox.judge.locate import Where
from sandbox.judge.observe import observe
from sandbox.judge.unusual import exchange

if TYPE_CHECKING:
    from sandbox.judge.trial import Trial

STATES, WEIGHTS = 4, 2
FACTOR, NARROW_FACTOR = -4.0, -1.0
"""Of an element of several bytes, and of one, which has little room."""
WIDE = ("f64", "f32", "f16", "bf16")


def probe(trial: Trial) -> None:
    """Raises Ended or Faulted."""
    case = trial.rig.case
    choose = case.seeds.chooser("one row")
    plain = trial.states(case.seeds.of("one row"))  # drawn once: they may be large
    states = _drawn(case.buffers("states"), (*WIDE, "e4m3"), STATES, choose)
    for i, b in enumerate(states):
        made = {**plain, b.name: _changed(plain[b.name], choose)}
        _judge(trial, made, i, f"one row of {b.name} changed")
    # ranks must keep in common what they have in common
    matrices = [b for b in case.buffers("weights") if len(b.shape) > 1] if case.ranks == 1 else []
    weights = _drawn(matrices, WIDE, WEIGHTS, choose)
    for i, b in enumerate(weights):
        kept = exchange(trial.rig, {b.name: _changed(trial.rig.arena[b.name], choose)})
        _judge(trial, plain, i, f"one row of {b.name} changed")
        exchange(trial.rig, kept)
    if states or weights:
        trial.checked.append(
            f"one row of {len(states)} states and {len(weights)} weights changed: results follow the oracle"
        )


def _drawn(
    buffers: tuple[Buffer, ...] | list[Buffer],
    dtypes: tuple[str, ...],
    most: int,
    choose: Callable[[int], int],
) -> list[Buffer]:
    found = [b for b in buffers if b.dtype in dtypes]
    return [found[choose(len(found))] for _ in range(most)] if found else []


def _changed(t: torch.Tensor, choose: Callable[[int], int]) -> torch.Tensor:
    """A copy with one row, of the last dimension, times a factor."""
    made = t.clone()
    rows = made.view(-1, made.shape[-1])
    row = choose(rows.shape[0])
    factor = FACTOR if t.element_size() > 1 else NARROW_FACTOR
    rows[row] = (rows[row].float() * factor).to(t.dtype)
    return made


def _judge(trial: Trial, states: dict[str, torch.Tensor], i: int, label: str) -> None:
    rig, case = trial.rig, trial.rig.case
    seed = case.seeds.of("one row", label, i)
    rig.set_states(states)
    where = Where(0, i, label, case.axes)
    trial.judge(observe(rig, trial.inputs(seed, 0), ("random", seed), where), "share")
