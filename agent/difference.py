"""What changed against the parent: every number of the profile as a difference, tied to the hunks of the source.

A hunk belongs to the function it lies in, to the kernels that reach that function, and to the phases that are marked in
it. Names are compared, nothing is run: a call through a variable is not seen.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agent import waterfall
from agent.review import changes
from agent.review.changes import Used
from sandbox.verdict import Verdict

MOST = 12
SMALL_US = 0.01


@dataclass(frozen=True)
class Hunk:
    """Changed lines. `kernels` and `phases` are those that the changed functions belong to, by name."""

    header: str
    functions: tuple[str, ...]
    kernels: tuple[str, ...]
    phases: tuple[str, ...]
    added: int
    removed: int


@dataclass(frozen=True)
class Side:
    """One candidate: its source, and the verdict that holds its profile."""

    source: str
    verdict: Verdict | None


def lines(before: Side, after: Side) -> list[str]:
    """The comparison in words; empty where the parent has no profile and nothing changed."""
    out = [*_parts(before.verdict, after.verdict), *_kernels(before.verdict, after.verdict)]
    out += _resources(before.verdict, after.verdict)
    phases = _phase_deltas(before.verdict, after.verdict)
    for h in hunks(before.source, after.source):
        where = f" in {', '.join(h.functions)}" if h.functions else ""
        kernels = f" (kernel {', '.join(h.kernels)})" if h.kernels else ""
        moved = [f"{p} {phases[p]:+.2f} us" for p in h.phases if p in phases]
        tied = f": {', '.join(moved)}" if moved else ""
        out.append(f"{h.header}{where}{kernels}, +{h.added} -{h.removed}{tied}")
    return out


def _parts(before: Verdict | None, after: Verdict | None) -> Iterator[str]:
    old, new = _fall(before), _fall(after)
    if old is None or new is None:
        return
    if old["kind"] != new["kind"] or old["method"] != new["method"]:
        yield f"waterfalls of other kinds: {old['kind']}, {old['method']} before; {new['kind']}, {new['method']} now"
    yield f"step {old['step_us']:.2f} -> {new['step_us']:.2f} us ({new['step_us'] - old['step_us']:+.2f})"
    for (words, b, _), (_, a, _) in zip(waterfall.parts(old), waterfall.parts(new), strict=True):
        if abs(a - b) >= SMALL_US:
            yield f"{words.split(':')[0]} {b:.2f} -> {a:.2f} us ({a - b:+.2f})"
    moved = _phase_deltas(before, after)
    for phase, delta in sorted(moved.items(), key=lambda x: -abs(x[1]))[:MOST]:
        if abs(delta) >= SMALL_US:
            yield f"phase {phase}: {delta:+.2f} us"


def _kernels(before: Verdict | None, after: Verdict | None) -> Iterator[str]:
    if before is None or not before.profile.get("kernels"):
        return
    for k in changes.kernel_times(before, after)[:MOST]:
        if k.us_before is None:
            yield f"kernel {k.kernel}: new, {k.us:.2f} us"
        elif k.us is None:
            yield f"kernel {k.kernel}: gone, it took {k.us_before:.2f} us"
        elif abs(k.delta) >= SMALL_US or k.calls != k.calls_before:
            yield f"kernel {k.kernel}: {k.us_before:.2f} -> {k.us:.2f} us, {k.calls_before} -> {k.calls} launches"
    yield from _figures(before, after)


def _figures(before: Verdict | None, after: Verdict | None) -> Iterator[str]:
    """Occupancy, waves, bytes and machine code of kernels that both have; the first launch stands for its kernel."""
    old, new = _first(before), _first(after)
    for kernel in [k for k in new if k in old][:MOST]:
        for what in (
            "bytes",
            "l2_bytes",
            "gb_per_s",
            "of_floor",
            "occupancy",
            "waves",
            "limited_by",
            "bound",
        ):
            b, a = old[kernel].get(what), new[kernel].get(what)
            if a != b and a is not None and b is not None:
                yield f"kernel {kernel}: {what} {b} -> {a}"
    for kind, table in (("SASS", "sass"), ("executed", "executed"), ("counter", "ncu")):
        yield from _table(kind, _of(before, table), _of(after, table))


def _table(kind: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for kernel in [
        k for k in new if isinstance(new[k], Mapping) and isinstance(old.get(k), Mapping)
    ][:MOST]:
        b, a = (side[kernel].get("opcodes", side[kernel]) for side in (old, new))
        moved = {
            x: (b.get(x, 0), a.get(x, 0)) for x in sorted({*a, *b})
            if all(isinstance(side.get(x, 0), int | float) for side in (a, b)) and a.get(x, 0) != b.get(x, 0)
        }  # fmt: skip
        top = sorted(moved, key=lambda x: -abs(moved[x][1] - moved[x][0]))[:6]
        if top:
            yield f"{kind} of {kernel}: " + ", ".join(
                f"{x} {moved[x][0]:g} -> {moved[x][1]:g}" for x in top
            )


def _resources(before: Verdict | None, after: Verdict | None) -> Iterator[str]:
    used = [Used(v, changes.launches(v)) for v in (before, after)]
    for r in changes.resources(used[0], used[1]):
        if r.changed and r.before is not None and r.after is not None:
            yield f"kernel {r.kernel}: {r.what} {r.before} -> {r.after}"


def hunks(before: str, after: str) -> list[Hunk]:
    """The changed places of the new source, in order."""
    old, new = _Places.of(before), _Places.of(after)
    out = []
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    for group in matcher.get_grouped_opcodes(1):
        changed = [g for g in group if g[0] != "equal"]
        functions = dict.fromkeys(
            name
            for _, i1, i2, j1, j2 in changed
            for name in (*old.at(i1 + 1, i2), *new.at(j1 + 1, j2))
        )
        kernels = dict.fromkeys(
            k for f in functions for k in (*new.kernels_of(f), *old.kernels_of(f))
        )
        phases = dict.fromkeys(
            p for f in functions for p in (*new.phases.get(f, ()), *old.phases.get(f, ()))
        )
        first, last = group[0], group[-1]
        header = f"@@ -{first[1] + 1},{last[2] - first[1]} +{first[3] + 1},{last[4] - first[3]} @@"
        out.append(
            Hunk(
                header, tuple(functions), tuple(kernels), tuple(phases),
                sum(j2 - j1 for _, _, _, j1, j2 in changed), sum(i2 - i1 for _, i1, i2, _, _ in changed),
            )
        )  # fmt: skip
    return out


@dataclass(frozen=True)
class _Places:
    """Functions of a source by line, who calls whom by name, and the phases that each marks."""

    spans: tuple[tuple[int, int, str], ...]
    calls: Mapping[str, frozenset[str]]
    kernels: tuple[str, ...]
    phases: Mapping[str, tuple[str, ...]]

    @staticmethod
    def of(source: str) -> _Places:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return _Places((), {}, (), {})
        spans, kernels = [], []
        calls: dict[str, frozenset[str]] = {}
        phases: dict[str, tuple[str, ...]] = {}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                spans.append((start, node.end_lineno or start, node.name))
                inside = [c for c in ast.walk(node) if isinstance(c, ast.Call)]
                calls[node.name] = frozenset(n for c in inside if (n := _name(c.func)))
                phases[node.name] = tuple(dict.fromkeys(p for c in inside for p in _marked(c)))
                if any("kernel" in ast.dump(d) for d in node.decorator_list):
                    kernels.append(node.name)
        return _Places(tuple(spans), calls, tuple(kernels), phases)

    def at(self, first: int, last: int) -> list[str]:
        return [
            name for start, end, name in self.spans if start <= max(first, last) and first <= end
        ]

    def kernels_of(self, function: str) -> list[str]:
        return [k for k in self.kernels if function == k or function in self._reached(k)]

    def _reached(self, start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for name in self.calls.get(todo.pop(), ()):
                if name in self.calls and name not in seen:
                    seen.add(name)
                    todo.append(name)
        return seen


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _marked(call: ast.Call) -> Iterator[str]:
    """Literal names of phases in calls such as `timeline.mark(track, "name", layer)`."""
    if "mark" in _name(call.func):
        for argument in call.args:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value


def _fall(v: Verdict | None) -> Mapping[str, Any] | None:
    return waterfall.of(v.profile) if v is not None else None


def _phase_deltas(before: Verdict | None, after: Verdict | None) -> dict[str, float]:
    old, new = _fall(before), _fall(after)
    if old is None or new is None or old["method"] != new["method"]:
        return {}
    sums: dict[str, float] = {}
    for sign, fall in ((-1.0, old), (1.0, new)):
        for p in fall.get("phases", ()):
            sums[p["phase"]] = sums.get(p["phase"], 0.0) + sign * float(p["us"])
    return sums


def _first(v: Verdict | None) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for x in changes.launches(v):
        found.setdefault(str(x["kernel"]), x)
    return found


def _of(v: Verdict | None, key: str) -> Mapping[str, Any]:
    found = v.profile.get(key) if v is not None else None
    return found if isinstance(found, Mapping) else {}
