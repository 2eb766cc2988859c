"""Search policy: who is a parent, what is promoted, when a run has converged, what budgets allow.

Pure functions of plain values: no file, no clock, no database, no randomness. They decide on the
judge's numbers alone and never compare verdicts of different trust or device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sandbox.verdict import Outcome, Ratio, Status, Tier, Trust, Verdict, WorkloadTiming

# Stop reasons. The first group is a normal end; the second leaves a partial result behind.
DONE = ("floor", "plateau", "rounds", "candidates", "exhausted", "seed_failed", "infra")
SPENT = ("usd", "tokens", "minutes", "gpu_seconds", "credit", "auth", "provider")
TIERS = (Tier.SCREEN, Tier.FULL, Tier.PROMOTE)
REPAIRABLE = frozenset(
    {
        Status.REJECTED,
        Status.COMPILE_ERROR,
        Status.PLAN_ERROR,
        Status.LINT,
        Status.FAULT,
        Status.HANG,
        Status.WRONG,
        Status.FLAKY,
    }
)
MOST_INFRA = 3


@dataclass(frozen=True)
class Limits:
    """What a run may use. None: no limit. `patience`: rounds without a promotion before it
    stops.
    """

    rounds: int | None = 8
    candidates: int | None = None
    usd: float | None = None
    tokens: int | None = None
    minutes: float | None = None
    gpu_seconds: float | None = None
    stop_at: float | None = 0.9
    patience: int | None = 3


@dataclass(frozen=True)
class Spent:
    """What was used, or what is in flight. Money is dollars; unpriced models cost 0 here."""

    usd: float = 0.0
    tokens: int = 0
    minutes: float = 0.0
    gpu_seconds: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.usd + other.usd,
            self.tokens + other.tokens,
            self.minutes + other.minutes,
            self.gpu_seconds + other.gpu_seconds,
        )


@dataclass(frozen=True)
class Progress:
    """Where a run is. `stale`: rounds since the last promotion; `candidates` without the seed."""

    round: int
    candidates: int
    stale: int
    fraction: float | None
    infra_in_a_row: int = 0


@dataclass(frozen=True)
class Standing:
    """What ranking needs of a recorded candidate."""

    seq: int
    parent: int | None
    verdict: Verdict
    promoted: bool = False


def over(limits: Limits, spent: Spent) -> str | None:
    """The first budget that is used up, by name."""
    for name in ("usd", "tokens", "minutes", "gpu_seconds"):
        limit = getattr(limits, name)
        if limit is not None and not getattr(spent, name) < limit:
            return name
    return None


def exceeds(limits: Limits, committed: Spent, more: Spent) -> str | None:
    """The first budget that `more` would break on top of what is spent and in flight."""
    total = committed + more
    for name in ("usd", "tokens", "gpu_seconds"):
        limit = getattr(limits, name)
        if limit is not None and getattr(more, name) > 0 and getattr(total, name) > limit:
            return name
    return over(limits, committed)


def stop_reason(limits: Limits, progress: Progress, spent: Spent) -> str | None:
    """Why no further round should begin, or None."""
    if progress.infra_in_a_row >= MOST_INFRA:
        return "infra"
    spent_up = over(limits, spent)
    if spent_up:
        return spent_up
    reached = progress.fraction
    if limits.stop_at is not None and reached is not None and reached >= limits.stop_at:
        return "floor"
    if limits.candidates is not None and progress.candidates >= limits.candidates:
        return "candidates"
    if limits.rounds is not None and progress.round >= limits.rounds:
        return "rounds"
    if limits.patience is not None and progress.stale >= limits.patience:
        return "plateau"
    return None


def width(limits: Limits, k: int, candidates: int) -> int:
    """How many candidates the next round may have."""
    if limits.candidates is None:
        return k
    return max(0, min(k, limits.candidates - candidates))


def workload(verdict: Verdict) -> WorkloadTiming | None:
    """The headline workload: the first."""
    if verdict.timing is None or not verdict.timing.workloads:
        return None
    return verdict.timing.workloads[0]


def fraction(verdict: Verdict) -> float | None:
    """Share of the byte floor reached: against the measured streaming rate, else against the
    specification.
    """
    row = workload(verdict)
    if row is None:
        return None
    got = row.fraction_of_floor_measured
    return got if got is not None else row.fraction_of_floor_spec


def shares(w: WorkloadTiming) -> str:
    """The share of the byte floor in words, at both rates; empty where no rate is known."""
    measured, spec = w.fraction_of_floor_measured, w.fraction_of_floor_spec
    if measured is None and spec is None:
        return ""
    both = f"{measured:.1%} of the byte floor at the measured rate" if measured is not None else ""
    if spec is None:
        return both
    return (
        f"{both}, {spec:.1%} at the specified one"
        if both
        else f"{spec:.1%} of the byte floor at the specified rate"
    )


def ratios(w: WorkloadTiming) -> list[tuple[str, Ratio]]:
    """What was timed beside it, by name: "baseline" is the fastest one and nothing else."""
    pairs = (
        ("the incumbent", w.speedup_incumbent), ("the torch graph", w.speedup_graph),
        (f"the fastest baseline timed with it, {w.best_baseline}", w.speedup_best),
    )  # fmt: skip
    return [(what, ratio) for what, ratio in pairs if ratio is not None]


def gain(verdict: Verdict) -> float | None:
    """Lower bound of the paired speed-up over the incumbent of that judgement; None without one."""
    row = workload(verdict)
    if row is None or row.speedup_incumbent is None or not math.isfinite(row.speedup_incumbent.low):
        return None
    return row.speedup_incumbent.low


def better(verdict: Verdict) -> bool:
    return verdict.status is Status.PASSED and verdict.outcome is Outcome.BETTER


def rank(verdict: Verdict) -> tuple[int, float]:
    """Order of one candidate's versions judged against one incumbent: larger is better."""
    if verdict.status is not Status.PASSED:
        return (0, 0.0)
    low = gain(verdict)
    if low is not None:
        return (2 if better(verdict) else 1, low)
    row = workload(verdict)
    return (1, -row.us if row and math.isfinite(row.us) else -math.inf)


