"""Is what a step left right? Every output and state against the oracle, its ties and its noise band.

The oracle runs here, after the candidate's launches. Nothing here launches a candidate, and a tensor that the reference
does not list must not have changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from sandbox.artifact import Buffer, on_rank
from sandbox.judge import bands, locate
from sandbox.judge.bands import Errors
from sandbox.judge.case import Case
from sandbox.judge.dtypes import bits, is_float
from sandbox.judge.locate import Where
from sandbox.judge.ties import Settled, settle
from sandbox.verdict import Failure, TensorCheck
from targets.reference import Expected, Tensors

HUGE = 1e300
NEAR = 2.0
"""Up to so many times its bound a tensor gets a second look, with spare schedules, where the trial's own moments do not
decide: in an unusual problem, and in chains, whose many steps and rows hold more extremes than a few moments showed."""
Measure = tuple[bands.Oracle, Errors]


@dataclass(frozen=True)
class Moment:
    """One launch of the candidate: what it was given and what it left.

    `given`: inputs, weights and states for the oracle. `before`, `after`: outputs and states around the launch.
    """

    given: Tensors
    before: Tensors
    after: Tensors
    where: Where


Band = Literal["learn", "share", "alone"]
"""Whose noise decides. `learn`: this moment's, added to what was learned. `share`: what was learned; a tensor beyond it
is given this moment's too. `alone`: this moment's only, for unusual values whose noise says nothing of usual ones."""


@dataclass
class Checker:
    """Compares moments and keeps the worst figures of each tensor. In `noise`, max_abs is relative to the largest
    element, so that it carries over to other seeds."""

    case: Case
    noise: dict[str, Errors] = field(default_factory=dict)
    worst: dict[str, TensorCheck] = field(default_factory=dict)
    tied_rows: int = 0

    def check(self, m: Moment, band: Band = "learn") -> Failure | None:
        """The most telling failure of this moment, or None."""
        settled = settle(self.case, m.given, m.after, m.where)
        if isinstance(settled, Failure):
            return self._before(settled, m) or settled
        self.tied_rows += settled.rows
        failures = [f for b in self._judged() if (f := self._form(b, settled.expected, m))]
        if not failures:
            failures = self._numbers(settled, m, band) or self._unlike(m)
        return _first(failures) if failures else None

    def _before(self, choice: Failure, m: Moment) -> Failure | None:
        """What explains a wrong choice of a later layer: a tensor of an earlier one that is wrong, if there is one."""
        name, first = str(choice.where.get("tensor")), choice.where.get("first") or ()
        axes = m.where.names(name)
        if not first or not axes or not axes[0].endswith("layer"):
            return None
        own = Settled(self.case.reference.run(self.case.workload, m.given, "oracle"), {})
        wrong = [f for f in self._numbers(own, m, "alone") if _layer(f) < first[0]]
        return _first([*wrong, choice]) if wrong else None

    def _unlike(self, m: Moment) -> list[Failure]:
        """Results that all ranks of a job must hold alike, bit for bit (`replicated` of the reference)."""
        if self.case.ranks == 1:
            return []
        replicated = getattr(self.case.reference, "replicated", lambda w: ())
        found = []
        for name in replicated(self.case.workload):
            for rank in range(1, self.case.ranks):
                bad = bits(m.after[name]) != bits(m.after[on_rank(name, rank)])
                if bool(bad.any()):
                    at = locate.spell(locate.first_index(bad), m.where.names(name))
                    text = (
                        f"ranks 0 and {rank} hold different bits in {int(bad.sum())} elements of {name}, first at "
                        f"{at} ({m.where.text()})"
                    )
                    where = {"tensor": name, "rank": rank, "phase": m.where.phase}
                    found.append(Failure("ranks-differ", text, where))
        return found

    def _judged(self) -> tuple[Buffer, ...]:
        return self.case.buffers("outputs", "states")

    def _form(self, b: Buffer, e: Expected, m: Moment) -> Failure | None:
        """Untouched regions, integers and copies, finiteness."""
        before, after = m.before[b.name], m.after[b.name]
        expected = e.tensors.get(b.name)
        if expected is None:
            bad = bits(before) != bits(after)
            return (
                _failure("touched", locate.touched(b.name, bad, m.where))
                if bool(bad.any())
                else None
            )
        if expected.shape != after.shape:
            raise ValueError(
                f"the reference gives {b.name} as {list(expected.shape)}, not {list(after.shape)}"
            )
        mask = full_mask(e.masks.get(b.name), after)
        if mask is not None:
            bad = (bits(before) != bits(after)) & ~mask
            if bool(bad.any()):
                return _failure("touched", locate.touched(b.name, bad, m.where))
        if not is_float(b.dtype) or b.name in e.exact:
            return _equal(b, (expected, after), mask, m.where)
        bad = ~torch.isfinite(after.float() if after.element_size() == 1 else after)
        bad = bad if mask is None else bad & mask
        return (
            _failure("not_finite", locate.unfinite(b.name, bad, m.where))
            if bool(bad.any())
            else None
        )

    def _numbers(self, s: Settled, m: Moment, band: Band) -> list[Failure]:
        measured: dict[Buffer, Measure] = {}
        for b in self._judged():
            expected = s.expected.tensors.get(b.name)
            if expected is not None and is_float(b.dtype) and b.name not in s.expected.exact:
                o = bands.oracle(expected, full_mask(s.expected.masks.get(b.name), expected))
                measured[b] = (o, bands.measure(o, m.after[b.name]))
        noise = self._noise(measured, s, m, band)
        if band != "learn":
            noise = self._second_look(noise, measured, s, m)
        failures = []
        for b, (o, errors) in measured.items():
            limit = self._bound(noise, b, o)
            self._keep(b.name, errors, limit, m.where)
            if not errors.over(limit) <= 1:
                found = locate.outside(b.name, o, m.after[b.name], (errors, limit), m.where)
                failures.append(_failure("band", found))
        return failures

    def _noise(
        self, measured: Mapping[Buffer, Measure], s: Settled, m: Moment, band: Band
    ) -> Mapping[str, Errors]:
        """The band that decides for this moment."""
        if band == "share" and all(b.name in self.noise for b in measured):
            inside = all(
                x.over(self._bound(self.noise, b, o)) <= 1 for b, (o, x) in measured.items()
            )
            return self.noise if inside else _wider(self.noise, self._own(measured, s, m))
        own = self._own(measured, s, m)
        if band == "alone":
            return own
        self.noise.update(_wider(self.noise, own))
        return self.noise

    def _second_look(
        self, noise: Mapping[str, Errors], measured: Mapping[Buffer, Measure], s: Settled, m: Moment
    ) -> Mapping[str, Errors]:
        """Noise of one moment is that of few roundings: where a tensor is just beyond it, more schedules say whether
        those rounded the same by luck."""
        over = [x.over(self._bound(noise, b, o)) for b, (o, x) in measured.items()]
        spare = tuple(getattr(self.case.reference, "spare", ()))
        if not spare or not 1 < max(over, default=0.0) <= NEAR:
            return noise
        return _wider(noise, self._own(measured, s, m, spare))

    def _bound(self, noise: Mapping[str, Errors], b: Buffer, o: bands.Oracle) -> Errors:
        seen = noise[b.name]
        scaled = replace(seen, max_abs=seen.max_abs * o.largest)
        return bands.bound(scaled, o, b.dtype, self.case.workload.layers)

    def _own(
        self,
        measured: Mapping[Buffer, Measure],
        s: Settled,
        m: Moment,
        schedules: tuple[str, ...] = (),
    ) -> dict[str, Errors]:
        """Errors of the legitimate schedules on this very problem, with the choices that decide."""
        reference, w = self.case.reference, self.case.workload
        out: dict[str, Errors] = {}
        for schedule in schedules or reference.schedules:
            if schedule == "oracle":
                continue
            run = reference.run(w, m.given, schedule, s.choices or None)
            for b, (o, _) in measured.items():
                seen = bands.measure(o, run.tensors[b.name])
                if math.isinf(seen.max_abs) or any(
                    math.isnan(getattr(seen, n)) for n in bands.NAMES
                ):
                    raise ValueError(
                        f"the reference's schedule {schedule} strays without bound in {b.name} ({m.where.text()})"
                    )
                relative = replace(seen, max_abs=seen.max_abs / o.largest if o.largest else 0.0)
                out[b.name] = bands.worst([out.get(b.name, bands.ZERO), relative])
        return out

    def _keep(self, name: str, errors: Errors, limit: Errors, where: Where) -> None:
        check = tensor_check(name, errors, limit, where)
        old = self.worst.get(name)
        if old is None or severity(check) > severity(old):
            self.worst[name] = check


def _wider(a: Mapping[str, Errors], b: Mapping[str, Errors]) -> dict[str, Errors]:
    return {n: bands.worst([x[n] for x in (a, b) if n in x]) for n in a.keys() | b.keys()}


def full_mask(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """The mask in the tensor's shape; leading dimensions given, the rest repeated."""
    if mask is None or mask.shape == like.shape:
        return mask
    while mask.ndim < like.ndim:
        mask = mask.unsqueeze(-1)
    return mask.expand(like.shape)


