"""Planted mistakes in the persistent decode kernel: edges between CTAs, the ring of stages, shares of the work."""

# ruff: noqa: E501  (text of the seeds, as it stands there)

from __future__ import annotations

from targets.base import Options
from targets.kimi_k3.planted.build import FORBIDDEN, RACY, bug
from targets.planted import Planted

_PART = "persistent"
_SHARDED = Options("tiny-tp2", 4, 1)
_ARRIVE = '    """All that this CTA\'s consumers wrote is visible to who waits for this edge."""\n'
_EDGE = '    timeline.mark(c.track, "edge sums", layer, kind="edge")\n'
_EMPTY = "    empty_sums(c, turn, op)\n"
_WAIT = "    wait(c, edge, op, acquire=False, missing=op.missing)\n"
_LOOK = "                insist(sums + Int64(s) * apart, rX[None, k], op.sums_size, op)\n"

_ROUTED = (
    "            if part == {part}:\n"
    '                timeline.mark(c.brought, "routing", layer, kind="wait")\n'
    "                cute.arch.mbarrier_wait(c.routed, {which})\n"
)


def kernels() -> list[Planted]:
    return [*_edges(), *_ring(), *_work()]


def _edges() -> list[Planted]:
    return [
        bug(_PART, "barrier", "arrival-before-the-others", "a CTA arrives before all of its warps have written",
            (_ARRIVE + "    dawdle(c, op)\n    consumers(op)\n", _ARRIVE),
            expect=RACY),
        bug(_PART, "barrier", "relaxed-arrival", "an arrival does not release what was written before it",
            ('sem="release", scope="gpu")', 'sem="relaxed", scope="gpu")'), expect=RACY, devices=("cpu",)),
        bug(_PART, "barrier", "stale-epoch", "the count of arrivals is not carried to the next launch",
            ("    if c.tid == 0 and c.cta == 0:\n        state = ", "    if c.tid == 0 and c.cta < 0:\n        state = "),
            expect=RACY),
        bug(_PART, "barrier", "one-arrival-short", "an edge opens when all CTAs but one have arrived",
            ("base + edge * op.ctas - missing\n", "base + edge * op.ctas - missing - 1\n"), expect=RACY),
        bug(_PART, "barrier", "epoch-off-by-one", "a wait is satisfied by the edge before",
            ("base + edge * op.ctas - missing\n", "base + (edge - 1) * op.ctas - missing\n"), expect=RACY),
        bug(_PART, "barrier", "skipped-edge", "the latents of MLA do not wait for the other CTAs' sums",
            (_EDGE + _EMPTY + _WAIT, _EDGE + _EMPTY), (_LOOK, ""), expect=RACY),
        bug(_PART, "barrier", "arrival-missing", "the first CTA never arrives",
            (_ARRIVE + "    dawdle(c, op)\n    consumers(op)\n    if c.tid == 0:\n",
             _ARRIVE + "    consumers(op)\n    if c.tid == 0 and c.cta > 0:\n"),
            expect=frozenset({"hang"}), tunables={"spin_limit": 0}),
    ]  # fmt: skip


def _ring() -> list[Planted]:
    return [
        bug(_PART, "parity", "full-parity-inverted", "consumers wait for the wrong phase of a full stage",
            ("(c.full + slot, (it // op.stages) & 1)", "(c.full + slot, (it // op.stages + 1) & 1)"),
            expect=RACY | FORBIDDEN),
        bug(_PART, "parity", "routing-parity-fixed", "the producer waits for the first routing only",
            *((_ROUTED.format(part=n, which="routing & 1"), _ROUTED.format(part=n, which="routing * 0")) for n in (0, 3)),
            expect=RACY | FORBIDDEN),
        bug(_PART, "parity", "stage-returned-early", "a stage is given back before its rows are read",
            ("        if c.warp < g.width * g.passes:\n            for i in cutlass.range(2 * (c.warp",
             "        stage_done(c, slot)\n"
             "        if c.warp < g.width * g.passes:\n            for i in cutlass.range(2 * (c.warp"),
            ("* STRIDE + c.warp % g.width] = sum\n        stage_done(c, slot)\n",
             "* STRIDE + c.warp % g.width] = sum\n"), tunables={"ring_stages": 2}, expect=RACY),
    ]  # fmt: skip


