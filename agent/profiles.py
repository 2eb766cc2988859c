"""Which of a candidate's verdicts holds its profile. Reads the record alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.store import Queries
from sandbox.verdict import Status, Verdict


def profiled(queries: Queries, row: Mapping[str, Any]) -> Verdict | None:
    """The candidate's last verdict with times by kernel, else its last one; None before the first. What came in as
    evidence, from whatever host, comes after all others."""
    if not row["blob"]:
        return None
    last = queries.workspace.verdict(row["blob"])
    if last.status is not Status.PASSED:
        return last
    rows = sorted(queries.verdicts(row["id"]), key=lambda v: v["origin"] != "imported")
    for earlier in reversed(rows):
        if earlier["artifact"] == row["artifact"]:
            verdict = queries.workspace.verdict(earlier["blob"])
            if verdict.profile.get("kernels"):
                return verdict
    return last