def tensor_check(name: str, e: Errors, limit: Errors, where: Where) -> TensorCheck:
    """Of whole tensor and worst cell, the figures closer to their bounds."""
    rel = max((e.rel_l2, limit.rel_l2), (e.cell_rel_l2, limit.cell_rel_l2), key=_closeness)
    names = ("norm_ratio", "cell_norm_ratio", "gain", "cell_gain")
    norm = max(((getattr(e, n), getattr(limit, n)) for n in names), key=_closeness)
    return TensorCheck(
        name=name, rel_l2=_finite(rel[0]), rel_l2_bound=rel[1], max_abs=_finite(e.max_abs), max_abs_bound=limit.max_abs,
        norm_ratio=_finite(norm[0]), norm_ratio_bound=norm[1], ok=e.over(limit) <= 1, where=where.text(),
    )  # fmt: skip


def severity(c: TensorCheck) -> float:
    pairs = (
        (c.rel_l2, c.rel_l2_bound),
        (c.max_abs, c.max_abs_bound),
        (c.norm_ratio, c.norm_ratio_bound),
    )
    return max(map(_closeness, pairs))


def _closeness(pair: tuple[float, float]) -> float:
    error, limit = pair
    if not math.isfinite(error):
        return HUGE
    return error / limit if limit > 0 else (HUGE if error > 0 else 0.0)


def _finite(x: float) -> float:
    return x if math.isfinite(x) else HUGE


def _equal(
    b: Buffer, pair: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None, where: Where
) -> Failure | None:
    # bit views: NaN equals itself, and torch has no arithmetic for the wider unsigned types
    expected, after = (bits(x.contiguous()) for x in (pair[0].to(pair[1].dtype), pair[1]))
    same = expected == after
    if mask is not None:
        same = same | ~mask
    if bool(same.all()):
        return None
    shown = torch.where(same, after, expected)
    return _failure("integers", locate.unequal(b.name, after, shown, where))


def _failure(rule: str, found: tuple[str, Mapping[str, Any]]) -> Failure:
    return Failure(rule, found[0], found[1])


def _layer(f: Failure) -> float:
    layer = f.where.get("layer")
    return math.inf if layer is None else float(layer)


def _first(failures: list[Failure]) -> Failure:
    """The earliest layer explains the later ones; tensors without a layer come last."""

    chosen = min(failures, key=_layer)
    also = [str(f.where.get("tensor")) for f in failures if f is not chosen]
    if not also:
        return chosen
    return Failure(chosen.rule, chosen.message, {**chosen.where, "also": also[:16]})
