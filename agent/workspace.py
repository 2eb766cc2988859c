"""Files beside runs.db: content-addressed blobs, artifacts, and one folder per run with what each
node has finished.

A node writes its file (temporary name, then rename) before it returns and looks for it before it
works, so a killed run repeats nothing. Nothing here is a database: runs.db is written by `record`
from these files, and may be rebuilt from them. Files are never trusted beyond their hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox import artifact_store
from sandbox.artifact import Artifact
from sandbox.verdict import Verdict, from_json

FOLDER = ".kernelgen"


class Missing(LookupError):
    """A file that the record names is gone."""


def write_bytes(path: Path, data: bytes, paid: bool = False) -> None:
    """Atomic and durable: readers see the old content or the new. Raises OSError (a full disk).

    `paid`: the name comes before the flush, so that as little as possible lies between a paid answer
    and its file; a power cut may then leave an empty one, which reads as none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write(path, data, paid)
    except OSError as error:  # of the temporary file, or of none
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write(path: Path, data: bytes, paid: bool) -> None:
    fd, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            if paid:
                os.replace(temporary, path)
            os.fsync(file.fileno())
        if not paid:
            os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any, paid: bool = False) -> None:
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False)
    write_bytes(path, text.encode(), paid)


def read_json(path: Path) -> Any:
    """None if there is no such file, or an empty one from a power cut."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return json.loads(data) if data else None


@dataclass(frozen=True)
class RunFiles:
    """The folder of one run. `step` counts a candidate's versions: first proposal, repairs,
    tunings.
    """

    folder: Path

    @property
    def settings(self) -> Path:
        return self.folder / "run.json"

    @property
    def earlier(self) -> Path:
        """What other runs had shown when this one began."""
        return self.folder / "earlier.json"

    def plan(self, round: int) -> Path:
        return self.folder / "rounds" / f"{round}" / "plan.json"

    def lessons(self, round: int) -> Path:
        return self.folder / "rounds" / f"{round}" / "lessons.json"

    def decision(self, round: int) -> Path:
        return self.folder / "rounds" / f"{round}" / "decision.json"

    def candidate(self, seq: int) -> Path:
        return self.folder / "candidates" / f"{seq}"

    def proposal(self, seq: int, step: int) -> Path:
        return self.candidate(seq) / f"{step}-proposal.json"

    def compiled(self, seq: int, step: int) -> Path:
        return self.candidate(seq) / f"{step}-compiled.json"

    def judged(self, seq: int, step: int, tier: str) -> Path:
        return self.candidate(seq) / f"{step}-{tier}.json"

    def result(self, seq: int) -> Path:
        return self.candidate(seq) / "result.json"

    def call(self, scope: str, n: int) -> Path:
        return self.folder / "calls" / f"{scope}-{n}.json"

    def attempt(self, scope: str, n: int, attempt: int) -> Path:
        """An attempt that was paid for and answered nothing; its wire log has the suffix `.log`."""
        return self.folder / "calls" / f"{scope}-{n}.{attempt}.json"

    def wires(self, stem: str = "*") -> list[Path]:
        """Wire logs of attempts that are running or were cut off, oldest attempt first."""
        found = (self.folder / "calls").glob(f"{stem}.*.log")
        return sorted(found, key=lambda p: (len(p.name), p.name))

    def evidence(self, blob: str) -> Path:
        """A verdict from another host, on something that this run has judged itself."""
        return self.folder / "evidence" / f"{blob}.json"

    @property
    def clock(self) -> Path:
        return self.folder / "clock.json"

    def calls(self) -> Iterator[dict[str, Any]]:
        """Every model call that was paid for, answered or not, in a stable order."""
        for path in sorted((self.folder / "calls").glob("*.json")):
            call = read_json(path)
            if call is not None:
                yield call

    def judgements(self) -> Iterator[dict[str, Any]]:
        """Every finished judgement, for the GPU-seconds spent."""
        for path in sorted((self.folder / "candidates").glob("*/[0-9]*-*.json")):
            data = read_json(path)
            if data and "gpu_seconds" in data:
                yield data


@dataclass(frozen=True)
class Workspace:
    """`.kernelgen/` beside a runs.db."""

    root: Path

    @staticmethod
    def beside(db: Path) -> Workspace:
        return Workspace(db.resolve().parent / FOLDER)

    def run(self, run: str) -> RunFiles:
        return RunFiles(self.root / "runs" / run)

    def put(self, data: bytes | str) -> str:
        """Store a blob and return its sha256."""
        raw = data.encode() if isinstance(data, str) else data
        name = hashlib.sha256(raw).hexdigest()
        path = self._blob(name)
        if not path.exists():
            write_bytes(path, raw)
        return name

    def get(self, name: str) -> bytes:
        """Raises Missing, also when the content no longer has that hash."""
        try:
            data = self._blob(name).read_bytes()
        except OSError as error:
            raise Missing(f"blob {name[:12]} is missing from {self.root}") from error
        if hashlib.sha256(data).hexdigest() != name:
            raise Missing(f"blob {name[:12]} in {self.root} is damaged")
        return data

    def text(self, name: str) -> str:
        return self.get(name).decode()

    def put_verdict(self, verdict: Verdict) -> str:
        return self.put(json.dumps(verdict.to_json(), sort_keys=True, allow_nan=False))

    def verdict(self, name: str) -> Verdict:
        return from_json(json.loads(self.get(name)))

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts"

    def artifact(self, sha256: str) -> Path:
        """Raises Missing."""
        path = self.artifacts / sha256
        if not path.is_dir():
            raise Missing(f"artifact {sha256[:12]} is missing from {self.artifacts}")
        return path

    def keep_artifact(self, folder: Path) -> Artifact:
        """Check an artifact folder and hold a copy of it here. Raises Malformed, OSError."""
        artifact = artifact_store.load(folder)
        artifact_store.save(artifact, self.artifacts)
        return artifact

    def _blob(self, name: str) -> Path:
        return self.root / "blobs" / name[:2] / name


@dataclass(frozen=True)
class Place:
    """Where a run lives: the record, the files beside it, the winners' folder."""

    db: Path
    out: Path

    @property
    def workspace(self) -> Workspace:
        return Workspace.beside(self.db)


