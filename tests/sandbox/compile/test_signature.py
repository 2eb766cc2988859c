"""What a candidate sees of a job, and what it may declare."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sandbox.compile.jail import errors, signature

CFG = SimpleNamespace(dims=SimpleNamespace(rows=4))


def module(**names: Any) -> ModuleType:
    found = ModuleType("candidate")
    vars(found).update(names)
    return found


def test_numbers_in_a_path_are_list_indices() -> None:
    paths = [f"weights.layers.{i}.w" for i in range(12)] + ["inputs.x", "states.a.1", "states.a.0"]
    tree = signature.tree(paths, paths)
    assert [layer.w for layer in tree.weights.layers] == paths[:12]
    assert tree.inputs.x == "inputs.x" and tree.states.a == ["states.a.0", "states.a.1"]
    assert vars(tree.outputs) == {}


@pytest.mark.parametrize(
    "paths",
    [["workspace.a", "workspace.a.b"], ["workspace.a.b", "workspace.a"], ["states.q", "states.q"]],
)
def test_names_that_collide_are_refused(paths: list[str]) -> None:
    with pytest.raises(errors.Refused) as caught:
        signature.tree(paths, paths)
    assert caught.value.rule == "names"


def test_config_takes_defaults_and_the_jobs_choice() -> None:
    job = {"tunables": {"mode": "b"}, "dims": {"rows": 4}, "arch": "sm_90a", "sms": 132}
    declared = signature.tunables(module(TUNABLES={"threads": (256, 128), "mode": ["a", "b"]}))
    cfg = signature.config(job, declared)
    assert (cfg.threads, cfg.mode, cfg.dims.rows, cfg.arch, cfg.sms) == (256, "b", 4, "sm_90a", 132)


@pytest.mark.parametrize("chosen", [{"flag": 1}, {"flag": "True"}, {"other": True}])
def test_a_choice_that_is_not_declared_is_refused(chosen: dict[str, Any]) -> None:
    declared = signature.tunables(module(TUNABLES={"flag": (True, False)}))
    with pytest.raises(errors.Refused) as caught:
        signature.config({"tunables": chosen, "dims": {}, "arch": "sm_90a", "sms": 1}, declared)
    assert caught.value.status == "rejected"


@pytest.mark.parametrize(
    "declared",
    [
        3,
        {"dims": (1,)},
        {"a b": (1,)},
        {1: (1,)},
        {"a": ()},
        {"a": 3},
        {"a": ([1],)},
        {"a": (None,)},
    ],
)
def test_tunables_of_another_form_are_refused(declared: Any) -> None:
    with pytest.raises(errors.Refused):
        signature.tunables(module(TUNABLES=declared))


@pytest.mark.parametrize(
    "entry",
    [
        ("f33", (4,), "zero", "step"), ("f32", (0,), "zero", "step"), ("f32", (4.0,), "zero", "step"),
        ("f32", (), "zero", "step"), ("f32", (4,), "ones", "step"), ("f32", (4,), "zero", "ever"), ("f32", (4,)),
    ],
)  # fmt: skip
def test_workspace_of_another_form_is_refused_by_name(entry: Any) -> None:
    with pytest.raises(errors.Refused, match="workspace\\['w'\\]"):
        signature.workspace(module(workspace=lambda dims, cfg: {"w": entry}), CFG)


def test_constants_keep_dtype_shape_and_row_major_bytes() -> None:
    table = np.arange(6, dtype=np.int32).reshape(2, 3).T
    tensors, data = signature.constants(
        module(constants=lambda dims, cfg: {"t": table, "s": np.float32(1.5)}), CFG
    )
    assert [(t.path, t.dtype, t.shape) for t in tensors] == [
        ("constants.t", "i32", (3, 2)), ("constants.s", "f32", (1,)),
    ]  # fmt: skip
    assert np.frombuffer(data[0], np.int32).tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("value", [["x"], np.array([1j]), np.zeros((0,)), np.array([True])])
def test_constants_without_a_dtype_of_ours_are_refused(value: Any) -> None:
    with pytest.raises(errors.Refused):
        signature.constants(module(constants=lambda dims, cfg: {"c": value}), CFG)
