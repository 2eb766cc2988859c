"""The Kimi K3 targets: their options, buffers and floors. No torch; the mathematics is in `reference`.

`kimi-k3-decode` is one decode step of one tensor-parallel rank through a run of layers, `first` to `first + layers - 1`
(0-based, as in the model), one token per request, then the closing AttnRes and the final norm. `extra` options:

    first         first layer of the run (tiny 0, tp8 and tp16 12: the first period after a bank write of a full block)
    latent_down   sharded (default) or replicated       router   replicated (default) or sharded

Buffers (M rows; `buffers` has the parts of a layer and the exchange with other ranks):

    inputs.x0 bf16 [M, hidden]           the prefix P on entry (token embeddings when first = 0)
    inputs.delta bf16 [M, hidden]        first > 0: FFN output of layer first - 1, added by the first AttnRes
    inputs.bank bf16 [M, old, hidden]    first > 0: bank rows 0..old-1 of earlier layers, old = ceil(first / block)
    inputs.slots, lengths, block_table, slot_mapping, remote.layers.N.*
    weights.layers.N.*, weights.out_res_norm, out_res_proj, out_norm;  states.layers.N.{conv, S | kv}
    outputs.bank bf16 [M, new, hidden]   bank rows old..old+new-1, written here; absent when no layer of the run writes
    outputs.prefix bf16 [M, hidden]      P after the closing AttnRes; free to use as the running prefix
    outputs.ids i32 [MoE layers, M, topk]    routed experts by descending rank
    outputs.out bf16 [M, hidden]         bf(RMS(h; out_norm)), h = the closing AttnRes over all bank rows and P
    outputs.send.layers.N.shared

N counts the layers of the run from 0. `dims.attn` and `dims.ffn` have a letter per layer: K = KDA, M = MLA; D = dense,
E = experts. A layer N of the model opens block b = N / block when N % block == 0.

The pieces are chains of `layers` instances i = 0.. (default 12, tiny 3), each with its own weights and states:

    kimi-k3-gemv        y_i = bf(x_i W_i^T), W_i bf16 [hidden, hidden] = weights.layers.i.w
    kimi-k3-kda         y_i = a of the KDA layer on x_i, o_proj and its all-reduce included
    kimi-k3-mla         y_i = a of the MLA layer on x_i, likewise
    kimi-k3-latent-moe  y_i = delta of the routed FFN on x_i (router, experts, shared expert, up-projection); outputs.ids
    kimi-k3-router      x_i = inputs.x.i, instances independent: outputs.ids, outputs.weights bf16 [instances, M, topk]
    kimi-k3-attn-res    chained through the prefix, below

with x_i = bf(inputs.x.i + y_{i-1}), x_0 = inputs.x.0, and y_i = outputs.y.i, all bf16 [M, hidden]. AttnRes: P starts as
inputs.x0; instance i does P <- bf(P + inputs.delta.i), writes P to row i of outputs.bank [M, bank_rows, hidden] when
i < bank_rows, and mixes bank rows 0..n-1 and P, n = min(i, bank_rows), with weights.layers.i.{res_norm, res_proj,
out_norm} into outputs.y.i; outputs.prefix is P at the end. bank_rows = min(8, layers) (tiny: min(3, layers)).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox.artifact import Buffer
from targets.base import Floor, Options, Scalar, UnknownOption, Workload, register
from targets.kimi_k3 import buffers as b
from targets.kimi_k3 import floors
from targets.kimi_k3.buffers import Row, Shape
from targets.kimi_k3.sizes import EPS, PRESETS, ROWS

CHOICES = {"latent_down": ("sharded", "replicated"), "router": ("replicated", "sharded")}
_SEEDS = Path(__file__).parent / "seeds"


@dataclass(frozen=True)
class Run:
    """A resolved request: the shape, and which layers of the model run (pieces: instances)."""

    shape: Shape
    first: int
    layers: int

    @property
    def models_layers(self) -> range:
        return range(self.first, self.first + self.layers)

    @property
    def attn(self) -> str:
        return "".join("M" if self.shape.sizes.is_mla(n) else "K" for n in self.models_layers)

    @property
    def ffn(self) -> str:
        return "".join("D" if self.shape.sizes.is_dense(n) else "E" for n in self.models_layers)

    @property
    def bank_old(self) -> int:
        return -(-self.first // self.shape.sizes.block)

    @property
    def bank_rows(self) -> int:
        return -(-(self.first + self.layers) // self.shape.sizes.block)


@dataclass(frozen=True)
class KimiTarget:
    """One of the seven. `part` is `decode` or the piece's name; the reference looks at nothing else."""

    part: str
    summary: str
    presets: tuple[str, ...] = tuple(PRESETS)
    reference: str = "targets.kimi_k3.reference:KimiReference"

    @property
    def name(self) -> str:
        return f"kimi-k3-{self.part}"

    def seed_source(self) -> str:
        return (_SEEDS / f"{self.part.replace('-', '_')}.py").read_text()

    def workload(self, options: Options) -> Workload:
        run = resolve(self.part, options)
        found = _BUILD[self.part](run)
        return Workload(
            target=self.name, options=options, layers=run.layers, rows=run.shape.rows, context=run.shape.context,
            q=1, ranks=run.shape.sizes.ranks, dims=dims(self.part, run), buffers=found,
            floor=floors.floor(run.shape, found, counts(self.part, run)),
        )  # fmt: skip

    def floor_for(self, w: Workload, ids: Sequence[Sequence[Sequence[int]]]) -> Floor:
        """The floor with the experts really routed; `ids` is `outputs.ids` as nested lists."""
        run = resolve(self.part, w.options)
        return floors.floor(
            run.shape, w.buffers, counts(self.part, run), floors.distinct_by_layer(ids)
        )


