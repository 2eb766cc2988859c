"""Exports to vLLM without compiling: references of the exported tests, refusals, texts, and the command line."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from agent.cli import main
from agent.export import bundle, places, style, subject, texts, vllm, vllm_files
from agent.export.checkout import commit, open_checkout, patches, set_branch, worktree
from agent.export.rebuild import Rebuilt
from agent.export.subject import ExportRefused, Subject
from agent.store import Queries
from sandbox.artifact import Artifact, Launch, LaunchPlan
from targets.base import Options, Workload, find
from targets.kimi_k3.reference import KimiReference
from tests.agent.export import small, vllm_tree

NOTHING = LaunchPlan("", (Launch("k", (1, 1, 1), (1, 1, 1), b"", (), ()),))


def piece(folder: Path, part: str, layers: int | None = None) -> tuple[Queries, Subject, Workload]:
    """The seed of a piece in a record, with an artifact that has its buffers and no code."""
    target = find(f"kimi-k3-{part}")
    w = target.workload(Options("tiny", layers=layers))
    artifact = Artifact(w.target, w.key, "sm_90a", w.buffers, NOTHING, source_sha256="0" * 64)
    _, queries, run = small.record(folder, artifact, target.seed_source())
    return queries, subject.find(queries, run, force=False), w


def plan(s: Subject, w: Workload, kind: str = places.OP) -> vllm_files.Plan:
    place = places.find(s.artifact.target, kind)
    assert isinstance(place, places.Place)
    return vllm_files.Plan(place, s, s.artifact, w.dims)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs an exported test's module with stand-ins for what it imports of vLLM."""

    def load(p: vllm_files.Plan) -> dict[str, Any]:
        files = vllm_files.new_files(p)
        op = types.SimpleNamespace(DIMS=dict(p.dims), is_supported=lambda: False)
        above = f"vllm.models.kimi_k3.nvidia.ops.cute_dsl.{p.name}"
        monkeypatch.setitem(sys.modules, above, types.ModuleType(above))
        sys.modules[above].op = op  # type: ignore[attr-defined]
        platform = types.ModuleType("vllm.platforms")
        platform.current_platform = types.SimpleNamespace(device_type="cpu")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm.platforms", platform)
        platform.current_platform.is_cuda = lambda: False
        prepared = types.ModuleType("prepared")
        special = types.SimpleNamespace(EPS=p.dims["eps"], BATCH=p.dims["rows"])
        prepared.PreparedAttnRes = object  # type: ignore[attr-defined]
        setattr(prepared, p.name, special)
        inside = "vllm.models.kimi_k3.nvidia.specialized_decode.cutedsl.attn_res.prepared"
        monkeypatch.setattr(
            pytest, "importorskip", lambda name: {inside: prepared}[name], raising=True
        )
        space: dict[str, Any] = {"__name__": "exported"}
        exec(compile(files[p.test], p.test, "exec"), space)
        return space

    yield load


def given(w: Workload, seed: int = 3) -> dict[str, torch.Tensor]:
    r = KimiReference()
    return {**r.weights(w, seed, "cpu"), **r.states(w, seed, "cpu"), **r.inputs(w, seed, 0, "cpu")}


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    if not wanted.is_floating_point():
        assert torch.equal(found, wanted)
        return
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert float(error) < 3e-3, float(error)


@pytest.mark.parametrize("part", ["gemv", "router", "kda", "latent-moe"])
def test_the_exported_reference_is_the_targets(part: str, exported: Any, tmp_path: Path) -> None:
    _, s, w = piece(tmp_path, part, layers=1)
    p = plan(s, w)
    space, tensors = exported(p), given(w)
    oracle = KimiReference().run(w, tensors, "oracle").tensors
    found = space["reference"](
        **{a.name: tensors[a.path] for a in p.args if a.role in ("given", "mutated")}
    )
    compared = [a for a in p.args if a.name in found]
    assert {a.path for a in compared} == set(oracle)
    for a in compared:
        near(found[a.name], oracle[a.path])


