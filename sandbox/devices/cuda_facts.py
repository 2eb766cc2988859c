"""What a CUDA device is: facts for verdicts, launch limits, specified and measured memory rates.

Specified rates come from a small table by product name, else from memory clock and bus width. The measured streaming
rate is read from `device_facts.json` in the state folder, where `store_stream_rate` puts it; nothing is measured here.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sandbox.devices.base import DeviceFacts
from sandbox.devices.cuda_driver import Driver
from sandbox.devices.cuda_plan import Limits

STORED = "device_facts.json"
ARCHS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}

PLAUSIBLE = (0.75, 1.02)  # of the specified rate; an H200 alone reads 0.91 to 0.94 of it
# Bytes per second as specified by the vendor; the first name that occurs in the device's name counts.
SPEC_RATES = (
    ("GH200 144G", 4.9e12), ("GH200", 4.0e12), ("H200", 4.8e12), ("H100 NVL", 3.9e12), ("H100 PCIe", 2.0e12),
    ("H100 64", 2.0e12), ("H100", 3.35e12), ("H800 PCIe", 2.0e12), ("H800", 3.35e12), ("H20", 4.0e12),
    ("B300", 8.0e12), ("B200", 8.0e12),
)  # fmt: skip


def limits(attributes: dict[str, int]) -> Limits:
    a = attributes
    return Limits(
        sms=a["MULTIPROCESSOR_COUNT"],
        smem_optin=a["MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"],
        threads_per_block=a["MAX_THREADS_PER_BLOCK"],
        grid=(a["MAX_GRID_DIM_X"], a["MAX_GRID_DIM_Y"], a["MAX_GRID_DIM_Z"]),
        block=(a["MAX_BLOCK_DIM_X"], a["MAX_BLOCK_DIM_Y"], a["MAX_BLOCK_DIM_Z"]),
        cooperative=bool(a["COOPERATIVE_LAUNCH"]),
        clusters=bool(a["CLUSTER_LAUNCH"]),
    )


def facts(driver: Driver, state: Path | None) -> DeviceFacts:
    """Facts of the driver's device. An architecture we do not build for is named `sm_XY`."""
    a = driver.attributes()
    capability = (a["COMPUTE_CAPABILITY_MAJOR"], a["COMPUTE_CAPABILITY_MINOR"])
    name, uuid = driver.name(), driver.uuid()
    return DeviceFacts(
        kind="cuda",
        name=name,
        arch=ARCHS.get(capability, f"sm_{capability[0]}{capability[1]}"),
        sms=a["MULTIPROCESSOR_COUNT"],
        l2_bytes=a["L2_CACHE_SIZE"],
        smem_optin_bytes=a["MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"],
        memory_bytes=driver.memory_bytes(),
        spec_rate=(spec := spec_rate(name, a)),
        stream_rate=stored_stream_rate(state, name, uuid, spec),
        extra={
            "driver": driver.version(),
            "uuid": uuid,
            # 1: the GPU can reach pageable host memory, so results must be compared in another process.
            "pageable_memory_access": a["PAGEABLE_MEMORY_ACCESS"],
            "clock_khz": a["CLOCK_RATE"],
            "memory_clock_khz": a["MEMORY_CLOCK_RATE"],
            **(
                {} if (roofline := stored_roofline(state, uuid)) is None else {"roofline": roofline}
            ),
        },
    )


def spec_rate(name: str, attributes: dict[str, int]) -> float | None:
    """Specified bytes per second: from the table, else two transfers a clock over the whole bus; None if unknown."""
    for part, rate in SPEC_RATES:
        if part in name:
            return rate
    clock, bits = attributes["MEMORY_CLOCK_RATE"], attributes["GLOBAL_MEMORY_BUS_WIDTH"]
    return 2 * clock * 1e3 * bits / 8 if clock > 0 and bits > 0 else None


def plausible(rate: float, spec: float | None) -> bool:
    """Whether a measured streaming rate can be this card's: a card that others use at the time reads a fraction, and
    every share of the floor would look better than it is."""
    low, high = PLAUSIBLE
    return spec is None or low * spec <= rate <= high * spec


def stored_stream_rate(
    state: Path | None, name: str, uuid: str, spec: float | None = None
) -> float | None:
    """Measured bytes per second of this card, else of another card of its name; None if none of them can be true."""
    stored = _read(state)
    for key in (uuid, name):
        entry = stored.get(key)
        rate = entry.get("stream_rate") if isinstance(entry, dict) else None
        if isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate < 1e15:
            if plausible(rate, spec):
                return float(rate)
    return None


def store_stream_rate(state: Path, device: DeviceFacts, rate: float) -> None:
    """Keep a measured streaming rate (bytes per second) under the card's uuid and its name. Raises OSError."""
    entry = {"stream_rate": rate, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    with _changing(state) as stored:
        own = stored.get(str(device.extra["uuid"]))
        stored[str(device.extra["uuid"])] = {**(own if isinstance(own, dict) else {}), **entry}
        stored[device.name] = entry


def stored_roofline(state: Path | None, uuid: str) -> dict[str, Any] | None:
    """What was measured of this very card beside its streaming rate; None if nothing was."""
    entry = _read(state).get(uuid)
    found = entry.get("roofline") if isinstance(entry, dict) else None
    return found if isinstance(found, dict) else None


def store_roofline(state: Path, device: DeviceFacts, found: Mapping[str, Any]) -> None:
    """Keep measured facts under the card's uuid, with the date. Raises OSError."""
    uuid = str(device.extra["uuid"])
    when = datetime.now(UTC).isoformat(timespec="seconds")
    with _changing(state) as stored:
        own = stored.get(uuid)
        mine = own if isinstance(own, dict) else {}
        stored[uuid] = {**mine, "roofline": {**found, "date": when}}


@contextmanager
def _changing(state: Path) -> Iterator[dict[str, Any]]:
    """What is stored, to be changed and written; judges of other GPUs of this host wait meanwhile."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / f".{STORED}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stored = _read(state)
        yield stored
        _write(state, stored)


def _write(state: Path, stored: Mapping[str, Any]) -> None:
    temporary = state / f".{STORED}.{os.getpid()}"
    temporary.write_text(json.dumps(stored, indent=1, sort_keys=True))
    temporary.replace(state / STORED)


def _read(state: Path | None) -> dict[str, Any]:
    if state is None:
        return {}
    try:
        stored = json.loads((state / STORED).read_text())
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}
