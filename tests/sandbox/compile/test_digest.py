"""Error reports of workers, shortened: the sentence, the candidate's line, the code and a hint."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox.box import Broken
from sandbox.compile import digest
from sandbox.jobs import CompileJob
from sandbox.strict import Malformed
from sandbox.verdict import Status

JOB = CompileJob("one\ntwo\n    y[tid, 3] = x[tid]\n", "demo", {}, {}, (), filename="mine.py")
VERIFIER = """
\x1b[91merror[INTERNAL]:\x1b[0m The compiler could not build valid IR for this code.

  --> /box/candidate.py:3:4
      in function `k(...)`:
   |
  1 | one
> 3 |     y[tid, 3] = x[tid]
    |    ^
  error: IR verification failed: 'cute.memref.store' op expects coordinate to be weakly congruent to
         the layout, but got '!cute.coord<"(?,3)">'
  suggestion: Check the source location above for invalid primitive arguments.
"""
PTXAS = """error: PTX assembly failed
  error: ptxas rejected the PTX generated for this kernel while compiling it to SASS.
  note: ptxas log:
        ptxas application ptx input, line 41; error   : Unknown modifier '.bar'
        ptxas application ptx input, line 41; error   : Not a name of any known instruction: 'foo'
        ptxas fatal   : Ptx assembly aborted due to errors
"""
NVVM = """error: NVVM backend compilation failed
  error: libNVVM failed while compiling generated device IR.
  note: backend log:
        Failed to generate PTX from the compilation unit. (error 9: NVVM_ERROR_COMPILATION), libNVVM
        extra log: candidate.py(2) Error: unsupported operation
"""


def report(**fields: Any) -> dict[str, Any]:
    base = {"type": "DSLRuntimeError", "text": "", "code": "", "message": "", "line": None}
    return {**base, "suggestions": [], "lines": [], **fields}


def test_an_error_of_the_dsl_keeps_its_code_line_and_gets_our_hint() -> None:
    error = report(
        type="DSLUserCodeError", code="UNSUP_EARLY_EXIT", line=2,
        message="Early exit (return) is not allowed in `k`.", text="much longer",
    )  # fmt: skip
    found = digest.report(JOB, error)
    assert found.status is Status.COMPILE_ERROR
    assert found.failure.rule == "UNSUP_EARLY_EXIT"
    assert found.failure.message == "Early exit (return) is not allowed in `k`."
    assert found.failure.where["line"] == 2 and found.failure.where["text"] == "two"
    assert "while with a flag" in found.failure.where["hint"]


def test_a_verifier_error_is_joined_and_located() -> None:
    found = digest.report(JOB, report(text=VERIFIER, message="ICE IR Verification Failed")).failure
    assert found.message.startswith(
        "'cute.memref.store' op expects coordinate to be weakly congruent to the layout"
    )
    assert found.where == {
        "file": "mine.py", "line": 3, "text": "y[tid, 3] = x[tid]", "hint": found.where["hint"],
    }  # fmt: skip
    assert "local_tile" in found.where["hint"]


def test_logs_of_the_assembler_and_of_nvvm_lose_their_wrapping() -> None:
    ptxas = digest.report(JOB, report(text=PTXAS)).failure.message
    assert (
        ptxas.startswith("line 41; error   : Unknown modifier '.bar'") and "rejected" not in ptxas
    )
    nvvm = digest.report(JOB, report(text=NVVM)).failure
    assert "unsupported operation" in nvvm.message and nvvm.where["line"] == 2
    assert "unpack" in nvvm.where["hint"]


def test_a_plain_exception_shows_its_type_and_the_innermost_line() -> None:
    found = digest.report(
        JOB, report(type="NameError", text="name 'q' is not defined", lines=[1, 2])
    ).failure
    assert found.rule == "NameError" and found.message == "NameError: name 'q' is not defined"
    assert found.where["line"] == 2 and "must exist before" in found.where["hint"]


def test_hostile_text_is_cleaned_and_cut() -> None:
    error = report(type="E\x1b[31m", text="a\x07b\u202ec\x1b[2J" + "x" * 15_000, lines=[10**6])
    found = digest.report(JOB, error).failure
    assert found.message.isprintable() and len(found.message) <= digest.MAX_MESSAGE
    assert "line" not in found.where and found.rule == "E"


@pytest.mark.parametrize(
    "error",
    [
        None,
        {"status": "passed", "rule": "x", "message": "m"},
        {"status": "infra", "rule": "x", "message": "m"},
        report(text=5),
        report(lines=["1"]),
        report(line=True),
        report(extra=1),
        report(text="x" * 30_000),
    ],
)
def test_a_report_that_breaks_the_form_is_malformed(error: Any) -> None:
    with pytest.raises(Malformed):
        digest.report(JOB, error)


def test_what_a_missing_result_means() -> None:
    crash = 'Fatal Python error: Segmentation fault\n\nCurrent thread:\n  File "/box/candidate.py", line 2 in f\n'
    found = digest.broken(JOB, Broken("closed", "ended"), 60, crash)
    assert found.status is Status.COMPILE_ERROR and found.failure.rule == "crash"
    assert (
        found.failure.message.endswith(": Segmentation fault") and found.failure.where["line"] == 2
    )
    rules = {
        r: digest.broken(JOB, Broken(r, "d"), 60, "")
        for r in ("timeout", "malformed", "memory", "box")
    }
    assert {r: (d.status, d.failure.rule) for r, d in rules.items()} == {
        "timeout": (Status.COMPILE_ERROR, "deadline"),
        "malformed": (Status.REJECTED, "output"),
        "memory": (Status.COMPILE_ERROR, "memory"),
        "box": (Status.INFRA, "box"),
    }
