"""The candidate's view of a job: tunables, `cfg`, and the tensors of `t` (docs/candidate.md), with readable errors.

It mirrors the target's signature; whether what a candidate declares is acceptable is decided outside the box.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy

from .errors import Refused

ITEM = {
    "f64": "Float64", "f32": "Float32", "f16": "Float16", "bf16": "BFloat16",
    "e4m3": "Float8E4M3FN", "e5m2": "Float8E5M2", "i64": "Int64", "i32": "Int32", "i16": "Int16", "i8": "Int8",
    "u64": "Uint64", "u32": "Uint32", "u16": "Uint16", "u8": "Uint8",
}  # fmt: skip
NUMPY = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2", "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8",
    "uint64": "u64", "uint32": "u32", "uint16": "u16", "uint8": "u8",
}  # fmt: skip
MAX_CONSTANTS = 256
RESERVED = ("dims", "arch", "sms", "timeline")
TIMELINE = "timeline"  # asked for like a tunable: the instrumented build
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*")


@dataclass(frozen=True)
class Tensor:
    """A buffer of `t` by its path, such as `weights.layers.3.w_in`."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    align: int = 128
    init: str | None = None
    lifetime: str | None = None

    def declaration(self) -> list[Any]:
        return [self.path, self.dtype, list(self.shape), self.init, self.lifetime]


def function(module: ModuleType, name: str) -> Any:
    found = getattr(module, name, None)
    if not callable(found):
        raise Refused(
            "rejected", f"no-{name}", f"the file defines no function `{name}(t, cfg, stream)`"
        )
    return found


def tunables(module: ModuleType) -> dict[str, tuple[Any, ...]]:
    """The module's TUNABLES: name -> allowed values."""
    declared = getattr(module, "TUNABLES", {})
    if not isinstance(declared, Mapping):
        raise Refused(
            "rejected", "tunables", "TUNABLES must be a dict of name -> tuple of allowed values"
        )
    out = {}
    for name, values in declared.items():
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
            raise Refused("rejected", "tunables", f"TUNABLES: {name!r} is no usable name")
        if not isinstance(values, (tuple, list)) or not values:
            raise Refused(
                "rejected", "tunables", f"TUNABLES[{name!r}] must be a non-empty tuple of values"
            )
        for value in values:
            if not isinstance(value, (bool, int, float, str)):
                raise Refused(
                    "rejected",
                    "tunables",
                    f"TUNABLES[{name!r}] holds {value!r}: only numbers, bools, strings",
                )
        out[name] = tuple(values)
    return out


def config(job: Mapping[str, Any], declared: Mapping[str, tuple[Any, ...]]) -> SimpleNamespace:
    """`cfg`: the chosen tunables (defaults for the rest), dims, arch and SM count."""
    chosen = {name: values[0] for name, values in declared.items()}
    timeline = job["tunables"].get(TIMELINE) is True
    for name, value in job["tunables"].items():
        if name == TIMELINE:
            continue
        if name not in declared:
            known = ", ".join(declared) or "none"
            raise Refused(
                "rejected", "tunables", f"the file has no tunable {name!r} (it declares: {known})"
            )
        if not any(v == value and type(v) is type(value) for v in declared[name]):
            raise Refused(
                "rejected", "tunables", f"{name} = {value!r} is not among {declared[name]!r}"
            )
        chosen[name] = value
    return SimpleNamespace(
        **chosen,
        timeline=timeline,
        dims=SimpleNamespace(**job["dims"]),
        arch=job["arch"],
        sms=job["sms"],
    )


def buffers(job: Mapping[str, Any], rows: Sequence[Sequence[Any]]) -> list[Tensor]:
    """The target's own buffers."""
    return [Tensor(path, dtype, tuple(shape), align) for path, dtype, shape, align in rows]


def workspace(module: ModuleType, cfg: SimpleNamespace) -> list[Tensor]:
    """What the candidate's `workspace(dims, cfg)` declares."""
    declare = getattr(module, "workspace", None)
    entries = declare(cfg.dims, cfg) if declare else {}
    if not isinstance(entries, Mapping):
        raise Refused(
            "rejected",
            "workspace",
            "workspace(dims, cfg) must return a dict of name -> (dtype, shape, init, lifetime)",
        )
    return [_workspace_entry(name, entry) for name, entry in entries.items()]


def _workspace_entry(name: object, entry: object) -> Tensor:
    at = f"workspace[{name!r}]"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Refused("rejected", "workspace", f"{at}: the name is no identifier")
    if not isinstance(entry, (tuple, list)) or len(entry) != 4:
        raise Refused(
            "rejected",
            "workspace",
            f'{at} is not (dtype, shape, "zero" or "undefined", "step" or "persistent")',
        )
    dtype, shape, init, lifetime = entry
    if not isinstance(dtype, str) or dtype not in ITEM:
        raise Refused(
            "rejected", "workspace", f"{at}: the dtype {dtype!r} is none of {' '.join(ITEM)}"
        )
    if init not in ("zero", "undefined") or lifetime not in ("step", "persistent"):
        raise Refused(
            "rejected",
            "workspace",
            f'{at}: {init!r}, {lifetime!r} is not "zero" or "undefined", then "step" or "persistent"',
        )
    return Tensor(f"workspace.{name}", dtype, _shape(shape, at), 128, init, lifetime)


