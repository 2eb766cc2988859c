"""Policy around a device: first canary, second chances, recovery and quarantine, over children that really fork."""

import os
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from sandbox import judge_wire
from sandbox.box import landlock
from sandbox.devices.base import Device, Faulted
from sandbox.jobs import JudgeJob
from sandbox.judge import lease, rounds
from sandbox.judge.child import Watch
from sandbox.judge.keeper import Keeper, Settings
from sandbox.judge.rounds import Place, Runner
from sandbox.verdict import Failure, Status, Trust, Verdict
from tests.sandbox.judge import server_runners as runners

TIER = "landlock" if landlock.abi() else "seccomp"


@dataclass
class Asked:
    """Stands for the driver's memory of dead processes: notes who was asked about."""

    answer: bool = True
    pids: list[int] = field(default_factory=list)

    def __call__(self, pid: int, gpu: str) -> bool:
        self.pids.append(pid)
        return self.answer


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cubins: Path) -> Path:
    monkeypatch.setenv("KERNELGEN_CACHE", str(cubins))
    return tmp_path


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cubins")


def keeper(state: Path, runner: Runner, asked: Asked | None = None) -> Keeper:
    settings = Settings(state, visible="3,GPU-abc", lock_s=0.2, opener=runners.open_fake)
    return Keeper(settings, runner, forgotten=asked or Asked())


def job(
    state: Path, device: str = "cuda", deadline_s: float = 60.0, jail: str = "strict"
) -> JudgeJob:
    return JudgeJob(
        artifact=state / "artifact", target="t", options={"preset": "tiny"}, device=device, deadline_s=deadline_s,
        compile_isolation={"tier": jail},
    )  # fmt: skip


def opened(state: Path) -> list[str]:
    """The CUDA_VISIBLE_DEVICES of each child that opened a device."""
    return [line.split()[1] for line in (state / "opened").read_text().splitlines()]


def test_the_first_job_proves_the_gpu_and_later_jobs_do_not(state: Path) -> None:
    k = keeper(state, runners.ok)
    first = k.judge(job(state))
    assert (first.status, first.profile["note"]) == (Status.PASSED, "ok")
    assert k.judge(job(state)).status is Status.PASSED
    assert opened(state) == ["3", "3", "3"]  # canary, two jobs
    assert k.judge(job(state, "cuda:1")).status is Status.PASSED
    assert opened(state)[3:] == ["GPU-abc", "GPU-abc"]


def test_isolation_trust_and_times_are_told_honestly(state: Path) -> None:
    k = keeper(state, runners.ok)
    verdict = k.judge(job(state))
    assert verdict.isolation["tier"] == "strict"
    assert verdict.isolation["judge"]["tier"] == TIER
    assert verdict.isolation["judge"]["pageable_memory_access"] == 1
    assert verdict.trust is Trust.JUDGED
    assert k.judge(job(state, jail="none")).trust is Trust.UNJAILED
    assert {"open_device", "child", "server", "lock", "held"} <= verdict.seconds.keys()


@pytest.mark.parametrize(
    ("runner", "status", "rule"),
    [
        (runners.faults, Status.FAULT, "cuda-fault"),
        (runners.dies_in_launch, Status.FAULT, "crash"),
        (runners.torch_reports, Status.FAULT, "cuda-fault"),
        (runners.dies_outside, Status.INFRA, "crash"),
        (runners.raises, Status.INFRA, "judge-error"),
        (runners.ends_silently, Status.INFRA, "judge-error"),
    ],
)
def test_what_breaks_gets_its_status_and_the_next_job_is_judged(
    state: Path, runner: Runner, status: Status, rule: str
) -> None:
    asked = Asked()
    k = keeper(state, runner, asked)
    verdict = k.judge(job(state))
    assert verdict.failure is not None
    assert (verdict.status, verdict.failure.rule) == (status, rule)
    assert verdict.isolation["judge"]["tier"] == TIER
    # canary; run, canary; and for what may be the machine's fault a second run and its canary
    assert len(opened(state)) == (5 if status is Status.FAULT else 3)
    assert len(asked.pids) == (2 if status is Status.FAULT else 1)
    k.runner = runners.ok
    assert k.judge(job(state)).status is Status.PASSED


