"""Workers on a real Ray cluster of several processes on this machine, with the real jail, judge and `cpu` device.

One head without processors, and nodes with a store of their own, which come and go.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agent.offline import options_json
from sandbox.jobs import CompileJob, CompileOutcome, JudgeJob
from sandbox.verdict import Status
from sandbox.workers import farm
from targets.base import Options, find
from tests.agent.test_kill import record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TARGET = "kimi-k3-gemv"
STORE = 80 << 20
RUN = ("optimize", "--target", TARGET, "--device", "cpu", "--proposer", "tuner", "--rounds", "1", "--candidates", "4",
       "--confirm", "full", "--json")  # fmt: skip


class Hosts:
    """A Ray cluster whose nodes are processes of this machine."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        self.folder = folder
        quick = {"health_check_period_ms": 1000, "health_check_failure_threshold": 10}
        head = {
            "num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE, "_system_config": quick,
        }  # fmt: skip
        self.cluster = Cluster(initialize_head=True, head_node_args=head)

    def add(self, name: str, cpus: int) -> Any:
        env = {"KERNELGEN_STATE": str(self.folder / name / "judge"), "OMP_NUM_THREADS": "1"}
        return self.cluster.add_node(num_cpus=cpus, object_store_memory=STORE, env_vars=env)

    def lose(self, node: Any) -> None:
        self.cluster.remove_node(node, allow_graceful=False)
        self.cluster.wait_for_nodes(
            120
        )  # until Ray has seen it: who asks meanwhile is told of a node that is gone


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        made = Hosts(tmp_path_factory.mktemp("hosts"))
        yield made
        made.cluster.shutdown()


def kernelgen(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "agent.cli", *arguments, "--db", str(folder / "runs.db")]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=(folder / "stderr").open("w"), text=True, cwd=folder
    )


def finished(folder: Path, *arguments: str) -> dict[str, Any]:
    process = kernelgen(folder, *arguments)
    out, _ = process.communicate(timeout=300)
    assert process.returncode in (0, 1), (folder / "stderr").read_text()[-2000:]
    found: dict[str, Any] = json.loads(out)
    return found


def until(true: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)
    return found


