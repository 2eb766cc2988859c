"""Tracing: the candidate's `step` or `prepare` becomes PTX and a host object, without a GPU.

The DSL traces functions of a fixed signature, so a host function with one parameter a tensor is generated as a real
file (it refuses source from memory) and hands a namespace tree to the candidate.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver
from cutlass.cute.runtime import make_fake_compact_tensor

from . import signature
from .errors import Refused

PREFIX = "k"
# Line tables do not change the machine code (ptxas gives the same SASS with and without) and they let errors, the CPU
# device and profiles name source lines.
OPTIONS = "--generate-line-info"


@dataclass(frozen=True)
class Traced:
    """A compiled host function: its PTX, the x86 object that launches it, and the name of its entry."""

    ptx: str
    object: bytes
    function: str


@dataclass(frozen=True)
class Plan:
    """What to trace: `step` or `prepare`, the candidate's function, and its tensors with their numbers in the job.

    `places`: the same tensors' numbers on each rank. One trace serves all ranks: `t.rank` is known when launches are
    recorded, as are the addresses."""

    name: str
    function: Any
    used: list[tuple[int, signature.Tensor]]
    places: tuple[list[int], ...] = ((),)  # type: ignore[assignment]


def compile_plan(plan: Plan, cfg: SimpleNamespace) -> Traced:
    """Trace and compile `function(t, cfg, stream)`. Raises what the DSL or the candidate raises."""
    several = len(plan.places) > 1
    host = _host(plan.name, len(plan.used), ["rank"] if several else [])
    paths = [tensor.path for _, tensor in plan.used]

    def body(tensors: tuple[Any, ...], *rest: Any) -> None:
        *rank, stream = rest
        t = signature.tree(paths, tensors)
        if rank:
            t.rank = rank[0]
        plan.function(t, cfg, stream)

    host.BODY = body
    fakes = [_fake(tensor) for _, tensor in plan.used]
    fakes += [cutlass.Int32(0)] if several else []
    compiled = cute.compile(
        host.host, *fakes, driver.CUstream(0), options=OPTIONS, no_jit_engine=True
    )
    ptx = compiled.artifacts.PTX
    if not isinstance(ptx, str) or ".entry" not in ptx:
        raise Refused("plan_error", "no-kernel", f"`{plan.name}` launches no kernel")
    return Traced(ptx, compiled.dump_to_object(PREFIX), compiled.function_name)


def _fake(tensor: signature.Tensor) -> Any:
    shape = tensor.shape or (1,)
    order = tuple(reversed(range(len(shape))))
    dtype = getattr(cutlass, signature.ITEM[tensor.dtype])
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=tensor.align)


def _host(plan: str, count: int, more: list[str]) -> Any:
    names = [f"a{i}" for i in range(count)]
    listed = "".join(f"{n}, " for n in names)
    extra = "".join(f"{n}, " for n in more)
    name = f"kernelgen_host_{plan}"
    text = (
        "import cutlass.cute as cute\n\nBODY = None\n\n\n@cute.jit\n"
        f"def host({listed}{extra}stream):\n    BODY(({listed}), {extra}stream)\n"
    )
    Path(f"{name}.py").write_text(text)
    importlib.invalidate_caches()
    sys.modules.pop(name, None)
    return importlib.import_module(name)
