"""Ordering bugs made likely: the candidate's PTX with a pause before every synchronising instruction, different for
each site and SM, must leave the same bits.

The delayed module is assembled and checked like any other and is used for nothing else. A race that no pause of about a
microsecond uncovers stays hidden.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from sandbox.artifact import LaunchPlan
from sandbox.devices.base import Refused
from sandbox.judge.ending import Ended
from sandbox.judge.locate import Where
from sandbox.judge.observe import again, difference, observe
from sandbox.judge.rig import undefined_of
from sandbox.verdict import Status

if TYPE_CHECKING:
    from sandbox.judge.trial import Trial

VARIANTS = 3
LONGEST_NS = 2047
_SITE = re.compile(
    r"^[ \t]*(?:@!?%\w+[ \t]+)?"
    r"(?:bar\.|barrier\.|mbarrier\.|atom\.|red\.|fence\.|membar\.|cp\.async\.bulk|griddepcontrol\."
    r"|(?:st|ld)\.(?:[\w:]+\.)*(?:release|acquire|relaxed|volatile))",
    re.M,
)


def delayed(ptx: str, seed: int) -> tuple[str, int]:
    """The module with pauses, and how many there are. Text only: the assembler decides whether it is a module."""
    count = 0

    def pause(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        site = (seed * 0x9E3779B1 + count * 0x85EBCA77) & 0xFFFFFFFF
        return (
            "\t{ .reg .b32 kg_pause; mov.u32 kg_pause, %smid; "
            f"mad.lo.u32 kg_pause, kg_pause, {site | 1}, {site >> 3}; "
            f"shr.u32 kg_pause, kg_pause, 7; and.b32 kg_pause, kg_pause, {LONGEST_NS}; nanosleep.u32 kg_pause; }}\n"
            + match[0]
        )

    return _SITE.sub(pause, ptx), count


def probe(trial: Trial) -> None:
    """Raises Ended (`flaky`) if a delayed step leaves other bits."""
    rig, case = trial.rig, trial.rig.case
    plan = rig.artifact.step
    if not trial.deterministic:
        trial.not_verified.append(
            "pauses before synchronising instructions: float atomics reorder anyway"
        )
        return
    if not delayed(plan.ptx, 0)[1]:
        return
    where = Where(0, 0, "delays", case.axes)
    seed = case.seeds.of("delays")
    rig.set_states(trial.states(seed))
    m = observe(rig, trial.inputs(seed, 0), ("random", seed), where)
    trial.judge(m, "share")
    for n in range(VARIANTS if rig.device.kind == "cuda" else 1):
        text, sites = delayed(plan.ptx, case.seeds.of("delays", n) & 0xFFFF)
        artifact = replace(rig.artifact, step=LaunchPlan(text, plan.launches))
        try:
            program = rig.device.load(artifact)
            step = program.bind("step", rig.arena, undefined_of(artifact))
        except Refused as error:
            trial.not_verified.append(
                f"pauses before synchronising instructions: {error.failure.message[:200]}"
            )
            return
        slow = replace(rig, artifact=artifact, program=program, step=step)
        failure = difference(m, again(slow, m, ("random", n), where))
        if failure is not None:
            message = (
                f"with pauses before its {sites} synchronising instructions, {failure.message}"
            )
            raise Ended(
                Status.FLAKY, replace(failure, rule="delays", message=message), trial.result()
            )
    trial.checked.append(f"pauses before {sites} synchronising instructions change nothing")
