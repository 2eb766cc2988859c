"""Sizes of Kimi K3 on one tensor-parallel rank, as plain numbers, and the presets. No torch, no buffers.

"Local" means this rank's share. `tiny` is the whole model shrunk for a CPU; `tiny-tp2` is the same split in two,
`tp2` the real one; `tiny-end` is one layer shorter, so that it ends in two MLA layers as the model does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

EPS = 1e-5
"""Epsilon of every RMSNorm (the L2 norms of q and k in KDA use 1e-6). Of q_a's and kv_a's too: vLLM passes it to them,
while the modelling code published with the checkpoint has 1e-6 there."""
GATE_LOWER_BOUND = -5.0
PAGE_HEADROOM = 256
"""Cache rows beyond `context` that every request owns, so that a trajectory of steps can grow."""


@dataclass(frozen=True)
class Sizes:
    """One rank of one model. Whole-model sizes unless the name ends in `_local` or the comment says local."""

    ranks: int
    hidden: int
    total_layers: int
    block: int
    head_dim: int
    kda_heads: int  # local
    mla_heads: int  # local
    f_rank: int
    q_lora: int
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_dim: int
    latent: int
    experts: int
    topk: int
    expert_dim: int  # local slice of the expert's intermediate size
    shared_dim: int  # local
    dense_dim: int  # local
    page: int
    gate_rank: int = 0
    """KDA's output gate: full rank, or made from this many columns, as the decay is."""
    taps: tuple[int, ...] = ()
    """Layers on whose entry a drafter taps the residual stream."""

    @property
    def kda_dim(self) -> int:
        """D: width of q, k, v and g on this rank."""
        return self.kda_heads * self.head_dim

    @property
    def in_proj_rows(self) -> int:
        """Rows q D | k D | v D | g D | f_a | b H | zero rows up to a multiple of 16; of a low-rank gate q D | k D |
        v D | b H | f_a | g_a."""
        return -(-self.in_proj_live // 16) * 16

    @property
    def in_proj_live(self) -> int:
        gate = self.gate_rank or self.kda_dim
        return 3 * self.kda_dim + gate + self.f_rank + self.kda_heads

    @property
    def mla_dim(self) -> int:
        return self.mla_heads * self.v_dim

    @property
    def a_proj_rows(self) -> int:
        """Rows q_c | kv_c | k_pe | gate."""
        return self.q_lora + self.kv_lora + self.qk_rope + self.mla_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_lora + self.qk_rope

    @property
    def latent_local(self) -> int:
        return self.latent // self.ranks

    @property
    def experts_local(self) -> int:
        """Router rows of this rank when the router is sharded."""
        return self.experts // self.ranks

    @property
    def hidden_local(self) -> int:
        return self.hidden // self.ranks

    def is_mla(self, layer: int) -> bool:
        return layer % 4 == 3 or layer == self.total_layers - 1

    def is_dense(self, layer: int) -> bool:
        return layer == 0


def _full(ranks: int) -> Sizes:
    return Sizes(
        ranks=ranks, hidden=7168, total_layers=93, block=12, head_dim=128, kda_heads=96 // ranks,
        mla_heads=96 // ranks, f_rank=128, q_lora=1536, kv_lora=512, qk_nope=128, qk_rope=64, v_dim=128,
        latent=3584, experts=896, topk=16, expert_dim=3072 // ranks, shared_dim=6144 // ranks,
        dense_dim=33792 // ranks, page=64, taps=(3, 24, 48, 72, 90),
    )  # fmt: skip


def _tiny(ranks: int, total_layers: int = 6) -> Sizes:
    return Sizes(
        ranks=ranks, hidden=512, total_layers=total_layers, block=2, head_dim=128, kda_heads=2 // ranks,
        mla_heads=2 // ranks, f_rank=128, q_lora=128, kv_lora=128, qk_nope=64, qk_rope=32, v_dim=64,
        latent=256, experts=32, topk=4, expert_dim=128 // ranks, shared_dim=256 // ranks,
        dense_dim=512 // ranks, page=16, taps=(1, 4),
    )  # fmt: skip


def _glm(hidden: int, heads: int, ranks: int) -> Sizes:
    """GLM-5.3-Flash as far as its KDA layers go; the MLA, MoE and residual sizes are not declared."""
    return Sizes(
        ranks=ranks, hidden=hidden, total_layers=45, block=45, head_dim=128, kda_heads=heads // ranks,
        mla_heads=0, f_rank=128, q_lora=0, kv_lora=0, qk_nope=0, qk_rope=0, v_dim=0, latent=0, experts=0, topk=0,
        expert_dim=0, shared_dim=0, dense_dim=0, page=64, gate_rank=128,
    )  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """Sizes, and what a run takes when the user does not say."""

    sizes: Sizes
    first: int
    layers: int
    instances: int
    context: int


PRESETS = {
    "tiny": Preset(_tiny(1), first=0, layers=6, instances=3, context=96),
    "tiny-tp2": Preset(_tiny(2), first=0, layers=6, instances=3, context=96),
    "tiny-end": Preset(_tiny(1, 5), first=0, layers=5, instances=3, context=96),
    "tp2": Preset(_full(2), first=12, layers=2, instances=12, context=8192),
    "tp8": Preset(_full(8), first=12, layers=4, instances=12, context=8192),
    "tp16": Preset(_full(16), first=12, layers=4, instances=12, context=8192),
}
GLM_PRESETS = {
    "tiny": Preset(_glm(512, 8, 1), first=0, layers=3, instances=3, context=96),
    "tp4": Preset(_glm(4096, 64, 4), first=0, layers=12, instances=12, context=8192),
    "tp8": Preset(_glm(4096, 64, 8), first=0, layers=12, instances=12, context=8192),
}
FAMILIES = {"kimi-k3": PRESETS, "glm-5.3-flash": GLM_PRESETS}
"""Presets by the name that its targets begin with."""
PAIR_PRESETS = {
    "tp8-pair": Preset(replace(_full(8), ranks=2), first=0, layers=12, instances=12, context=8192),
}
"""For pieces on two GPUs: each has the share that it would have of eight, so that the exchange weighs as much."""
ROWS = (1, 2, 4, 8, 16, 32, 64)
MOST_TOKENS = 8
"""Tokens of one request in a verification step."""
