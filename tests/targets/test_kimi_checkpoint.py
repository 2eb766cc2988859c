"""`--weights DIR`: a checkpoint that the test writes, is loaded, cut to a rank and packed as declared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from targets.base import Options, UnknownOption, Workload, find
from targets.kimi_k3.checkpoint import load
from targets.kimi_k3.maths.mxfp4 import dequantise
from targets.kimi_k3.safetensors import DTYPES, CheckpointError, Folder
from targets.kimi_k3.sizes import PRESETS
from tests.targets.kimi import REFERENCE, rel, run, tensors

CODES = {v: k for k, v in reversed(DTYPES.items())}
S = PRESETS["tiny"].sizes
CODE = torch.Generator().manual_seed(3)


def write(file: Path, made: dict[str, Tensor]) -> None:
    """The format as published: length, JSON, raw little-endian data."""
    header, parts, at = {}, [], 0
    for name, value in made.items():
        raw = value.contiguous().view(torch.uint8).flatten().numpy().tobytes()
        header[name] = {
            "dtype": CODES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [at, at + len(raw)],
        }
        parts.append(raw)
        at += len(raw)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def model(layers: tuple[int, ...]) -> dict[str, Tensor]:
    """Whole tensors of those layers of the tiny model under the published names."""
    g = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=g) / shape[-1] ** 0.5).bfloat16()

    made = {f"model.{n}.weight": normal(S.hidden) for n in ("output_attn_res_norm", "norm")}
    made["model.output_attn_res_proj.weight"] = normal(1, S.hidden)
    for n in layers:
        at = f"model.layers.{n}."
        part = kda(normal) if not S.is_mla(n) else mla(normal)
        part |= dense(normal) if S.is_dense(n) else moe(normal)
        for name in (
            "self_attention_res_norm",
            "input_layernorm",
            "mlp_res_norm",
            "post_attention_layernorm",
        ):
            part[f"{name}.weight"] = normal(S.hidden)
        for name in ("self_attention_res_proj", "mlp_res_proj"):
            part[f"{name}.weight"] = normal(1, S.hidden)
        made |= {at + k: v for k, v in part.items()}
    return made


def kda(normal) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    d, h = S.kda_dim, S.hidden
    shapes = {"q": (d, h), "k": (d, h), "v": (d, h), "g": (d, h), "b": (S.kda_heads, h), "f_a": (128, h),
              "f_b": (d, 128), "o": (h, d)}  # fmt: skip
    made = {f"self_attn.{k}_proj.weight": normal(*v) for k, v in shapes.items()}
    made |= {f"self_attn.{x}_conv1d.weight": normal(d, 1, 4) for x in "qkv"}
    return made | {
        "self_attn.A_log": normal(S.kda_heads + 2).float(), "self_attn.dt_bias": normal(d).float(),
        "self_attn.o_norm.weight": normal(128),
    }  # fmt: skip


def mla(normal) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    h, heads = S.hidden, S.mla_heads
    shapes = {
        "q_a_proj": (S.q_lora, h), "kv_a_proj_with_mqa": (S.kv_dim, h), "g_proj": (S.mla_dim, h),
        "q_b_proj": (heads * (S.qk_nope + S.qk_rope), S.q_lora), "o_proj": (h, S.mla_dim),
        "kv_b_proj": (heads * (S.qk_nope + S.v_dim), S.kv_lora), "q_a_layernorm": (S.q_lora,),
        "kv_a_layernorm": (S.kv_lora,),
    }  # fmt: skip
    return {f"self_attn.{k}.weight": normal(*v) for k, v in shapes.items()}


def moe(normal) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    at, h = "block_sparse_moe.", S.hidden
    made = {
        f"{at}gate.weight": normal(S.experts, h), f"{at}gate.e_score_correction_bias": normal(S.experts).float(),
        f"{at}routed_expert_down_proj.weight": normal(S.latent, h), f"{at}routed_expert_norm.weight": normal(S.latent),
        f"{at}routed_expert_up_proj.weight": normal(h, S.latent),
    }  # fmt: skip
    for name, shape in (
        ("gate", (S.shared_dim, h)),
        ("up", (S.shared_dim, h)),
        ("down", (h, S.shared_dim)),
    ):
        made[f"{at}shared_experts.{name}_proj.weight"] = normal(*shape)
    for e in range(S.experts):
        for name, shape in (
            ("w1", (S.expert_dim, S.latent)),
            ("w3", (S.expert_dim, S.latent)),
            ("w2", (S.latent, S.expert_dim)),
        ):
            for kind, low, high, columns in (("packed", 0, 256, 2), ("scale", 118, 124, 32)):
                form = (shape[0], shape[1] // columns)
                value = torch.randint(low, high, form, generator=CODE, dtype=torch.uint8)
                made[f"{at}experts.{e}.{name}.weight_{kind}"] = value
    return made


def dense(normal) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    shapes = {
        "gate": (S.dense_dim, S.hidden),
        "up": (S.dense_dim, S.hidden),
        "down": (S.hidden, S.dense_dim),
    }
    return {f"mlp.{k}_proj.weight": normal(*v) for k, v in shapes.items()}


@pytest.fixture(scope="module")
def whole() -> dict[str, Tensor]:
    return model((0, 1, 3))


@pytest.fixture(scope="module")
def folder(whole: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In two files, as checkpoints are split."""
    path = tmp_path_factory.mktemp("weights")
    first = {k: v for k, v in whole.items() if ".layers.1." not in k}
    write(path / "model-00001-of-00002.safetensors", first)
    write(
        path / "model-00002-of-00002.safetensors",
        {k: v for k, v in whole.items() if k not in first},
    )
    return path


