"""Who does what on many workers: each result once, faults told apart, nothing left behind. On threads, with real
stations and parcels."""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from agent import fakes
from sandbox import artifact_store
from sandbox.jobs import CompileJob, JudgeJob
from sandbox.verdict import Status, Tier, Verdict
from sandbox.workers import farm, keys
from sandbox.workers.clients import PoolJudge
from sandbox.workers.transport import Lost
from tests.sandbox.workers.shop import (
    QUICK,
    Shop,
    ToldJudge,
    artifact,
    facts,
    gpus,
    infra,
    job,
    until,
)


def compile_job(source: str = fakes.SEED) -> CompileJob:
    return CompileJob(source, "fake", {"preset": "tiny"}, {"n": 1024}, fakes.BUFFERS)


def test_equal_jobs_are_done_once_also_after_a_restart_of_the_driver(tmp_path: Path) -> None:
    shop = Shop(tmp_path, gpus(2))
    shop.script = lambda judge, at: time.sleep(0.1)  # type: ignore[func-returns-value]
    path = artifact(tmp_path / "made")
    crew = shop.open()
    with ThreadPoolExecutor(6) as threads:
        verdicts = list(threads.map(lambda _: crew.judge("h200").judge(job(path)), range(6)))
        outcomes = list(threads.map(lambda _: crew.compiler().compile(compile_job()), range(6)))
    assert {v.status for v in verdicts} == {Status.PASSED}
    assert len(shop.judged()) == 1
    assert sorted(v.seconds["held"] for v in verdicts) == [0.0] * 5 + [
        0.25
    ]  # one look, paid for once
    assert len({o.sha256 for o in outcomes}) == 1 and sum(c.seen != {} for c in shop.compilers) == 1
    crew.close()
    again = Shop(tmp_path, gpus(2))
    crew = again.open()
    assert crew.judge("h200").judge(job(path)).seconds["held"] == 0.25
    assert crew.compiler().compile(compile_job()).cached
    assert again.judged() == [] and all(c.seen == {} for c in again.compilers)
    crew.close()


def test_what_makes_another_result_is_judged_again(tmp_path: Path) -> None:
    shop = Shop(tmp_path, gpus(1))
    path, base = artifact(tmp_path / "made"), artifact(tmp_path / "made", 9)
    crew = shop.open()
    crew.judge("h200").judge(job(path))
    crew.judge("h200").judge(job(path, tier=Tier.FULL))
    crew.judge("h200").judge(job(path, incumbent=base))
    crew.fresh_judge("h200").judge(job(path))
    assert len(shop.judged()) == 4
    assert shop.judges[0].closes == 1  # the fresh look alone got a new process
    crew.close()
    crew = shop.open(scope="another run")
    crew.judge("h200").judge(job(path))
    assert len(shop.judged()) == 5
    crew.close()


def test_two_kinds_of_device_give_two_verdicts(tmp_path: Path) -> None:
    shop = Shop(tmp_path, gpus(1, 1))
    other = shop.cluster.there[1].id
    shop.kinds[other] = facts("B200", "sm_100a")
    path = artifact(tmp_path / "made")
    with pytest.raises(farm.Unusable, match=r"several kinds.*b200, h200"):
        shop.open()
    shop = Shop(tmp_path, gpus(1, 1))
    shop.kinds[other] = facts("B200", "sm_100a")
    crew = shop.open(kinds=("h200", "b200"))
    assert {k: f["arch"] for k, f in crew.kinds.items()} == {"h200": "sm_90a", "b200": "sm_100a"}
    for kind in ("h200", "b200", "h200", "b200"):
        assert crew.judge(kind).judge(job(path)).status is Status.PASSED
    assert [len(j.seen) for j in shop.judges] == [1, 1]
    crew.close()
    with pytest.raises(farm.Unusable, match="no worker has a gb300"):
        Shop(tmp_path, gpus(1)).open(kinds=("gb300",))


def test_an_artifact_travels_to_a_node_once_and_only_as_what_it_is(tmp_path: Path) -> None:
    shop = Shop(tmp_path, gpus(1))
    paths = [artifact(tmp_path / "made", n) for n in range(3)]
    crew = shop.open()
    judge = crew.judge("h200")
    for path in paths[1:]:
        judge.judge(job(path, incumbent=paths[0]))
    assert len(shop.cluster.put_bytes) == 3
    kept = tmp_path / shop.cluster.there[0].id / "artifacts" / paths[1].name
    ptx = next(p for p in kept.iterdir() if p.name != artifact_store.MANIFEST)
    ptx.write_text(ptx.read_text().replace("51.0", "10.0"))  # a disk that rots
    assert judge.judge(job(paths[1], incumbent=paths[2])).status is Status.PASSED
    assert artifact_store.load(kept).sha256 == paths[1].name
    crew.pool._tokens[paths[2].name] = crew.pool._tokens[
        paths[0].name
    ]  # a store that mixes things up
    shutil.rmtree(kept.parent / paths[2].name)
    refused = judge.judge(job(paths[2]))
    assert refused.status is Status.INFRA and refused.failure is not None
    assert paths[2].name[:12] in refused.failure.message
    crew.close()


