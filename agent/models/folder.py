"""What an outside author reads in the run's folder: task, signature, best source, feedback,
history.

Written whole each round. Text of candidates and of failures is quoted as data, fenced and
shortened.
"""

from __future__ import annotations

import json
from pathlib import Path

from agent import difference, waterfall
from agent.book import describe, folded
from agent.difference import Side
from agent.types import Situation, Task, Tried
from agent.workspace import Workspace, write_bytes, write_json

SHOWN_BUFFERS = 40
SHOWN_HISTORY = 40
LONGEST_MESSAGE = 2000
MARK = "signature.json"
OURS = ("task.md", "guide.md", "best.py", "feedback.md", "history")


def only_ours(folder: Path) -> None:
    """The files of somebody who has some of the same names are not written over. Raises FileExistsError."""
    there = [name for name in OURS if (folder / name).exists()]
    if there and not (folder / MARK).exists():
        raise FileExistsError(
            f"{folder} has a {there[0]} and is no folder of a run: it is left as it is; choose another --folder"
        )


def write_folder(folder: Path, s: Situation, workspace: Workspace, guide: str) -> None:
    """Refresh everything but the author's own files. `guide`: how to write such kernels. Raises
    OSError, FileExistsError for a folder with other files of those names.
    """
    only_ours(folder)
    write_json(folder / MARK, _signature(s.task))  # first: it says whose folder this is
    write_bytes(folder / "task.md", _task(s).encode())
    write_bytes(folder / "guide.md", guide.encode())
    write_bytes(folder / "best.py", s.incumbent_source.encode())
    write_bytes(folder / "feedback.md", _feedback(s, workspace).encode())
    for t in s.history:
        source = folder / "history" / f"{t.seq}.py"
        if not source.exists():
            write_bytes(source, workspace.text(t.source).encode())
        write_json(folder / "history" / f"{t.seq}.json", t.verdict.to_json())


def _signature(task: Task) -> dict[str, object]:
    return {
        "target": task.target, "workload": dict(task.workload), "dims": dict(task.dims),
        "arch": task.arch, "device": task.device,
        "buffers": [
            {"name": b.name, "dtype": b.dtype, "shape": list(b.shape), "align": b.align}
            for b in task.buffers
        ],
        "floor": {"read_bytes": task.floor.read_bytes, "write_bytes": task.floor.write_bytes,
                  "flops": task.floor.flops},
    }  # fmt: skip


def _task(s: Situation) -> str:
    task = s.task
    shown = folded([describe(b) for b in task.buffers])
    names = "\n".join(f"- `{line}`" for line in shown[:SHOWN_BUFFERS])
    rest = len(shown) - SHOWN_BUFFERS
    more = f"\n- and {rest} more, all in signature.json" if rest > 0 else ""
    dims = ", ".join(f"{k}={v}" for k, v in task.dims.items())
    work = ", ".join(f"{k}={v}" for k, v in task.workload.items())
    return f"""# Task: a faster kernel for {task.target}

{task.summary}

- Workload: {work}
- Device: {task.device}, architecture {task.arch}
- Byte floor of one step: {task.floor.bytes:,} bytes ({task.floor.read_bytes:,} read, \
{task.floor.write_bytes:,} written)
- Sizes (`cfg.dims`): {dims}

Read `guide.md` for the language and what makes kernels fast.

Write one Python file in CuTe DSL with `step(t, cfg, stream)` and put it here as `candidate.py`; write it under
another name first, then rename it. `best.py` is the kernel to beat (candidate {s.incumbent.seq}).
Its docstring should say what is new and end with a line such as `Predicted gain: 1.05`. Optional,
before it: `candidate.json` with `note`, `predicted_gain` and `tunables` (chosen values among those
that TUNABLES declares). A file is taken when it is complete, moves to `taken/`, and its verdict
appears in `feedback.md` and `history/`.

## Buffers

{names}{more}
"""


def _feedback(s: Situation, workspace: Workspace) -> str:
    rows = [_row(t) for t in s.history[-SHOWN_HISTORY:]]
    last = s.history[-1] if s.history else None
    parts = [
        f"# Feedback after {len(s.history)} judged candidates",
        f"Best: candidate {s.incumbent.seq}, {_time(s.incumbent)}.",
        "| candidate | parent | status | us a step | of the floor | vs incumbent | predicted |\n"
        "|---|---|---|---|---|---|---|\n" + "\n".join(rows),
    ]
    if last is not None:
        parts.append(_detail(last, _changed(last, s, workspace)))
    if s.lessons:
        parts.append("## Lessons\n\n" + "\n".join(f"- {x}" for x in s.lessons))
    return "\n\n".join(parts) + "\n"


def _row(t: Tried) -> str:
    status = str(t.verdict.outcome or t.verdict.status) + (" (promoted)" if t.promoted else "")
    if t.twin is not None:
        status = f"same machine work as {t.twin}"
    return (
        f"| {t.seq} | {'' if t.parent is None else t.parent} | {status} | {_num(t.us, '.2f')} |"
        f" {_num(t.fraction, '.1%')} | {_num(t.speedup, '.4f')} | {_num(t.predicted_gain, '.3f')} |"
    )


def _detail(t: Tried, changed: list[str]) -> str:
    v = t.verdict
    lines = [f"## Candidate {t.seq}: {v.status}{f', {v.outcome}' if v.outcome else ''}"]
    if v.failure is not None:
        message = v.failure.message[:LONGEST_MESSAGE].replace("```", "'''")
        lines.append(f"Rule `{v.failure.rule}`:\n\n```\n{message}\n```")
        if v.failure.where:
            lines.append(f"Where: `{json.dumps(dict(v.failure.where))[:LONGEST_MESSAGE]}`")
    for r in v.resources:
        lines.append(
            f"- kernel `{r.kernel[:80]}`: {r.registers} registers, {r.spill_stores} bytes spilled, "
            f"{r.smem_static} bytes of static shared memory"
        )
    for w in v.timing.workloads if v.timing else ():
        lines.append(f"- {w.launches} launches, {w.us:.2f} us, {w.gb_per_s:.0f} GB/s")
    for f in v.findings:
        lines.append(f"- finding `{f.rule}`: {f.message[:LONGEST_MESSAGE]}")
    fall = waterfall.lines(v.profile)
    if fall:
        lines.append(
            "\nWhere a step's time goes:\n\n```\n" + "\n".join(fall).replace("```", "'''") + "\n```"
        )
    if changed:
        lines.append("\nAgainst the parent:\n\n" + "\n".join(f"- {x}" for x in changed))
    return "\n".join(lines)


def _changed(t: Tried, s: Situation, workspace: Workspace) -> list[str]:
    """What differs from the parent, with the places of the source that do."""
    parent = next((x for x in s.history if x.seq == t.parent), None)
    if parent is None:
        return []
    before = Side(workspace.text(parent.source), parent.verdict)
    return difference.lines(before, Side(workspace.text(t.source), t.verdict))


def _time(t: Tried) -> str:
    if t.us is None:
        return "not timed"
    reached = "" if t.fraction is None else f", {t.fraction:.1%} of the floor"
    return f"{t.us:.2f} us a step{reached}"


def _num(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)
