"""Client and server as processes: the protocol, what the server inherits, deaths, cancellation, and endings."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import judge_client, judge_wire
from sandbox.box import landlock
from sandbox.jobs import JudgeJob
from sandbox.judge_client import ClientOptions, JudgeClient, JudgeFailed
from sandbox.verdict import Status, Verdict
from tests.sandbox.judge.test_server_child import alive

SCOPES_SIGNALS = 6  # of Landlock's ABI
RUNNERS = "tests.sandbox.judge.server_runners"
ROOT = Path(__file__).resolve().parents[3]


def client(state: Path, *extra: str) -> JudgeClient:
    return JudgeClient(
        ClientOptions(
            state,
            lock_s=1.0,
            extra=("--runner", f"{RUNNERS}:by_target", "--opener", f"{RUNNERS}:open_fake", *extra),
            environment={
                "KERNELGEN_CACHE": str(state),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "0",
            },
        )
    )


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def judge(state: Path) -> Iterator[JudgeClient]:
    os.environ["KERNELGEN_TEST_SECRET"] = "sk-very-secret"
    with client(state) as c:
        yield c
    del os.environ["KERNELGEN_TEST_SECRET"]


def job(state: Path, runner: str, deadline_s: float = 60.0) -> JudgeJob:
    return JudgeJob(
        artifact=state / "artifact",
        target=runner,
        options={},
        device="cuda",
        deadline_s=deadline_s,
        seed=7,
    )


def server_pid(c: JudgeClient) -> int:
    return int(c.ready["pid"])


def test_a_job_goes_there_and_its_verdict_comes_back(judge: JudgeClient, state: Path) -> None:
    verdict = judge.judge(job(state, "ok"))
    assert (verdict.status, verdict.profile) == (
        Status.PASSED,
        {"note": "ok", "seed": 7, "deadline": 60.0},
    )
    assert judge.probe("cuda")["facts"]["sms"] == 132


def test_the_server_has_no_secrets_and_its_own_session(judge: JudgeClient, state: Path) -> None:
    verdict = judge.judge(job(state, "environment"))
    seen = dict(line.split("=", 1) for line in verdict.profile["note"].splitlines())
    assert not [k for k in seen if "SECRET" in k or "KEY" in k or "TOKEN" in k]
    # What torch and the server set for themselves is not inherited.
    own = {"TMPDIR", "USER", "CUDA_CACHE_DISABLE", "CUDA_DEVICE_ORDER", "LC_CTYPE"}
    inherited = set(seen) - own - {"PYTORCH_NVML_BASED_CUDA_CHECK"}
    assert seen["HOME"] == seen["TMPDIR"] and str(state) in seen["HOME"]
    assert {k for k in inherited if not k.startswith(("TORCH", "KMP", "PYTORCH"))} <= set(
        judge_client.KEEP
    )
    raw = Path(f"/proc/{server_pid(judge)}/environ").read_bytes()
    assert b"sk-very-secret" not in raw
    assert os.getsid(server_pid(judge)) == server_pid(judge)


def test_interrupts_do_not_reach_the_server(judge: JudgeClient, state: Path) -> None:
    os.kill(server_pid(judge), signal.SIGINT)
    before = server_pid(judge)
    assert judge.judge(job(state, "ok")).status is Status.PASSED
    assert server_pid(judge) == before


def test_a_bad_request_is_infra_with_the_field(judge: JudgeClient, state: Path) -> None:
    verdict = judge.judge(job(state, "ok", deadline_s=float("inf")))
    assert verdict.failure is not None
    assert "job.deadline_s" in verdict.failure.message
    bad = JudgeJob(artifact=state, target="ok\n", options={}, device="cuda")
    verdict = judge.judge(bad)
    assert verdict.failure is not None
    assert (verdict.status, verdict.failure.rule) == (Status.INFRA, "judge-server")
    assert "job.target" in verdict.failure.message
    assert judge.judge(job(state, "ok")).status is Status.PASSED


def test_processes_that_a_child_leaves_die_with_it(judge: JudgeClient, state: Path) -> None:
    left = int(judge.judge(job(state, "leaves_children")).profile["note"])
    end = time.monotonic() + 60
    while alive(left) and time.monotonic() < end:
        time.sleep(0.01)
    assert not alive(left)


def test_cancel_ends_the_running_job_only(judge: JudgeClient, state: Path) -> None:
    assert judge.judge(job(state, "ok")).status is Status.PASSED  # started, and no canary is due

    def cancel() -> None:
        at_work(judge)
        judge.cancel()

    threading.Thread(target=cancel, daemon=True).start()
    assert judge.judge(job(state, "hangs_outside")).status is Status.CANCELLED
    judge.cancel()  # nothing runs: no effect on the next job
    assert judge.judge(job(state, "ok")).status is Status.PASSED


def at_work(c: JudgeClient) -> tuple[int, list[int]]:
    """The server and its children, once it has any."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        time.sleep(0.05)
        if c.ready:
            pid = server_pid(c)
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if children:
                return pid, [int(p) for p in children]
    raise AssertionError("nothing was judged")