def _shape(shape: object, at: str) -> tuple[int, ...]:
    if isinstance(shape, int):
        shape = (shape,)
    if not isinstance(shape, (tuple, list)) or not shape:
        raise Refused("rejected", "workspace", f"{at}: the shape {shape!r} is no tuple of sizes")
    for extent in shape:
        if isinstance(extent, bool) or not isinstance(extent, (int, numpy.integer)) or extent < 1:
            raise Refused(
                "rejected",
                "workspace",
                f"{at}: the shape {tuple(shape)!r} holds {extent!r}, no positive integer",
            )
    return tuple(int(x) for x in shape)


def constants(module: ModuleType, cfg: SimpleNamespace) -> tuple[list[Tensor], list[bytes]]:
    """What the candidate's `constants(dims, cfg)` computes: tensors and their bytes, in one order."""
    declare = getattr(module, "constants", None)
    arrays = declare(cfg.dims, cfg) if declare else {}
    if not isinstance(arrays, Mapping):
        raise Refused(
            "rejected",
            "constants",
            "constants(dims, cfg) must return a dict of name -> numpy array",
        )
    if len(arrays) > MAX_CONSTANTS:
        text = f"constants(dims, cfg) returns {len(arrays)} arrays, more than {MAX_CONSTANTS}"
        raise Refused("rejected", "constants", text)
    tensors, data = [], []
    for name, value in arrays.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise Refused(
                "rejected", "constants", f"constants[{name!r}]: the name is no identifier"
            )
        array = numpy.ascontiguousarray(value)
        dtype = NUMPY.get(array.dtype.name)
        if dtype is None or array.size == 0:
            raise Refused(
                "rejected",
                "constants",
                f"constants[{name!r}] is an array of {array.dtype} and {array.size} elements",
            )
        tensors.append(Tensor(f"constants.{name}", dtype, array.shape or (1,)))
        data.append(array.tobytes())
    return tensors, data


def marks(helper: Any) -> list[Tensor]:
    """The buffers of an instrumented build: rows of marks, and the names of phases."""
    if helper is None:
        return []
    shape = (helper.TRACKS, helper.ROWS, 4)
    return [
        Tensor("workspace.timeline", "u32", shape, 128, "zero", "persistent"),
        Tensor("constants.timeline", "u8", (helper.NAMES_BYTES,)),
    ]


def ranks_of(tensors: Sequence[Tensor]) -> int:
    """GPUs of the job: buffers of rank N > 0 are named `PATH@N`."""
    return 1 + max((int(t.path.partition("@")[2] or 0) for t in tensors), default=0)


def on_ranks(declared: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """What the candidate declares, once for each rank above 0."""
    return [replace(t, path=f"{t.path}@{rank}") for rank in range(1, ranks) for t in declared]


def seen_by(tensors: Sequence[Tensor], rank: int, ranks: int) -> list[tuple[int, str]]:
    """(number in the job, path in `t`) of what a rank's launches may name: its own buffers, and the persistent
    workspace of the ranks after it, in a ring, as `peers.0`, `peers.1` and so on. The same paths on every rank."""
    number = {t.path: i for i, t in enumerate(tensors)}
    out = []
    for t in tensors:
        if "@" not in t.path:
            out.append((number[f"{t.path}@{rank}" if rank else t.path], t.path))
    for k in range(ranks - 1):
        peer = (rank + 1 + k) % ranks
        for t in tensors:
            if t.lifetime == "persistent" and "@" not in t.path:
                own = f"{t.path}@{peer}" if peer else t.path
                out.append((number[own], f"peers.{k}.{t.path}"))
    return out


def visible_to_prepare(tensor: Tensor) -> bool:
    group = tensor.path.split(".", 1)[0]
    return group in ("weights", "constants") or tensor.lifetime == "persistent"


def tree(paths: Sequence[str], values: Sequence[Any]) -> SimpleNamespace:
    """`t`: namespaces by path, lists where the keys of a level are the numbers 0, 1, 2 ..."""
    root: dict[str, Any] = {
        g: {} for g in ("inputs", "weights", "states", "outputs", "workspace", "constants")
    }
    # persistent scratch of other ranks, by the same names: t.peers[0].workspace.NAME
    for path, value in zip(paths, values, strict=True):
        *parents, leaf = path.split(".")
        level = root
        for key in parents:
            level = level.setdefault(key, {})
            if not isinstance(level, dict):
                raise Refused("rejected", "names", f"{path}: {key} is a buffer already")
        if leaf in level:
            raise Refused("rejected", "names", f"{path} is declared twice, or has others below it")
        level[leaf] = value
    return SimpleNamespace(**{k: _node(v) for k, v in root.items()})


def _node(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and set(value) == {str(i) for i in range(len(value))}:
        return [_node(value[str(i)]) for i in range(len(value))]
    return SimpleNamespace(**{k: _node(v) for k, v in value.items()})
