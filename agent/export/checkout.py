"""A person's vLLM checkout: is it one, is it clean, who commits; and a branch made beside their work.

Commits are made in a temporary worktree with fixed dates, so the same export on the same base gives
the same commits and the person's branch and files are never touched. Nothing is fetched or pushed.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent.export.processes import git
from agent.export.subject import ExportRefused

OLDEST = (0, 33)
MARKS = (
    "vllm/model_executor/warmup/jit_warmup_cutedsl_helper.py",
    "vllm/models/kimi_k3/nvidia/ops/cute_dsl/__init__.py",
    "vllm/models/kimi_k3/nvidia/model.py",
    "tests/models/kimi_k3/__init__.py",
    ".buildkite/test_areas/kernels.yaml",
)
QUIET = ("-c", "core.hooksPath=/dev/null", "-c", "commit.gpgSign=false")


@dataclass(frozen=True)
class Checkout:
    """`version`: as far as the tree says it. `person`: who signs off."""

    root: Path
    base: str
    version: str
    person: str


def open_checkout(root: Path) -> Checkout:
    """Raises ExportRefused for what is no clean vLLM >= 0.33 with a git identity."""
    top = git(root, "rev-parse", "--show-toplevel", check=False)
    if not top or Path(top).resolve() != root.resolve():
        raise ExportRefused(f"{root} is not the top of a git checkout")
    name = re.search(r'^name = "([^"]+)"', _text(root / "pyproject.toml"), re.M)
    missing = [m for m in MARKS if not (root / m).is_file()]
    if not name or name[1] != "vllm" or missing:
        what = f"it lacks {missing[0]}" if missing else "its project is not vllm"
        raise ExportRefused(f"{root} is no checkout of vLLM 0.33 or later: {what}")
    version = _version(root)
    number = re.match(r"(\d+)\.(\d+)", version)
    if number and (int(number[1]), int(number[2])) < OLDEST:
        raise ExportRefused(f"{root} is vLLM {version}; 0.33 or later is needed")
    if git(root, "status", "--porcelain"):
        raise ExportRefused(
            f"{root} has uncommitted or untracked files: commit or remove them first"
        )
    folder = Path(git(root, "rev-parse", "--absolute-git-dir"))
    for busy in ("rebase-merge", "rebase-apply", "MERGE_HEAD", "CHERRY_PICK_HEAD"):
        if (folder / busy).exists():
            raise ExportRefused(f"{root} is in the middle of a rebase, merge or cherry-pick")
    who = [git(root, "config", key, check=False) for key in ("user.name", "user.email")]
    if not all(who):
        raise ExportRefused(f"git knows nobody in {root}: set user.name and user.email to sign off")
    return Checkout(root, git(root, "rev-parse", "HEAD"), version, f"{who[0]} <{who[1]}>")


def _version(root: Path) -> str:
    """From PKG-INFO (an sdist), the generated file, or tags; `unknown` if none says."""
    for file, pattern in (
        ("PKG-INFO", r"^Version: (\S+)"), ("vllm/_version.py", r"version = '([^']+)'"),
    ):  # fmt: skip
        found = re.search(pattern, _text(root / file), re.M)
        if found:
            return found[1]
    tag = git(root, "describe", "--tags", "--match", "v[0-9]*", check=False)
    return tag.removeprefix("v") or "unknown"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@contextmanager
def worktree(c: Checkout) -> Iterator[Path]:
    """A detached worktree at the base, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="kernelgen-worktree-") as folder:
        path = Path(folder) / "vllm"
        git(c.root, *QUIET, "worktree", "add", "--quiet", "--detach", str(path), c.base)
        try:
            yield path
        finally:
            git(c.root, "worktree", "remove", "--force", str(path), check=False)
            git(c.root, "worktree", "prune", check=False)


def commit(tree: Path, files: list[str], message: str, date: str) -> str:
    """Commit those files, signed off by the person, and return the commit."""
    git(tree, "add", "--", *files)
    dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    git(tree, *QUIET, "commit", "--quiet", "--signoff", "-m", message, env=dates)
    return git(tree, "rev-parse", "HEAD")


def set_branch(c: Checkout, branch: str, tip: str, ours: str) -> str:
    """Point the branch at the tip. `ours`: the tip of an earlier export, which may be replaced.

    Raises ExportRefused if the branch holds anything else.
    """
    now = git(c.root, "rev-parse", "--verify", "--quiet", f"refs/heads/{branch}", check=False)
    if now == tip:
        return "unchanged"
    if now and now != ours:
        raise ExportRefused(
            f"the branch {branch} exists with other commits than an export's: rename or delete it"
        )
    git(c.root, "branch", "--force", branch, tip)
    return "updated" if now else "created"


def patches(c: Checkout, tip: str, out: Path) -> tuple[str, ...]:
    """The series as files."""
    for old in out.glob("*.patch"):
        old.unlink()
    git(
        c.root, "format-patch", "--quiet", "--no-signature", "--zero-commit", "-o", str(out),
        f"{c.base}..{tip}",
    )  # fmt: skip
    return tuple(sorted(p.name for p in out.glob("*.patch")))
