"""The schedule of the persistent kernel as data, and a proof on the host that it ends. Not part of the candidate.

Why it cannot hang, in words: every CTA arrives at edge e of a line before it waits for it, and waits in one order that
all share, so the slowest CTA never waits for itself. A producer waits for a free stage, which the consumers of its own
CTA give back in order without waiting for anything behind it in the list, and for the routing, which they publish
before they take the first stage of an expert: themselves, or, with units, a warp of their CTA that waits for nothing
but the logits. `simulate` runs exactly these rules for all CTAs and says who stands still if one does.

Boxes behind an edge add nothing to this: who looks into one waits for an element whose owner posts it before it
arrives (or hints) at the edge that was waited for, and posting waits for nobody. Four boxes are looked into without
an edge of their own ("look"): a head's query and latent sum in MLA, the FFN's latent and the shared expert's hidden
vector. Their owners post them before they look themselves, and behind the same waits that the one who looks has passed.

The lists are written down here a second time, beside the kernel's loops; the cpu device runs the kernel itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from targets.kimi_k3.seeds.persistent.plan import Op
from targets.kimi_k3.seeds.persistent.stages import CodeRows, Rows, share
from targets.kimi_k3.seeds.persistent.tile_plan import CODE_TILE, TileOp
from targets.kimi_k3.seeds.persistent.unit_plan import DecodeOp

Event = tuple[Any, ...]
"""Consumers: ("take", label), ("hold", labels), ("arrive", line), ("wait", line, edge), ("route",), ("post", box,
layer), ("look", box, layer, CTAs that post there), ("routed", turn); the lines are those of `device`, ALL and ROUTE.
The warp that chooses, where there is one: ("wait", "route", edge), after which the choice is known.
Producer: ("stage", label, bytes), ("routed", turn). A label is (matrix, layer, first row, rows)."""


@dataclass
class Lists:
    """Of one CTA."""

    produce: list[Event] = field(default_factory=list)
    consume: list[Event] = field(default_factory=list)
    choose: list[Event] = field(default_factory=list)


def lists(op: Op, cta: int, length: int) -> Lists:
    """Both lists of a CTA for a launch over a context of `length` tokens (the new one counted)."""
    out = Lists()
    edge, routed = 0, 0
    for n, (attn, ffn) in enumerate(zip(op.d.attn, op.d.ffn, strict=True)):
        if n > 0:
            edge += 1
            out.consume.append(("wait", "all", edge))
        edge = _kda(op, cta, n, out, edge) if attn == "K" else _mla(op, cta, n, out, edge, length)
        edge = _edge(out, edge)
        if ffn == "D":
            edge = _dense(op, cta, n, out, edge)
        else:
            edge = _moe(op, cta, n, out, edge, routed)
            routed += 1
        out.consume.append(("arrive", "all"))
    out.consume.append(("wait", "all", edge + 1))
    return out


def _edge(out: Lists, edge: int) -> int:
    out.consume += [("arrive", "all"), ("wait", "all", edge + 1)]
    return edge + 1


def _rows(out: Lists, name: str, n: int, g: Rows, span: tuple[int, int]) -> None:
    first, rows = span
    for at in range(0, rows, g.chunk):
        many = min(g.chunk, rows - at)
        label = (name, n, first + at, many)
        out.produce.append(("stage", label, many * g.row_bytes * (2 if g.pair else 1)))
        out.consume.append(("take", label))


def _kda(op: Op, cta: int, n: int, out: Lists, edge: int) -> int:
    d = op.d
    live = 4 * d.kda_dim + d.f_rank + d.kda_heads
    _rows(out, "in_proj", n, op.wide, share(live, cta, op.ctas))
    edge = _edge(out, edge)
    edge = _edge(out, edge)
    _rows(out, "o_proj", n, op.rows(d.kda_dim), share(d.hidden, cta, op.ctas))
    return edge


def _mla(op: Op, cta: int, n: int, out: Lists, edge: int, length: int) -> int:
    d = op.d
    _rows(out, "a_proj", n, op.wide, share(d.a_proj_rows, cta, op.ctas))
    edge = _edge(out, edge)
    each = d.qk_nope + d.qk_rope
    heads = d.mla_heads * each
    _rows(out, "q_b", n, op.rows(d.q_lora), share(heads, cta, op.ctas))
    head, part = cta // op.slices, cta % op.slices
    out.consume.append(("post", "q", n))
    if head < d.mla_heads:
        out.consume.append(("look", "q", n, _owners(op, heads, head * each, each)))
    edge = _edge(out, edge)
    for page in range(cta, -(-length // d.page), op.ctas):
        held = []
        for j in range(op.cache_stages):
            rows = min(op.cache_rows, d.page - j * op.cache_rows)
            label = ("kv", n, page * d.page + j * op.cache_rows, rows)
            out.produce.append(("stage", label, rows * d.kv_dim * 2))
            held.append(label)
        out.consume.append(("hold", tuple(held)))
    edge = _edge(out, edge)
    out.consume.append(("post", "lat", n))
    if head < d.mla_heads:
        first = head * op.slices
        out.consume.append(("look", "lat", n, tuple(range(first, first + op.slices))))
        first, rows = share(d.v_dim, part, op.slices)
        _rows(out, "w_uv", n, op.rows(d.kv_lora), (head * d.v_dim + first, rows))
    edge = _edge(out, edge)
    _rows(out, "o_proj", n, op.rows(d.mla_dim), share(d.hidden, cta, op.ctas))
    return edge


def _owners(op: Op, rows: int, first: int, n: int) -> tuple[int, ...]:
    """CTAs that have some of the rows first .. first + n - 1 of `rows`."""
    spans = [share(rows, cta, op.ctas) for cta in range(op.ctas)]
    return tuple(
        cta for cta, (at, many) in enumerate(spans) if at < first + n and first < at + many
    )


def _dense(op: Op, cta: int, n: int, out: Lists, edge: int) -> int:
    d = op.d
    pair = op.rows(d.hidden, pair=True)
    _rows(out, "dense_gate_up", n, pair, share(d.dense_dim, cta, op.ctas))
    edge = _edge(out, edge)
    _rows(out, "dense_down", n, op.rows(d.dense_dim), share(d.hidden, cta, op.ctas))
    return edge


def _moe(op: Op, cta: int, n: int, out: Lists, edge: int, routed: int) -> int:
    d = op.d
    units = isinstance(op, DecodeOp) and op.units
    if isinstance(op, DecodeOp) and op.router_first:
        _rows(out, "router", n, op.wide, share(d.router_rows, cta, op.ctas))
        out.consume.append(("arrive", "route"))
        _rows(out, "latent_down", n, op.wide, share(d.latent_rows, cta, op.ctas))
        out.consume.append(("post", "latent", n))
    else:
        # router and latent as one matrix: rows of a CTA follow those of the CTAs before it
        first = sum(share(rows, cta, op.ctas)[0] for rows in (d.router_rows, d.latent_rows))
        count = sum(share(rows, cta, op.ctas)[1] for rows in (d.router_rows, d.latent_rows))
        _rows(out, "front", n, op.wide, (first, count))
        out.consume += [("post", "latent", n), ("arrive", "route")]
    if units:
        out.choose.append(("wait", "route", routed + 1))
    else:
        out.consume += [("wait", "route", routed + 1), ("route",)]
    pair = op.rows(d.hidden, pair=True)
    _rows(out, "shared_gate_up", n, pair, share(d.shared_dim, cta, op.ctas))
    first = units and isinstance(op, DecodeOp) and op.shared_first
    if first:
        edge = _edge(out, edge)
        _shared_down(op, cta, n, out)
    else:
        out.consume += [("post", "hs", n), ("look", "latent", n, tuple(range(op.ctas)))]
    if units:
        out.consume.append(("routed", routed))
    out.produce.append(("routed", routed))
    for label, size in _experts_up(op, cta, n):
        out.produce.append(("stage", label, size))
        out.consume.append(("take", label))
    out.consume.append(("arrive", "all"))
    if not first:
        out.consume.append(("look", "hs", n, tuple(range(op.ctas))))
        _shared_down(op, cta, n, out)
    edge += 1
    out.consume.append(("wait", "all", edge))
    for label, size in _experts_down(op, cta, n):
        out.produce.append(("stage", label, size))
        out.consume.append(("take", label))
    edge = _edge(out, edge)
    _rows(out, "latent_up", n, op.rows(d.latent), share(d.hidden_local, cta, op.ctas))
    return edge


def _shared_down(op: Op, cta: int, n: int, out: Lists) -> None:
    d, down = op.d, op.rows(op.d.shared_dim)
    _rows(out, "shared_down", n, down, share(d.hidden_local, cta, op.ctas))
    first, rows = share(d.hidden - d.hidden_local, cta, op.ctas)
    _rows(out, "shared_down", n, down, (d.hidden_local + first, rows))


def _bytes(g: CodeRows, rows: int) -> int:
    return g.parts * rows * (g.code_bytes + g.scale_bytes)


def _experts_up(op: Op, cta: int, n: int) -> Iterator[tuple[Event, int]]:
    d, g = op.d, op.up
    if isinstance(op, DecodeOp) and op.units:
        first, many = share(d.topk * op.tile.up_units, cta, op.ctas)
        for u in range(first, first + many):
            yield ("w13", n, CODE_TILE * u, CODE_TILE), op.tile.up_bytes
        return
    at, rows = share(d.topk * d.expert_dim, cta, op.ctas, g.unit)
    end = at + rows
    while at < end:
        many = min(g.chunk, end - at, d.expert_dim - at % d.expert_dim)
        yield ("w13", n, at, many), _bytes(g, many)
        at += many


def _experts_down(op: Op, cta: int, n: int) -> Iterator[tuple[Event, int]]:
    d, g = op.d, op.down
    first, rows = share(d.latent, cta, op.ctas, g.unit)
    for start in range(0, d.topk, op.down_slots):
        many = min(op.down_slots, d.topk - start)
        yield ("w2", n, start * d.latent + first, many * rows), many * _bytes(g, rows)


# ---- the simulation
@dataclass
class _Cta:
    lists: Lists
    made: int = 0  # stages brought
    freed: int = 0
    p: int = 0
    c: int = 0
    k: int = 0
    arrived: dict[str, int] = field(default_factory=lambda: {"all": 0, "route": 0})
    routes: int = 0
    order: list[Event] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return (
            self.p == len(self.lists.produce)
            and self.c == len(self.lists.consume)
            and self.k == len(self.lists.choose)
        )


def simulate(op: Op | TileOp, programs: Sequence[Lists]) -> str:
    """Empty if every CTA ends; else the first thing found: a list out of order, a stage too large, who stands still."""
    ctas = [_Cta(x) for x in programs]
    moved, posted = True, set[Event]()
    while moved:
        moved = False
        arrivals = {line: min(c.arrived[line] for c in ctas) for line in ("all", "route")}
        for number, c in enumerate(ctas):
            while _produce(op, c) or _choose(c, arrivals):
                moved = True
            try:
                while _consume(c, number, arrivals, posted):
                    moved = True
            except ValueError as error:
                return f"CTA {number}: {error}"
    for number, c in enumerate(ctas):
        big = [e for e in c.lists.produce if e[0] == "stage" and not 0 < e[2] <= op.stage]
        if big:
            return f"CTA {number}: a stage of {big[0][2]} bytes: {big[0][1]}"
    stuck = [(n, c) for n, c in enumerate(ctas) if not c.over]
    return "; ".join(_where(n, c) for n, c in stuck[:4])


def _where(number: int, c: _Cta) -> str:
    made = c.lists.produce[c.p] if c.p < len(c.lists.produce) else "its end"
    taken = c.lists.consume[c.c] if c.c < len(c.lists.consume) else "its end"
    return f"CTA {number}: the producer stands at {made}, the consumers at {taken}"


def _produce(op: Op | TileOp, c: _Cta) -> bool:
    if c.p == len(c.lists.produce):
        return False
    event = c.lists.produce[c.p]
    if event[0] == "routed":
        if c.routes <= event[1]:
            return False
    else:
        if c.made - c.freed >= op.stages:
            return False
        c.made += 1
        c.order.append(event[1])
    c.p += 1
    return True


def _choose(c: _Cta, arrivals: dict[str, int]) -> bool:
    """The warp that chooses: one event of its own, a choice, if all logits are there."""
    if c.k == len(c.lists.choose) or arrivals["route"] < c.lists.choose[c.k][2]:
        return False
    c.routes += 1
    c.k += 1
    return True


def _consume(c: _Cta, number: int, arrivals: dict[str, int], posted: set[Event]) -> bool:
    """One event of CTA `number`, if it can go on. posted: (box, layer, CTA)."""
    if c.c == len(c.lists.consume):
        return False
    event = c.lists.consume[c.c]
    if event[0] == "wait" and arrivals[event[1]] < event[2]:
        return False
    if event[0] == "routed" and c.routes <= event[1]:
        return False
    if event[0] == "look" and any((*event[1:3], owner) not in posted for owner in event[3]):
        return False
    if event[0] in ("take", "hold"):
        labels = [event[1]] if event[0] == "take" else list(event[1])
        if c.made - c.freed < len(labels):
            return False
        found = c.order[c.freed : c.freed + len(labels)]
        if found != labels:
            raise ValueError(f"takes {labels[0]} where the ring has {found[0]}")
        c.freed += len(labels)
    elif event[0] == "arrive":
        c.arrived[event[1]] += 1
    elif event[0] == "route":
        c.routes += 1
    elif event[0] == "post":
        posted.add((*event[1:3], number))
    c.c += 1
    return True


def validate(op: Op, length: int) -> str:
    """Empty if the schedule of this kernel ends for that context."""
    return simulate(op, [lists(op, cta, length) for cta in range(op.ctas)])
