"""Workers and nodes that die, fall silent, or fail: whose fault it is, and who does the job then."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sandbox.jobs import JudgeJob
from sandbox.verdict import Status, Verdict
from sandbox.workers import pool
from sandbox.workers.roster import NoWorker
from tests.sandbox.workers.shop import (
    QUICK,
    Shop,
    ToldJudge,
    artifact,
    fault,
    gpus,
    infra,
    job,
    until,
)


def test_a_worker_that_dies_costs_its_candidate_nothing(tmp_path: Path) -> None:
    shop = Shop(tmp_path, gpus(2))
    died = threading.Event()

    def script(judge: ToldJudge, at: JudgeJob) -> None:
        if not died.is_set():
            died.set()
            shop.worker(judge).kill()

    shop.script = script
    crew = shop.open()
    verdict = crew.judge("h200").judge(job(artifact(tmp_path / "made")))
    assert verdict.status is Status.PASSED and len(shop.judged()) == 2
    until(
        lambda: (
            sum(m.state == "ready" and m.post.role == "judge" for m in crew.pool.roster.members)
            == 2
        )
    )
    assert len(shop.judges) == 3  # the post was filled again
    crew.close()


def test_a_lost_node_is_replaced_by_one_that_joins(tmp_path: Path) -> None:
    shop = Shop(tmp_path, gpus(1))
    entered, gone = threading.Event(), threading.Event()

    def script(judge: ToldJudge, at: JudgeJob) -> None:
        entered.set()
        if judge.post.node.startswith("node0"):
            gone.wait(60)

    shop.script = script
    crew = shop.open()
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(crew.judge("h200").judge, job(artifact(tmp_path / "made")))
        assert entered.wait(60)
        joined = replace(gpus(1)[0], id="node9-00000000")
        shop.cluster.there.append(joined)
        shop.cluster.lose(shop.cluster.there[0].id)
        gone.set()
        assert future.result(60).status is Status.PASSED
    assert [j.post.node[:5] for j in shop.judges if j.seen] == ["node0", "node9"]
    assert "left the cluster" in crew.describe() or "killed" in crew.describe()
    crew.close()


def test_faults_of_candidates_leave_no_worker_out(tmp_path: Path) -> None:
    shop = Shop(tmp_path, gpus(2))
    shop.script = lambda judge, at: fault(at)
    crew = shop.open()
    for n in range(8):
        assert crew.judge("h200").judge(job(artifact(tmp_path / "made", n))).status is Status.FAULT
    assert all(m.state == "ready" for m in crew.pool.roster.members)
    assert (
        len(shop.judged()) < 8 + 8 / pool.SUSPECT + 1
    )  # a second opinion now and then, not each time
    crew.close()


def test_a_gpu_on_which_everything_faults_is_found_out_by_another(tmp_path: Path) -> None:
    shop = Shop(tmp_path, gpus(1, 1))
    shop.script = lambda judge, at: fault(at) if judge.post.node.startswith("node0") else None
    crew = shop.open()
    statuses = []
    for n in range(10):
        statuses.append(crew.judge("h200").judge(job(artifact(tmp_path / "made", n))).status)
    bad = [m for m in crew.pool.roster.members if m.state == "bad"]
    assert [m.post.node[:5] for m in bad] == ["node0"] and "alone" in bad[0].why
    assert statuses.count(Status.FAULT) == pool.SUSPECT - 1 and statuses[-1] is Status.PASSED
    crew.close()


@pytest.mark.parametrize(
    ("rule", "jobs"), [("quarantined", 1), ("no-gpu", 1), ("judge-server", 3)], ids=str
)
def test_a_machine_that_fails_is_left_out_and_its_jobs_are_judged_elsewhere(
    tmp_path: Path, rule: str, jobs: int
) -> None:
    shop = Shop(tmp_path, gpus(1, 1))
    shop.script = lambda judge, at: infra(at, rule) if judge.post.node.startswith("node0") else None
    crew = shop.open()
    for n in range(4):
        assert crew.judge("h200").judge(job(artifact(tmp_path / "made", n))).status is Status.PASSED
    first, second = shop.judges
    assert len(first.seen) == jobs and len(second.seen) == 4
    member = next(m for m in crew.pool.roster.members if m.state == "bad")
    assert rule in member.why or f"told to end as {rule}" in member.why
    assert member.worker.dead is False  # type: ignore[attr-defined] # it keeps the GPU, without work
    crew.close()


def test_a_job_that_fails_everywhere_is_no_workers_fault(tmp_path: Path) -> None:
    shop = Shop(tmp_path, gpus(3))
    doomed = {artifact(tmp_path / "made", n).name for n in range(6)}
    shop.script = lambda judge, at: infra(at, "judge-error") if at.artifact.name in doomed else None
    crew = shop.open()
    for n in range(6):
        verdict = crew.judge("h200").judge(job(artifact(tmp_path / "made", n)))
        assert verdict.status is Status.INFRA and verdict.failure is not None
        assert verdict.failure.rule == "judge-error"
    assert len(shop.judged()) == 6 * pool.ATTEMPTS
    assert crew.judge("h200").judge(job(artifact(tmp_path / "made", 77))).status is Status.PASSED
    assert all(m.state == "ready" for m in crew.pool.roster.members)
    crew.close()


def test_a_job_that_takes_workers_down_is_given_up_and_not_scored(tmp_path: Path) -> None:
    shop = Shop(tmp_path, gpus(2))
    poison = artifact(tmp_path / "made", 13)

    def script(judge: ToldJudge, at: JudgeJob) -> None:
        if at.artifact.name == poison.name:
            shop.worker(judge).kill()

    shop.script = script
    crew = shop.open()
    for _ in range(3):
        verdict = crew.judge("h200").judge(job(poison))
        assert verdict.status is Status.INFRA and verdict.failure is not None
        assert verdict.failure.rule == "worker-lost"
    assert shop.judged().count(poison.name) == pool.DEADLY
    assert crew.judge("h200").judge(job(artifact(tmp_path / "made"))).status is Status.PASSED
    crew.close()


def test_a_worker_that_is_not_heard_is_lost(tmp_path: Path) -> None:
    shop = Shop(tmp_path, gpus(2), replace(QUICK, silent=1.0))
    over = threading.Event()

    def script(judge: ToldJudge, at: JudgeJob) -> Verdict | None:
        if len(shop.judged()) == 1:
            shop.worker(judge).silent = True
            over.wait(100)  # its node hangs: no answer, no heartbeat
        return None

    shop.script = script
    crew = shop.open()
    began = time.monotonic()
    assert crew.judge("h200").judge(job(artifact(tmp_path / "made"))).status is Status.PASSED
    assert time.monotonic() - began < 60 and "not heard for" in crew.describe()
    over.set()
    crew.close()


def test_time_in_which_nobody_listened_is_no_silence(tmp_path: Path) -> None:
    """The driver's process was stopped for longer than a worker may be silent, and goes on before they can answer."""
    shop = Shop(tmp_path, gpus(2), replace(QUICK, beat=600.0, silent=50.0))
    crew = shop.open()
    crew.pool._stop.set()  # here nobody else ticks
    crew.pool._watch.join()
    roster = crew.pool.roster
    members = [m for m in roster.members if m.state == "ready"]
    assert len(members) > 2
    for m in members:
        m.beat = Future()
        m.heard -= 60
    roster._listened -= 1260
    roster.tick()
    assert {m.state for m in members} == {"ready"}
    for m in members:
        m.heard -= 1400
    roster.tick()
    assert {m.state for m in members} == {"gone"}
    crew.close()


