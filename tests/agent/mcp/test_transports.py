"""Both transports through the official client, against a server process, and that process killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from agent.fakes import kernel
from agent.search import Limits
from tests.agent.mcp.child import TOKEN
from tests.agent.mcp.test_tools import best, call, new

ROOT = Path(__file__).resolve().parents[3]


def arguments(kit: Any, run: str, delay: float, *more: str) -> list[str]:
    folder = str(kit.place.db.parent)
    return ["-m", "tests.agent.mcp.child", folder, run, str(delay), *more]


def stdio(kit: Any, run: str, delay: float = 0.0) -> StdioServerParameters:
    return StdioServerParameters(
        command=sys.executable, args=arguments(kit, run, delay), cwd=str(ROOT)
    )


@contextmanager
def http(kit: Any, run: str, delay: float = 0.0) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server process, and its port."""
    port = kit.place.db.parent / f"port-{time.time_ns()}"
    command = [sys.executable, *arguments(kit, run, delay, str(port))]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while not (port.exists() and port.read_text()):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
        yield process, int(port.read_text())
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx2.AsyncClient(headers=headers, timeout=120) as web:
        url = f"http://127.0.0.1:{port}/mcp"
        async with Client(streamable_http_client(url, http_client=web)) as c:
            yield c


async def submitted_and_judged(c: Client, us: float) -> dict[str, Any]:
    await best(c)
    sent = await call(c, "submit", source=kernel(us), prediction=1.2)
    return await call(c, "wait", ticket=sent["ticket"])


def judged(kit: Any) -> list[str]:
    path = kit.place.db.parent / "judged"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def test_a_candidate_is_judged_over_stdio(kit: Any) -> None:
    run = new(kit)

    async def work() -> None:
        async with Client(stdio(kit, run)) as c:
            got = await submitted_and_judged(c, 80)
            assert (got["report"]["us"], got["report"]["promoted"]) == (80.0, True)

    asyncio.run(asyncio.wait_for(work(), 240))
    assert kit.queries.candidates(run)[1]["us"] == 80.0


def test_what_a_library_prints_never_reaches_stdout(kit: Any) -> None:
    """Before, while and after the protocol is spoken; read byte by byte, without a client."""
    hello = b'{"jsonrpc":"2.0","id":1,"method":"ping"}\n'
    command = [sys.executable, *arguments(kit, new(kit), 0.2)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        process.stdin.write(hello)
        process.stdin.flush()
        end = time.monotonic() + 120
        while not judged(kit) and time.monotonic() < end:
            time.sleep(0.05)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert [line[:16] for line in out.splitlines()] == [b'{"jsonrpc":"2.0"']
    assert b"must not reach the protocol" in err


def test_http_wants_the_token_and_this_hosts_name(kit: Any) -> None:
    run = new(kit)

    async def work(port: int) -> None:
        async with connected(port) as c:
            got = await submitted_and_judged(c, 80)
            assert (got["report"]["us"], got["report"]["promoted"]) == (80.0, True)

    with http(kit, run) as (_, port):
        asyncio.run(asyncio.wait_for(work(port), 240))
        url, good = f"http://127.0.0.1:{port}/mcp", {"Authorization": f"Bearer {TOKEN}"}
        for headers, code in (
            ({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": TOKEN}, 401),
            ({**good, "Host": f"evil.example:{port}"}, 421),
            ({**good, "Origin": "http://evil.example"}, 403),
        ):  # fmt: skip
            assert httpx2.post(url, headers=headers, json={}).status_code == code
        assert httpx2.post(url, headers=good, json={}).status_code not in (401, 403, 421)


@pytest.mark.slow
def test_a_server_killed_between_submission_and_verdict_loses_nothing(kit: Any) -> None:
    run = new(kit)
    folder = kit.place.workspace.run(run).folder / "external"
    tickets: list[str] = []

    async def hand_in(port: int) -> None:
        async with connected(port) as c:
            await best(c)
            for us in (80, 70):
                tickets.append(
                    (await call(c, "submit", source=kernel(us), prediction=1.2))["ticket"]
                )
            while (await call(c, "status", ticket=tickets[0]))["stage"] != "judging":
                await asyncio.sleep(0.05)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()

    with http(kit, run, delay=600.0) as (process, port):
        with suppress(Exception):  # the connection breaks, in one way or another
            asyncio.run(asyncio.wait_for(hand_in(port), 240))
    assert process.returncode == -signal.SIGKILL
    assert len(tickets) == 2
    assert len(list((folder / "queue").glob("*.json"))) == 1
    assert len(judged(kit)) == 1  # the seed

    async def come_back() -> None:
        async with Client(stdio(kit, run)) as c:
            # A client that does not know whether it was heard says it again.
            again = await call(c, "submit", source=kernel(80), prediction=1.2)
            assert again["ticket"] == tickets[0]
            found = [await call(c, "wait", ticket=t) for t in tickets]
            assert [f["candidate"] for f in found] == [1, 2]
            assert [f["report"]["us"] for f in found] == [80.0, 70.0]
            rows = (await call(c, "history"))["candidates"]
            assert [r["us"] for r in rows] == [100.0, 80.0, 70.0]

    asyncio.run(asyncio.wait_for(come_back(), 240))
    assert len(judged(kit)) == 5  # the seed once, each candidate at two tiers


def test_a_client_that_leaves_finds_its_verdict_later(kit: Any) -> None:
    run = new(kit)

    async def work(port: int) -> None:
        async with connected(port) as c:
            ticket = (await call(c, "submit", source=kernel(80), prediction=1.2))["ticket"]
        async with connected(port) as c:
            assert (await call(c, "wait", ticket=ticket))["report"]["us"] == 80.0

    with http(kit, run, delay=0.3) as (_, port):
        asyncio.run(asyncio.wait_for(work(port), 240))


@pytest.mark.slow
def test_servers_killed_again_and_again_judge_each_submission_once(kit: Any) -> None:
    """Two servers on one run, killed at random; clients that repeat themselves until they are heard."""
    limits = Limits(rounds=None, candidates=6, stop_at=None, patience=None)
    run = new(kit, limits=limits)
    times = [95, 90, 85, 80, 75, 70]
    rng = random.Random(5)

    async def insist(port: int) -> None:
        async with connected(port) as c:
            for us in times:
                await call(c, "submit", source=kernel(us), prediction=1.1)
            await asyncio.sleep(60)

    async def talk(port: int, seconds: float) -> None:
        with suppress(Exception):
            await asyncio.wait_for(insist(port), seconds)

    for _ in range(4):
        with http(kit, run, delay=0.3) as (_, a), http(kit, run, delay=0.3) as (_, b):
            asyncio.run(talk(rng.choice((a, b)), rng.uniform(0.3, 2.5)))

    async def finish() -> None:
        async with Client(stdio(kit, run)) as c:
            while not (await call(c, "budget"))["stopped"]:
                with suppress(AssertionError):
                    for us in times:
                        await call(c, "submit", source=kernel(us), prediction=1.1)
                await asyncio.sleep(0.2)
            rows = (await call(c, "history"))["candidates"]
            assert sorted(r["us"] for r in rows) == [70, 75, 80, 85, 90, 95, 100]
            assert (await call(c, "history"))["queued"] == []

    asyncio.run(asyncio.wait_for(finish(), 240))
