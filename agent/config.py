"""Settings: command line > environment (KERNELGEN_*) > kernelgen.toml > user file > default; and a
run's own settings.

The first four are click's; this module finds the files. Keys never live here: they are read from
the environment by the provider adapters alone.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from glob import glob
from pathlib import Path
from typing import Any

import platformdirs

from agent.search import Limits
from sandbox.verdict import Tier
from targets.base import Options, Scalar

PROJECT_FILE = "kernelgen.toml"
KEYS = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}
PROPOSERS = ("openai", "anthropic", "external", "tuner", "replay")


class BadConfig(Exception):
    """A settings file that cannot be read; the message names it."""


@dataclass(frozen=True)
class RunSettings:
    """All that `optimize` was asked, kept with the run so that `resume` needs its id alone. Who works on it is not part
    of it; on which kind of device workers judged is (`kind`, '' for this machine's)."""

    target: str
    options: Options
    device: str
    arch: str
    proposer: str
    model: str = ""
    base_url: str = ""
    k: int = 1
    repairs: int = 2
    tunings: int = 0
    tier: Tier = Tier.SCREEN
    confirm: Tier = Tier.PROMOTE
    limits: Limits = field(default_factory=Limits)
    seed: int = 0
    wait: bool = True
    folder: str = ""
    replay: str = ""
    elsewhere: bool = False
    deadline_s: float | None = None
    start: str = ""
    sandbox: str = ""
    trust_this_code: bool = False
    kind: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "tier": str(self.tier), "confirm": str(self.confirm)}


def settings_from_json(data: Mapping[str, Any]) -> RunSettings:
    """Inverse of `RunSettings.to_json`. Raises TypeError, ValueError, KeyError."""
    d = dict(data)
    d["options"] = Options(**d["options"])
    d["limits"] = Limits(**d["limits"])
    d["tier"], d["confirm"] = Tier(d["tier"]), Tier(d["confirm"])
    return RunSettings(**d)


def options(preset: str | None, sizes: Mapping[str, int | None], extra: tuple[str, ...]) -> Options:
    """`extra`: NAME=VALUE pairs of a target's own. Raises ValueError."""
    pairs: dict[str, Scalar] = {}
    for item in extra:
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"{item!r} is not NAME=VALUE")
        pairs[name] = _scalar(value)
    return Options(
        preset or "tiny", sizes.get("layers"), sizes.get("rows") or 1, sizes.get("context"), pairs
    )


def _scalar(text: str) -> Scalar:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def deadline(tier: Tier, asked: float | None, device: str) -> float:
    """Seconds one judgement may take. Higher tiers do several times the work; cpu interprets."""
    base = asked if asked is not None else (900.0 if device == "cpu" else 120.0)
    return base * {Tier.SCREEN: 1, Tier.FULL: 4, Tier.PROMOTE: 8}[tier]


def has_gpu() -> bool:
    """Whether this machine shows an NVIDIA device; no driver is called."""
    return bool(glob("/dev/nvidia[0-9]*") or glob("/dev/dxg"))


def default_device() -> str:
    return "cuda" if has_gpu() else "cpu"


def file_defaults(start: Path) -> tuple[dict[str, Any], list[Path]]:
    """Defaults from the user's file, then the nearest kernelgen.toml at or above `start`; and the
    files read.

    Top-level values hold for every command, a table [optimize] for that command alone.
    Raises BadConfig.
    """
    user = Path(platformdirs.user_config_dir("kernelgen")) / PROJECT_FILE
    near = next(
        (p / PROJECT_FILE for p in (start, *start.parents) if (p / PROJECT_FILE).is_file()), None
    )
    merged: dict[str, Any] = {}
    read = []
    for path in (user, near):
        if path is None or not path.is_file():
            continue
        try:
            found = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise BadConfig(f"{path}: {error}") from error
        read.append(path)
        for key, value in found.items():
            if isinstance(value, dict) and isinstance(merged.get(key), dict):
                merged[key] = {**merged[key], **value}
            else:
                merged[key] = value
    return merged, read
