"""What runs in a box and under which limits, and the record of how it was isolated. Data only."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

MB = 1 << 20
GB = 1 << 30


class BoxTier(StrEnum):
    """How strong a box is, strongest first. `none` is a process with limits and nothing else."""

    STRICT = "strict"
    LANDLOCK = "landlock"
    SECCOMP = "seccomp"
    WEAK = "weak"
    NONE = "none"

    @property
    def jailed(self) -> bool:
        """False where results count as `unjailed`: never ranked with others, never promoted."""
        return self not in (BoxTier.WEAK, BoxTier.NONE)


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes, times in seconds. `address_space` is set by the worker after its imports; None sets none."""

    cpu_s: int = 65
    address_space: int | None = 4 * GB
    file_bytes: int = 64 * MB
    files: int = 256
    processes: int = 256
    memory: int = 3 * GB
    scratch: int = 256 * MB
    temporary: int = 64 * MB
    shared: int = 64 * MB
    inodes: int = 65536
    output: int = MB
    output_flood: int = 2 * GB


@dataclass(frozen=True)
class Spec:
    """A worker script and what it may see.

    `narrow`: the worker puts the compile filter on itself (no fork, exec, socket, signal) before it says READY, and the
    parent checks that it did. `binds`: further read-only paths.
    """

    worker: Path
    python: Path = field(default_factory=lambda: Path(sys.executable))
    args: tuple[str, ...] = ()
    binds: tuple[Path, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    narrow: bool = True


@dataclass(frozen=True)
class Settings:
    """`tier` None takes the strongest that works and is allowed; a named tier is used exactly or not at all."""

    tier: BoxTier | None = None
    bwrap: Path | None = None
    trust_this_code: bool = False


@dataclass(frozen=True)
class Isolation:
    """How one box was isolated; stored with every artifact and verdict. `filters` counts seccomp programs."""

    tier: BoxTier
    variant: str
    uid: int
    bwrap: str
    landlock_abi: int
    filters: int
    memory: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"tier": str(self.tier)}