@pytest.mark.parametrize(
    ("runner", "status"),
    [(runners.hangs_in_launch, Status.HANG), (runners.hangs_outside, Status.INFRA)],
)
def test_the_deadline_tells_a_hang_from_a_slow_oracle(
    state: Path, runner: Runner, status: Status
) -> None:
    k = keeper(state, runner)
    phase = "check" if status is Status.HANG else "oracle"
    for deadline_s in (2.0, 10.0, 50.0):  # longer where a busy machine had not come so far
        verdict = k.judge(job(state, deadline_s=deadline_s))
        assert verdict.failure is not None
        if verdict.failure.where["phase"] == phase:
            break
    assert (verdict.status, verdict.failure.rule) == (status, "deadline")
    assert verdict.failure.where["phase"] == phase
    k.runner = runners.ok
    assert k.judge(job(state)).status is Status.PASSED


def test_a_fault_in_one_of_two_runs_is_flaky(state: Path) -> None:
    verdict = keeper(state, runners.faults_once).judge(job(state))
    assert verdict.failure is not None
    assert (verdict.status, verdict.failure.rule) == (Status.FLAKY, "sometimes-fault")
    assert verdict.failure.where["second"] == "passed"


def test_a_gpu_that_does_not_recover_is_quarantined_for_good(state: Path) -> None:
    k = keeper(state, runners.ok)
    assert k.judge(job(state)).status is Status.PASSED
    (state / "broken").touch()
    k.runner = runners.faults
    verdict = k.judge(job(state))
    assert verdict.failure is not None
    assert (verdict.status, verdict.failure.rule) == (Status.INFRA, "quarantined")
    assert "canary failed twice" in verdict.failure.message
    assert "the kernel read memory outside" in verdict.failure.message
    (state / "broken").unlink()
    k.runner = runners.ok
    before = len(opened(state))
    assert k.judge(job(state)).status is Status.INFRA
    assert len(opened(state)) == before
    assert k.judge(job(state, "cuda:1")).status is Status.PASSED  # another GPU is not affected


def test_a_gpu_that_is_lost_is_quarantined_and_others_go_on(state: Path) -> None:
    k = keeper(state, runners.ok)
    assert k.judge(job(state)).status is Status.PASSED
    (state / "lost").touch()
    k.runner = runners.faults
    verdict = k.judge(job(state))
    assert verdict.failure is not None
    assert (verdict.status, verdict.failure.rule) == (Status.INFRA, "quarantined")
    assert (
        "it worked and is lost" in verdict.failure.message
        and "fell off the bus" in verdict.failure.message
    )
    (state / "lost").unlink()
    k.runner = runners.ok
    before = len(opened(state))
    assert k.judge(job(state)).failure == Failure("quarantined", k.quarantined["3"])
    assert len(opened(state)) == before
    assert k.judge(job(state, "cuda:1")).status is Status.PASSED


def test_one_failed_canary_gets_a_second_chance(state: Path) -> None:
    (state / "broken-times").write_text("1")
    k = keeper(state, runners.ok)
    assert k.judge(job(state)).status is Status.PASSED
    assert len(opened(state)) == 3


def test_a_process_that_stays_on_the_gpu_is_a_reason_for_quarantine(state: Path) -> None:
    k = keeper(state, runners.faults, Asked(answer=False))
    verdict = k.judge(job(state))
    assert verdict.failure is not None
    assert "still holds GPU 3" in verdict.failure.message


