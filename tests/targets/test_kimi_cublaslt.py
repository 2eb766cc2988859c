"""cuBLASLt by its C names: layouts, alignment and the choice of an algorithm, on a stand-in that computes on the CPU.

The stand-in reads its arguments as the library's documentation has them: column-major matrices, a transposed first one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from targets.kimi_k3.baseline import cublaslt
from targets.kimi_k3.baseline.cublaslt import Launch

NOT_SUPPORTED = 15


def content(at: int, count: int) -> Tensor:
    """BF16 at an address."""
    raw = (ctypes.c_uint8 * (2 * count)).from_address(at)
    return torch.frombuffer(raw, dtype=torch.bfloat16)


class Library:
    """Algorithms 0 to 3: slow, refused, wrong, fast. `seen` are the alignments that the heuristic was told."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self.alignments: dict[int, int] = {}

    def _made(self, out: Any, thing: Any) -> int:
        self.things.append(thing)
        out._obj.value = len(self.things)
        return 0

    def _of(self, handle: Any) -> Any:
        return self.things[handle.value - 1]

    def cublasLtMatmulDescCreate(self, out: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)  # 32-bit sums, factors in float32
        return self._made(out, {})

    def cublasLtMatmulDescSetAttribute(self, d: Any, name: int, value: Any, size: Any) -> int:
        assert size.value == 4
        self._of(d)[name] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, out: Any, kind: int, rows: Any, cols: Any, ld: Any) -> int:
        assert kind == 14 and ld.value >= rows.value
        return self._made(out, (rows.value, cols.value, ld.value))

    def cublasLtMatmulPreferenceCreate(self, out: Any) -> int:
        return self._made(out, {})

    def cublasLtMatmulPreferenceSetAttribute(self, p: Any, name: int, value: Any, size: Any) -> int:
        assert size.value == (8 if name == 1 else 4)
        self._of(p)[name] = value._obj.value
        return 0

    def cublasLtMatmulPreferenceDestroy(self, p: Any) -> int:
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *a: Any) -> int:
        *_, preference, asked, found, count = a
        self.alignments = self._of(preference)
        assert self.alignments.pop(1) == cublaslt.WORKSPACE and asked == cublaslt.OFFERED
        for i in range(4):
            found[i].algorithm[0], found[i].workspace, found[i].state = i, 64, 0
        found[4].state = NOT_SUPPORTED
        count._obj.value = 5
        return 0

    def cublasLtMatmul(self, *a: Any) -> int:
        _, d, one, A, la, B, lb, zero, _C, _, D, ld, choice, _space, size, stream = a
        assert (one._obj.value, zero._obj.value, size.value, stream.value) == (1.0, 0.0, 64, 7)
        number = choice._obj.algorithm[0]
        if number == 1:
            return NOT_SUPPORTED
        assert self._of(d) == {3: 1}  # the first matrix is transposed, nothing else
        w, x = self._matrix(A, la), self._matrix(B, lb)
        y = self._matrix(D, ld)
        y.copy_((w.float().T @ x.float()) * (1.5 if number == 2 else 1.0))
        return 0

    def _matrix(self, at: Any, layout: Any) -> Tensor:
        rows, cols, ld = self._of(layout)
        return content(at.value, ld * (cols - 1) + rows).as_strided((rows, cols), (1, ld))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    lib = Library()
    monkeypatch.setattr(cublaslt, "_library", lambda: (lib, ctypes.c_void_p(1)))
    monkeypatch.setattr(cublaslt, "_stream", lambda: 7)
    return lib


def operands(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """x and y with gaps between their rows."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 80, generator=g).bfloat16()[:, :64]
    w = torch.randn(48, 64, generator=g).bfloat16()
    y = torch.zeros(rows, 56, dtype=torch.bfloat16)
    return x, w, y[:, :48]


def test_a_choice_lies_in_memory_as_the_librarys_struct() -> None:
    c = cublaslt._Choice
    assert ctypes.sizeof(c) == 96
    at = [getattr(c, n).offset for n in ("algorithm", "workspace", "state", "waves", "reserved")]
    assert at == [0, 64, 72, 76, 80]


@pytest.mark.parametrize("rows", [1, 5])
def test_the_fastest_right_algorithm_multiplies(rows: int, library: Library) -> None:
    times = iter((30.0, 10.0))  # of algorithms 0 and 3: the others have no time

    def timed(launches: Sequence[Launch]) -> float:
        launches[0]()
        return next(times)

    x, w, y = operands(rows)
    tuned = cublaslt.Tuned(torch.device("cpu"), timed)
    launch, said = tuned.launch((x, w, y))
    assert not y.any()  # nothing was tried on the caller's memory
    launch()
    assert torch.allclose(y.float(), x.float() @ w.float().T, rtol=0.01, atol=0.01)
    assert said == "algorithm 4 of 4, 10.0 us, the first 30.0; 1 refused, 1 wrong"
    again, _ = tuned.launch((x, w, y))  # no second trial: there is no third time
    again()


def test_the_heuristic_is_told_how_pointers_are_aligned(library: Library) -> None:
    space = torch.zeros(64 * 4 + 256, dtype=torch.bfloat16)
    first = -space.data_ptr() % 256 // 2
    assert cublaslt.alignment(space[first : first + 64].view(1, 64)) == 256
    assert cublaslt.alignment(space[first + 8 :][:64].view(1, 64)) == 16
    assert cublaslt.alignment(space[first:][:160].view(2, 80)) == 32  # rows of 160 bytes
    x, w, y = operands(5)
    cublaslt.offered(
        cublaslt.described((x, w, y), torch.zeros(cublaslt.WORKSPACE, dtype=torch.uint8))
    )
    aligned = [cublaslt.alignment(t) for t in (w, x, y, y)]
    assert [library.alignments[n] for n in (5, 6, 7, 8)] == aligned


def test_nothing_right_is_missing(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "SAME", -1.0)
    with pytest.raises(cublaslt.Missing, match="1 refused, 3 wrong"):
        cublaslt.Tuned(torch.device("cpu"), lambda launches: 1.0).launch(operands(2))
