"""Ten CuTe DSL kernels from outside the seeds, by hash: compiled PTX is kept beside `kernels/styles.py` and
run here."""

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
    "convert": "4de02e7f8ac7f503",
    "histogram": "8d3504254678478d",
    "last": "68e860fcf804f33d",
    "norm": "5486cb25afa5f7a5",
    "pick": "e48cd5be50fa0f71",
    "saxpy": "9947211bcb8b566e",
    "scan": "c7d5bb647480011e",
    "softmax": "6dc8ea171610a9ef",
    "stencil": "717a6daba824dc98",
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
