"""Steps on inputs of which only a part is new, and on rows that are alike but for a few elements: results that are
kept, or shared between rows, by a sample of the inputs show.

A kernel that remembers what it made of a few values would have to be handed just these again; random inputs never do
that, so here most elements stay and a few change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from sandbox.artifact import Buffer
from sandbox.judge.dtypes import is_float
from sandbox.judge.locate import Where
from sandbox.judge.observe import observe

if TYPE_CHECKING:
    from sandbox.judge.trial import Trial

KEPT = (0.5, 0.94, 0.94)
"""Shares of the elements that stay from the step before, or that a row has in common with the first."""


def probe(trial: Trial) -> None:
    """From the same states each time. Raises Ended or Faulted."""
    floats = [b for b in trial.rig.case.buffers("inputs") if is_float(b.dtype)]
    if not floats:
        return
    _kept_from_the_step_before(trial, floats)
    rows = [b for b in floats if len(b.shape) > 1 and b.shape[-2] > 1]
    if rows:
        _alike(trial, rows)


def _kept_from_the_step_before(trial: Trial, floats: list[Buffer]) -> None:
    rig, case = trial.rig, trial.rig.case
    seed = case.seeds.of("probe", "partial")
    states = trial.states(seed)
    given = trial.inputs(seed, 0)
    for i, share in enumerate((0.0, *KEPT)):
        if i:
            fresh = trial.inputs(case.seeds.of("probe", "partial", i), 0)
            for b, kept in _masks(floats, share, case.seeds.of("probe", "kept", i)):
                on = given[b.name].device
                given[b.name] = torch.where(kept.to(on), given[b.name], fresh[b.name])
        rig.set_states(states)
        where = Where(
            0, i, f"{share:.0%} of the inputs as before" if i else "all inputs new", axes=case.axes
        )
        trial.judge(observe(rig, given, ("random", seed + i), where), "share")
    trial.checked.append(f"{len(KEPT)} steps on inputs of which only a part is new")


def _alike(trial: Trial, rows: list[Buffer]) -> None:
    """Rows (the last dimension but one) that have most of the first one's elements."""
    rig, case = trial.rig, trial.rig.case
    for i, share in enumerate(KEPT):
        seed = case.seeds.of("probe", "alike", i)
        given = trial.inputs(seed, 0)
        for b, kept in _masks(rows, share, case.seeds.of("probe", "in common", i)):
            x = given[b.name]
            given[b.name] = torch.where(kept.to(x.device), x[..., :1, :], x)
        rig.set_states(trial.states(seed))
        where = Where(0, i, f"rows that have {share:.0%} in common", axes=case.axes)
        trial.judge(observe(rig, given, ("random", seed), where), "share")
    trial.checked.append(f"{len(KEPT)} steps on rows that are alike but for some elements")


def _masks(buffers: list[Buffer], share: float, seed: int) -> Iterator[tuple[Buffer, torch.Tensor]]:
    """True for that share of the elements. Ranks keep in common what they have in common."""
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[str, torch.Tensor] = {}
    for b in buffers:
        name = b.name.partition("@")[0]
        if name not in drawn:
            drawn[name] = torch.rand(b.shape, generator=generator) < share
        yield b, drawn[name]
