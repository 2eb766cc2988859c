"""The client and its server process: refusal of isolation, death of the server, close while a job runs."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from sandbox.box import procfs
from sandbox.compile_client import CompileClient, CompileSettings, NoIsolation, _Server, environment
from sandbox.jobs import CompileJob, CompileOutcome
from sandbox.verdict import Status

LONG = CompileJob("def step(t, cfg, stream): pass\nwhile True: pass\n", "demo", {}, {}, ())
BAD = CompileJob("def step(:\n", "demo", {}, {}, ())


def client(store: Path) -> CompileClient:
    return CompileClient(CompileSettings(store=store, tier="none", trust_this_code=True, idle=0))


def test_no_isolation_without_a_word_of_trust(tmp_path: Path) -> None:
    refused = CompileClient(CompileSettings(store=tmp_path, tier="none", idle=0))
    with refused, pytest.raises(NoIsolation, match="trust"):
        refused.compile(BAD)


def test_a_start_says_what_isolates_and_why_nothing_stronger_does(tmp_path: Path) -> None:
    with client(tmp_path) as compiler:
        about = compiler.start()
    assert about["tier"] == "none" and about["sentence"].startswith("NO ISOLATION")
    assert about["passed_over"] == []
    gone = CompileSettings(store=tmp_path, bwrap=tmp_path / "no-bwrap", idle=0)
    with CompileClient(gone) as compiler:
        try:
            about = compiler.start()
        except NoIsolation as refused:
            assert "no-bwrap" in str(refused)
        else:
            assert about["tier"] != "strict" and any("no-bwrap" in w for w in about["passed_over"])


def test_the_server_never_sees_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert "PATH" in environment() and "secret" not in environment().values()


def killed(compiler: CompileClient) -> _Server:
    """The client's server, which has worked and is dead."""
    assert compiler.compile(BAD).status is Status.REJECTED
    server = compiler._server
    assert server
    os.kill(server._process.pid, signal.SIGKILL)
    server._process.wait(60)
    return server


def test_a_server_that_died_is_started_again(tmp_path: Path) -> None:
    with client(tmp_path) as compiler:
        killed(compiler)
        outcomes = [compiler.compile(BAD) for _ in range(2)]
        assert outcomes[-1].status is Status.REJECTED
        assert outcomes[0].status in (Status.REJECTED, Status.INFRA)


def test_a_job_that_a_dead_server_never_had_goes_to_the_next(tmp_path: Path) -> None:
    """The thread that reads its answers has not seen its end yet."""
    with client(tmp_path) as compiler:
        server = killed(compiler)
        until = time.monotonic() + 60
        while not server.ended:
            assert time.monotonic() < until
            time.sleep(0.01)
        server.ended = False
        assert compiler.compile(BAD).status is Status.REJECTED
        assert compiler._server is not server


def test_a_closed_client_cancels(tmp_path: Path) -> None:
    with client(tmp_path) as compiler:
        compiler.start()
        server = compiler._server
        assert server
    assert compiler.compile(BAD).status is Status.CANCELLED
    server.ended = False  # a call that came before the end of the pipe
    with pytest.raises(OSError, match="closed"):
        server.call(BAD)


def test_interrupts_do_not_reach_the_server(tmp_path: Path) -> None:
    with client(tmp_path) as compiler:
        compiler.start()
        assert compiler._server
        os.kill(compiler._server._process.pid, signal.SIGINT)
        assert compiler.compile(BAD).cached is False
        assert compiler.compile(BAD).status is Status.REJECTED


@pytest.mark.slow
def test_closing_cancels_what_runs_and_leaves_no_process(tmp_path: Path) -> None:
    compiler = client(tmp_path)
    compiler.start()
    got: list[CompileOutcome] = []
    caller = threading.Thread(target=lambda: got.append(compiler.compile(LONG)))
    caller.start()
    assert compiler._server
    until = time.monotonic() + 120
    while not (children := procfs.tree(compiler._server._process.pid)[1:]):
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(4)  # it imports, and then does not come to an end
    compiler.close()
    caller.join(60)
    assert got and got[0].status is Status.CANCELLED
    until = time.monotonic() + 60
    while any(procfs.alive(child) for child in children):
        assert time.monotonic() < until
        time.sleep(0.05)
