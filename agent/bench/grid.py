"""What a benchmark runs: workloads of a target by rows and context, and the artifact of the kernel for each.

Plain data. Compiling and judging are the services'.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sandbox import artifact_store
from sandbox.strict import Malformed
from targets.base import Options, Target, UnknownOption, Workload

UNITS = {"k": 1 << 10, "m": 1 << 20}
SEED = "seed"
COPIES = 8
"""Of the states, caches among them, at once: the judge's own, around a step, the oracle's before and after, the lanes',
their clean copy, and what a baseline gathers."""
BEST_KNOWN: Mapping[str, Any] = {"pdl": True}
"""Values that did best for the seeds on an H200 where they are not the first declared."""


def number(text: str) -> int:
    """`8`, `8k` (8192), `1m`. Raises ValueError."""
    word = text.strip().lower()
    unit = UNITS.get(word[-1:], 1)
    return int(word[:-1] if unit > 1 else word) * unit


def rows(text: str) -> int:
    """M. Raises ValueError."""
    found = number(text)
    if found < 1:
        raise ValueError("a step has a row at least")
    return found


def numbers(text: str, each: Callable[[str], int] = number) -> tuple[int, ...]:
    """`1,2,8k`. Raises ValueError."""
    return tuple(each(part) for part in text.split(",") if part.strip())


@dataclass(frozen=True)
class Asked:
    """The product of rows and contexts of one preset; None: the preset's own."""

    options: Options
    rows: Sequence[int]
    contexts: Sequence[int | None]

    def each(self) -> Iterator[Options]:
        for rows in self.rows:
            for context in self.contexts:
                yield replace(self.options, rows=rows, context=context)


@dataclass(frozen=True)
class Listed:
    """Rows in an order of one's own, of any presets: `PRESET:M:CONTEXT`. `options` has what they share."""

    options: Options
    rows: Sequence[str]

    def each(self) -> Iterator[Options]:
        """Raises ValueError."""
        for text in self.rows:
            preset, m, context = text.split(":")
            yield replace(self.options, preset=preset, rows=rows(m), context=number(context))


@dataclass(frozen=True)
class Refused:
    """What was asked for and is not measured, and why."""

    options: Options
    why: str

    def __str__(self) -> str:
        o = self.options
        return f"preset {o.preset}, rows {o.rows}, context {o.context}: {self.why}"


def workloads(target: Target, asked: Asked | Listed) -> tuple[list[Workload], list[Refused]]:
    """Every workload that the target has, and those that it refuses. Raises ValueError."""
    found, refused = [], []
    for options in asked.each():
        try:
            found.append(target.workload(options))
        except UnknownOption as error:
            refused.append(Refused(options, str(error)))
    return found, refused


def fitting(found: Sequence[Workload], memory_bytes: int) -> tuple[list[Workload], list[Refused]]:
    """Workloads that a judgement has memory for, and the others. 0 bytes: nobody knows."""
    fit, refused = [], []
    for w in found:
        states = sum(b.nbytes for b in w.buffers if b.group == "states")
        rest = sum(b.nbytes for b in w.buffers if b.group != "states")
        wanted = rest + COPIES * states
        if memory_bytes and wanted > memory_bytes:
            why = f"a judgement needs about {wanted / 1e9:.0f} GB, the device has {memory_bytes / 1e9:.0f}"
            refused.append(Refused(replace(w.options, layers=w.layers, context=w.context), why))
        else:
            fit.append(w)
    return fit, refused


def declared(source: str) -> Mapping[str, Any]:
    """A source's TUNABLES, read without running it; nothing where they are no literal."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return {}
    for node in body:
        names = [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
        if isinstance(node, ast.Assign) and "TUNABLES" in names:
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                return {}
            return value if isinstance(value, dict) else {}
    return {}


def best_known(source: str) -> dict[str, Any]:
    """The seed's values that did best, as far as it declares them."""
    names = declared(source)
    return {k: v for k, v in BEST_KNOWN.items() if v in tuple(names.get(k, ()))}


def artifacts_of(folder: Path) -> dict[str, Path]:
    """Artifact folders at or directly below `folder`, by their workload. Raises Malformed, OSError."""
    folders: Iterable[Path] = [folder]
    if not (folder / "manifest.json").is_file():
        folders = [p for p in sorted(folder.iterdir()) if (p / "manifest.json").is_file()]
    found = {key(artifact_store.load(p).workload): p for p in folders}
    if not found:
        raise Malformed(str(folder), "holds no artifact")
    return found


def key(workload: Mapping[str, Any]) -> str:
    return repr(sorted(workload.items()))
