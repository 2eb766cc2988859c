"""Two real GPUs as one device: mailboxes between them, graphs of both, intervals of the slower one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from sandbox.artifact import Launch, LaunchPlan
from sandbox.devices.base import Refused
from sandbox.devices.cuda_ranks import CudaRanks
from sandbox.verdict import Status
from tests.sandbox.devices import pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def device() -> Iterator[CudaRanks]:
    yield CudaRanks.open(2)


def cooperative(x: Launch) -> Launch:
    """A launch that polls must be resident as a whole."""
    return replace(x, cooperative=True)


def memory(device: CudaRanks) -> dict[str, torch.Tensor]:
    found = {
        b.name: torch.zeros(1, dtype=torch.int32, device=device.device_of(b.rank))
        for b in pair.artifact().buffers
    }
    found["inputs.x"].fill_(10)
    found["inputs.x@1"].fill_(11)
    return found


def test_ranks_reach_each_others_mailboxes(device: CudaRanks) -> None:
    a = pair.artifact()
    a = replace(a, step=LaunchPlan(a.step.ptx, tuple(map(cooperative, a.step.launches))))
    t = memory(device)
    step = device.load(a).bind("step", t)
    for late in (0, 1):
        t["outputs.y"].zero_(), t["outputs.y@1"].zero_()
        device.synchronize()
        device.delay(late, 200_000)
        step.launch()
        device.synchronize()
        assert (int(t["outputs.y"]), int(t["outputs.y@1"])) == (11, 10)


def test_a_recorded_chain_runs_on_both_and_is_timed_on_the_slower(device: CudaRanks) -> None:
    t = memory(device)
    step = device.load(pair.artifact()).bind("step", t)
    step.launch()
    device.synchronize()

    def chain() -> None:
        for _ in range(20):
            step.launch()

    graph = device.record(chain, 20)
    quick = device.time(graph.launch)

    def held_up() -> None:
        device.delay(1, 500_000)
        graph.launch()

    slow = device.time(held_up)
    assert quick < 400 and slow > 500
    assert device.apart()["intervals"] >= 2
    assert device.facts().extra["ranks"] == 2


def test_an_artifact_for_more_gpus_than_there_are_is_refused(device: CudaRanks) -> None:
    a = pair.artifact()
    third = replace(a.step.launches[1], rank=2, relocations=())
    buffers = (*a.buffers, replace(a.buffers[0], name="inputs.x@2"))
    more = replace(a, buffers=buffers, step=LaunchPlan(a.step.ptx, (*a.step.launches, third)))
    with pytest.raises(Refused) as end:
        device.load(more)
    assert end.value.status is Status.UNSUPPORTED
