"""Compile outcomes on disk: `<store>/outcomes/<key>.json`, artifacts beside in `<store>/artifacts/<sha256>/`.

A file that cannot be read is a miss. Only outcomes that say something about the source are kept: no `infra`, no
deadline, which a busy machine can cause.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path

from sandbox import compile_wire as wire
from sandbox.artifact_store import MANIFEST
from sandbox.jobs import CompileOutcome

NOT_KEPT = ("deadline", "memory", "crash")


class OutcomeCache:
    """Keyed by `sandbox.compile.key.cache_key`; safe for several processes at once."""

    def __init__(self, store: Path) -> None:
        self.artifacts = store / "artifacts"
        self._outcomes = store / "outcomes"

    def get(self, key: str) -> CompileOutcome | None:
        """The stored outcome, marked `cached`, its artifact still there; None otherwise."""
        try:
            data = json.loads((self._outcomes / f"{key}.json").read_bytes())
            name = data.pop("artifact_name")
            data["artifact"] = str(self.artifacts / name) if name else None
            outcome = wire.outcome_from_json(data)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if outcome.artifact and not (outcome.artifact / MANIFEST).is_file():
            return None
        return dataclasses.replace(outcome, cached=True)

    def put(self, key: str, outcome: CompileOutcome) -> None:
        """Keep an outcome that is worth keeping. Raises OSError."""
        if outcome.status and not outcome.status.cacheable:
            return
        if outcome.failure and outcome.failure.rule in NOT_KEPT:
            return
        data = wire.outcome_json(outcome)
        data["artifact_name"] = outcome.artifact.name if outcome.artifact else None
        self._outcomes.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=self._outcomes)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(data, file)
            os.replace(temporary, self._outcomes / f"{key}.json")
        except BaseException:
            os.unlink(temporary)
            raise
