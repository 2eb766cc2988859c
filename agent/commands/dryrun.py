"""`optimize --dry-run`: what would be asked first, how large it is, and what a run might cost.
Nothing is run or paid.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent.commands import common
from agent.config import RunSettings
from agent.models.base import Estimate
from agent.models.pricing import estimate
from agent.runner import task_of
from agent.services import DEFAULT_ARCH
from agent.types import Direction, Situation, Tried
from agent.workspace import Place
from sandbox.verdict import Failure, Status, Tier, Trust, Verdict
from targets.base import Target, find


def dry_run(place: Place, settings: RunSettings, as_json: bool) -> int:
    target = find(settings.target)
    w = target.workload(settings.options)
    source = Path(settings.start).read_text() if settings.start else target.seed_source()
    data: dict[str, Any] = {
        "target": settings.target, "workload": w.key, "device": settings.device,
        "proposer": settings.proposer, "model": settings.model, "record": str(place.db),
        "buffers": len(w.buffers), "buffer_bytes": sum(b.nbytes for b in w.buffers),
        "floor_bytes": w.floor.bytes, "seed_bytes": len(source.encode()),
        "candidates": _count(settings), "prompt": None, "estimate": None,
    }  # fmt: skip
    if settings.proposer in ("openai", "anthropic"):
        data |= _prompt(settings, target, source)
    common.emit(as_json, data, _text(data))
    return 0


def _count(s: RunSettings) -> int | None:
    """Candidates at most; None without a bound."""
    bounds = [s.limits.candidates, None if s.limits.rounds is None else s.limits.rounds * s.k]
    known = [b for b in bounds if b is not None]
    return min(known) if known else None


def _prompt(s: RunSettings, target: Target, source: str) -> dict[str, Any]:
    from agent.book import Book

    task = task_of("dry-run", s, target)
    if not task.arch:
        task = task_of("dry-run", _with_arch(s), target)
    unjudged = Verdict(
        Status.CANCELLED, task.target, "", {"kind": s.device}, Tier.SCREEN, Trust.UNJAILED, {}, "",
        failure=Failure("dry-run", "the seed was not judged in a dry run"),
    )  # fmt: skip
    seed = Tried(0, 0, None, "the seed", "", None, "", {}, unjudged)
    situation = Situation(task, 1, s.k, seed, source, (seed,))
    book = Book()
    plan = book.plan(situation)
    propose = book.propose(situation, Direction("what the plan says"), source)
    reflect = book.reflect(situation)
    calls = [estimate(p, s.model, s.proposer) for p in (plan, propose, reflect)]
    return {
        "prompt": {"stable": plan.stable, "body": plan.body},
        "estimate": _total(s, calls),
    }


def _with_arch(s: RunSettings) -> RunSettings:
    from dataclasses import replace

    return replace(s, arch=DEFAULT_ARCH)


def _total(s: RunSettings, calls: list[Estimate]) -> dict[str, Any]:
    """Upper bounds: full-length answers, nothing cached, no repairs."""
    rounds = s.limits.rounds
    plan, propose, reflect = calls
    per_round = plan.tokens + s.k * propose.tokens + reflect.tokens
    priced = None not in (plan.cost, propose.cost, reflect.cost)
    cost = (plan.cost or 0) + s.k * (propose.cost or 0) + (reflect.cost or 0)
    return {
        "first_prompt_tokens": plan.tokens, "tokens_a_round": per_round,
        "usd_a_round": cost if priced else None, "tokens": rounds and rounds * per_round,
        "usd": rounds * cost if rounds and priced else None,
        "limit_usd": s.limits.usd, "limit_tokens": s.limits.tokens,
    }  # fmt: skip


def _text(d: dict[str, Any]) -> str:
    work = ", ".join(f"{k}={v}" for k, v in d["workload"].items())
    lines = [
        f"target {d['target']}: {work}",
        f"{d['buffers']} buffers, {d['buffer_bytes']:,} bytes; floor {d['floor_bytes']:,} bytes a step",
        f"device {d['device']}, proposer {d['proposer']} {d['model']}".rstrip(),
        f"seed of {d['seed_bytes']:,} bytes, then at most "
        f"{'any number of' if d['candidates'] is None else d['candidates']} candidates",
    ]
    e = d["estimate"]
    if e:
        usd = "unpriced" if e["usd_a_round"] is None else f"${e['usd_a_round']:.2f}"
        lines.append(
            f"at most {e['tokens_a_round']:,} tokens and {usd} a round (uncached, full answers)"
        )
        lines += ["", "--- first prompt, stable part ---", d["prompt"]["stable"]]
        lines += ["--- first prompt, body ---", d["prompt"]["body"]]
    else:
        lines.append("no model is asked: nothing to pay")
    return "\n".join(lines)
