"""The Kimi K3 targets: their options, buffers and floors. No torch; the mathematics is in `reference`.

`kimi-k3-decode` is one decode step of one tensor-parallel rank through a run of layers, `first` to `first + layers - 1`
(0-based, as in the model), then the closing AttnRes and the final norm. `extra` options, of the pieces too where they
concern them:

    first         first layer of the run (tiny 0, tp8 and tp16 12: the first period after a bank write of a full block)
    latent_down   sharded (default) or replicated       router   replicated (default) or sharded
    q             tokens a request, 1 (default) to 8: verification of q - 1 drafts; rows = requests q
    kv            bf16 (default) or fp8 paged latent cache      experts   mxfp4 (default) or nvfp4
    mode          loopback (default): one rank, the others' contributions are inputs; peer2: both of two, on two GPUs
    taps          dspark: the stream bf(P + delta) on entry of layers 3, 24, 48, 72, 90 of the run is an output

Buffers (M rows; `buffers` has the parts of a layer and the exchange with other ranks):

    inputs.x0 bf16 [M, hidden]           the prefix P on entry (token embeddings when first = 0)
    inputs.delta bf16 [M, hidden]        first > 0: FFN output of layer first - 1, added by the first AttnRes
    inputs.bank bf16 [M, old, hidden]    first > 0: bank rows 0..old-1 of earlier layers, old = ceil(first / block)
    inputs.slots, lengths, block_table, slot_mapping, remote.layers.N.*, with q > 1 accepted
    weights.layers.N.*, weights.out_res_norm, out_res_proj, out_norm;  states.layers.N.{conv, S | kv}
    outputs.bank bf16 [M, new, hidden]   bank rows old..old+new-1, written here; absent when no layer of the run writes
    outputs.prefix bf16 [M, hidden]      P after the closing AttnRes; free to use as the running prefix
    outputs.ids i32 [MoE layers, M, topk]    routed experts by descending rank
    outputs.out bf16 [M, hidden]         bf(RMS(h; out_norm)), h = the closing AttnRes over all bank rows and P
    outputs.taps bf16 [taps, M, hidden]      with taps, in the order of their layers (`dims.taps`: "3,24")
    outputs.send.layers.N.shared

N counts the layers of the run from 0. `dims.attn` and `dims.ffn` have a letter per layer: K = KDA, M = MLA; D = dense,
E = experts. A layer N of the model opens block b = N / block when N % block == 0.

The pieces are chains of `layers` instances i = 0.. (default 12, tiny 3), each with its own weights and states:

    kimi-k3-gemv        y_i = bf(x_i W_i^T), W_i bf16 [hidden, hidden] = weights.layers.i.w
    kimi-k3-kda         y_i = a of the KDA layer on x_i, o_proj and its all-reduce included
    kimi-k3-mla         y_i = a of the MLA layer on x_i, likewise
    kimi-k3-latent-moe  y_i = delta of the routed FFN on x_i (router, experts, shared, up); also outputs.ids
    kimi-k3-router      x_i = inputs.x.i, instances independent: outputs.ids, outputs.weights bf16 [instances, M, topk]
    kimi-k3-attn-res    chained through the prefix, below
    kimi-k3-allreduce-attn-res, kimi-k3-oproj-allreduce      likewise, on two GPUs

    glm-5.3-flash-kda   likewise of GLM-5.3-Flash: in_proj rows q | k | v | b | f_a | g_a, g = bf(g_a g_b^T)

with x_i = bf(inputs.x.i + y_{i-1}), x_0 = inputs.x.0, and y_i = outputs.y.i, all bf16 [M, hidden]. AttnRes: P starts as
inputs.x0; instance i does P <- bf(P + inputs.delta.i), writes P to row i of outputs.bank [M, bank_rows, hidden] when
i < bank_rows, and mixes bank rows 0..n-1 and P, n = min(i, bank_rows), with weights.layers.i.{res_norm, res_proj,
out_norm} into outputs.y.i; outputs.prefix is P at the end. bank_rows = min(8, layers) (tiny: min(3, layers)).

Two GPUs: every rank has the buffers of its own, `NAME@1` on rank 1; x0, bank, prefix and y are equal on both. Instance
i does as AttnRes with delta = bf(sum over the ranks, in their order, FP32, of the partials). The partial of a rank is
bf(inputs.partial.i + y_{i-1}), or bf(x_i weights.layers.i.o_proj^T), x_i = bf(inputs.x.i + y_{i-1}[:, :columns of x]).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sandbox.artifact import on_rank
from targets.base import Floor, Options, Workload, register
from targets.kimi_k3 import floors, seeds
from targets.kimi_k3.baseline import BASELINES, PAIRED_BASELINES, STRONG
from targets.kimi_k3.brief import brief as equations
from targets.kimi_k3.layout import BUILD
from targets.kimi_k3.options import PAIRED, counts, dims, resolve
from targets.kimi_k3.sizes import FAMILIES, PAIR_PRESETS, PRESETS


@dataclass(frozen=True)
class KimiTarget:
    """One of the targets. `part` is `decode` or the piece's name; `family` the model whose sizes it has."""

    part: str
    summary: str
    presets: tuple[str, ...] = tuple(PRESETS)
    family: str = "kimi-k3"
    reference: str = "targets.kimi_k3.reference:KimiReference"

    @property
    def name(self) -> str:
        return f"{self.family}-{self.part}"

    @property
    def baselines(self) -> Mapping[str, str]:
        """Name -> `module:Class` with `prepare(w, tensors)` (once) and `step()` (capturable, writes in place)."""
        return PAIRED_BASELINES if self.part in PAIRED else BASELINES

    @property
    def strong_baselines(self) -> tuple[str, ...]:
        """Without one of these nobody may speak of the best baseline."""
        return () if self.part in PAIRED else STRONG

    def model_layers(self, options: Options) -> int:
        """Layers of the whole model, of which a workload is a slice; 0 for a piece, which makes no tokens."""
        if self.part != "decode":
            return 0
        presets = {**FAMILIES[self.family], **PAIR_PRESETS}
        return presets[options.preset].sizes.total_layers

    @property
    def brief(self) -> str:
        """The equations of one step, as text for prompts."""
        return equations(self.part, self.family)

    def seed_source(self) -> str:
        return seeds.source(self.name)

    def workload(self, options: Options) -> Workload:
        run = resolve(self.name, options)
        found = BUILD[self.part](run)
        everywhere = tuple(
            replace(b, name=on_rank(b.name, rank)) for rank in range(run.shape.gpus) for b in found
        )
        return Workload(
            target=self.name, options=options, layers=run.layers, rows=run.shape.rows, context=run.shape.context,
            q=run.shape.q, ranks=run.shape.sizes.ranks, dims=dims(self.part, run), buffers=everywhere,
            floor=floors.floor(run.shape, found, counts(self.part, run)),
        )  # fmt: skip

    def floor_for(self, w: Workload, ids: Sequence[Sequence[Sequence[int]]]) -> Floor:
        """The floor with the experts really routed; `ids` is `outputs.ids` as nested lists."""
        run = resolve(self.name, w.options)
        one = tuple(b for b in w.buffers if b.rank == 0)
        return floors.floor(run.shape, one, counts(self.part, run), floors.distinct_by_layer(ids))