def loaded(
    folder: Path, part: str, preset: str, layers: int, **extra: str | int
) -> tuple[Workload, dict[str, Tensor]]:
    w = find(f"kimi-k3-{part}").workload(
        Options(preset, layers, 2, extra={"weights": str(folder), **extra})
    )
    return w, REFERENCE.weights(w, 1, "cpu")


def test_every_projection_lands_in_its_rows(folder: Path, whole: dict[str, Tensor]) -> None:
    _, t = loaded(folder, "decode", "tiny", 2)
    at = "model.layers.1.self_attn."
    d = S.kda_dim
    rows = t["weights.layers.1.in_proj"].split([d, d, d, d, 128, S.kda_heads, 14])
    for got, name in zip(rows, ("q", "k", "v", "g", "f_a", "b"), strict=False):
        assert torch.equal(got, whole[f"{at}{name}_proj.weight"])
    assert rows[6].abs().max() == 0
    assert torch.equal(
        t["weights.layers.1.conv"][d : 2 * d], whole[f"{at}k_conv1d.weight"][:, 0].float()
    )
    assert torch.equal(t["weights.layers.1.A_log"], whole[f"{at}A_log"][: S.kda_heads])
    assert torch.equal(
        t["weights.layers.0.dense_gate_up"][S.dense_dim :],
        whole["model.layers.0.mlp.up_proj.weight"],
    )
    assert torch.equal(
        t["weights.layers.0.attn_res_proj"],
        whole["model.layers.0.self_attention_res_proj.weight"][0],
    )
    assert torch.equal(t["weights.out_norm"], whole["model.norm.weight"])