def test_no_more_jobs_run_than_there_are_gpus_and_the_rest_waits(tmp_path: Path) -> None:
    shop = Shop(tmp_path, gpus(2, 1))
    all_busy = threading.Barrier(3)  # nobody goes on before three are at work

    def script(judge: ToldJudge, at: JudgeJob) -> None:
        all_busy.wait(60)

    shop.script = script
    crew = shop.open()
    paths = [artifact(tmp_path / "made", n) for n in range(12)]
    with ThreadPoolExecutor(12) as threads:
        verdicts = list(threads.map(lambda p: crew.judge("h200").judge(job(p)), paths))
    assert [v.artifact for v in verdicts] == [p.name for p in paths]
    assert shop.gauge.most == 3 and sorted(len(j.seen) for j in shop.judges) == [4, 4, 4]
    crew.close()


def test_closing_cancels_what_runs_and_leaves_nothing(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    shop = Shop(tmp_path, gpus(1))

    def script(judge: ToldJudge, at: JudgeJob) -> Verdict | None:
        judge.cancelled.wait(100)
        return None

    shop.script = script
    crew = shop.open()
    paths = [artifact(tmp_path / "made", n) for n in range(3)]
    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(crew.judge("h200").judge, job(p)) for p in paths]
        until(lambda: shop.gauge.now == 1)
        began = time.monotonic()
        crew.close()
        statuses = [f.result(60).status for f in futures]
    assert statuses.count(Status.CANCELLED) >= 2 and Status.INFRA not in statuses
    assert time.monotonic() - began < 60
    assert shop.cluster.closed and all(w.dead for w in shop.cluster.hired)
    until(lambda: not any(t.name == "workers" for t in set(threading.enumerate()) - before))
    assert shop.judges[0].closes == 1
    late = artifact(tmp_path / "made", 9)
    assert crew.judge("h200").judge(job(late)).status is Status.CANCELLED
    crew.close()


def test_one_job_can_be_cancelled(tmp_path: Path) -> None:
    shop = Shop(tmp_path, gpus(1))

    def script(judge: ToldJudge, at: JudgeJob) -> Verdict | None:
        if judge.cancelled.wait(100):
            judge.cancelled.clear()
            return replace(infra(at, "cancelled"), status=Status.CANCELLED)
        return None

    shop.script = script
    crew = shop.open()
    judge = crew.judge("h200")
    path = artifact(tmp_path / "made")
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(judge.judge, job(path))
        until(lambda: shop.gauge.now == 1)
        judge.cancel()
        assert future.result(60).status is Status.CANCELLED
    shop.script = lambda judge, at: None
    assert judge.judge(job(path)).status is Status.PASSED  # a cancelled look is not kept
    crew.close()


def test_a_verdict_of_another_artifact_is_no_verdict(tmp_path: Path) -> None:
    shop = Shop(tmp_path, gpus(2))
    other = artifact(tmp_path / "made", 5)
    shop.script = lambda judge, at: fakes.FakeJudge().judge(replace(at, artifact=other))
    crew = shop.open()
    verdict = crew.judge("h200").judge(job(artifact(tmp_path / "made")))
    assert verdict.status is Status.INFRA and verdict.failure is not None
    assert verdict.failure.rule == "garbled"
    crew.close()


def test_workers_of_another_version_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = dict(keys.versions())
    assert keys.differing(ours) == ""
    shop = Shop(tmp_path, gpus(1))
    monkeypatch.setattr(keys, "versions", lambda: {**ours, "torch": "1.0"})
    assert "torch" in keys.differing(ours)
    theirs = {**ours, "torch": "1.0"}
    monkeypatch.setattr(
        "sandbox.workers.roster.keys.differing", lambda said: "torch 1.0" if said == theirs else ""
    )
    asked = farm.Orders("cuda", tmp_path / "driver", "run")
    with pytest.raises(farm.Unusable, match=r"other versions: torch 1\.0"):
        farm.hire(farm.Farm("10.0.0.1:6379"), asked, shop.cluster)


def test_nobody_to_judge_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(farm.Unusable, match="0 of 0 judge workers"):
        Shop(tmp_path, gpus(0)).open()
    shop = Shop(tmp_path, gpus(1), replace(QUICK, patience=0.3))
    crew = shop.open()
    shop.cluster.lose(shop.cluster.there[0].id)
    verdict = crew.judge("h200").judge(job(artifact(tmp_path / "made")))
    assert verdict.status is Status.INFRA and verdict.failure is not None
    assert "judge workers are ready" in verdict.failure.message
    crew.close()


def test_a_full_store_is_no_workers_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(tmp_path, gpus(1))
    crew = shop.open()

    def full(data: bytes) -> bytes:
        raise Lost("the store is full")

    with monkeypatch.context() as patch:
        patch.setattr(shop.cluster, "put", full)
        verdict = crew.judge("h200").judge(job(artifact(tmp_path / "made")))
    assert verdict.status is Status.INFRA and verdict.failure is not None
    assert "the store is full" in verdict.failure.message and len(shop.judges) == 1
    assert crew.judge("h200").judge(job(artifact(tmp_path / "made"))).status is Status.PASSED
    crew.close()


def test_a_broken_artifact_folder_is_no_exception(tmp_path: Path) -> None:
    shop = Shop(tmp_path, gpus(1))
    crew = shop.open()
    judge = crew.judge("h200")
    assert isinstance(judge, PoolJudge)
    (tmp_path / "empty").mkdir()
    assert judge.judge(job(tmp_path / "empty")).status is Status.INFRA
    crew.close()
