"""KDA against a second implementation: the whole sequence at once in parallel form, from a zero state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from targets.base import Workload
from targets.kimi_k3 import disturb
from targets.reference import Tensors
from tests.targets.kimi import rel, run, tensors, workload

STEPS = 24


def parallel_kda(x: Tensor, w: Tensors, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """x [T, hidden] of one request -> (o_proj output [T, hidden], S [H, V, K] at the end), float64.

    With cumulated log decays G, the writes d solve (I + B tril(A)) d = B v, A[t, s] = sum_k k_t k_s exp(G_t - G_s): the
    chunk form of the delta rule over one chunk of the whole length.
    """
    d = heads * dim
    x = x.double()

    def rounded(v: Tensor) -> Tensor:
        return v.bfloat16().double()

    y = rounded(x @ w["in_proj"].double().T)
    qkv, g, f_a, b = (
        y[:, : 3 * d],
        y[:, 3 * d : 4 * d],
        y[:, 4 * d : 4 * d + 128],
        y[:, 4 * d + 128 :][:, :heads],
    )
    if "g_b" in w:
        b, f_a = y[:, 3 * d :][:, :heads], y[:, 3 * d + heads :][:, :128]
        g = rounded(y[:, 3 * d + heads + 128 :][:, :128] @ w["g_b"].double().T)
    padded = F.pad(qkv.T[None], (3, 0))
    u = F.silu(F.conv1d(padded, w["conv"].double()[:, None], groups=3 * d)[0].T)
    q, k, v = u.reshape(-1, 3, heads, dim).unbind(1)
    q = q / torch.sqrt((q**2).sum(-1, keepdim=True) + 1e-6) / dim**0.5
    k = k / torch.sqrt((k**2).sum(-1, keepdim=True) + 1e-6)
    raw = rounded(f_a @ w["f_b"].double().T) + w["dt_bias"].double()
    rate = w["A_log"].double().exp()[:, None]
    total = torch.cumsum(-5.0 / (1.0 + torch.exp(-rate * raw.reshape(-1, heads, dim))), 0)
    beta = torch.sigmoid(b)
    steps = x.shape[0]
    outs, finals = [], []
    for h in range(heads):
        G = total[:, h]
        weight = torch.exp((G[:, None] - G[None]).clamp(max=0))
        keys = torch.einsum("tk,sk,tsk->ts", k[:, h], k[:, h], weight).tril(-1)
        system = torch.eye(steps, dtype=torch.float64) + beta[:, h, None] * keys
        writes = torch.linalg.solve_triangular(system, beta[:, h, None] * v[:, h], upper=False)
        reads = torch.einsum("tk,sk,tsk->ts", q[:, h], k[:, h], weight).tril()
        outs.append(reads @ writes)
        finals.append(torch.einsum("sv,sk->vk", writes, k[:, h] * weight[-1]))
    o = torch.stack(outs, 1)
    normed = o / torch.sqrt((o**2).mean(-1, keepdim=True) + 1e-5) * w["o_norm"].double()
    out = rounded(normed * torch.sigmoid(g.reshape(-1, heads, dim))).reshape(steps, d)
    return rounded(out @ w["o_proj"].double().T), torch.stack(finals)


def walk(w: Workload, t: Tensors) -> tuple[list[Tensor], Tensors]:
    """STEPS oracle steps on carried states: outputs of instance 0 and the tensors after the last step."""
    outs = []
    for step in range(STEPS):
        t = {**t, "inputs.x.0": tensors(w, step=step)["inputs.x.0"]}
        got = run(w, t).tensors
        outs.append(got["outputs.y.0"])
        t = {**t, **{k: v for k, v in got.items() if k.startswith("states.")}}
    return outs, t


def test_steps_equal_the_sequence_from_scratch() -> None:
    w = workload("kda", rows=2, layers=1)
    t = tensors(w)
    for name in ("S", "conv"):
        t[f"states.layers.0.{name}"] = torch.zeros_like(t[f"states.layers.0.{name}"])
    outs, after = walk(w, t)
    weights = {k.rsplit(".", 1)[1]: v for k, v in t.items() if k.startswith("weights.")}
    xs = torch.stack([tensors(w, step=s)["inputs.x.0"] for s in range(STEPS)])
    for m, slot in enumerate(t["inputs.slots"].tolist()):
        y, S = parallel_kda(xs[:, m], weights, int(w.dims["kda_heads"]), 128)
        assert rel(after["states.layers.0.S"][slot], S) < 1e-6
        assert rel(torch.stack([o[m] for o in outs]), y) < 2e-4


def test_permuting_heads_changes_nothing() -> None:
    w = workload("kda", rows=2, layers=1)
    t = tensors(w)
    d, heads = int(w.dims["kda_dim"]), int(w.dims["kda_heads"])
    channel = torch.arange(d).reshape(heads, 128).flip(0).reshape(-1)
    fused = torch.cat([channel + part * d for part in range(3)])
    rows = torch.arange(int(w.dims["in_proj_rows"]))
    rows[: 4 * d] = torch.cat([fused, channel + 3 * d])
    rows[4 * d + 128 : 4 * d + 128 + heads] = rows[4 * d + 128 : 4 * d + 128 + heads].flip(0)
    p = dict(t)
    at = "weights.layers.0."
    p[f"{at}in_proj"] = t[f"{at}in_proj"][rows]
    p[f"{at}f_b"], p[f"{at}dt_bias"] = t[f"{at}f_b"][channel], t[f"{at}dt_bias"][channel]
    p[f"{at}conv"], p[f"{at}A_log"] = t[f"{at}conv"][fused], t[f"{at}A_log"].flip(0)
    p[f"{at}o_proj"] = t[f"{at}o_proj"][:, channel]
    p["states.layers.0.conv"] = t["states.layers.0.conv"][..., fused]
    p["states.layers.0.S"] = t["states.layers.0.S"].flip(1)
    plain, other = run(w, t).tensors, run(w, p).tensors
    assert rel(other["outputs.y.0"], plain["outputs.y.0"]) < 1e-4
    assert torch.equal(other["states.layers.0.S"].flip(1), plain["states.layers.0.S"])


def test_a_null_slot_gives_zero_and_touches_nothing_else() -> None:
    w = workload("kda", "tiny-tp2", rows=4)
    t = tensors(w)
    n = disturb.apply(w, "null_request", 3, t)
    plain, null = run(w, t), run(w, n)
    assert n["inputs.slots"][0] <= 0
    slot = int(t["inputs.slots"][0])
    for i in range(w.layers):
        assert null.tensors[f"outputs.y.{i}"][0].abs().max() == 0
        assert torch.equal(null.tensors[f"outputs.y.{i}"][1:], plain.tensors[f"outputs.y.{i}"][1:])
        for name in (f"states.layers.{i}.S", f"states.layers.{i}.conv"):
            assert torch.equal(null.tensors[name][0], t[name][0]) and not null.masks[name][0].any()
            assert torch.equal(null.tensors[name][slot], t[name][slot])
            assert not torch.equal(plain.tensors[name][slot], t[name][slot])


def test_the_state_is_only_written_where_the_mask_says() -> None:
    w = workload("kda", rows=4)
    t = tensors(w)
    got = run(w, t)
    for name, mask in got.masks.items():
        assert torch.equal(got.tensors[name][~mask], t[name][~mask])
        assert set(mask.flatten(1).any(1).nonzero().flatten().tolist()) == set(
            t["inputs.slots"].tolist()
        )
