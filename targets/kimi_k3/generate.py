"""Weights, states and inputs of the Kimi K3 targets from a seed, at realistic scales.

A buffer's values depend on the seed and its name. Small workloads (and all inputs) are drawn on the CPU, so that every
device sees the same numbers; large ones are drawn on the device itself. Not a checkpoint loader.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from sandbox.artifact import Buffer
from targets.base import Workload
from targets.kimi_k3.buffers import Shape
from targets.kimi_k3.maths.mxfp4 import MAGNITUDES
from targets.kimi_k3.options import resolve
from targets.kimi_k3.sizes import PAGE_HEADROOM
from targets.reference import Tensors

SMALL_BYTES = 16 << 20
QUERY_GAIN = 2.0
"""Attention scores of standard deviation about 2: a few hundred tokens of a long context matter."""
CODE_RMS = math.sqrt(sum(m * m for m in MAGNITUDES) / len(MAGNITUDES))
NV_SCALE_RMS = 79.0
"""Of scales drawn evenly from 16 to 128."""
OUTPUT_GAIN = 6.0
"""Of MLA's o_proj: averages over many tokens are small, and its output should weigh as much as KDA's."""
REMOTE_STD = {"attn": 0.2, "moe": 0.04, "shared": 0.17, "dense": 0.17}
"""The sum of the other ranks' partials: about half of what it would be at eight ranks, so that it does not drown the
partial of this rank, which is what is checked."""


def shape_of(w: Workload) -> Shape:
    return resolve(w.target, w.options).shape


def generator(seed: int, name: str, device: str) -> torch.Generator:
    word = hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8]
    return torch.Generator(device).manual_seed(int.from_bytes(word, "little") >> 1)


class Draw:
    """Draws one buffer. `device`: where the values are made; `to`: where they go."""

    def __init__(self, buffer: Buffer, seed: int, device: str, to: str) -> None:
        self.shape, self.device, self.to = buffer.shape, device, to
        self.g = generator(seed, buffer.name, device)

    def normal(self, std: float, mean: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Row by row where the tensor is large, so that no float32 copy of it exists."""
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        flat = out.view(-1)
        for part in flat.split(1 << 26):
            part.copy_(torch.randn(part.shape, generator=self.g, device=self.device) * std + mean)
        return out.to(self.to)

    def uniform(self, low: float, high: float, dtype: torch.dtype = torch.float32) -> Tensor:
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        flat = out.view(-1)
        for part in flat.split(1 << 26):
            u = torch.rand(part.shape, generator=self.g, device=self.device)
            part.copy_(low + (high - low) * u)
        return out.to(self.to)

    def integers(self, low: int, high: int, dtype: torch.dtype) -> Tensor:
        """low <= value < high."""
        out = torch.randint(
            low, high, self.shape, generator=self.g, device=self.device, dtype=dtype
        )
        return out.to(self.to)


def weights(w: Workload, seed: int, device: str) -> Tensors:
    wanted = [b for b in w.buffers if b.group == "weights"]
    where = "cpu" if sum(b.nbytes for b in wanted) <= SMALL_BYTES else device
    return {b.name: _weight(w, b, Draw(b, seed, where, device)) for b in wanted}


def _weight(w: Workload, b: Buffer, draw: Draw) -> Tensor:
    leaf = b.name.rsplit(".", 1)[-1]
    hidden = int(w.dims["hidden"])
    if leaf in _VECTORS:
        return _VECTORS[leaf](draw)
    if leaf.endswith("res_proj"):
        return draw.normal(1.0 / math.sqrt(hidden))
    if leaf.endswith("norm"):
        return draw.normal(0.1, mean=1.0)
    if leaf.startswith(("w1", "w2", "w3")):
        return _expert(w, b, draw)
    if leaf == "in_proj":
        return _in_proj(w, draw)
    return draw.normal(_gain(w, b.name) / math.sqrt(fan_in(w, leaf, b.shape)))


def _conv(draw: Draw) -> Tensor:
    return draw.normal(0.5, dtype=torch.float32)


def _a_log(draw: Draw) -> Tensor:
    return draw.uniform(0.5, 2.0).log()


def _dt_bias(draw: Draw) -> Tensor:
    return draw.normal(1.5, mean=-3.0, dtype=torch.float32)


def _bias(draw: Draw) -> Tensor:
    return draw.normal(0.05, dtype=torch.float32)


def _cache_scale(draw: Draw) -> Tensor:
    return draw.uniform(0.5, 2.0)


_VECTORS = {
    "conv": _conv, "A_log": _a_log, "dt_bias": _dt_bias, "router_bias": _bias, "k_scale": _cache_scale,
    "q_scale": _cache_scale,
}  # fmt: skip


def _gain(w: Workload, name: str) -> float:
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "o_proj" and str(w.dims["attn"])[int(name.split(".")[2])] == "M":
        return OUTPUT_GAIN
    return QUERY_GAIN if leaf == "q_b" else 1.0


