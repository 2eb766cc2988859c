"""What a process does that works on a run with fakes, to be killed.

The fakes keep ledgers on disk (one line a model call and a judgement), which is how a test counts what
was paid and done across processes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from agent import fakes
from agent.book import Book
from agent.config import RunSettings
from agent.models.base import Completion, Estimate, Model, Prompt, Schema, Usage
from agent.models.llm import ModelProposer
from agent.models.openai import OpenAIModel
from agent.runner import Party, Run, Services, Session, advance, create, load_settings, make_ledger
from agent.search import Limits
from agent.store import Queries, Store
from agent.workspace import Place
from sandbox.jobs import JudgeJob
from sandbox.verdict import Verdict
from targets import base
from targets.base import Options
from tests.agent.models.provider_server import Answer

WAYS = [{"title": f"way {i}", "detail": "", "predicted_gain": 1.1, "parent": 0} for i in range(2)]
PLAN = json.dumps({"directions": WAYS})


@dataclass(frozen=True)
class PaidModel:
    """Answers depend on the prompt alone; each call is noted on disk as a provider would bill it."""

    bill: Path
    name: str = "paid"

    def complete(self, prompt: Prompt, schema: Schema | None = None) -> Completion:
        text = self._answer(prompt)
        with self.bill.open("a") as file:
            file.write(prompt.sha256 + "\n")
        return Completion(text, Usage(100, 10), 0.01, self.name)

    def estimate(self, prompt: Prompt) -> Estimate:
        return Estimate(110, 0.01)

    def _answer(self, prompt: Prompt) -> str:
        return answer(prompt.role, int(prompt.sha256[:4], 16))


def answer(role: str, number: int) -> str:
    if role == "plan":
        return PLAN
    if role == "reflect":
        return '{"lessons": ["smaller is faster"]}'
    number %= 40
    mode = "compile_error" if role == "propose" and number % 4 == 0 else "passed"
    extra = '# cost: a 2=0.97\nTUNABLES = {"a": (1, 2)}\n'
    return f"```python\n{fakes.kernel(60 + number, mode, extra)}```\nPredicted gain: 1.1"


def served(asked: dict[str, Any]) -> Answer:
    """The same story as an answer of the local OpenAI server."""
    text = json.dumps(asked["input"])
    mending = "repair" if "Mend this fault" in text else "propose"
    role = asked.get("text", {}).get("format", {}).get("name", mending)
    said = text.encode()
    return Answer(answer(role, int(hashlib.sha256(said).hexdigest()[:4], 16)))


def model_of(folder: Path) -> Model:
    """The paid model, or a client of the server that the folder names."""
    if not (folder / "url").exists():
        return PaidModel(folder / "bill")
    url = (folder / "url").read_text()
    return OpenAIModel("gpt-5.5", client=openai.OpenAI(api_key="k", base_url=url, timeout=120.0))


@dataclass
class CountingJudge(fakes.FakeJudge):
    book: Path | None = None

    def judge(self, job: JudgeJob) -> Verdict:
        verdict = super().judge(job)
        assert self.book is not None
        with self.book.open("a") as file:
            file.write(f"{job.artifact.name} {job.tier} {job.incumbent}\n")
        return verdict


@dataclass
class Silent:
    def say(self, text: str) -> None: ...
    def round(self, number: int, candidates: list[int]) -> None: ...
    def status(self, seq: int, text: str) -> None: ...
    def verdict(self, seq: int, step: int, verdict: Verdict) -> None: ...
    def promoted(self, seq: int, reason: str) -> None: ...


def settings() -> RunSettings:
    return RunSettings(
        target="fake", options=Options("tiny"), device="cpu", arch="sm_90a", proposer="openai",
        model="paid", k=2, tunings=1, limits=Limits(rounds=3, stop_at=None, patience=None),
    )  # fmt: skip


def work(folder: Path, run: str) -> None:
    place = Place(folder / "runs.db", folder / "kernels_out")
    found = load_settings(place, run)
    judge = CountingJudge(delay=0.002, book=folder / "judged")
    services = Services(fakes.FakeCompiler(folder / "jail", 0.002), judge, lambda: judge)
    party = Party(ModelProposer("openai", Book()), model_of(folder))
    session = Session(place, Silent())
    advance(Run(run, found, session, services, party, make_ledger(place, run, found)))


def opened(folder: Path) -> str:
    """The run that a child killed before it could say so had opened, or a new one."""
    place = Place(folder / "runs.db", folder / "kernels_out")
    found = Queries(Store(place.db), place.workspace).runs() if place.db.exists() else []
    return found[0]["id"] if found else create(place, settings(), {})


def main(folder: Path) -> None:
    base._TARGETS["fake"] = fakes.FakeTarget
    name = folder / "run"
    if not name.exists():
        fresh = folder / "run.new"
        fresh.write_text(opened(folder))
        fresh.rename(name)
    work(folder, name.read_text())
