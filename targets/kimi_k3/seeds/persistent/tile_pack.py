"""MXFP4 codes with the bits of their words in other places, which makes them cheaper to spread (`tile_codes`).

Copies of w1, w3 and w2 that `prepare` makes once: same bytes, same rows, each 32-bit word of eight codes by itself.
They cost as much memory as the codes, 1.85 GB a layer at tp8 (22 GB for 12 layers, beside 24 GB of weights); scales are
read where they are.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int64, Uint32

from targets.kimi_k3.seeds.persistent.device import words_at

EXPERT_CODES = ("w1", "w3", "w2")
CODE_PACKERS = 256
"""Threads of a CTA that packs, 16 bytes at a time."""
CODE_CTAS = 8
"""CTAs that pack a matrix. Few, since all matrices are packed by one launch, whose warps a race check counts."""
MOST_COPIES = 28 << 30
"""Bytes of copies, else there are none: 16 layers at tp8. A judge keeps weights once and scratch of the candidate, of
an incumbent and of its twin, so that memory holds the codes four times: 123 of 141 GB then."""


def code_words(dims):
    """32-bit words of w1, w3 or w2 of a layer, all experts: equally many."""
    return dims.experts * dims.expert_dim * dims.latent // 8


def code_matrices(dims):
    return len(EXPERT_CODES) * sum(f == "E" for f in dims.ffn)


def copies_fit(dims):
    return 4 * code_words(dims) * code_matrices(dims) <= MOST_COPIES


def code_copies(dims):
    """Workspace: [matrix, words], w1, w3 and w2 of one layer with experts after the other."""
    shape_ = (code_matrices(dims), code_words(dims))
    return {"packed": ("i32", shape_, "undefined", "persistent")}


@cute.jit
def pair_of(word: Uint32, j: cutlass.Constexpr):
    """Codes j and j + 4 where an operand has them: sign at bit 15 of a half, magnitude at 8 to 6."""
    nibbles = (word >> (4 * j)) & Uint32(0x000F000F)
    return (nibbles * Uint32(0x1040)) & Uint32(0x81C081C0)


@cute.jit
def pack_word(word: Uint32):
    """The word of which `spread_packed` makes the operands that `spread` makes of this one.

    Most bits of an operand are bits of the packed word; the others are sums of two or three, solved one by one.
    """
    low = Uint32(0x7FFFFFFF)
    a, b, c, d = pair_of(word, 0), pair_of(word, 1), pair_of(word, 2), pair_of(word, 3)
    turned = b | ((d & low) >> 4)
    p = (turned << 6) | (turned >> 26) | ((c & low) >> 4) | (a & Uint32(0x000000C0))
    p = p | (((a ^ p) >> 8) & Uint32(0x00010001))  # 0 and 16 from 8 and 24
    p = p | ((a ^ (p << 8)) & Uint32(0x00408000))  # 15 from 7, 22 from 14
    p = p | ((a ^ (p << 8)) & Uint32(0x00800000))  # 23 from 15
    p = p | ((a ^ (p << 8) ^ (p << 31)) & Uint32(0x80000000))  # 31 from 23 and 0
    p = p | (((c ^ (p << 31)) >> 4) & Uint32(0x08000000))  # 27 from 0
    return p | (((d >> 30) ^ (p >> 5)) & Uint32(0x00000002))  # 1 from 6


@cute.kernel
def pack_codes_kernel(matrices: tuple, mTo: cute.Tensor, vecs: cutlass.Constexpr):
    """Grid (CTAs, matrices): row y of mTo = matrix y, packed."""
    tid, _, _ = cute.arch.thread_idx()
    cta, y, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    source = matrices[0].iterator.toint()
    for k in cutlass.range_constexpr(1, len(matrices)):
        source = matrices[k].iterator.toint() if y == k else source
    target = mTo.iterator.toint() + Int64(y) * (16 * vecs)
    r = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for i in cutlass.range(cta * CODE_PACKERS + tid, vecs, ctas * CODE_PACKERS, unroll=4):
        words_at(source, i, r)
        for e in cutlass.range_constexpr(4):
            r[e] = pack_word(r[e])
        pointer = cute.make_ptr(
            Uint32, target + Int64(i) * 16, cute.AddressSpace.gmem, assumed_align=16
        )
        cute.autovec_copy(r, cute.make_tensor(pointer, cute.make_layout((4,))))


@cute.jit
def pack_experts(layers: tuple, mTo: cute.Tensor, dims: cutlass.Constexpr, stream):
    """Codes of all layers with experts into their copies."""
    matrices = tuple(getattr(w, name) for w in layers for name in EXPERT_CODES)
    vecs = code_words(dims) // 4
    ctas = min(CODE_CTAS, -(-vecs // CODE_PACKERS))
    pack_codes_kernel(matrices, mTo, vecs).launch(
        grid=(ctas, len(matrices), 1), block=(CODE_PACKERS, 1, 1), stream=stream
    )


def with_copies(layers, mPacked):
    """The tensors of layers (field -> tensor) with the copies in place of codes."""
    found = list(layers)
    for k, fields in enumerate(f for f in found if "w1" in f):
        for e, name in enumerate(EXPERT_CODES):
            fields[name] = mPacked[len(EXPERT_CODES) * k + e, None]
    return found
