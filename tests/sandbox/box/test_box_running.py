"""One box from start to end: what goes in and out, what it sees, how it ends, and what is left of it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandbox import box
from sandbox.box import procfs
from tests.sandbox.box.specs import spec

MB = 1 << 20
CAPS = box.Caps({"ptx": MB})
READY_S = 60


def started(worker: str, choice: box.Choice, **changes: Any) -> box.Boxed:
    boxed = box.start(spec(worker, **changes), choice)
    assert isinstance(boxed, box.Boxed), boxed
    ready = boxed.wait_ready(READY_S)
    assert not isinstance(ready, box.Broken), ready
    assert boxed.verify() is None
    return boxed


def ask(boxed: box.Boxed, body: dict[str, Any], deadline_s: float = 60) -> box.Frame | box.Broken:
    assert boxed.send(body, {}, 5) is None
    return boxed.read(CAPS, deadline_s)


def test_blocks_come_back_whole(choice: box.Choice) -> None:
    block = os.urandom(MB)
    with started("echo", choice) as boxed:
        assert boxed.send({"n": 1}, {"ptx.step": block}, 5) is None
        frame = boxed.read(CAPS, 10)
    assert isinstance(frame, box.Frame)
    assert frame.body == {"echo": {"n": 1}}
    assert frame.blocks == {"ptx.step": block}


def test_nothing_of_ours_is_inside(choice: box.Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_KEY", "secret-value")
    leak = os.open("/etc/passwd", os.O_RDONLY)
    os.set_inheritable(leak, True)
    with started("look", choice, env={"CUTE_DSL_ARCH": "sm_90a"}) as boxed:
        frame = ask(
            boxed, {"write": [str(Path.cwd())], "read": ["/etc/passwd", str(Path.home() / ".ssh")]}
        )
    os.close(leak)
    assert isinstance(frame, box.Frame)
    seen = frame.body
    assert "secret-value" not in str(seen)
    expected = {"PATH", "HOME", "TMPDIR", "USER", "LANG", "BOX_LIB", "BOX_RESULT_FD", "BOX_ADDRESS_SPACE", "BOX_FILTER",
                "CUTE_DSL_ARCH", "PWD"}  # fmt: skip
    assert set(seen["env"]) - {"LC_CTYPE"} <= expected
    # 0, 1, 2, the result pipe and the folder that was being listed
    assert len(seen["fds"]) == 5
    assert seen["uid"] == boxed.isolation.uid != 0
    assert all(seen["write"].values())
    assert all(seen["read"].values())


def test_the_scratch_folder_is_writable_and_does_not_last(choice: box.Choice) -> None:
    with started("look", choice) as boxed:
        frame = ask(boxed, {"write": ["."], "read": []})
    assert isinstance(frame, box.Frame)
    assert frame.body["write"] == {".": 0}
    assert not Path(frame.body["cwd"]).exists()


def test_the_compile_filter_is_on(choice: box.Choice) -> None:
    with started("look", choice) as boxed:
        frame = ask(boxed, {"write": [], "read": []})
    assert isinstance(frame, box.Frame)
    refused = {name: frame.body[name] for name in ("memfd", "unix", "fork")}
    assert refused == dict.fromkeys(refused, 1)


def test_a_worker_that_did_not_narrow_itself_gets_no_source(choice: box.Choice) -> None:
    boxed = box.start(spec("wide"), choice)
    assert isinstance(boxed, box.Boxed)
    with boxed:
        assert not isinstance(boxed.wait_ready(READY_S), box.Broken)
        wrong = boxed.verify()
    assert wrong is not None and "filters" in wrong.detail


def test_failing_before_ready_is_ours(choice: box.Choice) -> None:
    boxed = box.start(spec("crash"), choice)
    assert isinstance(boxed, box.Boxed)
    with boxed:
        ready = boxed.wait_ready(READY_S)
    assert isinstance(ready, box.Broken) and ready.reason == "box"
    assert "the interpreter is broken" in ready.detail


def test_a_missing_worker_or_interpreter_is_ours(choice: box.Choice) -> None:
    for broken in (spec("nowhere"), spec("echo", python=Path("/nonexistent/python"))):
        boxed = box.start(broken, choice)
        if isinstance(boxed, box.Broken):
            assert boxed.reason == "box"
            continue
        with boxed:
            ready = boxed.wait_ready(READY_S)
        assert isinstance(ready, box.Broken) and ready.reason == "box"


@pytest.mark.parametrize("do", ["spin", "sleep"])
def test_the_deadline_holds(do: str, choice: box.Choice) -> None:
    with started("behave", choice) as boxed:
        begin = time.monotonic()
        broken = ask(boxed, {"do": do}, deadline_s=0.5)
        took = time.monotonic() - begin
    assert isinstance(broken, box.Broken) and broken.reason == "timeout"
    assert 0.5 <= took < 60  # the worker would go on for ten minutes


@pytest.mark.parametrize(("do", "why"), [("fault", "SIGSEGV"), ("exit", "exit status 7")])
def test_a_dead_worker_says_how_it_died(do: str, why: str, choice: box.Choice) -> None:
    with started("behave", choice) as boxed:
        broken = ask(boxed, {"do": do})
    assert isinstance(broken, box.Broken) and broken.reason == "closed"
    assert why in broken.detail


def test_processor_time_has_a_limit_of_its_own(choice: box.Choice) -> None:
    with started("behave", choice, limits=box.Limits(cpu_s=1)) as boxed:
        broken = ask(boxed, {"do": "spin"}, deadline_s=200)
    assert isinstance(broken, box.Broken) and broken.reason == "timeout"
    assert "processor" in broken.detail


def test_memory_has_a_limit_beside_the_address_space(choice: box.Choice) -> None:
    limits = box.Limits(address_space=None, memory=200 * MB)
    with started("behave", choice, limits=limits) as boxed:
        broken = ask(boxed, {"do": "hold", "size": 400 * MB}, deadline_s=200)
    assert isinstance(broken, box.Broken) and broken.reason == "memory"


def test_the_watchdog_limits_memory_where_no_group_does(
    choice: box.Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sandbox.box import cgroup

    monkeypatch.setattr(cgroup, "make", lambda limits: cgroup.Groups())
    limits = box.Limits(address_space=None, memory=200 * MB)
    with started("behave", choice, limits=limits) as boxed:
        assert boxed.isolation.memory == "watchdog"
        broken = ask(boxed, {"do": "hold", "size": 400 * MB}, deadline_s=200)
    assert isinstance(broken, box.Broken) and broken.reason == "memory"


def test_trusted_code_is_not_ended_for_what_a_neighbour_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sandbox.box import cgroup

    monkeypatch.setattr(cgroup, "make", lambda limits: cgroup.Groups())
    choice = box.choose(spec("behave"), box.Settings(tier=box.BoxTier.NONE, trust_this_code=True))
    assert isinstance(choice, box.Choice)
    neighbour = os.memfd_create("neighbour")
    grow = threading.Timer(0.5, os.posix_fallocate, (neighbour, 0, 300 * MB))
    try:
        with started("behave", choice, limits=box.Limits(memory=200 * MB)) as boxed:
            assert boxed.isolation.memory == "watchdog"
            grow.start()
            broken = ask(boxed, {"do": "sleep"}, deadline_s=2.0)
        grow.join()
        assert os.fstat(neighbour).st_blocks * 512 >= 300 * MB
    finally:
        os.close(neighbour)
    assert isinstance(broken, box.Broken) and broken.reason == "timeout"


def test_output_is_capped_and_clean(choice: box.Choice) -> None:
    limits = box.Limits(output=1000)
    with started("behave", choice, limits=limits) as boxed:
        frame = ask(boxed, {"do": "print", "size": 300_000})
        boxed.kill()
        said = boxed.output()
    assert isinstance(frame, box.Frame)
    assert len(said) <= 1000
    assert said.endswith("x\ufffd[31mtail\ufffd\n")


def test_a_box_outlives_the_thread_that_started_it(choice: box.Choice) -> None:
    made: list[box.Boxed] = []
    thread = threading.Thread(target=lambda: made.append(started("echo", choice)))
    thread.start()
    thread.join()
    time.sleep(0.2)
    with made[0] as boxed:
        assert isinstance(ask(boxed, {"n": 1}), box.Frame)


def test_kill_from_another_thread_ends_a_read(choice: box.Choice) -> None:
    with started("behave", choice) as boxed:
        assert boxed.send({"do": "sleep"}, {}, 60) is None
        threading.Timer(0.3, boxed.kill).start()
        broken = boxed.read(CAPS, 200)
        assert isinstance(broken, box.Broken) and broken.reason == "box"
        assert boxed.kill() is None
        assert isinstance(boxed.read(CAPS, 1), box.Broken)
        assert isinstance(boxed.send({}, {}, 1), box.Broken)


def test_nothing_is_left(choice: box.Choice) -> None:
    gc.collect()  # what earlier tests left must not be closed meanwhile
    before = set(os.listdir("/proc/self/fd"))
    with started("echo", choice) as boxed:
        members = procfs.tree(boxed.pid)
        assert members
    assert not [pid for pid in members if procfs.alive(pid)]
    assert set(os.listdir("/proc/self/fd")) <= before
    if os.getuid() == 0:
        assert procfs.owned_by(boxed.isolation.uid) == []


def test_boxes_run_side_by_side_apart(choice: box.Choice) -> None:
    with started("echo", choice) as one, started("echo", choice) as two:
        assert ask(one, {"n": 1}).body == {"echo": {"n": 1}}  # type: ignore[union-attr]
        assert ask(two, {"n": 2}).body == {"echo": {"n": 2}}  # type: ignore[union-attr]
        if os.getuid() == 0:
            assert one.isolation.uid != two.isolation.uid


PARENT = """
import sys, time
sys.path.insert(0, {root!r})
from tests.sandbox.box.specs import spec
from sandbox import box
found = box.choose(spec("echo"), box.Settings())
boxed = box.start(spec("echo"), found)
assert not isinstance(boxed.wait_ready(60), box.Broken)
print(boxed.pid, flush=True)
time.sleep(60)
"""


def test_nothing_survives_the_death_of_the_parent(choice: box.Choice) -> None:
    code = PARENT.format(root=str(Path(__file__).parents[3]))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    members = procfs.tree(int(parent.stdout.readline()))
    assert [pid for pid in members if procfs.alive(pid)] == members
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + 60
    while (left := [pid for pid in members if procfs.alive(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    assert left == []


def test_a_box_without_the_compile_filter(choice: box.Choice) -> None:
    """No address space limit, and an artifact folder to read."""
    artifact = Path(__file__).parent
    judge = {
        "narrow": False, "binds": (artifact,),
        "limits": replace(box.Limits(), address_space=None),
    }  # fmt: skip
    found = box.choose(spec("look", **judge), box.Settings())
    assert isinstance(found, box.Choice), found
    with started("look", found, **judge) as boxed:
        frame = ask(
            boxed, {"write": [str(artifact)], "read": ["/dev/zero", str(artifact / "conftest.py")]}
        )
    assert isinstance(frame, box.Frame)
    assert boxed.isolation.filters == 1
    assert frame.body["read"] == {"/dev/zero": 0, str(artifact / "conftest.py"): 0}
    assert all(frame.body["write"].values())
    # what a CUDA driver needs, and what it must not have
    assert {name: frame.body[name] for name in ("memfd", "unix", "fork")} == {
        "memfd": 0,
        "unix": 0,
        "fork": 0,
    }
    assert frame.body["inet"] == 97
