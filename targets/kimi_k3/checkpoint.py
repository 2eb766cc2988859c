"""`--weights DIR`: the weights of a workload from a Kimi K3 checkpoint, cut to rank 0 of its ranks.

Names are those of the published checkpoint. A stack takes the layers it runs; an instance of a piece takes the next
layer of its kind that the folder holds whole. Routing follows the real router, but activations stay random: what enters
the layers is no text. Expert bytes are taken as they are; `maths.mxfp4` says how they are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from sandbox.artifact import Buffer
from targets.base import Workload
from targets.kimi_k3.buffers import Shape
from targets.kimi_k3.options import Run, resolve, split
from targets.kimi_k3.safetensors import CheckpointError, Folder
from targets.reference import Tensors

_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "u8": torch.uint8}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
_MOE = "block_sparse_moe."
_ROUTER_BIAS = ("gate.e_score_correction_bias", "gate.bias", "e_score_correction_bias")
"""Spellings of the router's correction bias; the documents at hand do not settle which one is stored."""
_DENSE = ("mlp", "block_sparse_moe", "feed_forward")
_NORMS = {
    "attn_res_norm": "self_attention_res_norm", "attn_res_proj": "self_attention_res_proj",
    "attn_norm": "input_layernorm", "mlp_res_norm": "mlp_res_norm", "mlp_res_proj": "mlp_res_proj",
    "mlp_norm": "post_attention_layernorm",
}  # fmt: skip
_OUTER = {
    "out_res_norm": "output_attn_res_norm",
    "out_res_proj": "output_attn_res_proj",
    "out_norm": "norm",
}


class Source:
    """The tensors of one folder, by layer and the rest of their name."""

    def __init__(self, folder: Path) -> None:
        self.folder = Folder(folder)
        self.layers: dict[int, dict[str, str]] = {}
        self.outer: dict[str, str] = {}
        for name in self.folder.entries:
            found = _LAYER.search(name)
            if found:
                self.layers.setdefault(int(found[1]), {})[found[2]] = name
            else:
                self.outer[name.removesuffix(".weight").rsplit(".", 1)[-1]] = name

    def layer(self, n: int) -> LayerSource:
        if n not in self.layers:
            have = ", ".join(map(str, sorted(self.layers))) or "none"
            raise CheckpointError(f"{self.folder.folder}: no layer {n}; there are {have}")
        return LayerSource(self.folder, self.layers[n], n)

    def of_kind(self, wanted: Callable[[int], bool]) -> list[int]:
        return [n for n in sorted(self.layers) if wanted(n)]


class LayerSource:
    """One layer: `source("self_attn.q_proj")`."""

    def __init__(self, folder: Folder, names: Mapping[str, str], n: int) -> None:
        self.folder, self.names, self.n = folder, names, n

    def __call__(self, *spellings: str) -> Tensor:
        for name in spellings:
            for full in (name, f"{name}.weight"):
                if full in self.names:
                    return self.folder.get(self.names[full])
        raise CheckpointError(f"layer {self.n}: no {' or '.join(spellings)}")


@lru_cache(maxsize=2)
def source_of(folder: str) -> Source:
    return Source(Path(folder))


def load(w: Workload, device: str) -> Tensors:
    """Every buffer of group weights. Raises CheckpointError."""
    source = source_of(str(w.options.extra["weights"]))
    run, part = resolve(w.target, w.options), split(w.target)[1]
    if run.shape.experts != "mxfp4":
        raise CheckpointError("a checkpoint holds MXFP4 experts here; NVFP4 names are not known")
    models = layers_of(source, part, run)
    made: dict[str, Tensor] = {}
    for n, number in enumerate(models):
        for name, value in layer_weights(source.layer(number), part, run, n):
            made[f"weights.layers.{n}.{name}"] = value
    for name, stored in _OUTER.items() if part == "decode" else ():
        if stored not in source.outer:
            raise CheckpointError(f"no {stored}.weight beside the layers")
        made[f"weights.{name}"] = source.folder.get(source.outer[stored])
    return {b.name: _fitted(b, made, device) for b in w.buffers if b.group == "weights"}


def layers_of(source: Source, part: str, run: Run) -> list[int]:
    """Which layer of the model each layer of the run is."""
    s = run.shape.sizes
    if part == "decode":
        return list(run.models_layers)
    kinds: dict[str, Callable[[int], bool]] = {
        "kda": lambda n: not s.is_mla(n), "mla": s.is_mla, "latent-moe": lambda n: not s.is_dense(n),
        "router": lambda n: not s.is_dense(n),
    }  # fmt: skip
    found = source.of_kind(kinds[part])
    if len(found) < run.layers:
        raise CheckpointError(
            f"{source.folder.folder}: {len(found)} layers for {part} ({', '.join(map(str, found))}), not {run.layers}"
        )
    return found[: run.layers]


def layer_weights(get: LayerSource, part: str, run: Run, n: int) -> Iterator[tuple[str, Tensor]]:
    p = run.shape
    if part == "decode":
        yield from ((name, get(stored)) for name, stored in _NORMS.items())
        yield from kda_of(get, p) if run.attn[n] == "K" else mla_of(get, p)
        yield from moe_of(get, p) if run.ffn[n] == "E" else dense_of(get, p)
    elif part == "latent-moe":
        yield from moe_of(get, p)
    elif part == "router":
        yield from router_of(get, p)
    else:
        yield from kda_of(get, p) if part == "kda" else mla_of(get, p)


