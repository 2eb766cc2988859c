"""The end of a run in words and as data: what was measured, on what, against what, and what was not
verified.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent import search
from agent.config import RunSettings
from agent.runner import Ended
from agent.store import Queries, Store
from agent.winners import winner_folder
from agent.workspace import Place
from sandbox.verdict import Verdict

STOPS = {
    "floor": "the wanted share of the byte floor is reached",
    "plateau": "no round brought anything better for a while",
    "rounds": "all rounds are done", "candidates": "all candidates are used",
    "exhausted": "there is nothing left to try", "seed_failed": "the seed did not pass",
    "infra": "this machine failed several times in a row", "usd": "the dollar budget is spent",
    "tokens": "the token budget is spent", "minutes": "the time is up",
    "gpu_seconds": "the GPU time is spent", "credit": "the provider's credit or spend limit",
    "auth": "the provider refused the key or the request",
    "provider": "the provider did not answer",
}  # fmt: skip


@dataclass(frozen=True)
class Summary:
    data: dict[str, Any]
    text: str


def exit_code(ended: Ended, interrupted: bool) -> int:
    """0 something better was promoted, 1 nothing was, 3 partial, 130 interrupted."""
    if interrupted or ended.how == "drained":
        return 130
    if ended.how == "waiting" or ended.stop in search.SPENT:
        return 3
    return 0 if ended.improved else 1


def summarise(place: Place, ended: Ended, settings: RunSettings) -> Summary:
    queries = Queries(Store(place.db), place.workspace)
    run = queries.run(ended.run)
    rows = queries.candidates(ended.run)
    calls = queries.calls(ended.run)
    priced = [c["cost"] for c in calls if c["cost"] is not None]
    best = next((r for r in rows if r["seq"] == ended.incumbent and r["promoted"]), None)
    data: dict[str, Any] = {
        "run": ended.run, "how": ended.how, "stop": ended.stop, "improved": ended.improved,
        "waiting": list(ended.waiting), "resume": resume_command(place, ended.run),
        "start": settings.start,
        "target": settings.target, "device": settings.device,
        "proposer": settings.proposer, "rounds": run["rounds"], "candidates": len(rows),
        "passed": sum(r["status"] == "passed" for r in rows),
        "spent": {
            "minutes": run["elapsed"] / 60, "usd": sum(priced),
            "unpriced_calls": len(calls) - len(priced), "calls": len(calls),
            "tokens": _tokens(calls), "gpu_seconds": gpu_seconds(place, ended.run),
            "failed": _unanswered(calls, lost=False), "lost": _unanswered(calls, lost=True),
        },
        "best": None,
    }  # fmt: skip
    if best is not None and best["blob"]:
        verdict = place.workspace.verdict(best["blob"])
        folder = winner_folder(place.out, settings.target, verdict.device, ended.run, best["seq"])
        data["best"] = {
            "candidate": f"{ended.run}-{best['seq']}",
            "folder": str(folder),
            "verdict": verdict.to_json(),
        }
        return Summary(data, _text(data, verdict, folder))
    return Summary(data, _text(data, None, None))


def resume_command(place: Place, run: str) -> str:
    """What goes on with a run from the current folder: it names the record and the winners' folder that are not the
    usual ones, for without them `resume` would look and write elsewhere."""
    words = ["kernelgen", "resume", run]
    if place.db.resolve() != Path("runs.db").resolve():
        words += ["--db", str(place.db)]
    if place.out.resolve() != place.db.resolve().parent / "kernels_out":
        words += ["--out", str(place.out)]
    return shlex.join(words)


def _tokens(calls: Sequence[Mapping[str, Any]]) -> int:
    return sum((c["input_tokens"] or 0) + (c["output_tokens"] or 0) for c in calls)


def _unanswered(calls: Sequence[Mapping[str, Any]], lost: bool) -> dict[str, Any]:
    """Attempts that were paid and gave nothing of use; the lost ones at their estimates."""
    found = [c for c in calls if c["error"] and c["error"].startswith("Lost:") is lost]
    cost = sum(c["cost"] or 0.0 for c in found)
    return {"attempts": len(found), "tokens": _tokens(found), "usd": cost}


def gpu_seconds(place: Place, run: str) -> float:
    return sum(float(j["gpu_seconds"]) for j in place.workspace.run(run).judgements())


def _text(data: dict[str, Any], verdict: Verdict | None, folder: Path | None) -> str:
    spent = data["spent"]
    how = STOPS.get(
        data["stop"], {"waiting": "waiting", "drained": "interrupted"}.get(data["how"], data["how"])
    )
    lines = [
        f"run {data['run']}: {how}",
        f"  {data['candidates']} candidates in {data['rounds']} rounds, {data['passed']} passed; "
        f"{spent['minutes']:.1f} min, {spent['gpu_seconds']:.0f} s judging, "
        f"{spent['calls']} model calls, {spent['tokens']:,} tokens, "
        f"${spent['usd']:.2f}"
        + (f" and {spent['unpriced_calls']} unpriced" if spent["unpriced_calls"] else ""),
    ]
    for key, words in (
        ("failed", "model calls answered nothing of use"),
        (
            "lost",
            "model calls were cut off and may have been paid for nothing; counted by estimate",
        ),
    ):
        found = spent[key]
        if found["attempts"]:
            lines.append(
                f"  of these {found['attempts']} {words}: {found['tokens']:,} tokens, "
                f"${found['usd']:.2f}"
            )
    if verdict is not None:
        lines += _numbers(data, verdict)
        lines.append(f"  kernel: {folder}")
    else:
        lines.append("  no verified kernel")
    lines += [f"  waiting: {w}" for w in data["waiting"]]
    if data["how"] in ("waiting", "drained") or data["stop"] in search.SPENT:
        lines.append(f"  go on with: {data['resume']}")
    return "\n".join(lines)


def _numbers(data: dict[str, Any], verdict: Verdict) -> list[str]:
    name = verdict.device.get("name") or verdict.device.get("kind")
    which = "what it started from" if data["start"] else "the seed"
    which = f"candidate {data['best']['candidate']}" if data["improved"] else which
    lines = [f"  best: {which}, judged at tier {verdict.tier}, trust {verdict.trust}, on {name}"]
    row = search.workload(verdict)
    if row is not None and verdict.timing is not None:
        said = search.shares(row)
        lines.append(
            f"  {verdict.timing.kind}: {row.us:.2f} us a step ({row.preset}, {row.layers} layers, "
            f"{row.m} rows, context {row.context}), {row.launches} launches"
            + (f", {said}" if said else "")
        )
        for words, ratio in search.ratios(row):
            lines.append(f"  {ratio.value:.4f} x {words} [{ratio.low:.4f}, {ratio.high:.4f}]")
    else:
        lines.append("  not timed")
    missing = verdict.not_verified or ("nothing is listed",)
    return [*lines, "  not verified: " + "; ".join(missing)]
