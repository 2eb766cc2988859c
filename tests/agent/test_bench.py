"""`bench`: which workloads run, what rows say of a verdict, rows on disk as they come, the plot, the command."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agent.bench import grid, plot, run, show
from agent.bench.rows import Context, rows_of
from agent.cli import main
from agent.offline import File
from agent.runner import Services
from sandbox.jobs import CompileJob, CompileOutcome, JudgeJob
from sandbox.verdict import (
    Correctness,
    Failure,
    Outcome,
    Ratio,
    Status,
    Tier,
    Timing,
    Trust,
    Verdict,
    WorkloadTiming,
)
from targets.base import Options, Workload, find

TARGET = "kimi-k3-decode"
CONTEXT = Context("seed", "kernelgen bench", 93)


def workload(rows: int = 2) -> Workload:
    return find(TARGET).workload(Options("tp8", 4, rows, 8192))


def timing(w: Workload, best: str = "mix") -> WorkloadTiming:
    arm = {
        "p50_us": 401.0,
        "p95_us": 410.0,
        "p99_us": 430.0,
        "steps": 1000,
        "isolated_us": 420.0,
        "cold_us": 425.0,
    }
    detail = {
        "us": {"candidate": 400.0, "twin": 400.0, "graph": 4000.0, "mix": 200.0},
        "arms": {
            "candidate": {**arm, "launches": 56, "joules": 0.2},
            "mix": {**arm, "launches": 48, "notes": ["quack: not installed"]},
        },
        "skipped": {"compile": "RuntimeError: no compiler"},
    }
    return WorkloadTiming(
        TARGET, "tp8", 4, w.rows, 1, 8192, 8, 56, 400.0, 100.0, 2000.0, 800_000_000, 0.45, 0.42,
        speedup_graph=Ratio(10.0, 9.9, 10.1), speedup_best=Ratio(0.5, 0.49, 0.51), best_baseline=best, detail=detail,
    )  # fmt: skip


def verdict(w: Workload, status: Status = Status.PASSED) -> Verdict:
    common: dict[str, Any] = {
        "target": TARGET, "artifact": "a" * 64, "device": {"kind": "cuda", "name": "NVIDIA H200"},
        "tier": Tier.SCREEN, "trust": Trust.JUDGED, "isolation": {}, "date": "2026-11-29T00:00:00+00:00",
    }  # fmt: skip
    if status is not Status.PASSED:
        return Verdict(status=status, failure=Failure("band", "wrong in outputs.out"), **common)
    return Verdict(
        status=status, outcome=Outcome.NOT_TIMED, correctness=Correctness(1, 2, 2, (), (), ()),
        timing=Timing("measured", (timing(w),)), **common,
    )  # fmt: skip


def test_lists_of_numbers_know_k_and_m() -> None:
    assert grid.numbers("1, 8k,1m") == (1, 8192, 1 << 20)
    with pytest.raises(ValueError):
        grid.numbers("1,x")


def test_workloads_are_the_product_and_refusals_are_said() -> None:
    asked = grid.Asked(Options("tp8", 4), (1, 3, 8), (1024, 8192))
    found, refused = grid.workloads(find(TARGET), asked)
    assert [(w.rows, w.context) for w in found] == [(1, 1024), (1, 8192), (8, 1024), (8, 8192)]
    assert len(refused) == 2 and "rows 3" in str(refused[0])


def test_rows_may_be_listed_in_an_order_of_their_own() -> None:
    asked = grid.Listed(Options("tiny", 4), ("tp16:8:1k", "tp8:1:8k", "tp8:3:1k"))
    found, refused = grid.workloads(find(TARGET), asked)
    assert [(w.options.preset, w.rows, w.context, w.layers) for w in found] == [
        ("tp16", 8, 1024, 4), ("tp8", 1, 8192, 4)
    ]  # fmt: skip
    assert len(refused) == 1 and "rows 3" in str(refused[0])
    with pytest.raises(ValueError, match="a row at least"):
        grid.workloads(find(TARGET), grid.Listed(Options("tp8"), ("tp8:0:8k",)))
    with pytest.raises(ValueError):
        grid.workloads(find(TARGET), grid.Listed(Options("tiny"), ("tp8:1",)))
    asked_wrong = ["bench", "--target", TARGET, "--row", "tp8:x:8k"]
    assert CliRunner().invoke(main, asked_wrong).exit_code == 2


def test_what_no_memory_holds_is_refused_and_said() -> None:
    asked = grid.Listed(Options("tp8", 4), ("tp8:64:128k", "tp8:64:1m", "tp8:1:1m"))
    found, _ = grid.workloads(find(TARGET), asked)
    fit, refused = grid.fitting(found, 150_109_880_320)
    assert [(w.rows, w.context) for w in fit] == [(64, 1 << 17), (1, 1 << 20)]
    assert len(refused) == 1
    assert "rows 64, context 1048576: a judgement needs about" in str(refused[0])
    assert grid.fitting(found, 0) == (found, [])


def test_the_seed_gets_its_best_known_values_if_it_declares_them() -> None:
    assert grid.best_known(find(TARGET).seed_source()) == {"pdl": True}
    assert grid.best_known("TUNABLES = {'pdl': (False,)}") == {}
    assert grid.best_known("x = (") == {}


def test_every_arm_is_a_row_with_its_own_rates() -> None:
    w = workload()
    own, graph, mix = rows_of(verdict(w), w, CONTEXT)
    assert (own["arm"], graph["arm"], mix["arm"]) == ("seed", "graph", "mix")
    assert own["tok_s_user"] == pytest.approx(1e6 / (100.0 * 93))
    assert own["tok_s"] == pytest.approx(2 * own["tok_s_user"])
    assert own["launches_per_layer"] == 14 and own["speedup_best"] == [0.5, 0.49, 0.51]
    assert own["joules_per_token"] == pytest.approx(0.2 * 93 / 4 / 2)
    assert mix["us_per_layer"] == 50.0 and mix["gb_per_s"] == pytest.approx(4000.0)
    assert mix["fraction_of_floor_measured"] == pytest.approx(0.9)
    assert graph["fraction_of_floor_spec"] == pytest.approx(0.042)
    assert own["skipped"] == {"compile": "RuntimeError: no compiler"}
    assert all(
        r["best_baseline"] == "mix" and r["p99_us" if r is own else "us"] for r in (own, graph, mix)
    )


def test_a_piece_of_a_layer_makes_no_tokens() -> None:
    w = workload()
    own, _, mix = rows_of(verdict(w), w, replace(CONTEXT, model_layers=0))
    assert own["tok_s_user"] is own["tok_s"] is mix["tok_s"] is None
    assert "joules_per_token" not in own and own["joules_per_step"] == 0.2
    (slice_, *_) = rows_of(verdict(w), w, replace(CONTEXT, model_layers=None))
    assert slice_["tok_s_user"] == pytest.approx(1e6 / 400.0) and slice_["model_layers"] == 4
    layers = {n: find(n).model_layers(Options("tp8")) for n in ("kimi-k3-kda", "kimi-k3-decode")}  # type: ignore[attr-defined]
    assert layers == {"kimi-k3-kda": 0, "kimi-k3-decode": 93}


def test_the_seed_chain_is_a_baseline_too() -> None:
    w = workload()
    found = timing(w)
    us = {**found.detail["us"], "mix": 410.0, "incumbent": 300.0}
    given = replace(
        found, detail={**found.detail, "us": us}, speedup_incumbent=Ratio(0.75, 0.74, 0.76)
    )

    def rows(t: WorkloadTiming, kernel: str) -> list[dict[str, Any]]:
        v = replace(verdict(w), timing=Timing("measured", (t,)))
        return rows_of(v, w, replace(CONTEXT, kernel=kernel))

    own = rows(given, "mine.py")[0]
    assert own["best_baseline"] == "seed" and own["speedup_best"] == [0.75, 0.74, 0.76]
    us.pop("incumbent")
    own = rows(given, "seed")[0]
    assert own["best_baseline"] == "seed" and own["speedup_best"] is None
    assert all(r["best_baseline"] == "" for r in rows(replace(given, best_baseline=""), "seed"))


def test_a_row_has_the_fields_of_the_judges_schema() -> None:
    """Those that verdicts have, under their names, on the row of the kernel; of an arm, those of its times."""
    w = workload()
    v = replace(verdict(w), checked=("a", "b"), not_verified=("c",), commit="abc")
    own, _, mix = rows_of(v, w, CONTEXT)
    workload_fields = {f.name for f in fields(WorkloadTiming)} - {"detail", "speedup_incumbent"}
    assert workload_fields <= set(own)
    for name in (
        "status",
        "outcome",
        "tier",
        "isolation",
        "trust",
        "checked",
        "not_verified",
        "date",
        "commit",
    ):
        assert name in own, name
    assert (
        own["outcome"] == "not_timed" and own["checked"] == ["a", "b"] and own["kind"] == "measured"
    )
    ratios = {"speedup_graph", "speedup_best"}
    assert workload_fields - ratios <= set(mix) and mix["launches"] == 48


def test_the_plot_has_a_line_for_each_arm_and_context() -> None:
    rows = [
        {"arm": a, "m": m, "context": c, "us": 10.0 * m, "fraction_of_floor_measured": 0.5 / m}
        for a in ("mix", "seed") for m in (8, 1) for c in (8192, 1024)
    ]  # fmt: skip
    share = plot.lines([*rows, {"arm": "x", "m": 1, "context": 1}], "context",
                       ("m", "fraction_of_floor_measured"))  # fmt: skip
    assert len(share) == 4 and share["mix", 1024] == [(1.0, 0.5), (8.0, 0.0625)]
    assert plot.lines(rows, "m", ("context", "us"))["seed", 8] == [(1024.0, 80.0), (8192.0, 80.0)]
    assert [plot.tokens(n) for n in (96, 1024, 131072, 1 << 20)] == ["96", "1k", "128k", "1M"]


def test_what_is_refused_is_a_row_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Judges()
    services = Services(Compiles(), judge, lambda: judge)
    facts = {"name": "NVIDIA H200", "memory_bytes": 150_109_880_320}
    monkeypatch.setattr("agent.commands.bench.start", lambda *a: (services, facts))
    out = tmp_path / "rows.jsonl"
    asked = ["bench", "--target", TARGET, "--device", "cuda", "-o", str(out), "--db", str(tmp_path / "r.db"),
             "--layers", "4", "--row", "tp8:2:8k", "--row", "tp8:3:8k", "--row", "tp8:64:1m"]  # fmt: skip
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    refused = [r for r in rows if r["status"] == "unsupported"]
    assert [(r["m"], r["context"]) for r in refused] == [(3, 8192), (64, 1 << 20)]
    assert "there are 1, 2, 4" in refused[0]["failure"] and "GB" in refused[1]["failure"]
    assert len(rows) == 5 and [j.options["rows"] for j in judge.jobs] == [2]
    shown = CliRunner().invoke(main, ["bench", "--target", TARGET, "--read", str(out)])
    assert shown.exit_code == 1 and shown.output.count("refused: ") == 2


def test_variants_have_the_flags_of_the_other_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[grid.Asked | grid.Listed] = []

    def keep(
        target: Any, one: grid.Asked | grid.Listed
    ) -> tuple[list[Workload], list[grid.Refused]]:
        asked.append(one)
        return [], []

    monkeypatch.setattr("agent.commands.bench.grid.workloads", keep)
    flags = ["--verify", "4", "--kv", "fp8", "--option", "experts=nvfp4"]
    assert CliRunner().invoke(main, ["bench", "--target", TARGET, *flags]).exit_code == 2
    assert asked[0].options.extra == {"experts": "nvfp4", "q": 4, "kv": "fp8"}


def test_a_verdict_without_times_says_why() -> None:
    w = workload()
    (row,) = rows_of(verdict(w, Status.WRONG), w, CONTEXT)
    assert row["status"] == "wrong" and row["failure"] == "wrong in outputs.out" and "us" not in row


class Compiles:
    """A compiler whose artifact is a folder's name; it refuses eight rows."""

    def compile(self, job: CompileJob) -> CompileOutcome:
        if job.workload["rows"] == 8:
            return CompileOutcome(
                None, status=Status.COMPILE_ERROR, failure=Failure("x", "too many")
            )
        assert dict(job.tunables) == {"pdl": True}
        return CompileOutcome(Path("artifact"), isolation={"tier": "strict"})

    def close(self) -> None:
        return None


