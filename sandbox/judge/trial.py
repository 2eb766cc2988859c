"""The correctness trial: trajectories of a candidate from secret seeds, each step against the oracle, then repeats.

Steps are teacher-forced: the states that the candidate left (and that were checked) feed the oracle's next step, so
that noise does not pile up. The oracle of a step runs after all launches of that step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sandbox.judge import experts, peers, poison, probes, smallest
from sandbox.judge.atomics import float_atomics
from sandbox.judge.checks import Band, Checker, Moment
from sandbox.judge.ending import Ended
from sandbox.judge.locate import Where
from sandbox.judge.observe import Repeats, observe, repeat
from sandbox.judge.rig import Rig
from sandbox.judge.tiers import Effort
from sandbox.judge.unusual import Unusual
from sandbox.verdict import Correctness, Failure, Status, TensorCheck
from targets.reference import Tensors

REGENERATED_BYTES = 64 << 20


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
    findings: list[Failure] = field(default_factory=list)
    deterministic: bool = True

    def run(self) -> None:
        """All seeds, then what the tier adds. Raises Ended at the first failure; Refused or Faulted as devices do."""
        self.deterministic = not float_atomics(self.rig.artifact)
        for i in range(self.effort.seeds):
            self._seed(i)
        self._describe()
        peers.probe(self)
        if self.effort.distributions:
            self._unusual(
                self.rig.case.reference.distributions(self.rig.case.workload), "distribution"
            )
        if self.effort.held_out:
            self._held_out()
        if self.effort.probes:
            probes.run(self)

    def result(self) -> Correctness:
        tensors: tuple[TensorCheck, ...] = tuple(self.checker.worst.values())
        said, unsaid = tuple(self.checked), tuple(self.not_verified)
        return Correctness(self.seeds, self.steps, self.repeats, tensors, said, unsaid)

    def judge(self, m: Moment, band: Band) -> None:
        """Compare with the oracle. Raises Ended."""
        failure = self.checker.check(m, band)
        if failure is not None:
            explained = experts.named(self, m, failure)
            raise Ended(Status.WRONG, smallest.shrunk(self, m, explained), self.result())

    def inputs(self, seed: int, k: int) -> Tensors:
        case = self.rig.case
        return case.reference.inputs(case.workload, seed, k, case.device.torch_device)

    def states(self, seed: int) -> Tensors:
        case = self.rig.case
        return case.reference.states(case.workload, seed, case.device.torch_device)

    def _seed(self, i: int) -> None:
        case, rig = self.rig.case, self.rig
        seed = case.seeds.of("trial", i)
        if i == 0 or case.group_bytes("weights") <= REGENERATED_BYTES:
            made = case.reference.weights(
                case.workload, case.seeds.of("weights", i), case.device.torch_device
            )
            rig.load_weights(made)
            self.weights_renewed += 1
        rig.set_states(self.states(seed))
        steps = max(self.effort.steps, self.effort.long) if i == 0 else self.effort.steps
        for k in range(steps):
            dirt = (poison.CYCLE[(i + k) % len(poison.CYCLE)], case.seeds.of("poison", i, k))
            m = observe(rig, self.inputs(seed, k), dirt, Where(i, k, axes=case.axes))
            last = i == 0 and k == self.effort.steps - 1
            found = repeat(rig, m, self.effort.repeats) if last else None
            learn = k == 0 and (self.effort.fresh_bands or i == 0)
            self.judge(m, "learn" if learn else "share")
            self.steps = max(self.steps, k + 1)
            if found is not None:
                self._agree(found)
                rig.set_states(m.after)
        self.seeds += 1

    def _agree(self, found: Repeats) -> None:
        """Bit for bit, or inside the band where the PTX adds floats atomically."""
        self.repeats += found.count
        if self.deterministic and found.failure is not None:
            message = f"{found.differing} of {found.count} repeats differ: {found.failure.message}"
            where = {**found.failure.where, "repeats": found.count, "differing": found.differing}
            raise Ended(Status.FLAKY, Failure("repeat", message, where), self.result())
        if not self.deterministic:
            for m in found.some:
                failure = self.checker.check(m, "share")
                if failure is not None:
                    raise Ended(Status.FLAKY, failure, self.result())

    def _unusual(self, names: tuple[str, ...], what: str) -> None:
        """Each named distribution: changed inputs, states or weights, one step against the oracle."""
        for i, name in enumerate(names):
            with Unusual(self, name, i) as m:
                self.judge(m, "alone")
        if names:
            self.checked.append(f"{len(names)} {what}s of unusual values: {', '.join(names)}")

    def _held_out(self) -> None:
        """Cases that are never named to the proposer: pass or fail with the class of fault is all that it hears."""
        found = getattr(self.rig.case.reference, "held_out", ())
        names = tuple(found(self.rig.case.workload) if callable(found) else found)
        try:
            for i, name in enumerate(names):
                with Unusual(self, name, 1000 + i) as m:
                    self.judge(m, "alone")
        except Ended as end:
            hidden = Failure("held-out", f"wrong on a held-out case ({end.failure.rule})")
            shown = replace(self.result(), tensors=())
            raise Ended(end.status, hidden, shown) from end
        if names:
            self.checked.append(f"{len(names)} held-out cases")
        else:
            self.not_verified.append("held-out cases: this target has none")

    def _describe(self) -> None:
        rig, said = self.rig, self.checked
        outputs, states = len(rig.case.buffers("outputs")), len(rig.case.buffers("states"))
        said.append(
            f"{outputs} outputs and {states} states of {self.seeds} secret seeds x {self.effort.steps} steps against "
            f"the fp64 oracle, bounds from {len(rig.case.reference.schedules)} legitimate schedules"
        )
        if self.steps > 1 and states:
            said.append(
                f"trajectories of up to {self.steps} steps, each judged from the states that the step before left"
            )
        if self.repeats:
            kind = (
                "bit for bit"
                if self.deterministic
                else "inside the noise band (the PTX adds floats atomically)"
            )
            said.append(f"{self.repeats} repeats of one step from the same states agree {kind}")
        said.append(
            "outputs and scratch poisoned with random values, random bits, NaN or stale results before each launch"
        )
        said.append(
            "guard zones around every buffer intact; inputs, weights and constants unmodified"
        )
        if states:
            said.append("regions of outputs and states that a step must leave alone are unchanged")
        if self.checker.tied_rows:
            said.append(f"{self.checker.tied_rows} rows chose differently inside a proved tie")
        if self.weights_renewed < self.seeds:
            self.not_verified.append(
                f"one set of weights for all {self.seeds} seeds (too large to make anew); states and inputs differ"
            )
        if not self.effort.distributions:
            self.not_verified.append(
                "unusual values, caches and stale state beyond the poison (tier full)"
            )
        if not self.effort.held_out:
            self.not_verified.append("held-out cases (tier promote)")
