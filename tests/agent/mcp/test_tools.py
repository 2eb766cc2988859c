"""The tools through the official client, in one process, over fakes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from agent import fakes
from agent.fakes import kernel
from agent.mcp.driver import Driver, Opened
from agent.mcp.server import build
from agent.models.base import Unavailable
from agent.models.external import offer
from agent.runner import load_settings, save_settings, with_limits
from agent.search import Limits
from sandbox.jobs import JudgeJob
from sandbox.verdict import Verdict

LIMITS = Limits(rounds=None, candidates=3, stop_at=None, patience=None)


def new(kit: Any, **changes: Any) -> str:
    run: str = kit.new(**{"proposer": "external", "limits": LIMITS, **changes})
    return run


@asynccontextmanager
async def client(
    kit: Any, run: str, driven: bool = True, reopen: bool = False
) -> AsyncIterator[Client]:
    driver = Driver(kit.place, lambda: Opened(run, kit.services() if driven else None, reopen))
    driver.start()
    try:
        async with Client(build(driver)) as c:
            yield c
    finally:
        driver.stop()
        await asyncio.to_thread(driver.join)


async def call(c: Client, name: str, **arguments: Any) -> dict[str, Any]:
    result = await c.call_tool(name, arguments)
    assert not result.is_error, result.content
    found: dict[str, Any] = result.structured_content
    return found


async def refusal(c: Client, name: str, **arguments: Any) -> str:
    result = await c.call_tool(name, arguments)
    assert result.is_error
    return str(result.content[0].text)


def go(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 240))


async def best(c: Client) -> dict[str, Any]:
    """The task once the seed was judged."""
    while not (task := await call(c, "read_task"))["best"]:
        await asyncio.sleep(0.05)
    return task


def test_a_candidate_goes_from_task_to_verdict(kit: Any) -> None:
    async def work() -> None:
        async with client(kit, new(kit)) as c:
            task = await best(c)
            assert (task["target"], task["device"], task["arch"]) == ("fake", "cpu", "sm_90a")
            assert task["buffers"] == ["t.inputs.x: f32 [1024]", "t.outputs.y: f32 [1024]"]
            assert (task["floor_read_bytes"], task["floor_us"]) == (4096, 50.0)
            assert task["best"]["source"] == fakes.SEED
            assert task["best"]["report"]["us"] == 100.0
            assert "cute" in (await call(c, "read_guide"))["text"]

            sent = await call(
                c, "submit", source=kernel(80), prediction=1.2, note="less", author="ann"
            )
            seen: list[str | None] = []

            async def progress(done: float, total: float | None, message: str | None) -> None:
                seen.append(message)

            result = await c.call_tool(
                "wait", {"ticket": sent["ticket"]}, progress_callback=progress
            )
            got = result.structured_content
            assert (got["candidate"], got["stage"], got["done"]) == (1, "recorded", True)
            report = got["report"]
            assert (report["status"], report["outcome"], report["promoted"]) == (
                "passed",
                "better",
                True,
            )
            assert (report["us"], report["tier"], report["parent"]) == (80.0, "promote", 0)
            assert report["speedup_incumbent"]["value"] == pytest.approx(1.25)
            assert (report["note"], report["predicted_gain"]) == ("[ann] less", 1.2)
            assert (await call(c, "status", ticket=sent["ticket"])) == got
            assert (await call(c, "read_task"))["best"]["candidate"] == 1

    go(work)
    kinds = {d["kind"] for d in kit.queries.decisions(kit.queries.run("last")["id"])}
    assert "promote" in kinds


def test_failures_come_back_with_their_place_and_waiting_reports_progress(kit: Any) -> None:
    """Nobody judges the candidate before its author was told that it is being judged."""
    told = threading.Event()

    class Patient(fakes.FakeJudge):
        def judge(self, job: JudgeJob) -> Verdict:
            if job.incumbent is not None:
                told.wait(200)
            return super().judge(job)

    kit.judge = Patient()

    async def work() -> None:
        async with client(kit, new(kit)) as c:
            sent = await call(c, "submit", source=kernel(80, "wrong"), prediction=1.1)
            assert sent["done"] is False
            short = await call(c, "wait", ticket=sent["ticket"], timeout_s=0.1)
            assert short["done"] is False
            seen: list[str] = []

            async def progress(done: float, total: float | None, message: str | None) -> None:
                seen.append(message or "")
                if message == "judging":
                    told.set()

            result = await c.call_tool(
                "wait", {"ticket": sent["ticket"]}, progress_callback=progress
            )
            report = result.structured_content["report"]
            assert "judging" in seen
            assert (report["status"], report["us"], report["speedup_incumbent"]) == (
                "wrong",
                None,
                None,
            )
            assert report["failure"]["where"] == {"tensor": "y"}
            assert report["note"].startswith("A kernel of 80 us")

    go(work)


def test_two_candidates_are_compared_and_listed(kit: Any) -> None:
    async def work() -> None:
        async with client(kit, new(kit)) as c:
            for us in (80, 90):
                sent = await call(c, "submit", source=kernel(us), prediction=1.1)
                await call(c, "wait", ticket=sent["ticket"])
            found = await call(c, "compare", a=0, b=2)
            assert (found["a_us"], found["b_us"]) == (100.0, 90.0)
            assert found["ratio"] == pytest.approx(100 / 90)
            assert "+# fake: us=90 mode=passed" in found["diff"]
            promoted = await call(c, "compare", a=1, b=2)
            assert promoted["ratio"] is None  # of different tiers
            view = await call(c, "candidate", number=2)
            assert view["source"] == kernel(90)
            assert "--- a/1.py" in view["diff"]
            rows = (await call(c, "history"))["candidates"]
            assert [(r["candidate"], r["result"], r["promoted"]) for r in rows] == [
                (0, "not_timed", True), (1, "better", True), (2, "slow", False),
            ]  # fmt: skip

    go(work)


def test_the_budget_ends_the_run_and_says_so(kit: Any) -> None:
    run = new(kit, limits=Limits(rounds=None, candidates=1, stop_at=None, patience=None))

    async def work() -> None:
        async with client(kit, run) as c:
            sent = await call(c, "submit", source=kernel(80), prediction=1.1)
            late = await call(c, "submit", source=kernel(70), prediction=1.1)
            assert (await call(c, "wait", ticket=sent["ticket"]))["done"]
            while not (left := await call(c, "budget"))["stopped"]:
                await asyncio.sleep(0.05)
            assert left["lines"][0] == {"what": "candidates", "limit": 1.0, "used": 1.0}
            assert left["lines"][3]["used"] == pytest.approx(0.75)  # three judgements
            assert left["queued"] == 1
            held = await call(c, "wait", ticket=late["ticket"])
            assert (held["stage"], held["done"]) == ("queued", False)
            assert "all candidates are used" in held["note"]
            assert "takes no more" in await refusal(c, "submit", source=kernel(60), prediction=1.1)

    go(work)
    assert kit.queries.run(run)["state"] == "review"
    assert len(kit.judge.calls) == 2  # nobody reopened it
    settings = with_limits(load_settings(kit.place, run), candidates=3)
    save_settings(kit.place, run, settings)

    async def more() -> None:
        async with client(kit, run, reopen=True) as c:
            assert (await call(c, "budget"))["stopped"] == ""
            sent = await call(c, "submit", source=kernel(60), prediction=1.1)
            assert (await call(c, "wait", ticket=sent["ticket"]))["report"]["us"] == 60.0

    go(more)
    assert [row["us"] for row in kit.queries.candidates(run)] == [100.0, 80.0, 70.0, 60.0]


def test_wrong_requests_are_answered_with_sentences(kit: Any) -> None:
    async def work() -> None:
        async with client(kit, new(kit)) as c:
            await best(c)
            text = await refusal(c, "status", ticket="nothing")
            assert "There is no submission 'nothing'" in text
            assert "no recorded candidate 7" in await refusal(c, "candidate", number=7)
            assert "is empty" in await refusal(c, "submit", source=" \n", prediction=1.1)
            large = "#" * ((1 << 20) + 1)
            assert "more than 1048576" in await refusal(c, "submit", source=large, prediction=1.1)
            for bad in (0, -1, 1000):
                text = await refusal(c, "submit", source=kernel(80), prediction=bad)
                assert "prediction" in text
            text = await refusal(c, "submit", source=kernel(80), prediction=1.1, author="a\nb")
            assert "author" in text
            assert (await call(c, "history"))["queued"] == []

    go(work)


def test_no_tool_takes_a_result(kit: Any) -> None:
    async def work() -> None:
        async with client(kit, new(kit)) as c:
            tools = {t.name: t for t in (await c.list_tools()).tools}
            numbers = {
                (name, key)
                for name, tool in tools.items()
                for key, value in tool.input_schema.get("properties", {}).items()
                if value.get("type") in ("number", "integer")
            }
            assert numbers == {
                ("submit", "prediction"), ("wait", "timeout_s"), ("candidate", "number"),
                ("compare", "a"), ("compare", "b"),
            }  # fmt: skip
            assert all(t.output_schema for t in tools.values())
            sent = await call(c, "submit", source=kernel(100), prediction=50, note="us: 0.1")
            got = await call(c, "wait", ticket=sent["ticket"])
            assert (got["report"]["us"], got["report"]["promoted"]) == (100.0, False)

    go(work)


def test_a_device_that_is_missing_is_said_by_every_tool(kit: Any) -> None:
    def begin() -> Opened:
        raise Unavailable("device cuda: there is none")

    async def work() -> None:
        driver = Driver(kit.place, begin)
        driver.start()
        async with Client(build(driver)) as c:
            assert (await refusal(c, "read_task")).endswith(": Device cuda: there is none.")
        driver.stop()
        driver.join()

    go(work)


def test_a_run_that_stands_still_says_why_and_goes_on(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.mcp.driver.FAILED_S", 0.3)
    kit.judge.broken = True

    async def work() -> None:
        async with client(kit, new(kit)) as c:
            sent = await call(c, "submit", source=kernel(80), prediction=1.1)
            while not (got := await call(c, "status", ticket=sent["ticket"]))["note"]:
                await asyncio.sleep(0.05)
            assert "the seed cannot be judged here" in got["note"]
            kit.judge.broken = False
            got = await call(c, "wait", ticket=sent["ticket"])
            assert (got["done"], got["note"], got["report"]["us"]) == (True, "", 80.0)

    go(work)


def test_several_agents_and_a_shell_share_a_run(kit: Any) -> None:
    run = new(kit, limits=Limits(rounds=None, candidates=9, stop_at=None, patience=None))
    kit.judge.delay = 0.05

    async def agent(c: Client, name: str, times: list[int]) -> list[dict[str, Any]]:
        found = []
        for us in times:
            sent = await call(c, "submit", source=kernel(us), prediction=1.1, author=name)
            found.append(await call(c, "wait", ticket=sent["ticket"]))
        return found

    async def work() -> None:
        async with client(kit, run) as a, client(kit, run) as b:
            await best(a)
            folder = kit.place.workspace.run(run).folder / "external"
            while not (folder / "task.md").exists():
                await asyncio.sleep(0.05)
            shell = asyncio.to_thread(offer, folder, kernel(55))
            first, second, _ = await asyncio.gather(
                agent(a, "ann", [90, 70, 85]), agent(b, "bob", [80, 60, 95]), shell
            )
            assert all(f["done"] for f in [*first, *second])
            while len((await call(a, "history"))["candidates"]) < 8:
                await asyncio.sleep(0.05)
            rows = (await call(b, "history"))["candidates"]
            assert sorted(r["us"] for r in rows) == [55, 60, 70, 80, 85, 90, 95, 100]
            assert (await call(b, "read_task"))["best"]["report"]["us"] == 55

    go(work)


def test_tools_alone_leave_the_judging_to_another_process(kit: Any) -> None:
    run = new(kit)

    async def work() -> None:
        async with client(kit, run, driven=False) as c:
            sent = await call(c, "submit", source=kernel(80), prediction=1.1)
            assert (await call(c, "read_task"))["best"] is None
            assert kit.judge.calls == []
            async with client(kit, run):
                assert (await call(c, "wait", ticket=sent["ticket"]))["report"]["us"] == 80.0

    go(work)


def test_the_queue_lies_in_the_folder_that_was_asked_for(kit: Any, tmp_path: Path) -> None:
    run = new(kit, folder=str(tmp_path / "mine"))

    async def work() -> None:
        async with client(kit, run, driven=False) as c:
            await call(c, "submit", source=kernel(80), prediction=1.1)

    go(work)
    assert len(list((tmp_path / "mine" / "queue").glob("*.json"))) == 1