class Judges:
    def __init__(self) -> None:
        self.jobs: list[JudgeJob] = []

    def judge(self, job: JudgeJob) -> Verdict:
        self.jobs.append(job)
        return verdict(workload(job.options["rows"]))

    def close(self) -> None:
        return None


def test_rows_are_on_disk_before_the_next_workload(tmp_path: Path) -> None:
    judge = Judges()
    services = Services(Compiles(), judge, lambda: judge)
    seed = File(grid.SEED, find(TARGET).seed_source(), {"pdl": True})
    plan = run.Plan(TARGET, "cuda", "sm_90a", seed, seed, ("mix", "graph"), 1000, 60.0, CONTEXT)
    found, _ = grid.workloads(find(TARGET), grid.Asked(Options("tp8", 4), (1, 8, 2), (8192,)))
    out, counts = tmp_path / "rows.jsonl", []
    for rows in run.measured(services, plan, found, 2):
        run.append(out, rows)
        counts.append(len(out.read_text().splitlines()))
    assert counts == [3, 4, 7]
    read = [json.loads(line) for line in out.read_text().splitlines()]
    assert read[3]["status"] == "compile_error" and read[3]["failure"] == "too many"
    assert [(j.steps, j.baselines, j.incumbent) for j in judge.jobs] == [
        (1000, ("mix", "graph"), None)
    ] * 2


