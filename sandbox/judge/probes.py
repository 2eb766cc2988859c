"""Probes of the full tier: what a right result on ordinary inputs does not show. Caches keyed on addresses or content,
weights that were packed once and for all, ignored state, decoy launches, steps that need a pause between them.

Each probe ends in a comparison with the oracle or, bit for bit, with an observed run. What a probe could not do for
lack of memory or of something to probe is said under `not_verified`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sandbox.artifact import LaunchPlan
from sandbox.devices.base import Faulted, Refused
from sandbox.judge import delays, partial, races, rows, stress
from sandbox.judge import rig as rigs
from sandbox.judge.checks import Moment
from sandbox.judge.ending import Ended
from sandbox.judge.locate import Where, layer_of
from sandbox.judge.observe import again, difference, differs, observe
from sandbox.judge.rig import Rig
from sandbox.judge.unusual import exchange
from sandbox.verdict import Failure, Status

if TYPE_CHECKING:
    from sandbox.judge.trial import Trial

MOST_STATES = 12
MOST_ABLATIONS = 24
LOADED_REPEATS = 8


def run(trial: Trial) -> None:
    """All probes. Raises Ended at the first failure."""
    for probe in (
        _other_addresses, partial.probe, _exchanged_weights, _perturbed_states, rows.probe, _back_to_back,
        _under_load, delays.probe, _ablations, stress.run,
    ):  # fmt: skip
        probe(trial)
    if trial.effort.races:
        races.probe(trial)


def _moment(trial: Trial, label: str) -> tuple[Moment, Where]:
    """A plain step under a seed of the probe's own."""
    case = trial.rig.case
    seed = case.seeds.of("probe", label)
    trial.rig.set_states(trial.states(seed))
    where = Where(0, 0, label, case.axes)
    return observe(trial.rig, trial.inputs(seed, 0), ("random", seed), where), where


def _same(trial: Trial, a: Moment, b: Moment, rule: str) -> None:
    """Bits where they must be equal, the oracle where float atomics allow a spread."""
    if trial.deterministic:
        failure = difference(a, b)
        if failure is not None:
            raise Ended(Status.WRONG, replace(failure, rule=rule), trial.result())
    else:
        trial.judge(b, "share")


def _other_addresses(trial: Trial) -> None:
    """The same contents in other places: a result kept by address, or a race with a neighbour, shows."""
    rig, case = trial.rig, trial.rig.case
    total = sum(b.nbytes for b in rig.artifact.buffers)
    if total > case.device.facts().memory_bytes // 4:
        trial.not_verified.append(
            "the same contents at other addresses: not enough memory for a second copy"
        )
        return
    m, where = _moment(trial, "other addresses")
    twin = rigs.build(case, rig.artifact, rig.program, "twin")
    twin.load_weights({b.name: rig.arena[b.name] for b in case.buffers("weights")})
    twin.set_inputs({b.name: m.given[b.name] for b in case.buffers("inputs")})
    moved = again(twin, m, ("nan", case.seeds.of("probe", "scratch")), where)
    _same(trial, m, moved, "other-addresses")
    trial.judge(moved, "share")
    trial.checked.append("the same contents at other addresses give the same results")


def _exchanged_weights(trial: Trial) -> None:
    """Two layers' weights swapped in place (same addresses, new contents), then `prepare` again."""
    rig, case = trial.rig, trial.rig.case
    pair = _like_layers(case)
    if pair is None:
        trial.not_verified.append(
            "weights of two layers exchanged: no two layers have equal shapes"
        )
        return
    swapped = {a: rig.arena[b].clone() for a, b in pair.items()} | {
        b: rig.arena[a].clone() for a, b in pair.items()
    }
    kept = exchange(rig, swapped)
    m, _ = _moment(trial, "exchanged weights")
    trial.judge(m, "alone")
    exchange(rig, kept)
    trial.checked.append(f"weights of two layers exchanged in place ({len(pair)} tensors)")


def _like_layers(case: Any) -> dict[str, str] | None:
    """name -> name for two layers with the same weights by suffix and shape; the smallest difference in depth."""
    layers: dict[int, dict[str, Any]] = {}
    for b in case.buffers("weights"):
        n = layer_of(b.name)
        if n is not None:
            suffix = b.name.rsplit(f".{n}", 1)[-1]
            layers.setdefault(n, {})[suffix] = b
    found = sorted(layers)
    for apart in range(1, len(found)):
        for i in range(len(found) - apart):
            one, two = layers[found[i]], layers[found[i + apart]]
            if {s: (b.dtype, b.shape) for s, b in one.items()} == {
                s: (b.dtype, b.shape) for s, b in two.items()
            }:
                return {one[s].name: two[s].name for s in one}
    return None


