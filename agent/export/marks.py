"""A candidate's source without its marks: what leaves this project must not import its helper.

Marks are compiled out of what was judged, so taking them out of the text changes no instruction.
"""

from __future__ import annotations

import ast

HELPER = "timeline"


def without(source: str) -> str:
    """The same kernel, marks and their import gone; sources without marks come back as they are."""
    tree = ast.parse(source)
    if not any(isinstance(n, ast.ImportFrom) and n.module == "kernelgen" for n in tree.body):
        return source
    lines = source.splitlines(keepends=True)
    for node in sorted(_statements(tree), key=lambda n: -n.lineno):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno)
        lines[first:last] = [f"{' ' * node.col_offset}pass\n"] if _alone(tree, node) else []
    return _values("".join(lines))


def _statements(tree: ast.Module) -> list[ast.stmt]:
    """The import, and calls whose result nobody takes."""
    return [
        n for n in ast.walk(tree)
        if (isinstance(n, ast.ImportFrom) and n.module == "kernelgen")
        or (isinstance(n, ast.Expr) and _call(n.value) in ("mark", "end"))
    ]  # fmt: skip


def _values(source: str) -> str:
    """`timeline.buffer(...)` and `timeline.track(...)` are None."""
    while True:
        found = [n for n in ast.walk(ast.parse(source)) if _call(n) in ("buffer", "track")]
        if not found:
            return source
        node = found[0]
        assert isinstance(node, ast.Call)
        source = source.replace(ast.get_source_segment(source, node) or "", "None")


def _call(node: ast.AST) -> str:
    """The helper's function that is called, or nothing."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        base = node.func.value
        if isinstance(base, ast.Name) and base.id == HELPER:
            return node.func.attr
    return ""


def _alone(tree: ast.Module, statement: ast.stmt) -> bool:
    """Whether a block would be empty without it and its like."""
    gone = set(map(id, _statements(tree)))
    for n in ast.walk(tree):
        for field in ("body", "orelse"):
            block = getattr(n, field, None)
            if isinstance(block, list) and statement in block:
                return statement is block[0] and all(id(x) in gone for x in block)
    return False
