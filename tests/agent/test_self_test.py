"""`judge --self-test`: fates, scores and exit codes with services that answer as told; the real ones on a few."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from agent import scores, selftest
from agent.commands.judge import judge as command
from agent.commands.self_test import _Log as Log
from agent.commands.self_test import _more_judges as more_judges
from agent.commands.self_test import _summed_up as summed_up
from agent.services import judge_state
from sandbox.jobs import CompileJob, CompileOutcome, JudgeJob
from sandbox.verdict import Correctness, Failure, Outcome, Status, TensorCheck, Tier, Verdict
from targets.base import Options
from targets.planted import Planted, built_in

BUG = Planted(
    "gemv/x",
    "bug",
    "gain",
    "wrong",
    "kimi-k3-gemv",
    "a = 1\n",
    (("1", "2"),),
    Options("tiny", 1, 1),
)
GOOD = replace(BUG, name="gemv/y", kind="good", group="control")
TINY = ("gemv", "router", "attn-res")

# one kernel of every class, those that compile and run fastest
QUICK = (
    "gemv/last-columns-skipped", "gemv/no-barrier-before-sum", "gemv/sums-in-bf16", "gemv/output-one-percent",
    "gemv/input-modified", "gemv/weights-of-the-layer-before", "gemv/one-step-late", "gemv/keeps-plausible-values",
    "gemv/large-results-dropped", "gemv/reads-before-the-start",
    "gemv/weights-without-one-bit", "gemv/launch-without-use", "router/second-best-expert",
    "attn-res/score-epsilon-times-ten", "attn-res/norm-in-the-mix", "attn-res/bank-row-one-late",
    "attn-res/last-source-missed", "attn-res/mix-rounded", "kda/state-not-read", "kda/slots-in-order",
    "kda/decay-without-bound", "latent-moe/scale-of-the-neighbour", "latent-moe/shared-choice-skipped",
    "persistent/prefix-not-reported", "persistent/full-parity-inverted",
    "oproj-allreduce/wrong-rank", "gemv/sum-not-started",
    "gemv/launch-number", "mla/later-tokens-seen",
    "gemv/atomic-sum", "attn-res/base-two-softmax", "router/sigmoid-by-tanh", "kda/both-in-bf16",
)  # fmt: skip


class Compiler:
    """Fake: an artifact named by the source's text, or the status that it was told."""

    def __init__(self, status: Status | None = None) -> None:
        self.status = status

    def compile(self, job: CompileJob) -> CompileOutcome:
        if self.status is not None:
            return CompileOutcome(
                None, status=self.status, failure=Failure("trace", "no such name")
            )
        return CompileOutcome(Path("seed" if "1" in job.source else "edited"))

    def close(self) -> None:
        return None


class Judge:
    """Fake: passes until `tier`, then `status`; errors of `edited` and `seed` in units of the bound."""

    def __init__(
        self,
        tier: Tier | None = None,
        status: Status = Status.WRONG,
        errors: tuple[float, float] = (0.5, 0.25),
    ):
        self.tier, self.status, self.errors = tier, status, errors
        self.asked: list[JudgeJob] = []

    def judge(self, job: JudgeJob) -> Verdict:
        assert job.baselines == ()
        self.asked.append(job)
        seed = job.artifact.name == "seed"
        error = self.errors[1 if seed else 0] * 0.01
        check = TensorCheck("outputs.y", error, 0.01, 0.0, 1.0, 0.0, 0.01, True, "step 0")
        fine = Correctness(1, 1, 1, (check,), (), ())
        made = Verdict(
            status=Status.PASSED, target=job.target, artifact="a" * 64, device={"kind": "cpu"}, tier=job.tier,
            trust="audited", isolation={}, date="2026-01-01T00:00:00+00:00", outcome=Outcome.NOT_TIMED,
            correctness=fine, commit="c0ffee",
        )  # fmt: skip
        if job.tier != self.tier or seed:
            return made
        wrong = self.status is Status.WRONG
        bad = replace(fine, tensors=(replace(check, ok=False, rel_l2=1.0),)) if wrong else None
        return replace(
            made, status=self.status, outcome=None, failure=Failure("band", "off"), correctness=bad
        )

    def close(self) -> None:
        return None


def row(p: Planted, judge: Judge, status: Status | None = None) -> scores.Row:
    bench = selftest.Bench(Compiler(status), [judge], "cpu", "sm_90a")
    (found,) = selftest.run(bench, [p], lambda r: None)
    return found


