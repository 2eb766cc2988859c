"""The correctness trial: trajectories of a candidate from secret seeds, each step against the oracle, then repeats.

Steps are teacher-forced: the states that the candidate left (and that were checked) feed the oracle's next step, so
that noise does not pile up. For every seed all launches come first, the oracle after them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sandbox.judge import poison
from sandbox.judge.atomics import float_atomics
from sandbox.judge.checks import Checker, Moment
from sandbox.judge.dtypes import bits, same_bits
from sandbox.judge.ending import Ended
from sandbox.judge.locate import Where, first_index, spell
from sandbox.judge.rig import Rig
from sandbox.judge.tiers import Effort
from sandbox.verdict import Correctness, Failure, Status, TensorCheck
from targets.reference import Tensors

REGENERATED_BYTES = 512 << 20


@dataclass(frozen=True)
class Taken:
    """One step as copied from the device. Inputs are made again from the seed when the oracle needs them."""

    seed: int
    step: int
    before: Tensors
    after: Tensors
    where: Where


@dataclass
class Trial:
    """State of one candidate's correctness run; `result` is what has been shown so far."""

    rig: Rig
    effort: Effort
    checker: Checker
    seeds: int = 0
    repeats: int = 0
    steps: int = 0
    weights_renewed: int = 0
    checked: list[str] = field(default_factory=list)
    not_verified: list[str] = field(default_factory=list)
    deterministic: bool = True

    def run(self) -> None:
        """All seeds. Raises Ended at the first failure; Refused or Faulted as devices do."""
        self.deterministic = not float_atomics(self.rig.artifact)
        for i in range(self.effort.seeds):
            self._seed(i)
        self._describe()

    def result(self) -> Correctness:
        tensors: tuple[TensorCheck, ...] = tuple(self.checker.worst.values())
        return Correctness(
            self.seeds,
            self.steps,
            self.repeats,
            tensors,
            tuple(self.checked),
            tuple(self.not_verified),
        )

    def _seed(self, i: int) -> None:
        case, rig = self.rig.case, self.rig
        seed = case.seeds.of("trial", i)
        reference, w, on = case.reference, case.workload, case.device.torch_device
        if i == 0 or case.group_bytes("weights") <= REGENERATED_BYTES:
            rig.load_weights(reference.weights(w, case.seeds.of("weights", i), on))
            self.weights_renewed += 1
        rig.set_states(reference.states(w, seed, on))
        taken = [self._step(i, seed, k) for k in range(self.effort.steps)]
        repeats = self._repeat(taken[-1], self.effort.repeats) if i == 0 else []
        rig.check_integrity(f"seed {i}")
        self.seeds += 1
        for t in taken:
            fresh = self.effort.fresh_bands or i == 0
            self._judge(t, fresh)
        self.steps = max(self.steps, len(taken))
        self._compare(taken[-1], repeats)

    def _step(self, i: int, seed: int, k: int) -> Taken:
        rig, case = self.rig, self.rig.case
        rig.set_inputs(self._inputs(seed, k))
        rig.dirty(poison.CYCLE[(i + k) % len(poison.CYCLE)], case.seeds.of("poison", i, k))
        before = rig.copy_out("outputs", "states")
        where = Where(i, k, axes=case.axes)
        rig.launch(where.text())
        rig.check_integrity(where.text(), ("inputs", "constants"))
        return Taken(seed, k, before, rig.copy_out("outputs", "states"), where)

    def _inputs(self, seed: int, k: int) -> Tensors:
        case = self.rig.case
        return case.reference.inputs(case.workload, seed, k, case.device.torch_device)

    def _repeat(self, t: Taken, times: int) -> list[Taken]:
        """The same step from the same states and poison; persistent scratch keeps what the last launch left."""
        out = []
        for n in range(times):
            self.rig.set_states(t.before)
            for b in self.rig.case.buffers("outputs"):
                self.rig.arena[b.name].copy_(t.before[b.name])
            kind = poison.CYCLE[n % len(poison.CYCLE)]
            self.rig.dirty_scratch(kind, self.rig.case.seeds.of("scratch", n))
            where = Where(t.where.seed, t.step, f"repeat {n + 1} of {times}", t.where.axes)
            self.rig.launch(where.text())
            out.append(
                Taken(t.seed, t.step, t.before, self.rig.copy_out("outputs", "states"), where)
            )
        return out

    def _judge(self, t: Taken, fresh: bool) -> None:
        failure = self.checker.check(self._moment(t), fresh)
        if failure is not None:
            raise Ended(Status.WRONG, failure, self.result())

    def _moment(self, t: Taken) -> Moment:
        rig = self.rig
        weights = {n: rig.arena[n] for n in rig.names("weights")}
        states = {b.name: t.before[b.name] for b in rig.case.buffers("states")}
        given = {**weights, **states, **self._inputs(t.seed, t.step)}
        return Moment(given, t.before, t.after, t.where)

    def _compare(self, first: Taken, repeats: list[Taken]) -> None:
        """Bit for bit, or inside the band where the PTX adds floats atomically."""
        self.repeats += len(repeats)
        if self.deterministic:
            differing = [t for t in repeats if _differs(first, t)]
            if differing:
                raise Ended(Status.FLAKY, _flaky(first, differing, len(repeats)), self.result())
            return
        for t in repeats:
            failure = self.checker.check(self._moment(t), fresh_band=False)
            if failure is not None:
                raise Ended(Status.FLAKY, failure, self.result())

    def _describe(self) -> None:
        outputs = len(self.rig.case.buffers("outputs"))
        states = len(self.rig.case.buffers("states"))
        said = self.checked
        said.append(
            f"{outputs} outputs and {states} states of {self.seeds} secret seeds x {self.steps} steps against the fp64 "
            f"oracle, bounds from {len(self.rig.case.reference.schedules)} schedules; each step judged from the states "
            "that the candidate itself left"
        )
        kind = (
            "bit for bit"
            if self.deterministic
            else "inside the noise band (the PTX adds floats atomically)"
        )
        said.append(f"{self.repeats} repeats of one step from the same states agree {kind}")
        said.append(
            "outputs and scratch poisoned with random values, NaN and stale results before launches"
        )
        said.append(
            "guard zones around every buffer intact; inputs, weights and constants unmodified"
        )
        if states:
            said.append("regions of outputs and states that a step must not touch unchanged")
        if self.checker.tied_rows:
            said.append(f"{self.checker.tied_rows} rows chose differently inside a proved tie")
        if self.weights_renewed < self.seeds:
            self.not_verified.append(
                f"one set of weights for all {self.seeds} seeds (too large to make anew); states and inputs differ"
            )


def _differs(a: Taken, b: Taken) -> bool:
    return any(not same_bits(a.after[n], b.after[n]) for n in a.after)


def _flaky(first: Taken, differing: list[Taken], of: int) -> Failure:
    other = differing[0]
    name = next(n for n in first.after if not same_bits(first.after[n], other.after[n]))
    bad = bits(first.after[name]) != bits(other.after[name])
    at = first_index(bad)
    message = (
        f"{len(differing)} of {of} repeats of one step from the same states differ; first in {name} at "
        f"{spell(at, other.where.names(name))} ({other.where.text()})"
    )
    where = {
        "tensor": name,
        "first": at,
        "repeats": of,
        "differing": len(differing),
        "step": other.step,
    }
    return Failure("repeat", message, where)
