"""The probes of the roofline do what their time is taken for; they assemble; what is measured is kept by card."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sandbox.artifact import Buffer
from sandbox.devices import cuda_facts
from sandbox.devices.cpu import CpuDevice
from sandbox.devices.cuda_toolchain import build
from sandbox.devices.roofline import kernels
from sandbox.devices.roofline.kernels import Probe
from tests.sandbox.devices.fake_driver import FakeDriver

PROBES = {
    "empty": kernels.empty(3), "empty_pdl": kernels.empty(3, pdl=True), "barrier": kernels.barrier(132, 500),
    "ping": kernels.ping(500), "l2_read": kernels.l2_read(264, 1 << 24, 64),
    "bulk_read": kernels.bulk_read(792, 662),
}  # fmt: skip


def run(p: Probe, x: torch.Tensor) -> torch.Tensor:
    device = CpuDevice()
    y = torch.zeros(p.out, dtype=torch.uint32)
    program = device.load(kernels.artifact(p, "sm_90a"))
    program.bind("step", {"states.x": x, "outputs.y": y}).launch()
    device.synchronize()
    return y


@pytest.mark.parametrize("name", PROBES)
def test_probes_assemble_for_both_generations(name: str) -> None:
    for arch in ("sm_90a", "sm_100a"):
        made = kernels.artifact(PROBES[name], arch)
        assert len(made.step.launches) == PROBES[name].count
        assert all(r.spill_stores == 0 for r in build(made).resources)


def test_every_block_passes_every_barrier() -> None:
    x = torch.zeros(32, dtype=torch.uint32)
    seen = run(kernels.barrier(3, 4), x)
    assert int(x[0]) == 12 and min(seen.tolist()) >= 12


def test_flags_go_there_and_back() -> None:
    x = torch.zeros(kernels.PING_WORDS, dtype=torch.uint32)
    seen = run(kernels.ping(5), x)
    assert x[0] == 5 and x[32] == 5 and seen.tolist() == [5, 5]


def test_a_round_of_reads_covers_the_buffer() -> None:
    """One block, one round, a buffer as large as its reads: the exclusive or over threads is the buffer's."""
    size = kernels.L2_THREADS * 16 * kernels.L2_UNROLL
    p = kernels.l2_read(1, size, 1)
    assert kernels.l2_bytes(p) == size
    x = torch.from_numpy(np.random.default_rng(1).integers(0, 2**32, size // 4, dtype=np.uint32))
    y = run(p, x)
    assert np.bitwise_xor.reduce(y.numpy()) == np.bitwise_xor.reduce(x.numpy())


@pytest.mark.parametrize("rounds", [kernels.BULK_STAGES, 11])
def test_bulk_copies_bring_the_whole_buffer_in_order(rounds: int) -> None:
    """Each lane has the exclusive or of its word of every stage of its block."""
    p = kernels.bulk_read(3, rounds)
    x = torch.from_numpy(np.random.default_rng(2).integers(0, 2**32, p.words, dtype=np.uint32))
    y = run(p, x).numpy().reshape(3, 32)
    stages = x.numpy().reshape(rounds, 3, -1)[:, :, :32]
    assert (y == np.bitwise_xor.reduce(stages, 0)).all()
    assert 4 * p.words == rounds * 3 * kernels.BULK_BYTES


def test_facts_are_kept_for_the_card_beside_its_rate(tmp_path: Path) -> None:
    facts = cuda_facts.facts(FakeDriver(), tmp_path)
    cuda_facts.store_roofline(tmp_path, facts, {"flag_us": 0.7})
    cuda_facts.store_stream_rate(tmp_path, facts, 4.4e12)
    again = cuda_facts.facts(FakeDriver(), tmp_path)
    assert again.extra["roofline"]["flag_us"] == 0.7 and again.stream_rate == 4.4e12
    other = replace(facts, extra={**facts.extra, "uuid": "GPU-other"})
    cuda_facts.store_stream_rate(tmp_path, other, 4.3e12)
    assert cuda_facts.stored_roofline(tmp_path, "GPU-other") is None
    assert cuda_facts.stored_roofline(tmp_path, str(facts.extra["uuid"])) is not None


def test_written_words_are_states() -> None:
    assert isinstance(kernels.artifact(kernels.ping(1), "sm_90a").buffer("states.x"), Buffer)


def _measure_again(state: Path, number: int) -> None:
    card = replace(CpuDevice().facts(), extra={"uuid": f"GPU-{number}"})
    for _ in range(10):
        cuda_facts.store_stream_rate(state, card, 4e12)
        cuda_facts.store_roofline(state, card, {"l2_bytes": number})


def test_judges_of_several_cards_lose_nothing_of_each_others_measurements(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    judges = [fork.Process(target=_measure_again, args=(tmp_path, n)) for n in range(4)]
    for judge in judges:
        judge.start()
    for judge in judges:
        judge.join(120)
    found = [cuda_facts.stored_roofline(tmp_path, f"GPU-{n}") or {} for n in range(4)]
    assert [f.get("l2_bytes") for f in found] == [0, 1, 2, 3]
    assert cuda_facts.stored_stream_rate(tmp_path, "", "GPU-3") == 4e12
