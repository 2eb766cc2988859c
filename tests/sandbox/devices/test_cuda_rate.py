"""The streaming reader: what it reads is what it is credited for, on the device that runs PTX without a GPU."""

import numpy as np
import torch

from sandbox.devices import cuda_rate
from sandbox.devices.cpu import CpuDevice
from sandbox.devices.cuda_rate import BLOCK, UNROLL, Shape


def test_every_word_is_read_once() -> None:
    """The exclusive or over all threads equals that of the buffer, which a word left out or read twice would change."""
    shape = Shape(blocks=1, rounds=3)
    assert shape.bytes == BLOCK * 16 * UNROLL * 3
    device = CpuDevice()
    x = torch.from_numpy(
        np.random.default_rng(1).integers(0, 2**32, shape.bytes // 4, dtype=np.uint32)
    )
    y = torch.zeros(shape.blocks * BLOCK, dtype=torch.uint32)
    program = device.load(cuda_rate.artifact("sm_90a", shape))
    program.bind("step", {"inputs.x": x, "outputs.y": y}).launch()
    device.synchronize()
    assert np.bitwise_xor.reduce(y.numpy()) == np.bitwise_xor.reduce(x.numpy())


def test_a_read_is_far_larger_than_l2_and_fits_its_grid() -> None:
    for sms in (78, 132, 148):
        shape = cuda_rate.shape_of(sms)
        assert 3 << 30 < shape.bytes <= 4 << 30
        assert shape.blocks == 2 * sms


def test_a_rate_counts_only_where_reads_are_alike() -> None:
    """An idle card's first round is slow at its start; beside other work every round is, here and there."""
    waking = [3.0, 2.0] * 9 + [1.0, 1.0]
    alone = [1.0, 1.01] * 10
    beside = [1.14, 1.9, 1.3, 2.2] * 5
    rounds = iter([waking, alone, beside])
    assert cuda_rate.settled(lambda: next(rounds)) is alone
    assert cuda_rate.steady(alone) and not cuda_rate.steady(waking)
    assert not cuda_rate.steady(cuda_rate.settled(lambda: beside))
