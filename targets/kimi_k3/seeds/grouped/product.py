"""Products y = x W^T for many rows in place of the seed's `gemv`: a weight is read once for all tokens of a CTA.

The latter reads a weight again for every eight tokens; here a CTA multiplies its rows of W with all of them, unless a
product has too few rows to fill the device, when CTAs share the tokens too.
"""

import cutlass
import cutlass.cute as cute

from targets.kimi_k3.seeds.gemv_kernel import Extra
from targets.kimi_k3.seeds.grouped.product_kernel import Output, Product, product_kernel

REGISTERS = 208
"""Of a thread, for sums and operands."""


def registers(parts, tokens, ring):
    """Of sums, and of the operands in a ring."""
    return 4 * parts * tokens + ring * (8 * parts + 4 * tokens)


def split(wanted, rows, cfg):
    """(parts, tokens): how many units of 16 rows of W and of 8 tokens a CTA has at most, so that the least time passes
    until all operands are read, with a CTA on an SM at a time. wanted: products (n, halves) of one launch."""
    eights = -(-rows // 8)
    found = {}
    for parts in range(1, cfg.product_tile + 1):
        most = max(max(1, parts // h) * h for _, h in wanted)
        tiles = sum(-(-n // (16 * max(1, parts // h))) for n, h in wanted)
        for groups in range(1, min(cfg.product_splits, eights) + 1):
            tokens = -(-eights // groups)
            waves = -(-(tiles * -(-eights // tokens)) // cfg.sms)
            if registers(most, tokens, 1) <= REGISTERS:
                found[waves * (2 * most + tokens), groups, -parts] = parts, tokens
    return found[min(found)]


def product_shapes(wanted, k, rows, cfg):
    """Fit the tunables to products (n, halves) of one x. Raises ValueError where they are no whole tiles."""
    for n, _ in wanted:
        if n % 16 or k % 32:
            raise ValueError(
                f"{n} rows of {k} columns: a product has sixteen and thirty-two at a time"
            )
    parts, tokens = split(wanted, rows, cfg)
    warps = min(cfg.product_warps, k // 32)
    steps = -(-(k // 32) // warps)
    found = []
    for n, halves in wanted:
        tile = max(1, parts // halves)
        rings = range(1, min(cfg.product_ring, steps) + 1)
        ring = max(r for r in rings if registers(tile * halves, tokens, r) <= REGISTERS)
        alone = tokens * 8 >= rows
        found.append(Product(n, k, warps, tile, tokens, ring, halves == 2, alone, cfg.pdl))
    return tuple(found)


@cute.jit
def products(mX: cute.Tensor, outputs: tuple, halves: cutlass.Constexpr, cfg: cutlass.Constexpr, stream):  # fmt: skip
    """Several products of one x in a launch; halves: 2 for one of gate and up rows, y = bf(SiTU(bf(gate), bf(up)))."""
    wanted = [(y.w.shape[0] // h, h) for y, h in zip(outputs, halves)]  # noqa: B905
    ops = product_shapes(wanted, outputs[0].w.shape[1], mX.shape[0], cfg)
    product_kernel(mX, outputs, ops).launch(
        grid=(sum(op.ctas for op in ops), cute.ceil_div(mX.shape[0], 8 * ops[0].tokens), 1),
        block=(ops[0].warps * 32, 1, 1),
        stream=stream,
        use_pdl=cfg.pdl,
        min_blocks_per_mp=1,
    )


@cute.jit
def gemv(
    mX: cute.Tensor, mW: cute.Tensor, mY: cute.Tensor, ex: Extra, cfg: cutlass.Constexpr, stream
):
    """y = x W^T with the extras of `ex`, `plus` and `norm` not among them."""
    products(mX, (Output(mW, mY, ex),), (1,), cfg, stream)


@cute.jit
def gemv_situ(mX: cute.Tensor, mW: cute.Tensor, mY: cute.Tensor, cfg: cutlass.Constexpr, stream):
    """y = bf(SiTU(bf(x Wg^T), bf(x Wu^T))), W = [Wg; Wu]."""
    products(mX, (Output(mW, mY, Extra()),), (2,), cfg, stream)
