"""Where a kernel's machine code comes from: instructions and bytes by phase and by function of its source.

    python benchmarks/code_size.py out/ARTIFACT candidate.py --phase mix=early,late --phase kda=kda_half

Reads the artifact's PTX, assembles it with line numbers and counts each instruction for the function in which its line
stands. A phase has the functions named for it and all that only they reach; an instruction of a function that several
phases reach (a product, a wait) counts for the phase of the last instruction before it whose phase is certain, as does
one without a line. So counts are exact for a kernel and estimates for a phase, wrong by what the assembler moved.

Says how much code there is, not how often it runs: `loop` is the part inside the widest loop, fetched again in every
turn. It does not read a GPU's cache sizes.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox import artifact_store, sass
from sandbox.assemble import tool

INSTRUCTION = 16
"""Bytes, since sm_70."""
_FILE = re.compile(r'//## File "([^"]+)", line (\d+)')
_OFFSET = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+\S")


@dataclass(frozen=True)
class Source:
    """A candidate file: of each line its function, of each function those that it calls."""

    functions: tuple[tuple[int, int, str], ...]
    calls: Mapping[str, frozenset[str]]

    def at(self, line: int) -> str:
        """The innermost function at a line, "" outside of all."""
        inside = [(a, name) for a, b, name in self.functions if a <= line <= b]
        return max(inside)[1] if inside else ""

    def reach(self, roots: Iterable[str]) -> frozenset[str]:
        """The functions that `roots` call, directly or not, and themselves."""
        found: set[str] = set()
        waiting = list(roots)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += self.calls.get(name, ())
        return frozenset(found)


@dataclass(frozen=True)
class Line:
    """An instruction: bytes from the kernel's start, function of its line ("" unknown), operation."""

    offset: int
    function: str


def read_source(text: str) -> Source:
    tree = ast.parse(text)
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    names = {n.name for n in nodes}
    spans = tuple((n.lineno, n.end_lineno or n.lineno, n.name) for n in nodes)
    calls = {
        n.name: frozenset(x.id for x in ast.walk(n) if isinstance(x, ast.Name) and x.id in names)
        for n in nodes
    }
    return Source(spans, calls)


def phases_of(source: Source, phases: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Function -> the phase that alone reaches it, without those that other phases are made of."""
    roots = {f for names in phases.values() for f in names}
    unknown = roots - set(source.calls)
    if unknown:
        raise ValueError(f"the source has no function {', '.join(sorted(unknown))}")
    found: dict[str, set[str]] = {}
    for phase, names in phases.items():
        cut = Source(
            source.functions, {f: c - (roots - set(names)) for f, c in source.calls.items()}
        )
        for f in cut.reach(names):
            found.setdefault(f, set()).add(phase)
    return {f: next(iter(owners)) for f, owners in found.items() if len(owners) == 1}


def lines_of(text: str, source: Source, file: str) -> list[Line]:
    """The instructions of one kernel as nvdisasm prints it with line numbers."""
    out: list[Line] = []
    function = ""
    for row in text.splitlines():
        if place := _FILE.search(row):
            function = source.at(int(place[2])) if place[1].endswith(file) else ""
        elif found := _OFFSET.match(row):
            out.append(Line(int(found[1], 16), function))
    return out


def by_phase(lines: Sequence[Line], owner: Mapping[str, str]) -> list[str]:
    """Of each instruction its phase: that of its function, else of the last instruction that has one."""
    out, last = [], "before"
    for line in lines:
        last = owner.get(line.function, last)
        out.append(last)
    return out


def disassembled(ptx: str, arch: str) -> str:
    """Raises ToolchainMissing, subprocess.SubprocessError."""
    with tempfile.TemporaryDirectory(prefix="code-size-") as work:
        source, cubin = Path(work, "kernel.ptx"), Path(work, "kernel.cubin")
        source.write_text(ptx)
        command = [tool("ptxas"), f"--gpu-name={arch}", "--generate-line-info", "-o", cubin, source]
        subprocess.run(command, check=True, timeout=300)
        return subprocess.run(
            [tool("nvdisasm"), "-c", "-g", str(cubin)],
            capture_output=True, text=True, timeout=300, check=True,
        ).stdout  # fmt: skip


def widest(code: sass.Code) -> tuple[int, int]:
    """First and last offset of the widest loop; (0, -1) without one. What stands behind the last EXIT is waiting that
    was moved out of the way, and branches back into the code from wherever it belongs: no loop."""
    end = max((i.offset for i in code.instructions if i.opcode == "EXIT"), default=0)
    loops = [x for x in code.loops if x[1] < end]
    return max(loops, key=lambda x: x[1] - x[0], default=(0, -1))


def table(
    lines: Sequence[Line], names: Sequence[str], loop: tuple[int, int]
) -> list[dict[str, object]]:
    every = Counter(names)
    inside = Counter(n for n, x in zip(names, lines, strict=True) if loop[0] <= x.offset <= loop[1])
    return [
        {"name": n or "no line", "instructions": every[n], "bytes": every[n] * INSTRUCTION, "loop": inside[n]}
        for n in sorted(every, key=lambda n: (-every[n], n))
    ]  # fmt: skip


def report(
    ptx: str, text: str, arch: str, phases: Mapping[str, Sequence[str]]
) -> list[dict[str, object]]:
    """One entry a kernel of the module."""
    source = read_source(text)
    owner = phases_of(source, phases)
    listing = disassembled(ptx, arch)
    bodies = re.split(r"^\.text\.([\w$]+):", listing, flags=re.M)
    out: list[dict[str, object]] = []
    for code, body in zip(sass.parse(listing), bodies[2::2], strict=True):
        lines = lines_of(body, source, "candidate.py")
        loop = widest(code)
        out.append({
            "kernel": code.kernel[:60], "instructions": len(lines), "bytes": len(lines) * INSTRUCTION,
            "loop": sum(loop[0] <= x.offset <= loop[1] for x in lines),
            "phases": table(lines, by_phase(lines, owner), loop) if phases else [],
            "functions": table(lines, [x.function for x in lines], loop),
        })  # fmt: skip
    return out


def show(entry: Mapping[str, object], most: int) -> str:
    rows = [
        f"{entry['kernel']}: {entry['instructions']} instructions, {entry['loop']} in its widest loop"
    ]
    for what in ("phases", "functions"):
        part = entry[what]
        assert isinstance(part, list)
        rows += [f"  {what:28s} instructions   bytes    loop"] if part else []
        rows += [
            f"  {r['name']:28s} {r['instructions']:12d} {r['bytes']:7d} {r['loop']:7d}"
            for r in part[: most if what == "functions" else None]
        ]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("artifact", type=Path, help="folder with manifest.json")
    parser.add_argument("source", type=Path, help="the file that was compiled")
    parser.add_argument("--phase", action="append", default=[], metavar="NAME=FUNCTION[,FUNCTION]")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--most", type=int, default=40, help="functions to show")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    phases = {name: of.split(",") for name, _, of in (p.partition("=") for p in args.phase)}
    ptx = artifact_store.load(args.artifact).step.ptx
    found = report(ptx, args.source.read_text(), args.arch, phases)
    sys.stdout.write(
        json.dumps(found, indent=1) if args.json else "\n".join(show(e, args.most) for e in found)
    )
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
