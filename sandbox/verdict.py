"""Verdict: what the judge says of a candidate, and the one status enum of the project.

Illegal states cannot be built: timing only with `passed`, a failing tensor only with `wrong` or `flaky`. The JSON form
is the schema of verdict.json and of every `--json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal

SCHEMA = 1


class Status(StrEnum):
    REJECTED = "rejected"  # the source or plan breaks a rule before compiling
    COMPILE_ERROR = "compile_error"  # trace, DSL or assembler
    PLAN_ERROR = "plan_error"  # capture failed, schema broken, plan not stable
    LINT = "lint"  # spills, shared memory, residency, barrier pattern
    FAULT = "fault"  # illegal address, launch failure
    HANG = "hang"  # watchdog
    WRONG = "wrong"  # a tensor outside its band or not finite
    FLAKY = "flaky"  # right in some repeats only
    CHEAT = "cheat"  # integrity, guard zones, faster than the bytes allow
    UNSUPPORTED = "unsupported"  # this device cannot run it
    INFRA = "infra"  # our fault or the machine's: retried, never scored
    CANCELLED = "cancelled"  # budget or user
    PASSED = "passed"

    @property
    def cacheable(self) -> bool:
        """False for what says nothing about the candidate."""
        return self not in (Status.INFRA, Status.CANCELLED)


class Outcome(StrEnum):
    """Of a passed candidate against the incumbent."""

    BETTER = "better"
    SLOW = "slow"
    NOT_TIMED = "not_timed"


class Tier(StrEnum):
    SCREEN = "screen"
    FULL = "full"
    PROMOTE = "promote"


class Trust(StrEnum):
    AUDITED = "audited"
    JUDGED = "judged"
    UNJAILED = "unjailed"


@dataclass(frozen=True)
class Failure:
    """Why a candidate did not pass, in a sentence for people and models, and where. `rule` is a stable short id."""

    rule: str
    message: str
    where: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TensorCheck:
    """One compared tensor: worst errors over seeds and steps against bounds from the noise band (no units)."""

    name: str
    rel_l2: float
    rel_l2_bound: float
    max_abs: float
    max_abs_bound: float
    norm_ratio: float
    norm_ratio_bound: float
    ok: bool
    where: str = ""


@dataclass(frozen=True)
class Correctness:
    seeds: int
    steps: int
    repeats: int
    tensors: tuple[TensorCheck, ...]
    checked: tuple[str, ...]
    not_verified: tuple[str, ...]


@dataclass(frozen=True)
class Ratio:
    """A ratio of times with its 95 % confidence interval; over 1 means the candidate is faster."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class WorkloadTiming:
    """Times of one workload. us = microseconds, of one step; per layer = step / layers."""

    target: str
    preset: str
    layers: int
    m: int
    q: int
    context: int
    ranks: int
    launches: int
    us: float
    us_per_layer: float
    gb_per_s: float
    floor_bytes: int
    fraction_of_floor_measured: float | None
    fraction_of_floor_spec: float | None
    speedup_incumbent: Ratio | None = None
    speedup_graph: Ratio | None = None
    speedup_best: Ratio | None = None
    best_baseline: str = ""
    regime: str = "chained"
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    kind: Literal["measured", "modelled"]
    workloads: tuple[WorkloadTiming, ...]
    aa_half_width: float | None = None
    conditions: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelResources:
    """ptxas's report of one kernel: registers a thread, bytes of stack, spills and static shared memory."""

    kernel: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    smem_static: int


def short_name(kernel: str) -> str:
    """A kernel's own name out of the DSL's mangled one, at most 60 characters."""
    return kernel.removeprefix("kernel_").removeprefix("cutlass_").split("_tensorptr", 1)[0][:60]


@dataclass(frozen=True)
class Verdict:
    status: Status
    target: str
    artifact: str
    device: Mapping[str, Any]
    tier: Tier
    trust: Trust
    isolation: Mapping[str, Any]
    date: str
    commit: str = ""
    outcome: Outcome | None = None
    failure: Failure | None = None
    correctness: Correctness | None = None
    timing: Timing | None = None
    resources: tuple[KernelResources, ...] = ()
    findings: tuple[Failure, ...] = ()
    checked: tuple[str, ...] = ()
    not_verified: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    profile: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        passed = self.status is Status.PASSED
        if self.timing is not None and not passed:
            raise ValueError(f"timing with status {self.status}")
        if (self.outcome is not None) != passed:
            raise ValueError("an outcome belongs to passed, and to it alone")
        if (self.failure is None) != passed:
            raise ValueError("a failure belongs to every status but passed")
        if self.correctness is not None and self.status not in (
            Status.PASSED,
            Status.WRONG,
            Status.FLAKY,
        ):
            raise ValueError(f"correctness with status {self.status}")
        if passed and self.correctness is None:
            raise ValueError("passed without correctness")

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def from_json(data: Mapping[str, Any]) -> Verdict:
    """Inverse of `to_json`. Raises ValueError, KeyError or TypeError for what no judge of this version wrote."""
    d = dict(data)
    if d.pop("schema", None) != SCHEMA:
        raise ValueError(f"verdict schema is not {SCHEMA}")
    timing = d.get("timing")
    if timing is not None:
        rows = tuple(_workload_timing(w) for w in timing["workloads"])
        d["timing"] = Timing(**{**timing, "workloads": rows})
    if d.get("correctness") is not None:
        c = d["correctness"]
        d["correctness"] = Correctness(
            **{
                **c,
                "tensors": tuple(TensorCheck(**t) for t in c["tensors"]),
                "checked": tuple(c["checked"]),
                "not_verified": tuple(c["not_verified"]),
            }
        )
    if d.get("failure") is not None:
        d["failure"] = Failure(**d["failure"])
    d["findings"] = tuple(Failure(**f) for f in d.get("findings", ()))
    d["resources"] = tuple(KernelResources(**r) for r in d.get("resources", ()))
    d["status"], d["tier"], d["trust"] = Status(d["status"]), Tier(d["tier"]), Trust(d["trust"])
    d["outcome"] = None if d.get("outcome") is None else Outcome(d["outcome"])
    for key in ("checked", "not_verified"):
        d[key] = tuple(d.get(key, ()))
    return Verdict(**d)


def _workload_timing(w: Mapping[str, Any]) -> WorkloadTiming:
    ratios = ("speedup_incumbent", "speedup_graph", "speedup_best")
    return WorkloadTiming(**{**w, **{r: Ratio(**w[r]) if w.get(r) else None for r in ratios}})
