"""Bundles of the persistent kernels: whole, nothing twice, nothing of this repository left to import."""

from __future__ import annotations

import ast
import builtins

import pytest

from targets.kimi_k3.seeds import persistent

PARTS = ("decode", "decode-rows", "latent-moe-tiles", "latent-moe", "kda")


def defined(tree: ast.Module) -> list[str]:
    """Names of top-level definitions, in their order."""
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.Assign):
            targets = [x for t in node.targets for x in ast.walk(t)]
            found += [x.id for x in targets if isinstance(x, ast.Name)]
    return found


def imported(tree: ast.Module) -> set[str]:
    nodes = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    return {(a.asname or a.name).split(".")[0] for n in nodes for a in n.names}


def missing(tree: ast.Module) -> set[str]:
    """Names that are read and that nothing in the file gives a value."""
    nodes = list(ast.walk(tree))
    names = [n for n in nodes if isinstance(n, ast.Name)]
    known = {n.id for n in names if not isinstance(n.ctx, ast.Load)} | set(defined(tree))
    known |= {n.arg for n in nodes if isinstance(n, ast.arg)} | imported(tree)
    known |= {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
    return {n.id for n in names if isinstance(n.ctx, ast.Load)} - known - set(dir(builtins))


@pytest.mark.parametrize("part", PARTS)
def test_a_bundle_is_whole_and_has_every_name_once(part: str) -> None:
    tree = ast.parse(persistent.source(part))
    names = defined(tree)
    assert missing(tree) == set()
    assert sorted(names) == sorted(set(names)) and not set(names) & imported(tree)
    assert {"TUNABLES", "workspace", "prepare", "step"} <= set(names)
    modules = {n.module or "" for n in tree.body if isinstance(n, ast.ImportFrom)}
    assert not any(m.startswith(("targets", "agent", "sandbox")) for m in modules)


@pytest.mark.parametrize("part", PARTS)
def test_a_bundle_has_nothing_that_its_candidate_does_not_use(part: str) -> None:
    tree = ast.parse(persistent.source(part))
    read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    entries = {"TUNABLES", "workspace", "constants", "prepare", "step"}
    lone = {
        n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)
    } - read - entries  # fmt: skip
    assert lone == set()


def test_the_decode_step_has_the_short_forms() -> None:
    assert "ex2.approx.f32 e, e" in persistent.source("decode")
    assert "ex2.approx.f32 e, e" not in persistent.source("kda")
