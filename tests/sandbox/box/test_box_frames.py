"""Frames: what a worker writes is read back exactly, and no bytes at all break the reader in another way."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.box.frames import Caps, Oversized, Reader, encode
from sandbox.strict import Malformed

CAPS = Caps({"ptx": 64, "constants": 32}, header=4096, count=4)


def read_all(data: bytes, chunk: int, caps: Caps = CAPS) -> list:
    reader, frames = Reader(caps), []
    while data:
        size = min(chunk, reader.wanted)
        assert size > 0
        reader.feed(data[:size])
        data = data[size:]
        frame = reader.next()
        if frame is not None:
            frames.append(frame)
    return frames


def raw(header: bytes) -> bytes:
    return struct.pack(">I", len(header)) + header


@pytest.mark.parametrize("chunk", [1, 3, 7, 1 << 20])
def test_what_is_written_is_read(chunk: int) -> None:
    first = encode(
        {"status": "done", "n": 3},
        {"ptx.step": b"abc\0", "constants.a": b"", "constants.b": b"\xff" * 32},
    )
    frames = read_all(first + encode({}, {}), chunk)
    assert [f.body for f in frames] == [{"status": "done", "n": 3}, {}]
    assert frames[0].blocks == {
        "ptx.step": b"abc\0",
        "constants.a": b"",
        "constants.b": b"\xff" * 32,
    }


def test_the_reader_never_asks_for_more_than_the_frame_needs() -> None:
    reader = Reader(CAPS)
    data = encode({}, {"ptx": b"x" * 10})
    reader.feed(data[: reader.wanted])
    assert reader.next() is None
    reader.feed(data[4 : 4 + reader.wanted])
    assert reader.next() is None
    assert reader.wanted == 10


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b'{"body": {"x": NaN}, "blocks": []}', "NaN"),
        (b'{"body": {"x": -Infinity}, "blocks": []}', "Infinity"),
        (b'{"body": {}, "body": {}, "blocks": []}', "twice"),
        (b'{"body": {}}', "blocks"),
        (b'{"body": {}, "blocks": [], "more": 1}', "more"),
        (b'{"body": [], "blocks": []}', "no object"),
        (b'{"body": {}, "blocks": {}}', "no list"),
        (b'{"body": {}, "blocks": [["ptx"]]}', "size"),
        (b'{"body": {}, "blocks": [["ptx", -1]]}', "outside"),
        (b'{"body": {}, "blocks": [["ptx", true]]}', "integer"),
        (b'{"body": {}, "blocks": [["ptx", 1.5]]}', "integer"),
        (b'{"body": {}, "blocks": [["../ptx", 1]]}', "name"),
        (b'{"body": {}, "blocks": [["ptx\\u0000", 1]]}', "name"),
        (b'{"body": {}, "blocks": [["cubin", 1]]}', "unknown kind"),
        (b'{"body": {}, "blocks": [["ptx", 1], ["ptx", 1]]}', "two blocks"),
        (b'{"body": {}, "blocks": [["ptx.a", 1], ["ptx.b", 1], ["ptx.c", 1], ["ptx.d", 1], ["ptx.e", 1]]}', "entries"),
        (b"[" * 4000, "no JSON"),
        (b'{"body": {"n": ' + b"9" * 4400 + b'}, "blocks": []}', "no JSON"),
        (b"\x80\x04\x95", "no JSON"),
        (b"\xff\xfe\x00\xd8", "no JSON"),
    ],
)  # fmt: skip
def test_malformed_headers_are_refused_with_a_reason(header: bytes, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        read_all(raw(header), 1 << 20, Caps({"ptx": 64}, count=4))


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 0xFFFFFFFF),
        struct.pack(">I", 0),
        struct.pack(">I", 4097),
        raw(b'{"body": {}, "blocks": [["ptx", 65]]}'),
        raw(b'{"body": {}, "blocks": [["ptx.a", 40], ["ptx.b", 40]]}'),
        raw(b'{"body": {}, "blocks": [["constants", 33]]}'),
    ],
)
def test_too_large_is_refused_before_it_is_read(data: bytes) -> None:
    with pytest.raises(Oversized):
        read_all(data, 1 << 20)


@given(st.binary(max_size=600), st.integers(1, 64))
@settings(max_examples=120, deadline=None)
def test_no_bytes_break_the_reader(data: bytes, chunk: int) -> None:
    try:
        read_all(data, chunk)
    except Malformed:
        return


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=8), x, max_size=4), max_leaves=12,
))  # fmt: skip
@settings(max_examples=120, deadline=None)
def test_no_header_breaks_the_reader(header: object) -> None:
    try:
        frames = read_all(raw(json.dumps(header).encode()), 1 << 20)
    except Malformed:
        return
    assert len(frames) <= 1