def _perturbed_states(trial: Trial) -> None:
    """Each state tensor in turn changed strongly in half of its rows: the step must follow as the oracle does."""
    case = trial.rig.case
    floats = [b for b in case.buffers("states") if b.dtype in ("f64", "f32", "f16", "bf16")]
    choose = case.seeds.chooser("perturb")
    while len(floats) > MOST_STATES:
        floats.pop(choose(len(floats)))
    for b in floats:
        seed = case.seeds.of("perturb", b.name)
        states = trial.states(seed)
        generator = torch.Generator().manual_seed(seed)
        factor = torch.where(torch.rand(b.shape[-1], generator=generator) < 0.5, -2.0, 1.0)
        states[b.name] = (states[b.name].float() * factor.to(states[b.name].device)).to(
            states[b.name].dtype
        )
        trial.rig.set_states(states)
        where = Where(0, 0, f"{b.name} perturbed", case.axes)
        trial.judge(observe(trial.rig, trial.inputs(seed, 0), ("random", seed), where), "share")
    if floats:
        trial.checked.append(
            f"{len(floats)} state tensors perturbed one by one: results follow the oracle"
        )


def _back_to_back(trial: Trial) -> None:
    """Two steps enqueued without a wait or a reset leave what two separate ones leave."""
    rig = trial.rig
    m, where = _moment(trial, "back to back")
    first = again(rig, m, ("random", 1), where)
    rig.launch(where.text())
    apart = rig.copy_out("outputs", "states")
    rig.set_states(m.before)
    for b in rig.case.buffers("outputs"):
        rig.arena[b.name].copy_(m.before[b.name])
    if any(b.lifetime == "step" and b.init == "zero" for b in rig.artifact.buffers):
        trial.not_verified.append(
            "two steps without a pause: scratch has to be cleared between them"
        )
        return
    rig.step.launch()
    rig.launch(where.text())
    if not trial.deterministic:
        trial.not_verified.append("two steps without a pause, bit for bit: float atomics")
        return
    _same(trial, m, first, "back-to-back")
    failure = differs(apart, rig.copy_out("outputs", "states"), where)
    if failure is not None:
        raise Ended(Status.WRONG, replace(failure, rule="back-to-back"), trial.result())
    trial.checked.append("two steps enqueued without a pause equal two separate ones")


def _under_load(trial: Trial) -> None:
    """Repeats while another stream thrashes the L2 cache and occupies SMs (cuda)."""
    rig = trial.rig
    if rig.device.torch_device == "cpu":
        return
    m, _ = _moment(trial, "under load")
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    filler = torch.ones(4 * rig.device.facts().l2_bytes // 4, device=rig.device.torch_device)
    side.wait_stream(torch.cuda.current_stream())
    for n in range(LOADED_REPEATS):
        side.synchronize()
        with torch.cuda.stream(side):
            for _ in range(4 + 4 * n):
                filler.mul_(1.0)
        where = Where(0, 0, f"under load, {n + 1} of {LOADED_REPEATS}", rig.case.axes)
        _same(trial, m, again(rig, m, ("random", n), where), "under-load")
    side.synchronize()
    trial.repeats += LOADED_REPEATS
    trial.checked.append(f"{LOADED_REPEATS} repeats while another stream loads memory and SMs")


def _ablations(trial: Trial) -> None:
    """Each launch left out once must change the results; one that does not is a decoy or redundant.

    On cpu alone, where a launch that waits for a missing one ends as a finding instead of a hang.
    """
    rig = trial.rig
    launches = rig.artifact.step.launches
    if rig.device.kind != "cpu":
        trial.not_verified.append(
            "each launch left out once (a launch may wait for a missing one for ever)"
        )
        return
    if not 1 < len(launches) <= MOST_ABLATIONS:
        return
    m, where = _moment(trial, "ablation")
    idle = []
    for i in range(len(launches)):
        if not _changes(rig, i, lambda r: again(r, m, ("random", 1), where), m):
            idle.append(i)
        if rig.case.ranks > 1:  # the ranks' mailboxes are out of step now
            rig.renew()
    for i in idle:
        name = launches[i].kernel
        message = f"launch {i} ({name}) changes nothing: redundant, or a decoy"
        trial.findings.append(Failure("ablation", message, {"launch": i, "kernel": name}))
    trial.checked.append(
        f"{len(launches)} launches left out one by one; {len(idle)} change nothing"
    )


def _changes(rig: Rig, left_out: int, step: Callable[[Rig], Moment], m: Moment) -> bool:
    """Whether the step without that launch leaves other results."""
    plan = rig.artifact.step
    fewer = LaunchPlan(plan.ptx, plan.launches[:left_out] + plan.launches[left_out + 1 :])
    artifact = replace(rig.artifact, step=fewer)
    try:
        program = rig.device.load(artifact)
        bound = program.bind("step", rig.arena, rigs.undefined_of(artifact))
        other = step(replace(rig, artifact=artifact, program=program, step=bound))
    except (Refused, Faulted):
        return True
    return difference(m, other) is not None
