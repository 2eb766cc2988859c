"""What a compile worker changes in the pinned DSL (4.8.1), one named function each, and why. Speed only.

A plan of hundreds of launches would otherwise take minutes: the DSL lowers one kernel for each launch, prints the
whole module for a log that is off at every launch, and compiles the host code twice. The output is the same PTX with
each kernel once. Another version of the DSL needs these looked at again: they fail loudly, before READY.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from cutlass._mlir import ir as mlir
from cutlass._mlir.dialects import _cuda_ops_gen
from cutlass.cutlass_dsl import CuTeDSL
from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

ir: Any = mlir  # generated bindings: their stubs lack what they have
cuda_ops: Any = _cuda_ops_gen


def prepare() -> None:
    """Apply all changes, once a process. Raises AttributeError or OSError where the DSL is another one."""
    load_runtime()
    print_less()
    share_kernels()


def load_runtime() -> None:
    """Make the runtime's symbols visible, so that host objects can be written without a JIT engine (`no_jit_engine`).

    The engine would compile the host code a first time, only for a GPU that is not here.
    """
    for library in CuTeDSL._get_dsl().get_shared_libs():
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)


def print_less() -> None:
    """Keep the DSL from formatting modules and kernels for log lines that nobody reads."""

    def enter(self: Any) -> Any:
        return ir.InsertionPoint(self.gpu_module.bodyRegion.blocks[0])

    _replace(CutlassBaseDSL, "_enter_gpu_module", enter)
    cuda_ops.KernelOp.__str__ = lambda self: "cuda.kernel"


def share_kernels() -> None:
    """Lower a kernel once, however often it is launched with the same types and constants.

    The body has been traced when a launch is built; if its text equals that of an earlier kernel of the module, it is
    dropped and the launch names the earlier one.
    """
    original: Any = CutlassBaseDSL._kernel_helper

    def kernel_helper(self: Any, body: Any, *args: Any, **kwargs: Any) -> Any:
        launcher = original(self, body, *args, **kwargs)
        launcher.kernelGenHelper = _sharing(self, launcher.kernelGenHelper)
        return launcher

    _replace(CutlassBaseDSL, "_kernel_helper", kernel_helper)


def _sharing(dsl: Any, make: Callable[[], Any]) -> Callable[[], Any]:
    def build() -> Any:
        helper = make()
        launch = helper.generate_launch_op

        def generate_launch_op(*args: Any, **kwargs: Any) -> Any:
            operation = helper.func_op.operation
            name = ir.StringAttr(operation.attributes["sym_name"]).value
            text = operation.get_asm(use_local_scope=True).replace(name, "@")
            kept = _kernels_of(dsl).setdefault(text, name)
            if kept != name:
                operation.erase()
                kwargs["kernelSym"] = ir.SymbolRefAttr.get(["kernels", kept])
            return launch(*args, **kwargs)

        helper.generate_launch_op = generate_launch_op
        return helper

    return build


def _kernels_of(dsl: Any) -> dict[str, str]:
    """Kernel names by text, of the module that is being traced."""
    module, known = getattr(dsl, "_shared_kernels", (None, {}))
    if module is not dsl.gpu_module:
        known = {}
        dsl._shared_kernels = (dsl.gpu_module, known)
    return known


def _replace(owner: type, name: str, function: Callable[..., Any]) -> None:
    if not callable(getattr(owner, name, None)):
        raise AttributeError(f"this DSL's {owner.__name__} has no {name}")
    setattr(owner, name, function)