def resolve(part: str, options: Options) -> Run:
    """Raises UnknownOption with what there is."""
    if options.preset not in PRESETS:
        raise UnknownOption(f"no preset {options.preset!r}; there are {', '.join(PRESETS)}")
    preset = PRESETS[options.preset]
    extra = _extra(part, options)
    first = extra.get("first", preset.first) if part == "decode" else 0
    layers = options.layers or (preset.layers if part == "decode" else preset.instances)
    if options.rows not in ROWS:
        raise UnknownOption(f"rows {options.rows}: there are {', '.join(map(str, ROWS))}")
    if not isinstance(first, int) or isinstance(first, bool) or first < 0 or layers < 1:
        raise UnknownOption(f"a run of {layers} layers from layer {first} is none")
    most = preset.sizes.total_layers
    if part == "decode" and first + layers > most:
        raise UnknownOption(
            f"layers {first} to {first + layers - 1}: {options.preset} has layers 0 to {most - 1}"
        )
    if part != "decode" and layers > 128:
        raise UnknownOption(f"{layers} instances: at most 128")
    context = options.context or preset.context
    if not 1 <= context <= 1 << 20:
        raise UnknownOption(f"context {context}: 1 to 1048576")
    shape = Shape(
        preset.sizes, options.rows, context,
        latent_sharded=extra.get("latent_down", "sharded") == "sharded",
        router_sharded=extra.get("router", "replicated") == "sharded",
    )  # fmt: skip
    return Run(shape, first, layers)


def _extra(part: str, options: Options) -> dict[str, Scalar]:
    known = {"decode": {"first", *CHOICES}, "latent-moe": set(CHOICES)}.get(part, set())
    for name, value in options.extra.items():
        if name not in known:
            raise UnknownOption(
                f"kimi-k3-{part} has no option {name!r}; there are {', '.join(sorted(known)) or 'none'}"
            )
        if name in CHOICES and value not in CHOICES[name]:
            raise UnknownOption(f"{name} {value!r}: {' or '.join(CHOICES[name])}")
    return dict(options.extra)


def counts(part: str, run: Run) -> tuple[int, int]:
    """(KDA, MLA) layers."""
    if part == "decode":
        return run.attn.count("K"), run.attn.count("M")
    return (run.layers if part == "kda" else 0), (run.layers if part == "mla" else 0)


