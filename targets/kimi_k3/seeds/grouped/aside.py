"""Grouping and, aside, a product that neither waits for it nor it for: a launch in which memory is busy meanwhile."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from targets.kimi_k3.seeds.common import begin, smem
from targets.kimi_k3.seeds.grouped.pairs import Grouping, group
from targets.kimi_k3.seeds.grouped.product import product_shapes
from targets.kimi_k3.seeds.grouped.product_kernel import Output, tile_product


@cute.kernel
def group_kernel(
    mIds: cute.Tensor, latent: tuple, mList: cute.Tensor, mLaid: cute.Tensor, mX: cute.Tensor, output: Output,
    ops: cutlass.Constexpr,
):  # fmt: skip
    """Grid (1 + M + n / 16 tile, M / 8 tokens): `group`, and y = x W^T of x bf16 [M, k] for the `Output`."""
    cta, part, _ = cute.arch.block_idx()
    op, product = ops
    sums = smem(Float32, (product.sums,), (1,))
    if cta > op.rows:
        tile_product(mX, output, cta - 1 - op.rows, sums, product)
    elif part == 0:
        begin(product.pdl)
        group(mIds, latent, mList, mLaid, op)


@cute.jit
def group_aside(mIds, latent: tuple, mX, output: Output, space, cfg: cutlass.Constexpr, stream):
    """space.pair_list and space.latent_laid from the routing and the latent; `output` from mX."""
    d = cfg.dims
    product = product_shapes([(output.w.shape[0], 1)], output.w.shape[1], d.rows, cfg)[0]
    op = Grouping(d.rows, d.topk, d.experts, product.warps * 32)
    group_kernel(
        mIds, latent, space.pair_list, space.latent_laid, mX, output, (op, product)
    ).launch(
        grid=(1 + op.rows + product.ctas, cute.ceil_div(op.rows, 8 * product.tokens), 1),
        block=(op.threads, 1, 1),
        stream=stream,
        use_pdl=product.pdl,
        min_blocks_per_mp=1,
    )  # fmt: skip