def _work() -> list[Planted]:
    return [
        bug(_PART, "tail", "rows-beyond-even-shares", "rows that do not divide by the CTAs are left out",
            ("    return first, units * (cta + 1) // ctas * unit - first\n", "    return first, units // ctas * unit\n"),
            expect=RACY),
        bug(_PART, "tail", "rows-of-one-grid", "the last CTA works only in a grid of eight",
            ("            if p.slot > 0:\n                gRow", "            if p.slot > 0 and (op.ctas == 8 or "
             "c.cta + 1 < op.ctas):\n                gRow")),
        bug(_PART, "routing", "first-expert-for-all", "w2 of the first expert is used for the others",
            ("Int64(c.ids[within(start + k, d.topk)]) * d.latent", "Int64(c.ids[start]) * d.latent")),
        bug(_PART, "routing", "last-expert-dropped", "the expert of lowest rank is not added",
            ("in cutlass.range(d.topk, unroll_full=True):", "in cutlass.range(d.topk - 1, unroll_full=True):")),
        bug(_PART, "routing", "weights-not-normalised", "weights are the scores themselves",
            *((f"c.{kept}[c.lane] = round_bf16(s / total)", f"c.{kept}[c.lane] = round_bf16(s)")
              for kept in ("weights", "share")),
            options=_SHARDED),  # where nothing of other ranks is added, the norm behind it takes any factor away
        bug(_PART, "order", "shared-expert-dropped", "the shared expert's result is not added",
            ('"delta", turn, first + i, u + c.own[i], op)', '"delta", turn, first + i, u, op)')),
        bug(_PART, "context", "partial-page-skipped", "a page that is not full is not read",
            ("(length + op.d.page - 1) // op.d.page, length", "length // op.d.page, length")),
        bug(_PART, "state", "own-row-not-seen", "the new row reaches neither the cache nor the ring",
            ("cache.row // d.page == physical:", "cache.row // d.page == physical and left < 0:")),
        bug(_PART, "state", "null-slot-written", "a padding request updates the null slot",
            ("            if p.slot > 0:\n                gRow", "            if p.slot >= 0:\n                gRow")),
        bug(_PART, "state", "taps-of-other-slices", "only the first CTA of a head shifts the value channels",
            ("live and (p.slice == 0 or c.tid >= 2 * HEAD)", "live and p.slice == 0")),
        bug(_PART, "state", "prefix-not-restarted", "a new block keeps the old prefix",
            ("rP[e, v] = rD[e, v] if anew else sum", "rP[e, v] = sum")),
        bug(_PART, "gain", "decay-bound-one-percent", "the bound of the decay is -4.95",
            ("cute.math.exp(-5.0 * gate)", "cute.math.exp(-4.95 * gate)")),
        bug(_PART, "gain", "beta-one-percent", "the write strength is 1 % too large",
            ("            change = beta * (", "            change = 1.01 * beta * (")),
        bug(_PART, "epsilon", "norm-epsilon-times-ten", "1e-4 in the scores of the blocks",
            ("rS[s] = cute.math.rsqrt(square * (1.0 / d.hidden) + d.eps) * total",
             "rS[s] = cute.math.rsqrt(square * (1.0 / d.hidden) + 10.0 * d.eps) * total")),
        bug(_PART, "rounding", "remote-added-before-rounding", "other ranks' sums are added before this rank's rounding",
            ("                round_bf16(y)\n                + at(Float32, field(c, layer, F[\"remote_dense\"]",
             "                y\n                + at(Float32, field(c, layer, F[\"remote_dense\"]"),
            options=_SHARDED, band=True),
    ]  # fmt: skip
