"""An artifact on the cpu device: its plans with kernels translated, bound to buffers, and run.

Buffers are the caller's; which launches may be doubted, refused or modelled is decided by the modules beside.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from sandbox.artifact import Artifact, Launch, LaunchPlan, PlanName, rank_of
from sandbox.devices.base import Refused
from sandbox.devices.cpu.execute import run
from sandbox.devices.cpu.launch_check import check_launch, check_waits, plan_error
from sandbox.devices.cpu.ranks import Crew, Held
from sandbox.devices.cpu.record import Counts, Memory, Policy, Region, Work
from sandbox.devices.cpu.shelf import Parsed, Shelf
from sandbox.devices.cpu.translate import Translated
from sandbox.devices.cpu.unset import doubt
from sandbox.verdict import Failure, KernelResources, Status

if TYPE_CHECKING:
    import torch

Shadow = np.ndarray[tuple[int], np.dtype[np.uint8]]
READ_ONLY = ("inputs", "weights", "constants")
SECRETS = (1 << 62) - 1
SPREAD = 0x1F123BB5159A55E5  # odd: a launch finds other noise than any before it


class CpuBound:
    """A plan with addresses. `launch` runs it to its end."""

    def __init__(
        self,
        program: CpuProgram,
        plan: LaunchPlan,
        regions: Mapping[str, Region],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        self._tensors = tensors  # their memory must outlive every launch
        self.program, self.plan = program, plan
        # of one rank, as everywhere; of several, those of the slowest
        self.launches = max(Counter(x.rank for x in plan.launches).values())
        self._regions = regions
        self._counts: dict[int, tuple[Launch, Translated, Counts]] = {}

    def launch(self) -> None:
        """Run all launches in order; of several ranks at once, each rank's in order. Raises Faulted."""
        if self.program.artifact.ranks > 1:
            self.program.crew.launch(self)
            return
        with self.program.lock:
            self.begin()
            for i in range(len(self.plan.launches)):
                self.done(i, *run(self.work(i), self.program.policy, self.program.memory))

    def begin(self) -> None:
        """A step starts: what no step may rely on counts as unwritten."""
        self._counts = {}
        self.program.forget_step(self._regions)

    def work(self, index: int) -> Work:
        """Launch number `index` with addresses, and with the buffers within its rank's reach."""
        item = self.plan.launches[index]
        params = bytearray(item.params)
        for r in item.relocations:
            value = self._regions[r.buffer].base + r.addend
            params[r.offset : r.offset + 8] = value.to_bytes(8, "little")
        named = {r.buffer for r in item.relocations}
        regions = [x for n, x in self._regions.items() if rank_of(n) == item.rank or n in named]
        regions += self.program.module_regions(self.plan)
        kernel = self.program.kernel(self.plan, item.kernel)
        return Work(kernel, item, bytes(params), regions, self.program.unset())

    def done(self, index: int, counts: Counts, found: list[Failure]) -> None:
        """Keep what launch number `index` did."""
        item = self.plan.launches[index]
        self.program.add(found)
        self._counts[index] = (item, self.program.kernel(self.plan, item.kernel), counts)

    def capture(self) -> CpuBound:
        return self

    def modelled_us(self) -> float | None:
        """Modelled microseconds of the last launch, of several ranks the slowest; None before the first. Waiting for
        other ranks is no part of it."""
        if not self._counts:
            return None
        from sandbox.devices.cpu.model import modelled_us

        ranks = sorted({item.rank for item, _, _ in self._counts.values()})
        return max(
            modelled_us([x for x in self.counts() if x[0].rank == rank], self._regions)
            for rank in ranks
        )

    def profile(self) -> list[dict[str, Any]]:
        """What the model says of each launch of the last run: microseconds by part, bytes by level, opcodes."""
        from sandbox.devices.cpu.explain import rows

        return rows(self.counts(), self._regions)

    def counts(self) -> list[tuple[Launch, Translated, Counts]]:
        """What each launch of the last run executed."""
        return [self._counts[i] for i in sorted(self._counts)]


