"""A step on inputs of which only a part is new: results that are kept by a sample of the inputs show.

A kernel that remembers what it made of a few values would have to be handed just these again; random inputs never do
that, so here most elements stay and a few change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sandbox.judge.dtypes import is_float
from sandbox.judge.locate import Where
from sandbox.judge.observe import observe

if TYPE_CHECKING:
    from sandbox.judge.trial import Trial

KEPT = (0.5, 0.94, 0.94)
"""Shares of the elements that stay from the step before."""


def probe(trial: Trial) -> None:
    """From the same states each time. Raises Ended or Faulted."""
    rig, case = trial.rig, trial.rig.case
    floats = [b for b in case.buffers("inputs") if is_float(b.dtype)]
    if not floats:
        return
    seed = case.seeds.of("probe", "partial")
    states = trial.states(seed)
    given = trial.inputs(seed, 0)
    for i, share in enumerate((0.0, *KEPT)):
        if i:
            fresh = trial.inputs(case.seeds.of("probe", "partial", i), 0)
            generator = torch.Generator().manual_seed(case.seeds.of("probe", "kept", i))
            masks: dict[str, torch.Tensor] = {}
            for b in floats:
                name = b.name.partition("@")[0]  # ranks keep in common what they have in common
                if name not in masks:
                    masks[name] = torch.rand(b.shape, generator=generator) < share
                kept = masks[name]
                on = given[b.name].device
                given[b.name] = torch.where(kept.to(on), given[b.name], fresh[b.name])
        rig.set_states(states)
        where = Where(
            0, i, f"{share:.0%} of the inputs as before" if i else "all inputs new", axes=case.axes
        )
        trial.judge(observe(rig, given, ("random", seed + i), where), "share")
    trial.checked.append(f"{len(KEPT)} steps on inputs of which only a part is new")
