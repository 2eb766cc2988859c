"""A worker's error report, shortened to what helps to repair: first message, candidate line and its text, code, hint.

The report is untrusted text: everything is cleaned and cut here, and it chooses no status but those listed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sandbox import strict
from sandbox.box import Broken
from sandbox.jobs import CompileJob
from sandbox.strict import Malformed
from sandbox.verdict import Failure, Status

MAX_MESSAGE = 1500
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_WHERE = re.compile(r"-->\s+\S*candidate\.py:(\d+)")
_LOG_LINE = re.compile(r"candidate\.py\((\d+)\)")
_FAULT_LINE = re.compile(r'File "\S*candidate\.py", line (\d+) in')
_FATAL = re.compile(r"^Fatal Python error: (.{1,80})$", re.M)
_SECTION = re.compile(r"^\s*(?:= )?(note|suggestion|error|-->)\b")
# Sentences of the DSL that say nothing about the fault itself.
_GENERIC = (
    "The compiler could not build valid IR",
    "The compiler hit an internal DSL problem",
    "NVVM backend compilation failed",
    "libNVVM failed while compiling",
    "PTX assembly failed",
    "ptxas rejected the PTX",
)
# What to do about an error that is known: pattern in code or message -> hint.
HINTS = (
    (
        "UNSUP_EARLY_EXIT",
        "no break, continue or return inside run-time control flow: use an if, or a while with a flag",
    ),
    (
        "TYPE_UNSTABLE_JOIN",
        "define the variable before the if or loop with the same type, such as `z = Float32(0.0)`",
    ),
    (
        "PHASE_DYNAMIC_INDEX",
        "a Python list takes compile-time indices only: loop with cutlass.range_constexpr, or index a tensor",
    ),
    (
        "UNSUP_NO_SOURCE",
        "kernel source must stand in the file itself: no exec, no generated functions",
    ),
    (
        r"name '\w+' is not defined",
        "a variable used after an if or loop must exist before it, with the same type",
    ),
    (
        r"alignment \(\d+ bits\) does not meet",
        "index a layout mode (x[None, i] after logical_divide) instead of adding a run-time offset to an iterator, "
        "or wrap the offset in cute.assume(off, divby=N)",
    ),
    (
        "weakly congruent",
        "the coordinate's shape does not match the layout: for 1-D tensors use cute.local_tile(x, (V,), (i,)), "
        "for 2-D slice x[row, None]",
    ),
    ("Type mismatch, store", "convert before storing: y[i] = value.to(y.element_type)"),
    (
        "NVVM_ERROR_COMPILATION|unsupported operation",
        "this conversion or instruction does not exist on this architecture: unpack sub-byte types by bits",
    ),
    (
        "expected destination pointer in",
        "this pointer's memory space is not allowed here; for cluster memory use prims.mapa(...).store(v)",
    ),
    (
        "CUDA_ERROR|no CUDA-capable|cuInit",
        "there is no GPU in the jail: use cfg.sms, cfg.arch and cfg.dims",
    ),
    (
        "Operation not permitted|Permission denied|Read-only file|Address family not supported",
        "the jail allows no files, processes or network: a candidate only describes kernels",
    ),
)
STATUSES = {s.value: s for s in (Status.REJECTED, Status.COMPILE_ERROR, Status.PLAN_ERROR)}


@dataclass(frozen=True)
class Digest:
    status: Status
    failure: Failure


def report(job: CompileJob, error: object) -> Digest:
    """Status and failure of a worker's error report. Raises Malformed."""
    if isinstance(error, dict) and set(error) == {"status", "rule", "message"}:
        status = STATUSES[strict.choice(error["status"], "error.status", tuple(STATUSES))]
        rule = strict.name(str(error["rule"]).replace("-", "_"), "error.rule").replace("_", "-")
        return Digest(status, Failure(rule, clean(_text(error["message"], "error.message"))))
    fields = strict.keys(
        error, "error", {"type", "text", "code", "message", "line", "suggestions", "lines"}
    )
    parts = {k: clean(_text(fields[k], f"error.{k}")) for k in ("type", "text", "code", "message")}
    lines = [
        strict.integer(x, "error.lines", 0, 1 << 30)
        for x in strict.items(fields["lines"], "error.lines", 8)
    ]
    line = fields["line"]
    if line is not None:
        line = strict.integer(line, "error.line", 0, 1 << 30)
    suggestions = [
        clean(_text(s, "error.suggestions"))
        for s in strict.items(fields["suggestions"], "error.suggestions", 4)
    ]
    line = line or located(parts["text"]) or (lines[-1] if lines else None)
    message = first_message(parts)
    code = parts["code"] if parts["code"] not in ("", "None") else parts["type"]
    failure = Failure(_rule(code), message, where(job, line, hint(code, message, suggestions)))
    syntax = parts["type"] in ("SyntaxError", "IndentationError", "TabError")
    return Digest(Status.REJECTED if syntax else Status.COMPILE_ERROR, failure)


