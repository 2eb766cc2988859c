"""The live table on stderr, plain lines when it is no terminal. Rich only; nothing is written to
stdout.

Text of candidates and failures is shown as text, never as markup.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agent import search
from agent.budget import Ledger
from agent.types import Tried
from sandbox.verdict import Verdict

STYLE = {"better": "bold green", "passed": "green", "not_timed": "green", "slow": "yellow"}
SHOWN = 12


@dataclass
class Line:
    """One candidate as the table shows it."""

    seq: int
    round: int
    status: str = "waiting"
    us: float | None = None
    fraction: float | None = None
    speedup: float | None = None
    note: str = ""
    promoted: bool = False


@dataclass
class Screen:
    """Implements `agent.state.Reporter`. Use as a context manager; thread-safe."""

    console: Console
    title: str
    ledger: Ledger | None = None
    lines: dict[int, Line] = field(default_factory=dict)
    rounds: int = 0
    best: Line | None = None

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._live: Live | None = None

    def __enter__(self) -> Screen:
        if self.console.is_terminal and self.console.is_interactive:
            self._live = Live(
                console=self.console,
                get_renderable=self.table,
                refresh_per_second=4,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()
            self.console.print(self.table())

    def recall(self, history: Sequence[Tried], round: int) -> None:
        """Show what earlier sessions found; `round` is the one that comes next."""
        self.rounds = round if history else 0
        for t in history:
            status = str(t.verdict.outcome or t.verdict.status)
            line = Line(t.seq, t.round, status, t.us, t.fraction, t.speedup, "", t.promoted)
            self.lines[t.seq] = line
            if t.promoted:
                self.best = line

    def say(self, text: str) -> None:
        with self._lock:
            self.console.print(Text(text), soft_wrap=True)

    def round(self, number: int, candidates: list[int]) -> None:
        with self._lock:
            self.rounds = number
            for seq in candidates:
                self.lines.setdefault(seq, Line(seq, number))

    def status(self, seq: int, text: str) -> None:
        with self._lock:
            self._line(seq).note = text
            if text != "done" and self._line(seq).us is None:
                self._line(seq).status = text
            if self._live is None and text.startswith("the same machine work"):
                self.say(
                    f"round {self._line(seq).round}  candidate {seq}  {text}: not judged again"
                )

    def verdict(self, seq: int, step: int, verdict: Verdict) -> None:
        with self._lock:
            line = self._line(seq)
            line.status = str(verdict.outcome or verdict.status)
            row = search.workload(verdict)
            if row is not None:
                line.us, line.fraction = row.us, search.fraction(verdict)
                line.speedup = row.speedup_incumbent.value if row.speedup_incumbent else None
            if self._live is None:
                self.say(self._words(line, verdict))

    def promoted(self, seq: int, reason: str) -> None:
        with self._lock:
            if self.best is not None:
                self.best.promoted = False
            self.best = self._line(seq)
            self.best.promoted = True
            if self._live is None and seq:
                self.say(f"candidate {seq} is the new best: {reason}")

    def table(self) -> Table:
        with self._lock:
            table = Table(title=self.title, caption=self._caption(), title_justify="left")
            for name in ("round", "candidate", "status", "us a step", "of floor", "vs best then"):
                table.add_column(name, justify="left" if name == "status" else "right")
            for seq in sorted(self.lines)[-SHOWN:]:
                line = self.lines[seq]
                style = STYLE.get(line.status, "")
                mark = f"{seq} *" if line.promoted else f"{seq}"
                table.add_row(
                    str(line.round), mark, Text(line.status[:48], style), _num(line.us, ".2f"),
                    _num(line.fraction, ".1%"), _num(line.speedup, ".4f"),
                )  # fmt: skip
            return table

    def _line(self, seq: int) -> Line:
        return self.lines.setdefault(seq, Line(seq, self.rounds))

    def _words(self, line: Line, verdict: Verdict) -> str:
        parts = [f"round {line.round}", f"candidate {line.seq}", f"{verdict.tier}: {line.status}"]
        if line.us is not None:
            parts.append(f"{line.us:.2f} us a step")
        if line.fraction is not None:
            parts.append(f"{line.fraction:.1%} of the floor")
        if line.speedup is not None:
            parts.append(f"{line.speedup:.4f} x the incumbent")
        if verdict.failure is not None:
            parts.append(verdict.failure.message.splitlines()[0][:200])
        return "  ".join(parts)

    def _caption(self) -> str:
        best = "none yet" if self.best is None else f"candidate {self.best.seq}"
        if self.best is not None and self.best.us is not None:
            best += f", {self.best.us:.2f} us"
        if self.best is not None and self.best.fraction is not None:
            best += f", {self.best.fraction:.1%} of the floor"
        return f"best: {best}   {spent_words(self.ledger)}   {time.strftime('%H:%M:%S')}"


def spent_words(ledger: Ledger | None) -> str:
    """What was used so far, with the limits that are set."""
    if ledger is None:
        return ""
    spent, limits = ledger.spent, ledger.limits
    parts = [
        (f"{spent.minutes:.1f}", limits.minutes, "min"),
        (f"{spent.gpu_seconds:.0f}", limits.gpu_seconds, "GPU s"),
    ]
    if spent.tokens:
        parts += [
            (f"{spent.tokens:,}", limits.tokens, "tokens"),
            (f"{spent.usd:.2f}", limits.usd, "$"),
        ]
    return "spent: " + ", ".join(
        f"{value}{f' of {limit:g}' if limit is not None else ''} {unit}"
        for value, limit, unit in parts
    )


def _num(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)
