"""Names, shapes and dtypes of every buffer, by part of the layer. One place, shared by the stack and the pieces.

Weights are row-major [out, in]. `M` = rows = B requests of q tokens each (q = 1: plain decoding), the rows of a request
next to each other in order. Rank 0 of `ranks` runs; what the other ranks contribute arrives in
`inputs.remote.layers.N`, present only with `ranks` > 1, one buffer for each exchange:

    attn    f32  [M, hidden]                     sum of the other ranks' o_proj partials:  a = bf(bf(partial) + attn)
    latent  bf16 [M, latent - latent_local]      columns latent_local.. of the latent (sharded latent-down only)
    logits  f32  [M, experts - experts_local]    columns experts_local.. of the logits (sharded router only)
    moe     f32  [M, latent]                     sum of the others' expert partials:       z = bf(bf(partial) + moe)
    shared  f32  [M, hidden_local]               sum of the others' shared-expert partials of this rank's columns
    delta   bf16 [M, hidden - hidden_local]      columns hidden_local.. of the gathered bf(U + Sh)
    dense   f32  [M, hidden]                     sum of the others' dense FFN partials

In a job on several GPUs (`Shape.gpus`) the other ranks run themselves: neither `remote` nor `send` exists.
The shared expert's partial of the columns that other ranks own is sent to them: it is an output,
`outputs.send.layers.N.shared` bf16 [M, hidden - hidden_local].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sandbox.artifact import Buffer
from targets.kimi_k3.sizes import PAGE_HEADROOM, Sizes

Row = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class Shape:
    """A concrete problem: sizes, rows, context, tokens a request, and the variants of formats and of the FFN front."""

    sizes: Sizes
    rows: int
    context: int
    latent_sharded: bool = True
    router_sharded: bool = False
    q: int = 1
    kv: str = "bf16"
    experts: str = "mxfp4"
    taps: bool = False
    gpus: int = 1

    @property
    def loopback(self) -> bool:
        """One rank of several runs alone: the others' contributions are inputs, what it sends is an output."""
        return self.sizes.ranks > 1 and self.gpus == 1

    @property
    def requests(self) -> int:
        return self.rows // self.q

    @property
    def taps_kept(self) -> int:
        """Columns of a request's conv page: the history, and with q > 1 the tokens that may be taken back."""
        return self.q + 2

    @property
    def slots(self) -> int:
        """State slots, the null slot 0 included; about half are in use, so the rest must stay untouched."""
        return 2 * self.rows + 2

    @property
    def pages_per_request(self) -> int:
        return -(-(self.context + PAGE_HEADROOM) // self.sizes.page)

    @property
    def pages(self) -> int:
        """Cache pages; two belong to nobody."""
        return self.requests * self.pages_per_request + 2

    @property
    def latent_rows(self) -> int:
        """Rows of the latent-down projection on this rank."""
        return self.sizes.latent_local if self.latent_sharded else self.sizes.latent

    @property
    def router_rows(self) -> int:
        return self.sizes.experts_local if self.router_sharded else self.sizes.experts


def under(prefix: str, rows: Iterator[Row]) -> tuple[Buffer, ...]:
    return tuple(Buffer(f"{prefix}.{name}", dtype, shape) for name, dtype, shape in rows)


def res_weights(p: Shape) -> Iterator[Row]:
    """The six vectors around a layer's two AttnRes steps."""
    for name in (
        "attn_res_norm",
        "attn_res_proj",
        "attn_norm",
        "mlp_res_norm",
        "mlp_res_proj",
        "mlp_norm",
    ):
        yield name, "bf16", (p.sizes.hidden,)


def kda_weights(p: Shape) -> Iterator[Row]:
    s = p.sizes
    yield "in_proj", "bf16", (s.in_proj_rows, s.hidden)
    yield "f_b", "bf16", (s.kda_dim, s.f_rank)
    if s.gate_rank:
        yield "g_b", "bf16", (s.kda_dim, s.gate_rank)
    yield "conv", "f32", (3 * s.kda_dim, 4)
    yield "A_log", "f32", (s.kda_heads,)
    yield "dt_bias", "f32", (s.kda_dim,)
    yield "o_norm", "bf16", (s.head_dim,)
    yield "o_proj", "bf16", (s.hidden, s.kda_dim)


def kda_states(p: Shape) -> Iterator[Row]:
    """`conv` taps oldest first: [slot, tap, channel], channels q | k | v, q + 2 taps. `S` [slot, head, V, K]."""
    s = p.sizes
    yield "conv", "bf16", (p.slots, p.taps_kept, 3 * s.kda_dim)
    yield "S", "f32", (p.slots, s.kda_heads, s.head_dim, s.head_dim)


def mla_weights(p: Shape) -> Iterator[Row]:
    """`w_uk` [head, nope, kv_lora] and `w_uv` [head, v, kv_lora] (W_UV transposed, as `kv_b_proj` has it)."""
    s = p.sizes
    yield "a_proj", "bf16", (s.a_proj_rows, s.hidden)
    yield "q_a_norm", "bf16", (s.q_lora,)
    yield "kv_a_norm", "bf16", (s.kv_lora,)
    yield "q_b", "bf16", (s.mla_heads * (s.qk_nope + s.qk_rope), s.q_lora)
    yield "w_uk", "bf16", (s.mla_heads, s.qk_nope, s.kv_lora)
    yield "w_uv", "bf16", (s.mla_heads, s.v_dim, s.kv_lora)
    yield "o_proj", "bf16", (s.hidden, s.mla_dim)
    if p.kv == "fp8":
        yield "k_scale", "f32", (1,)
        yield "q_scale", "f32", (1,)


def mla_states(p: Shape) -> Iterator[Row]:
    """Paged latent cache, [c kv_lora | k_pe qk_rope] per token; fp8: E4M3 of both over `k_scale`, saturating."""
    yield "kv", "e4m3" if p.kv == "fp8" else "bf16", (p.pages, p.sizes.page, p.sizes.kv_dim)


def router_weights(p: Shape) -> Iterator[Row]:
    yield "router", "bf16", (p.router_rows, p.sizes.hidden)
    yield "router_bias", "f32", (p.sizes.experts,)


def expert_weights(p: Shape) -> Iterator[Row]:
    """Codes, two columns a byte, low nibble = even column. MXFP4: scales UE8M0, one byte per 32 columns of a row.
    NVFP4: scales E4M3, one per 16 columns, and one f32 factor per expert and matrix."""
    s = p.sizes
    nv = p.experts == "nvfp4"
    for name, rows, columns in (
        ("w1", s.expert_dim, s.latent),
        ("w3", s.expert_dim, s.latent),
        ("w2", s.latent, s.expert_dim),
    ):
        yield name, "u8", (s.experts, rows, columns // 2)
        yield (
            f"{name}_scale",
            "e4m3" if nv else "u8",
            (s.experts, rows, columns // (16 if nv else 32)),
        )
        if nv:
            yield f"{name}_factor", "f32", (s.experts,)


def moe_weights(p: Shape) -> Iterator[Row]:
    """`shared_gate_up`: gate rows, then up rows. `latent_up`: this rank's rows of the up-projection."""
    s = p.sizes
    yield from router_weights(p)
    yield "latent_down", "bf16", (p.latent_rows, s.hidden)
    yield from expert_weights(p)
    yield "latent_norm", "bf16", (s.latent,)
    yield "latent_up", "bf16", (s.hidden_local, s.latent)
    yield "shared_gate_up", "bf16", (2 * s.shared_dim, s.hidden)
    yield "shared_down", "bf16", (s.hidden, s.shared_dim)


def dense_weights(p: Shape) -> Iterator[Row]:
    """`dense_gate_up`: gate rows, then up rows."""
    s = p.sizes
    yield "dense_gate_up", "bf16", (2 * s.dense_dim, s.hidden)
    yield "dense_down", "bf16", (s.hidden, s.dense_dim)


def attn_remote(p: Shape) -> Iterator[Row]:
    if p.loopback:
        yield "attn", "f32", (p.rows, p.sizes.hidden)


def moe_remote(p: Shape) -> Iterator[Row]:
    s = p.sizes
    if not p.loopback:
        return
    if p.latent_sharded:
        yield "latent", "bf16", (p.rows, s.latent - s.latent_local)
    if p.router_sharded:
        yield "logits", "f32", (p.rows, s.experts - s.experts_local)
    yield "moe", "f32", (p.rows, s.latent)
    yield "shared", "f32", (p.rows, s.hidden_local)
    yield "delta", "bf16", (p.rows, s.hidden - s.hidden_local)


def dense_remote(p: Shape) -> Iterator[Row]:
    if p.loopback:
        yield "dense", "f32", (p.rows, p.sizes.hidden)


def moe_send(p: Shape) -> Iterator[Row]:
    if p.loopback:
        yield "shared", "bf16", (p.rows, p.sizes.hidden - p.sizes.hidden_local)


def kda_inputs(p: Shape) -> Iterator[Row]:
    """`slots`: state slot of each request; id <= 0 is the null slot (zero attention output, nothing written).
    With q > 1 a slot per token, the state after it, and `accepted` (1..q): the tokens of the step before that were
    kept."""
    if p.q == 1:
        yield "slots", "i32", (p.rows,)
        return
    yield "slots", "i32", (p.requests, p.q)
    yield "accepted", "i32", (p.requests,)


def mla_inputs(p: Shape) -> Iterator[Row]:
    """`lengths` count the new tokens; 0 gives zero output. `slot_mapping`: flat cache row page * page_size + offset of
    each new token, negative = do not insert."""
    yield "lengths", "i32", (p.requests,)
    yield "block_table", "i32", (p.requests, p.pages_per_request)
    yield "slot_mapping", "i64", (p.rows,)
