"""The command line: exit codes, what goes to stdout and what to stderr, bad input, and keys that never leak."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import agent.commands.evaluate
import agent.commands.optimize
import agent.commands.rejudge
from agent import fakes
from agent.cli import COMMANDS, main
from agent.fakes import kernel
from agent.models.base import Unavailable
from agent.models.external import offer
from agent.runner import Services, Session
from agent.services import Wanted
from agent.workspace import Workspace
from tests.agent.models.provider_server import Answer, serve

TARGET = f"{Path(__file__).with_name('fake_target.py')}:Fake"
PLANTED = "sk-planted-key-5f0c"
Call = Callable[..., Result]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs the tool in an empty folder; the sandbox's services are the fakes."""
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("NO_COLOR", "1")

    def start(w: Wanted, workspace: Workspace) -> tuple[Services, dict[str, Any]]:
        judge = fakes.FakeJudge()
        return Services(fakes.FakeCompiler(workspace.root), judge, fakes.FakeJudge), {
            "arch": "sm_90a"
        }

    def start_compiler(w: Wanted, workspace: Workspace, judge: Any = None) -> Services:
        judging = judge or fakes.FakeJudge()
        return Services(fakes.FakeCompiler(workspace.root), judging, lambda: judging)

    for module in (agent.commands.optimize, agent.commands.evaluate):
        monkeypatch.setattr(module, "start", start)
        monkeypatch.setattr(module, "start_compiler", start_compiler)
    monkeypatch.setattr(agent.commands.rejudge, "start", start)

    def invoke(*args: str) -> Result:
        return CliRunner().invoke(main, list(args))

    return invoke


def optimize(call: Call, *args: str) -> Result:
    usual = ("--rounds", "8", "--candidates", "3")
    return call("optimize", "--target", TARGET, "--device", "cpu", *usual, *args)


def test_without_a_key_the_tuner_finds_the_best_point_and_says_so_first(call: Call) -> None:
    done = optimize(call, "--patience", "9")
    assert done.exit_code == 0, done.output
    assert "tuner (no key for a model is set)" in done.stderr.splitlines()[0]
    assert "best: candidate" in done.stdout
    assert "85.50 us a step" in done.stdout
    assert "not verified: everything: this judge is a fake" in done.stdout
    assert list(Path("kernels_out/fake_target-fake/cpu").glob("*/kernel.py"))


def test_json_is_one_document_on_stdout(call: Call) -> None:
    done = optimize(call, "--json")
    data = json.loads(done.stdout)
    assert (data["schema"], data["improved"], data["stop"]) == (1, True, "exhausted")
    assert data["best"]["verdict"]["status"] == "passed"
    assert Path(data["best"]["folder"], "verdict.json").is_file()


def test_nothing_better_is_exit_code_1(call: Call, tmp_path: Path) -> None:
    (tmp_path / "start.py").write_text(kernel(100))
    done = optimize(call, "--start", "start.py")
    assert (done.exit_code, "nothing left to try" in done.stdout) == (1, True)
    assert "best: what it started from" in done.stdout
    assert "start.py, given to start from" in call("show", "last-0").stdout


def test_a_spent_budget_is_exit_code_3_and_resume_goes_on(call: Call) -> None:
    done = optimize(call, "--max-gpu-seconds", "0.3", "--candidates", "1")
    assert done.exit_code == 3, done.output
    again = call("resume", "last", "--max-gpu-seconds", "100")
    assert again.exit_code == 0, again.output
    rows = json.loads(call("show", "last", "--json").stdout)["candidates"]
    assert len(rows) == 6


def test_external_without_waiting_is_exit_code_3_until_there_is_a_proposal(call: Call) -> None:
    args = ("--proposer", "external", "--folder", "box", "--no-wait", "--max-candidates", "1")
    first = optimize(call, *args)
    assert (first.exit_code, "candidate.py" in first.stdout) == (3, True)
    offer(Path("box"), kernel(50))
    second = call("resume", "last")
    assert second.exit_code == 0, second.output
    diff = call("show", "last-1", "--diff").stdout
    assert diff.startswith("--- a/") and "+# fake: us=50" in diff


def test_show_runs_and_sources(call: Call) -> None:
    optimize(call, "--json")
    assert call("show", "last-0", "--source").stdout == fakes.SEED
    assert json.loads(call("show", "last-1", "--verdict").stdout)["status"] == "passed"
    listed = json.loads(call("runs", "--json").stdout)["runs"]
    assert (listed[0]["state"], listed[0]["candidates"]) == ("review", 6)
    text = call("show", "last")
    assert "promote candidate" in text.stdout and text.stderr == ""


