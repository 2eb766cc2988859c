"""What a candidate says of itself: the module docstring and the gain it predicts. Read by `ast`,
never run.

`Predicted gain: 1.05` and `Predicted gain: 5 %` both mean a speed-up of 1.05 over the parent.
"""

from __future__ import annotations

import ast
import re

MAX_SOURCE_BYTES = 1 << 20
_GAIN = re.compile(r"predict\w*(?:\s+gain)?\s*[:=]?\s*(\d+(?:\.\d+)?)\s*(%|x|×)?", re.IGNORECASE)


def docstring(source: str) -> str:
    """Empty for a source that does not parse: saying why is the compiler's work."""
    if len(source) > MAX_SOURCE_BYTES:
        return ""
    try:
        return ast.get_docstring(ast.parse(source)) or ""
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""


def predicted_gain(text: str) -> float | None:
    found = _GAIN.search(text)
    if found is None:
        return None
    value = float(found.group(1))
    if found.group(2) == "%":
        value = 1 + value / 100
    return value if 0.1 <= value <= 100 else None
