"""Exceptions of the DSL and of candidates as plain reports: text, code, line. Shortening happens outside the box."""

from __future__ import annotations

import traceback
from typing import Any

MAX_TEXT = 16_000


class Refused(Exception):
    """A rule of ours that the candidate breaks: status, rule and sentence."""

    def __init__(self, status: str, rule: str, message: str) -> None:
        super().__init__(message)
        self.status, self.rule, self.message = status, rule, message

    def report(self) -> dict[str, Any]:
        return {"status": self.status, "rule": self.rule, "message": self.message[:MAX_TEXT]}


def report(error: BaseException, module: str) -> dict[str, Any]:
    """Type, text, the DSL's own fields where it has them, and candidate lines from the traceback, innermost last."""
    fields = getattr(error, "__dict__", {})
    suggestion = fields.get("suggestion")
    suggestions = suggestion if isinstance(suggestion, list) else [suggestion]
    return {
        "type": type(error).__name__[:200],
        "text": _text(error)[:MAX_TEXT],
        "code": str(fields.get("code") or fields.get("error_code") or "")[:100],
        "message": str(fields.get("message") or "")[:MAX_TEXT],
        "line": _line(error, fields),
        "suggestions": [str(s)[:1000] for s in suggestions if s][:4],
        "lines": _lines(error, module)[-8:],
    }


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as broken:  # a candidate's own exception class may fail here
        return f"its text cannot be read: {type(broken).__name__}"


def _line(error: BaseException, fields: dict[str, Any]) -> int | None:
    line = error.lineno if isinstance(error, SyntaxError) else fields.get("line")
    return line if isinstance(line, int) and not isinstance(line, bool) else None


def _lines(error: BaseException, module: str) -> list[int]:
    frames = traceback.extract_tb(error.__traceback__)
    return [
        f.lineno for f in frames if f.filename.endswith(f"{module}.py") and f.lineno is not None
    ]
