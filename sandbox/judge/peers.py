"""What only several ranks can get wrong: a rank that comes late, one that runs ahead, one that never comes, and what an
earlier step left in a mailbox.

Steps on two sets of inputs follow each other without a pause, so that whoever does not wait, or overwrites what has not
been read, works with values of another step. On cuda a rank is late because its stream is held for a while; on the cpu
device ranks take turns in other orders, and a rank is left out to see the others' deadlock named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sandbox.artifact import on_rank
from sandbox.devices.base import Faulted
from sandbox.judge.arena import Arena
from sandbox.judge.checks import Moment
from sandbox.judge.ending import Ended
from sandbox.judge.locate import Where
from sandbox.judge.observe import again, difference, differs, observe
from sandbox.judge.rig import copy_in, place_of, undefined_of
from sandbox.verdict import Failure, Status
from targets.reference import Tensors

if TYPE_CHECKING:
    from sandbox.judge.trial import Trial

LATE_NS = (5_000, 100_000, 2_000_000)
QUEUED = 6
"""Steps that are enqueued together, on two sets of inputs in turn."""
ORDERS = 3


def probe(trial: Trial) -> None:
    """Raises Ended or Faulted. Does nothing for a job on one GPU."""
    if trial.rig.case.ranks == 1:
        return
    for one in (_late, _ahead, _left_out):
        one(trial)
    trial.checked.append(
        "results that the ranks have in common hold the same bits on all of them, in every step"
    )


Skew = tuple[str, Callable[[], None]]


def _skews(trial: Trial) -> Iterator[Skew]:
    """Words and what to do before a launch: each rank late by several delays, or other turns."""
    rig, case = trial.rig, trial.rig.case
    if rig.device.kind == "cuda":
        device: Any = rig.device
        for rank in range(case.ranks):
            for ns in LATE_NS:
                yield f"rank {rank} late by {ns / 1000:g} us", partial(device.delay, rank, ns)
        return
    program: Any = rig.program
    for n in range(ORDERS):
        seed = case.seeds.of("turns", n)
        yield f"other turns of the ranks ({n + 1} of {ORDERS})", partial(program.reorder, seed)


def _late(trial: Trial) -> None:
    """One step with the ranks apart leaves what it leaves with them together."""
    rig, case = trial.rig, trial.rig.case
    seed = case.seeds.of("probe", "late")
    rig.set_states(trial.states(seed))
    where = Where(0, 0, "ranks together", case.axes)
    m = observe(rig, trial.inputs(seed, 0), ("random", seed), where)
    trial.judge(m, "share")
    count = 0
    for words, skew in _skews(trial):
        other = _apart(trial, m, (words, skew))
        failure = difference(m, other) if trial.deterministic else None
        if failure is not None:
            text = f"with {words}, {failure.message}"
            raise Ended(Status.FLAKY, replace(failure, rule="skew", message=text), trial.result())
        if not trial.deterministic:
            trial.judge(other, "share")
        count += 1
    trial.checked.append(f"{count} steps with the ranks apart in time")


def _apart(trial: Trial, m: Moment, how: Skew) -> Moment:
    """The step of `m` again; everything is in place before the ranks are set apart."""
    rig, (words, skew) = trial.rig, how
    rig.set_states(m.before)
    for b in rig.case.buffers("outputs"):
        rig.arena[b.name].copy_(m.before[b.name])
    rig.dirty_scratch("random", rig.case.seeds.of("apart", words))
    rig.device.synchronize()
    skew()
    where = Where(0, 0, words, rig.case.axes)
    rig.launch(where.text())
    return replace(m, after=rig.copy_out("outputs", "states"), where=where)


def _ahead(trial: Trial) -> None:
    """Steps enqueued together, so that a rank can be a step ahead, leave what they leave one by one."""
    rig, case = trial.rig, trial.rig.case
    if not trial.deterministic or any(
        (b.init, b.lifetime) == ("zero", "step") for b in rig.artifact.buffers
    ):
        trial.not_verified.append(
            "a rank that runs ahead: float atomics, or scratch that has to be cleared between steps"
        )
        return
    line = _Line(trial)
    apart = line.run(lambda: None, wait=True)
    count = 0
    for words, skew in _skews(trial):
        together = line.run(skew, wait=False)
        failure = differs(apart, together, Where(0, QUEUED, words, case.axes))
        if failure is not None:
            text = f"{QUEUED} steps without a pause, {words}: {failure.message}"
            raise Ended(
                Status.WRONG, replace(failure, rule="run-ahead", message=text), trial.result()
            )
        count += 1
    trial.checked.append(
        f"{QUEUED} steps without a pause on inputs that alternate, {count} times with the ranks apart: the same bits "
        "as one by one (mailboxes are never reset and hold what the step before left)"
    )


class _Line:
    """A row of steps on two sets of inputs and outputs in turn, from the same states."""

    def __init__(self, trial: Trial) -> None:
        rig, case = trial.rig, trial.rig.case
        self.rig = rig
        seed = case.seeds.of("probe", "ahead")
        self.states = trial.states(seed)
        self.inputs = [trial.inputs(seed, k) for k in range(2)]
        named = [(b.name, b) for b in case.buffers("inputs", "outputs")]
        self.second = Arena(named, place_of(case, "second inputs"))
        bound = rig.program.bind("step", {**rig.arena, **self.second}, undefined_of(rig.artifact))
        self.steps = (rig.step, bound)
        copy_in(self.second, self.inputs[1], case.buffers("inputs"))

    def run(self, skew: Callable[[], None], wait: bool) -> Tensors:
        """Outputs of the last two steps and the states after them. Raises Faulted."""
        rig, case = self.rig, self.rig.case
        rig.set_states(self.states)
        rig.set_inputs(self.inputs[0])
        rig.device.synchronize()
        skew()
        if wait:
            for k in range(QUEUED):
                self.steps[k % 2].launch()
                rig.device.synchronize()
        else:
            device: Any = rig.device
            with device.held():
                for k in range(QUEUED):
                    self.steps[k % 2].launch()
            rig.device.synchronize()
        rig.check_guards("steps without a pause")
        rig.check_integrity("steps without a pause")
        found = rig.copy_out("outputs", "states")
        for b in case.buffers("outputs"):
            found[f"second {b.name}"] = case.copy(self.second[b.name])
        return found


def _left_out(trial: Trial) -> None:
    """Without one rank the others must wait for ever (cpu: a named deadlock), or at least not have its results."""
    rig, case = trial.rig, trial.rig.case
    crew: Any = getattr(rig.program, "crew", None)
    if rig.device.kind != "cpu" or crew is None:
        trial.not_verified.append(
            "a rank that never comes (the others would hang; cpu device only)"
        )
        return
    seed = case.seeds.of("probe", "left out")
    rig.set_states(trial.states(seed))
    m = observe(rig, trial.inputs(seed, 0), ("random", seed), Where(0, 0, "all ranks", case.axes))
    told = []
    for rank in range(case.ranks):
        crew.skip = frozenset({rank})
        try:
            other = again(rig, m, ("random", seed), Where(0, 0, f"without rank {rank}", case.axes))
            told.append(f"without rank {rank} the others end")
            _told_apart(trial, rank, {n: (m.after[n], t) for n, t in other.after.items()})
        except Faulted as end:
            told.append(f"without rank {rank}: {end.status} ({end.failure.rule})")
        finally:
            crew.skip = frozenset()
            rig.renew()  # mailboxes are out of step now
    trial.checked.append(f"each rank left out once: {'; '.join(told)}")


def _told_apart(
    trial: Trial, left_out: int, pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """A finding where results that all ranks share do not depend on one of them."""
    case = trial.rig.case
    shared = getattr(case.reference, "replicated", lambda w: ())(case.workload)
    other = 0 if left_out else 1
    for name in shared:
        name = on_rank(name, other)
        if _same(*pairs[name]):
            text = (
                f"without rank {left_out}, {name} is what it is with it: nothing is exchanged there"
            )
            trial.findings.append(Failure("left-out", text, {"rank": left_out, "tensor": name}))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = (x.contiguous().view(-1).view(torch.uint8) for x in (a, b))
    return bool(torch.equal(*raw))
