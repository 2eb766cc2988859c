"""Telling addresses from literals in parameter blocks, from two recordings."""

from __future__ import annotations

import struct

import pytest

from sandbox import ptx
from sandbox.artifact import Buffer, Relocation
from sandbox.compile import relocate

BUFFERS = (
    Buffer("inputs.x", "f32", (1024,)),
    Buffer("weights.w", "u8", (1 << 40,)),
    Buffer("outputs.y", "f32", (16,)),
)
PTX = """
.version 9.4
.target sm_90a
.visible .entry k(
	.param .align 8 .b8 k_param_0[16],
	.param .u32 k_param_1,
	.param .u64 k_param_2
)
{
	ld.param.b64 %rd1, [k_param_0];
	ld.param.b32 %r1, [k_param_0+8];
	ld.param.b32 %r2, [k_param_1];
	ld.param.b64 %rd2, [k_param_2];
	ret;
}
"""
(ENTRY,) = ptx.entries(PTX)
USED = relocate.read_bytes(ENTRY, PTX)


def address(recording: int, buffer: int, offset: int = 0) -> int:
    base, stride = relocate.SENTINELS[recording]
    return base + stride * buffer + offset


def raw(recording: int, pointer: int, extent: int, padding: bytes, count: int, last: int) -> bytes:
    return struct.pack("<Qi4siQ", pointer, extent, padding, count, last)


def pair(
    pointer: tuple[int, int], last: tuple[int, int], padding: bytes = b"\0" * 4
) -> tuple[bytes, bytes]:
    a = raw(0, pointer[0], 64, padding, 7, last[0])
    return a, raw(1, pointer[1], 64, b"\1\2\3\4", 7, last[1])


def test_addresses_become_relocations_and_everything_else_stays() -> None:
    both = pair((address(0, 2, 8), address(1, 2, 8)), (5, 5))
    block = relocate.block(ENTRY, USED, both, BUFFERS)
    assert block.relocations == (Relocation(0, "outputs.y", 8),)
    assert block.data == struct.pack("<QiiixxxxQ", 0, 64, 0, 7, 5)


def test_padding_that_no_instruction_reads_is_cleared() -> None:
    both = pair((address(0, 0), address(1, 0)), (1, 1), padding=b"\xaa" * 4)
    assert relocate.block(ENTRY, USED, both, BUFFERS).data[12:16] == b"\0" * 4


def test_bytes_that_are_read_must_not_differ() -> None:
    used = (frozenset(range(16)), *USED[1:])
    both = pair((address(0, 0), address(1, 0)), (1, 1))
    with pytest.raises(relocate.Unstable, match="byte 12 differs"):
        relocate.block(ENTRY, used, both, BUFFERS)


def test_a_literal_that_looks_like_an_address_stays_a_literal() -> None:
    value = address(0, 1, 99)
    both = pair((address(0, 0), address(1, 0)), (value, value))
    block = relocate.block(ENTRY, USED, both, BUFFERS)
    assert [r.offset for r in block.relocations] == [0]
    assert struct.unpack_from("<Q", block.data, 24) == (value,)


def test_the_difference_of_two_addresses_is_refused() -> None:
    differences = tuple(address(r, 2) - address(r, 0) & (2**64 - 1) for r in range(2))
    both = pair((address(0, 0), address(1, 0)), (differences[0], differences[1]))
    with pytest.raises(relocate.Unstable, match="parameter 2"):
        relocate.block(ENTRY, USED, both, BUFFERS)


@pytest.mark.parametrize("offset", [64, 1 << 39])
def test_an_address_past_its_buffer_is_refused(offset: int) -> None:
    both = pair((address(0, 2, offset), address(1, 2, offset)), (1, 1))
    with pytest.raises(relocate.Unstable, match="outputs.y, which has 64"):
        relocate.block(ENTRY, USED, both, BUFFERS)


def test_an_address_before_its_buffer_is_refused() -> None:
    both = pair((address(0, 1) - 4, address(1, 1) - 4), (1, 1))
    with pytest.raises(relocate.Unstable):
        relocate.block(ENTRY, USED, both, BUFFERS)


def test_windows_do_not_overlap_for_the_largest_buffers() -> None:
    for recording in range(2):
        end = address(recording, 1, (1 << 40) - 1)
        found = relocate.resolve(end, recording, BUFFERS)
        assert found and found[0].name == "weights.w" and found[1] == (1 << 40) - 1


def test_a_parameter_whose_address_is_taken_counts_as_read() -> None:
    text = PTX.replace("ld.param.b32 %r1, [k_param_0+8];", "mov.b64 %rd9, k_param_0;")
    (entry,) = ptx.entries(text)
    assert relocate.read_bytes(entry, text)[0] == frozenset(range(16))


def test_vector_loads_read_all_their_bytes() -> None:
    text = PTX.replace(
        "ld.param.b64 %rd1, [k_param_0];", "ld.param.v2.b64 {%rd1, %rd8}, [k_param_0];"
    )
    (entry,) = ptx.entries(text)
    assert relocate.read_bytes(entry, text)[0] == frozenset(range(16))
