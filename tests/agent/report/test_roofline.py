"""The roofline's numbers, and what is not drawn."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from agent.report.roofline import Spot, roof, roofline
from targets.base import Options, find


def row(**changed: Any) -> Any:
    given = {
        "gb_per_s": 2000.0,
        "fraction_of_floor_measured": 0.5,
        "fraction_of_floor_spec": 0.4,
    }
    return SimpleNamespace(**{**given, **changed})


def test_roofs_and_spots_are_in_the_units_of_the_axes() -> None:
    pytest.importorskip("matplotlib")
    w = find("kimi-k3-gemv").workload(Options("tiny"))
    r = roof("kimi-k3-gemv", w.key, row(), "NVIDIA H200")
    assert r is not None
    assert (r.flops, r.bytes) == (w.floor.flops, w.floor.bytes)
    assert (r.measured, r.spec, r.peak) == (4000.0, 5000.0, 989.0)
    # What moves its bytes at the measured rate stands on the memory roof.
    on_the_roof = r.bytes / (r.measured * 1e3)
    assert r.tflops(on_the_roof) == pytest.approx(r.measured * r.intensity / 1e3)
    page = roofline(r, [Spot("seed", 90.0), Spot("candidate 4", 60.0)], "measured")
    for words in (
        "4,000 GB/s",
        "5,000 GB/s",
        "989 TFLOP/s",
        "candidate 4",
        "flops per byte",
        "TFLOP/s (measured)",
    ):
        assert words in page, words
    assert "mathdefault" not in page and ">1000<" in page
    assert not re.search(r"\bnan\b|\binf\b", page)


def test_without_flops_rates_or_target_nothing_is_drawn() -> None:
    key = find("kimi-k3-gemv").workload(Options("tiny")).key
    still = find("kimi-k3-attn-res").workload(Options("tiny")).key
    assert roof("kimi-k3-attn-res", still, row(), "NVIDIA H200") is None
    none = row(fraction_of_floor_measured=None, fraction_of_floor_spec=None)
    assert roof("kimi-k3-gemv", key, none, "NVIDIA H200") is None
    assert roof("no-such-target", key, row(), "NVIDIA H200") is None
    assert roof("kimi-k3-gemv", {}, row(), "NVIDIA H200") is None
    assert roofline(None, [Spot("seed", 1.0)], "measured") == ""
