"""Where each piece goes in vLLM: names, call sites, and why some kernels have no place there.

Two kinds of place: a stand-alone op, and a kernel inside `specialized_decode`. Facts about vLLM
0.33; every text that is searched for must occur exactly once in the checkout, or the export stops.
Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass

FOLDER = "vllm/models/kimi_k3/nvidia/ops/cute_dsl"
MODEL = "vllm/models/kimi_k3/nvidia/model.py"
CAPABILITIES = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_103a": (10, 3)}
CHIPS = {"sm_90a": "SM90", "sm_100a": "SM100", "sm_103a": "SM103"}
DSL_PIN = "4.8.0"
HIDDEN = 7168
OP, DECODE = KINDS = ("op", "specialized-decode")


@dataclass(frozen=True)
class Edit:
    """`text` goes before or after the one place in `file` that reads `anchor`. NAME: the op's module."""

    file: str
    anchor: str
    text: str
    after: bool = False


@dataclass(frozen=True)
class Place:
    """One piece. `dims`: sizes that its reference needs. No `edits`: `alone` says why.

    `note`: what a reviewer must know of the place. `stem`: the module's name, where it is not the piece's.
    """

    part: str
    title: str
    entry: str = "step"
    dims: tuple[str, ...] = ("eps",)
    edits: tuple[Edit, ...] = ()
    alone: str = ""
    stock: str = ""
    kind: str = OP
    folder: str = FOLDER
    stem: str = ""
    note: str = ""

    def name(self, arch: str) -> str:
        return f"{self.stem or self.module}_{CHIPS[arch].lower()}"

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
        note="The hook takes linear layers of exactly the local shape that was judged. vLLM's table of K3 projections "
        "(`KIMI_K3_PROJECTIONS`) has no square one, so at TP 8 and 16 **no layer of K3 takes this kernel as it is**: "
        "measure it on a shape of that table before submitting.",
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

_SD = "vllm/models/kimi_k3/nvidia/specialized_decode"
_PREPARED = f"{_SD}/cutedsl/attn_res/prepared.py"
DECODE_ROWS = (*range(1, 9), 16, 32, 64)

INSIDE = {
    "attn-res": Place(
        "attn-res", "Kimi K3 AttnRes boundary", "attn_res", ("eps", "hidden"),
        (
            Edit(
                _PREPARED, "from .kernel import ClusterAttnRes\n",
                "from .NAME import prepared as NAME\n",
            ),
            Edit(
                _PREPARED, "        self.code = self._compile(0, 0)\n",
                "        self.NAME = NAME.prepare(weights, key, eps)\n", after=True,
            ),
            Edit(
                _PREPARED, "        code = self.code if aux is None else self.aux[0]\n",
                "        special = self.NAME\n"
                "        if special and special.takes(delta, prefix, blocks, out, aux):\n"
                "            return special.run(delta, prefix, blocks, out)\n",
            ),
        ),
        stock="`PreparedAttnRes` with its seven-CTA cluster kernel",
        kind=DECODE, folder=f"{_SD}/cutedsl/attn_res", stem="attn_res_boundary",
        note="It serves the boundaries that read an ordinary tensor: those before the first and the second layer (and "
        "after any layer without a MoE tail). **Most boundaries take their input from the MoE tail's mailbox ring, or "
        "are fused into the o-projection, and keep their kernels**: a whole step gains at most what these few launches "
        "gain. The device file keeps the candidate's functions instead of a class with `__call__`, so that it "
        "compiles to the judged machine work.",
    ),
}  # fmt: skip

NOT_INSIDE = {
    "gemv": "its projections are [6288 or 3216, 7168] (KDA) and [fused_qkv_a_g, 7168] (MLA) in runtime/providers.py, "
    "the judged product is square and fits neither",
    "router": "its router is one phase of SharedFront, which also makes the latent down projection and sends both "
    "through a mailbox to the other ranks; a router alone has no hook there",
    "kda": "PreparedKda starts after the input projection and ends before the o-projection, whose producer and "
    "consumer sum over ranks and make the next AttnRes; the judged kernel includes both projections",
    "latent-moe": "PreparedMoE chains SharedFront, PersistentExperts and PreparedTail through per-layer mailboxes, the "
    "judged kernel takes the other ranks' sums as inputs and replaces all three at once",
}

NO_PLACE = {
    "decode": "a kernel that runs a whole stack of layers fits no hook of vLLM: its hooks are per layer and per "
    "operation (providers of specialized_decode, quant methods, attn_res), and such a kernel replaces the loop in "
    "SpecializedDecode.run() itself. That needs an RFC before code",
    "mla": "MLA sits behind vLLM's attention backends with their own cache metadata; a kernel that includes the "
    "projections around it fits none of their interfaces",
}


def find(target: str, kind: str = OP) -> Place | str:
    """The piece's place of that kind, or why it has none."""
    part = target.removeprefix("kimi-k3-")
    known = {OP: PLACES, DECODE: INSIDE}[kind]
    if not target.startswith("kimi-k3-") or part not in {**PLACES, **NO_PLACE}:
        return f"there is no known place upstream for the target {target}"
    if part in known:
        return known[part]
    if part in NO_PLACE:
        return NO_PLACE[part]
    return f"the {part} kernel fits no hook of specialized_decode: {NOT_INSIDE[part]}"


def decode_gate(arch: str, rows: int, hidden: int) -> str:
    """Why an artifact for those cannot be taken inside specialized_decode; empty if it can."""
    if arch == "sm_90a":
        return (
            "the executor of specialized_decode refuses every GPU but the SM100 family, so a kernel for sm_90a would "
            "never be called there"
        )
    if rows not in DECODE_ROWS:
        return f"the executor prepares 1 to 8, 16, 32 and 64 tokens, the kernel is for {rows}"
    if hidden != HIDDEN:
        return f"the executor's rows have {HIDDEN} columns, the kernel was judged with {hidden}"
    return ""
