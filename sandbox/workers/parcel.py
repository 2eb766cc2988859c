"""Messages between driver and workers: frames of JSON and named blocks (`sandbox.box.frames`), artifacts by hash.

Both ends are ours, but artifacts came out of a jail: whoever unpacks one reads it as hostile input and compares its
content with the hash it was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandbox import artifact_store, strict
from sandbox.artifact import MAX_CONSTANT_BYTES, MAX_PTX_BYTES, Artifact, from_manifest
from sandbox.box.frames import Caps, Reader, encode
from sandbox.judge_wire import finite
from sandbox.strict import Malformed

MAX_JSON = 64 << 20
CAPS = Caps(
    kinds={
        "json": MAX_JSON, "source": 64 << 20, "manifest": artifact_store.MAX_MANIFEST_BYTES,
        "blob": 2 * (MAX_PTX_BYTES + MAX_CONSTANT_BYTES),
    }
)  # fmt: skip


def pack(body: Mapping[str, Any], blocks: Mapping[str, bytes] | None = None) -> bytes:
    data = json.dumps(finite(body), separators=(",", ":"), allow_nan=False).encode()
    return encode({}, {"json": data, **(blocks or {})})


def json_of(data: bytes) -> Any:
    return strict.parse(data, "parcel", MAX_JSON)


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Body and blocks. Raises Malformed."""
    reader = Reader(CAPS)
    reader.feed(data)
    frame = reader.next()
    if frame is None or "json" not in frame.blocks:
        raise Malformed("parcel", "is no whole frame")
    blocks = dict(frame.blocks)
    body = json_of(blocks.pop("json"))
    if not isinstance(body, dict):
        raise Malformed("parcel", "is no object")
    return body, blocks


def artifact_blocks(artifact: Artifact) -> dict[str, bytes]:
    files = artifact_store.files(artifact)
    manifest = {"manifest": files.pop(artifact_store.MANIFEST)}
    return manifest | {f"blob.{name}": data for name, data in files.items()}


def artifact_of(blocks: Mapping[str, bytes], sha256: str) -> Artifact:
    """The artifact in a parcel, if its content is what `sha256` names. Raises Malformed."""
    if "manifest" not in blocks:
        raise Malformed("parcel", "holds no artifact")
    manifest = strict.parse(blocks["manifest"], "manifest", artifact_store.MAX_MANIFEST_BYTES)
    blobs = {n.removeprefix("blob."): b for n, b in blocks.items() if n.startswith("blob.")}
    artifact = from_manifest(manifest, blobs)
    if artifact.sha256 != sha256:
        raise Malformed("artifact", f"has the hash {artifact.sha256[:12]}, not {sha256[:12]}")
    return artifact


def pack_artifact(artifact: Artifact) -> bytes:
    return pack({"sha256": artifact.sha256}, artifact_blocks(artifact))


def held(root: Path, sha256: str) -> Path | None:
    """The folder below `root` that has this content; None if there is none or it was changed."""
    folder = root / strict.sha256(sha256, "artifact")
    try:
        return folder if artifact_store.load(folder).sha256 == sha256 else None
    except (Malformed, OSError):
        return None
