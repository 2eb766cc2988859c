"""Does the source still give the judged artifact? Compiled again from nothing, compared field by field.

The rebuild runs in the compile jail with an empty cache, so it is a compile and not a look-up. A
difference does not stop an export; it is written into it.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.export.subject import Subject
from agent.offline import options_of
from sandbox import artifact_store
from sandbox.artifact import Artifact
from sandbox.compile_client import CompileClient, CompileSettings, NoIsolation
from sandbox.jobs import CompileJob, CompileOutcome, Compiler
from targets.base import Options, find


@dataclass(frozen=True)
class Rebuilt:
    """`same`: the hash is reproduced. None: it could not be tried. `differs`: sentences."""

    same: bool | None
    differs: tuple[str, ...] = ()
    machine_code_same: bool | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "same": self.same, "machine_code_same": self.machine_code_same,
            "differs": list(self.differs),
        }  # fmt: skip

    @property
    def sentence(self) -> str:
        if self.same:
            return "Compiling the source again gave the same artifact, bit for bit."
        said = "; ".join(self.differs)
        if self.same is None:
            return f"The source was not compiled again: {said}"
        work = "the machine work is the same" if self.machine_code_same else "the code differs"
        return f"Compiling the source again gave another artifact ({work}): {said}"


@dataclass(frozen=True)
class Made:
    """A compile for an export: an artifact with its folder, or why there is none."""

    artifact: Artifact | None
    folder: Path | None
    why: str = ""


def compiler(store: Path, arch: str, sandbox: str | None = None) -> CompileClient:
    """A compiler whose cache is `store` alone."""
    return CompileClient(CompileSettings(store=store, tier=sandbox, arch=arch, idle=1, jobs=1))


def job(s: Subject, options: Options, arch: str, source: str | None = None) -> CompileJob:
    """The candidate's source against the target's signature at those options, under the name by which it was
    judged: that of an own target is its file's, not the one it gives itself."""
    w = find(s.artifact.target).workload(options)
    return CompileJob(
        source=source or s.source, target=s.artifact.target, workload=w.key, dims=w.dims, buffers=w.buffers,
        arch=arch, tunables=s.tunables,
    )  # fmt: skip


def make(compiling: Compiler, wanted: CompileJob) -> Made:
    """Raises NoIsolation, Malformed."""
    outcome = compiling.compile(wanted)
    if outcome.artifact is None:
        return Made(None, None, reason(outcome))
    return Made(artifact_store.load(outcome.artifact), outcome.artifact)


def rebuild(s: Subject, compiling: Compiler | None = None) -> Rebuilt:
    """A given compiler must not know the artifact already. Where nothing can be compiled, it says so."""
    wanted = job(s, options_of(s.artifact), s.artifact.arch)
    if compiling is not None:
        return compare(s.artifact, make(compiling, wanted))
    with tempfile.TemporaryDirectory(prefix="kernelgen-rebuild-") as store:
        with compiler(Path(store), s.artifact.arch) as fresh:
            try:
                return compare(s.artifact, make(fresh, wanted))
            except NoIsolation as error:
                return Rebuilt(None, (f"no compile jail works here: {error}",))


def compare(judged: Artifact, made: Made) -> Rebuilt:
    """What differs, by field of the manifests."""
    if made.artifact is None:
        return Rebuilt(None, (made.why,))
    if made.artifact.sha256 == judged.sha256:
        return Rebuilt(True, (), True)
    a, b = judged.manifest(), made.artifact.manifest()
    differs = [_sentence(k, a[k], b[k]) for k in sorted(a) if a[k] != b[k]]
    return Rebuilt(False, tuple(differs), judged.ptx_sha256 == made.artifact.ptx_sha256)


def _sentence(field: str, judged: Any, now: Any) -> str:
    if field == "toolchain":
        parts = [
            f"{k} {judged.get(k, 'none')} then, {now.get(k, 'none')} now"
            for k in sorted({*judged, *now})
            if judged.get(k) != now.get(k)
        ]
        return "toolchain: " + ", ".join(parts)
    if field in ("step", "prepare") and judged and now:
        if judged["ptx"] != now["ptx"]:
            return f"{field}: the PTX differs ({judged['ptx'][:12]} then, {now['ptx'][:12]} now)"
        return f"{field}: the launches differ"
    if field == "source_sha256":
        return f"source: {judged[:12]} then, {now[:12]} now"
    return f"{field} differs"


def reason(outcome: CompileOutcome) -> str:
    said = outcome.failure.message if outcome.failure else "no reason given"
    return f"{outcome.status}: {' '.join(said.split())[:300]}"
