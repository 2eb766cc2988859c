"""compute-sanitizer for winners: a scripted tool in its place shows what counts as armed, found, refused; on a GPU the
real one sees planted faults."""

import os
import stat
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from sandbox import artifact_store, canary
from sandbox.jobs import JudgeJob
from sandbox.judge import sanitize, sanitizer_report, winner
from sandbox.judge.keeper import Keeper, Settings
from sandbox.judge.rounds import Place, open_device
from sandbox.verdict import Outcome, Status, Tier, Verdict
from tests.sandbox.devices import kernels
from tests.sandbox.judge import server_runners as runners


@pytest.fixture(autouse=True)
def shared_cubins(monkeypatch: pytest.MonkeyPatch, cubins: Path) -> None:
    monkeypatch.setenv("KERNELGEN_CACHE", str(cubins))


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cubins")


RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at kernelgen_control+0x120
=========     and Read access at kernelgen_control+0x180 [64 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
MEMORY = """\
replayed 2 launches in 0.1 s
========= Invalid __global__ write of size 4 bytes
=========     at my.kernel$1+0x90
=========     by thread (0,0,0) in block (3,0,0)
=========     Access to 0x7f2a8 is out of bounds
=========
========= Invalid __global__ write of size 4 bytes
=========     at my.kernel$12+0x90
=========
========= ERROR SUMMARY: 2 errors
"""


def test_records_are_told_apart_by_whole_names() -> None:
    report = sanitizer_report.read(MEMORY, ["my.kernel$1", "kernelgen_control"])
    assert [r.kernel for r in report.records] == ["my.kernel$1"]
    assert report.finished and "out of bounds" in report.records[0].text
    long = f"kernel_cutlass_chain_kernel_{'tensorptrbf16gmemalign128o' * 12}_0"
    both = sanitizer_report.read(RACE.replace("kernelgen_control", long), [long])
    assert [r.kernel for r in both.records] == [long]
    assert (
        "Write access at chain_kernel+0x120; and Read access at chain_kernel+0x180"
        in both.records[0].text
    )
    race = sanitizer_report.read(RACE, ["k", "kernelgen_control"])
    assert [r.kernel for r in race.records] == ["kernelgen_control"]


def test_a_report_without_its_summary_is_not_finished() -> None:
    assert not sanitizer_report.read("========= COMPUTE-SANITIZER\n", ["k"]).finished
    said = "========= Error: No attachable process found. compute-sanitizer timed-out.\n"
    assert "No attachable" in sanitizer_report.read(said, ["k"]).trouble


def scripted(folder: Path, body: str) -> Path:
    """A program that takes the tool's arguments; `tool`, `mode` and `say(kernel)` are at hand."""
    head = """\
        import sys, time
        args = sys.argv[1:]
        tool, mode, folder = args[args.index("--tool") + 1], args[-1], args[-2]
        def say(kernel):
            print("========= Invalid thing of size 4 bytes")
            print(f"=========     at {kernel}+0x90")
        def end():
            print("========= ERROR SUMMARY: 0 errors", flush=True)
        """
    bin_ = folder / "bin"
    bin_.mkdir(exist_ok=True)
    tool = bin_ / "compute-sanitizer"
    tool.write_text(f"#!{sys.executable} -I\n" + dedent(head) + dedent(body))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return tool


GOOD = """
    say("canary" if mode in ("cut", "unset") else "kernelgen_control")
    end()
    """


def make(place: Place, job: JudgeJob, folder: Path) -> None:
    (folder / "artifact").write_text(str(job.artifact))


def won(tmp_path: Path, tool: Path | None, total_s: float = 60.0) -> Verdict:
    """A candidate that passed `promote`, on a GPU that is not there."""
    made = artifact_store.save(canary.artifact("sm_90a"), tmp_path / "artifacts")
    (tmp_path / "state").mkdir(exist_ok=True)
    tools = winner.Tools(lambda: tool, make, total_s)
    settings = Settings(tmp_path / "state", "3", opener=runners.open_fake, tools=tools)
    k = Keeper(settings, runners.ok, forgotten=lambda pid, gpu: True)
    job = JudgeJob(made, "canary", {}, "cuda", Tier.PROMOTE, compile_isolation={"tier": "strict"})
    return k.judge(job)


def test_four_armed_tools_without_a_complaint_are_checked(tmp_path: Path) -> None:
    v = won(tmp_path, scripted(tmp_path, GOOD))
    assert (v.status, v.outcome) == (Status.PASSED, Outcome.NOT_TIMED)
    said = [c for c in v.checked if c.startswith("compute-sanitizer")]
    assert [c.split()[1].rstrip(":") for c in said] == list(sanitize.TOOLS)
    assert not [c for c in v.not_verified if "sanitizer" in c]
    assert v.profile["sanitizer_isolation"]["filters"] == 1


@pytest.mark.parametrize(("tool", "status"), [("memcheck", Status.FAULT), ("synccheck", Status.FAULT),
                                              ("racecheck", Status.PASSED), ("initcheck", Status.PASSED)])  # fmt: skip
def test_a_complaint_about_the_candidate_counts(tmp_path: Path, tool: str, status: Status) -> None:
    v = won(tmp_path, scripted(tmp_path, f'if tool == "{tool}": say("canary")\n{dedent(GOOD)}'))
    assert v.status is status
    assert any(f.rule == tool and "at canary+0x90" in f.message for f in v.findings)
    if status is Status.FAULT:
        assert v.failure is not None and v.failure.rule == tool and v.timing is None
    else:
        assert any(f"{tool}: it complains" in x for x in v.not_verified)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("end()", "unarmed: it did not complain about the control kernel"),
        (
            'say("kernelgen_control"); end()',
            "unarmed: it did not complain about the candidate's kernels",
        ),
        ('print("========= Error: Failed to attach", flush=True); sys.exit(1)', "failed: "),
        ("time.sleep(60)", "failed: stopped after"),
        ("", "failed: it printed nothing"),
    ],
)
def test_a_tool_that_did_not_look_is_not_verified(tmp_path: Path, body: str, why: str) -> None:
    v = won(tmp_path, scripted(tmp_path, body), total_s=1.5 if "sleep" in body else 60.0)
    assert v.status is Status.PASSED
    assert any(x.startswith("compute-sanitizer memcheck: ") and why in x for x in v.not_verified), (
        v.not_verified
    )
    assert not [c for c in v.checked if "memcheck" in c]


