"""Which instructions may read a register that nothing has written, from the control flow alone.

A hint for a kernel that went wrong, never a verdict: right kernels have such paths too (a load under a condition, its
use under the same condition), and what tells them apart is the noise of `rt_unset`.
"""

from __future__ import annotations

from sandbox.devices.cpu.cfg import Graph
from sandbox.devices.cpu.ptx_ast import Instr
from sandbox.devices.cpu.report import place
from sandbox.verdict import Failure

MOST = 3


def unset_reads(graph: Graph) -> list[Instr]:
    """Instructions that some path reaches with an operand unset, in the order of the text."""
    into = [0] * len(graph.blocks)
    into[0] = graph.live_in[0]
    work = [0] if into[0] else []
    while work:
        block = graph.blocks[work.pop()]
        out = into[block.index]
        for instr in block.instrs:
            out &= ~_written(graph, instr)
        for s in block.succs:
            if out & ~into[s]:
                into[s] |= out
                work.append(s)
    found = []
    for block in graph.blocks:
        unset = into[block.index]
        for instr in block.instrs:
            if unset & graph.uses[id(instr)] & ~(graph.defs[id(instr)] if instr.guard else 0):
                found.append(instr)
            unset &= ~_written(graph, instr)
    return found


def _written(graph: Graph, instr: Instr) -> int:
    """Registers that the instruction certainly writes."""
    return 0 if instr.guard is not None else graph.defs[id(instr)]


def doubt(kernel: str, graph: Graph) -> Failure | None:
    """The reads of one kernel in words; None where it has none."""
    reads = unset_reads(graph)
    if not reads:
        return None
    places = "; ".join(place(instr)[0] for instr in reads[:MOST])
    more = f" and {len(reads) - MOST} more" if len(reads) > MOST else ""
    message = (
        f"kernel {kernel[:80]} has paths that read a register before anything writes it: {places}{more}. "
        "Its content is then arbitrary; set it first, unless no result depends on it"
    )
    return Failure("unset-register", message, place(reads[0])[1])
