"""What a compile worker changes in the pinned DSL (4.8.1), one named function each, and why. Speed only.

A plan of hundreds of launches would otherwise take minutes: the DSL lowers one kernel for each launch, prints the
whole module for a log that is off at every launch, and compiles the host code twice. The output is the same PTX with
each kernel once. Another version of the DSL needs these looked at again: they fail loudly, before READY.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
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
            module = _module_of(dsl)
            if (
                helper.func_op is not None
            ):  # None: launched without a trace, by a name that is known
                _fold(module, helper.func_op.operation)
            name = kwargs["kernelSym"].value[-1]
            kwargs["kernelSym"] = ir.SymbolRefAttr.get(["kernels", module.kept.get(name, name)])
            return launch(*args, **kwargs)

        helper.generate_launch_op = generate_launch_op
        return helper

    return build


@dataclass
class _Module:
    """Kernels of the module that is being traced: first names by text, and first names by name."""

    gpu_module: Any
    by_text: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)


def _fold(module: _Module, operation: Any) -> None:
    """Erase a kernel whose text another one has."""
    name = ir.StringAttr(operation.attributes["sym_name"]).value
    text = operation.get_asm(use_local_scope=True).replace(name, "@")
    module.kept[name] = module.by_text.setdefault(text, name)
    if module.kept[name] != name:
        operation.erase()


def _module_of(dsl: Any) -> _Module:
    module = getattr(dsl, "_shared_kernels", None)
    if module is None or module.gpu_module is not dsl.gpu_module:
        module = dsl._shared_kernels = _Module(dsl.gpu_module)
    return module


def _replace(owner: type, name: str, function: Callable[..., Any]) -> None:
    if not callable(getattr(owner, name, None)):
        raise AttributeError(f"this DSL's {owner.__name__} has no {name}")
    setattr(owner, name, function)
