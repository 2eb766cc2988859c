"""The persistent kernels, and the chains for many tokens (`grouped`), as candidate files: `source()` bundles what each
needs of the modules of the seeds.

A definition is taken as it is written if the candidate uses it, directly or not, from the module that its user imports
it from. Nothing here imports CuTe DSL.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PACKAGE = "targets.kimi_k3.seeds."
_ENTRIES = {
    "decode": "persistent.decode",
    "decode-rows": "persistent.many_decode",
    "latent-moe-tiles": "persistent.tile_chain",
    "latent-moe": "persistent.moe_chain",
    "kda": "persistent.kda_chain",
    "latent-moe-grouped": "grouped.latent_moe",
    "decode-grouped": "grouped.decode",
}
_GROUPED = {"latent_moe": "grouped.moe", "gemv": "grouped.product"}
_INSTEAD = {
    "decode": {"common": "persistent.brief"},
    "latent-moe-grouped": _GROUPED,
    "decode-grouped": {"decode": "grouped.decode", **_GROUPED},
}
"""By part: modules whose definitions stand in for those of the same names in another."""
_RENAMED = {"decode-rows": {("persistent.mla_attend", "weigh"): "weigh_values"}}
"""By part: names that two of its modules have, and what one of them is called there."""
_CANDIDATE = ("TUNABLES", "workspace", "constants", "prepare", "step")


@dataclass(frozen=True)
class _Definition:
    """A top-level definition: its text with the comments above it, and the names that it mentions."""

    text: tuple[str, ...]
    names: tuple[str, ...]
    mentions: frozenset[str]


@dataclass(frozen=True)
class _Module:
    """outer: what it imports from elsewhere, by name; inner: from which module of the seeds a name comes."""

    doc: str
    outer: Mapping[str, str]
    inner: Mapping[str, str]
    definitions: Sequence[_Definition]

    def find(self, name: str) -> _Definition | None:
        return next((d for d in self.definitions if name in d.names), None)


def source(part: str = "decode") -> str:
    """The candidate of `kimi-k3-<part>`. Raises ValueError if two of its definitions have one name."""
    entry, instead = _ENTRIES[part], _INSTEAD.get(part, {})
    order = _order(entry, [])
    for m in instead.values():
        _order(m, order)
    kept: dict[str, list[_Definition]] = {m: [] for m in order}
    todo = [(entry, name) for name in _CANDIDATE]
    while todo:
        module, name = todo.pop()
        found = _module(module).find(name)
        stand_in = instead.get(module, module)
        if found and stand_in != module and _module(stand_in).find(name):
            todo.append((stand_in, name))
        elif found and found not in kept[module]:
            kept[module].append(found)
            todo += [(module, x) for x in found.mentions]
        elif not found and name in _module(module).inner:
            todo.append((_module(module).inner[name], name))
    kept = {m: [d for d in _module(m).definitions if d in found] for m, found in kept.items()}
    kept = _renamed(kept, _RENAMED.get(part, {}))
    _refuse_twice(d for found in kept.values() for d in found)
    sections = [_section(m, found) for m, found in kept.items() if found]
    return "\n\n".join([f'"""{_module(entry).doc}"""', _imports(kept), *sections]) + "\n"


def _order(module: str, done: list[str]) -> list[str]:
    """The modules that one needs, each behind those it imports."""
    for needed in dict.fromkeys(_module(module).inner.values()):
        if needed not in done:
            _order(needed, done)
    if module not in done:
        done.append(module)
    return done


def _renamed(
    kept: Mapping[str, list[_Definition]], names: Mapping[tuple[str, str], str]
) -> dict[str, list[_Definition]]:
    """Functions of `names` under their new names, where they are defined and where they are called."""
    out = {}
    for module, found in kept.items():
        inner = _module(module).inner
        here = {
            old: new for (origin, old), new in names.items() if inner.get(old, module) == origin
        }
        out[module] = [_called(d, here) for d in found] if here else found
    return out


def _called(d: _Definition, names: Mapping[str, str]) -> _Definition:
    text = list(d.text)
    for old, new in names.items():
        text = [re.sub(rf"(?<![.\w]){old}(?=\()", new, line) for line in text]
    swap = [names.get(x, x) for x in d.names]
    return _Definition(tuple(text), tuple(swap), frozenset(names.get(x, x) for x in d.mentions))


def _refuse_twice(definitions: Iterable[_Definition]) -> None:
    names = [name for d in definitions for name in d.names]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"more than one definition of {', '.join(twice)}")


@cache
def _module(name: str) -> _Module:
    path = Path(__file__).parent.parent / f"{name.replace('.', '/')}.py"
    tree, lines = ast.parse(path.read_text()), path.read_text().splitlines()
    outer: dict[str, str] = {}
    inner: dict[str, str] = {}
    found: list[_Definition] = []
    end = 0
    for node in tree.body:
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        before, end = end, node.end_lineno or start
        names = _names(node)
        if isinstance(node, ast.Import):
            outer |= {a.asname or a.name.split(".")[0]: ast.unparse(node) for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if origin.startswith(_PACKAGE):
                inner |= {a.name: origin.removeprefix(_PACKAGE) for a in node.names}
            else:
                outer |= {a.name: f"from {origin} import" for a in node.names}
        elif names:
            comments = [x for x in lines[before : start - 1] if x.startswith("#")]
            text = (*comments, *lines[start - 1 : end])
            found.append(_Definition(text, names, _mentions(node)))
        elif found:
            # the prose below a constant
            held = found.pop()
            text = (*held.text, *lines[start - 1 : end])
            found.append(_Definition(text, held.names, held.mentions))
    return _Module(ast.get_docstring(tree, clean=False) or "", outer, inner, found)


def _names(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return (node.name,)
    if isinstance(node, ast.Assign):
        return tuple(x.id for t in node.targets for x in ast.walk(t) if isinstance(x, ast.Name))
    return ()


def _mentions(node: ast.stmt) -> frozenset[str]:
    return frozenset(x.id for x in ast.walk(node) if isinstance(x, ast.Name))


def _section(name: str, found: Sequence[_Definition]) -> str:
    module = _module(name)
    lines = [f"# ---- {name.rpartition('.')[2]}: {module.doc.splitlines()[0]}"]
    for d in found:
        lines += ["", *d.text]
    return "\n".join(lines)


def _imports(kept: Mapping[str, Sequence[_Definition]]) -> str:
    """What the definitions use of elsewhere, merged and sorted."""
    wanted: dict[str, set[str]] = {}
    for module, found in kept.items():
        used = {name for d in found for name in d.mentions}
        for name, origin in _module(module).outer.items():
            if name in used:
                wanted.setdefault(origin, set()).add(name)
    plain = sorted(x for x in wanted if not x.endswith(" import"))
    froms = sorted(x for x in wanted if x.endswith(" import"))
    return "\n".join([*plain, *(f"{x} {', '.join(sorted(wanted[x]))}" for x in froms)])