def test_the_exported_attn_res_reference_is_one_step_of_the_chain(
    exported: Any, tmp_path: Path
) -> None:
    _, s, w = piece(tmp_path, "attn-res")
    p, tensors = plan(s, w), given(w)
    space = exported(p)
    n = space["NUM_BLOCKS"]
    oracle = KimiReference().run(w, tensors, "oracle").tensors
    prefix, bank = tensors["inputs.x0"], torch.zeros_like(oracle["outputs.bank"])
    for i in range(n):
        prefix = (prefix.double() + tensors[f"inputs.delta.{i}"].double()).bfloat16()
        bank[:, i] = prefix
    weights = [tensors[f"weights.layers.{n}.{x}"] for x in ("res_norm", "res_proj", "out_norm")]
    found = space["reference"](prefix, tensors[f"inputs.delta.{n}"], bank, *weights)
    near(found["y"], oracle[f"outputs.y.{n}"])
    assert torch.equal(found["blocks"][:, n], oracle["outputs.bank"][:, n])
    assert torch.equal(found["prefix"], oracle["outputs.bank"][:, n])


def test_the_exported_boundarys_reference_is_the_chains_and_makes_the_states_of_the_executor(
    exported: Any, tmp_path: Path
) -> None:
    _, s, w = piece(tmp_path, "attn-res")
    tensors = given(w)
    space = exported(plan(s, w, places.DECODE))
    oracle = KimiReference().run(w, tensors, "oracle").tensors
    bank = torch.zeros_like(oracle["outputs.bank"])
    prefix = tensors["inputs.x0"]
    for i in range(bank.shape[1]):
        names = zip(
            ("norm", "query", "out_norm"), ("res_norm", "res_proj", "out_norm"), strict=True
        )
        t = {k: tensors[f"weights.layers.{i}.{n}"] for k, n in names}
        t |= {"delta": tensors[f"inputs.delta.{i}"], "prefix": prefix, "blocks": bank}
        found = space["reference"](t, (i, True, i, False))
        near(found["out"], oracle[f"outputs.y.{i}"])
        prefix, bank = found["prefix"].bfloat16(), found["blocks"].bfloat16()
        assert torch.equal(bank[:, i], oracle["outputs.bank"][:, i])
    first = space["reference"](t, (0, False, 0, False))
    assert torch.equal(first["prefix"].bfloat16(), t["delta"])
    assert set(space["make_inputs"](0, 2)) == {*t, "out"}


def test_inside_specialized_decode_only_what_can_be_called_there(tmp_path: Path) -> None:
    root = vllm_tree.small(tmp_path / "vllm")
    queries, s, _ = piece(tmp_path / "a", "attn-res")
    wanted = vllm.Wanted(root, tmp_path / "out", Rebuilt(None, ("no",)), places.DECODE)
    with pytest.raises(ExportRefused, match="SM100 family.*--place op"):
        vllm.write(queries, s, wanted)
    newer = replace(s, artifact=replace(s.artifact, arch="sm_100a"))
    with pytest.raises(ExportRefused, match="7168 columns"):
        vllm.write(queries, newer, wanted)
    assert "prepares 1 to 8" in places.decode_gate("sm_100a", 12, 7168)
    assert places.decode_gate("sm_103a", 16, 7168) == ""
    for part, why in (
        ("gemv", "square"), ("router", "SharedFront"), ("kda", "PreparedKda"),
        ("latent-moe", "PreparedMoE"), ("decode", "SpecializedDecode.run"),
    ):  # fmt: skip
        said = places.find(f"kimi-k3-{part}", places.DECODE)
        assert isinstance(said, str) and why in said


