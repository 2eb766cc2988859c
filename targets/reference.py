"""The contract between the judge and a target's reference. Torch only; loaded in the judge process, never in the agent.

A reference owns the mathematics: it makes tensors from a secret seed and computes what a step must produce.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from targets.base import Workload

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Tie:
    """Integer choices (router ids) that may differ only where the oracle's own margin is inside its noise.

    `allowed[...]`: bool tensor shaped like the buffer's leading dims (one flag a row): True where the margin at the
    selection boundary is below the score error bound, so that another id set there is no fault.
    `eligible`: bool, leading dims of `allowed` + (choices,): which ids may then be chosen, in any order. Without it the
    judge accepts only ids that the oracle or a schedule chose itself in that row.
    """

    buffer: str
    allowed: torch.Tensor
    eligible: torch.Tensor | None = None


@dataclass(frozen=True)
class Expected:
    """Outputs and states after one step, by buffer name. Buffers of group outputs and states that are not listed must
    be unchanged bit for bit. `masks[name]`: bool, True where an element is specified; elsewhere it must be unchanged.
    `exact`: names that must match bit for bit (copied data)."""

    tensors: Tensors
    ties: tuple[Tie, ...] = ()
    masks: Mapping[str, torch.Tensor] = field(default_factory=dict)
    exact: frozenset[str] = frozenset()


class Reference(Protocol):
    """Constructed with no arguments. All tensors: shapes and dtypes of `Workload.buffers`, on `device`.

    Optional attributes: `axes` maps a buffer's name or its last part to the names of its dimensions, for messages;
    `held_out` (names, or a function of the workload that gives them) are further distributions that `disturb` knows
    and nobody else is told of (tier promote); `smaller(w, tensors)` yields (what is left, tensors) of smaller problems,
    smallest first, to say where a failure begins; `spare` names further schedules, and `closely(w, tensors, after,
    forced)` is the oracle with ties proved by all of them, and by what the candidate left (`after`) where that lies
    between its choices: both are asked where few schedules leave a result just outside.
    """

    schedules: tuple[str, ...]
    """Names of legitimate working-precision schedules (at least 3) that make the noise band; `oracle` is fp64."""

    def weights(self, w: Workload, seed: int, device: str) -> Tensors:
        """Every buffer of group weights. Deterministic in (w, seed, kind of device): large ones are drawn on it."""
        ...

    def states(self, w: Workload, seed: int, device: str) -> Tensors:
        """Every buffer of group states at a plausible moment of decoding (caches filled, S non-zero)."""
        ...

    def inputs(self, w: Workload, seed: int, step: int, device: str) -> Tensors:
        """Every buffer of group inputs for that step; values differ from step to step."""
        ...

    def distributions(self, w: Workload) -> tuple[str, ...]:
        """Names of further input distributions, such as `large`, `spike`, `ties`, `one_expert`; may be empty."""
        ...

    def disturb(self, w: Workload, name: str, seed: int, tensors: Tensors) -> Tensors:
        """Copy of `tensors` (all groups) with that distribution applied."""
        ...

    def run(
        self,
        w: Workload,
        tensors: Tensors,
        schedule: str,
        forced: Mapping[str, torch.Tensor] | None = None,
    ) -> Expected:
        """One step from `tensors` (inputs, weights, states), which stay unchanged. `forced`: a candidate's integer
        choices by buffer name, used instead of the reference's own (teacher forcing). The returned tensor and tie of
        such a buffer stay the reference's own choice, given the forced choices before it."""
        ...
