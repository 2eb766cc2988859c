"""Two more probes of the full tier: barrier counters that run over, and a GPU on which other work holds many SMs.

Counters are not known by name. Persistent scratch whose words grow by the same amount from step to step is set forward
as by millions of steps, to just before the words run over 2^31 and 2^32; a right kernel arrives there some day, so it
must leave the same bits across that border. Scratch that changes in any other way is left alone, and that is said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sandbox.artifact import Launch
from sandbox.devices.base import Faulted
from sandbox.devices.cuda_plan import ParamBlock
from sandbox.judge import liveness
from sandbox.judge.checks import Moment
from sandbox.judge.ending import Ended
from sandbox.judge.locate import Where
from sandbox.judge.observe import again, difference, observe
from sandbox.judge.rig import Rig
from sandbox.verdict import Failure, Status

if TYPE_CHECKING:
    from sandbox.judge.trial import Trial

PERIODS = {"cuda": (1, 2, 4), "cpu": (1, 2)}
BORDERS = (1 << 31, 1 << 32)
WORD = 1 << 32
ACROSS = 4
"""Periods that are run from before the border to behind it."""
CYCLE = {"cuda": 12, "cpu": 4}
"""Jumps are whole multiples of it: what alternates with a count (two boxes by its parity, three buffers in turn) stands
where it stood. A jump of an odd number of steps rejected a right kernel."""
MOST_JUMPS = {"cuda": 6, "cpu": 2}
HOLD_NS = 2_000_000
SHARES = (0.25, 0.5, 0.9)
Words = list[torch.Tensor]


@dataclass(frozen=True)
class Growth:
    """Words of persistent scratch now, and by how much each grows in `period` steps."""

    now: Words
    step: Words
    period: int


def run(trial: Trial) -> None:
    """Both probes. Raises Ended, Faulted."""
    for probe in (_counters, _fewer_sms):
        probe(trial)


def _start(trial: Trial, label: str) -> tuple[Moment, Where]:
    case, rig = trial.rig.case, trial.rig
    seed = case.seeds.of("stress", label)
    rig.set_states(trial.states(seed))
    where = Where(0, 0, label, case.axes)
    return observe(rig, trial.inputs(seed, 0), ("random", seed), where), where


def _counters(trial: Trial) -> None:
    rig = trial.rig
    tensors = counter_tensors(rig)
    if not tensors or not trial.deterministic:
        return
    m, where = _start(trial, "counters")
    growth = _growth(rig, m, where, tensors)
    if growth is None:
        trial.not_verified.append(
            "counters near overflow: persistent scratch does not change evenly from step to step"
        )
        return
    jumps = jumps_of(growth, CYCLE[rig.device.kind])[: MOST_JUMPS[rig.device.kind]]
    for steps in jumps:
        _jump(trial, (m, where), (growth, tensors), steps)
    if jumps:
        far = f"set forward by up to {max(jumps):.3g} steps"
        trial.checked.append(
            f"counters {far} run over 2^31 and 2^32, {len(jumps)} times: same bits"
        )


def counter_tensors(rig: Rig) -> Words:
    """32-bit integers of scratch that lasts and began as zero, as int32 views."""
    return [
        rig.arena[b.name].view(-1).view(torch.int32)
        for b in rig.artifact.buffers
        if (b.init, b.lifetime) == ("zero", "persistent")
        and b.dtype in ("i32", "u32")
        and b.name != liveness.NAME
    ]


def _growth(rig: Rig, m: Moment, where: Where, tensors: Words) -> Growth | None:
    """By how much words grow, seen over twice the longest period; None if not evenly."""
    seen: list[Words] = []
    periods = PERIODS[rig.device.kind]
    for n in range(2 * max(periods) + 1):
        again(rig, m, ("random", n), where)
        seen.append([t.clone() for t in tensors])
    for period in periods:
        steps = [
            [b - a for a, b in zip(seen[k], seen[k + period], strict=True)]
            for k in range(0, len(seen) - period, period)
        ]
        if all(
            torch.equal(x, y) for other in steps[1:] for x, y in zip(steps[0], other, strict=True)
        ):
            return Growth(seen[-1], steps[0], period)
    return None


def jumps_of(growth: Growth, cycle: int) -> list[int]:
    """Numbers of steps after which some word is just before a border, whole cycles, without doubles."""
    found: set[int] = set()
    for now, step in zip(growth.now, growth.step, strict=True):
        grown = step > 0
        if not bool(grown.any()):
            continue
        unique: Any = torch.unique  # untyped in torch
        pairs = unique(torch.stack([now[grown], step[grown]], 1), dim=0)[:64].tolist()
        for value, by in pairs:
            for border in BORDERS:
                left = (border - value % WORD - 1) // by - 1
                if left > ACROSS:
                    whole = math.lcm(cycle, growth.period)
                    found.add(left * growth.period // whole * whole)
    return sorted(found - {0})


def _jump(trial: Trial, at: tuple[Moment, Where], what: tuple[Growth, Words], steps: int) -> None:
    """Set all words forward, run across the border, set them back."""
    (m, where), (growth, tensors), rig = at, what, trial.rig
    times = steps // growth.period
    for t, now, step in zip(tensors, growth.now, growth.step, strict=True):
        t.copy_(as_words(now.to(torch.int64) + step.to(torch.int64) * times))
    told = f"with its counters as after {steps:.3g} steps"
    for n in range(ACROSS * growth.period + math.lcm(CYCLE[rig.device.kind], growth.period)):
        try:
            found = difference(m, again(rig, m, ("random", n), where))
        except Faulted as end:
            failure = replace(end.failure, message=f"{told}: {end.failure.message}")
            raise Faulted(end.status, failure) from end
        if found is not None:
            failure = Failure(
                "counters", f"{told}, {found.message}", {**found.where, "steps": steps}
            )
            raise Ended(Status.WRONG, failure, trial.result())
    for t, now in zip(tensors, growth.now, strict=True):
        t.copy_(now)


def as_words(x: torch.Tensor) -> torch.Tensor:
    """The low 32 bits as int32."""
    low = torch.remainder(x, WORD)
    return torch.where(low >= WORD // 2, low - WORD, low).to(torch.int32)


_HOLD_PTX = """\
.version 8.8
.target {arch}
.address_size 64
.extern .shared .align 16 .b8 hold_room[];
.visible .entry kernelgen_hold(.param .u64 hold_ns)
.reqntid 32, 1, 1
{{
    .reg .pred %p<2>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [hold_ns];
    mov.u64 %rd2, %globaltimer;
    add.s64 %rd3, %rd2, %rd1;
AGAIN:
    nanosleep.u32 1000;
    mov.u64 %rd4, %globaltimer;
    setp.lt.u64 %p1, %rd4, %rd3;
    @%p1 bra AGAIN;
    ret;
}}
"""


class Holder:
    """A kernel of ours that keeps SMs for itself for a bounded time: a block takes all of an SM's shared memory."""

    def __init__(self, device: Any, stream: int) -> None:
        from sandbox.assemble import assemble

        facts = device.facts()
        self.driver, self.stream, self.room = device.driver, stream, int(facts.smem_optin_bytes)
        self.module = self.driver.load(
            assemble(_HOLD_PTX.format(arch=facts.arch), facts.arch).cubin
        )
        self.kernel = self.driver.kernel(self.module, "kernelgen_hold")
        self.driver.allow(self.kernel, self.room, 1)

    def hold(self, sms: int, ns: int = HOLD_NS) -> None:
        """Enqueue; it ends by itself."""
        launch = Launch(
            "kernelgen_hold", (sms, 1, 1), (32, 1, 1), bytes(8), (0,), (), smem=self.room
        )
        params = ParamBlock(ns.to_bytes(8, "little"), (0,))
        self.driver.launch([self.driver.call(self.kernel, launch, params, self.stream, pdl=False)])


def _fewer_sms(trial: Trial) -> None:
    """Repeats while blocks of ours occupy a share of the SMs (cuda). A cooperative grid waits for them to end."""
    rig = trial.rig
    if rig.device.torch_device == "cpu":
        return
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    holder = Holder(rig.device, side.cuda_stream)
    m, _ = _start(trial, "fewer SMs")
    total = rig.device.facts().sms
    for share in SHARES:
        busy = max(1, int(total * share))
        side.synchronize()
        holder.hold(busy)
        where = Where(0, 0, f"{busy} of {total} SMs taken", rig.case.axes)
        _compare(trial, m, again(rig, m, ("random", busy), where))
    side.synchronize()
    trial.repeats += len(SHARES)
    taken = ", ".join(f"{share:.0%}" for share in SHARES)
    trial.checked.append(f"repeats while another kernel holds {taken} of the SMs")


def _compare(trial: Trial, m: Moment, other: Moment) -> None:
    if not trial.deterministic:
        trial.judge(other, "share")
        return
    failure = difference(m, other)
    if failure is not None:
        raise Ended(Status.FLAKY, replace(failure, rule="fewer-sms"), trial.result())
