"""`kernelgen mcp` itself: which run is meant, what is refused before anything starts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import click
import pytest

from agent.commands import common
from agent.commands.mcp import Wish, begin, ensure, found, latest_run, mcp_, token_of
from agent.config import RunSettings
from agent.runner import create, load_settings


def asked(kit: Any, **changes: Any) -> dict[str, Any]:
    """The command's options as click parses them."""
    args = [f"--db={kit.place.db}", "--device=cpu"]
    context = click.Context(mcp_)
    mcp_.parse_args(context, args)
    return {**context.params, **changes}


def settings(kit: Any, **changes: Any) -> RunSettings:
    return found(kit.place, asked(kit, target="fake", new=True, **changes))[1]


def test_the_same_command_goes_on_with_its_run_and_its_budget(kit: Any) -> None:
    wanted = settings(kit, max_candidates=3)
    assert (wanted.proposer, wanted.k, wanted.limits.candidates) == ("external", 1, 3)
    assert (wanted.limits.rounds, wanted.limits.patience) == (None, None)
    run = create(kit.place, replace(wanted, arch="sm_100a"), {})
    assert latest_run(kit.place, wanted) == run
    kit.queries.store.set_run(run, state="review")
    assert found(kit.place, asked(kit, target="fake"))[0] == run  # ended: no second budget
    again, raised = found(kit.place, asked(kit, target="fake", max_candidates=5))
    assert (again, raised.limits.candidates, raised.arch) == (run, 5, "sm_100a")
    assert found(kit.place, asked(kit, target="fake", new=True))[0] is None
    assert latest_run(kit.place, settings(kit, rows=2)) is None
    assert latest_run(kit.place, settings(kit, arch="sm_90a")) is None
    opened = begin(kit.place, Wish(run, raised, only_submit=True))
    assert (opened.run, opened.services) == (run, None)
    assert load_settings(kit.place, run).limits.candidates == 5


def test_servers_started_together_share_one_run(kit: Any) -> None:
    wish = Wish(None, settings(kit, max_candidates=3))
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda _: ensure(kit.place, wish, "sm_90a"), range(4)))
    assert len(set(runs)) == 1
    assert len(kit.queries.runs()) == 1
    another = ensure(kit.place, replace(wish, new=True), "sm_90a")
    assert another != runs[0]


def test_a_run_that_is_not_driven_from_outside_is_refused(kit: Any) -> None:
    run = kit.new(proposer="tuner")
    with pytest.raises(common.Usage, match="driven by tuner"):
        found(kit.place, asked(kit, run=run))
    for nothing in (asked(kit), asked(kit, run=run, target="fake")):
        with pytest.raises(common.Usage, match="RUN, or --target"):
            assert mcp_.callback is not None
            mcp_.callback(**nothing)


@pytest.mark.parametrize(
    "token", ["", "short", "has a space in it, long", "ünïcödé-and-quite-long"]
)
def test_a_weak_token_is_refused(token: str) -> None:
    with pytest.raises(common.Usage, match="16 ASCII"):
        token_of(token)


def test_a_token_is_made_when_none_is_given() -> None:
    assert len(token_of(None)) >= 32
    assert token_of(None) != token_of(None)
    assert token_of("0123456789abcdef") == "0123456789abcdef"