@pytest.mark.parametrize("tier", list(Tier))
def test_a_mistake_goes_up_until_it_is_caught(tier: Tier) -> None:
    judge = Judge(tier)
    found = row(BUG, judge)
    assert (found.fate, found.tier, found.fine) == ("caught", str(tier), True)
    assert [j.tier for j in judge.asked] == list(Tier)[: list(Tier).index(tier) + 1]
    assert len({j.seed for j in judge.asked}) == 1


def test_what_is_not_expected_to_hang_has_more_time_on_a_gpu() -> None:
    """A mistake's screen stays short, since some hang on purpose."""
    bug, good = Judge(Tier.PROMOTE), Judge()
    for judge, planted in ((bug, BUG), (good, GOOD)):
        bench = selftest.Bench(Compiler(), [judge], "cuda:0", "sm_90a")
        selftest.run(bench, [planted], lambda r: None)
    assert [(j.tier, j.deadline_s) for j in bug.asked] == [
        (Tier.SCREEN, 20.0),
        (Tier.FULL, 240.0),
        (Tier.PROMOTE, 480.0),
    ]
    assert [j.deadline_s for j in good.asked] == [60.0, 480.0]
    noise = Judge()
    bench = selftest.Bench(Compiler(), [noise], "cuda:0", "sm_90a")
    selftest.run(bench, [replace(BUG, band=True)], lambda r: None)
    assert noise.asked[0].deadline_s == 60.0


def test_a_miss_is_measured_against_the_seed_from_the_same_secret() -> None:
    judge = Judge(errors=(0.5, 0.25))
    found = row(BUG, judge)
    assert found.fate == "in band" and not found.fine
    assert found.effect == scores.Effect(0.25, "outputs.y", "rel_l2", 0.005, 0.0025, 0.01)
    assert judge.asked[-1].artifact == Path("seed") and len({j.seed for j in judge.asked}) == 1
    assert row(replace(BUG, band=True), Judge()).fine


def test_what_moves_nothing_is_no_noise() -> None:
    """Declared or not: a mistake that no figure shows was not looked for."""
    found = row(replace(BUG, band=True), Judge(errors=(0.3, 0.3)))
    assert found.fate == "missed" and not found.fine


def test_a_mistake_must_end_as_it_deserves() -> None:
    assert row(BUG, Judge(Tier.SCREEN, Status.FAULT)).fate == "missed"
    assert row(BUG, Judge(Tier.SCREEN, Status.INFRA)).fate == "broken"
    assert row(BUG, Judge(), Status.COMPILE_ERROR).fate == "broken"
    refused = replace(BUG, expect=frozenset({"lint"}))
    assert row(refused, Judge(), Status.LINT).fate == "caught"


def test_a_right_kernel_passes_the_first_and_the_last_tier() -> None:
    judge = Judge()
    found = row(GOOD, judge)
    assert found.fate == "accepted" and [j.tier for j in judge.asked] == [Tier.SCREEN, Tier.PROMOTE]
    late = row(GOOD, Judge(Tier.PROMOTE))
    assert late.fate == "rejected" and not late.fine and late.tier == "promote"


def test_an_edit_of_code_that_nobody_runs_is_no_mistake() -> None:
    """Its artifact is the seed's: that it passes says nothing of the judge."""
    idle = replace(BUG, source="a = 1\nb = 3\n", edits=(("3", "4"),))
    found = row(idle, Judge())
    assert (found.fate, found.fine) == ("broken", False) and "no instruction" in found.message


def test_a_broken_edit_is_no_verdict() -> None:
    found = row(replace(BUG, edits=(("7", "8"),)), Judge())
    assert found.fate == "broken" and "occurs 0 times" in found.message


def test_the_score_counts_and_lists() -> None:
    rows = [
        row(BUG, Judge(Tier.FULL)),
        row(BUG, Judge()),
        row(GOOD, Judge()),
        row(GOOD, Judge(Tier.SCREEN)),
    ]
    data = scores.summary(rows)
    assert (data["planted"], data["caught"], data["in_band"], data["good"], data["rejected"]) == (
        2,
        1,
        1,
        2,
        1,
    )
    assert data["recall"] == {"gain": {"planted": 2, "caught": 1, "in_band": 1}}
    assert data["tiers"]["full"] == 1 and data["false_reject_rate"] == 0.5 and not data["ok"]
    assert [m["effect"]["share"] for m in data["missed"]] == [0.25]
    assert {r.commit for r in rows} == {"c0ffee"}
    text = scores.table(data)
    assert "1 of 1 outside the noise band caught" in text and "1 of 2 rejected" in text
    assert "moves rel_l2 of outputs.y from 0.0025 to 0.005, 25% of the bound 0.01" in text
    assert scores.summary(rows[:1])["ok"]


