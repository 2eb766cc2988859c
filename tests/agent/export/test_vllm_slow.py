"""Patch series of the seeds: each piece compiled in the jail, formatted, committed, applied again elsewhere.

With KERNELGEN_VLLM_TREE naming a source tree of vLLM 0.33 the real files are edited; without it those are skipped.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from agent.export import pinned, places, subject, vllm
from agent.export.rebuild import Rebuilt, compiler
from agent.export.subject import Subject
from agent.store import Queries
from sandbox import artifact_store
from sandbox.artifact import Artifact
from sandbox.jobs import CompileJob
from targets.base import Options, find
from tests.agent.export import small, vllm_tree

pytestmark = pytest.mark.slow
PIECES = ("attn-res", "gemv", "router", "kda", "latent-moe")
needs_tree = pytest.mark.skipif(
    not vllm_tree.REAL, reason="KERNELGEN_VLLM_TREE names no vLLM source tree"
)
Exporting = tuple[Queries, Subject]
Seed = Callable[..., Exporting]


@pytest.fixture(scope="session")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Seed:
    """The approved seed of a piece, compiled once for tiny sizes."""
    made: dict[str, Exporting] = {}
    store = tmp_path_factory.mktemp("jail")

    def build(part: str, preset: str = "tiny", arch: str = "sm_90a") -> Exporting:
        if part + arch not in made:
            target = find(f"kimi-k3-{part}")
            w = target.workload(Options(preset))
            source = target.seed_source()
            job = CompileJob(source, w.target, w.key, w.dims, w.buffers, arch=arch)
            with compiler(store, arch) as c:
                outcome = c.compile(job)
            assert outcome.artifact is not None, outcome.failure
            artifact: Artifact = artifact_store.load(outcome.artifact)
            _, queries, run = small.record(tmp_path_factory.mktemp(part), artifact, source)
            made[part + arch] = queries, subject.find(queries, run, force=False)
        return made[part + arch]

    return build


def export(e: Exporting, checkout: Path, folder: Path, kind: str = places.OP) -> vllm.Exported:
    return vllm.write(*e, vllm.Wanted(checkout, folder, Rebuilt(None, ("not asked",)), kind))


def tree_of(root: Path, commit: str) -> str:
    return vllm_tree.git(root, "rev-parse", f"{commit}^{{tree}}")


@needs_tree
@pytest.mark.parametrize("part", PIECES)
def test_the_series_applies_to_the_real_tree(part: str, seed: Seed, tmp_path: Path) -> None:
    root = vllm_tree.real(tmp_path / "vllm")
    before = vllm_tree.git(root, "status", "--porcelain", "--branch")
    made = export(seed(part), root, tmp_path / "out")
    assert vllm_tree.git(root, "status", "--porcelain", "--branch") == before
    assert len(made.patches) == 3
    other = tmp_path / "other"
    vllm_tree.git(tmp_path, "clone", "-q", "-b", "main", str(root), str(other))
    vllm_tree.git(other, "-c", "user.name=B", "-c", "user.email=b@example.org", "am", "-q",
                  *(str(made.folder / x) for x in made.patches))  # fmt: skip
    assert tree_of(other, "HEAD") == tree_of(root, made.tip)
    for commit in vllm_tree.git(root, "rev-list", f"main..{made.tip}").splitlines():
        body = vllm_tree.git(root, "show", "-s", "--format=%B", commit)
        assert "Signed-off-by: Ada Lovelace <ada@example.org>" in body
        assert "Co-authored-by: kernelgen" in body and seed(part)[1].artifact.sha256 in body
    again = export(seed(part), root, tmp_path / "out")
    assert (again.tip, again.patches) == (made.tip, made.patches)
    assert any("unchanged" in x for x in again.said)
    assert any("lint clean" in x for x in made.said)
    changed = vllm_tree.git(other, "diff", "--name-only", "main~0", "HEAD~3").splitlines()
    assert not [n for n in changed if n.startswith("vllm/v1")]
    yaml.safe_load((other / ".buildkite/test_areas/kernels.yaml").read_text())
    for name in vllm_tree.git(other, "diff", "--name-only", "HEAD~3").splitlines():
        if name.endswith(".py"):
            text = (other / name).read_text()
            ast.parse(text)
            assert text.startswith("# SPDX-License-Identifier: Apache-2.0")


def test_the_exported_file_compiles_with_the_dsl_that_vllm_pins(seed: Seed, tmp_path: Path) -> None:
    pin = pinned.prepare()
    if pin.python is None:
        pytest.skip(pin.why)
    root = vllm_tree.small(tmp_path / "vllm")
    wanted = vllm.Wanted(root, tmp_path / "out", Rebuilt(None, ("not asked",)), pinned=pin)
    made = vllm.write(*seed("kda"), wanted)
    assert any("compiles with DSL 4.8.0, which vLLM pins, to the same PTX" in x for x in made.said)
    assert "compiles with DSL 4.8.0, which vLLM pins" in (made.folder / "PR.md").read_text()


@needs_tree
@pytest.mark.parametrize("part", PIECES)
def test_the_op_compiles_with_the_dsl_as_vllm_would(part: str, seed: Seed, tmp_path: Path) -> None:
    root = vllm_tree.real(tmp_path / "vllm")
    made = export(seed(part), root, tmp_path / "out")
    vllm_tree.git(root, "switch", "-q", made.branch)
    name = json.loads((made.folder / "export.json").read_text())["branch"]
    assert name == made.branch
    script = Path(__file__).with_name("compile_op.py")
    module = next((root / "vllm/models/kimi_k3/nvidia/ops/cute_dsl").glob("*_sm90")).name
    done = subprocess.run(
        [sys.executable, str(script), str(root), module], capture_output=True, text=True, check=False, timeout=280
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["keys"] == 1 and answer["entries"] >= 1


@needs_tree
def test_a_kernel_inside_specialized_decode_applies_compiles_and_falls_back(
    seed: Seed, tmp_path: Path
) -> None:
    root = vllm_tree.real(tmp_path / "vllm")
    e = seed("attn-res", "tp8", "sm_100a")
    made = export(e, root, tmp_path / "out", places.DECODE)
    assert any("lint clean" in x for x in made.said) and len(made.patches) == 3
    other = tmp_path / "other"
    vllm_tree.git(tmp_path, "clone", "-q", "-b", "main", str(root), str(other))
    vllm_tree.git(other, "-c", "user.name=B", "-c", "user.email=b@example.org", "am", "-q",
                  *(str(made.folder / x) for x in made.patches))  # fmt: skip
    assert tree_of(other, "HEAD") == tree_of(root, made.tip)
    again = export(e, root, tmp_path / "out", places.DECODE)
    assert again.tip == made.tip and any("unchanged" in x for x in again.said)
    script = Path(__file__).with_name("compile_op.py")
    done = subprocess.run(
        [sys.executable, str(script), str(other), "attn_res_boundary_sm100", "sm_100a"],
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    # One code for all boundaries; taken by three of them, not for other rows, aux streams, epsilons and chips.
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "codes": 1,
        "entries": 1,
        "taken": 3,
        "left": 4,
    }
