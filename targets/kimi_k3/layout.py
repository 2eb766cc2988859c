"""The buffers of each target: `BUILD[part](run)`. Names and meanings are documented in `spec` and `buffers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sandbox.artifact import Buffer
from targets.kimi_k3 import buffers as b
from targets.kimi_k3.buffers import Row, Shape
from targets.kimi_k3.options import Run, bank_rows


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
    if run.tapped:
        out.append(Buffer("outputs.taps", "bf16", (len(run.tapped), *wide)))
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


def _reduced(run: Run, given: str, own: Part) -> tuple[Buffer, ...]:
    """What the two pieces with an all-reduce before AttnRes have in common; of one rank."""
    p, s = run.shape, run.shape.sizes

    def weights(p: Shape) -> Iterator[Row]:
        yield from own(p)
        for name in ("res_norm", "res_proj", "out_norm"):
            yield name, "bf16", (s.hidden,)

    columns = s.hidden if given == "partial" else s.kda_dim
    return (
        Buffer("inputs.x0", "bf16", (p.rows, s.hidden)),
        *(Buffer(f"inputs.{given}.{i}", "bf16", (p.rows, columns)) for i in range(run.layers)),
        *_layers(run, "weights", weights),
        Buffer("outputs.bank", "bf16", (p.rows, bank_rows("attn-res", run), s.hidden)),
        Buffer("outputs.prefix", "bf16", (p.rows, s.hidden)), *_each(run, "outputs.y"),
    )  # fmt: skip


def _allreduce_attn_res(run: Run) -> tuple[Buffer, ...]:
    return _reduced(run, "partial", lambda p: iter(()))


def _oproj_allreduce(run: Run) -> tuple[Buffer, ...]:
    def weights(p: Shape) -> Iterator[Row]:
        yield "o_proj", "bf16", (p.sizes.hidden, p.sizes.kda_dim)

    return _reduced(run, "x", weights)


BUILD: dict[str, Callable[[Run], tuple[Buffer, ...]]] = {
    "decode": _decode, "attn-res": _attn_res, "kda": _kda, "mla": _mla, "router": _router,
    "latent-moe": _latent_moe, "gemv": _gemv, "allreduce-attn-res": _allreduce_attn_res,
    "oproj-allreduce": _oproj_allreduce,
}  # fmt: skip
