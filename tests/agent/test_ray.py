"""Workers on a real Ray cluster of several processes on this machine, with the real jail, judge and `cpu` device.

One head without processors; each test adds the nodes that it needs, with a store of their own, and takes them away.
"""

from __future__ import annotations

import json
import os
import random
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
from sandbox.workers.roster import Member
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
        quick = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}
        head = {
            "num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE, "_system_config": quick,
        }  # fmt: skip
        self.cluster = Cluster(initialize_head=True, head_node_args=head)

    def add(self, name: str, cpus: int) -> Any:
        env = {"KERNELGEN_STATE": str(self.folder / name / "judge"), "OMP_NUM_THREADS": "1"}
        return self.cluster.add_node(num_cpus=cpus, object_store_memory=STORE, env_vars=env)

    def lose(self, node: Any) -> None:
        self.cluster.remove_node(node, allow_graceful=False)

    @property
    def farm(self) -> farm.Farm:
        return farm.Farm(self.cluster.address)


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


def alive(pids: set[int]) -> set[int]:
    out = set()
    for pid in pids:
        try:
            if (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                out.add(pid)
        except OSError:
            continue
    return out


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of the run on this process's own children."""
    folder = tmp_path_factory.mktemp("local")
    finished(folder, *RUN)
    return record(folder)


def test_the_record_is_the_same_on_1_2_and_8_workers(
    tmp_path: Path, hosts: Hosts, local: dict[str, Any]
) -> None:
    node = hosts.add("wide", 9)
    assert len(local["candidates"]) == 5 and len({c["artifact"] for c in local["candidates"]}) >= 3
    try:
        for count in (1, 2, 8):
            address = f"ray://{hosts.cluster.address}?judges={count}&compilers=1"
            finished(tmp_path / str(count), *RUN, "--workers", address, "--kind", "cpu")
            assert record(tmp_path / str(count)) == local, count
    finally:
        hosts.lose(node)


def crew_on(hosts: Hosts, folder: Path, kinds: tuple[str, ...] = ("cpu",)) -> farm.Crew:
    return farm.hire(hosts.farm, farm.Orders("cpu", folder / "driver", "run", kinds=kinds))


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


def working(crew: farm.Crew) -> Member:
    """The worker that has the job, once its child runs."""
    flying = crew.pool._flying
    member = until(lambda: next(iter(flying.values()), None))
    before = below(member.pid)
    until(lambda: below(member.pid) - before, 20)
    return member


def test_a_worker_killed_in_the_middle_leaves_no_process_and_its_job_is_done_elsewhere(
    tmp_path: Path, hosts: Hosts
) -> None:
    node = hosts.add("three", 3)
    crew = crew_on(hosts, tmp_path)
    try:
        outcome = compiled(crew)
        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(crew.judge("cpu").judge, judge_job(outcome))
            member = working(crew)
            children = below(member.pid)
            assert children
            os.kill(member.pid, signal.SIGKILL)
            verdict = future.result(120)
        assert verdict.status is Status.PASSED and verdict.artifact == outcome.sha256
        assert member.state == "gone"
        until(lambda: not alive(children), 20)
    finally:
        crew.close()
        hosts.lose(node)


def test_a_node_lost_in_the_middle_is_replaced_by_one_that_joined(
    tmp_path: Path, hosts: Hosts
) -> None:
    first = hosts.add("first", 2)
    crew = crew_on(hosts, tmp_path)
    try:
        outcome = compiled(crew)
        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(crew.judge("cpu").judge, judge_job(outcome))
            member = working(crew)
            second = hosts.add("second", 2)
            hosts.lose(first)
            verdict = future.result(180)
        assert verdict.status is Status.PASSED and member.state == "gone"
        held = {
            n: (hosts.folder / n / "workers" / "artifacts" / outcome.sha256).is_dir()
            for n in ("first", "second")
        }
        assert held == {"first": True, "second": True}
    finally:
        crew.close()
        hosts.lose(second)


def test_a_driver_killed_and_resumed_ends_with_the_record_of_one_left_alone(
    tmp_path: Path, hosts: Hosts, local: dict[str, Any]
) -> None:
    node = hosts.add("again", 3)
    workers = ("--workers", f"ray://{hosts.cluster.address}", "--kind", "cpu")
    try:
        process = kernelgen(tmp_path, *RUN, *workers)
        until(lambda: list((tmp_path / ".kernelgen").glob("results/*/*.json")), 120)
        time.sleep(random.Random(5).uniform(0.5, 3))
        process.kill()
        process.wait()
        before = {
            p.name: p.stat().st_mtime_ns for p in (tmp_path / ".kernelgen").glob("results/*/*.json")
        }
        assert before
        finished(tmp_path, "resume", "last", *workers[:2], "--json")
        assert record(tmp_path) == local
        after = {
            p.name: p.stat().st_mtime_ns for p in (tmp_path / ".kernelgen").glob("results/*/*.json")
        }
        assert before.items() <= after.items()  # nothing that had come was made again
    finally:
        hosts.lose(node)


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
    until(lambda: not alive(children), 20)
    assert not list(Path("/tmp").glob(f"kg-ray-*/session_*_{process.pid}"))