def test_experts_keep_their_packing_order(folder: Path, whole: dict[str, Tensor]) -> None:
    """Column 2j is the low nibble of byte j: read here by hand, value by value."""
    _, t = loaded(folder, "latent-moe", "tiny", 1)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    e, row = 5, 17
    codes = whole[f"model.layers.1.block_sparse_moe.experts.{e}.w1.weight_packed"][row].tolist()
    scale = whole[f"model.layers.1.block_sparse_moe.experts.{e}.w1.weight_scale"][row].tolist()
    by_hand = [
        values[codes[c // 2] >> 4 * (c % 2) & 15] * 2.0 ** (scale[c // 32] - 127)
        for c in range(S.latent)
    ]
    got = dequantise(t["weights.layers.0.w1"][e], t["weights.layers.0.w1_scale"][e], torch.float64)
    assert got[row].tolist() == by_hand


@pytest.mark.parametrize("latent_down", ["sharded", "replicated"])
def test_a_rank_has_its_share_of_the_whole(folder: Path, latent_down: str) -> None:
    """Rank 0 of two: the first head, half of every expert, whole groups of scales."""
    _, one = loaded(folder, "decode", "tiny", 2)
    _, half = loaded(folder, "decode", "tiny-tp2", 2, latent_down=latent_down)
    a, b = ({k.removeprefix("weights.layers.1."): v for k, v in t.items()} for t in (one, half))
    assert torch.equal(b["o_proj"], a["o_proj"][:, :128])
    assert torch.equal(b["w1"], a["w1"][:, :64]) and torch.equal(
        b["w1_scale"], a["w1_scale"][:, :64]
    )
    assert torch.equal(b["w2"], a["w2"][..., :32]) and torch.equal(
        b["w2_scale"], a["w2_scale"][..., :2]
    )
    assert torch.equal(b["latent_up"], a["latent_up"][: S.hidden // 2])
    rows = S.latent // 2 if latent_down == "sharded" else S.latent
    assert torch.equal(b["latent_down"], a["latent_down"][:rows])
    assert torch.equal(b["router"], a["router"])
    assert torch.equal(b["shared_gate_up"][64 * 2 :], a["shared_gate_up"][S.shared_dim :][: 64 * 2])
    assert torch.equal(b["conv"][128:256], a["conv"][256:384])


def test_mla_splits_the_joint_projection_by_head(folder: Path, whole: dict[str, Tensor]) -> None:
    w, t = loaded(folder, "mla", "tiny", 1, kv="fp8")
    joint = whole["model.layers.3.self_attn.kv_b_proj.weight"].reshape(S.mla_heads, -1, S.kv_lora)
    assert torch.equal(t["weights.layers.0.w_uk"], joint[:, : S.qk_nope])
    assert torch.equal(t["weights.layers.0.w_uv"], joint[:, S.qk_nope :])
    a = t["weights.layers.0.a_proj"]
    assert torch.equal(a[: S.q_lora], whole["model.layers.3.self_attn.q_a_proj.weight"])
    assert torch.equal(a[-S.mla_dim :], whole["model.layers.3.self_attn.g_proj.weight"])
    assert t["weights.layers.0.k_scale"].item() == 1
    assert set(t) == {b.name for b in w.buffers if b.group == "weights"}


def test_a_loaded_stack_runs_and_routes_by_its_own_router(folder: Path) -> None:
    w, weights = loaded(folder, "decode", "tiny", 2)
    t = {**tensors(w), **weights}
    got = run(w, t)
    again = run(w, t, "f32", got.tensors["outputs.ids"])
    assert rel(again.tensors["outputs.out"], got.tensors["outputs.out"]) < 0.05
    target = find("kimi-k3-decode")
    assert target.floor_for(w, got.tensors["outputs.ids"].tolist()).bytes <= w.floor.bytes * 1.1  # type: ignore[attr-defined]


def test_what_is_missing_or_odd_is_named(
    folder: Path, whole: dict[str, Tensor], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="no layer 2; there are 0, 1, 3"):
        loaded(folder, "decode", "tiny", 3)
    with pytest.raises(CheckpointError, match="2 layers for kda"):
        loaded(folder, "kda", "tiny", 3)
    with pytest.raises(UnknownOption, match="absolute"):
        find("kimi-k3-kda").workload(Options(extra={"weights": "here"}))
    with pytest.raises(UnknownOption, match="no option 'weights'"):
        find("kimi-k3-gemv").workload(Options(extra={"weights": str(folder)}))
    lost = "model.layers.1.self_attn.f_b_proj.weight"
    write(tmp_path / "a.safetensors", {k: v for k, v in whole.items() if k != lost})
    with pytest.raises(CheckpointError, match="layer 1: no self_attn.f_b_proj"):
        loaded(tmp_path, "decode", "tiny", 2)
    other = tmp_path / "other"
    other.mkdir()
    write(other / "a.safetensors", {**whole, lost: whole[lost][:, :64]})
    w = find("kimi-k3-decode").workload(Options("tiny", 2, 2, extra={"weights": str(other)}))
    with pytest.raises(
        CheckpointError, match=r"layers.1.f_b: the checkpoint gives \[256, 64\], not \[256, 128\]"
    ):
        load(w, "cpu")


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, (100).to_bytes(8, "little") + b"{}"])
def test_damaged_files_are_refused(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(damage)
    with pytest.raises(CheckpointError):
        Folder(tmp_path)


def test_offsets_beyond_the_file_are_refused(tmp_path: Path) -> None:
    text = json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"1234")
    with pytest.raises(CheckpointError, match="x has 16 bytes"):
        Folder(tmp_path)


def test_the_flag_is_an_option_with_an_absolute_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import click

    from agent.commands import common

    seen: list[Options] = []

    @click.command()
    @common.workload_options
    def probe(**asked: object) -> None:
        seen.append(common.chosen(find("kimi-k3-kda"), "cpu", dict(asked)))

    monkeypatch.chdir(folder.parent)
    args = ["--target", "kimi-k3-kda", "--weights", folder.name, "--verify", "4", "--rows", "4"]
    result = CliRunner().invoke(probe, args, catch_exceptions=False)
    assert result.exit_code == 0 and dict(seen[0].extra) == {"q": 4, "weights": str(folder)}
    assert find("kimi-k3-kda").workload(seen[0]).q == 4
