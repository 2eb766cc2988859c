"""How judging scales with workers on Ray, and the rates that bound it: calls, messages, results, the record.

    python benchmarks/worker_throughput.py --driver 1000 [--json]
    python benchmarks/worker_throughput.py [--judges 1 2 4 8] [--jobs 16] [--device cpu] [--target T] [--json]

A Ray on this machine for each count of judges; the same `jobs` artifacts (one kernel under different texts, so that
none is a known result) are judged at `screen` by warm workers, and the wall time is taken at the driver. `busy` is the
share of the workers' time in which they judged; `between` what a job costs the driver and the messages beyond that.
Then: empty calls a second, artifacts put and fetched, results written, candidates recorded. On `cpu` a judgement
interprets kernels on the processors, so more judges than processors bring nothing; it says nothing of GPUs.

`--transport threads` does without Ray: the same pool and the same judge processes, messages within one process.
With `--driver N` there is no Ray and no judging: N workers that answer at once, on threads of this process, show what
the driver alone can hand out, check, write down and listen to.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent import fakes, offline
from agent.workspace import Place
from sandbox import artifact_store
from sandbox.jobs import CompileJob, CompileOutcome, JudgeJob
from sandbox.verdict import Verdict
from sandbox.workers import farm, parcel
from sandbox.workers.fake_cluster import FakeCluster
from sandbox.workers.places import Node
from sandbox.workers.station import Setup, Station
from sandbox.workers.transport import Call, Fetch
from targets.base import Options, Workload, find

COMPILES = 4
SECONDS = 2.0


def variants(crew: farm.Crew, target: str, w: Workload, count: int) -> list[CompileOutcome]:
    """Artifacts that differ in their source's hash alone."""
    source = find(target).seed_source()
    jobs = [
        CompileJob(f"{source}\n# variant {i}\n", target, w.key, w.dims, w.buffers)
        for i in range(count)
    ]
    compiler = crew.compiler()
    with ThreadPoolExecutor(COMPILES) as pool:
        outcomes = list(pool.map(compiler.compile, jobs))
    failed = [o for o in outcomes if o.artifact is None]
    if failed:
        raise SystemExit(f"a variant does not compile: {failed[0].failure}")
    return outcomes


def job_of(outcome: CompileOutcome, target: str, w: Workload, device: str) -> JudgeJob:
    assert outcome.artifact is not None
    return JudgeJob(
        outcome.artifact, target, offline.options_json(w.options), device, deadline_s=900.0,
        compile_isolation=dict(outcome.isolation),
    )  # fmt: skip


def judging(crew: farm.Crew, jobs: list[JudgeJob], judges: int) -> dict[str, Any]:
    """One pass over all jobs by workers that have judged before."""
    kind = next(iter(crew.kinds))
    judge = crew.judge(kind)
    crew.pool.settle("judge", None)
    with ThreadPoolExecutor(max(2 * judges, 1)) as pool:
        warm = [replace(jobs[0], seed=i) for i in range(judges)]
        wait([pool.submit(judge.judge, job) for job in warm])
        begin = time.monotonic()
        verdicts = list(pool.map(judge.judge, jobs))
        wall = time.monotonic() - begin
    worked = [v.seconds.get("worker", 0.0) for v in verdicts]
    return {
        "judges": judges, "jobs": len(jobs), "statuses": sorted({str(v.status) for v in verdicts}),
        "wall_s": round(wall, 2), "jobs_per_s": round(len(jobs) / wall, 3),
        "job_s": round(statistics.mean(worked), 3), "busy": round(sum(worked) / (wall * judges), 3),
        "brought_s": round(statistics.mean(v.seconds.get("brought", 0.0) for v in verdicts), 4),
        "verdict_bytes": len(json.dumps(verdicts[0].to_json())),
    }  # fmt: skip


def between(crew: farm.Crew, job: JudgeJob) -> float:
    """Seconds of one job at the driver beyond those at the worker, median of five, nothing else going on."""
    judge = crew.judge(next(iter(crew.kinds)))
    found = []
    for seed in range(1000, 1005):
        begin = time.monotonic()
        verdict = judge.judge(replace(job, seed=seed))
        found.append(time.monotonic() - begin - verdict.seconds["worker"])
    return round(statistics.median(found), 4)


def calls(crew: farm.Crew) -> float:
    """Empty calls a second from this driver to all its workers, 16 under way."""
    members = [m for m in crew.pool.roster.members if m.state == "ready"]
    done, begin = 0, time.monotonic()
    while time.monotonic() - begin < SECONDS:
        wait([members[i % len(members)].worker.call(Call("beat")) for i in range(16)])
        done += 16
    return round(done / (time.monotonic() - begin), 1)


def puts(crew: farm.Crew, folder: Path) -> dict[str, Any]:
    """Packing an artifact and putting it into Ray's store."""
    artifact = artifact_store.load(folder)
    data = parcel.pack_artifact(artifact)
    begin, count = time.monotonic(), 0
    while time.monotonic() - begin < SECONDS:
        crew.pool._cluster.put(parcel.pack_artifact(artifact))
        count += 1
    return {"artifact_bytes": len(data), "puts_per_s": round(count / (time.monotonic() - begin), 1)}


def records(folder: Path, setting: offline.Setting, found: offline.Found) -> dict[str, Any]:
    """Results written by key, and candidates recorded in runs.db, a second."""
    from sandbox.workers.results import Results

    results, place = Results(folder / "results"), Place(folder / "runs.db", folder / "out")
    said = {"verdict": found.verdict.to_json()}
    run = offline.start_record(place, setting)
    rates = {}
    for name, work in (
        ("results_per_s", lambda i: results.put(f"{i:064x}", said)),
        ("records_per_s", lambda i: offline.record(place, run, i, found)),
    ):
        begin, count = time.monotonic(), 0
        while time.monotonic() - begin < SECONDS:
            work(count)
            count += 1
        rates[name] = round(count / (time.monotonic() - begin), 1)
    return rates


