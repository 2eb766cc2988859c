"""A git checkout with the parts of vLLM that an export touches: from a real tree, or the least that looks like one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from agent.export.checkout import MARKS
from agent.export.places import INSIDE, PLACES

REAL = os.environ.get("KERNELGEN_VLLM_TREE", "")
COPIED = (
    "pyproject.toml", "PKG-INFO", "vllm/models/kimi_k3/nvidia", "vllm/model_executor/warmup",
    "vllm/__init__.py", "vllm/models/__init__.py", "vllm/models/kimi_k3/__init__.py",
    "vllm/model_executor/__init__.py", "tests/models/kimi_k3", "tests/models/__init__.py", "tests/__init__.py",
    "benchmarks/kernels", "benchmarks/__init__.py", ".buildkite/test_areas", ".github/PULL_REQUEST_TEMPLATE.md",
    ".gitignore",
)  # fmt: skip


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def repository(root: Path) -> Path:
    git(root, "init", "-q", "-b", "main")
    git(root, "config", "user.name", "Ada Lovelace")
    git(root, "config", "user.email", "ada@example.org")
    git(root, "add", "-A", "-f")
    git(root, "commit", "-q", "-m", "base")
    return root


def real(root: Path) -> Path:
    """A copy of the relevant parts of the tree that KERNELGEN_VLLM_TREE names."""
    for name in COPIED:
        source, final = Path(REAL) / name, root / name
        final.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(
                source, final, ignore=shutil.ignore_patterns("__pycache__", "third_party")
            )
        elif source.exists():
            shutil.copy(source, final)
    return repository(root)


def small(root: Path) -> Path:
    """Files with nothing but what the export looks for."""
    texts = dict.fromkeys(MARKS, "")
    texts["pyproject.toml"] = (
        '[project]\nname = "vllm"\n[tool.ruff.lint]\nselect = ["E4", "E7", "F", "I"]\n'
    )
    texts["PKG-INFO"] = "Version: 0.33.0\n"
    texts[".buildkite/test_areas/kernels.yaml"] = "steps:\n- label: one\n"
    for place in (*PLACES.values(), *INSIDE.values()):
        for e in place.edits:
            known = texts.get(e.file, "")
            texts[e.file] = known if e.anchor in known else known + e.anchor
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return repository(root)
