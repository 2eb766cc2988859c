"""Faults and hangs on a GPU: each gets its status and the next job is judged. `pytest -m gpu`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.jobs import JudgeJob
from sandbox.judge_client import ClientOptions, JudgeClient
from sandbox.verdict import Status

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JudgeClient]:
    state = tmp_path_factory.mktemp("state")
    with JudgeClient(
        ClientOptions(state, extra=("--runner", "tests.sandbox.judge.server_runners:by_target"))
    ) as c:
        yield c


def verdict_of(judge: JudgeClient, runner: str) -> tuple[Status, str]:
    job = JudgeJob(Path(judge.options.state, "artifact"), runner, {}, "cuda", deadline_s=60)
    verdict = judge.judge(job)
    return verdict.status, verdict.failure.message if verdict.failure else ""


@pytest.mark.parametrize(
    ("runner", "status", "says"),
    [
        ("gpu_wild_store", Status.FAULT, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("gpu_misaligned", Status.FAULT, "CUDA_ERROR_MISALIGNED_ADDRESS"),
        ("gpu_endless", Status.HANG, "did not end within"),
    ],
)
def test_a_broken_kernel_gets_its_status_and_the_next_is_judged(
    judge: JudgeClient, runner: str, status: Status, says: str
) -> None:
    found, message = verdict_of(judge, runner)
    assert found is status, message
    assert says in message
    assert verdict_of(judge, "gpu_double") == (Status.PASSED, "")


def test_a_hang_without_a_wait_is_ended_by_the_deadline(judge: JudgeClient) -> None:
    job = JudgeJob(
        Path(judge.options.state, "artifact"), "gpu_endless_copy", {}, "cuda", deadline_s=8
    )
    verdict = judge.judge(job)
    assert verdict.failure is not None
    assert (verdict.status, verdict.failure.rule) == (Status.HANG, "deadline")
    assert verdict_of(judge, "gpu_double") == (Status.PASSED, "")


def test_a_warm_judgement_costs_little_beyond_the_gpu(judge: JudgeClient) -> None:
    verdict_of(judge, "gpu_double")
    job = JudgeJob(Path(judge.options.state, "artifact"), "gpu_double", {}, "cuda", deadline_s=60)
    verdict = judge.judge(job)
    assert verdict.status is Status.PASSED
    assert verdict.seconds["server"] < 2.0, verdict.seconds


def test_a_lost_gpu_is_quarantined(tmp_path: Path) -> None:
    """It cannot be opened any more after a fault: an opener of ours says so, as the driver does when a card falls off
    the bus."""
    runners = "tests.sandbox.judge.server_runners"
    extra = ("--runner", f"{runners}:by_target", "--opener", f"{runners}:open_losable")
    with JudgeClient(ClientOptions(tmp_path, extra=extra)) as judge:
        assert verdict_of(judge, "gpu_double") == (Status.PASSED, "")
        status, message = verdict_of(judge, "gpu_lost")
        assert status is Status.INFRA and "is quarantined: it worked and is lost" in message
        (tmp_path / "lost").unlink()
        status, again = verdict_of(judge, "gpu_double")
        assert status is Status.INFRA and again == message.partition(" (after:")[0]
