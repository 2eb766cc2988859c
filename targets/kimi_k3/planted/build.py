"""How the entries of the catalogue are written down: the seed of a part, its usual size, one function per kind."""

from __future__ import annotations

from functools import cache
from typing import Any

from targets.base import Options
from targets.kimi_k3 import seeds
from targets.kimi_k3.seeds import persistent
from targets.planted import Edit, Planted

SPIN = 200_000
"""Turns after which a wait of the persistent kernel gives up: a broken edge ends as wrong numbers, not as a hang."""
_SIZES = {
    "decode": Options("tiny", 4, 2), "persistent": Options("tiny", 4, 1), "router": Options("tiny", 2, 4),
}  # fmt: skip
_USUAL = Options("tiny", 2, 2)
_TUNABLES = {
    "persistent": {
        "ctas": 4, "ring_stages": 3, "spin_limit": SPIN, "units": 0, "couples": 1, "hungry": 0, "bank": 1,
    }
}  # fmt: skip
"""The persistent kernel in the way in which its mistakes were planted and judged: all warps choose and share rows."""
RACY = frozenset({"wrong", "flaky", "fault", "hang"})
"""How a missing barrier may end."""
FORBIDDEN = frozenset({"cheat", "fault", "wrong"})
"""How a forbidden access may end: by its trace, by a checked access, or by its effect."""


@cache
def source_of(part: str) -> str:
    return persistent.source() if part == "persistent" else seeds.source(f"kimi-k3-{part}")


def planted(
    kind: Any, part: str, group: str, named: tuple[str, str], *edits: Edit, **more: Any
) -> Planted:
    """`named`: (name, what it does). `more` replaces fields; `tunables` adds to the usual ones of the part."""
    tunables = {**_TUNABLES.get(part, {}), **more.pop("tunables", {})}
    options = more.pop("options", _SIZES.get(part, _USUAL))
    target = "kimi-k3-decode" if part == "persistent" else f"kimi-k3-{part}"
    name, does = named
    return Planted(
        f"{part}/{name}", kind, group, does, target, source_of(part), edits, options, tunables, **more
    )  # fmt: skip


def bug(part: str, group: str, name: str, does: str, *edits: Edit, **more: Any) -> Planted:
    return planted("bug", part, group, (name, does), *edits, **more)


def hack(part: str, group: str, name: str, does: str, *edits: Edit, **more: Any) -> Planted:
    return planted("hack", part, group, (name, does), *edits, **more)


def good(part: str, name: str, does: str, *edits: Edit, **more: Any) -> Planted:
    return planted("good", part, "control", (name, does), *edits, **more)
