"""The pieces of a layer as launches of Triton kernels: buffers between them, grids and tiles.

A `Maker` serves one workload on one device. It launches nothing itself: every method returns closures in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from targets.kimi_k3.baseline import libraries, tiles
from targets.kimi_k3.baseline.blas import BlasProducts
from targets.kimi_k3.baseline.kernels import kda, mla, products, rows
from targets.kimi_k3.baseline.routed import Routed, RoutedExperts, Shared
from targets.kimi_k3.baseline.tiles import Tile, cdiv, power
from targets.kimi_k3.buffers import Shape
from targets.kimi_k3.maths.layer import Layer
from targets.kimi_k3.sizes import EPS

Launch = Callable[[], None]
PDL = True
"""Join launches by programmatic dependent launch, where the device has it."""


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


@dataclass(frozen=True)
class Ends:
    """What a product does besides y = x W^T (see `linear_kernel`)."""

    mode: str = "plain"
    remote: Tensor | None = None
    send: Tensor | None = None
    addend: Tensor | None = None
    tail: Tensor | None = None
    norm: Tensor | None = None
    own: int = 0


PLAIN = Ends()


def _normed(norm: libraries.Norm, x: Tensor, weight: Tensor, out: Tensor) -> Launch:
    def launch() -> None:
        norm(x.contiguous(), weight, out)

    return launch


@dataclass(frozen=True)
class Ahead:
    """What a launch's spare programs ask for: every `stride`-th 4 KB piece of `weights`, `chunks` in all."""

    weights: Tensor
    chunks: int
    stride: int

    def programs(self, t: Tile) -> int:
        return cdiv(self.chunks, 32 * t.warps)

    def constants(self, t: Tile) -> dict[str, int]:
        return {"CHUNKS": self.chunks, "STRIDE": self.stride, "LANES": 32 * t.warps}


