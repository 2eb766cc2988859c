"""The artifact reader under fuzz: whatever a folder holds, it is refused in words or is a lawful artifact, and what
reaches the driver of a lawful one points into the buffers that were given and nowhere else."""

from __future__ import annotations

import copy
import ctypes
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox import artifact_store, canary
from sandbox.artifact import Artifact, canonical
from sandbox.devices.base import Refused
from sandbox.devices.cuda import CudaDevice
from sandbox.strict import Malformed
from tests.sandbox.devices.fake_driver import FakeDriver

MADE = canary.artifact("sm_90a", 1024)
FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
WORDS = st.sampled_from(
    ["", "../../etc/passwd", "inputs.x", "outputs.y", "weights..x", "inputs/../x", "canary", "\x1b[2J", "\ud800", "NaN",
     "f32", "i64", "sm_90a", "0" * 64, "a" * 5000, "inputs.x\0", "constants.c", "workspace.w", "__proto__"]
)  # fmt: skip
NUMBERS = st.one_of(
    st.integers(-2, 5),
    st.sampled_from([2**31, 2**32, 2**63, -(2**63), 10**30, 1e308, 0.5, -0.0, True, False]),
)
VALUES = st.recursive(
    st.one_of(st.none(), NUMBERS, WORDS, st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(WORDS, st.text(max_size=4)), inner, max_size=3)
    ),
    max_leaves=6,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The canary's PTX is assembled once."""
    before = os.environ.get("KERNELGEN_CACHE")
    os.environ["KERNELGEN_CACHE"] = str(tmp_path_factory.mktemp("cubins"))
    yield
    os.environ.pop("KERNELGEN_CACHE")
    if before is not None:
        os.environ["KERNELGEN_CACHE"] = before


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    if isinstance(value, dict):
        for k, v in value.items():
            yield from places(v, (*at, k))
    elif isinstance(value, list):
        for i, v in enumerate(value):
            yield from places(v, (*at, i))


PLACES = sorted(places(MADE.manifest()), key=str)


def put(manifest: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    made = copy.deepcopy(manifest)
    spot = made
    for k in at[:-1]:
        try:
            spot = spot[k]
        except (KeyError, IndexError, TypeError):
            return made
    try:
        spot[at[-1]] = value
    except (KeyError, IndexError, TypeError):
        return made
    return made


def folder_of(root: Path, manifest: bytes) -> Path:
    folder = root / "artifact"
    if not folder.exists():
        folder.mkdir()
        artifact_store.write(MADE, folder)
    (folder / artifact_store.MANIFEST).write_bytes(manifest)
    return folder


def read(root: Path, manifest: Any) -> Artifact | None:
    """The artifact, or None where it was refused by name of field."""
    data = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    try:
        return artifact_store.load(folder_of(root, data))
    except Malformed as error:
        assert error.where is not None and len(str(error)) < 1000
        return None


def launch(artifact: Artifact) -> None:
    """Load and bind on a driver without a GPU; every relocated word must point into its buffer."""
    if sum(b.nbytes for b in artifact.buffers) > 1 << 20:
        return
    driver = FakeDriver()
    device = CudaDevice(driver, 1, None, torch_device="cpu")
    tensors = {b.name: torch.zeros(b.nbytes, dtype=torch.uint8) for b in artifact.buffers}
    try:
        bound = device.load(artifact).bind("step", tensors)
    except (Refused, ValueError):
        return
    for call, x in zip(bound._calls, artifact.step.launches, strict=True):
        block = ctypes.string_at(call.params.start, len(x.params))
        for r in x.relocations:
            address = int.from_bytes(block[r.offset : r.offset + 8], "little")
            t = tensors[r.buffer]
            assert t.data_ptr() <= address < t.data_ptr() + max(1, t.numel())


@FUZZ
@given(st.lists(st.tuples(st.sampled_from(PLACES), VALUES), min_size=1, max_size=3))
def test_changed_manifests(tmp_path: Path, changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    manifest = MADE.manifest()
    for at, value in changes:
        manifest = put(manifest, at, value)
    try:
        made = read(tmp_path, manifest)
    except UnicodeEncodeError:
        return  # a lone surrogate has no file form
    if made is not None:
        again = read(tmp_path, canonical(made.manifest()).encode())
        assert again == made, "what was read is not what it says of itself"
        launch(made)


@FUZZ
@given(st.binary(max_size=200))
def test_bytes_that_are_no_manifest(tmp_path: Path, data: bytes) -> None:
    assert read(tmp_path, data) is None


@FUZZ
@given(st.integers(0, len(canonical(MADE.manifest())) - 1), st.integers(0, 255))
def test_one_byte_changed(tmp_path: Path, at: int, value: int) -> None:
    data = bytearray(canonical(MADE.manifest()).encode())
    data[at] = value
    made = read(tmp_path, bytes(data))
    if made is not None:
        launch(made)


@pytest.mark.parametrize(
    "text",
    ['{"schema": NaN}', '{"schema": 1, "schema": 1}', "[" * 100_000, '{"a":' * 50_000, "1e999", '"\\ud800"', "",
     '{"schema": 1' + "0" * 5000 + "}"],
    ids=["nan", "twice", "lists", "objects", "infinity", "surrogate", "empty", "digits"],
)  # fmt: skip
def test_json_that_hurts_careless_readers(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text.encode()) is None


def blob_of(folder: Path) -> Path:
    return next(p for p in folder.iterdir() if p.name != artifact_store.MANIFEST)


def refused(folder: Path) -> str:
    with pytest.raises(Malformed) as error:
        artifact_store.load(folder)
    return str(error.value)


def test_a_blob_that_is_not_its_hash_a_link_a_pipe_or_a_bomb(tmp_path: Path) -> None:
    def fresh(name: str) -> Path:
        return artifact_store.save(MADE, tmp_path / name)

    other = fresh("other")
    blob_of(other).write_bytes(b"// other code")
    assert "hash" in refused(other) or "not" in refused(other)

    link = fresh("link")
    secret = tmp_path / "secret"
    secret.write_bytes(blob_of(link).read_bytes())
    blob = blob_of(link)
    blob.unlink()
    blob.symlink_to(secret)
    assert "cannot be read" in refused(link)

    pipe = fresh("pipe")
    blob = blob_of(pipe)
    blob.unlink()
    os.mkfifo(blob)
    refused(pipe)

    bomb = fresh("bomb")
    with blob_of(bomb).open("r+b") as file:
        file.truncate(8 << 40)  # sparse: nothing of it may be read
    assert "at most" in refused(bomb)

    crowd = fresh("crowd")
    for i in range(artifact_store.MAX_FILES + 1):
        (crowd / f"{i}").touch()
    assert "too many files" in refused(crowd)


def test_names_never_leave_the_folder(tmp_path: Path) -> None:
    """A hash with a path in it names no file."""
    manifest = MADE.manifest()
    for name in ("../" * 8 + "etc/passwd", "/etc/passwd", "a/../" + "0" * 59, ".." + "0" * 62):
        assert read(tmp_path, put(manifest, ("step", "ptx"), name)) is None
        assert read(tmp_path, put(manifest, ("constants",), {name: "0" * 64})) is None