def broken(job: CompileJob, reason: Broken, deadline_s: float, output: str) -> Digest:
    """What it means that a worker which had the source gave no result. `output`: what it printed."""
    output = clean(output)
    stood = [int(n) for n in _FAULT_LINE.findall(output)]
    at = where(job, stood[0] if stood else None, "")
    if reason.reason == "box":
        return Digest(Status.INFRA, Failure("box", reason.detail))
    if reason.reason == "timeout":
        message = (
            f"compiling used more than {deadline_s:.0f} s: unroll less (cutlass.range with unroll=1), "
            "inline fewer phases, avoid pow"
        )
        return Digest(Status.COMPILE_ERROR, Failure("deadline", message, at))
    if reason.reason == "closed":
        fatal = _FATAL.search(output)
        what = fatal[1] if fatal else output.strip()[-300:]
        message = "the compiler process died while compiling this source" + (
            f": {what}" if what else ""
        )
        return Digest(Status.COMPILE_ERROR, Failure("crash", message, at))
    if reason.reason in ("malformed", "oversized"):
        text = f"the compile worker sent no valid result: {reason.detail}"
        return Digest(Status.REJECTED, Failure("output", text[:MAX_MESSAGE]))
    text = f"the source passed a limit of the jail: {reason.detail}"
    return Digest(Status.COMPILE_ERROR, Failure(reason.reason, text, at))


def malformed(error: Malformed) -> Digest:
    return Digest(Status.PLAN_ERROR, Failure("malformed", clean(str(error))[:MAX_MESSAGE]))


def first_message(parts: Mapping[str, str]) -> str:
    """The sentence that names the fault."""
    message, text = parts["message"], parts["text"]
    informative = (
        message
        and not message.startswith(_GENERIC)
        and "Verification Failed" not in message
        and "error:" not in message
    )
    if informative:
        return message[:MAX_MESSAGE]
    found = [m for m in _messages(text) if not m.startswith(_GENERIC)]
    if found:
        return " ".join(found[:3])[:MAX_MESSAGE]
    first = text.strip() or "no message"
    return f"{parts['type']}: {first}"[:MAX_MESSAGE]


def _messages(text: str) -> list[str]:
    """`error:` paragraphs of a DSL report, continuation lines joined, then lines of tool logs that hold an error."""
    out: list[str] = []
    current: list[str] | None = None
    for raw in text.splitlines():
        line = raw.strip()
        start = re.match(r"error(?:\[\w+\])?: ?(.*)", line)
        if start:
            current = [start[1]]
            out.append("")
        elif re.search(r"(?:error|Error)\s*:", line):
            out.append(re.sub(r"^ptxas application ptx input, ", "", line))
            current = None
        elif not line or _SECTION.match(line) or re.match(r"(?:>?\s*\d+ )?\|", line):
            current = None
        elif current is not None:
            current.append(line)
        if current is not None:
            out[-1] = " ".join(current)
    cleaned = [re.sub(r"^IR verification failed: (?:error: unknown: )?", "", m) for m in out]
    return [m for m in cleaned if m]


def located(text: str) -> int | None:
    found = _WHERE.search(text) or _LOG_LINE.search(text)
    return int(found[1]) if found else None


def where(job: CompileJob, line: int | None, advice: str) -> dict[str, Any]:
    out: dict[str, Any] = {"file": job.filename}
    source = job.source.splitlines()
    if line and line <= len(source):
        out |= {"line": line, "text": clean(source[line - 1]).strip()[:200]}
    if advice:
        out["hint"] = advice
    return out


def hint(code: str, message: str, suggestions: list[str]) -> str:
    """Our hint for known errors, else the DSL's own first suggestion where it is about the source."""
    for pattern, text in HINTS:
        if re.search(pattern, f"{code} {message}"):
            return text
    for text in suggestions:
        if "CUTE_DSL_" not in text and "report this" not in text:
            return text[:300]
    return ""


def clean(text: str) -> str:
    """Without terminal escapes, control and bidi characters; newlines stay."""
    plain = _ANSI.sub("", text)
    return "".join(c if c.isprintable() or c == "\n" else " " for c in plain)


def _text(value: object, at: str) -> str:
    if not isinstance(value, str) or len(value) > 20_000:
        raise Malformed(at, "is no text of at most 20000 characters")
    return value


def _rule(code: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "", code)[:60] or "error"
