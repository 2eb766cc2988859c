"""Noise bands: what passes, what does not, and that nothing slips through by NaN, zeros or a noisy reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sandbox.judge import bands
from sandbox.judge.bands import Errors, bound, cells_of, measure, oracle, worst

torch.set_num_threads(1)


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def limits(
    o: bands.Oracle, legitimate: list[torch.Tensor], dtype: str = "bf16", stages: int = 1
) -> Errors:
    return bound(worst([measure(o, r) for r in legitimate]), o, dtype, stages)


@pytest.mark.parametrize(
    ("shape", "lead", "size"),
    [
        ((4, 7168), (4,), 7168),
        ((18, 12, 128, 128), (18, 12, 128), 128),
        ((18, 3, 768), (18, 3), 768),
        ((6, 2, 16), (), 192),
        ((512,), (), 512),
    ],
)
def test_cells_are_rows_and_heads(shape: tuple[int, ...], lead: tuple[int, ...], size: int) -> None:
    found = cells_of(shape)
    assert (found.lead, found.size) == (lead, size)
    assert found.index(found.count - 1) == tuple(x - 1 for x in lead)


def test_errors_are_relative_to_the_oracle() -> None:
    x = tensor(4, 256)
    o = oracle(x, None)
    e = measure(o, x * 1.01)
    assert e.rel_l2 == pytest.approx(0.01) and e.norm_ratio == pytest.approx(0.01)
    assert e.max_abs == pytest.approx(0.01 * float(x.abs().max()))
    one = x.clone()
    one[2] *= 1.1
    e = measure(o, one)
    assert e.cell_rel_l2 == pytest.approx(0.1) and e.rel_l2 < 0.07


def test_a_second_rounding_passes_and_one_percent_does_not() -> None:
    x = tensor(4, 512)
    rounded = [x.bfloat16(), x.float().bfloat16()]
    o = oracle(x, None)
    limit = limits(o, rounded)
    again = (x + x * (tensor(4, 512, seed=1) * 2**-11)).bfloat16()
    assert not torch.equal(again, rounded[0]) and measure(o, again).over(limit) <= 1
    assert measure(o, (x * 1.01).bfloat16()).over(limit) > 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_is_beyond_every_bound(bad: float) -> None:
    x = tensor(2, 128)
    o = oracle(x, None)
    y = x.clone()
    y[1, 5] = bad
    e = measure(o, y)
    assert e.over(limits(o, [x])) == math.inf
    assert "max_abs" in e.failed(limits(o, [x]))


def test_zeros_must_be_zero() -> None:
    o = oracle(torch.zeros(2, 128, dtype=torch.float64), None)
    limit = limits(o, [torch.zeros(2, 128)])
    assert measure(o, torch.zeros(2, 128)).over(limit) == 0
    assert measure(o, torch.full((2, 128), 1e-20)).over(limit) > 1


def test_a_zero_row_among_others_is_judged_by_their_size() -> None:
    x = tensor(4, 128)
    x[1] = 0
    o = oracle(x, None)
    limit = limits(o, [x.float()], "f32")
    y = x.clone()
    y[1] = 0.01
    assert measure(o, y).over(limit) > 1


def test_only_specified_elements_count() -> None:
    x = tensor(6, 4, 128)
    mask = torch.zeros(6, 1, 1, dtype=torch.bool).expand(6, 4, 128).clone()
    mask[3] = True
    o = oracle(x, mask)
    y = torch.full_like(x, float("nan"))
    y[3] = x[3]
    assert measure(o, y).over(limits(o, [x])) == 0
    y[3, 1, 7] += 0.5
    assert measure(o, y).over(limits(o, [x])) > 1
    assert o.cell(1) == (3, 1)


def test_a_noisy_reference_does_not_open_the_gate() -> None:
    x = tensor(4, 512)
    o = oracle(x, None)
    limit = limits(o, [x * 1.5, torch.zeros_like(x)])
    assert limit.rel_l2 < 0.05
    assert measure(o, x * 1.1).over(limit) > 1
    assert limits(o, [x * 1.5], stages=4).rel_l2 < 0.16


def test_states_in_fp32_made_from_bf16_operands_keep_their_band() -> None:
    x = tensor(4, 512)
    o = oracle(x, None)
    limit = limits(o, [x.bfloat16()], "f32")
    again = (x + x * (tensor(4, 512, seed=1) * 2**-11)).bfloat16()
    assert measure(o, again).over(limit) <= 1


def test_over_is_in_units_of_the_bound() -> None:
    limit = Errors(0.1, 1.0, 0.1, 0.1, 0.1)
    assert replace(bands.ZERO, max_abs=2.0).over(limit) == 2.0
    assert bands.ZERO.over(bands.ZERO) == 0.0
    assert replace(bands.ZERO, rel_l2=1e-9).over(bands.ZERO) == math.inf


def wave(o: bands.Oracle, gain: float, noise: float, seed: int) -> torch.Tensor:
    """The oracle times 1 + gain, with independent noise beside it."""
    random = tensor(*o.values.shape, seed=seed)
    along = (random * o.values).sum() / o.values.square().sum()
    return o.values * (1 + gain) + noise * (random - along * o.values)


def test_a_gain_is_told_from_noise_of_its_size() -> None:
    """A factor 0.3 % off within noise of 2 %; a norm alone would take the noise's own length for a part of it."""
    o = oracle(tensor(16, 4096), None)
    legitimate = [wave(o, g, 0.02, seed) for seed, g in enumerate((1e-4, -2e-4, 1e-4), start=1)]
    limit = limits(o, legitimate)
    plain, off = measure(o, wave(o, 3e-4, 0.02, 9)), measure(o, wave(o, 3e-3, 0.02, 9))
    assert plain.over(limit) <= 1
    assert off.rel_l2 < limit.rel_l2 and "gain" in off.failed(limit)
    assert plain.gain == pytest.approx(3e-4, rel=1e-6) and plain.norm_ratio > plain.gain + 1e-4
    assert limit.gain < 0.25 * limit.rel_l2 / 2


def test_schedules_that_drift_together_are_legitimate() -> None:
    """Their own drift passes, though it is more than a quarter of the error; seven times it does not."""
    o = oracle(tensor(16, 4096), None)
    limit = limits(o, [wave(o, 4e-3, 1e-3, 1), wave(o, 3e-3, 1e-3, 2)], stages=4)
    assert measure(o, wave(o, 4e-3, 1e-3, 3)).over(limit) <= 1
    assert measure(o, wave(o, 3e-2, 1e-3, 3)).over(limit) > 1


def test_one_row_a_percent_too_large_shows_in_the_noise_of_many() -> None:
    o = oracle(tensor(64, 4096), None)
    limit = limits(o, [wave(o, 0.0, 0.01, seed) for seed in (1, 2, 3)])
    bad = wave(o, 0.0, 0.01, 5)
    assert measure(o, bad).over(limit) <= 1
    bad[7] += 0.01 * o.values[7]
    assert "cell_gain" in measure(o, bad).failed(limit)