class Maker:
    """Launches for one shape. `pdl`: programmatic dependent launch, on GPUs that have it."""

    every_way = False
    """Make the launches of all ways there are, also those that are not chosen: for who compiles ahead."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device, self.m = shape, device, shape.rows
        self.pdl = PDL and device.type == "cuda"
        self.sms = 132
        if device.type == "cuda":
            self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.mp = 1 if self.m == 1 else max(16, power(self.m))
        self.style = tiles.style(self.mp)
        self._made: dict[str, Tensor] = {}
        self._decided: dict[str, str] = {}
        self.shelf = libraries.Shelf(libraries.graph_us)
        self.blas = BlasProducts(self)
        self.routed = RoutedExperts(self)

    def fixed(self, place: str) -> Tile:
        return tiles.fixed(place, self.mp)

    def ahead(self, weights: Tensor | None, like: Tensor) -> Ahead:
        """A style's worth of `weights` for the launch before; nothing where launches do not overlap."""
        fetch = self.style.fetch
        if weights is None or not self.pdl or not fetch:
            return Ahead(like, 0, 1)
        size = weights.numel() * weights.element_size()
        stride = max(1, round(size / fetch))
        return Ahead(weights, size // (4096 * stride), stride)

    def buffer(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Scratch that launches share; one of each name."""
        if name not in self._made:
            self._made[name] = torch.zeros(shape, dtype=dtype, device=self.device)
        return self._made[name]

    def wide(self) -> Tensor:
        return torch.empty(
            (self.m, self.shape.sizes.hidden), dtype=torch.bfloat16, device=self.device
        )

    def launch(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], t: Tile, **constants: Any
    ) -> Launch:
        """`kernel` on `grid`; tensors, then compile-time constants by name."""
        options: dict[str, Any] = {"num_warps": t.warps, "num_stages": t.stages}
        if self.pdl:
            options["launch_pdl"] = True
        bound = kernel[grid]
        known = {**constants, "PDL": self.pdl, **options}

        def run() -> None:
            bound(*args, **known)

        return run

    def linear(
        self, place: str, operands: tuple[Tensor, Tensor, Tensor], ends: Ends = PLAIN
    ) -> Launch:
        """y = x W^T; operands = (x, W, y). `place` chooses the tile, or cuBLASLt."""
        w = operands[1]
        chosen = tiles.product(place, (w.shape[0], w.shape[1]), self.mp).kind == "cublaslt"
        if chosen or self.blas.taken(place, operands, ends):
            return self.blas(place, operands, ends)
        return self.triton_linear(place, operands, ends)

    def triton_linear(
        self, place: str, operands: tuple[Tensor, Tensor, Tensor], ends: Ends
    ) -> Launch:
        x, w, y = operands
        n, k = w.shape
        t = tiles.product(place, (n, k), self.mp)
        columns = 0 if ends.tail is None else ends.tail.shape[1]
        grid = (cdiv(n, t.bn) + self.m * cdiv(columns, 1024),)
        given = [ends.norm, ends.remote, ends.send, ends.addend, ends.tail]
        norm, remote, send, addend, tail = (x if g is None else g for g in given)
        args = (
            x, x.stride(0), norm, EPS, w, y, y.stride(0), remote, send, addend, tail,
        )  # fmt: skip
        return self.launch(
            products.linear_kernel, grid, args, t, M=self.m, MP=self.mp, N=n, K=k, BN=t.bn, BK=t.bk,
            NORM=ends.norm is not None, MODE=ends.mode, OWN=ends.own, TAIL=columns,
        )  # fmt: skip

    def normed_linear(
        self, place: str, operands: tuple[Tensor, Tensor, Tensor], ends: Ends
    ) -> list[Launch]:
        """`linear` with a norm of its input: fused, or a library's norm first where that is faster."""
        x, w, y = operands
        chosen = [self.linear(place, operands, ends)]
        if ends.norm is None or not x.is_cuda:
            return chosen
        fused, wide = chosen, x[:, : w.shape[1]]
        known = self._decided.get(place)
        if known is None:
            x.normal_()
        for name, norm in self.shelf.norms().items():
            if known is not None and known != name:
                continue
            out = self.buffer(f"{place}_normed", self.m, w.shape[1])
            theirs = [
                _normed(norm, wide, ends.norm, out),
                self.linear(place, (out, w, y), replace(ends, norm=None)),
            ]
            trial = libraries.Trial(f"{name}, norm of {place}", chosen, theirs, y)
            if known or self.shelf.better(trial) is theirs:
                chosen, self._decided[place] = theirs, name
        if chosen is fused:
            self._decided.setdefault(place, "")
        return chosen

    def reduced(
        self, place: str, operands: tuple[Tensor, Tensor, Tensor], remote: Tensor | None
    ) -> Launch:
        """y = bf(bf(x W^T) + remote)."""
        ends = PLAIN if remote is None else Ends("remote", remote=remote)
        return self.linear(place, operands, ends)

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

    def _select(self, layer: Layer, logits: Tensor, out: tuple[Tensor, Tensor]) -> Launch:
        s = self.shape.sizes
        remote = layer.remote.get("logits", logits)
        return self.launch(
            rows.select_kernel, (self.m,), (logits, remote, layer.weights["router_bias"], *out), self.fixed("select"),
            EXPERTS=s.experts, OWN=logits.shape[1], BLOCK=power(s.experts), TOPK=s.topk, TP=power(s.topk),
        )  # fmt: skip

    def _front(self, layer: Layer, x: Tensor, made: tuple[Tensor, Tensor, Tensor]) -> Launch:
        s, w, m = self.shape.sizes, layer.weights, self.m
        logits, latent, hidden = made
        routed, own, shared = logits.shape[1], w["latent_down"].shape[0], s.shared_dim
        t = tiles.product("front", (routed + own + 2 * shared, s.hidden), self.mp)
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
            self._rank(layer, logits, (ids, scores)),
            *self.routed(
                layer,
                Routed(latent, ids, scores, z),
                Shared(hidden, w["shared_down"], shared, ends),
            ),
            *self.normed_linear("latent_up", (z, w["latent_up"], out), join),
        ]

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
