"""The roofline of a run: flops per byte that must move against flops per second, under the memory and compute roofs.

All candidates of a run do the same work, so they stand on one vertical line; what is left is the way up to the roof.
It measures nothing: rates come from the verdicts, peaks from the cards' specifications.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent.report.drawing import BLUE, GREEN, GREY, ORANGE, WIDTH, legend_above
from agent.report.svg import draw
from targets.base import Options, UnknownOption, UnknownTarget, find

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Dense bf16 with tensor cores, TFLOP/s, by what a device's name contains.
PEAKS = {"H200": 989.0, "H100": 989.0, "B200": 2250.0}


@dataclass(frozen=True)
class Spot:
    """A candidate: what it is called and its time of a step in microseconds."""

    name: str
    us: float


@dataclass(frozen=True)
class Roof:
    """Of one workload on one device. Rates in GB/s and TFLOP/s; None: unknown."""

    flops: int
    bytes: int
    measured: float | None
    spec: float | None
    peak: float | None

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    def tflops(self, us: float) -> float:
        return self.flops / us / 1e6


def roof(target: str, workload: Mapping[str, Any], row: Any, device: str) -> Roof | None:
    """From a target, a run's workload, its timing row and the device's name; None without flops or rates."""
    work = _floor(target, workload)
    if work is None or not work[0] or not work[1]:
        return None
    shares = (row.fraction_of_floor_measured, row.fraction_of_floor_spec)
    rates = [row.gb_per_s / share if share else None for share in shares]
    if not any(rates):
        return None
    peak = next((p for name, p in PEAKS.items() if name in device), None)
    return Roof(*work, rates[0], rates[1], peak)


def _floor(target: str, workload: Mapping[str, Any]) -> tuple[int, int] | None:
    """Flops and bytes of a step. None where the target is gone or has no such workload."""
    extra = {k[2:]: v for k, v in workload.items() if k.startswith("x_") and v is not None}
    try:
        options = Options(
            str(workload["preset"]), int(workload["layers"]), int(workload["rows"]),
            int(workload["context"]), extra,
        )  # fmt: skip
        floor = find(target).workload(options).floor
    except (KeyError, TypeError, ValueError, OSError, UnknownOption, UnknownTarget):
        return None
    return floor.flops, floor.bytes


def roofline(r: Roof | None, spots: list[Spot], kinds: str) -> str:
    """Empty when there is nothing to draw."""
    if r is None or not spots:
        return ""
    x = r.intensity

    def paint(figure: Figure) -> None:
        ax = figure.subplots()
        rates = [y for y in (r.measured, r.spec) if y]
        ridges = [r.peak * 1e3 / y for y in rates] if r.peak else [30 * x]
        xs = sorted({x / 10, x, *ridges, 4 * max(*ridges, x)})
        for rate, colour, words in (
            (r.measured, BLUE, "streaming rate measured"), (r.spec, ORANGE, "bandwidth by specification"),
        ):  # fmt: skip
            if rate:
                ys = [min(rate * v / 1e3, r.peak or float("inf")) for v in xs]
                ax.plot(xs, ys, color=colour, lw=1.5, label=f"{words}, {rate:,.0f} GB/s")
        if r.peak:
            ax.axhline(r.peak, color=GREY, ls="--", lw=1,
                       label=f"bf16 peak by specification, {r.peak:,.0f} TFLOP/s")  # fmt: skip
        last = len(spots) - 1
        for i, s in enumerate(spots):
            ax.plot([x], [r.tflops(s.us)], "o", ms=7 if i == last else 5, color=GREEN if i == last else GREY,
                    label=s.name if i in (0, last) else None)  # fmt: skip
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel("flops per byte that must cross HBM")
        ax.set_ylabel(f"TFLOP/s ({kinds or 'unknown'})")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(lambda v, _: f"{v:g}")  # powers would need a maths font
            axis.set_minor_formatter(lambda v, _: "")
        legend_above(figure)

    return draw("roofline", "roofline of the step", paint, (WIDTH, 4.0))
