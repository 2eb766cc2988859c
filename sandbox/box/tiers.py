"""Which tier of isolation this machine offers, found by trying each with the real flags.

Fails closed: a tier that was asked for is used exactly or not at all, and `none` needs an explicit word of trust.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from sandbox.box.spec import BoxTier, Isolation, Settings, Spec


@dataclass(frozen=True)
class Choice:
    """A tier that works here for a spec. `start` uses it as it is and never steps down from it."""

    isolation: Isolation
    sentence: str


@dataclass(frozen=True)
class Refusal:
    """No tier may be used. `sentence` says why and what would help."""

    sentence: str


def choose(spec: Spec, settings: Settings) -> Choice | Refusal:
    """The strongest tier that works for `spec` and that the settings allow."""
    if settings.tier is BoxTier.NONE and settings.trust_this_code:
        isolation = Isolation(BoxTier.NONE, "", os.getuid(), "", 0, 0, "watchdog")
        return Choice(isolation, "NO ISOLATION: candidates run with all your rights")
    return Refusal("no isolation works here")
