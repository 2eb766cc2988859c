"""Who sits at the proposing end: builds the proposer and its model from a run's settings.

SDK adapters are imported only for the provider that is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from agent import trajectory
from agent.config import KEYS, RunSettings
from agent.models.base import Model
from agent.models.external import External
from agent.models.folder import only_ours
from agent.models.llm import ModelProposer
from agent.models.replay import Replay
from agent.models.tuner import Tuner
from agent.runner import Party, Session
from agent.store import Queries, Store
from agent.workspace import Place

DEFAULT_MODELS = {"openai": "gpt-5.5", "anthropic": "claude-opus-5-5"}
BASES = {"openai": "OPENAI_BASE_URL", "anthropic": "ANTHROPIC_BASE_URL"}


def default_proposer(environment: Mapping[str, str] = os.environ) -> str:
    """The first provider with a key or a server of its own; without any, `tuner`."""
    for name, key in KEYS.items():
        if environment.get(key) or environment.get(BASES[name]):
            return name
    return "tuner"


def folder_of(place: Place, run: str, settings: RunSettings) -> Path:
    """Where `external` speaks with its author."""
    if settings.folder:
        return Path(settings.folder)
    return place.workspace.run(run).folder / "external"


def make_model(settings: RunSettings) -> Model | None:
    """Raises AuthError without a key."""
    if settings.proposer == "openai":
        from agent.models.openai import OpenAIModel

        return OpenAIModel(settings.model, settings.base_url or None)
    if settings.proposer == "anthropic":
        from agent.models.anthropic import AnthropicModel

        return AnthropicModel(settings.model, settings.base_url or None)
    return None


def seat(run: str, settings: RunSettings, session: Session, check: Callable[[], None]) -> Party:
    """Raises AuthError, NotFound for a run to replay that does not exist, BadRecord, FileExistsError."""
    place = session.place
    if settings.proposer == "tuner":
        return Party(Tuner())
    if settings.proposer == "replay":
        queries = Queries(Store(place.db), place.workspace)
        folder = Path(settings.replay)
        if (folder / trajectory.NAME).is_file():
            return Party(Replay(trajectory.rows_for_replay(folder, queries), place.workspace))
        rows = queries.candidates(queries.run(settings.replay)["id"])
        return Party(Replay(rows, place.workspace))
    from agent.book import Book

    if settings.proposer == "external":
        folder = folder_of(place, run, settings)
        only_ours(folder)
        return Party(
            External(
                folder, place.workspace, settings.wait, session.sleep,
                session.reporter.say, check, Book().stable,
            )
        )  # fmt: skip
    return Party(ModelProposer(settings.proposer, Book()), make_model(settings))