class Instant:
    """A worker that has every answer ready: the seed's verdict, said of whatever it is asked about."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict.to_json()

    def handle(self, method: str, header: bytes, fetch: Fetch) -> bytes:
        if method == "hello":
            facts = {"kind": "cuda", "name": "NVIDIA H200", "arch": "sm_90a"}
            return parcel.pack({"versions": {}, "pid": 0, "probe": {"ok": True, "facts": facts}})
        if method != "judge":
            return parcel.pack({})
        sha = parcel.unpack(header)[0]["artifacts"]["artifact"]
        return parcel.pack({"verdict": {**self.verdict, "artifact": sha}})


def driver(count: int) -> dict[str, Any]:
    """Verdicts a second through the pool, and the time to hear `count` hearts, with nothing behind them."""
    verdict = fakes.FakeJudge().judge
    with tempfile.TemporaryDirectory(prefix="kg-throughput-") as folder:
        root = Path(folder)
        compiler = fakes.FakeCompiler(root / "made")
        w = fakes.FakeTarget().workload(Options("tiny"))
        jobs = []
        for i in range(512):
            source = fakes.kernel(100 + i)
            made = compiler.compile(CompileJob(source, "fake", w.key, w.dims, w.buffers))
            jobs.append(job_of(made, "fake", w, "cuda"))
        said = verdict(jobs[0])
        nodes = [Node(f"{i:08x}", f"10.0.{i // 256}.{i % 256}", 64, 8) for i in range(count // 8)]
        cluster = FakeCluster(nodes, lambda post, setup: Instant(said))
        begin = time.monotonic()
        crew = farm.hire(farm.Farm(), farm.Orders("cuda", root / "work", "run"), cluster)
        with closing(crew), ThreadPoolExecutor(32) as pool:
            crew.pool.settle("judge", None)
            hired, begin = time.monotonic() - begin, time.monotonic()
            list(pool.map(crew.judge("h200").judge, jobs))
            judged, begin = time.monotonic() - begin, time.monotonic()
            for _ in range(5):
                crew.pool.roster.tick()
            ticked = (time.monotonic() - begin) / 5
    return {"workers": count, "hired_s": round(hired, 2), "verdicts_per_s": round(len(jobs) / judged, 1),
            "tick_s": round(ticked, 4), "cores": os.cpu_count()}  # fmt: skip


def threads(judges: int) -> FakeCluster:
    """Threads in the place of Ray; jail and judges are the real ones, in their own processes."""
    node = Node("this", "this", judges + COMPILES, 0)
    return FakeCluster([node], lambda post, setup: Station(Setup.of(setup)))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    rates: dict[str, Any] = {}
    w = find(options.target).workload(Options(options.preset))
    with tempfile.TemporaryDirectory(prefix="kg-throughput-") as folder:
        root = Path(folder)
        jobs: list[JudgeJob] = []
        for judges in options.judges:
            orders = farm.Orders(options.device, root / "work", f"scope-{judges}")
            begin = time.monotonic()
            cluster = None if options.transport == "ray" else threads(judges)
            with closing(farm.hire(farm.Farm("", judges, COMPILES), orders, cluster)) as crew:
                first = time.monotonic() - begin
                if not jobs:
                    begin = time.monotonic()
                    outcomes = variants(crew, options.target, w, options.jobs)
                    rates["compiles_per_s"] = round(len(outcomes) / (time.monotonic() - begin), 3)
                    jobs = [job_of(o, options.target, w, options.device) for o in outcomes]
                row = judging(crew, jobs, judges) | {"ready_s": round(first, 1)}
                rows.append(row | {"between_s": between(crew, jobs[0]), "calls_per_s": calls(crew)})
                if judges == options.judges[-1]:
                    rates |= puts(crew, jobs[0].artifact)
                    setting = offline.Setting(options.target, w, options.device, "sm_90a")
                    verdict = crew.judge(next(iter(crew.kinds))).judge(jobs[0])
                    file = offline.File("seed", find(options.target).seed_source(), {})
                    found = offline.Found(file, outcomes[0], verdict)
                    rates |= records(root, setting, found)
    asked = {k: getattr(options, k) for k in ("device", "target", "preset", "transport")}
    return asked | {"cores": os.cpu_count(), "rows": rows, "rates": rates}


def text(data: dict[str, Any]) -> str:
    lines = [
        "| judges | jobs/s | x one judge | a job, s | busy | between, ms | calls/s |",
        "|---|---|---|---|---|---|---|",
    ]
    one = data["rows"][0]["jobs_per_s"] / data["rows"][0]["judges"]
    lines += [
        f"| {r['judges']} | {r['jobs_per_s']} | {r['jobs_per_s'] / one:.2f} | {r['job_s']} | {r['busy']:.0%} | "
        f"{1000 * r['between_s']:.0f} | {r['calls_per_s']:.0f} |" for r in data["rows"]
    ]  # fmt: skip
    return "\n".join([*lines, "", json.dumps(data["rates"])])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--judges", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--target", default="kimi-k3-gemv")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--transport", choices=("ray", "threads"), default="ray")
    parser.add_argument("--driver", type=int, metavar="N")
    options = parser.parse_args()
    if options.driver:
        print(json.dumps(driver(options.driver)))
        return
    data = measure(options)
    print(json.dumps(data, indent=1) if options.json else text(data))


if __name__ == "__main__":
    main()