class CpuProgram:
    """A translated artifact. Kernels are compiled when they are first needed by `bind`."""

    resources: tuple[KernelResources, ...] = ()

    def __init__(self, artifact: Artifact, policy: Policy, held: Held, shelf: Shelf) -> None:
        self.artifact, self.policy = artifact, policy
        self.memory, self.lock = Memory(), threading.Lock()
        self.crew = Crew(self, held)
        self._shelf, self._modules = shelf, dict[str, Parsed]()
        self._shadows: dict[tuple[str, int, int], Shadow] = {}
        self._undefined: set[str] = set()
        self._secret, self._started = 0, 0
        self._found: dict[tuple[str, str], Failure] = {}
        for plan in (artifact.step, artifact.prepare):
            if plan is not None:
                self._check(plan)

    def _check(self, plan: LaunchPlan) -> None:
        """Parse the plan's PTX and translate its kernels. Raises Refused."""
        if plan.ptx not in self._modules:
            self._modules[plan.ptx] = self._shelf.module(plan.ptx)
        parsed = self._modules[plan.ptx]
        if self.artifact.ranks > 1 and parsed.has_variables:
            raise Refused(
                Status.UNSUPPORTED,
                Failure(
                    "cpu-ranks",
                    "variables of the module itself are not told apart by rank on the cpu device",
                ),
            )
        for item in plan.launches:
            entry = parsed.module.entries.get(item.kernel)
            if entry is None:
                raise plan_error("kernel-missing", f"the PTX has no kernel {item.kernel[:80]}")
            check_launch(item, parsed.kernel(entry, self.policy.exact))
        check_waits(plan, parsed.kernels)

    def reorder(self, seed: int) -> None:
        """Later launches run their blocks and warps in the order of that seed."""
        with self.lock:
            self.policy = replace(self.policy, **order(seed))

    def scramble(self, secret: int) -> None:
        """Later launches find noise of that secret where they read before they write: registers, shared and local
        memory."""
        with self.lock:
            self._secret = secret & SECRETS

    def unset(self) -> int:
        """The next launch's secret of what it finds unwritten; another one each time."""
        self._started += 1
        return (self._secret + self._started * SPREAD) & SECRETS

    def doubts(self) -> tuple[Failure, ...]:
        """Kernels that read a register on a path that has not written it. Only a kernel that went wrong should be
        told: no thread may take that path, and no result may depend on the value."""
        kernels = {k.entry.name: k for p in self._modules.values() for k in p.kernels.values()}
        found = [doubt(name, k.graph) for name, k in kernels.items()]
        return tuple(f for f in found if f is not None)

    def kernel(self, plan: LaunchPlan, name: str) -> Translated:
        return self._modules[plan.ptx].kernels[name]

    def module_regions(self, plan: LaunchPlan) -> list[Region]:
        """Module-scope variables, as buffers."""
        return [
            Region(f"variable {name}", base, size)
            for name, (base, size) in self._modules[plan.ptx].data.ranges.items()
            if size
        ]

    def bind(
        self,
        plan: PlanName,
        buffers: Mapping[str, torch.Tensor],
        undefined: frozenset[str] = frozenset(),
    ) -> CpuBound:
        """Fill in addresses. `undefined`: buffers whose content counts as never written. Raises Refused."""
        chosen = self.artifact.plan(plan)
        if chosen is None:
            raise plan_error("no-plan", f"the artifact has no plan {plan}")
        regions = {}
        for name in sorted({r.buffer for x in chosen.launches for r in x.relocations}):
            regions[name] = self._region(name, buffers, undefined)
        for name in buffers:
            if name not in regions:
                regions[name] = self._region(name, buffers, undefined)
        return CpuBound(self, chosen, regions, dict(buffers))

    def _region(
        self, name: str, buffers: Mapping[str, torch.Tensor], undefined: frozenset[str]
    ) -> Region:
        declared = self.artifact.buffer(name)
        tensor = buffers.get(name)
        if tensor is None:
            raise plan_error("buffer-missing", f"buffer {name} is not given")
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise plan_error("buffer-form", f"buffer {name} is no contiguous tensor of the cpu")
        size, base = tensor.numel() * tensor.element_size(), tensor.data_ptr()
        if size != declared.nbytes or base % declared.align:
            raise plan_error(
                "buffer-form", f"buffer {name} has {size} bytes at {base:#x}; declared are {declared.nbytes}, "
                f"aligned to {declared.align}",
            )  # fmt: skip
        shadow = None
        if name in undefined:
            key = (name, base, size)
            if key not in self._shadows:
                self._shadows[key] = np.zeros(size, np.uint8)
            shadow = self._shadows[key]
            self._undefined.add(name)
        return Region(name, base, size, shadow, declared.group not in READ_ONLY)

    def forget_step(self, regions: Mapping[str, Region]) -> None:
        """At the start of a plan all undefined buffers but persistent ones count as unwritten again."""
        for name, region in regions.items():
            if region.shadow is not None and self.artifact.buffer(name).lifetime != "persistent":
                region.shadow.fill(0)

    def add(self, found: list[Failure]) -> None:
        for failure in found:
            self._found.setdefault((failure.rule, str(failure.where.get("ptx_line"))), failure)

    def findings(self) -> tuple[Failure, ...]:
        return tuple(self._found.values())


class Order(TypedDict):
    seed: int
    lazy: bool


def order(seed: int) -> Order:
    """Fields of a policy: the order, and whether copies complete late (even seeds) or at once."""
    return {"seed": seed & 0x7FFFFFFF, "lazy": seed % 2 == 0}
