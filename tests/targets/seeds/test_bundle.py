"""The bundler: one self-contained, readable, deterministic candidate file per target."""

from __future__ import annotations

import ast
import builtins
import symtable

import pytest

from targets.base import find
from targets.kimi_k3 import seeds

PARTS = ("attn-res", "decode", "gemv", "kda", "latent-moe", "mla", "router")


def names_used_at_top(text: str) -> set[str]:
    """Names that functions and classes of the file expect to find in the module."""
    used: set[str] = set()

    def visit(table: symtable.SymbolTable) -> None:
        for symbol in table.get_symbols():
            if symbol.is_global() and symbol.is_referenced():
                used.add(symbol.get_name())
        for child in table.get_children():
            visit(child)

    visit(symtable.symtable(text, "candidate.py", "exec"))
    return used


def names_defined_at_top(text: str) -> set[str]:
    table = symtable.symtable(text, "candidate.py", "exec")
    return {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}


@pytest.mark.parametrize("part", PARTS)
def test_a_bundle_imports_only_the_dsl_and_the_standard_library(part: str) -> None:
    tree = ast.parse(seeds.source(f"kimi-k3-{part}"))
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            roots.add((node.module or "").split(".")[0])
    assert roots <= {"cutlass", "dataclasses", "types", "typing"} and "cutlass" in roots


@pytest.mark.parametrize("part", PARTS)
def test_a_bundle_defines_every_name_that_it_uses_and_none_twice(part: str) -> None:
    text = seeds.source(f"kimi-k3-{part}")
    missing = names_used_at_top(text) - names_defined_at_top(text) - set(dir(builtins))
    assert missing == set()
    defined = [
        n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.ClassDef)
    ]
    assert len(defined) == len(set(defined))


@pytest.mark.parametrize("part", PARTS)
def test_a_bundle_is_a_candidate_with_tunables_and_headings(part: str) -> None:
    text = seeds.source(f"kimi-k3-{part}")
    tree = ast.parse(text)
    found = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    assert [a.arg for a in found["step"].args.args] == ["t", "cfg", "stream"]
    tunables = [
        ast.literal_eval(n.value)
        for n in tree.body
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "TUNABLES"
    ]
    assert len(tunables) == 1 and all(len(values) > 1 for values in tunables[0].values())
    assert ast.get_docstring(tree)
    assert text.count("\n# ---- ") >= 2


def test_the_parts_of_a_piece_are_one_section_below_its_constants() -> None:
    text = seeds.source("kimi-k3-mla")
    headings = [x.split(":")[0] for x in text.splitlines() if x.startswith("# ---- ")]
    assert headings == ["# ---- common", "# ---- gemv", "# ---- mla"]
    section = text[text.index("# ---- mla") :]
    order = ("TUNABLES = ", "class Mla", "def absorb_kernel", "def combine_kernel", "def step")
    places = [section.index(x) for x in order]
    assert places == sorted(places)


@pytest.mark.slow
def test_a_bundle_is_the_same_text_every_time_and_what_the_target_hands_out() -> None:
    for part in PARTS:
        name = f"kimi-k3-{part}"
        assert seeds.source(name) == seeds.source(name) == find(name).seed_source()


@pytest.mark.parametrize(
    "name",
    ["kimi-k3-common", "kimi-k3-nothing", "gemv", "kimi-k3-../spec", "kimi-k3-mla-attention"],
)
def test_what_is_no_target_has_no_seed(name: str) -> None:
    with pytest.raises(ValueError, match="no seed"):
        seeds.source(name)