def test_no_tool_and_no_tensors_are_said(tmp_path: Path) -> None:
    assert any("not available: no such program" in x for x in won(tmp_path, None).not_verified)

    def broken(place: Place, job: JudgeJob, folder: Path) -> None:
        raise ValueError("its buffers have 9000 MB")

    tools = winner.Tools(lambda: Path("/bin/true"), broken)
    settings = Settings(tmp_path / "state", "3", opener=runners.open_fake, tools=tools)
    k = Keeper(settings, runners.ok, forgotten=lambda pid, gpu: True)
    v = k.judge(JudgeJob(tmp_path, "canary", {}, "cuda", Tier.PROMOTE))
    assert any("could not be prepared" in x and "9000 MB" in x for x in v.not_verified)


def test_only_winners_on_a_gpu_are_looked_at(tmp_path: Path) -> None:
    v = won(tmp_path, None)
    job = JudgeJob(tmp_path, "t", {}, "cuda", Tier.FULL)
    assert winner.wants(replace(job, tier=Tier.PROMOTE), v)
    assert not winner.wants(job, v)
    assert "sanitizer" in v.seconds


# y[i + 1] = x[i]: the last thread writes one word beyond y
BEYOND = """
    @%p1 ld.global.f32 %f1, [%rd4];
    @%p1 st.global.f32 [%rd5+4], %f1;
    ret;
}}
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("body", "states"),
    [
        (kernels.DOUBLE, {"memcheck": "clean", "racecheck": "clean", "synccheck": "clean"}),
        (BEYOND, {"memcheck": "found"}),
    ],
)
def test_the_real_tool_sees_what_is_planted(
    tmp_path: Path, body: str, states: dict[str, str]
) -> None:
    tool = sanitize.find()
    if tool is None:
        pytest.skip("no compute-sanitizer here")
    made = artifact_store.save(kernels.artifact(body, 4096), tmp_path / "artifacts")
    (tmp_path / "state").mkdir()

    def tensors(place: Place, job: JudgeJob, folder: Path) -> None:
        (folder / "inputs.x.bin").write_bytes(bytes(4 * 4096))
        (folder / "artifact").write_text(str(job.artifact))

    tools = winner.Tools(sanitize.find, tensors)
    settings = Settings(
        tmp_path / "state", os.environ.get("CUDA_VISIBLE_DEVICES"), opener=open_device, tools=tools
    )
    job = JudgeJob(made, "canary", {}, "cuda", Tier.PROMOTE, compile_isolation={"tier": "strict"})
    v = Keeper(settings, runners.ok).judge(job)
    found = {o["tool"]: o["state"] for o in v.profile.get("sanitizer", ())}
    assert states.items() <= found.items(), (v.profile, v.not_verified, v.failure)