@pytest.mark.slow
def test_a_dead_server_costs_one_infra_verdict(state: Path) -> None:
    verdicts: list[Verdict] = []
    with client(state) as c:
        hanging = job(state, "hangs_outside")
        thread = threading.Thread(target=lambda: verdicts.append(c.judge(hanging)))
        thread.start()
        first, _ = at_work(c)
        os.kill(first, signal.SIGKILL)
        thread.join(120)
        (verdict,) = verdicts
        assert verdict.failure is not None
        assert (verdict.status, verdict.failure.rule) == (Status.INFRA, "judge-server")
        assert c.judge(job(state, "ok")).status is Status.PASSED
        assert server_pid(c) != first
        last = server_pid(c)
        begin = time.monotonic()
    assert time.monotonic() - begin < judge_client.STOP_S  # by itself, not by a kill
    assert not alive(last)


@pytest.mark.slow
def test_a_job_that_a_dead_server_never_had_goes_to_the_next(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended between two jobs, and was not seen to have."""
    with client(state) as c:
        assert c.judge(job(state, "ok")).status is Status.PASSED
        dead = c._process
        assert dead is not None
        os.kill(dead.pid, signal.SIGKILL)
        dead.wait(60)
        monkeypatch.setattr(dead, "poll", lambda: None)
        assert c.judge(job(state, "ok")).status is Status.PASSED
        assert server_pid(c) != dead.pid


@pytest.mark.slow
def test_a_confined_child_cannot_kill_its_server(state: Path) -> None:
    with client(state) as c:
        c.judge(job(state, "ok"))
        pid = server_pid(c)
        if landlock.abi() < SCOPES_SIGNALS:
            pytest.skip("this kernel's Landlock does not scope signals")
        verdict = c.judge(job(state, "kills_server"))
        assert verdict.failure is not None
        assert (verdict.status, verdict.failure.rule) == (Status.INFRA, "judge-error")
        assert server_pid(c) == pid and alive(pid)


@pytest.mark.slow
def test_a_terminated_server_takes_its_child_along(state: Path) -> None:
    c = client(state)
    results: list[Status] = []
    thread = threading.Thread(
        target=lambda: results.append(c.judge(job(state, "hangs_outside")).status)
    )
    thread.start()
    pid, children = at_work(c)
    os.kill(pid, signal.SIGTERM)
    thread.join(120)
    assert results == [Status.INFRA]
    assert not any(alive(p) for p in [pid, *children])
    c.close()


@pytest.mark.slow
def test_a_server_whose_client_dies_ends_with_its_child(state: Path) -> None:
    code = f"""
import sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.sandbox.judge import test_server_client as t
c = t.client(Path({str(state)!r}))
threading.Thread(target=lambda: c.judge(t.job(Path({str(state)!r}), "hangs_outside")), daemon=True).start()
while not c.ready:
    time.sleep(0.05)
print(c.ready["pid"], flush=True)
time.sleep(60)
"""
    agent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    pid = int(agent.stdout.readline())
    end = time.monotonic() + 120
    children: list[int] = []
    while not children and time.monotonic() < end:
        time.sleep(0.05)
        children = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    agent.kill()
    agent.wait(10)
    while any(alive(p) for p in [pid, *children]) and time.monotonic() < end:
        time.sleep(0.05)
    assert children
    assert not any(alive(p) for p in [pid, *children])


@pytest.mark.slow
def test_a_server_that_cannot_start_says_why(state: Path) -> None:
    with client(state, "--runner", "sandbox.judge.nowhere:run") as c:
        with pytest.raises(JudgeFailed, match=r"No module named 'sandbox\.judge\.nowhere'"):
            c.probe("cuda")
        verdict = c.judge(job(state, "ok"))
    assert verdict.failure is not None
    assert "sandbox.judge.nowhere" in verdict.failure.message
    options = ClientOptions(
        state, command=(sys.executable, "-c", "import sys; sys.exit('no such judge')")
    )
    with JudgeClient(options) as c, pytest.raises(JudgeFailed, match="no such judge"):
        c.probe("cuda")


def test_importing_the_client_imports_neither_torch_nor_the_judge() -> None:
    code = """
import sandbox.judge_client, sys
heavy = ("torch", "cuda", "cutlass")
print([m for m in sys.modules if m.split(".")[0] in heavy or m.startswith(("sandbox.judge.", "sandbox.devices"))])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=200
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_frames_are_bounded_and_whole() -> None:
    read_end, write_end = os.pipe()
    frames = judge_wire.Frames(read_end)
    data = judge_wire.pack({"a": 1}) + judge_wire.pack({"b": [2.5]})
    os.write(write_end, data[:7])
    frames.pump()
    assert frames.next() is None
    os.write(write_end, data[7:])
    frames.pump()
    assert [frames.next(), frames.next(), frames.next()] == [{"a": 1}, {"b": [2.5]}, None]
    os.write(write_end, (judge_wire.MAX_FRAME + 1).to_bytes(4, "big"))
    frames.pump()
    with pytest.raises(judge_wire.Malformed):
        frames.next()
    os.close(write_end)
    frames.pump()
    assert frames.closed
    os.close(read_end)
