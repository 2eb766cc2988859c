"""Baseline `graph`: one step in plain torch operations, made to be captured in a CUDA graph.

`prepare` binds the tensors and may derive small tables from the weights; `step` writes outputs and states in place.
The capture, the timing and the check against the reference are the judge's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from targets.base import Workload
from targets.kimi_k3.baseline import latent, ops, tokens
from targets.kimi_k3.maths.layer import Layer, layer_of
from targets.kimi_k3.options import Run, bank_rows, resolve, split
from targets.kimi_k3.ranks import gpus
from targets.reference import Tensors


@dataclass(frozen=True)
class Calls:
    """The pieces of a layer as functions of tensors: what `torch.compile` is given, one by one."""

    mix_norm: Callable[..., Tensor] = ops.mix_norm
    kda: Callable[..., Tensor] = ops.kda
    kda_tokens: Callable[..., Tensor] = tokens.kda_tokens
    mla: Callable[..., Tensor] = latent.mla
    moe: Callable[..., tuple[Tensor, Tensor, Tensor]] = ops.moe
    gated: Callable[..., Tensor] = ops.gated
    select: Callable[..., tuple[Tensor, Tensor]] = ops.routed


EAGER = Calls()


class TorchGraphBaseline:
    """Batched torch operations, BF16 products through cuBLAS, expert weights gathered and dequantised on the fly."""

    name = "graph"
    calls: Calls = EAGER

    def prepare(self, w: Workload, tensors: Tensors) -> None:
        """Once per set of tensors; `step` then always uses these. Raises NotImplementedError for several GPUs."""
        if gpus(w) > 1:
            raise NotImplementedError("these torch operations are for one GPU")
        self.part = split(w.target)[1]
        self.run: Run = resolve(w.target, w.options)
        self.t = tensors
        self.moe_index = 0
        self.layers = [self._layer(n) for n in range(self.run.layers)]
        device = next(iter(tensors.values())).device
        self.table = ops.quadruples(device)
        if self.part == "decode":
            self.out_mix = _product(tensors, "weights.out_res_norm", "weights.out_res_proj")

    def _layer(self, n: int) -> Layer:
        layer = layer_of(self.t, n)
        w = dict(layer.weights)
        for name in ("attn_res", "mlp_res", "res"):
            if f"{name}_norm" in w:
                w[f"{name}_mix"] = w[f"{name}_norm"].float() * w[f"{name}_proj"].float()
        if "conv" in w:
            w["conv_taps"] = w["conv"].T.contiguous()
            w["rate"] = torch.exp(w["A_log"]).unsqueeze(-1)
        return Layer(w, layer.states, layer.remote)

    @torch.no_grad()
    def step(self) -> None:
        self.moe_index = 0
        bodies = {"decode": self._decode, "router": self._router, "attn-res": self._attn_res}
        bodies.get(self.part, self._chain)()

    def _decode(self) -> None:
        t, run, block = self.t, self.run, self.run.shape.sizes.block
        prefix, delta = t["inputs.x0"], t.get("inputs.delta")
        bank = list(t["inputs.bank"].unbind(1)) if run.first else []
        taps = []
        for n, (attn, kind) in enumerate(zip(run.attn, run.ffn, strict=True)):
            number = run.first + n
            opens, rows = number % block == 0, -(-number // block)
            w = self.layers[n].weights
            prefix = prefix if delta is None else prefix + delta
            if number in run.tapped:
                taps.append(prefix)
            if opens:
                bank.append(prefix)
            x = self.calls.mix_norm([*bank[:rows], prefix], w["attn_res_mix"], w["attn_norm"])
            a = self._attention(n, attn, x)
            prefix, rows = (a, rows + 1) if opens else (prefix + a, rows)
            y = self.calls.mix_norm([*bank[:rows], prefix], w["mlp_res_mix"], w["mlp_norm"])
            delta = self._ffn(n, kind, y)
        prefix = prefix + delta
        mixed = ops.mix([*bank, prefix], self.out_mix).bfloat16()
        t["outputs.out"].copy_(ops.rms(mixed.float(), t["weights.out_norm"]))
        t["outputs.prefix"].copy_(prefix)
        if len(bank) > run.bank_old:
            t["outputs.bank"].copy_(torch.stack(bank[run.bank_old :], 1))
        if taps:
            t["outputs.taps"].copy_(torch.stack(taps))

    def _attention(self, n: int, kind: str, x: Tensor) -> Tensor:
        t, layer = self.t, self.layers[n]
        if kind == "K" and self.run.shape.q > 1:
            slots = (t["inputs.slots"], t["inputs.accepted"])
            partial = self.calls.kda_tokens(x, layer.weights, layer.states, slots)
        elif kind == "K":
            partial = self.calls.kda(x, layer.weights, layer.states, t["inputs.slots"])
        else:
            pages = latent.Paging(
                t["inputs.lengths"], t["inputs.block_table"], t["inputs.slot_mapping"]
            )
            partial = self.calls.mla(x, layer.weights, layer.states["kv"], pages)
        return ops.reduced(partial, layer.remote, "attn")

    def _ffn(self, n: int, kind: str, y: Tensor) -> Tensor:
        layer = self.layers[n]
        w, remote = layer.weights, layer.remote
        if kind == "D":
            partial = self.calls.gated(y, w["dense_gate_up"], w["dense_down"])
            return ops.reduced(partial, remote, "dense")
        ids, delta, send = self.calls.moe(y, w, remote, (self.table, self.run.shape.sizes.topk))
        self.t["outputs.ids"][self.moe_index].copy_(ids)
        self.moe_index += 1
        if send.shape[-1]:
            self.t[f"outputs.send.layers.{n}.shared"].copy_(send)
        return delta

    def _chain(self) -> None:
        y: Tensor | None = None
        for i in range(self.run.layers):
            x = self.t[f"inputs.x.{i}"]
            x = x if y is None else x + y
            if self.part == "gemv":
                y = F.linear(x, self.layers[i].weights["w"])
            elif self.part == "latent-moe":
                y = self._ffn(i, "E", x)
            else:
                y = self._attention(i, {"kda": "K", "mla": "M"}[self.part], x)
            self.t[f"outputs.y.{i}"].copy_(y)

    def _router(self) -> None:
        for i in range(self.run.layers):
            layer = self.layers[i]
            ids, weights = self.calls.select(
                self.t[f"inputs.x.{i}"], layer.weights, layer.remote, self.run.shape.sizes.topk
            )
            self.t["outputs.ids"][i].copy_(ids)
            self.t["outputs.weights"][i].copy_(weights)

    def _attn_res(self) -> None:
        prefix, bank = self.t["inputs.x0"], []
        for i in range(self.run.layers):
            prefix = prefix + self.t[f"inputs.delta.{i}"]
            w = self.layers[i].weights
            self.t[f"outputs.y.{i}"].copy_(
                self.calls.mix_norm([*bank, prefix], w["res_mix"], w["out_norm"])
            )
            if i < bank_rows("attn-res", self.run):
                bank.append(prefix)
        self.t["outputs.bank"].copy_(torch.stack(bank, 1))
        self.t["outputs.prefix"].copy_(prefix)


def _product(tensors: Tensors, norm: str, proj: str) -> Tensor:
    return tensors[norm].float() * tensors[proj].float()
