"""Which verdict a candidate's profile is taken from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from agent.profiles import profiled
from sandbox.verdict import Status


def test_evidence_from_elsewhere_has_no_say_while_the_run_has_a_profile() -> None:
    seen: dict[str, Any] = {
        name: SimpleNamespace(status=Status.PASSED, profile={"kernels": [name]})
        for name in ("marks", "other host")
    }
    rows = [
        {"artifact": "a", "blob": "marks", "origin": "local"},
        {"artifact": "a", "blob": "other host", "origin": "imported"},
    ]
    queries: Any = SimpleNamespace(
        workspace=SimpleNamespace(verdict=seen.__getitem__), verdicts=lambda _: rows
    )
    row = {"id": 1, "artifact": "a", "blob": "marks"}
    assert profiled(queries, row) is seen["marks"]
    seen["marks"].profile = {}
    assert profiled(queries, row) is seen["other host"]
