"""What a user may ask of the Kimi K3 targets, resolved to a concrete run, and the plain numbers candidates see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from targets.base import Options, Scalar, UnknownOption
from targets.kimi_k3.buffers import Shape
from targets.kimi_k3.sizes import EPS, FAMILIES, MOST_TOKENS, PAIR_PRESETS, ROWS, Preset, Sizes

CHOICES = {
    "latent_down": ("sharded", "replicated"), "router": ("replicated", "sharded"), "kv": ("bf16", "fp8"),
    "experts": ("mxfp4", "nvfp4"), "taps": ("none", "dspark"), "mode": ("loopback", "peer2"),
}  # fmt: skip
"""Options with a fixed set of values, the default first."""
_MOE = {"latent_down", "router", "experts"}
KNOWN: Mapping[str, set[str]] = {
    "decode": {"first", "q", "kv", "taps", "mode", *_MOE}, "kda": {"q"}, "mla": {"q", "kv"}, "latent-moe": _MOE,
}  # fmt: skip
"""Options by part; `weights` (a folder with a checkpoint) goes with every part that has the model's weights."""
PAIRED = ("allreduce-attn-res", "oproj-allreduce")
"""Parts that always run on two GPUs."""
MODEL_PARTS = ("decode", "kda", "mla", "latent-moe", "router")


def split(name: str) -> tuple[str, str]:
    """(family, part) of a target's name, or of a bare part of Kimi K3."""
    for family in FAMILIES:
        if name.startswith(f"{family}-"):
            return family, name.removeprefix(f"{family}-")
    return "kimi-k3", name


