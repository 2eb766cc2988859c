"""What is exported: a candidate with its source, artifact, verdict and what a person said of it.

Reads the record only. It refuses candidates that did not pass, and those nobody approved unless
forced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.review.decide import Decision, approved
from agent.store import Queries
from agent.store.queries import NotFound
from sandbox import artifact_store
from sandbox.artifact import Artifact
from sandbox.verdict import Status, Verdict, WorkloadTiming


class ExportRefused(Exception):
    """This cannot be exported so; the message says why and what would help."""


@dataclass(frozen=True)
class Subject:
    """One candidate. `decision` None: nobody approved it and the export was forced."""

    run: Mapping[str, Any]
    row: Mapping[str, Any]
    source: str
    artifact: Artifact
    folder: Path
    verdict: Verdict
    verdict_sha256: str
    decision: Decision | None

    @property
    def name(self) -> str:
        return f"{self.row['run']}-{self.row['seq']}"

    @property
    def proposer(self) -> str:
        """Who proposed it, with the model if it was a model."""
        who = str(self.row["proposer"])
        model = str(self.run["model"] or "") if who == self.run["proposer"] else ""
        return f"{who} {model}".rstrip()

    @property
    def slug(self) -> str:
        """A Python identifier: target, end of the run's id, number."""
        words = (
            f"{self.artifact.target.rpartition('/')[2]}_{self.row['run'][-6:]}_{self.row['seq']}"
        )
        return re.sub(r"\W+", "_", words.replace(".py:", "_")).strip("_").lower()

    @property
    def timing(self) -> WorkloadTiming | None:
        rows = self.verdict.timing.workloads if self.verdict.timing else ()
        return rows[0] if rows else None

    @property
    def tunables(self) -> dict[str, Any]:
        return dict(self.artifact.tunables)

    @property
    def reviewed(self) -> str:
        d = self.decision
        if d is None:
            return "NOBODY HAS REVIEWED THIS KERNEL (exported with --force)"
        said = f": {' '.join(d.note.split())}" if d.note else ""
        return f"approved by {d.who} on {d.date}{said}"


def find(queries: Queries, name: str, force: bool) -> Subject:
    """A candidate by RUN-NUMBER, or a run's best by RUN. Raises NotFound, Missing, ExportRefused."""
    row = _row(queries, name)
    what = f"candidate {row['run']}-{row['seq']}"
    if row["status"] != Status.PASSED or not row["artifact"] or not row["blob"]:
        raise ExportRefused(f"{what} is not exported: its status is {row['status']}")
    decision = approved(queries, row)
    if decision is None and not force:
        raise ExportRefused(
            f"{what} has no standing approval: `kernelgen review {row['run']} --approve {row['seq']}"
            " --note TEXT` after reading it, or --force to export what nobody reviewed"
        )
    folder = queries.workspace.artifact(row["artifact"])
    artifact = artifact_store.load(folder)
    if artifact.ranks > 1:
        raise ExportRefused(
            f"{what} is not exported: it runs on {artifact.ranks} GPUs at once, and what an export writes drives one"
        )
    return Subject(
        queries.run(row["run"]), row, queries.workspace.text(row["source"]),
        artifact, folder, queries.workspace.verdict(row["blob"]), row["blob"],
        decision,
    )  # fmt: skip


def _row(queries: Queries, name: str) -> dict[str, Any]:
    head, dash, tail = name.rpartition("-")
    if dash and tail.isdigit():
        return queries.candidate(name)
    run = queries.run(name)
    if run["incumbent"] is None:
        raise NotFound(f"run {run['id']} has no best candidate: name one as RUN-NUMBER")
    return queries.candidate(f"{run['id']}-{run['incumbent']}")


def pretty(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