def fan_in(w: Workload, leaf: str, shape: tuple[int, ...]) -> int:
    """Summed elements of one output over all ranks, so that the full result keeps unit scale."""
    split = leaf in ("o_proj", "shared_down", "dense_down", "w2")
    columns = 2 * shape[-1] if leaf in ("w1", "w2", "w3") else shape[-1]
    return columns * (w.ranks if split else 1)


def _in_proj(w: Workload, draw: Draw) -> Tensor:
    out = draw.normal(1.0 / math.sqrt(draw.shape[1]))
    out[shape_of(w).sizes.in_proj_live :] = 0
    return out


def _expert(w: Workload, b: Buffer, draw: Draw) -> Tensor:
    """Codes; MXFP4: scales of three neighbouring powers of two. NVFP4: scales of three binades, and what is left of the
    wanted size in the factor, where no power of two is hidden."""
    leaf = b.name.rsplit(".", 1)[-1]
    matrix, _, kind = leaf.partition("_")
    if not kind:
        return draw.integers(0, 256, torch.uint8)
    codes = (1, int(w.dims["expert_dim" if matrix == "w2" else "latent"]) // 2)
    std = 1.0 / math.sqrt(fan_in(w, matrix, codes))
    if kind == "factor":
        return draw.uniform(0.7, 1.4).mul_(std / CODE_RMS / NV_SCALE_RMS)
    if b.dtype == "e4m3":
        return draw.uniform(16.0, 128.0, torch.float8_e4m3fn)
    middle = 127 + round(math.log2(std / CODE_RMS / 1.3))
    return draw.integers(middle - 1, middle + 2, torch.uint8)


def states(w: Workload, seed: int, device: str) -> Tensors:
    wanted = [b for b in w.buffers if b.group == "states"]
    where = "cpu" if sum(b.nbytes for b in wanted) <= SMALL_BYTES else device
    dtypes = {"f32": torch.float32, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
    out = {}
    for b in wanted:
        std = 0.2 if b.name.endswith(".S") else 1.0
        out[b.name] = Draw(b, seed, where, device).normal(std, dtype=dtypes[b.dtype])
    return out


def inputs(w: Workload, seed: int, step: int, device: str) -> Tensors:
    """Requests, slots and pages stay those of the seed; each step brings new activations, and every request is longer
    by one token, or with q > 1 by those that were accepted of the step before."""
    paging = paging_of(w, seed, step)
    out = {}
    for b in w.buffers:
        if b.group != "inputs":
            continue
        leaf = b.name.removeprefix("inputs.")
        if leaf in paging:
            out[b.name] = paging[leaf].to(device)
        else:
            draw = Draw(b, seed, "cpu", device)
            draw.g = generator(seed, f"{b.name}@{step}", "cpu")
            dtype = torch.float32 if b.dtype == "f32" else torch.bfloat16
            out[b.name] = draw.normal(_input_std(leaf), dtype=dtype)
    return out


def _input_std(leaf: str) -> float:
    kind = leaf.rsplit(".", 1)[-1]
    return REMOTE_STD.get(kind, 1.0) if leaf.startswith("remote.") else 1.0


def paging_of(w: Workload, seed: int, step: int) -> Tensors:
    """slots, accepted, lengths, block_table, slot_mapping. Request 0 has the full `context`, others up to 1/8 less."""
    p = shape_of(w)
    g = generator(seed, "paging", "cpu")
    slots = 1 + torch.randperm(p.slots - 1, generator=g)[: p.rows]
    pages = torch.randperm(p.pages, generator=g)[: p.requests * p.pages_per_request]
    table = pages.reshape(p.requests, p.pages_per_request)
    shorter = torch.randint(0, p.context // 8 + 1, (p.requests,), generator=g)
    shorter[0] = 0
    accepted = accepted_of(p, seed, step)
    grown = accepted[1:].sum(0) if p.q > 1 else step
    lengths = (p.context - shorter).clamp(min=p.q) + grown % PAGE_HEADROOM
    return {
        "slots": (slots if p.q == 1 else slots.reshape(p.requests, p.q)).to(torch.int32),
        "accepted": accepted[-1].to(torch.int32),
        "lengths": lengths.to(torch.int32),
        "block_table": table.to(torch.int32),
        "slot_mapping": cache_rows(table, lengths, (p.sizes.page, p.q)),
    }


def accepted_of(p: Shape, seed: int, step: int) -> Tensor:
    """[step + 1, B]: of each step up to this one, how many tokens of the step before it were kept, 1 to q."""
    g = generator(seed, "accepted", "cpu")
    return torch.randint(1, p.q + 1, (step + 1, p.requests), generator=g)


def cache_rows(table: Tensor, lengths: Tensor, form: tuple[int, int]) -> Tensor:
    """Flat cache rows of the last q tokens of each request, int64 [B q]; -1 for length 0. `form`: page, q."""
    page, q = form
    at = (lengths.long()[:, None] - q + torch.arange(q, device=lengths.device)).clamp(min=0)
    rows = table.long().gather(1, at // page) * page + at % page
    return torch.where(lengths[:, None] > 0, rows, torch.full_like(rows, -1)).flatten()