@dataclass(frozen=True)
class Run:
    """A resolved request: the shape, and which layers of the model run (pieces: instances)."""

    shape: Shape
    first: int
    layers: int

    @property
    def models_layers(self) -> range:
        return range(self.first, self.first + self.layers)

    @property
    def attn(self) -> str:
        return "".join("M" if self.shape.sizes.is_mla(n) else "K" for n in self.models_layers)

    @property
    def ffn(self) -> str:
        return "".join("D" if self.shape.sizes.is_dense(n) else "E" for n in self.models_layers)

    @property
    def tapped(self) -> tuple[int, ...]:
        """Layers of the run on whose entry the stream is put out for a drafter."""
        wanted = self.shape.sizes.taps if self.shape.taps else ()
        return tuple(n for n in wanted if n in self.models_layers)

    @property
    def bank_old(self) -> int:
        return -(-self.first // self.shape.sizes.block)

    @property
    def bank_rows(self) -> int:
        return -(-(self.first + self.layers) // self.shape.sizes.block)


def resolve(name: str, options: Options) -> Run:
    """`name`: a target's, or a part's of Kimi K3. Raises UnknownOption with what there is."""
    family, part = split(name)
    presets = FAMILIES[family]
    if part in PAIRED:
        presets = {n: x for n, x in {**presets, **PAIR_PRESETS}.items() if x.sizes.ranks == 2}
    if options.preset not in presets:
        raise UnknownOption(f"no preset {options.preset!r}; there are {', '.join(presets)}")
    preset = presets[options.preset]
    extra = _extra(f"{family}-{part}", part, options)
    first, layers = _layers(part, preset, options, extra)
    context = options.context or preset.context
    if not 1 <= context <= 1 << 20:
        raise UnknownOption(f"context {context}: 1 to 1048576")
    q = _tokens(options.rows, extra)
    if context < q:
        raise UnknownOption(f"context {context}: it counts the {q} new tokens")

    gpus = _gpus(part, preset.sizes, extra)

    def chosen(option: str) -> Scalar:
        return extra.get(option, CHOICES[option][0])

    shape = Shape(
        preset.sizes, options.rows, context, latent_sharded=chosen("latent_down") == "sharded",
        router_sharded=chosen("router") == "sharded", q=q, kv=str(chosen("kv")), experts=str(chosen("experts")),
        taps=chosen("taps") != "none", gpus=gpus,
    )  # fmt: skip
    _divides(part, preset.sizes, shape)
    return Run(shape, first, layers)


def _gpus(part: str, s: Sizes, extra: Mapping[str, Scalar]) -> int:
    """GPUs that a job holds: more than one where the other ranks really run."""
    if part not in PAIRED and extra.get("mode") != "peer2":
        return 1
    if s.ranks != 2:
        raise UnknownOption("mode peer2 runs two ranks: take the preset tiny-tp2 or tp2")
    if "weights" in extra:
        raise UnknownOption("mode peer2 does not read checkpoints")
    return s.ranks


def _layers(
    part: str, preset: Preset, options: Options, extra: Mapping[str, Scalar]
) -> tuple[int, int]:
    first = extra.get("first", preset.first) if part == "decode" else 0
    layers = options.layers or (preset.layers if part == "decode" else preset.instances)
    if not isinstance(first, int) or isinstance(first, bool) or first < 0 or layers < 1:
        raise UnknownOption(f"a run of {layers} layers from layer {first} is none")
    most = preset.sizes.total_layers
    if part == "decode" and first + layers > most:
        raise UnknownOption(
            f"layers {first} to {first + layers - 1}: {options.preset} has layers 0 to {most - 1}"
        )
    if part != "decode" and layers > 128:
        raise UnknownOption(f"{layers} instances: at most 128")
    return first, layers


def _tokens(rows: int, extra: Mapping[str, Scalar]) -> int:
    """q; the rows are whole requests."""
    q = extra.get("q", 1)
    if not isinstance(q, int) or isinstance(q, bool) or not 1 <= q <= MOST_TOKENS:
        raise UnknownOption(f"q {q}: 1 to {MOST_TOKENS} tokens a request")
    if rows > ROWS[-1] or rows % q or rows // q not in ROWS:
        lawful = [r * q for r in ROWS if r * q <= ROWS[-1]]
        tail = f" with q {q}" if q > 1 else ""
        raise UnknownOption(f"rows {rows}: there are {', '.join(map(str, lawful))}{tail}")
    return q


def _divides(part: str, s: Sizes, p: Shape) -> None:
    group = 16 if p.experts == "nvfp4" else 32
    if "experts" in KNOWN.get(part, ()) and (s.expert_dim % group or s.latent % group):
        raise UnknownOption(
            f"experts {p.experts}: {s.expert_dim} columns are no whole groups of {group}"
        )


def _extra(target: str, part: str, options: Options) -> dict[str, Scalar]:
    loads = part in MODEL_PARTS and target.startswith("kimi-k3-")
    known = {*KNOWN.get(part, ()), *(["weights"] if loads else [])}
    for name, value in options.extra.items():
        if name not in known:
            raise UnknownOption(
                f"{target} has no option {name!r}; there are {', '.join(sorted(known)) or 'none'}"
            )
        if name == "weights":
            folder = Path(str(value))
            if not folder.is_absolute() or not any(folder.glob("*.safetensors")):
                raise UnknownOption(
                    f"weights {value}: no absolute path of a folder with *.safetensors"
                )
        if name in CHOICES and value not in CHOICES[name]:
            raise UnknownOption(f"{name} {value!r}: {' or '.join(CHOICES[name])}")
    return dict(options.extra)


def counts(part: str, run: Run) -> tuple[int, int]:
    """(KDA, MLA) layers."""
    if part == "decode":
        return run.attn.count("K"), run.attn.count("M")
    return (run.layers if part == "kda" else 0), (run.layers if part == "mla" else 0)


def bank_rows(part: str, run: Run) -> int:
    if part in ("attn-res", *PAIRED):
        s = run.shape.sizes
        return min(-(-s.total_layers // s.block), run.layers)
    return run.bank_rows


_PIECE_ATTN = {"kda": "K", "mla": "M", "oproj-allreduce": "K"}


def dims(part: str, run: Run) -> dict[str, Scalar]:
    """What a candidate reads as `cfg.dims.NAME`; head counts and `*_dim`, `*_rows` are this rank's."""
    p, s = run.shape, run.shape.sizes
    return {
        "rows": p.rows, "layers": run.layers, "first": run.first, "ranks": s.ranks, "context": p.context,
        "attn": run.attn if part == "decode" else _PIECE_ATTN.get(part, "") * run.layers, "gpus": p.gpus,
        "ffn": run.ffn if part == "decode" else "E" * run.layers if part == "latent-moe" else "",
        "q": p.q, "requests": p.requests, "kv": p.kv, "experts_format": p.experts,
        "taps": ",".join(map(str, run.tapped)), "gate_rank": s.gate_rank,
        "hidden": s.hidden, "hidden_local": s.hidden_local, "eps": EPS,
        "block": s.block, "bank_old": run.bank_old, "bank_rows": bank_rows(part, run),
        "kda_heads": s.kda_heads, "head_dim": s.head_dim, "kda_dim": s.kda_dim, "f_rank": s.f_rank,
        "in_proj_rows": s.in_proj_rows, "slots": p.slots,
        "mla_heads": s.mla_heads, "q_lora": s.q_lora, "kv_lora": s.kv_lora, "qk_nope": s.qk_nope,
        "qk_rope": s.qk_rope, "v_dim": s.v_dim, "mla_dim": s.mla_dim, "kv_dim": s.kv_dim,
        "a_proj_rows": s.a_proj_rows, "page": s.page, "pages": p.pages, "pages_per_request": p.pages_per_request,
        "latent": s.latent, "latent_rows": p.latent_rows, "latent_sharded": p.latent_sharded,
        "experts": s.experts, "topk": s.topk, "router_rows": p.router_rows, "router_sharded": p.router_sharded,
        "expert_dim": s.expert_dim, "shared_dim": s.shared_dim, "dense_dim": s.dense_dim,
    }  # fmt: skip
