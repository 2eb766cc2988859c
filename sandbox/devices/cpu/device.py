"""The cpu device: runs artifacts without a GPU, by translating their PTX.

It checks every access, finds deadlocks and reads of unwritten memory, and models time; it measures none. A launch that
breaks stops with Faulted and leaves the process as it was. What it makes of an artifact is a `program`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from sandbox.artifact import Artifact
from sandbox.devices.base import DeviceFacts, Refused
from sandbox.devices.cpu.launch_check import MAX_SMEM, check_text
from sandbox.devices.cpu.program import CpuProgram, order
from sandbox.devices.cpu.ranks import Held
from sandbox.devices.cpu.record import Policy
from sandbox.devices.cpu.shelf import Shelf
from sandbox.verdict import Failure, Status


@dataclass
class Replay:
    """Steps done again. Their times are modelled step by step, not here."""

    work: Callable[[], None]
    launches: int

    def launch(self) -> None:
        """Raises Faulted."""
        self.work()

    def capture(self) -> Replay:
        return self

    def modelled_us(self) -> float | None:
        return None


class CpuDevice:
    """Device `cpu`. `seed` permutes the order of blocks and warps; `mode` exact adds the race check, at a price.
    `lint`: refuse what a GPU's loading refuses, though this device could run it (clocks, variables of the module)."""

    kind: Literal["cuda", "cpu"] = "cpu"
    torch_device = "cpu"

    def __init__(
        self,
        seed: int = 0,
        mode: Literal["fast", "exact"] = "fast",
        budget: int | None = None,
        lint: bool = False,
    ) -> None:
        plain = Policy(exact=mode == "exact", **order(seed))
        self.policy = plain if budget is None else replace(plain, budget=budget)
        self._held, self._shelf, self._lint = Held(), Shelf(), lint

    def facts(self) -> DeviceFacts:
        """The machine whose launches are imitated is an H200; the memory is this machine's."""
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return DeviceFacts(
            "cpu",
            "cpu",
            "sm_90a",
            132,
            60 << 20,
            MAX_SMEM,
            pages,
            None,
            None,
            {"models": "NVIDIA H200"},
        )

    def load(self, artifact: Artifact) -> CpuProgram:
        """Parse and translate. Raises Refused."""
        if artifact.arch != "sm_90a":
            raise Refused(
                Status.UNSUPPORTED,
                Failure("cpu-unsupported", f"the cpu device does not run {artifact.arch}"),
            )
        if self._lint:
            check_text(artifact)
        return CpuProgram(artifact, self.policy, self._held, self._shelf)

    def record(self, work: Callable[[], None], launches: int = 0) -> Replay:
        """What `work` launches, to be done again."""
        return Replay(work, launches)

    def held(self) -> Held:
        """A context in which steps of several ranks are queued; on leaving it they run, and a rank that is done with
        one goes on to the next while others are still behind. Raises Faulted there."""
        return self._held

    def synchronize(self) -> None:
        """Launches run when they are called; nothing is ever pending."""