def test_choosing_by_class_part_kind_and_name() -> None:
    everything = built_in()
    on_cpu = selftest.chosen(everything, (), "cpu")
    assert {p.name for p in on_cpu} == {p.name for p in everything if "cpu" in p.devices}
    some = selftest.chosen(everything, ("barrier", "kda/beta-ignored"), "cuda:0")
    assert {p.group for p in some} == {"barrier", "gain"} and all("cuda" in p.devices for p in some)
    assert {p.kind for p in selftest.chosen(everything, ("good",), "cpu")} == {"good"}
    assert {p.target for p in selftest.chosen(everything, ("router",), "cpu")} == {"kimi-k3-router"}
    with pytest.raises(ValueError, match="classes are barrier"):
        selftest.chosen(everything, ("nothing",), "cpu")


def test_shards_are_all_of_it_once() -> None:
    todo = selftest.chosen(built_in(), (), "cuda")
    parts = [selftest.shard(todo, f"{i}/4") for i in (1, 2, 3, 4)]
    assert sorted(p.name for part in parts for p in part) == sorted(p.name for p in todo)
    assert all({p.kind for p in part} == {"bug", "hack", "good"} for part in parts)
    for wrong in ("0/4", "5/4", "4", "a/b"):
        with pytest.raises(ValueError, match="no part"):
            selftest.shard(todo, wrong)


def test_all_is_compiled_before_the_first_is_judged() -> None:
    """With the seeds that noise is compared with; an edit that no longer fits is left to its own row."""
    sources: list[str] = []

    class Listening(Compiler):
        def compile(self, job: CompileJob) -> CompileOutcome:
            sources.append(job.source)
            return super().compile(job)

    judge = Judge()
    bench = selftest.Bench(Listening(), [judge], "cuda", "sm_90a")
    stale = replace(BUG, edits=(("7", "8"),))
    selftest.prepare(bench, [BUG, replace(BUG, band=True), stale, GOOD], 2)
    assert sorted(sources) == ["a = 1\n", "a = 2\n", "a = 2\n", "a = 2\n"]
    assert judge.asked == []


def test_judges_that_share_a_gpu_have_locks_of_their_own(tmp_path: Path) -> None:
    states = [j.options.state for j in more_judges(3, "cuda:1", tmp_path)]
    assert len({judge_state(), *states}) == 4
    assert {j.options.state for j in more_judges(2, "cpu", tmp_path)} == {judge_state()}


def test_what_is_not_begun_in_time_has_no_row() -> None:
    turns = iter((True, False, False))
    bench = selftest.Bench(Compiler(), [Judge()], "cpu", "sm_90a")
    rows = selftest.run(bench, [GOOD, BUG, BUG], lambda r: None, lambda: next(turns))
    assert [r.planted.name for r in rows] == [GOOD.name]


def test_the_longest_begin_first_and_rows_keep_their_order() -> None:
    begun: list[str] = []
    long = replace(BUG, name="persistent/x")
    bench = selftest.Bench(Compiler(), [Judge(Tier.SCREEN)], "cpu", "sm_90a")
    rows = selftest.run(bench, [BUG, long, GOOD], lambda r: begun.append(r.planted.name))
    assert begun == [GOOD.name, long.name, BUG.name]
    assert [r.planted.name for r in rows] == [BUG.name, long.name, GOOD.name]


def part(tmp_path: Path, name: str, rows: list[scores.Row], **more: object) -> str:
    data = {
        **scores.summary(rows), "device": "cpu", "preset": "tiny", "version": "1", "jobs": 1, "date": "2026-01-01",
        "wall_s": 1.0, "not_reached": [], "rows": [r.to_json() for r in rows], **more,
    }  # fmt: skip
    (tmp_path / name).write_text(json.dumps(data))
    return str(tmp_path / name)


