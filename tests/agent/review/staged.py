"""A finished run with a rich record: profiles, resources, PTX, intervals; and texts that attack."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from agent.ids import new_run_id
from agent.store.store import CandidateRow, JudgedRow, RunRow
from agent.workspace import Workspace
from sandbox import artifact_store
from sandbox.artifact import Artifact, Buffer, Launch, LaunchPlan, Relocation
from sandbox.judge.waterfall import Span, Step, of_spans
from sandbox.verdict import (
    Correctness,
    Failure,
    KernelResources,
    Outcome,
    Ratio,
    Status,
    TensorCheck,
    Tier,
    Timing,
    Trust,
    Verdict,
    WorkloadTiming,
)

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m$x_1$"
SEED = (
    '"""The seed."""\nimport cutlass\n\n\ndef step(t, cfg, stream):\n    first(t)\n    second(t)\n'
)
BETTER = SEED.replace("first(t)\n    second(t)", "fused(t)  # both at once").replace(
    "The seed.", "Fused."
)
ATTACK = BETTER.replace("Fused.", EVIL) + '\n# <b>bold</b> "quoted" & more\n'
PTX = "\n".join((
    ".version 9.4", ".target sm_90a", ".visible .entry k()", "{", "$L__BB0_1:",
    "ld.acquire.gpu.global.u32 %r1, [%rd1];", "@%p1 bra $L__BB0_1;", "// begin inline asm",
    "red.relaxed.gpu.global.add.u32 [%rd2], 1;", "// end inline asm", "ret;", "}", "",
))  # fmt: skip
PLAIN_PTX = ".version 9.4\n.target sm_90a\n.visible .entry k()\n{\nfence.acq_rel.gpu;\nret;\n}\n"


def artifact(ptx: str, cooperative: bool = False) -> Artifact:
    launch = Launch(
        "kernel_k", (1, 1, 1), (32, 1, 1), bytes(16), (0, 8),
        (Relocation(0, "inputs.x"), Relocation(8, "outputs.y")), cooperative=cooperative,
    )  # fmt: skip
    buffers = (Buffer("inputs.x", "f32", (1024,)), Buffer("outputs.y", "f32", (1024,)))
    return Artifact("fake", {"preset": "tiny"}, "sm_90a", buffers, LaunchPlan(ptx, (launch,)))


def verdict(a: Artifact, us: float, gain: float | None, error: float = 0.1) -> Verdict:
    ratio = None if gain is None else Ratio(gain, gain - 0.01, gain + 0.012)
    workload = WorkloadTiming(
        target="fake", preset="tiny", layers=4, m=1, q=1, context=4096, ranks=8, launches=2, us=us,
        us_per_layer=us / 4, gb_per_s=1e6 / us, floor_bytes=1 << 20,
        fraction_of_floor_measured=40 / us, fraction_of_floor_spec=36 / us,
        speedup_incumbent=ratio, speedup_graph=Ratio(160 / us, 158 / us, 161 / us),
    )  # fmt: skip
    names = ("first", "second") if gain is None else (f"fused {EVIL}"[:60],)
    kernels = [
        {"kernel": n, "calls": 4, "us": us / len(names), "share": 1 / len(names)} for n in names
    ]
    launches = [
        {"first": i, "last": i, "kernel": n, "us": us / len(names), "grid": [1, 1, 1],
         "block": [32, 1, 1], "smem": 4096 * (i + 1), "regs": 40}
        for i, n in enumerate(names)
    ]  # fmt: skip
    return Verdict(
        status=Status.PASSED, target="fake", artifact=a.sha256, tier=Tier.PROMOTE,
        device={"kind": "cuda", "name": "NVIDIA H200"}, trust=Trust.AUDITED,
        isolation={"tier": "strict"}, date="2026-01-01T00:00:00Z",
        outcome=Outcome.NOT_TIMED if gain is None else Outcome.BETTER,
        correctness=Correctness(
            3, 5, 2,
            (TensorCheck("outputs.y", error, 1.0, 0.0, 1.0, 0.0, 1.0, True),
             TensorCheck("states.s", 0.01, 1.0, 0.0, 1.0, 0.0, 0.0, True)),
            ("outputs", "states"), ("long contexts",),
        ),
        timing=Timing("measured", (workload,), aa_half_width=0.002),
        resources=(KernelResources("kernel_k", 40 if gain is None else 168, 0, 0 if gain is None else 16, 0, 128),),
        findings=(Failure("narrow-loads", f"loads of 4 bytes {EVIL}"),),
        checked=("outputs.y", "guard zones"), not_verified=("other devices",),
        profile={
            "method": "prefixes", "step_us": us, "kernels": kernels, "launches": launches,
            "waterfall": of_spans(spans(us), Step(us, 0.4 * us)),
            "timeline": {
                "kind": "measured", "step_us": us, "overhead": 1.01, "blocks": 2, "tracks_seen": 2, "marks_lost": 0,
                "phases": [[f"gemv {EVIL}", "work"], ["meet", "edge"], ["end", "end"]],
                "tracks": [
                    {"track": n, "role": 0, "block": n, "sm": n + 7,
                     "marks": [[0.0, 0, 0], [us / (2 + n), 1, 0], [0.9 * us, 2, 0]]} for n in range(2)
                ],
            },
        },
    )  # fmt: skip


def spans(us: float) -> list[Span]:
    """Two blocks that meet once."""
    found = []
    for n in range(2):
        found += [Span(n, f"gemv {EVIL}", "work", 0, 0.0, us / (2 + n))]
        found += [Span(n, "meet", "edge", 0, us / (2 + n), 0.9 * us)]
    return found


def stage(kit: Any) -> str:
    """Seed, a promoted candidate, a failed one, and a promoted one that attacks; the run is at its end."""
    queries = kit.queries
    store, workspace = queries.store, queries.workspace
    run = new_run_id()
    store.add_run(RunRow(
        run, "fake", "optimize", "cuda", "anthropic", "a-model", {"preset": "tiny", "layers": 4}, {},
        {"kernelgen": "test"}, "2026-01-01T00:00:00Z",
    ))  # fmt: skip
    seed, better = artifact(PLAIN_PTX), artifact(PTX, cooperative=True)
    evil = replace(better, tunables={"stages": 3})
    wrong = replace(verdict(better, 50, 1.2), status=Status.WRONG, outcome=None, timing=None,
                    failure=Failure("tensor", f"outputs.y differs {EVIL}"))  # fmt: skip
    store.add_candidates(run, [
        _row(workspace, (0, 0, None), SEED, seed, verdict(seed, 100, None)),
        _row(workspace, (1, 1, 0), BETTER, better, verdict(better, 80, 1.25, error=0.85)),
        _row(workspace, (2, 1, 0), SEED + "# wrong\n", better, wrong),
        _row(workspace, (3, 2, 1), ATTACK, evil, verdict(evil, 70, 1.143)),
    ])  # fmt: skip
    for round, seq, reason in [
        (0, 0, "the seed"),
        (1, 1, "at least 1.24"),
        (2, 3, f"at least 1.13 {EVIL}"),
    ]:
        store.add_decision(run, {
            "round": round, "kind": "promote", "seq": seq, "reason": reason, "date": f"2026-01-01T00:0{round}:30Z",
        })  # fmt: skip
    store.add_calls(run, [
        {"scope": f"candidate-{n}", "n": 0, "role": "propose", "model": "a-model", "prompt": "0" * 64,
         "answer": "0" * 64, "input_tokens": 1000, "output_tokens": 500, "cache_read_tokens": 0,
         "cache_write_tokens": 0, "cost": 0.25, "seconds": 3.0, "error": None,
         "date": f"2026-01-01T00:0{n}:00Z"}
        for n in (1, 2, 3)
    ])  # fmt: skip
    store.add_lessons(run, 1, [f"fusing pays {EVIL}"])
    store.set_run(run, state="review", stop="rounds", rounds=2, incumbent=3, elapsed=240.0,
                  message=f"a message {EVIL}", updated="2026-01-01T00:04:00Z")  # fmt: skip
    return run


def _row(
    w: Workspace, at: tuple[int, int, int | None], source: str, a: Artifact, v: Verdict
) -> CandidateRow:
    seq, round, parent = at
    a = replace(a, source_sha256=hashlib.sha256(source.encode()).hexdigest())
    artifact_store.save(a, w.artifacts)
    v = replace(v, artifact=a.sha256)
    attack = EVIL if seq == 3 else "fuse"
    return CandidateRow(
        seq=seq, round=round, parent=parent, proposer="anthropic" if seq else "seed",
        direction=f"direction {attack}", note=f"note {attack}", predicted_gain=1.3 if seq else None,
        source=w.put(source), tunables=dict(a.tunables), declared={}, artifact=a.sha256, verdict=v,
        created=f"2026-01-01T00:0{seq}:10Z",
        judged=(JudgedRow(0, v, w.put_verdict(v), dict(a.tunables), a.sha256),), artifacts=(a,),
    )  # fmt: skip
