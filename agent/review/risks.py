"""Risk notes: what a reviewer should look at first, computed from source, PTX, launch plan and verdict.

Counts of patterns before and after, no proof: a note says where to look, and its absence says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sandbox.verdict import Correctness, TensorCheck, Tier, Trust, Verdict

NEAR = 0.5  # share of a bound from which a tensor is worth a look
VERY_NEAR = 0.8
THIN_GAIN = 1.005
POLL_CHARS = 4000

_SOURCE = {
    "inline-ptx": (re.compile(r"\binline_asm\b|\binline_ptx\b"), "inline PTX calls in the source"),
    "fast-math": (re.compile(r"\bfastmath\b|fast_math|approx\s*=\s*True"), "fast-math switches in the source"),
}  # fmt: skip
_PTX = {
    "inline-ptx": (re.compile(r"//\s*begin inline asm"), "inline assembly blocks in the PTX"),
    "atomics": (re.compile(r"^\s*(?:@!?%\w+\s+)?(?:atom|red)\.", re.M), "atomic instructions"),
    "relaxed": (re.compile(r"\.relaxed\b|\b(?:ld|st)\.volatile\b"), "relaxed or volatile accesses"),
    "ordering": (re.compile(r"\.(?:acquire|release|acq_rel)\b"), "acquire or release accesses"),
    "fences": (re.compile(r"\b(?:fence|membar)\."), "fences"),
    "approximate": (re.compile(r"\.approx\b|\.ftz\b"), "approximate or flushing operations"),
    "dependent-launch": (re.compile(r"\bgriddepcontrol\b"), "programmatic launch controls"),
}  # fmt: skip
_LABEL = re.compile(r"^(\$[\w$]+):", re.M)
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$[\w$]+);")
_POLL = re.compile(r"\b(?:ld\.(?:acquire|relaxed|volatile)|atom\.)[\w.:]*")
_SHARED = re.compile(r"\.shared\b")
_LITERAL = re.compile(r'("""|\'\'\')(?:.*?)\1|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)


@dataclass(frozen=True)
class Risk:
    """`rule` is a stable short id; `level`: `look` at it, or only `know` it."""

    rule: str
    level: Literal["look", "know"]
    message: str


@dataclass(frozen=True)
class Matter:
    """What risks are read from: one version of a kernel. `ptx` None when its artifact is gone;
    `launches` as in an artifact's plan.
    """

    source: str
    ptx: str | None = None
    launches: tuple[Mapping[str, Any], ...] = field(default_factory=tuple)
    verdict: Verdict | None = None


def risks(before: Matter | None, after: Matter) -> tuple[Risk, ...]:
    """Notes on `after`, against its parent if there is one; the first are the most pressing."""
    old = before or Matter("", "")
    found = [
        *_hidden(after.source),
        *_counted(old, after, first=before is None),
        *_spins(old, after),
        *_plan(old, after),
        *_verdict(old.verdict, after.verdict),
    ]
    return tuple(sorted(found, key=lambda r: r.level != "look"))


def spins(ptx: str) -> int:
    """Loops that poll memory outside shared memory: short backward branches around a poll."""
    labels = {m[1]: m.start() for m in _LABEL.finditer(ptx)}
    starts = set()
    for branch in _BRANCH.finditer(ptx):
        start = labels.get(branch[1], len(ptx))
        if start < branch.start() <= start + POLL_CHARS:
            polls = (m for m in _POLL.finditer(ptx, start, branch.start()))
            if any(not _SHARED.search(m[0]) for m in polls):
                starts.add(start)
    return len(starts)


def closest(c: Correctness) -> tuple[TensorCheck, float] | None:
    """The tensor nearest to one of its bounds, and the share of the bound that it used."""
    near = [(t, used(t)) for t in c.tensors]
    return max(near, key=lambda item: item[1], default=None)


def used(t: TensorCheck) -> float:
    """The largest share of a bound that a tensor's worst errors use; over 1 is outside. Bounds of
    zero count when they are exceeded.
    """
    pairs = (
        (t.rel_l2, t.rel_l2_bound), (t.max_abs, t.max_abs_bound), (t.norm_ratio, t.norm_ratio_bound),
    )  # fmt: skip
    return max(e / b if b > 0 else (float("inf") if e > 0 else 0.0) for e, b in pairs)


