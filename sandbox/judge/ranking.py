"""What measured times mean: ratios with intervals, fractions of the floor, cheats by arithmetic, the outcome.

Pure arithmetic over samples; it measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sandbox.judge import stats
from sandbox.judge.case import Case
from sandbox.judge.ending import Ended
from sandbox.judge.report import Draft
from sandbox.judge.stats import Samples, SelfTest
from sandbox.verdict import Failure, Outcome, Ratio, Status, Timing, WorkloadTiming

ABOVE_STREAM = 1.05
MEMO_FLAG, MEMO_CHEAT = 1.1, 1.25
"""Right kernels on an H200: 0.995 to 1.019 in 29 verdicts."""


@dataclass(frozen=True)
class Measured:
    """Samples [blocks, 2] of one step in microseconds by arm; `even`: the same, each block in units of its own mean.
    `fresh`: blocks whose inputs no arm had seen before. `cold`, `warm`: isolated steps after an L2 flush, and after
    another step."""

    samples: Mapping[str, Samples]
    even: Mapping[str, Samples]
    self_test: SelfTest
    fresh: tuple[int, ...]
    sets: int
    steps: int
    launches: int
    floor_bytes: int
    cold: Mapping[str, Samples]
    conditions: Mapping[str, Any]
    resamples: int
    empty_us: float
    warm: Mapping[str, Samples] = field(default_factory=dict)

    def us(self, arm: str) -> float:
        return float(np.median(self.samples[arm]))

    @property
    def baselines(self) -> list[str]:
        return [a for a in self.samples if a not in ("candidate", "twin", "incumbent")]


@dataclass(frozen=True)
class Timed:
    outcome: Outcome
    timing: Timing | None


def rank(case: Case, m: Measured, draft: Draft) -> Timed:
    """Raises Ended (`cheat`) for times that the bytes do not allow."""
    us = m.us("candidate")
    _check_floor(case, m, us, draft)
    memo = _check_memory_of_inputs(m, draft)
    incumbent = _against(m, "incumbent")
    cold = _cold_ratio(m)
    row = workload_timing(case, us, m.launches, m.floor_bytes)
    fastest = _best(case, m, draft)
    detail = {
        "blocks": int(m.samples["candidate"].shape[0]), "steps_per_block": m.steps, "weight_sets": m.sets,
        "us": {a: m.us(a) for a in m.samples}, "us_quartiles": _quartiles(m.samples["candidate"]),
        "empty_interval_us": m.empty_us, "aa": [m.self_test.ratio.low, m.self_test.ratio.high],
        "margin": m.self_test.margin, "fresh_over_repeated": memo,
        "isolated_us": {a: float(np.median(x)) for a, x in m.warm.items()},
        "cold_us": {a: float(np.median(x)) for a, x in m.cold.items()},
        "cold_ratio": None if cold is None else [cold.value, cold.low, cold.high],
    }  # fmt: skip
    filled = WorkloadTiming(**{
        **row, "speedup_incumbent": incumbent, "speedup_graph": _against(m, "graph"),
        "speedup_best": _against(m, fastest), "best_baseline": fastest, "detail": detail,
    })  # fmt: skip
    _describe(m, draft, case)
    timing = Timing("measured", (filled,), m.self_test.half_width, m.conditions)
    return Timed(outcome(incumbent, cold, m.self_test.margin, memo), timing)


def _best(case: Case, m: Measured, draft: Draft) -> str:
    """The fastest baseline; none where those that deserve the name were not timed."""
    strong: tuple[str, ...] = getattr(case.target, "strong_baselines", ())
    if m.baselines and strong and not set(strong) & set(m.baselines):
        draft.not_verified.append(
            f"speed-up over the best baseline: {' or '.join(strong)} was not timed"
        )
        return ""
    return min(m.baselines, key=m.us, default="")


def outcome(
    incumbent: Ratio | None, cold: Ratio | None, margin: float, memo: float | None = None
) -> Outcome:
    """`better` only if the interval clears the margin, and the isolated cold step is not worse by more than it. What is
    faster on inputs that it has seen (`memo`) must win by that much more: decoding never sees them twice."""
    if incumbent is None:
        return Outcome.NOT_TIMED
    worse_cold = cold is not None and not cold.low > 1 - margin
    seen_before = memo if memo is not None and memo > MEMO_FLAG else 1.0
    wins = incumbent.low > (1 + margin) * seen_before
    return Outcome.BETTER if wins and not worse_cold else Outcome.SLOW


def workload_timing(case: Case, us: float, launches: int, floor_bytes: int) -> dict[str, Any]:
    """The fields of `WorkloadTiming` that follow from one time."""
    w, facts = case.workload, case.device.facts()

    def fraction(rate: float | None) -> float | None:
        return floor_bytes / rate * 1e6 / us if rate and us > 0 else None

    return {
        "target": w.target, "preset": w.options.preset, "layers": w.layers, "m": w.rows, "q": w.q, "context": w.context,
        "ranks": w.ranks, "launches": launches, "us": us, "us_per_layer": us / max(1, w.layers),
        "gb_per_s": floor_bytes / us / 1e3 if us > 0 else 0.0, "floor_bytes": floor_bytes,
        "fraction_of_floor_measured": fraction(facts.stream_rate), "fraction_of_floor_spec": fraction(facts.spec_rate),
    }  # fmt: skip


def _against(m: Measured, arm: str) -> Ratio | None:
    if arm not in m.even:
        return None
    return stats.ratio([m.even[arm]], [m.even["candidate"]], m.resamples)


def _cold_ratio(m: Measured) -> Ratio | None:
    if "incumbent" not in m.cold:
        return None
    return stats.ratio([m.cold["incumbent"]], [m.cold["candidate"]], m.resamples)


def _check_floor(case: Case, m: Measured, us: float, draft: Draft) -> None:
    """Faster than the bytes that must move (less one L2 of reuse) at the specified rate: `cheat` until explained."""
    facts = case.device.facts()
    moved = m.floor_bytes - facts.l2_bytes
    if moved <= 0 or not facts.spec_rate:
        draft.not_verified.append(
            "time against the byte floor: the step's bytes fit the L2 cache, or no rate is known"
        )
        return
    rate = moved / us * 1e6
    if rate > facts.spec_rate:
        message = (
            f"{us:.2f} us for {m.floor_bytes} bytes would be {m.floor_bytes / us / 1e6:.2f} TB/s; the memory "
            f"has {facts.spec_rate / 1e12:.2f} TB/s: some of the work is not done"
        )
        raise Ended(
            Status.CHEAT, Failure("floor", message, {"us": us, "floor_bytes": m.floor_bytes})
        )
    if facts.stream_rate and rate > ABOVE_STREAM * facts.stream_rate:
        draft.findings.append(
            Failure(
                "floor", f"{rate / 1e12:.2f} TB/s is above 105 % of the measured streaming rate"
            )
        )


def _check_memory_of_inputs(m: Measured, draft: Draft) -> float | None:
    """Time on inputs never seen over time on repeated ones, against the same figure of the other arms. A kernel that
    remembers results is slow on the former."""
    rest = [i for i in range(m.samples["candidate"].shape[0]) if i not in m.fresh]
    seen = [i for i in m.fresh if i < m.samples["candidate"].shape[0]]
    if not rest or not seen:
        return None

    def factor(arm: str) -> float:
        x = m.samples[arm]
        return float(np.min(x[seen, 0]) / np.median(x[rest]))

    others = [factor(a) for a in m.samples if a != "candidate" and a != "twin"]
    own = factor("candidate") / max([1.0, *others])
    if (
        own > MEMO_CHEAT and others
    ):  # without another arm, a slow start of the machine looks the same
        message = (
            f"{own:.2f} x slower on inputs it has not seen: results of earlier steps are reused"
        )
        raise Ended(Status.CHEAT, Failure("memory", message, {"fresh_over_repeated": own}))
    if own > MEMO_FLAG:
        draft.findings.append(Failure("memory", f"{own:.2f} x slower on inputs it has not seen"))
    return own


def _quartiles(x: Samples) -> list[float]:
    return [float(q) for q in np.quantile(x, [0.25, 0.5, 0.75])]


def _describe(m: Measured, draft: Draft, case: Case) -> None:
    blocks = m.samples["candidate"].shape[0]
    draft.checked.append(
        f"timed in {blocks} ABBA blocks of {m.steps} chained steps, each with inputs and outputs of its own; all timed "
        "outputs and states equal an untimed run of which secret steps match the oracle"
    )
    draft.checked.append(
        f"one kernel against itself: within {m.self_test.half_width:.2%} (95 % interval)"
    )
    total = m.sets * case.group_bytes("weights", "states")
    if total < 4 * case.device.facts().l2_bytes:
        draft.not_verified.append(
            "weights and states come from memory: all copies together are below 4 x L2"
        )
    if not m.conditions.get("before"):
        draft.not_verified.append("clocks, power and temperature: this host does not tell")
    if not m.cold:
        draft.not_verified.append("an isolated step with a cold L2 (tier full)")
