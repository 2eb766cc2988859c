"""How often right results are beyond the judge's bounds, case by case: many seeds, without a kernel or a device.

    python benchmarks/judge_false_rejects.py kimi-k3-kda kimi-k3-mla --seeds 200 --jobs 8 [--case beta] [--json FILE]

What a right kernel would leave is made by torch: schedules that the reference does not use for its bands (other
split sums, gates held in fp16), and each of its own schedules against the bands of the others. Every one is judged by
the judge's own checker on usual values, on every distribution and on every held-out case. It measures the bounds, not
a kernel: rounding inside a GPU's instructions is not in it. Mistakes beside them (a gain of 1 %) show what a change of
the cases would cost.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sandbox.devices.cpu import CpuDevice
from sandbox.jobs import JudgeJob
from sandbox.judge import bands
from sandbox.judge.case import Case, open_case
from sandbox.judge.checks import Checker, Moment, full_mask
from sandbox.judge.locate import Where
from targets.kimi_k3.maths import kda, mla, precision
from targets.kimi_k3.maths.precision import Schedule
from targets.reference import Tensors

USUAL = "usual"
OWN = tuple(n for n in precision.SCHEDULES if n != "oracle")


@dataclass(frozen=True)
class Variant:
    """`schedule`: how sums are split and what is rounded; `gate`: what happens to an output gate, `beta`: to KDA's
    write strengths. `left_out`: a schedule of the reference that is kept out of the band. `right`: whether the judge
    should accept it. `parts`: where it says anything; () = everywhere."""

    name: str
    schedule: Schedule
    gate: Callable[[Tensor], Tensor] | None = None
    beta: float = 1.0
    left_out: str = ""
    right: bool = True
    parts: tuple[str, ...] = ()

    def fits(self, target: str) -> bool:
        return not self.parts or target.removeprefix("kimi-k3-") in self.parts


def in_half(x: Tensor) -> Tensor:
    return x.to(torch.float16).to(x.dtype)


def scaled(x: Tensor) -> Tensor:
    return 1.01 * x


GATED = ("kda", "mla", "decode")
F32 = Schedule("f32 in 32 parts", chunks=32)
VARIANTS = {
    v.name: v
    for v in (
        *(Variant(f"{n} against the others", precision.SCHEDULES[n], left_out=n) for n in OWN),
        *(Variant(f"f32 in {n} parts", Schedule("x", chunks=n)) for n in (3, 5, 12, 32)),
        Variant("conv and o rounded, 12 parts", Schedule("x", chunks=12, round_u=True, round_o=True)),
        Variant("gate in fp16, 32 parts", F32, in_half, parts=GATED),
        Variant("gate in fp16, 4 parts", Schedule("x", chunks=4), in_half, parts=GATED),
        Variant("mistake: gate 1 % too large", F32, scaled, right=False, parts=GATED),
        Variant("mistake: beta 1 % too large", F32, beta=1.01, right=False, parts=("kda", "decode")),
    )
}  # fmt: skip


@contextmanager
def patched(v: Variant) -> Iterator[None]:
    """The mathematics with this variant's gate. The schedule is entered under its name."""
    kept = (kda.project, mla.output_gate)

    def project(*a: Any, **k: Any) -> kda.Projected:
        made = kept[0](*a, **k)
        gate = made.gate if v.gate is None else v.gate(made.gate)
        return replace(made, gate=gate, beta=v.beta * made.beta)

    precision.SCHEDULES["variant"] = v.schedule
    kda.project = project
    if v.gate is not None:
        gate = v.gate
        mla.output_gate = lambda s, x: gate(kept[1](s, x))
    try:
        yield
    finally:
        kda.project, mla.output_gate = kept
        del precision.SCHEDULES["variant"]


def cases_of(case: Case) -> list[str]:
    held_out: Any = getattr(case.reference, "held_out", ())
    return [USUAL, *case.reference.distributions(case.workload), *held_out(case.workload)]


def given(case: Case, name: str, seed: int) -> Tensors:
    w, r = case.workload, case.reference
    plain = {**r.weights(w, seed, "cpu"), **r.states(w, seed, "cpu"), **r.inputs(w, seed, 0, "cpu")}
    return dict(plain) if name == USUAL else dict(r.disturb(w, name, seed, plain))