def test_no_gpu_is_infra_at_once_and_no_quarantine(state: Path) -> None:
    k = Keeper(Settings(state, opener=runners.open_none), runners.ok, forgotten=Asked())
    verdict = k.judge(job(state))
    assert verdict.failure is not None
    assert (verdict.status, verdict.failure.rule) == (Status.INFRA, "no-gpu")
    assert k.quarantined == {}


def test_a_cancelled_kernel_makes_the_next_job_begin_with_a_canary(state: Path) -> None:
    running = state / "running"

    def runner(job: JudgeJob, device: Device, progress: runners.Progress) -> Verdict:
        runners._launch(device, lambda: (running.touch(), time.sleep(600)))
        return runners.passed(job)

    def cancel() -> None:
        end = time.monotonic() + 120
        while not running.exists() and time.monotonic() < end:
            time.sleep(0.05)
        os.write(write_end, b"x")

    k = keeper(state, runner)
    read_end, write_end = os.pipe()
    k.watch = Watch(read_end, lambda: True)
    threading.Thread(target=cancel, daemon=True).start()
    assert k.judge(job(state, deadline_s=600.0)).status is Status.CANCELLED
    k.watch, k.runner = None, runners.ok
    assert k.judge(job(state)).status is Status.PASSED
    assert len(opened(state)) == 4  # canary, cancelled job, canary, job
    os.close(read_end)
    os.close(write_end)


def test_cpu_jobs_need_no_lock_and_no_canary(state: Path) -> None:
    k = keeper(state, runners.environment)
    assert k.judge(job(state, "cpu")).status is Status.PASSED
    assert len(opened(state)) == 1
    assert not (state / "locks").exists()


def test_a_held_gpu_is_waited_for_then_named(state: Path) -> None:
    k = keeper(state, runners.ok)
    with lease.hold(state, "3", 1):
        verdict = k.judge(job(state))
    assert verdict.failure is not None
    assert verdict.status is Status.INFRA
    assert "held by process" in verdict.failure.message
    assert k.judge(job(state)).status is Status.PASSED


def test_the_lock_is_handed_over(state: Path) -> None:
    order: list[str] = []
    found_held = threading.Event()

    def unwanted() -> bool:  # asked each time that somebody else holds it
        found_held.set()
        return False

    def second() -> None:
        with lease.hold(state, "0", 120, unwanted) as waited:
            order.append("second" if waited >= lease.POLL_S else "too early")

    thread = threading.Thread(target=second)
    with lease.hold(state, "0", 1):
        thread.start()
        assert found_held.wait(60)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


@pytest.mark.parametrize("device", ["cuda:2", "cuda:x", "tpu", ""])
def test_unknown_devices_are_infra_with_a_sentence(state: Path, device: str) -> None:
    verdict = keeper(state, runners.ok).judge(job(state, device))
    assert verdict.failure is not None
    assert (verdict.status, verdict.failure.rule) == (Status.INFRA, "device")


def test_gpu_tokens_follow_what_is_visible() -> None:
    assert lease.token("cuda", None) == "0"
    assert lease.token("cuda:5", "") == "5"
    assert lease.token("cuda:1", "GPU-a, GPU-b") == "GPU-b"


def fake_smi(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_waits_until_the_driver_forgets_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pids").write_text("4711\n77\n")
    body = f'case "$*" in *compute-apps*) cat {tmp_path}/pids;; *) echo 500;; esac'
    fake_smi(tmp_path, body, monkeypatch)
    assert not lease.forgotten(4711, "0", 0.5)
    begin = time.monotonic()
    threading.Timer(0.3, (tmp_path / "pids").write_text, ["77\n"]).start()
    assert lease.forgotten(4711, "0", 60)
    assert 0.3 <= time.monotonic() - begin < 60


def test_waits_until_memory_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "n").write_text("9000")
    body = f"""case "$*" in *compute-apps*) ;; *)
n=$(cat {tmp_path}/n); echo $n; [ $n -gt 1000 ] && echo $((n - 2000)) > {tmp_path}/n ;; esac; exit 0"""
    fake_smi(tmp_path, body, monkeypatch)
    assert lease.forgotten(1, "0", 30)
    assert int((tmp_path / "n").read_text()) <= 1000


