"""cuBLASLt for the mix: y = x W^T by the algorithm that is fastest on this device, of those that its heuristic offers.

The library that torch has loaded is called by its C names. It knows no programmatic dependent launch and no remote
addend; what a layer needs around a product is the caller's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Launch = Callable[[], None]
OFFERED = 8
"""Algorithms asked of the heuristic."""
SAME = 0.02
"""Relative distance from torch's product; more is a wrong product, not another order of sums."""
WORKSPACE = 32 << 20
_COMPUTE_32F, _R_32F, _R_16BF = 68, 0, 14
_TRANSA, _MAX_WORKSPACE, _ALIGNMENTS = 3, 1, (5, 6, 7, 8)
_MOST_ALIGNED = 256
"""What the heuristic takes for granted of every pointer unless it is told."""


class _Choice(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class Missing(RuntimeError):
    """No cuBLASLt is loaded here, or it has no algorithm for a shape."""


@functools.cache
def _library() -> tuple[Any, ctypes.c_void_p]:
    """The loaded library and one handle. Raises Missing."""
    torch.zeros(1, 8, device="cuda") @ torch.zeros(
        8, 8, device="cuda"
    )  # torch loads it when it is first used
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [x.rpartition(" ")[2] for x in lines if "libcublasLt.so" in x]
    if not found:
        raise Missing("torch has loaded no cuBLASLt")
    lib: Any = ctypes.CDLL(found[0])
    handle = ctypes.c_void_p()
    _asked(lib.cublasLtCreate(ctypes.byref(handle)))
    return lib, handle


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def alignment(t: Tensor) -> int:
    """Bytes that every row of a matrix is aligned to, at most what cuBLASLt asks about."""
    rows = t.stride(0) * t.element_size() if t.shape[0] > 1 else 0
    return min(_MOST_ALIGNED, (t.data_ptr() | rows) & -(t.data_ptr() | rows) or _MOST_ALIGNED)


def _asked(status: int) -> None:
    if status:
        raise Missing(f"cuBLASLt status {status}")


@dataclass(frozen=True)
class Product:
    """One product with its descriptors, ready for any algorithm."""

    operands: tuple[Tensor, Tensor, Tensor]
    description: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    workspace: Tensor

    def launch(self, choice: _Choice) -> Launch:
        lib, handle = _library()
        x, w, y = self.operands
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        by, at = ctypes.byref, ctypes.c_void_p
        left, right, out = self.layouts
        fixed = (
            handle, self.description, by(one), at(w.data_ptr()), left, at(x.data_ptr()), right, by(zero),
            at(y.data_ptr()), out, at(y.data_ptr()), out, by(choice), at(self.workspace.data_ptr()),
            ctypes.c_size_t(choice.workspace),
        )  # fmt: skip
        kept = (self, one, zero, choice)

        def run() -> None:
            _asked(lib.cublasLtMatmul(*fixed, at(_stream())))

        run.kept = kept  # type: ignore[attr-defined]
        return run


def described(operands: tuple[Tensor, Tensor, Tensor], workspace: Tensor) -> Product:
    """operands = (x [M, K], W [N, K], y [M, N]): BF16, or y float32; rows may be strided."""
    lib, _ = _library()
    x, w, y = operands
    n, k = w.shape
    description = ctypes.c_void_p()
    _asked(lib.cublasLtMatmulDescCreate(ctypes.byref(description), _COMPUTE_32F, _R_32F))
    transposed = ctypes.c_int(1)
    _asked(
        lib.cublasLtMatmulDescSetAttribute(description, _TRANSA, ctypes.byref(transposed), ctypes.c_size_t(4))
    )  # fmt: skip
    made = []
    for kind, rows, columns, stride in (
        (_R_16BF, k, n, w.stride(0)),
        (_R_16BF, k, x.shape[0], x.stride(0)),
        (_R_32F if y.dtype == torch.float32 else _R_16BF, n, y.shape[0], y.stride(0)),
    ):
        layout = ctypes.c_void_p()
        _asked(
            lib.cublasLtMatrixLayoutCreate(
                ctypes.byref(layout), kind, ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride)
            )
        )  # fmt: skip
        made.append(layout)
    return Product(operands, description, (made[0], made[1], made[2]), workspace)


def offered(p: Product) -> list[_Choice]:
    """Algorithms in the heuristic's order. Raises Missing."""
    lib, handle = _library()
    preference, room = ctypes.c_void_p(), ctypes.c_size_t(p.workspace.numel())
    _asked(lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    _asked(
        lib.cublasLtMatmulPreferenceSetAttribute(
            preference, _MAX_WORKSPACE, ctypes.byref(room), ctypes.c_size_t(8)
        )
    )
    x, w, y = p.operands
    for attribute, t in zip(_ALIGNMENTS, (w, x, y, y), strict=True):
        bytes_ = ctypes.c_uint32(alignment(t))
        _asked(
            lib.cublasLtMatmulPreferenceSetAttribute(
                preference, attribute, ctypes.byref(bytes_), ctypes.c_size_t(4)
            )
        )
    found, count = (_Choice * OFFERED)(), ctypes.c_int()
    left, right, out = p.layouts
    _asked(
        lib.cublasLtMatmulAlgoGetHeuristic(
            handle, p.description, left, right, out, out, preference, OFFERED, found, ctypes.byref(count)
        )
    )  # fmt: skip
    lib.cublasLtMatmulPreferenceDestroy(preference)
    return [_Choice.from_buffer_copy(c) for c in found[: count.value] if c.state == 0]


class Tuned:
    """Products of one device; the algorithm of a shape is chosen once, by time with a cold L2, of those that run and
    are right."""

    def __init__(self, device: torch.device, timed: Callable[[Sequence[Launch]], float]) -> None:
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self.timed = timed
        self.chosen: dict[tuple[int, ...], tuple[_Choice, str]] = {}

    def launch(self, operands: tuple[Tensor, Tensor, Tensor]) -> tuple[Launch, str]:
        """The product and what to say of its algorithm. Raises Missing."""
        x, w, y = operands
        key = (
            *w.shape, x.shape[0], x.stride(0), y.stride(0), y.element_size(), *map(alignment, operands),
        )  # fmt: skip
        p = described(operands, self.workspace)
        if key not in self.chosen:
            self.chosen[key] = self._choose(p)
        choice, said = self.chosen[key]
        return p.launch(choice), said

    def _choose(self, p: Product) -> tuple[_Choice, str]:
        """Operands are drawn over scratch: those of `p` may be anything yet, and are left as they are."""
        x, w, y = p.operands
        x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).normal_()
        y = torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device)
        drawn = Product((x, w, y), p.description, p.layouts, p.workspace)
        wanted = (x @ w.T).float()
        tried: list[tuple[float, int, _Choice]] = []
        refused = wrong = 0
        choices = offered(p)
        for i, choice in enumerate(choices):
            launch = drawn.launch(choice)
            try:
                y.fill_(float("nan"))
                launch()
                if not float((y.float() - wanted).norm()) <= SAME * float(wanted.norm()):
                    wrong += 1
                    continue
                tried.append((self.timed([launch]), i, choice))
            except Missing:
                refused += 1
        if not tried:
            raise Missing(f"no algorithm for {tuple(w.shape)}: {refused} refused, {wrong} wrong")
        us, number, best = min(tried, key=lambda t: t[:2])
        left_out = f"; {refused} refused, {wrong} wrong" if refused or wrong else ""
        said = f"algorithm {number + 1} of {len(choices)}, {us:.1f} us, the first {tried[0][0]:.1f}"
        return best, f"{said}{left_out}"
