"""What becomes of the wire logs: rows of attempts that have an end, estimates of those that have none.

Everything here may be repeated after a kill and does the same again. No provider is asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent.models.base import Model, Streamed
from agent.models.wire import WireLog
from agent.search import Spent
from agent.workspace import RunFiles, write_json

LOST = "the process died before the answer came; charged at the estimate made beforehand"


def keep(files: RunFiles, log: WireLog) -> None:
    """A log with an end becomes a row on disk. Repeated after a kill it does the same."""
    assert log.end is not None
    write_json(_place(files, log), log.end)
    log.remove()


def lose(files: RunFiles, log: WireLog) -> None:
    """An attempt whose answer cannot be had: a row with the estimate, so that it is never free."""
    q = log.question
    log.finish(
        {
            **named(log), "model": q["model"], "answer": "", "cost": q["cost"], "date": q["date"],
            "input_tokens": max(0, q["tokens"] - q["answer_tokens"]),
            "output_tokens": min(q["tokens"], q["answer_tokens"]), "cache_read_tokens": 0,
            "cache_write_tokens": 0, "seconds": 0.0, "error": f"Lost: {LOST}", "estimated": True,
            "final": False,
        }
    )  # fmt: skip
    keep(files, log)


def _place(files: RunFiles, log: WireLog) -> Path:
    q = log.question
    if log.end is not None and log.end["final"]:
        return files.call(q["scope"], q["n"])
    return files.attempt(q["scope"], q["n"], q["attempt"])


def sweep(files: RunFiles, model: Model | None, give_up: bool = False) -> None:
    """Put in order what a killed process left: rows for what has an end or is lost. What can still
    be picked up is left to the call itself, unless nobody will ask again (`give_up`).
    """
    for path in files.wires():
        log = WireLog.read(path)
        if log is None:
            path.unlink()
        elif log.end is not None:
            keep(files, log)
        elif give_up or not (isinstance(model, Streamed) and log.events):
            lose(files, log)


def charged(log: WireLog) -> Spent:
    """What an attempt counts as: its estimate until its end is known."""
    if log.end is not None:
        tokens = log.end["input_tokens"] + log.end["output_tokens"]
        return Spent(usd=log.end["cost"] or 0.0, tokens=tokens)
    return Spent(usd=log.question["cost"] or 0.0, tokens=log.question["tokens"])


def still_open(files: RunFiles) -> Spent:
    """What attempts count as that have no row yet, all together."""
    total = Spent()
    for path in files.wires():
        log = WireLog.read(path)
        if log is not None and not (log.end and _place(files, log).exists()):
            total += charged(log)
    return total


def is_lost(row: dict[str, Any]) -> bool:
    return str(row.get("error") or "").startswith("Lost:")


def named(log: WireLog) -> dict[str, Any]:
    return {k: log.question[k] for k in ("scope", "n", "attempt", "role", "prompt", "prompt_blob")}