PAIRS = ("tiny-tp2", "tp8-pair", "tp2")
_SUMMARIES = {
    "decode": "Kimi K3 decode step of one tensor-parallel rank, a run of layers",
    "attn-res": "chain of fused AttnRes steps (prefix add, mix of up to 9 sources, RMSNorm)",
    "kda": "chain of KDA attention layers with recurrent state",
    "mla": "chain of absorbed MLA attention layers over a paged latent cache",
    "router": "independent sigmoid top-k routers",
    "latent-moe": "chain of latent MoE layers with MXFP4 experts",
    "gemv": "chain of square bf16 matrix-vector products",
}
_ON_TWO = {
    "allreduce-attn-res": "chain of all-reduces between two GPUs, each fused into AttnRes and its norm",
    "oproj-allreduce": "chain of o_proj, all-reduce between two GPUs, AttnRes and norm",
}
_GLM = KimiTarget(
    "kda",
    "chain of GLM-5.3-Flash KDA layers: a low-rank output gate, else as in Kimi K3",
    tuple(FAMILIES["glm-5.3-flash"]),
    "glm-5.3-flash",
)
TARGETS = {
    t.name: t
    for t in (
        *(KimiTarget(part, text) for part, text in _SUMMARIES.items()),
        *(KimiTarget(part, text, PAIRS) for part, text in _ON_TWO.items()),
        _GLM,
    )
}


def _get(name: str) -> KimiTarget:
    return TARGETS[name]


for _name in TARGETS:
    register(_name, partial(_get, _name))  # type: ignore[arg-type]
