"""Seed kernels of the Kimi K3 targets in CuTe DSL: correct and plain candidates that a search starts from.

`source` bundles what a target needs of the modules beside into one self-contained candidate file. A piece (`mla`) may
have parts, modules whose names begin with its own (`mla_layout`): they are one section of the file, under its name.
Nothing here imports CuTe DSL; the modules are text until a compile worker runs a bundle.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

from targets.kimi_k3.options import split

_PACKAGE = "targets.kimi_k3.seeds"
_CANDIDATE = {"TUNABLES", "workspace", "constants", "prepare", "step"}
"""What makes a module a candidate: taken from the target's own module, left out of those it builds on."""


@dataclass(frozen=True)
class _Definition:
    """A top-level definition: its text with the comments above it, what it defines and what it mentions."""

    module: str
    text: tuple[str, ...]
    names: frozenset[str]
    mentions: frozenset[str]
    plain: bool


# Asked for again and again, also by threads at once, in which Python 3.11's parser can fail by mistake (gh-106905).
@cache
def source(target_name: str) -> str:
    """The seed of `<family>-<part>` as one file. Raises ValueError for a target without a seed."""
    family, part = split(target_name)
    part = part.replace("-", "_")
    known = part.isidentifier() and part != "common" and _path(part).is_file()
    if not target_name.startswith(f"{family}-") or not known or _piece(part) != part:
        raise ValueError(f"no seed for {target_name!r}")
    pieces = _pieces(part)
    trees = {m: ast.parse(_path(m).read_text()) for modules in pieces.values() for m in modules}
    found = [d for piece in pieces for d in _ordered(piece, pieces[piece], trees, part)]
    kept = _reachable(found)
    used = frozenset[str]().union(*(d.mentions for d in kept))
    sections = [
        f'"""{ast.get_docstring(trees[part], clean=False)}"""',
        _imports(trees.values(), used),
    ]
    for piece, modules in pieces.items():
        sections += _section(piece, trees[piece], [d for d in kept if d.module in modules])
    return "\n\n\n".join(sections) + "\n"


def _path(module: str) -> Path:
    return Path(__file__).parent / f"{module}.py"


def _piece(module: str) -> str:
    """The piece that a module is a part of, or itself."""
    words = module.split("_")
    return next(
        name for n in range(len(words)) if _path(name := "_".join(words[: n + 1])).is_file()
    )


def _pieces(part: str) -> dict[str, list[str]]:
    """What `part` needs, each piece after those it imports: its modules, the piece's own last."""
    done: dict[str, list[str]] = {}

    def visit(module: str, modules: list[str]) -> list[str]:
        for needed in _needed(module):
            piece = _piece(needed)
            if piece == _piece(module):
                visit(needed, modules)
            elif piece not in done:
                done[piece] = visit(piece, [])
        if module not in modules:
            modules.append(module)
        return modules

    done[part] = visit(part, [])
    return done


def _needed(module: str) -> list[str]:
    """The modules beside that a module imports from, in its order."""
    tree = ast.parse(_path(module).read_text())
    names = [n.module or "" for n in tree.body if isinstance(n, ast.ImportFrom)]
    return [x.rsplit(".", 1)[1] for x in names if x.startswith(_PACKAGE + ".")]


def _ordered(
    piece: str, modules: Sequence[str], trees: Mapping[str, ast.Module], part: str
) -> list[_Definition]:
    """A piece's definitions: the constants at the head of its own module, its parts, the rest of its own."""
    *parts, own = (_definitions(m, trees[m], piece == part) for m in modules)
    head = list(takewhile(lambda d: d.plain, own))
    return [*head, *(d for found in parts for d in found), *own[len(head) :]]


def _definitions(module: str, tree: ast.Module, last: bool) -> list[_Definition]:
    lines = _path(module).read_text().splitlines()
    found: list[_Definition] = []
    end = 0
    for node in tree.body:
        start, before = _start(node), end
        end = node.end_lineno or start
        names = _names(node)
        if names and (last or not names & _CANDIDATE):
            comments = [x for x in lines[before : start - 1] if x.startswith("#")]
            text = (*comments, *lines[start - 1 : end])
            found.append(
                _Definition(module, text, names, _mentions(node), isinstance(node, ast.Assign))
            )
        elif found and _is_text(node) and found[-1].plain:
            # the line of prose below a constant belongs to it
            held = found.pop()
            text = (*held.text, *lines[start - 1 : end])
            found.append(_Definition(module, text, held.names, held.mentions, True))
    return found


def _reachable(found: Sequence[_Definition]) -> list[_Definition]:
    """The definitions that the candidate uses, directly or not, in their order."""
    by_name = {name: d for d in found for name in d.names}
    todo = [by_name[name] for name in _CANDIDATE & set(by_name)]
    seen: set[int] = set()
    while todo:
        d = todo.pop()
        if id(d) not in seen:
            seen.add(id(d))
            todo += [by_name[name] for name in d.mentions & set(by_name)]
    return [d for d in found if id(d) in seen]


def _imports(trees: Iterable[ast.Module], used: frozenset[str]) -> str:
    """The imports that are used, merged and sorted: standard library first."""
    whole: set[str] = set()
    names: dict[str, set[str]] = {}
    for node in (n for tree in trees for n in tree.body):
        if isinstance(node, ast.Import):
            whole |= {ast.unparse(ast.Import([a])) for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(_PACKAGE):
            names.setdefault(node.module or "", set()).update(a.name for a in node.names)
    wanted = {m: sorted(n & used) for m, n in names.items() if n & used}
    lines = [
        *sorted(whole),
        *(f"from {m} import {', '.join(n)}" for m, n in sorted(wanted.items())),
    ]
    ours = [x for x in lines if x.split()[1].split(".")[0] == "cutlass"]
    return "\n".join([*(x for x in lines if x not in ours), "", *ours])


def _section(module: str, tree: ast.Module, kept: Sequence[_Definition]) -> list[str]:
    """The module's part of the file under a heading, as written."""
    if not kept:
        return []
    about = (ast.get_docstring(tree) or "").splitlines()[0]
    lines = [f"# ---- {module}: {about}"]
    for d in kept:
        lines += ["", *([] if d.plain else [""]), *d.text]
    return ["\n".join(lines)]


def _start(node: ast.stmt) -> int:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return node.lineno


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _names(node: ast.stmt) -> frozenset[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return frozenset({node.name})
    if isinstance(node, ast.Assign):
        return frozenset(t.id for t in node.targets if isinstance(t, ast.Name))
    return frozenset()


def _mentions(node: ast.stmt) -> frozenset[str]:
    return frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name))
