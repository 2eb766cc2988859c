"""Arena, checksums and poison: placement, guard zones and traces of every single byte."""

from __future__ import annotations

import pytest
import torch

from sandbox.artifact import Buffer
from sandbox.judge import poison, vary
from sandbox.judge.arena import Arena, Broken, Place
from sandbox.judge.digest import checksums
from sandbox.judge.dtypes import TORCH, bits, same_bits
from sandbox.judge.seeds import Seeds

BUFFERS = [
    ("a", Buffer("inputs.a", "bf16", (3, 7), 256)),
    ("b", Buffer("inputs.b", "u8", (5,), 1)),
    ("c", Buffer("inputs.c", "f32", (64, 65), 1024)),
]


def place(seed: int = 1, guard: int = 512) -> Place:
    return Place("cpu", guard, Seeds(seed).chooser("place"), seed)


@pytest.mark.parametrize("together", [False, True])
def test_buffers_are_aligned_apart_and_shaped(together: bool) -> None:
    arena = Arena(BUFFERS, place(), together)
    spans = []
    for name, b in BUFFERS:
        t = arena[name]
        assert t.shape == b.shape and t.dtype == TORCH[b.dtype] and t.is_contiguous()
        assert t.data_ptr() % b.align == 0
        spans.append((t.data_ptr(), t.data_ptr() + b.nbytes))
    for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
        assert start - end >= 2 * 512
    assert arena.broken() == ()


def test_placement_is_drawn_from_the_seed() -> None:
    def offsets(seed: int) -> list[int]:
        arena = Arena(BUFFERS, place(seed), together=True)
        return [t.storage_offset() * t.element_size() for t in arena.values()]

    assert len({tuple(offsets(s)) for s in range(6)}) > 3


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("offset", "seen"), [(-1, -1), (-512, -512), (42, 0), (42 + 511, 511)])
def test_every_guard_byte_is_watched(together: bool, offset: int, seen: int) -> None:
    arena = Arena(BUFFERS, place(), together)
    raw = arena["a"].view(-1).view(torch.uint8)
    byte = raw.as_strided((1,), (1,), raw.storage_offset() + offset)
    byte.bitwise_xor_(torch.tensor([128], dtype=torch.uint8))
    assert arena.broken() == (Broken("a", seen),)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 4096, 100_003])
def test_every_byte_moves_the_checksum(size: int) -> None:
    t = torch.randint(1, 256, (size,), dtype=torch.uint8)
    before = checksums({"t": t}, 7)
    assert checksums({"t": t.clone()}, 7) == before != checksums({"t": t}, 8)
    for at in {0, size // 2, size - 1}:
        t[at] ^= 1
        assert checksums({"t": t}, 7) != before
        t[at] ^= 1
    if size > 16:
        t[0], t[8] = t[0].clone() + 1, t[8].clone() - 1  # balanced: a plain sum would not see it
        assert checksums({"t": t}, 7) != before


def test_bits_tell_nan_payloads_apart() -> None:
    a = torch.tensor([float("nan")]).view(torch.int32)
    b = (a + 1).view(torch.float32)
    assert same_bits(a.view(torch.float32), a.view(torch.float32))
    assert not same_bits(a.view(torch.float32), b) and bool((bits(b) != a).all())


@pytest.mark.parametrize("dtype", sorted(TORCH))
def test_poison_fits_every_type(dtype: str) -> None:
    b = Buffer("outputs.x", dtype, (4, 64))
    t = Arena([("x", b)], place())["x"]
    t.view(-1).view(torch.uint8).zero_()
    poison.fill([t], "random", 3)
    first = t.clone()
    assert bits(first).any()
    if TORCH[dtype].is_floating_point:
        assert torch.isfinite(t.float()).all()
        poison.fill([t], "nan", 3)
        assert torch.isnan(t.float()).all()
        poison.fill([t], "bits", 3)
        whole = t.view(-1).view(torch.uint8)
        assert len(whole.unique()) > 100 and bool((t.float().abs() > 16).any())
    poison.fill([t], "random", 4)
    assert not same_bits(first, t)
    kept = t.clone()
    poison.fill([t], "stale", 5)
    assert same_bits(kept, t)


def test_seeds_are_secret_distinct_and_repeatable() -> None:
    assert Seeds().master != Seeds().master
    s = Seeds(5)
    assert s.of("a", 1) == Seeds(5).of("a", 1)
    assert len({s.of("a", i) for i in range(100)} | {s.of("b", 1)}) == 101
    draw = s.chooser("x")
    assert sorted({draw(4) for _ in range(64)}) == [0, 1, 2, 3]


@pytest.mark.parametrize("piece", [vary.PIECE, 100])
def test_new_signs_change_values_and_nothing_else(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vary, "PIECE", piece)
    wave = Buffer("inputs.x", "bf16", (4, 64))
    rate = Buffer("inputs.rate", "f32", (64,))
    page = Buffer("inputs.page", "i32", (8,))
    named = [(f"{i}/{b.name}", b) for i in range(2) for b in (wave, rate, page)]
    arena = Arena(named, place(), together=True)
    g = torch.Generator().manual_seed(1)
    for name, t in arena.items():
        t.copy_(
            torch.randn(t.shape, generator=g).abs()
            if "rate" in name
            else torch.randn(t.shape, generator=g) * 9
        )
    before = {n: t.clone() for n, t in arena.items()}
    mask = vary.free_signs(arena, 2)
    assert mask is not None
    vary.flip(arena, mask, 3)
    assert arena.broken() == ()
    for name, t in arena.items():
        if "x" in name:
            assert torch.equal(t.abs(), before[name].abs())
            assert 0.3 < float((t != before[name]).float().mean()) < 0.7
        else:
            assert torch.equal(t, before[name])
