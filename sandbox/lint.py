"""Lint of PTX, machine code and launch plan before any GPU time. Each rule has an id and a reason.

Refusals are what would corrupt, hang or hide; advice is what usually costs speed and goes to the proposer. A clean lint
proves nothing: the judge does not rely on it.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from sandbox import ptx as ptx_text
from sandbox.artifact import Artifact, Launch, LaunchPlan
from sandbox.assemble import Assembled
from sandbox.sass import Code, disassemble
from sandbox.verdict import Failure, KernelResources

REGISTERS_PER_SM = 65536
SMEM_PER_BLOCK = 232448
ASSERT = "__assertfail"
"""Prints and traps; it launches nothing and keeps nothing."""
HOT_LOOP_BYTES = 32 << 10

RULES = {
    "registers": "a block whose registers exceed the SM's file cannot launch",
    "shared-memory": "more than 227 KB of shared memory a block compiles silently and fails at launch",
    "spill": "registers spilled to local memory cost a round trip through L1 in the hot loop",
    "stack": "a stack frame means an array indexed at run time: local memory instead of registers",
    "extern-function": "device-side runtime, printf or malloc: launches would not be countable",
    "writable-global": "module state survives from launch to launch, outside the declared workspace",
    "clock": "clock registers let a kernel see that it is timed; timing is the judge's",
    "launch-number": "registers that tell one launch from the next, or a graph from a single launch, let a kernel "
    "see that it is timed",
    "spin-not-cooperative": "blocks that wait for each other need the cooperative attribute, or part of the grid may "
    "never become resident; a programmatic launch (PDL) may do without if its grid fits on the device whole",
    "stale-poll": "a polling loop without an L1 invalidation before the next barrier reads stale lines afterwards",
    "ring-no-hint": "bulk copies of weights without an L2 cache hint evict the activations",
    "hot-loop-size": "a loop larger than the instruction cache stalls on fetches",
    "narrow-loads": "global loads narrower than 16 bytes leave bandwidth unused",
    "target-mismatch": "the PTX is for another architecture than the artifact says",
}

# Statements end at semicolons and braces, not at lines: what is searched has neither comments nor strings.
_EXTERN = re.compile(r"\.extern\s+\.func\b(?:\s*\([^)]*\))?\s*([\w$]*)")
_GLOBAL = re.compile(r"(?<![\w.:])(?<!\.ptr )\.global\b(?!\s+\.(?:tex|surf|sampler)ref)[^;{]*")
_CLOCK = re.compile(r"%(?:clock(?:64|_hi)?|globaltimer(?:_lo|_hi)?|pm[0-7](?:_64)?)\b")
_NUMBER = re.compile(r"%(?:gridid|current_graph_exec|envreg\d+)\b")
_POLL = re.compile(r"\bld\.(?:acquire|relaxed|volatile)(?:\.(?:gpu|sys|cluster))?(?:\.global)?\.")
_BULK = re.compile(r"\bcp\.async\.bulk\.shared[\w:.]*")
_LABEL = re.compile(r"(?<![\w$%.:])([A-Za-z_$%][\w$]*)[ \t]*:(?!:)")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+([\w$%]+)\s*;")


@dataclass(frozen=True)
class Report:
    """What lint found. A candidate with refusals is not launched."""

    refusals: tuple[Failure, ...]
    advice: tuple[Failure, ...]


def lint(artifact: Artifact, assembled: Mapping[str, Assembled]) -> Report:
    """All rules over `step` and, if there is one, `prepare`. `assembled`: plan name -> machine code."""
    refusals: list[Failure] = []
    advice: list[Failure] = []
    for name, code in assembled.items():
        plan = artifact.step if name == "step" else artifact.prepare
        if plan is None:
            continue
        refusals += lint_ptx(artifact.arch, plan, artifact.instrumented)
        refusals += list(_launch_limits(plan, code.resources))
        advice += list(_resources(code.resources))
        advice += list(_bulk_hints(plan.ptx))
        if artifact.arch == "sm_90a":
            advice += [f for c in disassemble(code.cubin) for f in _sass(c)]
    return Report(tuple(refusals), tuple(advice))


def lint_ptx(arch: str, plan: LaunchPlan, clocks: bool = False) -> list[Failure]:
    """Refusals that the PTX and plan alone show; needs no assembler. `clocks`: an instrumented build reads them."""
    out = []
    if (found := ptx_text.target(plan.ptx)) != arch:
        out.append(_failure("target-mismatch", f".target is {found}, the artifact says {arch}"))
    text = ptx_text.bare(plan.ptx)
    out += [
        _failure("extern-function", f"calls {name[:120] or 'a function without a name'}")
        for name in _EXTERN.findall(text)
        if name != ASSERT
    ]
    out += [_failure("writable-global", x[:120]) for x in _GLOBAL.findall(text)]
    # in all of the module: a kernel may call functions
    if not clocks and (clock := _CLOCK.search(text)):
        out.append(_failure("clock", f"reads {clock[0]}"))
    if number := _NUMBER.search(text):
        out.append(_failure("launch-number", f"reads {number[0]}"))
    return out + stranded(plan)


def stranded(plan: LaunchPlan) -> list[Failure]:
    """Refusals of polling kernels whose grid nothing brings onto the device whole. One block, or one cluster, is
    resident whole by definition; programmatic launches are for the device to measure (`must_fit`)."""
    loose = {
        x.kernel
        for x in plan.launches
        if not (x.cooperative or x.pdl or x.grid in ((1, 1, 1), x.cluster))
    }
    found = polls(plan.ptx) if loose else {}
    return [
        _failure("spin-not-cooperative", f"polls at PTX line {line}", kernel=kernel)
        for kernel, line in found.items()
        if kernel in loose
    ]


def must_fit(launch: Launch, polling: Container[str]) -> bool:
    """Whether the whole grid must fit on an empty device: a cooperative one, and a programmatic one that polls.

    Why the second then becomes resident whole, though the driver promises it for the first only: a launch begins when
    every block of the one before it in the stream has begun (`griddepcontrol.launch_dependents`, or its end), so by
    then all earlier blocks are on the device or done, and no later one can be. Blocks that have begun need nothing
    more, so the earlier ones end, if they wait for no later launch, on this GPU or on another; what other streams and
    processes run ends without us. The room is then this grid's alone. Ranks that wait for each other: take the
    earliest launch that does not end on some rank. All before it end on every rank, so its grids become resident, and
    they wait for nothing later. That no launch waits for a later one is the plan's to keep: one that breaks it hangs
    with cooperative grids as well, and is ended as a hang."""
    return launch.cooperative or (launch.pdl and launch.kernel in polling)


def polls(text: str) -> dict[str, int]:
    """Kernels with a loop that polls global memory, and the PTX line of the first. A function with such a loop counts
    for every kernel: who calls it is not followed. Raises PtxError."""
    found: dict[str, int] = {}
    end, between = 0, ""
    entries = ptx_text.entries(text)
    for entry in entries:
        between += text[end : entry.start] + "\n" * text.count("\n", entry.start, entry.end)
        end = entry.end
        if line := spin_line(text[entry.start : entry.end]):
            found[entry.name] = text.count("\n", 0, entry.start) + line
    if line := spin_line(between + text[end:]):
        found = {e.name: found.get(e.name, line) for e in entries}
    return found


def spin_line(body: str) -> int | None:
    """Line within a kernel of the first loop that polls global memory, or None."""
    if not _POLL.search(body):
        return None
    labels = {m[1]: m.start() for m in _LABEL.finditer(body)}
    for branch in _BRANCH.finditer(body):
        start = labels.get(branch[1], len(body))
        loop = body[start : branch.end()]
        if start < branch.start() and len(loop) < 4000 and (poll := _POLL.search(loop)):
            return body.count("\n", 0, start + poll.start()) + 1
    return None


def _launch_limits(plan: LaunchPlan, resources: Iterable[KernelResources]) -> Iterator[Failure]:
    by_kernel = {r.kernel: r for r in resources}
    for x in plan.launches:
        r = by_kernel.get(x.kernel)
        if r is None:
            continue
        threads = x.block[0] * x.block[1] * x.block[2]
        warps = -(-threads // 32)
        if (need := warps * 32 * (-(-r.registers // 8) * 8)) > REGISTERS_PER_SM:
            message = f"{r.registers} registers x {threads} threads = {need} > {REGISTERS_PER_SM}"
            yield _failure("registers", message, kernel=x.kernel)
        if x.smem + r.smem_static > SMEM_PER_BLOCK:
            message = f"{x.smem} + {r.smem_static} bytes of shared memory > {SMEM_PER_BLOCK}"
            yield _failure("shared-memory", message, kernel=x.kernel)


def _resources(resources: Iterable[KernelResources]) -> Iterator[Failure]:
    for r in resources:
        if r.spill_stores or r.spill_loads:
            message = f"{r.spill_stores} bytes of spill stores, {r.spill_loads} of loads at {r.registers} registers"
            yield _failure("spill", message, kernel=r.kernel)
        elif r.stack:
            yield _failure("stack", f"{r.stack} bytes of stack frame", kernel=r.kernel)


def _bulk_hints(text: str) -> Iterator[Failure]:
    for entry in ptx_text.entries(text):
        copies = _BULK.findall(text[entry.start : entry.end])
        if copies and not any(".L2::cache_hint" in x for x in copies):
            yield _failure(
                "ring-no-hint", f"{len(copies)} bulk copies without a hint", kernel=entry.name
            )


def _sass(code: Code) -> Iterator[Failure]:
    for start, end in code.loops:
        body = [i for i in code.instructions if start <= i.offset <= end]
        if end - start > HOT_LOOP_BYTES:
            yield _failure(
                "hot-loop-size", f"a loop of {(end - start) >> 10} KB", kernel=code.kernel
            )
        polls = any(i.opcode.startswith("LDG") and "STRONG" in i.opcode for i in body)
        if polls and len(body) < 64 and not _invalidated(code, start, end):
            yield _failure("stale-poll", f"the loop at 0x{start:x}", kernel=code.kernel)
    loads = [
        i for i in code.instructions if i.opcode.startswith("LDG") and "STRONG" not in i.opcode
    ]
    in_loops = [i for i in loads if any(a <= i.offset <= b for a, b in code.loops)]
    narrow = [i for i in in_loops if ".128" not in i.opcode and ".64" not in i.opcode]
    if len(in_loops) >= 8 and len(narrow) * 2 > len(in_loops):
        message = (
            f"{len(narrow)} of {len(in_loops)} global loads in loops are narrower than 8 bytes"
        )
        yield _failure("narrow-loads", message, kernel=code.kernel)


def _invalidated(code: Code, start: int, end: int) -> bool:
    """True if an L1 invalidation lies in the loop or between it and the next barrier."""
    for i in code.instructions:
        if i.offset < start:
            continue
        if i.opcode.startswith("CCTL.IVALL"):
            return True
        if i.offset > end and i.opcode.startswith("BAR"):
            return False
    return False


def _failure(rule: str, message: str, **where: str) -> Failure:
    return Failure(rule, f"{message} ({RULES[rule]})", where)
