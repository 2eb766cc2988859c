"""One GLM-5.3-Flash KDA layer as a target of the same classes: facts of the model, and the sequence from scratch."""

from __future__ import annotations

import pytest
import torch

from targets.base import Options, UnknownOption, Workload, find
from targets.kimi_k3.spec import KimiTarget
from targets.reference import Tensors
from tests.targets.kimi import REFERENCE, rel, run, tensors
from tests.targets.test_kimi_kda import parallel_kda

NAME = "glm-5.3-flash-kda"


def glm(preset: str = "tiny", rows: int = 2, layers: int = 1, **extra: int) -> Workload:
    return find(NAME).workload(Options(preset, layers, rows, extra=extra))


def test_parameters_and_state_of_the_whole_layer() -> None:
    """138 million parameters a layer over all ranks, f_a and g_a counted once, and 4.19 MB of state a request."""
    w = glm("tp4", rows=1)
    shapes = {b.name.rsplit(".", 1)[1]: b.shape for b in w.buffers if b.group == "weights"}
    replicated = 2 * 128 * 4096
    assert shapes["in_proj"] == (3 * 2048 + 16 + 2 * 128, 4096)
    split = (
        sum(shapes[n][0] * shapes[n][1] for n in ("in_proj", "f_b", "g_b", "o_proj")) - replicated
    )
    assert 4 * split + replicated == pytest.approx(138e6, rel=5e-3)
    state = next(b for b in w.buffers if b.name.endswith(".S"))
    assert 4 * state.nbytes / state.shape[0] == pytest.approx(4.19e6, rel=2e-3)
    taps = 3 * 3 * 2048 * 2
    assert w.floor.write_bytes == state.nbytes // state.shape[0] + taps


@pytest.mark.parametrize("q", [1, 2])
def test_steps_equal_the_sequence_from_scratch(q: int) -> None:
    w = glm(rows=q, q=q)
    t = tensors(w)
    for name in ("S", "conv"):
        t[f"states.layers.0.{name}"] = torch.zeros_like(t[f"states.layers.0.{name}"])
    weights: Tensors = {k.rsplit(".", 1)[1]: v for k, v in t.items() if k.startswith("weights.")}
    xs, ys = [], []
    for step in range(6):
        t |= REFERENCE.inputs(w, 1, step, "cpu")
        if step and q > 1:
            t["inputs.accepted"][:] = q
        got = run(w, t).tensors
        xs.append(t["inputs.x.0"])
        ys.append(got["outputs.y.0"])
        t |= {k: v for k, v in got.items() if k.startswith("states.")}
    y, S = parallel_kda(torch.cat(xs), weights, int(w.dims["kda_heads"]), 128)
    slot = int(t["inputs.slots"].flatten()[-1])
    assert rel(t["states.layers.0.S"][slot], S) < 1e-6
    assert rel(torch.cat(ys), y) < 1e-3


def test_the_gate_matters_and_is_explained() -> None:
    w = glm()
    t = tensors(w)
    off = {**t, "weights.layers.0.g_b": torch.zeros_like(t["weights.layers.0.g_b"])}
    assert rel(run(w, off).tensors["outputs.y.0"], run(w, t).tensors["outputs.y.0"]) > 0.1
    target = find(NAME)
    assert isinstance(target, KimiTarget)
    assert "g_b" in target.brief and "kda_tokens_kernel" in target.seed_source()
    for options in (Options("tp16"), Options(extra={"kv": "fp8"})):
        with pytest.raises(UnknownOption):
            target.workload(options)
