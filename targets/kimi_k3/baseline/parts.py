"""The pieces of a layer as launches of Triton kernels and libraries' products, in their order, and what passes between.

A `Maker` serves one workload on one device. How a kernel is launched is in `launcher`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from targets.kimi_k3.baseline import libraries, tiles
from targets.kimi_k3.baseline.kernels import kda, mla, products, rows
from targets.kimi_k3.baseline.launcher import PLAIN, Ends, Launch, Launcher
from targets.kimi_k3.baseline.routed import Routed, RoutedExperts, Shared
from targets.kimi_k3.baseline.tiles import Tile, cdiv, power
from targets.kimi_k3.buffers import Shape
from targets.kimi_k3.maths.layer import Layer
from targets.kimi_k3.sizes import EPS


@dataclass(frozen=True)
class Banks:
    """Rows of earlier layers [M, old, H], rows written here [M, new, H], where the running prefix goes."""

    old: Tensor | None
    new: Tensor | None
    prefix: Tensor
    count_old: int


@dataclass(frozen=True)
class Mix:
    norm: Tensor
    proj: Tensor
    out: Tensor


@dataclass(frozen=True)
class Mixed:
    """One AttnRes step: P is `prefix`, plus `delta` if there is one; `sources` bank rows are mixed with it into `out`;
    `row` >= 0 is the new bank row that P goes to."""

    prefix: Tensor
    delta: Tensor | None
    out: Tensor
    sources: int
    row: int = -1
    closing: bool = False
    early: bool = True
    """The launch before writes no bank row that is mixed here."""


class Maker(Launcher):
    """Launches of the pieces of a layer, in their order, for one shape."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__(shape, device)
        self.routed = RoutedExperts(self)

    def attn_res(self, banks: Banks, mix: Mix, s: Mixed, coming: Tensor | None = None) -> Launch:
        hidden = self.shape.sizes.hidden
        product = mix.norm.float() * mix.proj.float()
        new = s.prefix if banks.new is None else banks.new
        old = s.prefix if banks.old is None else banks.old
        delta = s.prefix if s.delta is None else s.delta
        t, ahead = self.fixed("attn_res"), self.ahead(coming, s.out)
        args = (
            s.prefix, delta, banks.prefix, old, new, product, mix.out, s.out, EPS, ahead.weights, self.m,
        )  # fmt: skip
        return self.launch(
            rows.attn_res_kernel, (self.m + ahead.programs(t),), args, t, **ahead.constants(t), H=hidden,
            BLOCK=power(hidden), OLD=banks.count_old, NEW=1 if banks.new is None else banks.new.shape[1],
            SOURCES=s.sources, ROW=s.row, ADD=s.delta is not None, CLOSING=s.closing,
            EARLY=s.early, OPEN=self.style.open,
        )  # fmt: skip

    def kda(self, layer: Layer, slots: Tensor, x: Tensor, out: Tensor) -> list[Launch]:
        s, w, state = self.shape.sizes, layer.weights, layer.states
        y = self.buffer("kda_proj", self.m, s.in_proj_rows)
        o = self.buffer("kda_out", self.m, s.kda_dim)
        rate = torch.exp(w["A_log"].float())
        t, ahead = self.fixed("kda"), self.ahead(w["o_proj"], o)
        args = (
            y, y.stride(0), w["f_b"], w["conv"], rate, w["dt_bias"], w["o_norm"], state["conv"], state["S"], slots, o,
            EPS, ahead.weights,
        )  # fmt: skip
        core = self.launch(
            kda.kda_kernel, (s.kda_heads + ahead.programs(t), self.m), args, t, **ahead.constants(t),
            HEADS=s.kda_heads, W=s.head_dim, RANK=s.f_rank, OPEN=self.style.open,
        )  # fmt: skip
        core = self._recurrent(layer, (y, slots, o), core)
        last = self.reduced("o_proj", (o, w["o_proj"], out), layer.remote.get("attn"))
        return [self.linear("in_proj", (x, w["in_proj"], y)), core, last]

    def _recurrent(
        self, layer: Layer, given: tuple[Tensor, Tensor, Tensor], ours: Launch
    ) -> Launch:
        """Our update, or flash-linear-attention's where that is faster."""
        y, _, out = given
        known = self._decided.get("kda")
        library = self.shelf.fla() if y.is_cuda and known != "" else None
        if library is None:
            return ours
        theirs = libraries.fla_update(library, layer, given)
        if known is None:
            saved = {k: v.clone() for k, v in layer.states.items()}
            y.normal_()

            def reset() -> None:
                for k, v in saved.items():
                    layer.states[k].copy_(v)

            trial = libraries.Trial("fla-core, recurrent update", [ours], [theirs], out, reset)
            self._decided["kda"] = "fla-core" if self.shelf.better(trial)[0] is theirs else ""
        return theirs if self._decided["kda"] else ours

    def splits(self) -> int:
        """Shares of the context: enough to fill the GPU, two pages or more each."""
        p = self.shape
        return max(1, min(p.pages_per_request // 2, 2 * self.sms // self.m, 128))

    def mla(
        self, layer: Layer, paging: Mapping[str, Tensor], x: Tensor, out: Tensor
    ) -> list[Launch]:
        s, w, m = self.shape.sizes, layer.weights, self.m
        a = self.buffer("mla_proj", m, s.a_proj_rows)
        q = self.buffer("mla_q", m, s.mla_heads * (s.qk_nope + s.qk_rope))
        o = self.buffer("mla_out", m, s.mla_dim)
        return [
            self.linear("a_proj", (x, w["a_proj"], a)),
            *self.normed_linear("q_b", (a, w["q_b"], q), Ends(norm=w["q_a_norm"])),
            *self._attend((a, q, o), layer, paging),
            self.reduced("o_proj", (o, w["o_proj"], out), layer.remote.get("attn")),
        ]

    def _attend(
        self, buffers: tuple[Tensor, Tensor, Tensor], layer: Layer, paging: Mapping[str, Tensor]
    ) -> list[Launch]:
        s, p, w, m = self.shape.sizes, self.shape, layer.weights, self.m
        a, q, o = buffers
        kv, heads, splits = layer.states["kv"], s.mla_heads, self.splits()
        query = self.buffer("mla_query", m, heads, s.kv_dim)
        sums = self.buffer("mla_sums", m, splits, heads, s.kv_lora, dtype=torch.float32)
        stats = self.buffer("mla_stats", m, splits, heads, 2, dtype=torch.float32)
        sizes = {"HEADS": heads, "LORA": s.kv_lora}
        begin, end = self.fixed("query"), self.fixed("join")
        bc, bv = min(begin.bk, s.kv_lora), min(end.bn, s.v_dim)
        ahead = self.ahead(w["o_proj"], o)
        first = self.launch(
            mla.query_kernel, (heads * s.kv_lora // bc + 1 + ahead.programs(begin), m),
            (a, a.stride(0), w["kv_a_norm"], q, w["w_uk"], query, kv, paging["slot_mapping"], EPS, ahead.weights),
            begin, **ahead.constants(begin), **sizes, LORA_Q=s.q_lora, NOPE=s.qk_nope, ROPE=s.qk_rope, BC=bc,
        )  # fmt: skip
        second = self.launch(
            mla.attention_kernel, (splits, m),
            (query, kv, paging["block_table"], paging["lengths"], sums, stats, (s.qk_nope + s.qk_rope) ** -0.5),
            self.fixed("attention"), **sizes, HP=max(16, power(heads)), ROPE=s.qk_rope, PAGE=s.page,
            PAGES=p.pages_per_request, SPLITS=splits, OPEN=self.style.open,
        )  # fmt: skip
        third = self.launch(
            mla.join_kernel, (heads * s.v_dim // bv, m),
            (sums, stats, w["w_uv"], a, a.stride(0), s.q_lora + s.kv_dim, paging["lengths"], o), end,
            **sizes, V=s.v_dim, BV=bv, SPLITS=splits, SP=power(splits), BS=min(end.bk, power(splits)),
            OPEN=self.style.open,
        )  # fmt: skip
        return [first, second, third]

    def router(self, layer: Layer, x: Tensor, out: tuple[Tensor, Tensor]) -> list[Launch]:
        """The router by itself: logits through cuBLAS or float32 products, then the selection."""
        w = layer.weights["router"]
        logits = self.buffer("logits", self.m, w.shape[0], dtype=torch.float32)

        def product() -> None:
            if x.is_cuda:
                torch.mm(x, w.T, out_dtype=torch.float32, out=logits)
            else:
                torch.mm(x.float(), w.float().T, out=logits)

        return [product, self._select(layer, logits, out)]

    def _select(
        self, layer: Layer, logits: Tensor, out: tuple[Tensor, Tensor], raw: bool = False
    ) -> Launch:
        s = self.shape.sizes
        remote = layer.remote.get("logits", logits)
        return self.launch(
            rows.select_kernel, (self.m,), (logits, remote, layer.weights["router_bias"], *out), self.fixed("select"),
            EXPERTS=s.experts, OWN=logits.shape[1], BLOCK=power(s.experts), TOPK=s.topk, TP=power(s.topk),
            RAW=raw,
        )  # fmt: skip

    def _front(self, layer: Layer, x: Tensor, made: tuple[Tensor, Tensor, Tensor]) -> Launch:
        s, w = self.shape.sizes, layer.weights
        rows = w["router"].shape[0] + w["latent_down"].shape[0] + 2 * s.shared_dim
        tried = tiles.fronts((rows, s.hidden), self.mp)
        x_drawn = torch.randn_like(x) if x.is_cuda and len(tried) > 1 else x

        def drawn(t: Tile) -> list[Launch]:
            return [self._front_with(t, layer, x_drawn, made)]

        return self._front_with(self.chosen("front", tried, drawn, made[2]), layer, x, made)

    def _front_with(
        self, t: Tile, layer: Layer, x: Tensor, made: tuple[Tensor, Tensor, Tensor]
    ) -> Launch:
        s, w, m = self.shape.sizes, layer.weights, self.m
        logits, latent, hidden = made
        routed, own, shared = logits.shape[1], w["latent_down"].shape[0], s.shared_dim
        blocks = sum(cdiv(n, t.bn) for n in (routed, own, shared))
        args = (
            x, w["router"], logits, w["latent_down"], latent, layer.remote.get("latent", latent), w["shared_gate_up"],
            hidden,
        )  # fmt: skip
        return self.launch(
            products.front_kernel, (blocks + m * cdiv(s.latent - own, 1024),), args, t, M=m, MP=self.mp, K=s.hidden,
            BN=t.bn, BK=t.bk, ROUTED=routed, OWN=own, LATENT=s.latent, SHARED=shared,
        )  # fmt: skip

    def moe(
        self, layer: Layer, routed: tuple[Tensor, Tensor | None], x: Tensor, out: Tensor
    ) -> list[Launch]:
        """The whole FFN. `routed` = (ids, what is sent to the other ranks)."""
        s, w, m = self.shape.sizes, layer.weights, self.m
        ids, send = routed
        logits = self.buffer("logits", m, w["router"].shape[0], dtype=torch.float32)
        latent = self.buffer("latent", m, s.latent, dtype=torch.float32)
        hidden = self.buffer("shared_hidden", m, s.shared_dim)
        scores = self.buffer("scores", m, s.topk, dtype=torch.float32)
        z = self.buffer("experts_sum", m, s.latent)
        own = w["latent_up"].shape[0]
        shared = self.buffer("shared", m, own)
        ends = PLAIN
        if send is not None:
            ends = Ends("split", remote=layer.remote["shared"], send=send, own=own)
        join = Ends("addend", addend=shared, tail=layer.remote.get("delta"), norm=w["latent_norm"])
        return [
            self._front(layer, x, (logits, latent, hidden)),
            self._ranked(layer, logits, (ids, scores)),
            *self.routed(
                layer,
                Routed(latent, ids, scores, z),
                Shared(hidden, w["shared_down"], shared, ends),
            ),
            *self.normed_linear("latent_up", (z, w["latent_up"], out), join),
        ]

    def _ranked(self, layer: Layer, logits: Tensor, out: tuple[Tensor, Tensor]) -> Launch:
        """By counting, in many programs; with several rows by one program a row where a GPU finds that faster."""
        ours = self._rank(layer, logits, out)
        if self.mp == 1 or not (logits.is_cuda or self.every_way):
            return ours
        theirs = self._select(layer, logits, out, raw=True)
        taken, key = self.blas.here.taken, ("select", self.m, self.shape.sizes)
        if logits.is_cuda and key not in taken:
            logits.normal_()
            trial = libraries.Trial("experts selected by row", [ours], [theirs], out[1])
            taken[key] = self.shelf.better(trial, self.blas.here.cold)[0] is theirs
        return theirs if taken.get(key) else ours

    def _rank(self, layer: Layer, logits: Tensor, out: tuple[Tensor, Tensor]) -> Launch:
        s, t = self.shape.sizes, self.fixed("rank")
        ahead = self.ahead(layer.weights["shared_down"], logits)
        remote = layer.remote.get("logits", logits)
        places = cdiv(s.experts, t.bn)
        args = (logits, remote, layer.weights["router_bias"], *out, ahead.weights)
        return self.launch(
            rows.rank_kernel, (places + ahead.programs(t), self.m), args, t, **ahead.constants(t), EXPERTS=s.experts,
            OWN=logits.shape[1], BLOCK=power(s.experts), BE=t.bn, BO=min(t.bk, power(s.experts)), TOPK=s.topk,
            PLACES=places, OPEN=self.style.open,
        )  # fmt: skip

    def dense(self, layer: Layer, x: Tensor, out: Tensor) -> list[Launch]:
        s, w = self.shape.sizes, layer.weights
        hidden = self.buffer("dense_hidden", self.m, s.dense_dim)
        t = tiles.product("dense_up", (2 * s.dense_dim, s.hidden), self.mp)
        first = self.launch(
            products.gated_kernel, (cdiv(s.dense_dim, t.bn),), (x, x.stride(0), w["dense_gate_up"], hidden), t,
            M=self.m, MP=self.mp, N=s.dense_dim, K=s.hidden, BN=t.bn, BK=t.bk,
        )  # fmt: skip
        return [
            first,
            self.reduced("dense_down", (hidden, w["dense_down"], out), layer.remote.get("dense")),
        ]
