"""The native runtime as one LLVM module: which functions it has, and its text.

The text depends on the runtime's source alone, so its object code is cached like that of kernels.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType, ModuleType

from sandbox.devices.cpu import (
    rt_barrier,
    rt_copy,
    rt_faults,
    rt_float,
    rt_launch,
    rt_mbarrier,
    rt_memory,
    rt_mma,
    rt_race,
    rt_reduce,
    rt_sched,
    rt_start,
    rt_thread,
    rt_unset,
    rt_warp,
)
from sandbox.devices.cpu.subset import compile_functions, declarations
from sandbox.devices.cpu.subset_ops import DECLARATIONS

MODULES: tuple[ModuleType, ...] = (
    rt_faults,
    rt_float,
    rt_memory,
    rt_race,
    rt_reduce,
    rt_mbarrier,
    rt_copy,
    rt_unset,
    rt_mma,
    rt_warp,
    rt_start,
    rt_thread,
    rt_barrier,
    rt_sched,
    rt_launch,
)


def functions() -> tuple[FunctionType, ...]:
    """Every `rt_` function, once, in the module that defines it."""
    out = []
    for module in MODULES:
        for name, value in vars(module).items():
            if (
                name.startswith("rt_")
                and isinstance(value, FunctionType)
                and value.__module__ == module.__name__
            ):
                out.append(value)
    return tuple(out)


@cache
def runtime_ir() -> str:
    scalar = tuple(f for f in functions() if f.__name__ != "rt_dot")
    return DECLARATIONS + rt_mma.dot_ir() + compile_functions(scalar, functions())


@cache
def runtime_declarations() -> str:
    """For modules that call the runtime."""
    return declarations(functions())
