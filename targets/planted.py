"""Planted kernels: exact edits of a target's seed that a judge is scored with, wrong ones and right but unusual ones.

A target may offer them as an optional attribute `planted`, a sequence of `Planted`. Data only: who compiles and judges
them is the agent's `judge --self-test`. Without torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from targets.base import Options, Scalar

Kind = Literal["bug", "hack", "good"]
Edit = tuple[str, str]
"""Text of the source, and what takes its place."""


class EditFailed(ValueError):
    """The source is no longer what an edit was written for; the message names the planted kernel."""


@dataclass(frozen=True)
class Planted:
    """One kernel. `kind`: a mistake, an attempt to deceive, or a right kernel that must pass.

    `source` is the text that `edits` apply to, each to exactly one place. `group` is what recall is counted by;
    `does` says in words what is wrong or unusual. `expect`: statuses that count as caught, `finding` a rule among the
    verdict's findings that does too. `devices`: where it can be told from a right kernel at all. `band`: known to stay
    inside the noise band; measurement has to agree.
    """

    name: str
    kind: Kind
    group: str
    does: str
    target: str
    source: str
    edits: tuple[Edit, ...] = ()
    options: Options = field(default_factory=Options)
    tunables: Mapping[str, Scalar] = field(default_factory=dict)
    expect: frozenset[str] = frozenset({"wrong"})
    finding: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    band: bool = False

    def text(self) -> str:
        """The source with all edits made, in their order. Raises EditFailed."""
        out = self.source
        for number, (old, new) in enumerate(self.edits, 1):
            found = out.count(old)
            if found != 1:
                raise EditFailed(
                    f"{self.name}: the text of edit {number} occurs {found} times, not once: {old!r}"
                )
            if old == new:
                raise EditFailed(f"{self.name}: edit {number} changes nothing")
            out = out.replace(old, new)
        return out


def built_in() -> tuple[Planted, ...]:
    """The catalogue of the built-in targets."""
    module = importlib.import_module("targets.kimi_k3.planted")
    found: tuple[Planted, ...] = module.catalogue()
    return found
