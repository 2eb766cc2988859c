"""How often the judge's timing is wrong about two kernels that it should not, or should, tell apart. Needs a GPU.

    python benchmarks/timing_power.py [--trials 1000] [--gains 100] [--gain 0.01] [--seconds 110] [--json]

A trial is what a judgement at tier full does with candidate and incumbent: ABBA blocks of chains in one process, the
A/A check on the incumbent, the bootstrap, the margin, and once more where the A/A check fails. In the first kind both
are copies of one kernel of a few microseconds (A/A); in the second the incumbent does `gain` more work, measured by a
long calibration. Printed: how many A/A trials end in "better" or "worse", and how many gains are found. Correctness is
not part of it: the kernel's output is compared once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from sandbox.artifact import Artifact, Buffer, Launch, LaunchPlan, Relocation
from sandbox.judge import stats
from sandbox.judge.ranking import outcome
from sandbox.judge.tiers import FULL
from sandbox.verdict import Outcome, Ratio

CHAIN = FULL.chain
TARGET_US = 5.0
THREADS = 128
CALIBRATION_REPEATS = 400

_PTX = """\
.version 8.8
.target {arch}
.address_size 64
.visible .entry busy(.param .u64 busy_y, .param .u32 busy_n)
.reqntid 128, 1, 1
{{
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [busy_y];
    ld.param.u32 %r1, [busy_n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.s32 %r4, %r2, 128, %r3;
    cvt.rn.f32.s32 %f1, %r4;
    mov.u32 %r5, 0;
$AGAIN:
    fma.rn.f32 %f1, %f1, 0f3F000000, 0f3F800000;
    add.s32 %r5, %r5, 1;
    setp.lt.s32 %p1, %r5, %r1;
    @%p1 bra $AGAIN;
    mul.wide.u32 %rd2, %r4, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.f32 [%rd3], %f1;
    ret;
}}
"""


def busy(arch: str, blocks: int, rounds: int) -> Artifact:
    """`rounds` dependent multiply-adds in every thread of `blocks` blocks; all results tend to 2."""
    launch = Launch(
        kernel="busy",
        grid=(blocks, 1, 1),
        block=(THREADS, 1, 1),
        params=bytes(8) + rounds.to_bytes(4, "little"),
        param_offsets=(0, 8),
        relocations=(Relocation(0, "outputs.y"),),
    )
    return Artifact(
        target="timing-power",
        workload={"rounds": rounds},
        arch=arch,
        buffers=(Buffer("outputs.y", "f32", (blocks * THREADS,), align=16),),
        step=LaunchPlan(_PTX.format(arch=arch), (launch,)),
        source_sha256="0" * 64,
    )


@dataclass(frozen=True)
class Chain:
    """An arm: CHAIN launches as one graph."""

    name: str
    graph: Any
    steps: int = CHAIN
    launches: int = 1

    def replay(self) -> None:
        self.graph.launch()


class Bench:
    """The device, its clock, and busy kernels as arms."""

    def __init__(self) -> None:
        import torch

        from sandbox.devices.cuda import CudaDevice
        from sandbox.judge.clock import CudaClock

        self.device = CudaDevice.open(0)
        self.clock = CudaClock(self.device)
        facts = self.device.facts()
        self.arch, self.sms, self.name = facts.arch, facts.sms, facts.name
        self.y = torch.zeros(self.sms * THREADS, dtype=torch.float32, device="cuda")

    def arm(self, name: str, rounds: int) -> Chain:
        """A module of its own for each arm, as candidate and incumbent have."""
        program = self.device.load(busy(self.arch, self.sms, rounds))
        bound = program.bind("step", {"outputs.y": self.y})
        bound.launch()
        self.device.synchronize()
        assert float((self.y - 2).abs().max()) < 1e-3

        def steps() -> None:
            for _ in range(CHAIN):
                bound.launch()

        steps()
        return Chain(name, self.device.record(steps, CHAIN))

    def us(self, arm: Chain, repeats: int = 50) -> float:
        times = [self.clock.time(arm.replay) / arm.steps for _ in range(repeats)]
        return float(np.median(times))

    def rounds_for(self, us: float) -> int:
        """Rounds of about `us` microseconds, from two points on a line."""
        low, high = 1000, 5000
        a, b = self.us(self.arm("low", low)), self.us(self.arm("high", high))
        slope = (b - a) / (high - low)
        return max(100, round(low + (us - a) / slope))

    def slower(self, base: int, gain: float) -> tuple[int, float]:
        """Rounds whose time is `1 + gain` of those of `base`, and the ratio that a long interleaved run measures."""
        more, wanted = base, 1.0 + gain
        a = self.arm("base", base)
        for _ in range(3):
            b = self.arm("more", more)
            pairs = [(self.clock.time(a.replay), self.clock.time(b.replay)) for _ in range(200)]
            ta, tb = (float(np.median([p[i] for p in pairs])) for i in (0, 1))
            per_round = self._slope(base) * CHAIN
            more += round((wanted * ta - tb) / per_round)
        b = self.arm("more", more)
        pairs = [
            (self.clock.time(a.replay), self.clock.time(b.replay))
            for _ in range(CALIBRATION_REPEATS)
        ]
        return more, float(np.median([y for _, y in pairs]) / np.median([x for x, _ in pairs]))

    def _slope(self, base: int) -> float:
        step = max(200, base // 2)
        return (self.us(self.arm("s1", base + step)) - self.us(self.arm("s0", base))) / step

    def trial(self, candidate: Chain, incumbent: Chain) -> dict[str, stats.Samples]:
        """Samples of one timing run: FULL.blocks blocks of candidate, incumbent and its twin."""
        from sandbox.judge import timing
        from sandbox.judge.session import Twin

        arms = [candidate, incumbent, Twin(incumbent)]
        session: Any = SimpleNamespace(
            arms=arms, lanes=SimpleNamespace(restore=lambda: None), timed_us=0.0, conditions=[],
            clock=SimpleNamespace(time=self.clock.time, conditions=dict),
        )  # fmt: skip
        samples: dict[str, list[list[float]]] = {a.name: [] for a in arms}
        check: Any = SimpleNamespace(timed=lambda arm: None)
        for i in range(FULL.blocks):
            timing.block(session, i, samples, check)
        return {k: np.asarray(v, dtype=np.float64) for k, v in samples.items()}


@dataclass(frozen=True)
class Decision:
    """What the judge would say. `aa_sound` false: it would time again."""

    ratio: Ratio
    margin: float
    aa_sound: bool

    @property
    def better(self) -> bool:
        return outcome(self.ratio, None, self.margin) is Outcome.BETTER

    @property
    def worse(self) -> bool:
        return self.ratio.high < 1 - self.margin


def decide(samples: Mapping[str, stats.Samples]) -> Decision:
    even = stats.paired(samples)
    test = stats.self_test(even["incumbent"], even["twin"], FULL.resamples)
    ratio = stats.ratio([even["incumbent"]], [even["candidate"]], FULL.resamples)
    return Decision(ratio, test.margin, test.sound)


def collect(
    bench: Bench, pair: tuple[Chain, Chain], count: int, until: float
) -> list[dict[str, stats.Samples]]:
    out = []
    while len(out) < count and time.monotonic() < until:
        out.append(bench.trial(*pair))
    return out


def summary(decisions: list[Decision], again: Callable[[], Decision]) -> dict[str, Any]:
    """Counts over trials; one whose A/A check failed is timed again, and lost if it fails again."""
    final, repeated, lost = [], 0, 0
    for d in decisions:
        if not d.aa_sound:
            repeated += 1
            d = again()
        if d.aa_sound:
            final.append(d)
        else:
            lost += 1
    widths = [d.ratio.high - d.ratio.low for d in final]
    return {
        "trials": len(decisions), "better": sum(d.better for d in final), "worse": sum(d.worse for d in final),
        "timed_again": repeated, "infra": lost,
        "interval_without_1": sum(not d.ratio.low <= 1 <= d.ratio.high for d in final),
        "median_ratio": float(np.median([d.ratio.value for d in final])) if final else None,
        "median_width": float(np.median(widths)) if final else None,
        "median_margin": float(np.median([d.margin for d in final])) if final else None,
        "largest_margin": max((d.margin for d in final), default=None),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--gains", type=int, default=100)
    parser.add_argument("--gain", type=float, default=0.01)
    parser.add_argument("--seconds", type=float, default=110.0, help="of timing on the GPU at most")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    bench = Bench()
    conditions = [dict(bench.clock.conditions())]
    rounds = bench.rounds_for(TARGET_US)
    same = (bench.arm("candidate", rounds), bench.arm("incumbent", rounds))
    more, measured = bench.slower(rounds, asked.gain)
    apart = (bench.arm("candidate", rounds), bench.arm("incumbent", more))
    begin = time.monotonic()
    share = asked.seconds * asked.gains / max(1, asked.gains + asked.trials)
    gained = collect(bench, apart, asked.gains, begin + share)
    twins = collect(bench, same, asked.trials, begin + asked.seconds)
    seconds = time.monotonic() - begin
    conditions.append(dict(bench.clock.conditions()))
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(decide, [*twins, *gained], chunksize=8))
    result = {
        "device": bench.name, "kernel_us": bench.us(same[0]), "blocks": FULL.blocks, "chain": CHAIN,
        "resamples": FULL.resamples, "seconds_per_trial": seconds / max(1, len(twins) + len(gained)),
        "aa": summary(found[: len(twins)], lambda: decide(bench.trial(*same))),
        "gain": {
            "wanted": asked.gain, "measured": measured - 1,
            **summary(found[len(twins) :], lambda: decide(bench.trial(*apart))),
        },
        "conditions": conditions,
    }  # fmt: skip
    print(json.dumps(result, indent=1) if asked.json else _table(result))
    return 0


def _table(r: Mapping[str, Any]) -> str:
    aa, gain = r["aa"], r["gain"]
    wrong = aa["better"] + aa["worse"]
    return "\n".join([
        f"{r['device']}: kernel of {r['kernel_us']:.2f} us, {r['blocks']} blocks of {r['chain']} steps, "
        f"{r['seconds_per_trial']:.3f} s a trial",
        f"A/A: {wrong} of {aa['trials']} called different ({wrong / max(1, aa['trials']):.2%}); {aa['timed_again']} "
        f"timed again, {aa['infra']} given up; median interval {aa['median_width']:.3%} wide",
        f"gain of {gain['measured']:.2%}: found in {gain['better']} of {gain['trials']}, lost as worse in "
        f"{gain['worse']}; {gain['timed_again']} timed again, {gain['infra']} given up",
    ])  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
