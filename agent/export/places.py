"""Where each piece goes in vLLM: names, call sites, and why some kernels have no place there.

Facts about vLLM 0.33; every text that is searched for must occur exactly once in the checkout, or
the export stops. Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass

FOLDER = "vllm/models/kimi_k3/nvidia/ops/cute_dsl"
MODEL = "vllm/models/kimi_k3/nvidia/model.py"
CAPABILITIES = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_103a": (10, 3)}
CHIPS = {"sm_90a": "SM90", "sm_100a": "SM100", "sm_103a": "SM103"}
DSL_PIN = "4.8.0"


@dataclass(frozen=True)
class Edit:
    """`text` goes before or after the one place in `file` that reads `anchor`. NAME: the op's module."""

    file: str
    anchor: str
    text: str
    after: bool = False


@dataclass(frozen=True)
class Place:
    """One piece. `dims`: sizes that its reference needs. No `edits`: `alone` says why."""

    part: str
    title: str
    entry: str = "step"
    dims: tuple[str, ...] = ("eps",)
    edits: tuple[Edit, ...] = ()
    alone: str = ""
    stock: str = ""

    def name(self, arch: str) -> str:
        return f"{self.module}_{CHIPS[arch].lower()}"

    @property
    def module(self) -> str:
        return self.part.replace("-", "_")


_IMPORT = "from vllm.models.kimi_k3.nvidia.ops.cute_dsl.NAME import op as NAME\n"
_PLATFORM = "from vllm.platforms import current_platform\n"
_OPS = "from vllm.models.kimi_k3.nvidia.ops import attn_res\n"
_ATTN_RES = "vllm/models/kimi_k3/nvidia/ops/attn_res.py"
_GEMM = "vllm/models/kimi_k3/nvidia/low_latency_gemm.py"
_ALONE = (
    "The call site is not changed. The kernel covers what vLLM spreads over several modules (quantised "
    "linear layers, cache metadata, runners, collectives); joining them is a design question for an "
    "issue or RFC first. The op, its gates (`can_run`), warm-up keys, tests and benchmark are complete."
)

PLACES = {
    "attn-res": Place(
        "attn-res", "Kimi K3 AttnRes", "attn_res", ("eps", "hidden"),
        (
            Edit(_ATTN_RES, _PLATFORM, _IMPORT),
            Edit(
                _ATTN_RES, "    output = prefix.new_empty(prefix.shape)\n",
                "    output = NAME.maybe_run(\n        prefix,\n        delta,\n        blocks,\n"
                "        norm_weight,\n        qk_weight,\n        output_norm_weight,\n        num_blocks,\n"
                "        block_write_idx,\n        eps,\n        output_norm_eps,\n    )\n"
                "    if output is not None:\n        return output\n",
            ),
            Edit(MODEL, _OPS, _IMPORT, after=True),
            Edit(
                MODEL, "            self.prev_valid_blocks = cdiv(layer_idx, self.attn_res_block_size)\n",
                "            NAME.register(config.hidden_size, config.rms_norm_eps)\n", after=True,
            ),
        ),
        stock="`attn_res` (Triton on Hopper, the native op on the SM100 family)",
    ),
    "gemv": Place(
        "gemv", "Kimi K3 skinny GEMM", dims=("eps",),
        edits=(
            Edit(_GEMM, _PLATFORM, _IMPORT),
            Edit(
                _GEMM, "        spec = table.get((weight.shape[0], weight.shape[1]))\n",
                "        if NAME.install(child):\n            continue\n",
            ),
        ),
        stock="the unquantised linear method",
    ),
    "router": Place(
        "router", "Kimi K3 fused router", dims=("eps", "topk"),
        edits=(
            Edit(MODEL, _OPS, _IMPORT, after=True),
            Edit(
                MODEL,
                "        self.gate.e_score_correction_bias = nn.Parameter(\n"
                "            torch.empty(num_experts, dtype=torch.float32)\n        )\n",
                "        NAME.register(self.gate.weight, num_experts_per_token)\n", after=True,
            ),
            Edit(
                MODEL,
                "            router_logits, _ = self.gate(hidden_states)\n"
                "            if not self.use_mega_moe:\n",
                "            if self.use_mega_moe:\n"
                "                selected = NAME.maybe_select(self, hidden_states)\n"
                "                if selected is not None:\n                    return selected\n",
            ),
        ),
        stock="`GateLinear` and `fused_grouped_topk`",
    ),
    "kda": Place(
        "kda", "Kimi K3 KDA decode layer", alone=_ALONE, stock="the KDA layer module",
        dims=("eps", "kda_heads", "head_dim", "f_rank"),
    ),
    "latent-moe": Place(
        "latent-moe", "Kimi K3 latent MoE", alone=_ALONE, stock="`KimiMoE` and `LatentMoERunner`",
        dims=("eps", "topk"),
    ),
}  # fmt: skip

NO_PLACE = {
    "decode": "a kernel that runs a whole stack of layers fits no hook of vLLM: its hooks are per layer and per "
    "operation (providers of specialized_decode, quant methods, attn_res), and such a kernel replaces the loop in "
    "SpecializedDecode.run() itself. That needs an RFC before code",
    "mla": "MLA sits behind vLLM's attention backends with their own cache metadata; a kernel that includes the "
    "projections around it fits none of their interfaces",
}


def find(target: str) -> Place | str:
    """The piece's place, or why it has none."""
    part = target.removeprefix("kimi-k3-")
    if target.startswith("kimi-k3-") and part in PLACES:
        return PLACES[part]
    if target.startswith("kimi-k3-") and part in NO_PLACE:
        return NO_PLACE[part]
    return f"there is no known place upstream for the target {target}"