@pytest.mark.parametrize("part", ["gemv", "router", "kda", "latent-moe", "attn-res"])
def test_exported_inputs_fit_the_signature(part: str, exported: Any, tmp_path: Path) -> None:
    _, s, w = piece(tmp_path, part, layers=None if part == "attn-res" else 1)
    p = plan(s, w)
    made = exported(p)["make_inputs"](0)
    wanted = {a.name: a for a in p.args if a.role in ("given", "mutated")}
    assert set(made) == set(wanted)
    for name, t in made.items():
        assert tuple(t.shape) == wanted[name].shape_list and str(t.dtype) == wanted[name].torch


def refused(queries: Queries, s: Subject, checkout: Path) -> str:
    with pytest.raises(ExportRefused) as caught:
        vllm.write(queries, s, vllm.Wanted(checkout, checkout / "out", Rebuilt(None, ("no",))))
    return str(caught.value)


def test_whole_stacks_are_refused_with_the_reason_and_get_an_rfc(tmp_path: Path) -> None:
    root = vllm_tree.small(tmp_path / "vllm")
    queries, s, _ = piece(tmp_path / "a", "decode")
    said = refused(queries, s, root)
    assert "no hook" in said and "--to bundle" in said and "RFC" in said
    assert texts.is_whole_stack(s) and "Why this is no patch" in texts.rfc(s)
    one = texts._overlap(1, 4)
    assert "can start before" in one and "little of the gain" in texts._overlap(56, 4)
    queries, s, _ = piece(tmp_path / "b", "mla")
    assert "attention backends" in refused(queries, s, root)


def test_a_checkout_that_is_not_clean_or_not_vllm_is_refused(tmp_path: Path) -> None:
    root = vllm_tree.small(tmp_path / "vllm")
    assert open_checkout(root).person == "Ada Lovelace <ada@example.org>"
    with pytest.raises(ExportRefused, match="not the top"):
        open_checkout(root / "vllm")
    (root / "new.txt").write_text("mine")
    with pytest.raises(ExportRefused, match="uncommitted or untracked"):
        open_checkout(root)
    (root / "new.txt").unlink()
    (root / ".git" / "MERGE_HEAD").write_text("x")
    with pytest.raises(ExportRefused, match="middle of a"):
        open_checkout(root)
    (root / ".git" / "MERGE_HEAD").unlink()
    (root / "PKG-INFO").write_text("Version: 0.32.9\n")
    vllm_tree.git(root, "commit", "-qam", "older")
    with pytest.raises(ExportRefused, match=r"0\.32\.9"):
        open_checkout(root)
    other = tmp_path / "other"
    other.mkdir()
    (other / "pyproject.toml").write_text('[project]\nname = "other"\n')
    vllm_tree.repository(other)
    with pytest.raises(ExportRefused, match="no checkout of vLLM"):
        open_checkout(other)


def test_the_branch_is_made_beside_the_persons_work_and_never_over_it(tmp_path: Path) -> None:
    root = vllm_tree.small(tmp_path / "vllm")
    c, tips = open_checkout(root), []
    for text in ("one", "one", "two"):
        with worktree(c) as tree:
            (tree / "new.py").write_text(text)
            tips.append(commit(tree, ["new.py"], "New", "2026-01-02T03:04:05Z"))
    assert tips[0] == tips[1] != tips[2]
    assert set_branch(c, "k/x", tips[0], "") == "created"
    assert set_branch(c, "k/x", tips[1], "") == "unchanged"
    with pytest.raises(ExportRefused, match="other commits"):
        set_branch(c, "k/x", tips[2], "")
    assert set_branch(c, "k/x", tips[2], tips[0]) == "updated"
    assert not (root / "new.py").exists() and vllm_tree.git(root, "status", "--porcelain") == ""
    assert vllm_tree.git(root, "worktree", "list").count("\n") == 0
    vllm_tree.git(root, "switch", "-q", "k/x")
    with pytest.raises(ExportRefused, match="branch"):
        set_branch(c, "k/x", tips[0], tips[2])
    out = tmp_path / "out"
    out.mkdir()
    first = patches(c, tips[2], out)
    assert first == patches(c, tips[2], out) and len(first) == 1
    assert "Signed-off-by: Ada Lovelace <ada@example.org>" in (out / first[0]).read_text()


