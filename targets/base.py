"""What a target is, without torch: names, shapes, byte floors, seeds. References live in modules named here by path.

A target is trusted code. `--target path/to/file.py:Name` loads a user's own the same way.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sandbox.artifact import Buffer

Scalar = int | float | str | bool


@dataclass(frozen=True)
class Floor:
    """Bytes that must cross HBM in one step (weights, states and caches read and written), and flops."""

    read_bytes: int
    write_bytes: int
    flops: int = 0

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes


@dataclass(frozen=True)
class Options:
    """What a user picks of a target: `--preset --layers --rows --context`, and target-specific `extra`."""

    preset: str = "tiny"
    layers: int | None = None
    rows: int = 1
    context: int | None = None
    extra: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """One concrete problem: sizes, the buffers of the candidate's `t`, and the floor.

    `dims` are the plain values that candidates read as `cfg.dims.NAME`; `key` is what artifacts and verdicts record.
    """

    target: str
    options: Options
    layers: int
    rows: int
    context: int
    q: int
    ranks: int
    dims: Mapping[str, Scalar]
    buffers: tuple[Buffer, ...]
    floor: Floor

    @property
    def key(self) -> dict[str, Scalar]:
        return {
            "preset": self.options.preset, "layers": self.layers, "rows": self.rows, "context": self.context,
            "q": self.q, "ranks": self.ranks, **{f"x_{k}": v for k, v in sorted(self.options.extra.items())},
        }  # fmt: skip


class Target(Protocol):
    """`reference` is `module:Class` (or `path/to/file.py:Class`) of a `targets.reference.Reference`.

    Optional: `baselines`, a mapping of names to `module:Class` with `prepare(workload, tensors)` and a `step()` that a
    CUDA graph can capture; `strong_baselines`, those of them without which nobody may speak of the best baseline;
    `floor_for(workload, ids)`, the floor for the experts in `outputs.ids` as nested lists.
    """

    name: str
    summary: str
    presets: tuple[str, ...]
    reference: str

    def seed_source(self) -> str:
        """A correct, plain candidate in one file: what `optimize` starts from."""
        ...

    def workload(self, options: Options) -> Workload:
        """Raises UnknownOption for a preset, row count, layer count or context it does not have."""
        ...


class UnknownOption(ValueError):
    """The user asked for something this target does not have; the message says what there is."""


class UnknownTarget(ValueError):
    """No such target; the message lists those there are, or says why a user's file is none."""


_PARTS = (
    "name",
    "summary",
    "presets",
    "reference",
    "seed_source",
    "workload",
)  # what a Target must have


_TARGETS: dict[str, Callable[[], Target]] = {}


def register(name: str, factory: Callable[[], Target]) -> None:
    _TARGETS[name] = factory


def names() -> tuple[str, ...]:
    _load_builtin()
    return tuple(sorted(_TARGETS))


def find(name: str) -> Target:
    """A built-in target by name, or `path/to/file.py:Name`. Raises UnknownTarget."""
    if ".py:" in name:
        return _from_file(name)
    _load_builtin()
    if name not in _TARGETS:
        raise UnknownTarget(
            f"no target {name!r}; there are {', '.join(sorted(_TARGETS))}, or path/to/file.py:Name"
        )
    return _TARGETS[name]()


def _load_builtin() -> None:
    importlib.import_module("targets.kimi_k3.spec")


def _from_file(name: str) -> Target:
    path, _, attribute = name.rpartition(":")
    file = Path(path).resolve()
    if not file.is_file():
        raise UnknownTarget(f"no file {path} for the target {name}")
    try:
        module = load_module(file)
    except (Exception, SystemExit) as error:
        raise UnknownTarget(f"{path} cannot be imported: {_reason(error, file)}") from error
    if not hasattr(module, attribute):
        raise UnknownTarget(f"{path} defines no {attribute}")
    found: Any = getattr(module, attribute)
    try:
        target: Target = found() if isinstance(found, type) else found
    except Exception as error:
        raise UnknownTarget(f"{name} cannot be made: {_reason(error, file)}") from error
    missing = [part for part in _PARTS if not hasattr(target, part)]
    if missing:
        raise UnknownTarget(f"{name} is no target: it lacks {', '.join(missing)} (targets/base.py)")
    return target


def _reason(error: BaseException, file: Path) -> str:
    """What went wrong and, where it is known, on which line of the user's file."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == str(file):
            line = frame.lineno
    where = f" (line {line})" if line else ""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}{where}"


def load_module(file: Path) -> Any:
    """Import a trusted file by path, once per process."""
    key = f"kernelgen_user_{abs(hash(str(file)))}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, file)
    if spec is None or spec.loader is None:
        raise UnknownTarget(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]  # half a module is not the file
        raise
    return module
