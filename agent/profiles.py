"""Which of a candidate's verdicts holds its profile. Reads the record alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.store import Queries
from sandbox.verdict import Status, Verdict


def profiled(queries: Queries, row: Mapping[str, Any]) -> Verdict | None:
    """The candidate's last verdict with times by kernel, else its last one; None before the first."""
    if not row["blob"]:
        return None
    last = queries.workspace.verdict(row["blob"])
    if last.status is not Status.PASSED:
        return last
    for earlier in reversed(queries.verdicts(row["id"])):
        if earlier["artifact"] == row["artifact"]:
            verdict = queries.workspace.verdict(earlier["blob"])
            if verdict.profile.get("kernels"):
                return verdict
    return last
