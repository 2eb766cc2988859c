"""Seed kernels of the Kimi K3 targets in CuTe DSL: correct and plain candidates that a search starts from.

`source` bundles the modules that a target needs into one self-contained candidate file. Nothing here imports CuTe DSL;
the modules beside are text until a compile worker runs a bundle.
"""

from __future__ import annotations

import ast
from pathlib import Path

_PACKAGE = "targets.kimi_k3.seeds"
_CANDIDATE = {"TUNABLES", "workspace", "constants", "prepare", "step"}
"""Names that belong to a candidate: taken from the target's own module, left out of those it builds on."""


def source(target_name: str) -> str:
    """The seed of `kimi-k3-<part>` as one file. Raises ValueError for a target without a seed."""
    part = target_name.removeprefix("kimi-k3-").replace("-", "_")
    known = part.isidentifier() and part != "common" and _path(part).is_file()
    if not target_name.startswith("kimi-k3-") or not known:
        raise ValueError(f"no seed for {target_name!r}")
    order = _order(part)
    trees = {module: ast.parse(_path(module).read_text()) for module in order}
    doc = ast.get_docstring(trees[part], clean=False) or ""
    sections = [f'"""{doc}"""', _imports(trees)]
    for module in order:
        sections.append(_section(module, trees[module], last=module == part))
    return "\n\n".join(sections) + "\n"


def _path(module: str) -> Path:
    return Path(__file__).parent / f"{module}.py"


def _order(part: str) -> list[str]:
    """The modules that `part` needs, each after those it imports."""
    done: list[str] = []

    def visit(module: str) -> None:
        for node in ast.parse(_path(module).read_text()).body:
            if _own(node):
                visit(node.module.rsplit(".", 1)[1])  # type: ignore[attr-defined]
        if module not in done:
            done.append(module)

    visit(part)
    return done


def _own(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PACKAGE + ".")


def _imports(trees: dict[str, ast.Module]) -> str:
    """All imports but those among the seeds, merged and sorted: standard library first."""
    plain: set[str] = set()
    names: dict[str, set[str]] = {}
    for tree in trees.values():
        for node in tree.body:
            if isinstance(node, ast.Import):
                plain.update(ast.unparse(ast.Import([alias])) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not _own(node):
                names.setdefault(node.module or "", set()).update(a.name for a in node.names)
    lines = [
        *sorted(plain),
        *(f"from {m} import {', '.join(sorted(n))}" for m, n in sorted(names.items())),
    ]
    ours = [x for x in lines if x.split()[1].split(".")[0] == "cutlass"]
    standard = [x for x in lines if x not in ours]
    return "\n".join([*standard, *([""] if standard else []), *ours])


def _section(module: str, tree: ast.Module, last: bool) -> str:
    """The module's definitions as written, comments included, under a heading."""
    text = _path(module).read_text().splitlines()
    doc = (ast.get_docstring(tree) or "").splitlines()[0]
    kept = [f"# ---- {module}: {doc}"]
    end = 0
    for node in tree.body:
        start, before = _start(node), end
        end = node.end_lineno or start
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node):
            continue
        if not last and _defines(node) & _CANDIDATE:
            continue
        comments = [x for x in text[before : start - 1] if x.startswith("#")]
        gap = [""] if isinstance(node, ast.Assign | ast.AnnAssign) else ["", ""]
        kept += [*gap, *comments, *text[start - 1 : end]]
    return "\n".join(kept)


def _start(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _defines(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {t.id for t in node.targets if isinstance(t, ast.Name)}
    return set()
