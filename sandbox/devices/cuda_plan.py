"""Launch plans against a CUDA device and a loaded cubin, as arithmetic: limits, parameters, co-residency, patching.

Pure functions over plain data, so all of it is tested without a driver. It does not judge what a kernel does with its
parameters: a pointer that is in range on entry can still be misused by the code.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sandbox.artifact import Artifact, Launch, LaunchPlan, PlanName
from sandbox.lint import must_fit
from sandbox.verdict import Failure, Status

PORTABLE_CLUSTER = 8


@dataclass(frozen=True)
class Limits:
    """What a launch may ask of the device. Sizes in bytes."""

    sms: int
    smem_optin: int
    threads_per_block: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cooperative: bool
    clusters: bool


@dataclass(frozen=True)
class KernelFacts:
    """The driver's view of one kernel of our cubin. `params`: (offset, size) of each parameter, ascending. `polls`: its
    PTX has a loop that waits for global memory."""

    name: str
    params: tuple[tuple[int, int], ...]
    registers: int
    local_bytes: int
    smem_static: int
    max_threads: int
    required_cluster: tuple[int, int, int] | None = None
    must_set_cluster: bool = False
    polls: bool = False


@dataclass(frozen=True)
class Residency:
    """From the driver, with real registers and shared memory: blocks an SM holds, clusters the device holds."""

    blocks_per_sm: int
    clusters: int | None = None


@dataclass(frozen=True)
class Objection:
    """Why a device does not run a plan."""

    status: Status
    failure: Failure


def object_to(status: Status, rule: str, message: str, **where: object) -> Objection:
    return Objection(status, Failure(rule, message, where))


def prepare_reads(artifact: Artifact) -> tuple[str, ...]:
    """Buffers that `prepare` names and may not: all but weights, constants and persistent workspace."""
    if artifact.prepare is None:
        return ()
    buffers = {b.name: b for b in artifact.buffers}
    named = {r.buffer for x in artifact.prepare.launches for r in x.relocations}
    return tuple(
        sorted(
            n
            for n in named
            if buffers[n].group not in ("weights", "constants")
            and buffers[n].lifetime != "persistent"
        )
    )


def check_plan(
    artifact: Artifact, name: PlanName, kernels: Mapping[str, KernelFacts | None], limits: Limits
) -> Objection | None:
    """The first objection to a plan that needs no occupancy. `kernels`: None for a name the cubin lacks."""
    plan = artifact.plan(name)
    for i, launch in enumerate(plan.launches if plan else ()):
        facts = kernels.get(launch.kernel)
        if facts is None:
            return object_to(
                Status.PLAN_ERROR, "unknown-kernel", f"launch {i}: the cubin has no {launch.kernel}"
            )
        found = check_launch(launch, facts, limits)
        if found:
            where = {"plan": name, "launch": i, "kernel": launch.kernel}
            message = f"{name} launch {i}: {found.failure.message}"
            return Objection(found.status, Failure(found.failure.rule, message, where))
    return None


def check_launch(launch: Launch, facts: KernelFacts, limits: Limits) -> Objection | None:
    """One launch against its kernel and the device, without occupancy."""
    return (
        _check_params(launch, facts)
        or _check_shape(launch, facts, limits)
        or _check_cluster(launch, facts, limits)
    )


def _check_params(launch: Launch, facts: KernelFacts) -> Objection | None:
    offsets = tuple(o for o, _ in facts.params)
    size = max((o + s for o, s in facts.params), default=0)
    if launch.param_offsets != offsets:
        message = (
            f"parameters at {list(launch.param_offsets)[:16]}, the kernel has {list(offsets)[:16]}"
        )
        return object_to(Status.PLAN_ERROR, "parameters", message)
    if len(launch.params) != size:
        message = f"{len(launch.params)} bytes of parameters, the kernel takes {size}"
        return object_to(Status.PLAN_ERROR, "parameters", message)
    for r in launch.relocations:
        if not any(o <= r.offset and r.offset + 8 <= o + s for o, s in facts.params):
            message = f"the address at byte {r.offset} lies in no parameter"
            return object_to(Status.PLAN_ERROR, "relocation", message)
    return None


def _check_shape(launch: Launch, facts: KernelFacts, limits: Limits) -> Objection | None:
    threads = math.prod(launch.block)
    if any(a > b for a, b in zip(launch.grid, limits.grid, strict=True)):
        return object_to(
            Status.UNSUPPORTED, "grid", f"grid {launch.grid} is over the device's {limits.grid}"
        )
    if threads > limits.threads_per_block or any(
        a > b for a, b in zip(launch.block, limits.block, strict=True)
    ):
        return object_to(
            Status.UNSUPPORTED, "block", f"block {launch.block} is over the device's {limits.block}"
        )
    if threads > facts.max_threads:
        message = (
            f"{threads} threads a block, the kernel was compiled for at most {facts.max_threads}"
        )
        return object_to(Status.PLAN_ERROR, "block", message)
    if launch.smem + facts.smem_static > limits.smem_optin:
        message = (
            f"{launch.smem} + {facts.smem_static} bytes of shared memory a block, "
            f"this device has {limits.smem_optin}"
        )
        return object_to(Status.UNSUPPORTED, "shared-memory", message)
    return None


def _check_cluster(launch: Launch, facts: KernelFacts, limits: Limits) -> Objection | None:
    if launch.cluster and not limits.clusters:
        return object_to(Status.UNSUPPORTED, "cluster", "this device has no clusters")
    if launch.cooperative and not limits.cooperative:
        return object_to(
            Status.UNSUPPORTED, "cooperative", "this device has no cooperative launches"
        )
    if facts.required_cluster and launch.cluster not in (None, facts.required_cluster):
        message = f"cluster {launch.cluster}, the kernel was compiled for {facts.required_cluster}"
        return object_to(Status.PLAN_ERROR, "cluster", message)
    if facts.must_set_cluster and not launch.cluster and not facts.required_cluster:
        return object_to(
            Status.PLAN_ERROR, "cluster", "the kernel needs a cluster, the launch sets none"
        )
    shape = cluster_of(launch, facts)
    if any(g % c for g, c in zip(launch.grid, shape, strict=True)):
        message = f"grid {launch.grid} is no multiple of cluster {shape}"
        return object_to(Status.PLAN_ERROR, "cluster", message)
    return None


def cluster_of(launch: Launch, facts: KernelFacts) -> tuple[int, int, int]:
    """The cluster that a launch runs with; (1, 1, 1) for none."""
    return launch.cluster or facts.required_cluster or (1, 1, 1)


def check_residency(
    launch: Launch, facts: KernelFacts, limits: Limits, residency: Residency
) -> Objection | None:
    """That the launch fits at all and, where blocks wait for each other, that its whole grid is resident at once."""
    blocks = math.prod(launch.grid)
    threads = math.prod(launch.block)
    cluster = math.prod(cluster_of(launch, facts))
    if residency.blocks_per_sm < 1:
        message = (
            f"no block fits on an SM: {threads} threads x {facts.registers} registers, "
            f"{launch.smem + facts.smem_static} bytes of shared memory"
        )
        return object_to(Status.LINT, "residency", message)
    if residency.clusters is not None and residency.clusters < 1:
        message = f"no cluster of {cluster} such blocks fits on the device"
        return object_to(Status.LINT, "residency", message)
    if not must_fit(launch, {launch.kernel} if facts.polls else ()):
        return None
    most = residency.blocks_per_sm * limits.sms
    if residency.clusters is not None:
        most = min(most, residency.clusters * cluster)
    if blocks > most:
        kind = "cooperative" if launch.cooperative else "waiting"
        message = f"a {kind} grid of {blocks} blocks, at most {most} are resident at once"
        return object_to(Status.LINT, "co-residency", message)
    return None


def patch(launch: Launch, addresses: Mapping[str, int]) -> bytes:
    """The parameter block with addresses filled in. Raises KeyError for a buffer without an address."""
    block = bytearray(launch.params)
    for r in launch.relocations:
        address = addresses[r.buffer] + r.addend
        block[r.offset : r.offset + 8] = address.to_bytes(8, "little")
    return bytes(block)


class ParamBlock:
    """A patched parameter block in memory that stays put, and the array of pointers that a launch takes.

    Keep it alive as long as the launch may be repeated; the driver copies the bytes at each launch.
    """

    def __init__(self, params: bytes, offsets: Iterable[int]) -> None:
        # 128-byte aligned, so that parameters such as tensor maps keep their alignment in host memory too.
        self._memory = ctypes.create_string_buffer(len(params) + 128)
        start = -(-ctypes.addressof(self._memory) // 128) * 128
        ctypes.memmove(start, params, len(params))
        pointers = [start + o for o in offsets]
        self._pointers = (ctypes.c_void_p * max(1, len(pointers)))(*pointers)
        self.address = ctypes.addressof(self._pointers)
        self.start = start


def check_addresses(plan: LaunchPlan, artifact: Artifact, addresses: Mapping[str, int]) -> None:
    """That every named buffer has an aligned address. Raises ValueError: the fault of the caller, not the plan."""
    for name in {r.buffer for x in plan.launches for r in x.relocations}:
        if name not in addresses:
            raise ValueError(f"no tensor for the buffer {name}")
        align = artifact.buffer(name).align
        if addresses[name] % align:
            raise ValueError(f"{name} lies at {addresses[name]:#x}, not aligned to {align}")
