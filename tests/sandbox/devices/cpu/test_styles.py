"""Twenty CuTe DSL kernels from outside the seeds, by hash: compiled PTX is kept beside `kernels/styles.py` and
`kernels/wide_styles.py` and run here."""

# ruff: noqa: E501  (PTX and tables read better with one thought a line)

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sandbox.devices.cpu.device import CpuDevice
from sandbox.devices.cpu.ptx_parse import parse
from tests.sandbox.devices.cpu.harness import DTYPES, Shape, run

FOLDER = Path(__file__).parent / "kernels"
HASHES = {
    "bitonic": "2ee0ac160303e788",
    "bytes": "c4d70d5369dcc75f",
    "cluster": "b053c49a3cde61a8",
    "convert": "4de02e7f8ac7f503",
    "gemm": "e9afededada32b13",
    "histogram": "8d3504254678478d",
    "last": "68e860fcf804f33d",
    "norm": "5486cb25afa5f7a5",
    "online": "4d28447e31e889a5",
    "pick": "e48cd5be50fa0f71",
    "pipeline": "4dcdd8c6ca82003b",
    "queue": "994c2b5383adb064",
    "ring": "acca09bce7ae234a",
    "saxpy": "9947211bcb8b566e",
    "scan": "c7d5bb647480011e",
    "scatter": "46b6564a1cf0a809",
    "softmax": "6dc8ea171610a9ef",
    "stencil": "717a6daba824dc98",
    "tiled": "2e320e8ae15c9a15",
    "transpose": "805cae59a1fe0b89",
}
Made = tuple[list[torch.Tensor], Shape, Callable[[list[torch.Tensor]], torch.Tensor], int]


def case(name: str) -> Made:
    """Tensors, launch, the expected last-written tensor, and its index."""
    g = torch.Generator().manual_seed(7)
    f = lambda *s: torch.randn(*s, generator=g)  # noqa: E731
    n = lambda hi, *s: torch.randint(1, hi, s, generator=g, dtype=torch.int32)  # noqa: E731
    wide = Shape(block=(128, 1, 1))
    cases: dict[str, Callable[[], Made]] = {
        "saxpy": lambda: ([f(1000), f(1000)], Shape((8, 1, 1), (128, 1, 1)), lambda t: t[0] * 3 + t[1], 1),
        "softmax": lambda: ([f(5, 128), f(5, 128)], Shape((5, 1, 1), (128, 1, 1), smem=32), lambda t: t[0].softmax(1), 1),
        "transpose": lambda: ([f(32, 48), f(48, 32)], Shape((3, 2, 1), (16, 16, 1), smem=1088), lambda t: t[0].T, 1),
        "histogram": lambda: (
            [n(1000, 512), torch.zeros(16, dtype=torch.int32)], Shape((4, 1, 1), (128, 1, 1)),
            lambda t: torch.bincount(t[0] % 16, minlength=16).int(), 1),
        "scan": lambda: ([n(50, 128), n(9, 128)], Shape(block=(128, 1, 1), smem=1024), lambda t: t[0].cumsum(0).int(), 1),
        "norm": lambda: (
            [f(3, 256).bfloat16(), f(256).bfloat16(), f(3, 256).bfloat16()], Shape((3, 1, 1), (32, 1, 1), smem=16),
            lambda t: (t[0].float() * (t[0].float().square().mean(1, True) + 1e-5).rsqrt() * t[1].float()).bfloat16(), 2),
        "pick": lambda: ([n(1000, 128), n(9, 128)], wide, lambda t: torch.tensor([collatz(int(v)) for v in t[0]]).int(), 1),
        "last": lambda: (
            [f(192), f(6), torch.zeros(1, dtype=torch.int32), f(1)], Shape((6, 1, 1), (32, 1, 1), smem=16),
            lambda t: t[0].sum().reshape(1), 3),
        "convert": lambda: (
            [n(255, 128).to(torch.uint8), torch.zeros(128, dtype=torch.float16)], wide,
            lambda t: t[0].view(torch.float8_e4m3fn).half(), 1),
        "stencil": lambda: ([f(128), f(128)], wide, lambda t: t[0] / 2 + (t[0].roll(1) + t[0].roll(-1)) / 4, 1),
        "tiled": lambda: ([f(16, 256), f(16, 256)], Shape((2, 2, 1), (128, 1, 1)), lambda t: t[0] * 2 + 1, 1),
        "pipeline": lambda: ([f(9, 128), f(128)], Shape(smem=1536), lambda t: t[0].sum(0), 1),
        "gemm": lambda: (
            [f(32, 64).bfloat16(), f(24, 64).bfloat16(), f(32, 24)], Shape((3, 2, 1)),
            lambda t: t[0].float() @ t[1].float().T, 2),
        "bytes": lambda: (
            [n(1 << 31, 16, 16), n(1 << 31, 8, 16), n(9, 16, 8)], Shape(),
            lambda t: t[0].view(torch.int8).int() @ t[1].view(torch.int8).int().T, 2),
        "ring": lambda: ([f(3, 7, 96), f(3, 96)], Shape((3, 1, 1), (128, 1, 1), smem=1024), lambda t: t[0].sum(1), 1),
        "cluster": lambda: (
            [f(3, 128).abs(), f(3, 128)], Shape((4, 3, 1), cluster=(4, 1, 1), smem=16),
            lambda t: t[0] / t[0].sum(1, True), 1),
        "queue": lambda: (
            [n(99, 40, 40), torch.zeros(40, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)],
            Shape((5, 1, 1), (64, 1, 1), smem=16), lambda t: t[0].tril().sum(1).int(), 1),
        "bitonic": lambda: (
            [n(1000, 256), n(9, 256)], Shape((4, 1, 1), (64, 1, 1)),
            lambda t: t[0].view(-1, 32).sort(1).values.view(-1), 1),
        "scatter": lambda: (
            [f(128, 4), n(10, 128), torch.zeros(10, 4)], Shape(block=(128, 1, 1)),
            lambda t: torch.zeros(10, 4).index_add(0, t[1], t[0]), 2),
        "online": lambda: (
            [f(4, 32), f(50, 32), f(50, 32), f(4, 32)], Shape((4, 1, 1)),
            lambda t: (t[0] @ t[1].T).softmax(1) @ t[2], 3),
    }  # fmt: skip
    return cases[name]()


def collatz(v: int) -> int:
    steps = 0
    while v != 1:
        v, steps = (v // 2 if v % 2 == 0 else 3 * v + 1), steps + 1
    return steps


@pytest.mark.parametrize("name", sorted(HASHES))
@pytest.mark.parametrize("seed", [0, 3])
def test_a_kernel_of_another_style_gives_what_torch_gives(name: str, seed: int) -> None:
    text = (FOLDER / f"{name}.ptx").read_text()
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == HASHES[name]
    tensors, shape, expect, index = case(name)
    want = expect([t.clone() for t in tensors])
    (entry,) = parse(text).entries
    assert all(t.dtype in DTYPES for t in tensors)
    ran = run(text, tensors, shape, kernel=entry, device=CpuDevice(seed=seed, mode="exact"))
    got = tensors[index]
    if got.dtype.is_floating_point:
        assert torch.allclose(
            got.float(),
            want.float(),
            rtol=1e-2 if got.dtype == torch.bfloat16 else 1e-5,
            atol=1e-6,
            equal_nan=True,
        )
    else:
        assert torch.equal(got, want)
    assert ran.program.findings() == ()
