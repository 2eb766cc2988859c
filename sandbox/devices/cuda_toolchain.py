"""From an artifact's PTX to machine code that may be loaded: refusals, lint, assembly.

Runs no GPU code and opens no context. Only cubins made here are ever given to the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sandbox.artifact import Artifact, LaunchPlan
from sandbox.assemble import Assembled, AssemblyFailed, ToolchainMissing, assemble
from sandbox.devices import cuda_elf, cuda_plan
from sandbox.devices.base import Faulted, Refused
from sandbox.lint import ASSERT, lint_ptx
from sandbox.ptx import PtxError
from sandbox.verdict import Failure, KernelResources, Status


@dataclass(frozen=True)
class Built:
    """Machine code by PTX text (plans often share a module), and ptxas's report."""

    cubins: Mapping[str, bytes]
    resources: tuple[KernelResources, ...]


def build(artifact: Artifact) -> Built:
    """Lint and assemble all plans. Raises Refused; Faulted (`infra`) if the assembler is missing or broken."""
    reads = cuda_plan.prepare_reads(artifact)
    if reads:
        message = f"prepare names {', '.join(reads)[:200]}; it may see weights, constants and persistent workspace"
        raise Refused(Status.PLAN_ERROR, Failure("prepare-scope", message))
    plans = {"step": artifact.step} | ({"prepare": artifact.prepare} if artifact.prepare else {})
    for name, plan in plans.items():
        _lint(name, artifact, plan)
    done: dict[str, Assembled] = {}
    for name, plan in plans.items():
        if plan.ptx not in done:
            done[plan.ptx] = _assemble(name, plan.ptx, artifact.arch)
            _check_code(name, done[plan.ptx].cubin)
    resources = {r.kernel: r for a in done.values() for r in a.resources}
    return Built({ptx: a.cubin for ptx, a in done.items()}, tuple(resources.values()))


def _lint(name: str, artifact: Artifact, plan: LaunchPlan) -> None:
    """Refusals that the PTX shows. Advice from machine code is for the compiling side: it takes a second."""
    try:
        found = lint_ptx(artifact.arch, plan, artifact.instrumented)
    except PtxError as error:
        raise Refused(
            Status.PLAN_ERROR, Failure("ptx", f"the PTX of {name} is malformed: {error}")
        ) from error
    if found:
        where = {**found[0].where, "plan": name}
        raise Refused(Status.LINT, Failure(found[0].rule, found[0].message, where))


def _check_code(name: str, cubin: bytes) -> None:
    """The same two rules on machine code: a bare `.func` prototype, say, calls the device runtime without `.extern`."""
    try:
        wanted = [s for s in cuda_elf.undefined(cubin) if s != ASSERT and not s.startswith(".nv.")]
        kept = cuda_elf.variables(cubin)
    except cuda_elf.NotElf as error:
        raise Faulted(
            Status.INFRA, Failure("toolchain", f"ptxas wrote no ELF file: {error}")
        ) from error
    if wanted:
        message = f"{name} calls the device runtime: {', '.join(wanted)[:200]}"
        raise Refused(Status.LINT, Failure("extern-function", message, {"plan": name}))
    if kept:
        message = f"{name} has module variables that outlive a launch ({', '.join(kept)})"
        raise Refused(Status.LINT, Failure("writable-global", message, {"plan": name}))


def _assemble(name: str, ptx: str, arch: str) -> Assembled:
    try:
        return assemble(ptx, arch)
    except AssemblyFailed as error:
        where = {**error.failure.where, "plan": name}
        raise Refused(
            Status.COMPILE_ERROR, Failure(error.failure.rule, error.failure.message, where)
        ) from error
    except (ToolchainMissing, OSError) as error:
        raise Faulted(Status.INFRA, Failure("toolchain", str(error)[:300])) from error
