"""A stand-in for the part of Triton that the baseline's kernels use: programs run one after the other on CPU tensors.

Every access is checked against its tensor's bounds, so a wrong mask is an error here. It knows nothing of layouts, time
or concurrency, and an expression that Triton's compiler would refuse may work.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.targets import ptx_lite


class Pointer:
    """Addresses in one tensor: an int or a tensor of element offsets."""

    def __init__(self, base: Tensor, at: Any = 0) -> None:
        self.base, self.at = base, at

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.base, self.at + other)

    def __sub__(self, other: Any) -> Pointer:
        return Pointer(self.base, self.at - other)


def _storage(t: Tensor) -> Tensor:
    """All elements from `t`'s first on, in memory order."""
    size = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
    return t.as_strided((size,), (1,))


def _extent(t: Tensor) -> int:
    """Elements between the first and the last of `t`, both included."""
    return (
        1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    )


def _resolved(p: Pointer, mask: Any) -> tuple[Tensor, Tensor]:
    at = torch.as_tensor(p.at, dtype=torch.int64)
    inside = torch.ones_like(at, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    at, inside = torch.broadcast_tensors(at, inside)
    used = at[inside]
    if used.numel() and (int(used.min()) < 0 or int(used.max()) >= _extent(p.base)):
        raise IndexError(
            f"access to {list(p.base.shape)} at {int(used.min())} .. {int(used.max())}"
        )
    return torch.where(inside, at, 0), inside


def load(p: Pointer, mask: Any = None, other: Any = None, **hints: Any) -> Tensor:
    at, inside = _resolved(p, mask)
    flat = _storage(p.base)
    if not bool(inside.any()):
        return torch.full(at.shape, other or 0, dtype=flat.dtype)
    found = flat[at]
    return (
        found
        if mask is None
        else torch.where(inside, found, torch.tensor(other or 0, dtype=flat.dtype))
    )


def store(p: Pointer, value: Any, mask: Any = None, **hints: Any) -> None:
    at, inside = _resolved(p, mask)
    value = torch.as_tensor(value)
    assert value.dtype == p.base.dtype or not value.is_floating_point(), (value.dtype, p.base.dtype)
    value = value.to(p.base.dtype).broadcast_to(at.shape)
    at = at[inside]
    assert at.unique().numel() == at.numel(), "two lanes store to one address"
    _storage(p.base)[at] = value[inside]


def dot(a: Tensor, b: Tensor, acc: Tensor | None = None, **hints: Any) -> Tensor:
    assert a.dtype == b.dtype == torch.bfloat16
    assert min(*a.shape, b.shape[0]) >= 16 and b.shape[1] >= 8
    product = a.float() @ b.float()
    return product if acc is None else acc + product


def atomic_add(p: Pointer, value: Any, mask: Any = None, **hints: Any) -> Tensor:
    """One lane after the other; -1 for those that are masked off."""
    at, inside = _resolved(p, mask)
    flat, found = _storage(p.base), torch.full(at.shape, -1, dtype=p.base.dtype)
    for lane in range(at.numel()):
        if inside[lane]:
            found[lane] = flat[at[lane]]
            flat[at[lane]] += value
    return found


def inline_asm(
    text: str, constraints: str, args: list[Tensor], dtype: Any, is_pure: bool, pack: int
) -> tuple[Tensor, ...]:
    """For int32 operands and results of BF16, two neighbours at a time: what the kernels have."""
    assert pack == 2 and all(a.dtype == torch.int32 for a in args)
    assert constraints.count("=") == len(dtype) and set(dtype) == {torch.bfloat16}
    registers = [a[..., i::2] for a in args for i in range(2)]
    found = ptx_lite.run(text, registers, len(dtype))
    return tuple(ptx_lite.halves(x).reshape(args[0].shape) for x in found)


def _where(mask: Any, a: Any, b: Any) -> Tensor:
    like = next((x for x in (a, b) if isinstance(x, Tensor)), None)
    parts = [
        x if isinstance(x, Tensor) else torch.tensor(x, dtype=None if like is None else like.dtype)
        for x in (a, b)
    ]
    return torch.where(torch.as_tensor(mask), *parts)


def _reduce(f: Callable[..., Tensor]) -> Callable[[Tensor, int], Tensor]:
    return lambda x, axis: f(x, dim=axis)


def _cast(x: Tensor, dtype: torch.dtype, bitcast: bool = False) -> Tensor:
    return x.view(dtype) if bitcast else x.to(dtype)


def _pair(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda a, b: f(torch.as_tensor(a), torch.as_tensor(b))


class Kernel:
    """`kernel[grid](...)` runs all programs; a kernel called by another runs as a function."""

    program: tuple[int, ...] = (0, 0, 0)

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f = f

    def __call__(self, *args: Any, **known: Any) -> Any:
        return self.f(*args, **known)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any, num_warps: int = 4, num_stages: int = 3, **known: Any) -> None:
            pointers = [Pointer(a) if isinstance(a, Tensor) else a for a in args]
            for program in itertools.product(*(range(n) for n in grid)):
                Kernel.program = (*program, 0, 0)[:3]
                self.f(*pointers, **known)

        return run


def _language() -> types.ModuleType:
    tl: Any = types.ModuleType("triton.language")
    tl.constexpr = lambda x: x
    tl.load, tl.store, tl.dot, tl.where, tl.cast = load, store, dot, _where, _cast
    tl.program_id = lambda axis: torch.tensor(Kernel.program[axis])
    tl.arange = lambda a, b: torch.arange(a, b)
    tl.zeros = lambda shape, dtype: torch.zeros(shape, dtype=dtype)
    tl.full = lambda shape, value, dtype: torch.full(shape, value, dtype=dtype)
    tl.sum, tl.max = _reduce(torch.sum), _reduce(torch.amax)
    tl.maximum, tl.minimum = _pair(torch.maximum), _pair(torch.minimum)
    tl.exp, tl.sqrt = torch.exp, torch.sqrt
    tl.trans, tl.reshape = (lambda x: x.T), (lambda x, shape: x.reshape(shape))
    tl.static_range = range
    tl.atomic_add, tl.inline_asm_elementwise = atomic_add, inline_asm
    tl.cumsum = lambda x, axis: torch.cumsum(x, axis).to(x.dtype)
    tl.broadcast_to = lambda x, shape: x.broadcast_to(shape)
    tl.debug_barrier = lambda: None
    for name, dtype in (
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("int32", torch.int32),
        ("int64", torch.int64),
    ):
        setattr(tl, name, dtype)
    return tl


@contextmanager
def installed() -> Iterator[None]:
    """Make this `triton` while the block runs; modules that imported it are forgotten afterwards, and all of the
    baselines are others inside: take them with `importlib` there."""
    triton: Any = types.ModuleType("triton")
    triton.jit, triton.language = Kernel, _language()
    ours = "targets.kimi_k3.baseline."
    before = {k: v for k, v in sys.modules.items() if k.startswith((ours, "triton"))}
    for name in before:
        del sys.modules[name]
    package = importlib.import_module(ours[:-1])
    shown = _modules_of(package)
    sys.modules |= {"triton": triton, "triton.language": triton.language}
    try:
        yield
    finally:
        for name in [k for k in sys.modules if k.startswith((ours, "triton"))]:
            del sys.modules[name]
        sys.modules |= before
        _modules_of(package)
        for name, module in shown.items():
            setattr(package, name, module)


def _modules_of(package: types.ModuleType) -> dict[str, types.ModuleType]:
    """Its submodules, which are no longer its attributes: `from package import module` would find them there."""
    found = {k: v for k, v in vars(package).items() if isinstance(v, types.ModuleType)}
    for name in found:
        delattr(package, name)
    return found
