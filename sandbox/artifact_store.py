"""Artifacts as folders: `<root>/<sha256>/` with manifest.json and one file per PTX module and constant, by hash.

Written to a temporary name, then renamed, so a reader never sees half of one. Reading checks sizes before content and
follows no link; it trusts nothing but the hashes.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

from sandbox import strict
from sandbox.artifact import MAX_CONSTANT_BYTES, Artifact, canonical, digest, from_manifest
from sandbox.strict import Malformed

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 32 << 20
MAX_FILES = 300


def save(artifact: Artifact, root: Path) -> Path:
    """Write the artifact below `root` and return its folder; one already there is kept. Raises OSError."""
    final = root / artifact.sha256
    if final.is_dir():
        return final
    root.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
    try:
        write(artifact, temporary)
        try:
            temporary.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def files(artifact: Artifact) -> dict[str, bytes]:
    """Content of the artifact's folder by file name: the manifest, and PTX and constants by hash."""
    plans = [p for p in (artifact.step, artifact.prepare) if p]
    blobs = [p.ptx.encode() for p in plans] + list(artifact.constants.values())
    manifest = {MANIFEST: canonical(artifact.manifest()).encode()}
    return {digest(data): data for data in blobs} | manifest


def write(artifact: Artifact, folder: Path) -> None:
    """Write manifest and blobs into an existing folder."""
    for name, data in files(artifact).items():
        (folder / name).write_bytes(data)


def load(folder: Path) -> Artifact:
    """Read and check an artifact folder as hostile input. Raises Malformed, also for missing or odd files."""
    manifest = strict.parse(
        _read(folder / MANIFEST, MAX_MANIFEST_BYTES), "manifest", MAX_MANIFEST_BYTES
    )
    blobs: dict[str, bytes] = {}
    names = sorted(p.name for p in folder.iterdir() if p.name != MANIFEST)
    if len(names) > MAX_FILES:
        raise Malformed(str(folder.name), "holds too many files")
    left = 2 * MAX_CONSTANT_BYTES
    for name in names:
        if len(name) == 64:
            blobs[name] = _read(folder / name, left)
            left -= len(blobs[name])
    return from_manifest(manifest, blobs)


def _read(path: Path, most: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Malformed(path.name, f"cannot be read: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > most:
            raise Malformed(path.name, f"is no file of at most {most} bytes")
        return file.read(most + 1)[:most]