def test_artifacts_are_found_by_workload(tmp_path: Path) -> None:
    judge = Judges()
    services = Services(Compiles(), judge, lambda: judge)
    seed = File(grid.SEED, find(TARGET).seed_source(), {"pdl": True})
    mine = replace(CONTEXT, kernel="mine")
    plan = run.Plan(
        TARGET, "cuda", "sm_90a", {grid.key(workload(2).key): tmp_path}, seed, (), 10, 60.0, mine
    )
    found, _ = grid.workloads(find(TARGET), grid.Asked(Options("tp8", 4), (1, 2), (8192,)))
    first, second = run.measured(services, plan, found, 1)
    assert first[0]["status"] == "unsupported" and second[0]["status"] == "passed"
    assert judge.jobs[0].incumbent == Path("artifact")  # the seed is timed beside another kernel
    list(run.measured(services, replace(plan, context=CONTEXT), found, 1))
    assert judge.jobs[1].incumbent is None  # and not beside itself


@pytest.mark.slow
def test_table_and_plot_show_the_arms(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    w = workload()
    rows = [*rows_of(verdict(w), w, CONTEXT), *rows_of(verdict(w, Status.WRONG), w, CONTEXT)]
    rows[0]["notes"] = ["quack: skipped: no module", "cuBLASLt, o_proj: algorithm 2"]
    text = show.table(rows)
    assert "without quack" in text and "without quack, cuBLASLt" not in text
    assert "best baseline" in text and "compile skipped" in text and "wrong in outputs.out" in text
    for heading in (
        "chained us",
        "isolated us",
        "cold L2 us",
        "P99",
        "J/token",
        "% floor",
        "% spec",
    ):
        assert heading in text
    assert {"400", "420", "425"} <= set(text.splitlines()[1].split())
    plot.plot(rows, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_rows_of_several_files_are_one_table(tmp_path: Path) -> None:
    for m in (8, 1):
        w = workload(m)
        run.append(tmp_path / f"{m}.jsonl", rows_of(verdict(w), w, CONTEXT))
    files = [a for m in (8, 1) for a in ("--read", str(tmp_path / f"{m}.jsonl"))]
    result = CliRunner().invoke(main, ["bench", "--target", TARGET, *files, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    arms = ("mix", "seed", "graph")
    assert [(r["m"], r["arm"]) for r in rows] == [(m, a) for m in (1, 8) for a in arms]
    other = [{**rows[0], "target": "kimi-k3-kda"}]
    run.append(tmp_path / "8.jsonl", other)
    result = CliRunner().invoke(main, ["bench", "--target", TARGET, *files, "--json"])
    assert json.loads(result.stdout)["rows"] == rows and "rows of other targets" in result.stderr
    (tmp_path / "bad.jsonl").write_text("[]\n")
    bad = ["bench", "--target", TARGET, "--read", str(tmp_path / "bad.jsonl")]
    assert CliRunner().invoke(main, bad).exit_code == 2


def test_nonsense_is_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["bench", "--target", TARGET, "--rows", "1,x"])
    assert result.exit_code == 2


@pytest.mark.slow
def test_the_command_works_on_cpu(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    result = CliRunner().invoke(
        main,
        ["bench", "--target", "examples/my_target.py:RmsNorm", "--device", "cpu", "--rows", "1", "--json",
         "--db", str(tmp_path / "runs.db"), "-o", str(out)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert row["kind"] == "modelled" and row["us"] > 0 and row["arm"] == "seed"
    assert row["launches_per_layer"] == row["launches"] / row["layers"] >= 1
