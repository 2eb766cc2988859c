"""Exchanges between two ranks inside the persistent decode step: partials and shares go straight into the other GPU.

A word of the inbox has a bf16 above and the step's number below, so that it says itself whether it is there; each has a
place of its own for every layer and site, written once in a step, and nothing is cleared or fenced. Whoever fills a
place again has had an answer to something sent after it was read. Nothing here exists in a job on one GPU. Not for a
sharded router, whose logits are f32.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from targets.kimi_k3.seeds.common import add_bf16x2, high, pack_bf16, round_bf16
from targets.kimi_k3.seeds.persistent.boxes import insist, peek
from targets.kimi_k3.seeds.persistent.device import Ctx, field, vector
from targets.kimi_k3.seeds.persistent.fields import COUNT, F
from targets.kimi_k3.seeds.persistent.stages import share

STEPS = 6
"""Where `Ctx.base` counts steps, behind what the turns of the boxes are counted by."""


def inbox_sites(d):
    """(what is exchanged, first word, words) in a layer's part of the inbox."""
    wanted = [("attn", d.hidden)]
    if "D" in d.ffn:
        wanted.append(("dense", d.hidden))
    if "E" in d.ffn:
        wanted += [("moe", d.latent), ("shared", d.hidden_local), ("delta", d.hidden_local)]
        wanted += [("latent", d.latent_rows)] if d.latent_sharded else []
    found, at = [], 0
    for name, n in wanted:
        found.append((name, at, n))
        at += -(-n // 32) * 32
    return found


def inbox_words(d):
    """Of a layer, whole lines of 128 bytes."""
    _, at, n = inbox_sites(d)[-1]
    return at + -(-n // 32) * 32


def inbox(d):
    """The workspace entry. Raises ValueError for what is not exchanged here."""
    if d.gpus != 2 or d.router_sharded or d.layers < 2:
        raise ValueError("the exchange is for two GPUs, two layers or more, and a whole router")
    return ("u32", (d.layers, inbox_words(d)), "zero", "persistent")


@cute.jit
def open_inbox(c: Ctx, own: cute.Tensor, peer: cute.Tensor, rank: Int32, op: cutlass.Constexpr):
    """Each site of each layer into the table of addresses: `remote_NAME` is the own inbox's, `send` how far from there
    the other rank's is, `x` this rank's number. Ends with a barrier of the CTA."""
    sites, words = inbox_sites(op.d), inbox_words(op.d)
    for n in cutlass.range(c.tid, op.d.layers, op.threads + 32, unroll=1):
        start = own.iterator.toint() + Int64(n) * (4 * words)
        for name, at, _ in sites:
            c.tab[n * COUNT + F["remote_" + name]] = start + 4 * at
        c.tab[n * COUNT + F["send"]] = peer.iterator.toint() - own.iterator.toint()
        c.tab[n * COUNT + F["x"]] = Int64(rank)
    cute.arch.sync_threads()


@cute.jit
def close_inbox(c: Ctx, op: cutlass.Constexpr):
    """The step is counted, after the last edge, when every CTA has read its number."""
    if c.tid == 0 and c.cta == 0:
        cute.make_tensor(c.sync + 96 + STEPS, cute.make_layout((1,)))[0] = c.base[STEPS] + 1


@cute.jit
def rank_here(c: Ctx):
    return Int32(c.tab[F["x"]])


def own_first(c, op):
    """First rows of the shared expert's down-projection: of this rank's columns, and of the others'."""
    if op.d.gpus == 1:
        return 0, op.d.hidden_local
    rank = rank_here(c)
    return rank * op.d.hidden_local, (1 - rank) * op.d.hidden_local


@cute.jit
def step_number(c: Ctx):
    return Uint32(c.base[STEPS] + 1) & Uint32(0xFFFF)


@cute.jit
def site_at(c: Ctx, name: cutlass.Constexpr, layer: Int32):
    return field(c, layer, F["remote_" + name], COUNT)


@cute.jit
def tell_rank(c: Ctx, name: cutlass.Constexpr, layer: Int32, i: Int32, x: Float32):
    """bf(x) as element i of a site of the other rank's inbox."""
    word = (pack_bf16(Float32(0.0), x) & Uint32(0xFFFF0000)) | step_number(c)
    address = site_at(c, name, layer) + field(c, layer, F["send"], COUNT) + Int64(i) * 4
    cute.arch.inline_ptx(
        "st.relaxed.sys.global.b32 [{$r0}], {$r1};", read_only_args=[address, word]
    )


@cute.jit
def look_word(address: Int64):
    return cute.arch.inline_ptx(
        "ld.relaxed.sys.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Uint32],
        read_only_args=[address],
    )


@cute.jit
def hear_rank(c: Ctx, name: cutlass.Constexpr, layer: Int32, i: Int32, op: cutlass.Constexpr):
    """Element i of a site of the own inbox, once it has come."""
    address = site_at(c, name, layer) + Int64(i) * 4
    number, word, turns = step_number(c), look_word(address), Int32(0)
    while ((word ^ number) & Uint32(0xFFFF)) != Uint32(0) and (op.spin == 0 or turns < op.spin):
        word = look_word(address)
        turns += 1
    return high(word)


@cute.jit
def look_eight(address: Int64, r: cute.Tensor):
    """r[8] = eight words of the inbox, new or not."""
    for half in cutlass.range_constexpr(2):
        words = cute.arch.inline_ptx(
            "ld.relaxed.sys.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[address + 16 * half],
        )
        for e in cutlass.range_constexpr(4):
            r[4 * half + e] = words[e]


@cute.jit
def lacking(r: cute.Tensor, number: Uint32):
    wrong = Uint32(0)
    for e in cutlass.range_constexpr(8):
        wrong = wrong | (r[e] ^ number)
    return (wrong & Uint32(0xFFFF)) != Uint32(0)


@cute.jit
def hear_eight(c: Ctx, address: Int64, r: cute.Tensor, out: cute.Tensor, op: cutlass.Constexpr):
    """After `look_eight`: again until all are there; out[4 words] = them as pairs of bf16."""
    number, turns = step_number(c), Int32(0)
    while lacking(r, number) and (op.spin == 0 or turns < op.spin):
        look_eight(address, r)
        turns += 1
    for e in cutlass.range_constexpr(4):
        out[e] = (r[2 * e] >> 16) | (r[2 * e + 1] & Uint32(0xFFFF0000))


@cute.jit
def join_ranks(
    c: Ctx, name: cutlass.Constexpr, layer: Int32, rX: cute.Tensor, g: cutlass.Constexpr, op: cutlass.Constexpr
):  # fmt: skip
    """rX words [4, per], this rank's partial of this thread's columns, becomes bf(the sum over both ranks)."""
    start = site_at(c, name, layer)
    rIn = cute.make_rmem_tensor(cute.make_layout((8, g.per)), Uint32)
    rSum = cute.make_rmem_tensor(cute.make_layout((4,)), Uint32)
    for v in cutlass.range_constexpr(g.per):
        rIn[None, v].fill(0)
        if vector(c, v, g) < g.vecs:
            look_eight(start + Int64(vector(c, v, g)) * 32, rIn[None, v])
    for v in cutlass.range_constexpr(g.per):
        i = vector(c, v, g)
        if i < g.vecs:
            hear_eight(c, start + Int64(i) * 32, rIn[None, v], rSum, op)
            for e in cutlass.range_constexpr(4):
                rX[e, v] = add_bf16x2(rX[e, v], rSum[e])


@cute.jit
def look_either(
    c: Ctx, name: cutlass.Constexpr, layer: Int32, at: tuple, r: cute.Tensor, op: cutlass.Constexpr
):
    """r[8]: eight columns gathered over the ranks as they are; at = (the own box, vectors of a rank, which vector)."""
    start, own, i = at
    k = i - rank_here(c) * own
    if k >= 0 and k < own:
        peek(start + Int64(k) * 16, r)
    else:
        look_eight(site_at(c, name, layer) + Int64(i % own) * 32, r)


@cute.jit
def take_either(
    c: Ctx, name: cutlass.Constexpr, layer: Int32, at: tuple, r: cute.Tensor, out: cute.Tensor,
    op: cutlass.Constexpr,
):  # fmt: skip
    """After `look_either`: out[4 words] = those columns, once they are there."""
    start, own, i = at
    k = i - rank_here(c) * own
    if k >= 0 and k < own:
        insist(start + Int64(k) * 16, r, 2, op)
        for e in cutlass.range_constexpr(4):
            out[e] = r[e]
    else:
        hear_eight(c, site_at(c, name, layer) + Int64(i % own) * 32, r, out, op)


@cute.jit
def gather_wide(
    c: Ctx, name: cutlass.Constexpr, layer: Int32, start: Int64, own: cutlass.Constexpr, rD: cute.Tensor,
    op: cutlass.Constexpr,
):  # fmt: skip
    """rD words [4, per] = this thread's columns of a vector of `hidden`, of which each rank has `own` vectors."""
    g = op.wide
    rIn = cute.make_rmem_tensor(cute.make_layout((8, g.per)), Uint32)
    for v in cutlass.range_constexpr(g.per):
        rIn[None, v].fill(0)
        if vector(c, v, g) < g.vecs:
            look_either(c, name, layer, (start, own, vector(c, v, g)), rIn[None, v], op)
    for v in cutlass.range_constexpr(g.per):
        if vector(c, v, g) < g.vecs:
            at = (start, own, vector(c, v, g))
            take_either(c, name, layer, at, rIn[None, v], rD[None, v], op)


@cute.jit
def sum_shared(c: Ctx, layer: Int32, op: cutlass.Constexpr):
    """c.own, this rank's partial of the shared expert for its own columns, becomes bf(the sum)."""
    first, n = share(op.d.hidden_local, c.cta, op.ctas)
    for i in cutlass.range(c.tid, n, op.threads, unroll=1):
        c.own[i] = round_bf16(c.own[i] + hear_rank(c, "shared", layer, first + i, op))
