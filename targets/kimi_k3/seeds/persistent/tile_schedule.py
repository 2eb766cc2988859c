"""The schedule of the tile kernel as data, for `schedule.simulate` to prove that it ends. Not part of the candidate.

Written down a second time beside the kernel's loops, as in `schedule`, with the same rules.
"""

from __future__ import annotations

from targets.kimi_k3.seeds.persistent.schedule import Lists, simulate
from targets.kimi_k3.seeds.persistent.stages import share
from targets.kimi_k3.seeds.persistent.tile_plan import CODE_TILE, Tile, TileOp


def tile_lists(op: TileOp, cta: int, wanted: int) -> Lists:
    """What the producer and the consumers of a CTA do in a launch whose tokens want `wanted` experts each time."""
    out, edge = Lists(), 0
    for n in range(op.d.layers):
        if n > 0:
            edge += 1
            out.consume.append(("wait", "all", edge))
        edge = front_of(op, cta, (n, n), out, edge)
        edge = experts_of(op, cta, (n, wanted), out, edge)
        tiles_of(
            out,
            ("latent_up", n),
            op.tile(op.d.latent, 8),
            share(op.d.hidden_local, cta, op.ctas)[1],
        )
        out.consume.append(("arrive", "all"))
    out.consume.append(("wait", "all", edge + 1))
    return out


def tiles_of(out: Lists, name: tuple[str, int], g: Tile, rows: int) -> None:
    for first in range(0, rows, g.height):
        for s in range(g.slices):
            _stage(out, (*name, first, s), min(g.height, rows - first) * g.piece)


def _stage(out: Lists, label: tuple[str, int, int, int], size: int) -> None:
    out.produce.append(("stage", label, size))
    out.consume.append(("take", label))


def front_of(op: TileOp, cta: int, of: tuple[int, int], out: Lists, edge: int) -> int:
    """of: which layer it is, which FFN with experts."""
    d, g = op.d, op.ctas
    n, number = of
    tiles_of(out, ("router", n), op.tile(d.hidden, 8), share(d.router_rows, cta, g)[1])
    out.consume.append(("arrive", "route"))
    rows = share(d.latent_rows, cta, g)[1] + 2 * share(d.shared_dim, cta, g)[1]
    tiles_of(out, ("front", n), op.tile(d.hidden, 8), rows)
    out.consume += [
        ("arrive", "all"),
        ("wait", "route", number + 1),
        ("route",),
        ("wait", "all", edge + 1),
    ]
    for name, rows in (("shared_own", d.hidden_local), ("shared_sent", d.hidden - d.hidden_local)):
        tiles_of(out, (name, n), op.tile(d.shared_dim, 16), share(rows, cta, g)[1])
    out.produce.append(("routed", number))
    return edge + 1


def experts_of(op: TileOp, cta: int, of: tuple[int, int], out: Lists, edge: int) -> int:
    n, wanted = of
    first, units = share(wanted * op.up_units, cta, op.ctas)
    for u in range(first, first + units):
        _stage(out, ("w13", n, u, 0), 2 * CODE_TILE * (op.up.code_bytes + op.up.scale_bytes))
    out.consume += [("arrive", "all"), ("wait", "all", edge + 1)]
    rows = share(op.d.latent, cta, op.ctas, op.down.unit)[1]
    for start in range(0, wanted, op.down_slots):
        many = min(op.down_slots, wanted - start)
        _stage(out, ("w2", n, start, 0), many * rows * (op.down.code_bytes + op.down.scale_bytes))
    out.consume += [("arrive", "all"), ("wait", "all", edge + 2)]
    return edge + 2


def validate_tiles(op: TileOp, wanted: int) -> str:
    """Empty if the schedule of this kernel ends."""
    return simulate(op, [tile_lists(op, cta, wanted) for cta in range(op.ctas)])