class Rounds(threading.Condition):
    """A wait is a round of the roster."""

    def __init__(self, roster: Any) -> None:
        super().__init__()
        self.roster = roster

    def wait(self, timeout: float | None = None) -> bool:
        self.roster.rounds += 1
        return True


def test_a_post_lost_just_now_is_waited_for_until_it_is_filled_again() -> None:
    """Between the loss and the next hire of a round nobody starts; after two rounds without anybody there is none."""
    post = SimpleNamespace(role="judge")
    gone = SimpleNamespace(post=post, state="gone", kind="")
    changed = threading.Condition()
    roster = SimpleNamespace(
        changed=changed, closed=False, members=[gone], rounds=0, describe=lambda role: "none"
    )

    def later() -> None:
        with changed:
            roster.rounds += 1
            roster.members.append(SimpleNamespace(post=post, state="ready", kind="cpu"))
            changed.notify_all()

    threading.Timer(0.2, later).start()
    hired = cast(Any, SimpleNamespace(roster=roster))
    pool.Pool.settle(hired, "judge", None)
    roster.members, roster.rounds = [gone], 0
    roster.changed = Rounds(roster)
    with pytest.raises(NoWorker, match="none"):
        pool.Pool.settle(hired, "judge", None)
    assert roster.rounds == 2
