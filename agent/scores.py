"""Scores of the judge: what became of planted kernels, as recall by class and the rate of false rejects.

Pure functions over what `agent.selftest` found; nothing is compiled or judged here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sandbox.verdict import TensorCheck, Verdict
from targets.planted import Planted

Fate = Literal["caught", "in band", "missed", "accepted", "rejected", "broken"]
FIGURES = ("rel_l2", "max_abs", "norm_ratio")


@dataclass(frozen=True)
class Effect:
    """The largest change of an error figure against the unedited seed on the same numbers, in units of its bound."""

    share: float
    tensor: str = ""
    figure: str = ""
    error: float = 0.0
    seed_error: float = 0.0
    bound: float = 0.0


@dataclass(frozen=True)
class Row:
    """One planted kernel. `tier`, `status`, `rule`, `message`: where and how its judgement ended; `commit`: of
    the judge that said so."""

    planted: Planted
    fate: Fate
    status: str
    tier: str
    rule: str
    message: str
    seconds: Mapping[str, float]
    effect: Effect | None = None
    commit: str = ""

    @property
    def fine(self) -> bool:
        """As it should be. A miss is so only if it was declared and measured to be inside the noise band."""
        return self.fate in ("caught", "accepted") or (self.fate == "in band" and self.planted.band)

    def to_json(self) -> dict[str, Any]:
        p = self.planted
        return {
            "name": p.name, "kind": p.kind, "group": p.group, "does": p.does, "fate": self.fate, "status": self.status,
            "tier": self.tier, "rule": self.rule, "message": self.message, "declared_in_band": p.band,
            "effect": None if self.effect is None else dict(vars(self.effect)),
            "seconds": {k: round(v, 2) for k, v in self.seconds.items()}, "commit": self.commit,
        }  # fmt: skip


def row_from_json(d: Mapping[str, Any], planted: Planted) -> Row:
    """Inverse of `Row.to_json` for that entry of the catalogue."""
    effect = None if d["effect"] is None else Effect(**d["effect"])
    return Row(
        planted, d["fate"], str(d["status"]), str(d["tier"]), str(d["rule"]), str(d["message"]), dict(d["seconds"]),
        effect, str(d.get("commit", "")),
    )  # fmt: skip


def caught(p: Planted, v: Verdict) -> bool:
    """Whether this verdict is what the planted kernel deserves."""
    if str(v.status) in p.expect:
        return True
    return bool(p.finding) and any(f.rule == p.finding for f in v.findings)


def effect_of(edited: Verdict, seed: Verdict) -> Effect:
    """Both judged at one tier from one secret. Zero: no figure of any tensor moved, so nothing showed the edit."""
    before = {t.name: t for t in (seed.correctness.tensors if seed.correctness else ())}
    largest = Effect(0.0)
    for now in edited.correctness.tensors if edited.correctness else ():
        for figure in FIGURES:
            found = _change(figure, now, before.get(now.name))
            if found.share > largest.share:
                largest = found
    return largest


def _change(figure: str, now: TensorCheck, before: TensorCheck | None) -> Effect:
    error, bound = getattr(now, figure), getattr(now, f"{figure}_bound")
    old = getattr(before, figure) if before is not None else 0.0
    share = abs(error - old) / bound if bound > 0 else 0.0
    return Effect(share, now.name, figure, error, old, bound)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """What `--json` prints of the result, the circumstances aside."""
    planted = [r for r in rows if r.planted.kind != "good"]
    good = [r for r in rows if r.planted.kind == "good"]
    groups = dict.fromkeys(r.planted.group for r in planted)

    def listed(keep: Callable[[Row], bool]) -> list[dict[str, Any]]:
        return [r.to_json() for r in rows if keep(r)]

    return {
        "planted": len(planted),
        "caught": _count(planted, "caught"),
        "in_band": _count(planted, "in band"),
        "good": len(good),
        "rejected": _count(good, "rejected"),
        "false_reject_rate": _count(good, "rejected") / len(good) if good else 0.0,
        "recall": {g: _recall([r for r in planted if r.planted.group == g]) for g in groups},
        "tiers": {
            t: sum(r.tier == t for r in planted if r.fate == "caught")
            for t in ("compile", "screen", "full", "promote")
        },
        "missed": listed(lambda r: r.fate in ("missed", "in band")),
        "false_rejects": listed(lambda r: r.fate == "rejected"),
        "broken": listed(lambda r: r.fate == "broken"),
        "ok": all(r.fine for r in rows),
    }


def _count(rows: Sequence[Row], fate: Fate) -> int:
    return sum(r.fate == fate for r in rows)


def _recall(rows: Sequence[Row]) -> dict[str, int]:
    return {
        "planted": len(rows),
        "caught": _count(rows, "caught"),
        "in_band": _count(rows, "in band"),
    }


def table(data: Mapping[str, Any]) -> str:
    """The score as text: recall by class, then every miss and false reject."""
    lines = [f"{'class':<16} planted  caught  in band  missed"]
    for group, n in sorted(data["recall"].items()):
        left = n["planted"] - n["caught"] - n["in_band"]
        lines.append(
            f"{group:<16} {n['planted']:>7}  {n['caught']:>6}  {n['in_band']:>7}  {left:>6}"
        )
    tiers = ", ".join(f"{n} at {t}" for t, n in data["tiers"].items() if n)
    outside = data["planted"] - data["in_band"]
    lines += [
        "",
        f"planted kernels: {data['caught']} of {outside} outside the noise band caught ({tiers or 'none'}), "
        f"{data['in_band']} inside it",
        f"right kernels:   {data['rejected']} of {data['good']} rejected",
    ]
    if data.get("not_reached"):
        lines += ["", f"not reached in time: {', '.join(data['not_reached'])}"]
    for title, key in (
        ("not caught", "missed"),
        ("rejected though right", "false_rejects"),
        ("could not be used", "broken"),
    ):
        if data[key]:
            lines += ["", f"{title}:"]
            lines += [_line(r) for r in data[key]]
    return "\n".join(lines)


def _line(r: Mapping[str, Any]) -> str:
    text = f"  {r['name']} ({r['group']}): {r['does']}; {r['fate']}"
    if r["effect"]:
        e = r["effect"]
        text += (
            f", moves {e['figure']} of {e['tensor']} from {e['seed_error']:.3g} to {e['error']:.3g}, "
            f"{e['share']:.0%} of the bound {e['bound']:.3g}"
            if e["tensor"]
            else ", moves no figure of any tensor"
        )
    if r["message"]:
        text += f"; {r['status']} at {r['tier']}: {r['message'][:240]}"
    return text
