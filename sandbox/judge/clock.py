"""The judge's clock on a cuda device: events on the device's stream, L2 flushes, and what the GPU says of itself.

Event times resolve about half a microsecond; `overhead` is the cost of an empty interval. Statistics are elsewhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from sandbox.devices.base import Device, Timer


def clock_of(device: Device) -> Timer | None:
    """The device itself where it is a timer, the event clock on cuda, None where times are modelled."""
    if device.kind != "cuda":
        return None
    if getattr(device, "ranks", 1) > 1:
        return RanksClock(device)
    return device if isinstance(device, Timer) else CudaClock(device)


class RanksClock:
    """Several GPUs, which time themselves from one gate: the slowest rank's interval. Readings are rank 0's."""

    def __init__(self, device: Any) -> None:
        self._device, self._meter = device, _meter()

    def time(self, work: Callable[[], None]) -> float:
        us = float(self._device.time(work))
        self._device.synchronize()
        return us

    def flush_l2(self) -> None:
        self._device.flush_l2()

    def conditions(self) -> Mapping[str, Any]:
        return self._meter()


class CudaClock:
    """Times work enqueued on torch's current stream, which is the device's."""

    def __init__(self, device: Device) -> None:
        # loaded by name: modelled devices must not need the cuda one
        timing: Any = importlib.import_module("sandbox.devices.cuda_timing")
        self._device = device
        self._watch = timing.Stopwatch(device)
        self._flusher = timing.L2Flusher(device)
        self._meter = _meter()

    def time(self, work: Callable[[], None]) -> float:
        self._watch.start()
        work()
        self._watch.stop()
        self._device.synchronize()
        return float(self._watch.us())

    def laps(self, works: Sequence[Callable[[], None]]) -> list[float]:
        """Microseconds of each piece of work, all enqueued back to back with an event between."""
        import torch

        make: Any = torch.cuda.Event
        stream = torch.cuda.current_stream()
        marks = [make(enable_timing=True) for _ in range(len(works) + 1)]
        marks[0].record(stream)
        for work, mark in zip(works, marks[1:], strict=True):
            work()
            mark.record(stream)
        self._device.synchronize()
        return [float(a.elapsed_time(b)) * 1e3 for a, b in zip(marks[:-1], marks[1:], strict=True)]

    def joules(self) -> float | None:
        """Energy since the driver was loaded; None where the GPU does not tell."""
        found = self._meter().get("joules")
        return None if found is None else float(found)

    def flush_l2(self) -> None:
        self._flusher.flush()

    def conditions(self) -> Mapping[str, Any]:
        return self._meter()


_THROTTLE = {
    0x4: "power cap", 0x8: "hardware slowdown", 0x20: "thermal", 0x40: "hardware thermal", 0x80: "power brake",
}  # fmt: skip


_SM, _MEMORY, _CORE = 1, 2, 0


def _temperature(nvml: Any) -> Callable[[Any, int], Any]:
    found: Callable[[Any, int], Any] = (
        getattr(nvml, "device_get_temperature_v", None) or nvml.device_get_temperature
    )
    return found


@cache
def _meter() -> Callable[[], Mapping[str, Any]]:
    """Reads clocks, power, temperature and throttle reasons over NVML; nothing where that does not answer. Made once in
    a process: NVML takes its time to start."""
    try:
        nvml: Any = importlib.import_module("cuda.bindings.nvml")
        torch: Any = importlib.import_module("torch")
        nvml.init_v2()
        handle = nvml.device_get_handle_by_uuid(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    except Exception:  # any absence means that there are no readings
        return dict
    asked: dict[str, Callable[[], Any]] = {
        # numbers of NVML itself: names of its enumerations differ between versions of the bindings
        "sm_mhz": lambda: int(nvml.device_get_clock_info(handle, _SM)),
        "memory_mhz": lambda: int(nvml.device_get_clock_info(handle, _MEMORY)),
        "watts": lambda: int(nvml.device_get_power_usage(handle)) / 1000,
        "celsius": lambda: int(_temperature(nvml)(handle, _CORE)),
        "joules": lambda: int(nvml.device_get_total_energy_consumption(handle)) / 1000,
        "throttle": lambda: throttle(int(nvml.device_get_current_clocks_event_reasons(handle))),
    }

    def read() -> Mapping[str, Any]:
        out = {}
        for name, ask in asked.items():
            with suppress(Exception):
                out[name] = ask()
        return out

    return read


def throttle(reasons: int) -> list[str]:
    """Names of the reasons that slow the clocks down; being idle is none."""
    return [name for bit, name in _THROTTLE.items() if reasons & bit]