@pytest.mark.parametrize("body", ["exit 9", "exec sleep 100"])
def test_a_driver_that_does_not_answer_costs_a_fixed_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    fake_smi(tmp_path, body, monkeypatch)
    monkeypatch.setattr(lease, "ASK_S", 0.3)
    monkeypatch.setattr(lease, "SETTLE_S", 0.1)
    begin = time.monotonic()
    assert lease.forgotten(4711, "0", 60)
    assert time.monotonic() - begin < 50


def test_numbers_that_json_lacks_do_not_lose_a_verdict(state: Path) -> None:
    verdict = keeper(state, runners.infinite).judge(job(state))
    assert verdict.status is Status.PASSED
    assert verdict.profile["worst"] > 1e300


def test_probe_tells_facts_and_canary(state: Path) -> None:
    k = keeper(state, runners.ok)
    found = k.probe("cuda")
    assert (found["ok"], found["facts"]["name"], found["isolation"]["tier"]) == (
        True,
        "NVIDIA H200",
        TIER,
    )
    (state / "broken").touch()
    assert "elements are wrong" in k.probe("cuda")["message"]


def test_a_real_cuda_device_without_a_driver_says_no_gpu(tmp_path: Path) -> None:
    place = Place("cuda", None, tmp_path, 0, rounds.open_device)
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(Faulted) as fault:
        rounds.open_device(place)
    assert (fault.value.status, fault.value.failure.rule) == (Status.INFRA, "no-gpu")


def test_jobs_and_verdicts_survive_the_wire(state: Path) -> None:
    sent = job(state)
    assert judge_wire.job_from_json(judge_wire.job_to_json(sent)) == sent
    for key, value in (
        ("tier", "best"),
        ("deadline_s", "x"),
        ("baselines", 3),
        ("seed", -1),
        ("device", 5),
    ):
        with pytest.raises(judge_wire.Malformed):
            judge_wire.job_from_json({**judge_wire.job_to_json(sent), key: value})
    with pytest.raises(judge_wire.Malformed):
        judge_wire.verdict_from_json({"schema": 1, "status": "passed"})


def test_a_baseline_that_broke_the_gpu_is_left_out_of_a_second_run(state: Path) -> None:
    def runner(job: JudgeJob, device: Device, progress: runners.Progress) -> Verdict:
        if "-mix" not in job.baselines:
            failure = Failure("baseline-fault", "baseline mix broke the GPU", {"baseline": "mix"})
            return judge_wire.without_judging(job, Status.INFRA, failure)
        return runners.passed(job)

    asked = Asked()
    k = keeper(state, runner, asked)
    verdict = k.judge(job(state))
    assert verdict.status is Status.PASSED
    assert [f.rule for f in verdict.findings] == ["baseline-fault"]
    assert any("mix broke the GPU" in line for line in verdict.not_verified)
    assert asked.pids, "the GPU was looked after in between"


def test_a_job_that_memory_did_not_do_for_runs_once_more_without_baselines(state: Path) -> None:
    def runner(job: JudgeJob, device: Device, progress: runners.Progress) -> Verdict:
        if job.baselines:
            failure = Failure("memory", "out of memory: tried to allocate 9 GiB")
            return judge_wire.without_judging(job, Status.INFRA, failure)
        return runners.passed(job)

    verdict = keeper(state, runner, Asked()).judge(job(state))
    assert verdict.status is Status.PASSED
    assert [f.rule for f in verdict.findings] == ["memory"]
    assert any("out of memory" in line for line in verdict.not_verified)
    alone = replace(job(state), baselines=())
    first = Failure("memory", "out of memory")
    refused = keeper(
        state, lambda j, *_: judge_wire.without_judging(j, Status.INFRA, first), Asked()
    )
    assert refused.judge(alone).status is Status.INFRA