def test_evaluate_judges_and_records_each_file(call: Call, tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(kernel(80))
    (tmp_path / "bad.py").write_text(kernel(80, "wrong"))
    (tmp_path / "broken.py").write_text(kernel(80, "compile_error"))
    args = ("evaluate", "--target", TARGET, "--device", "cpu")
    done = call(*args, "seed", "good.py", "--against", "seed")
    assert done.exit_code == 0, done.output
    assert "1.2500 x the incumbent" in done.stdout
    failed = call(*args, "good.py", "bad.py", "broken.py", "--json")
    assert failed.exit_code == 1
    results = json.loads(failed.stdout)["results"]
    assert [r["verdict"]["status"] for r in results] == ["passed", "wrong", "compile_error"]
    assert call("show", results[1]["candidate"], "--verdict").exit_code == 0


def test_compile_writes_an_artifact_and_reports_a_failure(call: Call, tmp_path: Path) -> None:
    done = call(
        "compile", "--target", TARGET, "seed", "-o", "out", "--tunable", "threads=128", "--json"
    )
    data = json.loads(done.stdout)
    assert (tmp_path / data["artifact"] / "manifest.json").is_file()
    (tmp_path / "broken.py").write_text(kernel(80, "lint"))
    assert call("compile", "--target", TARGET, "broken.py", "-o", "out").exit_code == 1


def test_a_run_judged_elsewhere_is_brought_on_by_record(call: Call, tmp_path: Path) -> None:
    first = optimize(call, "--judge-elsewhere", "--rounds", "0", "--json")
    assert first.exit_code == 3, first.output
    run = json.loads(first.stdout)["run"]
    (request,) = (tmp_path / ".kernelgen/runs" / run / "requests").iterdir()
    r = json.loads(request.read_text())
    from sandbox.jobs import JudgeJob
    from sandbox.verdict import Tier

    job = JudgeJob(Path(r["artifact"]), r["target"], r["options"], r["device"], Tier(r["tier"]))
    verdict = fakes.FakeJudge().judge(job).to_json()
    Path("v.json").write_text(json.dumps(verdict))
    Path("w.json").write_text(json.dumps({**verdict, "artifact": "0" * 64}))
    strange = call("record", run, "w.json")
    assert (strange.exit_code, "does not have" in strange.stderr) == (1, True)
    assert call("resume", run).exit_code == 3  # a verdict on something else lets nothing go on
    assert "1 of" not in call("record", run, "v.json").stdout
    done = call("resume", run)
    assert done.exit_code == 1, done.output
    assert "best: the seed" in done.stdout
    beside = call("record", run, "v.json")
    assert (beside.exit_code, "kept as evidence" in beside.stdout) == (0, True)
    # a look that timed nothing, brought in once more, does not stand for what was judged
    untimed = {**verdict, "timing": None, "outcome": "not_timed", "date": "2026-02-02T00:00:00Z"}
    Path("t.json").write_text(json.dumps(untimed))
    assert call("record", run, "t.json").exit_code == 0
    again = call("resume", run)
    assert "best: the seed" in again.stdout and "not timed" not in again.stdout
    # but one that found it wrong does, from wherever it comes, and one at a higher tier
    stands = lambda: json.loads(call("show", f"{run}-0", "--verdict", "--json").stdout)  # noqa: E731
    Path("p.json").write_text(json.dumps({**verdict, "tier": "promote"}))
    assert call("record", run, "p.json").exit_code == 0
    assert "promote" in json.dumps(stands())
    failed = {"rule": "x", "message": "off by one", "where": {}}
    wrong = {**untimed, "status": "wrong", "failure": failed, "outcome": None}
    Path("x.json").write_text(json.dumps(wrong))
    assert call("record", run, "x.json").exit_code == 0
    assert "off by one" in json.dumps(stands())


def test_judge_runs_no_file_that_only_the_artifact_names(call: Call, tmp_path: Path) -> None:
    """An artifact is hostile: its target, if a file, is trusted code only once the user says so."""
    evil = tmp_path / "evil.py"
    evil.write_text(
        "from pathlib import Path\nPath('ran').touch()\nfrom agent.fakes import FakeTarget as X"
    )
    target = f"{evil}:X"
    sys.modules.pop(f"kernelgen_user_{abs(hash(str(evil)))}", None)
    (tmp_path / "mine.py").write_text(kernel(80))
    assert call("compile", "--target", target, "mine.py", "-o", "out").exit_code == 0
    Path("ran").unlink()
    sys.modules.pop(f"kernelgen_user_{abs(hash(str(evil)))}")
    (folder,) = Path("out").iterdir()
    done = call("judge", str(folder), "--device", "cpu")
    assert (done.exit_code, Path("ran").exists()) == (1, False), done.output
    assert f"give --target {target}" in done.stderr
    wrong = call("judge", "out", "--device", "cpu")
    assert f"did you mean {folder}?" in wrong.stderr and wrong.exit_code == 1


def test_resume_of_what_is_no_run_of_the_loop_is_one_line(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(kernel(80))
    assert call("evaluate", "--target", TARGET, "--device", "cpu", "mine.py").exit_code == 0
    done = call("resume", "last")
    assert (done.exit_code, "is of `evaluate`" in done.stderr) == (2, True), done.output
    run = json.loads(optimize(call, "--rounds", "0", "--json").stdout)["run"]
    shutil.rmtree(tmp_path / ".kernelgen/runs" / run)
    gone = call("resume", run)
    assert (gone.exit_code, gone.stderr.count("\n"), "is missing" in gone.stderr) == (1, 1, True)


def test_dry_run_shows_the_prompt_and_the_cost_and_records_nothing(call: Call) -> None:
    done = optimize(call, "--proposer", "openai", "--dry-run", "--json")
    data = json.loads(done.stdout)
    assert "inputs.x" in data["prompt"]["stable"] and data["estimate"]["tokens_a_round"] > 1000
    assert not Path("runs.db").exists()
    assert "nothing to pay" in optimize(call, "--proposer", "tuner", "--dry-run").stdout


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["optimize"], 2, "--target"),
        (["optimize", "--target", "nothing"], 2, "no target 'nothing'"),
        (["optimize", "--target", "nowhere.py:X"], 2, "no file"),
        (["optimize", "--target", TARGET, "--preset", "huge"], 2, "no preset 'huge'"),
        (["optimize", "--target", TARGET, "--max-us", "3"], 2, "--max-us"),
        (["optimize", "--target", TARGET, "--device", "tpu"], 2, "cuda"),
        (["optimize", "--target", TARGET, "--option", "x"], 2, "NAME=VALUE"),
        (["optimize", "--target", TARGET, "--proposer", "replay"], 2, "--replay"),
        (["optimize", "--target", TARGET, "--proposer", "anthropic", "--device", "cpu"], 2, "ANTHROPIC_API_KEY"),
        (["resume", "last"], 2, "no record"),
        (["show", "nothing"], 2, "no record"),
        (["evaluate", "--target", TARGET, "missing.py"], 2, "missing.py"),
        (["judge", "."], 1, "manifest.json"),
        (["targets", "nothing"], 2, "no target"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_the_right_code(
    call: Call, args: list[str], code: int, words: str
) -> None:
    done = call(*args)
    assert done.exit_code == code, done.output
    assert words in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len([x for x in done.stderr.splitlines() if "rror" in x or "kernelgen:" in x]) == 1


def test_a_missing_device_is_exit_code_4_after_saying_what_would_have_run(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(w: Wanted, workspace: Workspace) -> Any:
        raise Unavailable("device cuda: there is none")

    monkeypatch.setattr(agent.commands.optimize, "start", missing)
    done = call("optimize", "--target", TARGET, "--device", "cuda")
    assert done.exit_code == 4
    first, last = done.stderr.splitlines()[0], done.stderr.splitlines()[-1]
    assert first.startswith("optimize ") and last == "kernelgen: device cuda: there is none"
    assert not Path("runs.db").exists()


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    import agent.outcome
    import agent.propose

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(agent.propose, "write_json", full)
        done = optimize(call)
        assert (done.exit_code, "No space left" in done.stderr) == (1, True)
        assert "Traceback" not in done.stderr
    again = call("resume", "last", "--patience", "9")
    assert again.exit_code == 0, again.output


def test_ctrl_c_drains_with_exit_code_130_and_resume_finishes(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged, stop = fakes.FakeJudge.judge, Session.stop
    told = threading.Event()

    def slow(self: fakes.FakeJudge, job: Any) -> Any:
        if job.incumbent is not None:
            monkeypatch.setattr(fakes.FakeJudge, "judge", judged)
            os.kill(os.getpid(), signal.SIGINT)
            assert told.wait(60)  # else the run may come to its end before the signal is heard
        return judged(self, job)

    def stopped(self: Session) -> None:
        stop(self)
        told.set()

    monkeypatch.setattr(Session, "stop", stopped)
    monkeypatch.setattr(fakes.FakeJudge, "judge", slow)
    done = optimize(call, "--candidates", "1")
    assert done.exit_code == 130, done.output
    assert "interrupted" in done.stdout
    state = json.loads(call("runs", "--json").stdout)["runs"][0]
    assert state["state"] == "interrupted"
    again = call("resume", "last")
    assert again.exit_code == 0, again.output
    assert len(json.loads(call("show", "last", "--json").stdout)["candidates"]) == 6


def test_replay_last_is_the_run_before_not_the_new_one(call: Call) -> None:
    first = json.loads(optimize(call, "--rounds", "2", "--json").stdout)
    done = optimize(call, "--replay", "last", "--rounds", "2")
    assert done.exit_code == 0, done.output
    assert f"best: candidate {first['best']['candidate'][:-2]}" not in done.stdout
    old, new = (json.loads(call("show", r, "--json").stdout) for r in (first["run"], "last"))
    assert new["run"]["settings"]["replay"] == first["run"] != new["run"]["id"]
    ranked = [[(c["source"], c["tunables"], c["us"]) for c in r["candidates"]] for r in (old, new)]
    assert ranked[0] == ranked[1] and len(ranked[0]) > 2
    assert call("show", "last-1", "--verdict").exit_code == 0
    strange = optimize(call, "--replay", "01NOSUCHRUN")
    assert (strange.exit_code, "no run" in strange.stderr) == (2, True)


def test_json_on_each_command_is_one_document(call: Call, tmp_path: Path) -> None:
    first = optimize(call, "--rounds", "1", "--max-candidates", "1", "--json")
    run = json.loads(first.stdout)["run"]
    (tmp_path / "v.json").write_text(call("show", f"{run}-1", "--verdict").stdout)
    asked = {
        "optimize": first,
        "resume": call("resume", run, "--rounds", "2", "--max-candidates", "2", "--json"),
        "runs": call("runs", "--json"), "show": call("show", run, "--json"),
        "show candidate": call("show", f"{run}-1", "--json"),
        "record": call("record", run, "v.json", "--json"),
        "review": call("review", run, "--json"),
        "targets": call("targets", TARGET, "--json"), "targets all": call("targets", "--json"),
        "doctor": call("doctor", "--no-probe", "--json"),
        "evaluate": call("evaluate", "--target", TARGET, "--device", "cpu", "seed", "--json"),
        "compile": call("compile", "--target", TARGET, "seed", "-o", "out", "--json"),
        "dry run": optimize(call, "--dry-run", "--json"),
    }  # fmt: skip
    for name, done in asked.items():
        assert done.exit_code in (0, 1), (name, done.output)
        assert json.loads(done.stdout)["schema"] == 1, name
    # Those without write a file or speak a protocol on stdout.
    without = {c for c in COMMANDS if "--json" not in call(c, "--help").stdout}
    assert without <= {"serve", "mcp"}, without


def test_doctor_names_keys_and_never_shows_them(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", PLANTED)
    done = call("doctor", "--no-probe")
    assert done.exit_code == 0, done.output
    assert "key for openai: set" in done.stdout and "key for anthropic: not set" in done.stdout
    assert PLANTED not in done.output


def test_a_key_in_the_environment_reaches_no_file(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", PLANTED)
    done = optimize(call, "--proposer", "tuner", "--json")
    assert done.exit_code == 0
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert PLANTED.encode() not in path.read_bytes(), path


def test_a_key_that_a_provider_repeats_reaches_no_file(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole run with a model whose server gives the key back: in answers, of two pieces each, and in an error."""
    monkeypatch.setenv("OPENAI_API_KEY", PLANTED)
    count = 0

    def answer(asked: dict[str, Any]) -> Answer:
        nonlocal count
        count += 1
        if count == 4:
            message = f"Incorrect API key provided: {PLANTED}. " + "x" * 440 + PLANTED
            return Answer(status=401, error={"error": {"message": message, "type": "auth"}})
        return Answer(f"# {PLANTED}\n{fakes.kernel(70, extra='# ' + PLANTED)}")

    with serve(by=answer) as s:
        done = optimize(
            call, "--proposer", "openai", "--model", "gpt-5.5", "--base-url", f"{s.url}/v1", "--rounds", "2"
        )  # fmt: skip
        assert any(h.get("authorization") == f"Bearer {PLANTED}" for h in s.headers)
    assert count >= 4 and "[key]" in done.output and PLANTED[:12] not in done.output
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert any(b"[key]" in p.read_bytes() for p in files), "the answers were written down"
    for path in files:
        assert PLANTED.encode() not in path.read_bytes(), path


def test_two_processes_do_not_work_on_one_run(call: Call, tmp_path: Path) -> None:
    from agent.locks import hold

    run = json.loads(optimize(call, "--json").stdout)["run"]
    with hold(Workspace(tmp_path / ".kernelgen").run(run)):
        busy = call("resume", run)
    assert (busy.exit_code, "another process" in busy.stderr) == (1, True)
