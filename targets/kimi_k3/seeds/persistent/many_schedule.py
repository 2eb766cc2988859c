"""The schedule of the decode step for several tokens as data, for `schedule.simulate` to prove that it ends. Not part
of the candidate.

Written down a second time beside the kernel's loops, as in `schedule`, with the same rules. A page's stages are held
together. Two boxes are looked into without an edge of their own, a head's queries and its latent sums: their owners
post them before they look themselves, behind waits that the one who looks has passed too.
"""

from __future__ import annotations

from collections.abc import Sequence

from targets.kimi_k3.seeds.persistent.kda_sizes import ROW, state_stages
from targets.kimi_k3.seeds.persistent.many_plan import ManyOp
from targets.kimi_k3.seeds.persistent.schedule import Lists, simulate
from targets.kimi_k3.seeds.persistent.stages import share
from targets.kimi_k3.seeds.persistent.tile_schedule import experts_of, front_of, tiles_of


def many_lists(op: ManyOp, cta: int, lengths: Sequence[int], wanted: int) -> Lists:
    """Both lists of a CTA; lengths: tokens of each request, the new one counted; wanted: experts of every FFN."""
    d, out, edge, routed = op.d, Lists(), 0, 0
    for n, attn in enumerate(d.attn):
        if n > 0:
            edge += 1
            out.consume.append(("wait", "all", edge))
        edge = _edge(out, edge)  # x
        edge = (
            _kda(op, cta, n, out, edge) if attn == "K" else _mla(op, cta, (n, lengths), out, edge)
        )
        _matrix(
            op,
            out,
            ("o_proj", n),
            d.kda_dim if attn == "K" else d.mla_dim,
            _rows(op, cta, d.hidden),
        )
        edge = _edge(out, edge)  # attn
        edge = _edge(out, edge)  # x
        if d.ffn[n] == "D":
            _matrix(op, out, ("dense_up", n), d.hidden, (0, 2 * _rows(op, cta, d.dense_dim)[1]))
            edge = _edge(out, edge)
            _matrix(op, out, ("dense_down", n), d.dense_dim, _rows(op, cta, d.hidden))
        else:
            edge = front_of(op.tiles_op, cta, (n, routed), out, edge)
            edge = experts_of(op.tiles_op, cta, (n, wanted), out, edge)
            _matrix(op, out, ("latent_up", n), d.latent, _rows(op, cta, d.hidden_local))
            routed += 1
        out.consume.append(("arrive", "all"))
    out.consume.append(("wait", "all", edge + 1))
    return out


def _edge(out: Lists, edge: int) -> int:
    out.consume += [("arrive", "all"), ("wait", "all", edge + 1)]
    return edge + 1


def _rows(op: ManyOp, cta: int, rows: int) -> tuple[int, int]:
    return share(rows, cta, op.ctas)


def _matrix(op: ManyOp, out: Lists, name: tuple[str, int], k: int, span: tuple[int, int]) -> None:
    tiles_of(out, name, op.tiles_op.tile(k, 8), span[1])


def _kda(op: ManyOp, cta: int, n: int, out: Lists, edge: int) -> int:
    d = op.d
    rows = 4 * d.kda_dim + d.f_rank + d.kda_heads
    _matrix(op, out, ("in_proj", n), d.hidden, _rows(op, cta, rows))
    edge = _edge(out, edge)
    head, part = cta // op.slices, cta % op.slices
    if head < d.kda_heads:
        count = share(d.head_dim, part, op.slices)[1]
        rows, cuts, tokens, stages = state_stages(op)
        for k in range(stages):
            many = min(tokens, d.rows - k // cuts * tokens)
            size = many * max(0, min(rows, count - k % cuts * rows)) * ROW
            label = ("state", n, k, 0)
            out.produce.append(("stage", label, size or 1))
            out.consume.append(("take", label))
    return _edge(out, edge)


def pages_of(op: ManyOp, cta: int, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(request, page of it) of a CTA, in order."""
    every = [(m, p) for m, x in enumerate(lengths) for p in range(-(-max(x, 0) // op.d.page))]
    among = min(op.ctas, len(every))
    first, n = share(len(every), cta, among) if cta < among else (0, 0)
    return every[first : first + n]


def _mla(op: ManyOp, cta: int, of: tuple[int, Sequence[int]], out: Lists, edge: int) -> int:
    d = op.d
    n, lengths = of
    _matrix(op, out, ("a_proj", n), d.hidden, _rows(op, cta, d.a_proj_rows))
    edge = _edge(out, edge)
    each = d.qk_nope + d.qk_rope
    rows = d.mla_heads * each
    head, part = cta // op.slices, cta % op.slices
    _matrix(op, out, ("q_b", n), d.q_lora, _rows(op, cta, rows))
    out.consume.append(("post", "q", n))
    if head < d.mla_heads:
        spans = [share(rows, c, op.ctas) for c in range(op.ctas)]
        owners = [
            c for c, (at, m) in enumerate(spans) if at < (head + 1) * each and head * each < at + m
        ]
        out.consume.append(("look", "q", n, tuple(owners)))
    edge = _edge(out, edge)
    for m, page in pages_of(op, cta, lengths):
        held = []
        for j in range(op.cache_stages):
            tokens = min(op.cache_rows, d.page - j * op.cache_rows)
            label = ("kv", n, m, page * d.page + j * op.cache_rows)
            out.produce.append(("stage", label, 2 * tokens * d.kv_dim))
            held.append(label)
        out.consume.append(("hold", tuple(held)))
    edge = _edge(out, edge)
    out.consume.append(("post", "lat", n))
    if head < d.mla_heads:
        first = head * op.slices
        out.consume.append(("look", "lat", n, tuple(range(first, first + op.slices))))
        _matrix(op, out, ("w_uv", n), d.kv_lora, share(d.v_dim, part, op.slices))
    return _edge(out, edge)


def validate_many(op: ManyOp, lengths: Sequence[int], wanted: int) -> str:
    """Empty if the schedule of this kernel ends for these contexts."""
    return simulate(op, [many_lists(op, cta, lengths, wanted) for cta in range(op.ctas)])
