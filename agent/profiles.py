"""Which of a candidate's verdicts holds its profile. Reads the record alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.store import Queries
from sandbox.verdict import Status, Verdict


def profiled(queries: Queries, row: Mapping[str, Any]) -> Verdict | None:
    """Of the candidate's verdicts with times by kernel the last one, from the device kind of the one that stands and
    with marks rather than without; the one that stands if there is none, or if it did not pass; None before the first.
    """
    if not row["blob"]:
        return None
    stands = queries.workspace.verdict(row["blob"])
    if stands.status is not Status.PASSED:
        return stands
    found = [
        queries.workspace.verdict(v["blob"])
        for v in queries.verdicts(row["id"])
        if v["artifact"] == row["artifact"]
    ]
    found = [v for v in reversed(found) if v.profile.get("kernels")]

    def fitting(v: Verdict) -> tuple[bool, bool]:
        return v.device.get("kind") == stands.device.get("kind"), "timeline" in v.profile

    return max(found, key=fitting, default=stands)