def test_reports_of_parts_are_summed_up(tmp_path: Path) -> None:
    named = {p.name: p for p in built_in()}
    caught = replace(row(BUG, Judge(Tier.SCREEN)), planted=named["gemv/output-one-percent"])
    accepted = replace(row(GOOD, Judge()), planted=named["gemv/as-it-is"])
    rejected = replace(row(GOOD, Judge(Tier.PROMOTE)), planted=named["gemv/four-warps"])
    a, b = part(tmp_path, "a", [caught]), part(tmp_path, "b", [accepted, rejected])

    def summed(*files: str) -> tuple[int, dict[str, object]]:
        asked = ["--self-test", "--json", *(x for f in files for x in ("--reports", f))]
        result = CliRunner().invoke(command, asked, standalone_mode=False)
        return result.return_value, json.loads(result.stdout or "{}")

    code, data = summed(a, b)
    assert (code, data["planted"], data["caught"], data["good"], data["rejected"]) == (
        1,
        1,
        1,
        2,
        1,
    )
    assert data["commits"] == ["c0ffee"]
    assert data["rows"] == [r.to_json() for r in (caught, accepted, rejected)]
    assert summed(a, part(tmp_path, "c", [accepted]))[0] == 0
    late = part(tmp_path, "d", [accepted], not_reached=["gemv/four-warps"])
    assert summed(a, late) == (1, {**summed(a, late)[1], "not_reached": ["gemv/four-warps"]})
    for other in (a, part(tmp_path, "e", [accepted], device="NVIDIA H200")):
        with pytest.raises(ValueError, match="told twice|differ in their device"):
            summed_up([Path(a), Path(other)])


def test_a_run_that_was_cut_off_goes_on_with_the_rows_it_had(tmp_path: Path) -> None:
    named = {p.name: p for p in built_in()}
    first, second, third = (named[f"gemv/{n}"] for n in ("as-it-is", "four-warps", "sum-apart"))
    on = {"device": "cpu", "preset": "tiny"}
    log = Log(tmp_path / "rows.jsonl", on)
    accepted = replace(row(GOOD, Judge()), planted=first)
    log.add(replace(accepted, fate="broken"))
    log.add(accepted)
    log.add(replace(accepted, planted=second, fate="broken"))
    Log(log.file, {**on, "device": "NVIDIA H200"}).add(replace(accepted, planted=third))
    with log.file.open("a") as f:
        f.write('{"device": "cpu", "row": {"na')
    todo = (first, second, third)
    assert [r.to_json() for r in log.rows(todo).values()] == [accepted.to_json()]
    changed = replace(first, tunables={"warps": 4})
    assert log.rows([changed]) == {}
    assert Log(tmp_path / "none.jsonl", on).rows(todo) == {}


def test_going_on_needs_the_folder() -> None:
    asked = ["--self-test", "--device", "cpu", "--resume"]
    assert CliRunner().invoke(command, asked).exit_code == 2


def test_another_preset_keeps_the_exchange_between_ranks() -> None:
    big = selftest.resized(replace(BUG, tunables={"ctas": 4, "spin_limit": 1}), "tp8")
    assert big.options == Options("tp8", 1, 1) and dict(big.tunables) == {"spin_limit": 1}
    sharded = replace(BUG, options=Options("tiny-tp2", 2, 2))
    assert selftest.resized(sharded, "tp8") is sharded


def test_the_command_wants_folders_or_a_self_test() -> None:
    runner = CliRunner()
    assert runner.invoke(command, []).exit_code == 2
    assert (
        runner.invoke(command, ["--self-test", "--device", "cpu", "--only", "nothing"]).exit_code
        == 2
    )


def test_the_quick_ones_cover_every_class() -> None:
    named = {p.name: p for p in built_in()}
    assert {named[n].group for n in QUICK} == {p.group for p in built_in() if "cpu" in p.devices}


@pytest.fixture
def master(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged from a master that is drawn from the test's name, so that a failure happens again when it is looked for.
    `KERNELGEN_TEST_SEED` draws another."""
    drawn = random.Random(f"{request.node.nodeid} {os.environ.get('KERNELGEN_TEST_SEED', '')}")
    number = drawn.getrandbits(62)
    monkeypatch.setattr(selftest, "secrets", SimpleNamespace(randbits=lambda bits: number))


def run_command(*only: str) -> dict[str, object]:
    asked = ["--self-test", "--device", "cpu", "--json", "--jobs", "2"]
    for name in only:
        asked += ["--only", name]
    result = CliRunner().invoke(command, asked, standalone_mode=False)
    data: dict[str, object] = json.loads(result.stdout)
    assert data["ok"] and result.return_value == 0, (
        data["missed"],
        data["false_rejects"],
        data["broken"],
    )
    return data


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("master")
def test_one_mistake_and_one_control_for_real() -> None:
    data = run_command("gemv/output-one-per-mille", "gemv/warps-in-reverse")
    assert (data["planted"], data["caught"], data["good"], data["rejected"]) == (1, 1, 1, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("master")
def test_one_of_every_class_for_real() -> None:
    run_command(*QUICK)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_all_of_them_for_real() -> None:
    run_command()
