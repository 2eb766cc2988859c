"""Timed chains of a kernel whose float atomics reorder sums: no bits to compare, so distances, lane by lane.

Without this a sum of zero by an atomic would free a kernel from all comparisons of its timed outputs. A lane that is
further from another run of the same steps than noise allows is not wrong yet (a tie may have been chosen otherwise):
its timed outputs go to the oracle. Nothing is launched here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from sandbox.judge.checks import Checker
from sandbox.judge.dtypes import is_float
from sandbox.judge.lanes import Lanes
from targets.reference import Tensors

APART = 2.0
"""Two runs are each within the bound of the oracle."""
STATES_APART = 4.0
"""Noise of all steps of a chain has gone into a state."""
UNKNOWN = 0.05
MOST = 3


@dataclass
class Loose:
    """Of one round. `first`: by arm, what its first timed chain left; `odd`: by arm, lane -> the timed outputs that are
    far from those."""

    lanes: Lanes
    checker: Checker
    first: dict[str, Tensors] = field(default_factory=dict)
    odd: dict[str, dict[int, Tensors]] = field(default_factory=dict)

    def begin(self) -> None:
        self.first.clear()
        self.odd.clear()

    def timed(self, name: str) -> str:
        """After a timed chain. The name of a state that it left elsewhere than the first of this round, or nothing."""
        now = self._copies()
        start = self.first.setdefault(name, now)
        if start is now:
            return ""
        return self._note(name, start, now)

    def untimed(self, name: str) -> str:
        """After the same steps untimed: likewise, and what was timed first is noted where it is far from them."""
        start = self.first.get(name)
        return "" if start is None else self._note(name, self._copies(), start)

    def apart(self, expected: Tensors, left: Tensors) -> bool:
        """Whether one step left outputs or states further from another run of it than noise explains."""
        return bool(
            self._far(
                {f"/{n}": t for n, t in expected.items()},
                {f"/{n}": t for n, t in left.items()},
                APART,
            )
        )

    def _note(self, name: str, expected: Tensors, timed: Tensors) -> str:
        far = self._far(expected, timed)
        noted = self.odd.setdefault(name, {})
        for key in far:
            lane, _, buffer = key.partition("/")
            if not buffer.startswith("outputs."):
                return buffer
            if int(lane) in noted or len(noted) < MOST:
                prefix = f"{lane}/outputs."
                noted[int(lane)] = {
                    k.partition("/")[2]: v for k, v in timed.items() if k.startswith(prefix)
                }
        return ""

    def _copies(self) -> Tensors:
        """All outputs and states of the lanes, by `<lane or set>/<buffer>`."""
        both: tuple[Mapping[str, torch.Tensor], ...] = (self.lanes.outputs, self.lanes.states)
        return {n: t.clone() for arena in both for n, t in arena.items()}

    def _far(self, a: Tensors, b: Tensors, states: float = STATES_APART) -> list[str]:
        floats = {x.name for x in self.lanes.case.buffers("outputs", "states") if is_float(x.dtype)}
        names = [n for n in a if n.partition("/")[2] in floats]
        if not names:
            return []
        apart = torch.stack([_distance(a[n], b[n]) for n in names]).tolist()
        return [n for n, d in zip(names, apart, strict=True) if not d <= self._limit(n, states)]

    def _limit(self, key: str, states: float) -> float:
        buffer = key.partition("/")[2]
        known = self.checker.worst.get(buffer)
        factor = APART if buffer.startswith("outputs.") else states
        return factor * (known.rel_l2_bound if known is not None else UNKNOWN)


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Relative, in fp64 on the tensors' device; elements that neither run has written (equal bits) are no distance."""
    x, y = a.to(torch.float64), b.to(torch.float64)
    same = (x == y) | (x.isnan() & y.isnan())
    norm = torch.where(x.isnan(), 0.0, x).norm().clamp(min=1e-30)
    apart: torch.Tensor = torch.where(same, 0.0, x - y).norm() / norm
    return apart.cpu()
