"""A run on fakes, as every test of the loop needs it. Nothing here touches a device or the network."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent import fakes
from agent.config import RunSettings
from agent.models.base import Model, Proposer
from agent.models.scripted import ScriptedProposer
from agent.runner import (
    Ended,
    Party,
    Run,
    Services,
    Session,
    advance,
    create,
    load_settings,
    make_ledger,
)
from agent.search import Limits
from agent.store import Queries, Store
from agent.workspace import Place
from sandbox.verdict import Verdict
from targets import base
from targets.base import Options


@dataclass
class Quiet:
    """A reporter that remembers."""

    lines: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.lines.append(text)

    def round(self, number: int, candidates: list[int]) -> None:
        self.lines.append(f"round {number}: {candidates}")

    def status(self, seq: int, text: str) -> None:
        self.lines.append(f"{seq}: {text}")

    def verdict(self, seq: int, step: int, verdict: Verdict) -> None:
        self.lines.append(f"{seq}.{step}: {verdict.status}")

    def promoted(self, seq: int, reason: str) -> None:
        self.lines.append(f"promoted {seq}: {reason}")


@dataclass
class Kit:
    """A folder with a record, and the fakes that serve it."""

    place: Place
    compiler: fakes.FakeCompiler
    judge: fakes.FakeJudge
    fresh: list[fakes.FakeJudge] = field(default_factory=list)
    reporter: Quiet = field(default_factory=Quiet)
    full_penalty: float = 1.0

    def services(self) -> Services:
        def another() -> fakes.FakeJudge:
            self.fresh.append(fakes.FakeJudge(full_penalty=self.full_penalty))
            return self.fresh[-1]

        return Services(self.compiler, self.judge, another)

    def settings(self, **changes: Any) -> RunSettings:
        base_settings: dict[str, Any] = {
            "target": "fake", "options": Options("tiny"), "device": "cpu", "arch": "sm_90a",
            "proposer": "scripted", "limits": Limits(rounds=4, stop_at=None, patience=None),
        }  # fmt: skip
        return RunSettings(**{**base_settings, **changes})

    def new(self, **changes: Any) -> str:
        return create(self.place, self.settings(**changes), {"kernelgen": "test"})

    def go(self, run: str, proposer: Proposer, model: Model | None = None) -> Ended:
        settings = load_settings(self.place, run)
        session = Session(self.place, self.reporter)
        ledger = make_ledger(self.place, run, settings)
        return advance(Run(run, settings, session, self.services(), Party(proposer, model), ledger))

    def optimize(self, sources: list[str], **changes: Any) -> Ended:
        return self.go(self.new(**changes), ScriptedProposer(sources))

    @property
    def queries(self) -> Queries:
        return Queries(Store(self.place.db), self.place.workspace)


@pytest.fixture(autouse=True)
def fake_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base._TARGETS, "fake", fakes.FakeTarget)


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    place = Place(tmp_path / "runs.db", tmp_path / "kernels_out")
    return Kit(place, fakes.FakeCompiler(tmp_path / "jail"), fakes.FakeJudge())