def promotable(incumbent: Verdict, verdict: Verdict, tier: Tier) -> tuple[bool, str]:
    """Whether a confirmed verdict makes its candidate the incumbent, and the reason in words."""
    if not better(verdict):
        what = verdict.outcome or verdict.status
        return False, f"the judge says {what}"
    if TIERS.index(verdict.tier) < TIERS.index(tier):
        return False, f"judged at {verdict.tier} only, {tier} is required"
    if jailed(verdict) is not jailed(incumbent):
        return False, f"trust {verdict.trust} cannot be ranked against {incumbent.trust}"
    if not same_device(incumbent, verdict):
        return False, "it was judged on another device than the incumbent"
    low = gain(verdict)
    if low is None or not low > 1.0:
        return False, "the interval of its speed-up is not clear of 1"
    return True, f"speed-up over the incumbent at least {low:.4f} at 95 %"


def jailed(verdict: Verdict) -> bool:
    """Compiled in a real jail. `audited` differs from `judged` only in how often it was looked
    at.
    """
    return verdict.trust is not Trust.UNJAILED


def same_device(a: Verdict, b: Verdict) -> bool:
    return all(a.device.get(key) == b.device.get(key) for key in ("kind", "name"))


def winner(found: Sequence[tuple[int, Verdict]], lines: Mapping[int, int]) -> int | None:
    """Of promotable candidates of one round (seq, verdict) the one with the largest lower bound. Of
    those that cannot be told apart from it, the one with the fewest `lines` (seq -> lines of code).
    """
    if not found:
        return None
    most = max(gain(verdict) or 0.0 for _, verdict in found)
    alike = [(seq, v) for seq, v in found if _upper(v) >= most]
    return min(alike, key=lambda x: (lines.get(x[0], 0), -(gain(x[1]) or 0.0), x[0]))[0]


def _upper(verdict: Verdict) -> float:
    """Upper bound of what `gain` is the lower bound of."""
    row = workload(verdict)
    ratio = row.speedup_incumbent if row is not None else None
    return ratio.high if ratio is not None and math.isfinite(ratio.high) else 0.0


def code_lines(source: str) -> int:
    """Lines that are neither blank nor a comment."""
    return sum(1 for x in source.splitlines() if x.strip() and not x.strip().startswith("#"))


def parents(standings: Sequence[Standing], incumbent: int, k: int) -> tuple[int, ...]:
    """Parents of the next round. The incumbent takes most places; every third goes to the best
    other lineage.

    "Best other" is the passed candidate with the smallest time that is no ancestor of the incumbent
    and was judged on the incumbent's device, both jailed or neither.
    """
    by_seq = {s.seq: s for s in standings}
    ancestors = set()
    at: int | None = incumbent
    while at is not None and at not in ancestors:
        ancestors.add(at)
        at = by_seq[at].parent if at in by_seq else None
    base = by_seq[incumbent].verdict
    rivals = [
        s
        for s in standings
        if s.seq not in ancestors
        and s.verdict.status is Status.PASSED
        and jailed(s.verdict) is jailed(base)
        and same_device(base, s.verdict)
        and workload(s.verdict) is not None
    ]
    rivals.sort(key=lambda s: (_us(s.verdict), s.seq))
    picks = []
    for slot in range(k):
        rival = slot // 3
        takes = slot % 3 == 2 and rival < len(rivals)
        picks.append(rivals[rival].seq if takes else incumbent)
    return tuple(picks)


def _us(verdict: Verdict) -> float:
    row = workload(verdict)
    return row.us if row is not None and math.isfinite(row.us) else math.inf