def test_a_person_must_be_known_to_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = vllm_tree.small(tmp_path / "vllm")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    vllm_tree.git(root, "config", "--unset", "user.email")
    with pytest.raises(ExportRefused, match="sign off"):
        open_checkout(root)


def test_a_call_site_that_moved_stops_the_export() -> None:
    e = places.PLACES["attn-res"].edits[1]
    with pytest.raises(ExportRefused, match="found it 0 times"):
        vllm_files.edit("something else\n", e, "n")
    with pytest.raises(ExportRefused, match="found it 2 times"):
        vllm_files.edit(e.anchor * 2, e, "n")


def test_kernels_that_keep_memory_or_lost_their_entry_are_refused(tmp_path: Path) -> None:
    _, s, w = piece(tmp_path, "gemv", layers=1)
    keeps = replace(s.artifact, buffers=(*w.buffers, *small.OWN[:1]))
    with pytest.raises(ExportRefused, match="keeps workspace.packed"):
        vllm_files.signature.arguments(keeps)
    source = find("kimi-k3-attn-res").seed_source()
    vllm_files.check_entry(places.PLACES["attn-res"], source)
    with pytest.raises(ExportRefused, match="one AttnRes step at a time"):
        vllm_files.check_entry(
            places.PLACES["attn-res"], source.replace("def attn_res(", "def fused(")
        )


def test_long_lines_are_wrapped_and_the_code_stays_the_same() -> None:
    words = "word " * 30
    source = f'"""{words}"""\n\n# {words}\nX = 1  # {words}\nY = (1,\n     2)  # fmt: skip\n'
    source += f'\n\ndef f():\n    """{words}"""\n'
    text = style.device_file(source)
    assert max(map(len, text.splitlines())) <= 88 and "fmt:" not in text
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")

    def code(t: str) -> str:
        tree = ast.parse(t)
        for n in ast.walk(tree):
            if isinstance(n, ast.Module | ast.FunctionDef):
                n.body = [x for x in n.body if not isinstance(x, ast.Expr)] or n.body[:0]
        return ast.dump(tree)

    assert code(text) == code(source)


def test_the_job_that_runs_the_test_is_named_or_missed(tmp_path: Path) -> None:
    _, s, w = piece(tmp_path / "r", "attn-res")
    p = plan(s, w)
    assert "was added" in vllm_files.collected(tmp_path, p, "text")
    assert "NO job" in vllm_files.collected(tmp_path, p, None)
    area = tmp_path / vllm_files.MODELS_CI
    area.parent.mkdir(parents=True)
    area.write_text("# - pytest models/kimi_k3\n    - pytest -v models/kimi_k3/test_one.py\n")
    assert "NO job" in vllm_files.collected(tmp_path, p, None)
    area.write_text("  commands:\n    - pytest -v -s models/kimi_k3 --ignore=x\n")
    assert "runs all of" in vllm_files.collected(tmp_path, p, None)