def kda_of(get: LayerSource, p: Shape) -> Iterator[tuple[str, Tensor]]:
    s, d = p.sizes, p.sizes.kda_dim
    at = "self_attn."
    rows = [get(f"{at}{x}_proj")[:d] for x in "qkvg"] + [
        get(f"{at}f_a_proj"),
        get(f"{at}b_proj")[: s.kda_heads],
    ]
    pad = rows[0].new_zeros(s.in_proj_rows - s.in_proj_live, s.hidden)
    yield "in_proj", torch.cat([*rows, pad])
    yield "f_b", get(f"{at}f_b_proj")[:d]
    yield "conv", torch.cat([get(f"{at}{x}_conv1d")[:d].reshape(d, -1) for x in "qkv"])
    yield "A_log", get(f"{at}A_log").flatten()[: s.kda_heads]
    yield "dt_bias", get(f"{at}dt_bias").flatten()[:d]
    yield "o_norm", get(f"{at}o_norm")
    yield "o_proj", get(f"{at}o_proj")[:, :d]


def mla_of(get: LayerSource, p: Shape) -> Iterator[tuple[str, Tensor]]:
    s, at = p.sizes, "self_attn."
    kv = get(f"{at}kv_b_proj")[: s.mla_heads * (s.qk_nope + s.v_dim)]
    kv = kv.reshape(s.mla_heads, s.qk_nope + s.v_dim, s.kv_lora)
    gate = get(f"{at}g_proj")[: s.mla_dim]
    yield "a_proj", torch.cat([get(f"{at}q_a_proj"), get(f"{at}kv_a_proj_with_mqa"), gate])
    yield "q_a_norm", get(f"{at}q_a_layernorm")
    yield "kv_a_norm", get(f"{at}kv_a_layernorm")
    yield "q_b", get(f"{at}q_b_proj")[: s.mla_heads * (s.qk_nope + s.qk_rope)]
    yield "w_uk", kv[:, : s.qk_nope]
    yield "w_uv", kv[:, s.qk_nope :]
    yield "o_proj", get(f"{at}o_proj")[:, : s.mla_dim]
    if p.kv == "fp8":
        one = torch.ones(1)
        yield "k_scale", one
        yield "q_scale", one


def router_of(get: LayerSource, p: Shape) -> Iterator[tuple[str, Tensor]]:
    yield "router", get(f"{_MOE}gate")[: p.router_rows]
    yield "router_bias", get(*(_MOE + x for x in _ROUTER_BIAS))


def moe_of(get: LayerSource, p: Shape) -> Iterator[tuple[str, Tensor]]:
    s = p.sizes
    yield from router_of(get, p)
    yield "latent_down", get(f"{_MOE}routed_expert_down_proj")[: p.latent_rows]
    for name in ("w1", "w3", "w2"):
        yield (
            name,
            torch.stack(
                [
                    expert(get, e, f"{name}.weight_packed", (s.expert_dim, 2))
                    for e in range(s.experts)
                ]
            ),
        )
        scales = [
            expert(get, e, f"{name}.weight_scale", (s.expert_dim, 32)) for e in range(s.experts)
        ]
        yield f"{name}_scale", torch.stack(scales)
    yield "latent_norm", get(f"{_MOE}routed_expert_norm")
    yield "latent_up", get(f"{_MOE}routed_expert_up_proj")[: s.hidden_local]
    yield from _gated(get, (f"{_MOE}shared_experts",), "shared", s.shared_dim)


def expert(get: LayerSource, e: int, name: str, form: tuple[int, int]) -> Tensor:
    """This rank's slice: rows of w1 and w3, columns of w2. `form`: intermediate size, columns an element of the row."""
    size, columns = form
    found = get(f"{_MOE}experts.{e}.{name}")
    return found[:, : size // columns] if name.startswith("w2") else found[:size]


def dense_of(get: LayerSource, p: Shape) -> Iterator[tuple[str, Tensor]]:
    yield from _gated(get, _DENSE, "dense", p.sizes.dense_dim)


def _gated(
    get: LayerSource, under: tuple[str, ...], name: str, size: int
) -> Iterator[tuple[str, Tensor]]:
    gate, up, down = (get(*(f"{u}.{x}_proj" for u in under)) for x in ("gate", "up", "down"))
    yield f"{name}_gate_up", torch.cat([gate[:size], up[:size]])
    yield f"{name}_down", down[:, :size]


def _fitted(b: Buffer, made: Mapping[str, Tensor], device: str) -> Tensor:
    if b.name not in made:
        raise CheckpointError(f"nothing of the checkpoint makes {b.name}")
    value = made[b.name]
    if value.ndim == 2 and len(b.shape) == 1 and value.shape[0] == 1:
        value = value[0]
    if tuple(value.shape) != b.shape:
        raise CheckpointError(
            f"{b.name}: the checkpoint gives {list(value.shape)}, not {list(b.shape)}"
        )
    if (value.dtype == torch.uint8) != (b.dtype == "u8"):
        raise CheckpointError(f"{b.name}: the checkpoint holds {value.dtype}, not {b.dtype}")
    out = torch.empty(b.shape, dtype=_DTYPES[b.dtype], device=device)
    return out.copy_(value)
