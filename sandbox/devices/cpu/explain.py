"""What the model says of each launch of a step: parts of its time, bytes by level, executed opcodes. For profiles.

Modelled, like everything about time here; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sandbox.artifact import Launch
from sandbox.devices.cpu.facts import Residency, facts_of
from sandbox.devices.cpu.model import H200, launch_seconds

if TYPE_CHECKING:
    from sandbox.devices.cpu.record import Counts, Region
    from sandbox.devices.cpu.translate import Translated


def rows(
    done: Sequence[tuple[Launch, Translated, Counts]], regions: Mapping[str, Region]
) -> list[dict[str, Any]]:
    """One row a launch, in order. `parts` in microseconds add up to `us`."""
    sizes, step = {name: r.size for name, r in regions.items()}, Residency()
    out = []
    for launch, kernel, counts in done:
        f = facts_of(launch, kernel.timing, counts, sizes, step, kernel.static_bytes)
        us = 1e6 * launch_seconds(f)
        start = min(us, 1e6 * (H200.launch_early if f.pdl else H200.launch))
        executed = opcodes(kernel, counts)
        memory_us = 1e6 * f.memory_bytes / H200.memory_rate
        out.append({
            "kernel": launch.kernel, "us": us, "parts": {"launch": start, "work": us - start},
            "bound": "memory" if memory_us > 0.7 * (us - start) else "latency or issue", "bytes": f.memory_bytes,
            "l2_bytes": f.l2_bytes, "barriers": f.barriers, "instructions": sum(executed.values()), "opcodes": executed,
        })  # fmt: skip
    return out


def opcodes(kernel: Translated, counts: Counts) -> dict[str, int]:
    """Executed PTX instructions of all threads by opcode."""
    out: dict[str, int] = {}
    for index, instrs in enumerate(kernel.blocks):
        for i in instrs:
            out[i.parts[0]] = out.get(i.parts[0], 0) + int(counts.blocks[index])
    return {k: v for k, v in out.items() if v}