def _counted(old: Matter, new: Matter, first: bool) -> Iterator[Risk]:
    """Patterns whose number changed; for the first of a line, those that are there."""
    pairs = [
        (rule, what, (_code(old.source), _code(new.source)), rx)
        for rule, (rx, what) in _SOURCE.items()
    ]
    if new.ptx is None or (old.ptx is None and not first):
        yield Risk("no-ptx", "look", "the PTX of one of the two is missing: not compared")
    else:
        pairs += [(rule, what, (old.ptx or "", new.ptx), rx) for rule, (rx, what) in _PTX.items()]
    for rule, what, (before, after), rx in pairs:
        was, now = len(rx.findall(before)), len(rx.findall(after))
        if rule == "fences" and now < was:
            yield Risk("fewer-fences", "look", f"{what}: {was} before, {now} now")
        elif now > was:
            level: Literal["look", "know"] = "know" if rule in ("ordering", "fences") else "look"
            yield Risk(
                rule, level, f"{what}: {was} before, {now} now" if not first else f"{what}: {now}"
            )


def _hidden(source: str) -> Iterator[Risk]:
    """Characters that make a text look other than it is: controls, direction marks, no-width ones."""
    odd = sorted({f"U+{ord(c):04X}" for c in source if not (c.isprintable() or c in "\n\t\r")})
    if odd:
        yield Risk(
            "hidden-characters",
            "look",
            f"the source has invisible characters: {', '.join(odd[:8])}",
        )


def _spins(old: Matter, new: Matter) -> Iterator[Risk]:
    was, now = spins(old.ptx or ""), spins(new.ptx or "")
    if now > was:
        yield Risk("spins", "look", f"loops that poll memory: {was} before, {now} now")


def _plan(old: Matter, new: Matter) -> Iterator[Risk]:
    for key, words in (
        ("cooperative", "cooperative launches (grid-wide waiting)"),
        ("pdl", "launches that overlap their predecessor (PDL)"),
        ("cluster", "launches in clusters"),
    ):  # fmt: skip
        was, now = (sum(bool(x.get(key)) for x in m.launches) for m in (old, new))
        if now > was:
            yield Risk(key, "know", f"{words}: {was} before, {now} now")


def _verdict(old: Verdict | None, new: Verdict | None) -> Iterator[Risk]:
    if new is None:
        yield Risk("no-verdict", "look", "there is no verdict")
        return
    yield from _tolerance(old, new)
    yield from _spills(old, new)
    if new.trust is not Trust.AUDITED:
        yield Risk("trust", "know", f"trust is {new.trust}, not audited")
    if new.tier is not Tier.PROMOTE:
        yield Risk("tier", "look", f"judged at tier {new.tier} only")
    if new.timing is not None and new.timing.kind == "modelled":
        yield Risk("modelled", "look", "times are modelled, nothing was measured on a GPU")
    for w in new.timing.workloads if new.timing else ():
        ratio = w.speedup_incumbent
        if ratio is not None and ratio.low <= THIN_GAIN:
            words = f"{ratio.value:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]"
            yield Risk(
                "thin-gain", "look", f"{w.regime}: the speed-up is hardly clear of 1: {words}"
            )
    if new.not_verified:
        count = len(new.not_verified)
        yield Risk(
            "not-verified", "know", f"not verified: {count} {'thing' if count == 1 else 'things'}"
        )
    if new.findings:
        yield Risk("findings", "know", f"findings of lint and judge: {len(new.findings)}")


def _tolerance(old: Verdict | None, new: Verdict) -> Iterator[Risk]:
    found = closest(new.correctness) if new.correctness else None
    if found is None or found[1] < NEAR:
        return
    tensor, share = found
    before = closest(old.correctness) if old and old.correctness else None
    was = f"; the parent's worst uses {before[1]:.0%}" if before else ""
    yield Risk(
        "tolerance", "look" if share >= VERY_NEAR else "know",
        f"{tensor.name} uses {share:.0%} of its error bound{was}",
    )  # fmt: skip


def _spills(old: Verdict | None, new: Verdict) -> Iterator[Risk]:
    was, now = (
        sum(r.spill_stores + r.spill_loads for r in v.resources) if v else 0 for v in (old, new)
    )
    if now > was:
        yield Risk("spills", "look", f"registers spilled to memory: {was} bytes before, {now} now")


def _code(source: str) -> str:
    """Source without comments and string contents: words in a docstring are no code."""
    bare = _LITERAL.sub('""', source)
    return re.sub(r"#[^\n]*", "", bare)
