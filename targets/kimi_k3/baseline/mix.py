"""Baseline `mix`: the best mix of public parts that runs. Triton kernels for the fused pieces, cuBLAS where it wins.

`prepare` makes the list of launches of one step, about a dozen a layer, joined by programmatic dependent launch; `step`
runs it. Kernels of other libraries are tried where they can be imported (`notes` say what came of each). The trials
leave states as they were. It needs the triton package: without it `prepare` raises, and the judge says that it was
skipped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from targets.base import Workload
from targets.kimi_k3.baseline import parts
from targets.kimi_k3.maths.layer import layer_of
from targets.kimi_k3.options import Run, bank_rows, resolve
from targets.reference import Tensors

Launch = Callable[[], None]


class MixBaseline:
    """One step as a list of launches over buffers made in `prepare`."""

    name = "mix"

    def prepare(self, w: Workload, tensors: Tensors) -> None:
        """Once per set of tensors. Raises ImportError without triton, NotImplementedError for a variant."""
        _refuse(w)
        self.part = w.target.removeprefix("kimi-k3-")
        self.run: Run = resolve(self.part, w.options)
        self.t = tensors
        self.make = parts.Maker(self.run.shape, next(iter(tensors.values())).device)
        self.plan: list[Launch] = []
        self.moe_index = 0
        bodies = {"decode": self._decode, "router": self._router, "attn-res": self._attn_res}
        bodies.get(self.part, self._chain)()
        self.notes = tuple(f"{what}: {said}" for what, said in self.make.shelf.notes.items())

    @torch.no_grad()
    def step(self) -> None:
        for launch in self.plan:
            launch()

    def _decode(self) -> None:
        t, run, block = self.t, self.run, self.run.shape.sizes.block
        x, attn, delta = (self.make.wide() for _ in range(3))
        prefix, incoming = t["inputs.x0"], t.get("inputs.delta")
        banks = parts.Banks(
            t.get("inputs.bank"), t.get("outputs.bank"), t["outputs.prefix"], run.bank_old
        )
        for n, (kind, ffn) in enumerate(zip(run.attn, run.ffn, strict=True)):
            number = run.first + n
            opens, rows = number % block == 0, -(-number // block)
            w = layer_of(t, n).weights
            row = number // block - run.bank_old if opens else -1
            mix = parts.Mix(w["attn_res_norm"], w["attn_res_proj"], w["attn_norm"])
            first = parts.Mixed(prefix, incoming, x, rows, row=row)
            coming = w.get("in_proj", w.get("a_proj"))
            self._add(self.make.attn_res(banks, mix, first, coming))
            prefix = t["outputs.prefix"]
            self._attention(n, kind, x, attn)
            mix = parts.Mix(w["mlp_res_norm"], w["mlp_res_proj"], w["mlp_norm"])
            second = (
                parts.Mixed(attn, None, x, rows + 1)
                if opens
                else parts.Mixed(prefix, attn, x, rows)
            )
            coming = w.get("shared_gate_up", w.get("dense_gate_up"))
            self._add(self.make.attn_res(banks, mix, second, coming))
            self._ffn(n, ffn, x, delta)
            incoming = delta
        mix = parts.Mix(t["weights.out_res_norm"], t["weights.out_res_proj"], t["weights.out_norm"])
        last = parts.Mixed(prefix, delta, t["outputs.out"], run.bank_rows, closing=True)
        self._add(self.make.attn_res(banks, mix, last))

    def _add(self, launch: Launch | list[Launch]) -> None:
        self.plan += launch if isinstance(launch, list) else [launch]

    def _attention(self, n: int, kind: str, x: Tensor, out: Tensor) -> None:
        layer = layer_of(self.t, n)
        if kind == "K":
            self._add(self.make.kda(layer, self.t["inputs.slots"], x, out))
        else:
            paging = {k: self.t[f"inputs.{k}"] for k in ("lengths", "block_table", "slot_mapping")}
            self._add(self.make.mla(layer, paging, x, out))

    def _ffn(self, n: int, kind: str, x: Tensor, out: Tensor) -> None:
        layer = layer_of(self.t, n)
        if kind == "D":
            self._add(self.make.dense(layer, x, out))
            return
        ids = self.t["outputs.ids"][self.moe_index]
        self.moe_index += 1
        send = self.t.get(f"outputs.send.layers.{n}.shared")
        self._add(self.make.moe(layer, (ids, send), x, out))

    def _chain(self) -> None:
        """The pieces: a fresh input is added to each instance's predecessor."""
        total, before = self.make.wide(), None
        for i in range(self.run.layers):
            x, y = self.t[f"inputs.x.{i}"], self.t[f"outputs.y.{i}"]
            if before is not None:
                self._add(_sum(x, before, total))
                x = total
            if self.part == "gemv":
                w = layer_of(self.t, i).weights["w"]
                self._add(self.make.linear("gemv", (x, w, y)))
            elif self.part == "latent-moe":
                self._ffn(i, "E", x, y)
            else:
                self._attention(i, {"kda": "K", "mla": "M"}[self.part], x, y)
            before = y

    def _router(self) -> None:
        for i in range(self.run.layers):
            out = (self.t["outputs.ids"][i], self.t["outputs.weights"][i])
            self._add(self.make.router(layer_of(self.t, i), self.t[f"inputs.x.{i}"], out))

    def _attn_res(self) -> None:
        t, prefix = self.t, self.t["inputs.x0"]
        count = bank_rows("attn-res", self.run)
        banks = parts.Banks(None, t["outputs.bank"], t["outputs.prefix"], 0)
        for i in range(self.run.layers):
            w = layer_of(t, i).weights
            mix = parts.Mix(w["res_norm"], w["res_proj"], w["out_norm"])
            row = i if i < count else -1
            mixed = parts.Mixed(
                prefix,
                t[f"inputs.delta.{i}"],
                t[f"outputs.y.{i}"],
                min(i, count),
                row=row,
                early=False,
            )
            self._add(self.make.attn_res(banks, mix, mixed))
            prefix = t["outputs.prefix"]


def _refuse(w: Workload) -> None:
    """Variants that these kernels do not compute must not be timed as if they did."""
    plain = {"q": (1,), "kv": ("bf16",), "experts": ("mxfp4",), "taps": ("none",)}
    odd = [k for k, known in plain.items() if w.options.extra.get(k, known[0]) not in known]
    if odd or not w.target.startswith("kimi-k3-"):
        raise NotImplementedError(f"the mix has no kernels for {', '.join(odd) or w.target}")


def _sum(x: Tensor, y: Tensor, out: Tensor) -> Launch:
    def launch() -> None:
        torch.add(x, y, out=out)

    return launch