def check_writable(place: Place) -> None:
    """Whether a run can be written down there, asked before it costs anything. Raises OSError with the folder."""
    for folder in (place.db.resolve().parent, place.workspace.root, place.out):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"kernelgen")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder)) from error


def replace_folder(
    final: Path, files: Mapping[str, bytes], trees: Mapping[str, Path], mark: str
) -> None:
    """Write a folder of files and copied trees under a temporary name, then put it in place of an earlier one, which
    is known by its file `mark`: no other folder is replaced. The name is always the same, so that the next attempt
    clears away what a kill left of this one. Raises OSError, FileExistsError for a folder that is not ours.
    """
    if final.is_symlink() or (final.exists() and not _replaceable(final, mark)):
        raise FileExistsError(
            f"{final} exists and has no {mark}: it is left as it is; choose another folder"
        )
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".new-{final.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        for name, data in files.items():
            (temporary / name).write_bytes(data)
        for name, source in trees.items():
            shutil.copytree(source, temporary / name)
        temporary.chmod(0o755)
        put_in_place(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replaceable(folder: Path, mark: str) -> bool:
    return folder.is_dir() and ((folder / mark).is_file() or not any(folder.iterdir()))


def put_in_place(temporary: Path, final: Path) -> None:
    """Rename a finished folder to `final`. One that is there goes after that: a kill leaves one of them whole."""
    old = final.with_name(f".old-{final.name}")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    shutil.rmtree(old, ignore_errors=True)
