"""What a judging child can no longer do, each beside a control: the same child without confinement does it."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox import assemble, canary
from sandbox.box import gpu, landlock
from sandbox.judge import child
from sandbox.judge.confine import Room, confine
from sandbox.judge.progress import Progress
from sandbox.judge_wire import describe_isolation as describe

needs_landlock = pytest.mark.skipif(landlock.abi() < 3, reason="no Landlock in this kernel")
PARENT = os.getpid()
assemble.version()


def tried(work: Callable[[], object], room: Room | None, keep: str = "") -> str:
    """What `work` gives, or the name of its error, in a forked child that is confined to `room` first."""
    parent = os.getpid()

    def run(progress: Progress) -> Mapping[str, object]:
        if room is not None:
            confine(parent, replace(room, keep=(progress.result_fd,)))
        try:
            return {"said": str(work())}
        except OSError as error:
            return {"said": type(error).__name__}

    ended = child.run(run, 30)
    assert ended.result is not None, ended
    return str(ended.result["said"])


@pytest.fixture
def room(tmp_path: Path) -> Room:
    for name in ("scratch", "state"):
        (tmp_path / name).mkdir()
    return Room(tmp_path / "scratch", tmp_path / "state")


def read_file(path: Path) -> Callable[[], object]:
    return lambda: path.read_text()


def internet() -> object:
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM).getsockname()[1]


def parents_environment() -> object:
    return "KEY" if Path(f"/proc/{os.getppid()}/environ").read_bytes() else ""


def kernel_setting() -> object:
    """Opened for writing, nothing is written."""
    os.close(os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY))
    return "open"


def signal_parent() -> object:
    os.kill(os.getppid(), 0)
    return "allowed"


@needs_landlock
def test_files_of_the_user_are_out_of_reach(room: Room, tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("sk-planted")
    assert tried(read_file(secret), None) == "sk-planted"
    assert tried(read_file(secret), room) == "PermissionError"
    home = Path.home()
    assert tried(lambda: os.listdir(home) is not None and "listed", None) == "listed"
    assert tried(lambda: os.listdir(home) is not None and "listed", room) == "PermissionError"


@needs_landlock
def test_tmp_is_its_own(room: Room) -> None:
    def write_outside() -> object:
        with tempfile.NamedTemporaryFile(dir="/tmp") as file:
            return file.name

    def write_inside() -> object:
        with tempfile.NamedTemporaryFile() as file:
            return Path(file.name).parent

    assert tried(write_outside, None).startswith("/tmp/")
    assert tried(write_outside, room) == "PermissionError"
    assert tried(write_inside, room) == str(room.scratch)


def test_there_is_no_network(room: Room) -> None:
    assert tried(internet, None) == "0"
    assert tried(internet, room) == "OSError"


def test_no_socket_file_is_connected(room: Room, tmp_path: Path) -> None:
    path = str(tmp_path / "state" / "agent.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def connect() -> object:
            with socket.socket(socket.AF_UNIX) as s:
                s.connect(path)
                return "connected"

        assert tried(connect, None) == "connected"
        assert tried(connect, room) == "ConnectionRefusedError"


@needs_landlock
def test_other_processes_are_closed(room: Room) -> None:
    assert tried(parents_environment, None) == "KEY"
    assert tried(parents_environment, room) == "PermissionError"
    if landlock.abi() >= 6:
        assert tried(signal_parent, None) == "allowed"
        assert tried(signal_parent, room) == "PermissionError"


@needs_landlock
@pytest.mark.skipif(os.getuid() != 0, reason="root alone could")
def test_root_cannot_change_the_kernel(room: Room) -> None:
    assert tried(kernel_setting, None) == "open"
    assert tried(kernel_setting, room) == "PermissionError"
    assert tried(lambda: os.setuid(12345) or os.getuid(), room) == "PermissionError"


def test_descriptors_of_the_parent_are_closed(room: Room, tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(fd, True)
    try:
        assert tried(lambda: os.fstat(fd).st_ino, None) == str(tmp_path.stat().st_ino)
        assert tried(lambda: os.fstat(fd).st_ino, room) == "OSError"
    finally:
        os.close(fd)


def test_the_environment_is_small(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-planted")
    assert "sk-planted" in tried(lambda: dict(os.environ), None)
    found = tried(lambda: sorted(os.environ), room)
    assert "ANTHROPIC_API_KEY" not in found and "TMPDIR" in found


def test_what_a_judge_needs_still_works(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """The assembler, another interpreter, threads and their names."""
    monkeypatch.delenv("KERNELGEN_CACHE", raising=False)

    def assembles() -> object:
        return len(assemble.assemble(canary.artifact("sm_90a").step.ptx, "sm_90a").cubin) > 500

    def runs() -> object:
        return subprocess.run(
            [sys.executable, "-c", "print(7)"], capture_output=True, text=True, check=True
        ).stdout.strip()

    def names_a_thread() -> object:
        out: list[str] = []

        def work() -> None:
            comm = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/comm")
            comm.write_text("cuda-thread")
            out.append(comm.read_text().strip())

        t = threading.Thread(target=work)
        t.start()
        t.join()
        return out[0]

    assert tried(assembles, room) == "True"
    assert tried(runs, room) == "7"
    assert tried(names_a_thread, room) == "cuda-thread"


def test_it_takes_milliseconds_and_says_what_it_is(room: Room) -> None:
    """By the clock, at the first go at which nothing else wants the processors."""
    parent = os.getpid()

    def run(progress: Progress) -> Mapping[str, object]:
        begin = time.monotonic()
        isolation = confine(parent, replace(room, keep=(progress.result_fd,)))
        return {"isolation": isolation, "seconds": time.monotonic() - begin}

    for _ in range(50):
        ended = child.run(run, 30)
        assert ended.result is not None
        if ended.result["seconds"] < 0.1:
            break
    found = ended.result["isolation"]
    assert ended.result["seconds"] < 0.1
    assert found["tier"] == ("landlock" if landlock.abi() else "seccomp")
    assert found["filters"] == 1 and found["no_capabilities"] and found["no_new_privs"]
    assert "no network" in describe(found)


def test_without_file_rules_it_says_so(room: Room) -> None:
    parent = os.getpid()
    loose = Room(room.scratch, room.state, "0", level=2)

    def run(progress: Progress) -> Mapping[str, object]:
        return confine(parent, replace(loose, keep=(progress.result_fd,)))

    ended = child.run(run, 30)
    assert ended.result is not None
    assert (ended.result["tier"], ended.result["devices"]) == ("seccomp", "all gpus")
    assert "Landlock left out" in describe(ended.result)


def test_the_last_level_is_bare_and_says_so(room: Room) -> None:
    parent = os.getpid()
    ended = child.run(lambda progress: confine(parent, replace(room, level=3)), 30)
    assert ended.result is not None
    assert ended.result["tier"] == "none" and ended.result["no_new_privs"]
    assert describe(ended.result).startswith("NOT confined (all else left out")


def test_nodes_of_the_chosen_gpu_alone(tmp_path: Path) -> None:
    dev, proc = tmp_path / "dev", tmp_path / "proc"
    dev.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        (dev / name).touch()
    for bus, uuid, minor in (("0000:1b:00.0", "GPU-aa", 3), ("0000:43:00.0", "GPU-bb", 1)):
        (proc / bus).mkdir(parents=True)
        (proc / bus / "information").write_text(
            f"Model: H200\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
        )

    def names(visible: str | None) -> list[str]:
        return [p.name for p in gpu.nodes_of(visible, dev, proc)]

    shared = ["nvidiactl", "nvidia-uvm"]
    assert names("0") == ["nvidia3", *shared]  # bus order, not the minor
    assert names("GPU-bb") == ["nvidia1", *shared]
    assert names("7") == names(None) == ["nvidia0", "nvidia1", "nvidia3", *shared]