def test_pull_request_and_commits_say_what_is_known_and_what_is_not(tmp_path: Path) -> None:
    from agent.export import vllm_text

    root = vllm_tree.small(tmp_path / "vllm")
    _, s, w = piece(tmp_path / "r", "attn-res")
    p, c = plan(s, w), open_checkout(root)
    text = vllm_text.pull_request(p, c, ["checked so"], "\n---\nchecklist\n")
    for wanted in (
        "Duplicate-work check", "AI assistance", "End to end", "GSM8K", "1.200 [1.100, 1.300]", "two GPUs", "rows 2",
        "4.8.0", p.test, "checked so", "checklist", s.artifact.sha256, "That is not vLLM's kernel",
            "`mix`, the fastest baseline",
    ):  # fmt: skip
        assert wanted in text, wanted
    assert "AI assistance was used. kernelgen, a loop around language models, proposed" in text
    assert f"(this candidate: {s.proposer})" in text and s.row["proposer"] in s.proposer
    form = root / ".github" / "PULL_REQUEST_TEMPLATE.md"
    form.parent.mkdir(exist_ok=True)
    form.write_text("above\n---\n- [ ] Design fits.\n- [ ] AI assistance was used here.\n")
    assert vllm._template(root) == "\n---\n- [ ] Design fits.\n- [x] AI assistance was used here.\n"
    message = vllm_text.message(p, "kernel")
    assert message.startswith("[Kimi-K3][Kernel] ") and s.verdict_sha256 in message
    assert (
        "size for trials" in text and "Nothing was measured" not in text and "SM100 family" in text
    )
    modelled = replace(s.verdict, timing=replace(s.verdict.timing, kind="modelled"))  # type: ignore[type-var]
    said = vllm_text.pull_request(replace(p, s=replace(s, verdict=modelled)), c, [], "")
    assert said.startswith("> **Nothing was measured on a GPU") and "instances (modelled)" in said
    inside = vllm_text.pull_request(plan(s, w, places.DECODE), c, [], "")
    for wanted in (
        "cluster kernel",
        "mailbox ring",
        "`compile_boundary`",
        "no delta",
        "without PDL",
    ):
        assert wanted in inside, wanted
    step = replace(NOTHING, launches=tuple(replace(x, pdl=True) for x in NOTHING.launches))
    overlapping = replace(s, artifact=replace(s.artifact, step=step))
    assert "programmatic dependent launches" in vllm_text.pull_request(
        plan(overlapping, w, places.DECODE), c, [], ""
    )
    forced = replace(s, decision=None)
    assert "NOBODY HAS REVIEWED" in vllm_text.pull_request(replace(p, s=forced), c, [], "")
    assert "Not reviewed by a person" in vllm_text.message(replace(p, s=forced), "tests")


def test_the_command_exports_a_bundle_and_records_it(tmp_path: Path) -> None:
    place, queries, run = small.record(tmp_path, small.artifact(), small.SOURCE)
    args = ["export", run, "--to", "bundle", "--no-rebuild", "--json", "--db", str(place.db)]
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 0, done.output
    rows = queries.rows("select kind, path from exports")
    assert [r["kind"] for r in rows] == ["bundle"] and (
        Path(rows[0]["path"]) / "README.md"
    ).exists()


def test_the_command_wants_a_review_and_says_loudly_when_forced(tmp_path: Path) -> None:
    place, _, run = small.record(tmp_path, small.artifact(), small.SOURCE, decided="reject")
    args = ["export", f"{run}-0", "--to", "bundle", "--no-rebuild", "--db", str(place.db)]
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 1 and "no standing approval" in done.output
    done = CliRunner().invoke(main, [*args, "--force"])
    assert done.exit_code == 0 and "NOBODY HAS REVIEWED" in done.output
    done = CliRunner().invoke(main, ["export", run, "--to", "vllm", "--db", str(place.db)])
    assert done.exit_code == 2 and "--checkout" in done.output


def test_templates_are_shipped() -> None:
    assert "class Kernel" in bundle.template("bundle/loader.py.tmpl")


def test_refusals_come_before_the_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agent.export import rebuild as rebuilding

    monkeypatch.setattr(rebuilding, "rebuild", lambda s: pytest.fail("compiled for nothing"))
    root = vllm_tree.small(tmp_path / "vllm")
    target = find("kimi-k3-attn-res")
    w = target.workload(Options("tiny"))
    artifact = Artifact(w.target, w.key, "sm_90a", w.buffers, NOTHING, source_sha256="0" * 64)
    place, _, run = small.record(tmp_path / "r", artifact, target.seed_source())
    args = ["export", run, "--to", "vllm", "--checkout", str(root), "--db", str(place.db)]
    done = CliRunner().invoke(main, [*args, "--place", "specialized-decode"])
    assert done.exit_code == 1 and "SM100 family" in done.output
    (root / "mine.txt").write_text("x")
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 1 and "uncommitted or untracked" in done.output