def below(pid: int) -> set[int]:
    """Processes started by that one, and theirs."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == pid:
                found |= {int(entry.name)} | below(int(entry.name))
    return found


def servers() -> list[int]:
    """Judges' servers below this process, which has started all nodes."""
    found = []
    for pid in below(os.getpid()):
        try:
            if b"sandbox.judge.server" in (Path("/proc") / str(pid) / "cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def alive(pids: set[int]) -> set[int]:
    out = set()
    for pid in pids:
        try:
            if (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                out.add(pid)
        except OSError:
            continue
    return out


def crew_on(hosts: Hosts, folder: Path, judges: int = 1) -> farm.Crew:
    wanted = farm.Farm(hosts.cluster.address, judges, 1)
    return farm.hire(wanted, farm.Orders("cpu", folder / "driver", "run", kinds=("cpu",)))


def compiled(crew: farm.Crew, tunables: dict[str, Any] | None = None) -> CompileOutcome:
    target = find(TARGET)
    w = target.workload(Options("tiny"))
    job = CompileJob(
        target.seed_source(), TARGET, w.key, w.dims, w.buffers, tunables=tunables or {}
    )
    outcome = crew.compiler().compile(job)
    assert outcome.artifact is not None, outcome.failure
    return outcome


def judge_job(outcome: CompileOutcome) -> JudgeJob:
    assert outcome.artifact is not None
    options = options_json(find(TARGET).workload(Options("tiny")).options)
    isolation = dict(outcome.isolation)
    return JudgeJob(
        outcome.artifact, TARGET, options, "cpu", deadline_s=600.0, compile_isolation=isolation
    )


class Held:
    """A job that is being judged and cannot go on: its child is stopped. `member` has it, `tree` are its processes."""

    def __init__(self, crew: farm.Crew, job: JudgeJob) -> None:
        judges = [m for m in crew.pool.roster.members if m.post.role == "judge"]
        until(lambda: all(m.state == "ready" for m in judges), 120)
        before = {m.pid: below(m.pid) for m in judges}
        self._threads = ThreadPoolExecutor(1)
        self.verdict = self._threads.submit(crew.judge("cpu").judge, job)
        self.member = until(lambda: next((m for m in judges if below(m.pid) - before[m.pid]), None))
        for pid in below(self.member.pid) - before[self.member.pid]:
            os.kill(pid, signal.SIGSTOP)
        self.tree = {self.member.pid} | below(self.member.pid)
        assert len(self.tree) >= 3 and not self.verdict.done()


def test_a_node_lost_in_the_middle_is_replaced_by_one_that_joined(
    tmp_path: Path, hosts: Hosts
) -> None:
    nodes = {"first": hosts.add("first", 2)}
    crew = crew_on(hosts, tmp_path)
    try:
        outcome = compiled(crew)
        held = Held(crew, judge_job(outcome))
        nodes["second"] = hosts.add("second", 2)
        hosts.lose(nodes.pop("first"))
        verdict = held.verdict.result(180)
        assert verdict.status is Status.PASSED and held.member.state == "gone"
        stores = [hosts.folder / n / "workers" / "artifacts" for n in ("first", "second")]
        assert all((store / outcome.sha256).is_dir() for store in stores)
        until(lambda: not alive(held.tree), 120)
    finally:
        crew.close()
        for node in nodes.values():
            hosts.lose(node)


@pytest.fixture(scope="module")
def wide(hosts: Hosts) -> Hosts:
    """With a node that has room for eight judges."""
    hosts.add("wide", 9)
    return hosts


def test_a_worker_killed_in_the_middle_leaves_no_process_and_its_job_is_done_elsewhere(
    tmp_path: Path, wide: Hosts
) -> None:
    crew = crew_on(wide, tmp_path, judges=2)
    try:
        outcome = compiled(crew)
        held = Held(crew, judge_job(outcome))
        os.kill(held.member.pid, signal.SIGKILL)
        verdict = held.verdict.result(120)
        assert verdict.status is Status.PASSED and verdict.artifact == outcome.sha256
        assert held.member.state == "gone"
        until(lambda: not alive(held.tree), 120)
    finally:
        crew.close()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of the run on this process's own children."""
    folder = tmp_path_factory.mktemp("local")
    finished(folder, *RUN)
    return record(folder)


def workers(hosts: Hosts, judges: int) -> tuple[str, ...]:
    return "--workers", f"ray://{hosts.cluster.address}?judges={judges}&compilers=1"


def test_the_record_is_the_same_on_1_2_and_8_workers(
    tmp_path: Path, wide: Hosts, local: dict[str, Any]
) -> None:
    assert len(local["candidates"]) == 5 and len({c["artifact"] for c in local["candidates"]}) >= 3
    for count in (1, 2, 8):
        folder = tmp_path / str(count)
        finished(folder, *RUN, *workers(wide, count), "--kind", "cpu")
        assert record(folder) == local, count


def test_a_driver_killed_and_resumed_ends_with_the_record_of_one_left_alone(
    tmp_path: Path, wide: Hosts, local: dict[str, Any]
) -> None:
    def results() -> dict[str, int]:
        found = (tmp_path / ".kernelgen").glob("results/*/*.json")
        return {p.name: p.stat().st_mtime_ns for p in found}

    process = kernelgen(tmp_path, *RUN, *workers(wide, 2), "--kind", "cpu")
    until(lambda: bool(results() and servers()), 120)
    process.kill()
    process.wait()
    before = results()
    until(lambda: not servers(), 120)  # the dead driver's workers took their judges along
    finished(tmp_path, "resume", "last", *workers(wide, 2), "--json")
    assert record(tmp_path) == local
    assert before.items() <= results().items()  # nothing that had come was made again


def test_ray_on_this_machine_ends_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNELGEN_STATE", str(tmp_path / "judge"))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    bad = tmp_path / "bad.py"
    bad.write_text(find(TARGET).seed_source() + "\nraise ValueError('no kernel at all')\n")
    folder = tmp_path / "work"
    process = kernelgen(
        folder, "evaluate", "--target", TARGET, "--device", "cpu", "--workers", "ray?judges=2", "--json", "seed",
        str(bad), "seed",
    )  # fmt: skip
    children = until(lambda: len(found := below(process.pid)) > 6 and found, 120)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 1, (folder / "stderr").read_text()[-2000:]
    rows = json.loads(out)["results"]
    assert [r["verdict"]["status"] for r in rows] == ["passed", "compile_error", "passed"]
    assert rows[0]["verdict"]["date"] == rows[2]["verdict"]["date"]  # equal work is done once
    until(lambda: not alive(children), 120)
    assert not list(Path("/tmp").glob(f"kg-ray-*/session_*_{process.pid}"))
