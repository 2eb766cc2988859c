"""The catalogue of planted kernels: every edit still fits its seed, and the catalogue is as large as promised."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from targets.base import find
from targets.kimi_k3.planted import catalogue
from targets.planted import EditFailed, Planted, built_in

CATALOGUE = catalogue()
NAMED = {p.name: p for p in CATALOGUE}


@pytest.mark.parametrize("p", CATALOGUE, ids=lambda p: p.name)
def test_edits_fit_the_seed(p: Planted) -> None:
    text = p.text()
    assert (text != p.source) == bool(p.edits)
    assert p.edits or p.kind == "good"
    find(p.target).workload(p.options)


@pytest.mark.slow
def test_edits_leave_python() -> None:
    for p in CATALOGUE:
        ast.parse(p.text(), p.name)


def test_tunables_are_allowed_values() -> None:
    for p in CATALOGUE:
        found = re.search(r"^TUNABLES = (\{.*?^\}|\{.*\}$)", p.text(), re.M | re.S)
        assert found is not None, p.name
        declared = ast.literal_eval(found[1])
        for name, value in p.tunables.items():
            assert value in declared[name], (p.name, name)


def test_there_are_enough() -> None:
    kinds = Counter(p.kind for p in CATALOGUE)
    assert kinds["bug"] >= 60 and kinds["hack"] >= 25 and kinds["good"] >= 30
    assert len(NAMED) == len(CATALOGUE)
    parts = {p.name.partition("/")[0] for p in CATALOGUE if p.kind == "bug"}
    assert parts == {
        "gemv",
        "router",
        "attn-res",
        "kda",
        "mla",
        "latent-moe",
        "decode",
        "persistent",
        "allreduce-attn-res",
        "oproj-allreduce",
    }
    assert built_in() == CATALOGUE


def test_declared_noise_is_rare_and_always_about_roundings() -> None:
    quiet = [p for p in CATALOGUE if p.band]
    assert all(p.group in ("rounding", "precision") for p in quiet)
    assert len(quiet) <= 10


def test_a_changed_seed_fails_the_edit() -> None:
    p = NAMED["kda/beta-one-percent"]
    with pytest.raises(EditFailed, match="occurs 0 times"):
        replace(p, source=p.source.replace("beta = sigmoid", "beta = logistic")).text()
    with pytest.raises(EditFailed, match="occurs 2 times"):
        replace(p, source=p.source + p.edits[0][0]).text()
    with pytest.raises(EditFailed, match="changes nothing"):
        replace(p, edits=((p.edits[0][0],) * 2,)).text()


def test_the_catalogue_needs_neither_torch_nor_the_dsl() -> None:
    for path in Path(__file__).parents[2].glob("targets/kimi_k3/planted/*.py"):
        heads = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            for name in (
                [a.name for a in node.names] if isinstance(node, ast.Import)
                else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            )
        }  # fmt: skip
        assert heads <= {"__future__", "functools", "typing", "targets"}, path.name
