"""Which verdict a candidate's profile is taken from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from agent.profiles import profiled
from sandbox.verdict import Status


def seen(kind: str, *parts: str, status: Status = Status.PASSED) -> Any:
    profile = {name: [name] for name in parts}
    return SimpleNamespace(status=status, profile=profile, device={"kind": kind})


def choose(verdicts: dict[str, Any], stands: str) -> str | None:
    """Name of the verdict of which the profile is."""
    rows = [{"artifact": "a", "blob": name} for name in verdicts]
    queries: Any = SimpleNamespace(
        workspace=SimpleNamespace(verdict=verdicts.__getitem__), verdicts=lambda _: rows
    )
    found = profiled(queries, {"id": 1, "artifact": "a", "blob": stands})
    return next(name for name, v in verdicts.items() if v is found)


def test_the_last_profile_with_marks_is_shown_though_one_without_came_later() -> None:
    verdicts = {
        "marked": seen("cuda", "kernels", "timeline"),
        "again": seen("cuda", "kernels"),
        "look": seen("cuda", "timeline"),
    }
    assert choose(verdicts, "again") == "marked"
    assert choose({"one": seen("cuda", "kernels"), "two": seen("cuda", "kernels")}, "two") == "two"


def test_a_profile_is_of_the_kind_of_device_whose_verdict_stands() -> None:
    verdicts = {"modelled": seen("cpu", "kernels", "timeline"), "measured": seen("cuda", "kernels")}
    assert choose(verdicts, "measured") == "measured"
    assert choose(verdicts, "modelled") == "modelled"


def test_a_verdict_that_did_not_pass_stands_for_itself() -> None:
    verdicts = {"good": seen("cuda", "kernels"), "bad": seen("cuda", status=Status.WRONG)}
    assert choose(verdicts, "bad") == "bad"