def bank_rows(part: str, run: Run) -> int:
    if part == "attn-res":
        s = run.shape.sizes
        return min(-(-s.total_layers // s.block), run.layers)
    return run.bank_rows


def dims(part: str, run: Run) -> dict[str, Scalar]:
    """What a candidate reads as `cfg.dims.NAME`; head counts and `*_dim`, `*_rows` are this rank's."""
    p, s = run.shape, run.shape.sizes
    return {
        "rows": p.rows, "layers": run.layers, "first": run.first, "ranks": s.ranks, "context": p.context,
        "attn": run.attn if part == "decode" else {"kda": "K", "mla": "M"}.get(part, "") * run.layers,
        "ffn": run.ffn if part == "decode" else "E" * run.layers if part == "latent-moe" else "",
        "hidden": s.hidden, "hidden_local": s.hidden_local, "eps": EPS,
        "block": s.block, "bank_old": run.bank_old, "bank_rows": bank_rows(part, run),
        "kda_heads": s.kda_heads, "head_dim": s.head_dim, "kda_dim": s.kda_dim, "f_rank": s.f_rank,
        "in_proj_rows": s.in_proj_rows, "slots": p.slots,
        "mla_heads": s.mla_heads, "q_lora": s.q_lora, "kv_lora": s.kv_lora, "qk_nope": s.qk_nope,
        "qk_rope": s.qk_rope, "v_dim": s.v_dim, "mla_dim": s.mla_dim, "kv_dim": s.kv_dim,
        "a_proj_rows": s.a_proj_rows, "page": s.page, "pages": p.pages, "pages_per_request": p.pages_per_request,
        "latent": s.latent, "latent_rows": p.latent_rows, "latent_sharded": p.latent_sharded,
        "experts": s.experts, "topk": s.topk, "router_rows": p.router_rows, "router_sharded": p.router_sharded,
        "expert_dim": s.expert_dim, "shared_dim": s.shared_dim, "dense_dim": s.dense_dim,
    }  # fmt: skip


def _decode(run: Run) -> tuple[Buffer, ...]:
    p, s = run.shape, run.shape.sizes
    wide = (p.rows, s.hidden)
    out = [Buffer("inputs.x0", "bf16", wide)]
    if run.first:
        out.append(Buffer("inputs.delta", "bf16", wide))
        out.append(Buffer("inputs.bank", "bf16", (p.rows, run.bank_old, s.hidden)))
    if "K" in run.attn:
        out += b.under("inputs", b.kda_inputs(p))
    if "M" in run.attn:
        out += b.under("inputs", b.mla_inputs(p))
    for n, (attn, ffn) in enumerate(zip(run.attn, run.ffn, strict=True)):
        out += b.under(f"inputs.remote.layers.{n}", b.attn_remote(p))
        out += b.under(
            f"inputs.remote.layers.{n}", b.moe_remote(p) if ffn == "E" else b.dense_remote(p)
        )
        weights = f"weights.layers.{n}"
        out += b.under(weights, b.res_weights(p))
        out += b.under(weights, b.kda_weights(p) if attn == "K" else b.mla_weights(p))
        out += b.under(weights, b.moe_weights(p) if ffn == "E" else b.dense_weights(p))
        out += b.under(f"states.layers.{n}", b.kda_states(p) if attn == "K" else b.mla_states(p))
        if ffn == "E":
            out += b.under(f"outputs.send.layers.{n}", b.moe_send(p))
    out += [
        Buffer(f"weights.{name}", "bf16", (s.hidden,))
        for name in ("out_res_norm", "out_res_proj", "out_norm")
    ]
    if run.bank_rows > run.bank_old:
        out.append(Buffer("outputs.bank", "bf16", (p.rows, run.bank_rows - run.bank_old, s.hidden)))
    if "E" in run.ffn:
        out.append(Buffer("outputs.ids", "i32", (run.ffn.count("E"), p.rows, s.topk)))
    out += [Buffer("outputs.prefix", "bf16", wide), Buffer("outputs.out", "bf16", wide)]
    return tuple(out)


def _each(run: Run, name: str) -> list[Buffer]:
    wide = (run.shape.rows, run.shape.sizes.hidden)
    return [Buffer(f"{name}.{i}", "bf16", wide) for i in range(run.layers)]


Part = Callable[[Shape], Iterator[Row]]


def _layers(run: Run, prefix: str, part: Part) -> list[Buffer]:
    return [x for i in range(run.layers) for x in b.under(f"{prefix}.layers.{i}", part(run.shape))]


def _gemv(run: Run) -> tuple[Buffer, ...]:
    def weights(p: Shape) -> Iterator[Row]:
        yield "w", "bf16", (p.sizes.hidden, p.sizes.hidden)

    return (*_each(run, "inputs.x"), *_layers(run, "weights", weights), *_each(run, "outputs.y"))


def _kda(run: Run) -> tuple[Buffer, ...]:
    return (
        *_each(run, "inputs.x"), *b.under("inputs", b.kda_inputs(run.shape)),
        *_layers(run, "inputs.remote", b.attn_remote), *_layers(run, "weights", b.kda_weights),
        *_layers(run, "states", b.kda_states), *_each(run, "outputs.y"),
    )  # fmt: skip


def _mla(run: Run) -> tuple[Buffer, ...]:
    return (
        *_each(run, "inputs.x"), *b.under("inputs", b.mla_inputs(run.shape)),
        *_layers(run, "inputs.remote", b.attn_remote), *_layers(run, "weights", b.mla_weights),
        *_layers(run, "states", b.mla_states), *_each(run, "outputs.y"),
    )  # fmt: skip


def _latent_moe(run: Run) -> tuple[Buffer, ...]:
    ids = Buffer("outputs.ids", "i32", (run.layers, run.shape.rows, run.shape.sizes.topk))
    return (
        *_each(run, "inputs.x"), *_layers(run, "inputs.remote", b.moe_remote),
        *_layers(run, "weights", b.moe_weights), ids, *_layers(run, "outputs.send", b.moe_send),
        *_each(run, "outputs.y"),
    )  # fmt: skip


def _router(run: Run) -> tuple[Buffer, ...]:
    shape = (run.layers, run.shape.rows, run.shape.sizes.topk)
    return (
        *_each(run, "inputs.x"), *_layers(run, "weights", b.router_weights),
        Buffer("outputs.ids", "i32", shape), Buffer("outputs.weights", "bf16", shape),
    )  # fmt: skip


def _attn_res(run: Run) -> tuple[Buffer, ...]:
    def weights(p: Shape) -> Iterator[Row]:
        for name in ("res_norm", "res_proj", "out_norm"):
            yield name, "bf16", (p.sizes.hidden,)

    rows, hidden = run.shape.rows, run.shape.sizes.hidden
    return (
        Buffer("inputs.x0", "bf16", (rows, hidden)), *_each(run, "inputs.delta"), *_layers(run, "weights", weights),
        Buffer("outputs.bank", "bf16", (rows, bank_rows("attn-res", run), hidden)),
        Buffer("outputs.prefix", "bf16", (rows, hidden)), *_each(run, "outputs.y"),
    )  # fmt: skip


_BUILD: dict[str, Callable[[Run], tuple[Buffer, ...]]] = {
    "decode": _decode, "attn-res": _attn_res, "kda": _kda, "mla": _mla, "router": _router,
    "latent-moe": _latent_moe, "gemv": _gemv,
}  # fmt: skip
_SUMMARIES = {
    "decode": "Kimi K3 decode step of one tensor-parallel rank, a run of layers",
    "attn-res": "chain of fused AttnRes steps (prefix add, mix of up to 9 sources, RMSNorm)",
    "kda": "chain of KDA attention layers with recurrent state",
    "mla": "chain of absorbed MLA attention layers over a paged latent cache",
    "router": "independent sigmoid top-k routers",
    "latent-moe": "chain of latent MoE layers with MXFP4 experts",
    "gemv": "chain of square bf16 matrix-vector products",
}
TARGETS = {f"kimi-k3-{part}": KimiTarget(part, summary) for part, summary in _SUMMARIES.items()}


def _register() -> None:
    for name, target in TARGETS.items():
        register(name, lambda target=target: target)


_register()
