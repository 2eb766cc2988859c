"""Several ranks on the cpu device: they run at once, with a memory each, and who waits for ever is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sandbox.artifact import Artifact, LaunchPlan
from sandbox.devices.base import Faulted
from sandbox.devices.cpu import CpuDevice
from sandbox.devices.cpu.program import CpuBound, CpuProgram
from sandbox.verdict import Status
from tests.sandbox.devices import pair

Tensors = dict[str, torch.Tensor]


def bound(a: Artifact, seed: int = 0) -> tuple[CpuDevice, CpuProgram, CpuBound, Tensors]:
    device = CpuDevice(seed)
    program = device.load(a)
    raw = {b.name: torch.zeros(64, dtype=torch.int32) for b in a.buffers}
    memory = {n: t[-(t.data_ptr() // 4) % 32 :][:1] for n, t in raw.items()}  # aligned to 128 bytes
    memory["inputs.x"][0], memory["inputs.x@1"][0] = 10, 11
    return device, program, program.bind("step", memory), memory


@pytest.mark.parametrize("seed", range(4))
def test_ranks_wait_for_each_other(seed: int) -> None:
    """Whichever rank has the first turn."""
    _, _, step, memory = bound(pair.artifact(), seed)
    step.launch()
    assert (int(memory["outputs.y"]), int(memory["outputs.y@1"])) == (11, 10)
    assert step.launches == 1 and step.modelled_us() is not None


def test_a_rank_that_never_comes_is_named() -> None:
    _, program, step, _ = bound(pair.artifact())
    program.crew.skip = frozenset({1})
    with pytest.raises(Faulted) as end:
        step.launch()
    assert end.value.status is Status.HANG and end.value.failure.rule == "deadlock"
    text = end.value.failure.message
    assert text.startswith("rank 0 cannot go on (rank 1 launches nothing more)")
    assert "workspace.mail byte 0 to change from 0" in text
    assert end.value.failure.where["waiting"] == [0] and end.value.failure.where["ended"] == [1]


def test_a_rank_that_got_something_else_waits_alone() -> None:
    """Rank 1 has ended: what rank 0 waits for was never sent."""
    _, _, step, memory = bound(pair.artifact(wanted=(77, 10)))
    with pytest.raises(Faulted) as end:
        step.launch()
    where = end.value.failure.where
    assert (where["waiting"], where["ended"], int(memory["outputs.y@1"])) == ([0], [1], 10)


def test_both_are_named() -> None:
    _, _, step, _ = bound(pair.artifact(wanted=(77, 78)))
    with pytest.raises(Faulted, match="ranks 0 and 1 cannot go on: rank 0: .* rank 1: ") as end:
        step.launch()
    assert end.value.failure.where["waiting"] == [0, 1]


def test_a_fault_names_its_rank() -> None:
    """Memory of the other rank beyond its mailbox is out of bounds."""
    a = pair.artifact()
    first, second = a.step.launches
    beyond = tuple(
        replace(r, addend=4) if r.buffer == "workspace.mail" and r.offset == 8 else r
        for r in second.relocations
    )
    _, _, step, _ = bound(
        replace(a, step=LaunchPlan(a.step.ptx, (first, replace(second, relocations=beyond))))
    )
    with pytest.raises(Faulted) as end:
        step.launch()
    assert end.value.status is Status.FAULT and end.value.failure.where["rank"] == 1
    assert (
        end.value.failure.message.startswith("rank 1: ")
        and "workspace.mail" in end.value.failure.message
    )


def test_queued_steps_run_apart() -> None:
    """In a row of steps a rank goes on as soon as it can: the mailbox with one place is overwritten unread."""
    device, _, step, memory = bound(pair.artifact(), seed=1)
    with device.held():
        for _ in range(3):
            step.launch()
        assert int(memory["outputs.y"]) == 0  # nothing has run yet
    assert (int(memory["outputs.y"]), int(memory["outputs.y@1"])) == (11, 10)
