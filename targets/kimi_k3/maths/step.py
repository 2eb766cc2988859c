"""One step of any of the targets: walks the layers and collects outputs and new states by buffer name.

Input tensors stay unchanged: states are cloned before they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from targets.kimi_k3.maths import attn_res, ffn
from targets.kimi_k3.maths.exchange import Exchange
from targets.kimi_k3.maths.kda import Slots, kda
from targets.kimi_k3.maths.layer import Layer, layer_of
from targets.kimi_k3.maths.mla import Paging, mla
from targets.kimi_k3.maths.precision import Schedule, bf, linear, rms
from targets.kimi_k3.options import PAIRED, Run, bank_rows

Tensors = dict[str, Tensor]


class Step:
    """`out` holds BF16 results in the working dtype until `results` gives them their buffers' dtypes.

    `masks`: elements of the states that the step writes.
    """

    peers: Callable[[int], Exchange] | None = None
    """Of layer n: real ranks instead of `inputs.remote`."""

    def __init__(self, run: Run, tensors: Tensors, schedule: Schedule, choose: ffn.Choose) -> None:
        self.run, self.t, self.s, self.choose = run, tensors, schedule, choose
        self.out: Tensors = {}
        self.masks: Tensors = {}

    def wide(self, name: str) -> Tensor:
        return self.t[name].to(self.s.dtype)

    def layer(self, n: int) -> Layer:
        found = layer_of(self.t, n)
        return replace(found, peers=self.peers(n)) if self.peers else found

    def attention(self, n: int, kind: str, x: Tensor) -> Tensor:
        layer = self.layer(n)
        partial = self._kda(n, x, layer) if kind == "K" else self._mla(n, x, layer)
        return layer.exchange.all_reduce("attn", partial)

    def _kda(self, n: int, x: Tensor, layer: Layer) -> Tensor:
        ids = self.t["inputs.slots"]
        if ids.ndim == 1:
            slots = Slots(ids[:, None], torch.ones_like(ids))
        else:
            slots = Slots(ids, self.t["inputs.accepted"])
        got = kda(self.s, x, layer, slots)
        stored = got.live[:, None] & (slots.ids > 0)
        written = {
            "S": (slots.ids[stored].long(), got.S[stored]),
            "conv": (slots.ids[:, 0][stored[:, 0]].long(), got.conv[stored[:, 0]]),
        }
        for name, (where, value) in written.items():
            old = layer.states[name]
            new = old.clone()
            new[where] = value.to(old.dtype)
            mask = torch.zeros(old.shape[0], dtype=torch.bool, device=old.device)
            mask[where] = True
            self._state(f"states.layers.{n}.{name}", new, mask)
        return got.partial

    def _mla(self, n: int, x: Tensor, layer: Layer) -> Tensor:
        pages = Paging(*(self.t[f"inputs.{k}"] for k in ("lengths", "block_table", "slot_mapping")))
        kv = layer.states["kv"].clone()
        partial = mla(self.s, x, Layer(layer.weights, {"kv": kv}, {}), pages).partial
        mask = torch.zeros(kv.shape[:2], dtype=torch.bool, device=kv.device)
        mask.view(-1)[pages.slot_mapping[pages.slot_mapping >= 0]] = True
        self._state(f"states.layers.{n}.kv", kv, mask)
        return partial

    def _state(self, name: str, value: Tensor, rows: Tensor) -> None:
        self.out[name] = value
        self.masks[name] = rows.reshape(*rows.shape, *([1] * (value.ndim - rows.ndim))).expand(
            value.shape
        )

    def ffn(self, n: int, kind: str, y: Tensor) -> Tensor:
        layer = self.layer(n)
        if kind == "D":
            w = layer.weights
            partial = ffn.gated(self.s, y, w["dense_gate_up"], w["dense_down"])
            return layer.exchange.all_reduce("dense", partial)
        got = ffn.moe(self.s, y, layer, self.choose)
        if got.send is not None:
            self.out[f"outputs.send.layers.{n}.shared"] = got.send
        return got.delta

    def decode(self) -> None:
        run, s, block = self.run, self.s, self.run.shape.sizes.block
        prefix = self.wide("inputs.x0")
        delta = self.wide("inputs.delta") if run.first else None
        bank = list(self.wide("inputs.bank").unbind(1)) if run.first else []
        taps = []
        for n, (attn, kind) in enumerate(zip(run.attn, run.ffn, strict=True)):
            model_layer = run.first + n
            opens, rows = model_layer % block == 0, -(-model_layer // block)
            w = layer_of(self.t, n).weights
            if delta is not None:
                prefix = bf(prefix + delta)
            if model_layer in run.tapped:
                taps.append(prefix)
            if opens:
                bank.append(prefix)
            x = attn_res.mix_norm(
                s, [*bank[:rows], prefix], (w["attn_res_norm"], w["attn_res_proj"], w["attn_norm"])
            )
            a = self.attention(n, attn, x)
            prefix, rows = (a, rows + 1) if opens else (bf(prefix + a), rows)
            y = attn_res.mix_norm(
                s, [*bank[:rows], prefix], (w["mlp_res_norm"], w["mlp_res_proj"], w["mlp_norm"])
            )
            delta = self.ffn(n, kind, y)
        assert delta is not None
        prefix = bf(prefix + delta)
        mixed = attn_res.mix(
            s, [*bank, prefix], self.t["weights.out_res_norm"], self.t["weights.out_res_proj"]
        )
        self.out["outputs.out"] = bf(rms(s, bf(mixed), self.t["weights.out_norm"]))
        self.out["outputs.prefix"] = prefix
        if taps:
            self.out["outputs.taps"] = torch.stack(taps)
        if len(bank) > run.bank_old:
            self.out["outputs.bank"] = torch.stack(bank[run.bank_old :], 1)

    def chain(self, part: str) -> None:
        """gemv, kda, mla and latent-moe: a fresh input is added to each instance's predecessor, or to what a candidate
        left of it (`left.NAME`)."""
        y: Tensor | None = None
        for i in range(self.run.layers):
            x = self.wide(f"inputs.x.{i}")
            x = x if y is None else bf(x + y)
            y = self._instance(part, i, x)
            self.out[f"outputs.y.{i}"] = y
            if f"left.outputs.y.{i}" in self.t:
                y = self.wide(f"left.outputs.y.{i}")

    def _instance(self, part: str, i: int, x: Tensor) -> Tensor:
        if part == "gemv":
            return bf(linear(self.s, x, self.t[f"weights.layers.{i}.w"]))
        if part == "latent-moe":
            return self.ffn(i, "E", x)
        return self.attention(i, {"kda": "K", "mla": "M"}[part], x)

    def router(self) -> None:
        weights = []
        for i in range(self.run.layers):
            layer = self.layer(i)
            logits = ffn.route(self.s, self.wide(f"inputs.x.{i}"), layer)
            bias = layer.weights["router_bias"]
            weights.append(ffn.weigh(logits, bias, self.choose(logits, bias)).weights)
        self.out["outputs.weights"] = torch.stack(weights)

    def attn_res(self) -> None:
        prefix = self.wide("inputs.x0")
        bank: list[Tensor] = []
        rows = bank_rows("attn-res", self.run)
        for i in range(self.run.layers):
            prefix = bf(prefix + self.wide(f"inputs.delta.{i}"))
            w = layer_of(self.t, i).weights
            self.out[f"outputs.y.{i}"] = attn_res.mix_norm(
                self.s, [*bank, prefix], (w["res_norm"], w["res_proj"], w["out_norm"])
            )
            if i < rows:
                bank.append(prefix)
        self.out["outputs.bank"] = torch.stack(bank, 1)
        self.out["outputs.prefix"] = prefix

    def reduced(self, part: str) -> None:
        """allreduce-attn-res and oproj-allreduce: AttnRes whose delta is summed over the ranks."""
        prefix = self.wide("inputs.x0")
        bank: list[Tensor] = []
        y: Tensor | None = None
        rows = bank_rows(part, self.run)
        projected = part == "oproj-allreduce"
        for i in range(self.run.layers):
            layer = self.layer(i)
            w = layer.weights
            given = self.wide(f"inputs.{'x' if projected else 'partial'}.{i}")
            if y is not None:
                given = bf(given + y[:, : given.shape[-1]])
            partial = bf(linear(self.s, given, w["o_proj"])) if projected else given
            prefix = bf(prefix + layer.exchange.all_reduce("attn", partial))
            y = attn_res.mix_norm(
                self.s, [*bank, prefix], (w["res_norm"], w["res_proj"], w["out_norm"])
            )
            self.out[f"outputs.y.{i}"] = y
            if i < rows:
                bank.append(prefix)
        self.out["outputs.bank"] = torch.stack(bank, 1)
        self.out["outputs.prefix"] = prefix


def walk(part: str, step: Step) -> None:
    if part in PAIRED:
        step.reduced(part)
    elif part in ("decode", "router", "attn-res"):
        {"decode": step.decode, "router": step.router, "attn-res": step.attn_res}[part]()
    else:
        step.chain(part)