def moment(case: Case, tensors: Tensors, v: Variant, name: str) -> Moment:
    """What a kernel of this variant would leave."""
    with patched(v):
        made = case.reference.run(case.workload, tensors, "variant")
    before, after = {}, {}
    for b in case.buffers("outputs", "states"):
        old = tensors.get(b.name)
        new = made.tensors.get(b.name)
        before[b.name] = torch.zeros_like(new) if old is None and new is not None else old
        mask = full_mask(made.masks.get(b.name), new) if new is not None else None
        same = new if mask is None or new is None else torch.where(mask, new, before[b.name])
        after[b.name] = before[b.name] if same is None else same
    return Moment(tensors, before, after, Where(0, 0, name, case.axes))


class Watched(Checker):
    """Keeps the largest share of a bound, and of which figure."""

    share: tuple[float, str] = (0.0, "")

    def _keep(self, name: str, errors: bands.Errors, limit: bands.Errors, where: Where) -> None:
        for figure in bands.NAMES:
            bound = getattr(limit, figure)
            share = getattr(errors, figure) / bound if bound > 0 else 0.0
            self.share = max(self.share, (share, f"{figure} of {name}"))
        super()._keep(name, errors, limit, where)


def judged(case: Case, tensors: Tensors, v: Variant, name: str) -> dict[str, Any]:
    m = moment(case, tensors, v, name)
    reference = case.reference
    if v.left_out:
        reference.schedules = tuple(n for n in OWN if n != v.left_out)  # type: ignore[misc]
    try:
        checker = Watched(case)
        failure = checker.check(m, "alone")
    finally:
        if v.left_out:
            reference.schedules = OWN  # type: ignore[misc]
    figure = "" if failure is None else str(failure.rule)
    return {
        "variant": v.name, "case": name, "failed": failure is not None, "rule": figure,
        "share": checker.share[0], "figure": checker.share[1],
    }  # fmt: skip


def one(
    asked: tuple[str, dict[str, Any], int, tuple[str, ...], tuple[str, ...]],
) -> list[dict[str, Any]]:
    target, options, seed, names, variants = asked
    torch.set_num_threads(1)
    case = open_case(JudgeJob(Path("none"), target, options, "cpu"), CpuDevice())
    rows = []
    with torch.inference_mode():
        for name in names or cases_of(case):
            tensors = given(case, name, seed)
            for v in [n for n in variants if VARIANTS[n].fits(target)]:
                rows.append(
                    {"target": target, "seed": seed, **judged(case, tensors, VARIANTS[v], name)}
                )
    return rows


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By target, case and variant: how many seeds, how many beyond the bound, the largest share of it."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for r in rows:
        groups.setdefault((r["target"], r["case"], r["variant"]), []).append(r)
    out = []
    for (target, case, variant), same in groups.items():
        worst = max(same, key=lambda r: float(r["share"]))
        out.append({
            "target": target, "case": case, "variant": variant, "right": VARIANTS[variant].right, "seeds": len(same),
            "beyond": sum(r["failed"] for r in same), "largest_share": round(worst["share"], 3),
            "figure": worst["figure"],
            "rules": dict(Counter(r["rule"] for r in same if r["failed"])),
        })  # fmt: skip
    return out


def printed(found: list[Mapping[str, Any]]) -> str:
    lines = []
    for right, title in (
        (True, "right results beyond a bound"),
        (False, "mistakes beyond a bound"),
    ):
        some = [f for f in found if f["right"] is right]
        total = sum(f["seeds"] for f in some)
        lines.append(f"{title}: {sum(f['beyond'] for f in some)} of {total}")
        shown = [f for f in some if f["beyond"]] if right else some
        for f in sorted(shown, key=lambda f: -f["beyond"] / f["seeds"]):
            lines.append(
                f"  {f['target']} {f['case']}: {f['variant']}: {f['beyond']} of {f['seeds']}, at most "
                f"{f['largest_share']} x the bound ({f['figure']})"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--case", action="append", default=[], help="these cases only")
    parser.add_argument("--variant", action="append", default=[], choices=tuple(VARIANTS))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    options = {"preset": asked.preset, "layers": asked.layers, "rows": asked.rows}
    chosen = tuple(asked.variant or VARIANTS)
    work = [
        (t, options, asked.first + s, tuple(asked.case), chosen) for t in asked.targets for s in range(asked.seeds)
    ]  # fmt: skip
    with ProcessPoolExecutor(asked.jobs) as pool:
        rows = [r for some in pool.map(one, work) for r in some]
    found = table(rows)
    print(printed(found))
    if asked.json:
        asked.json.write_text(json.dumps({"options": options, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
