"""Which PTX instructions this device runs: a table from opcode to its lowering, and the forms to document.

The documentation of coverage is generated from `FORMS`.
"""

from __future__ import annotations

from collections.abc import Callable

from sandbox.devices.cpu.kernel import Kernel
from sandbox.devices.cpu.ptx_ast import Instr

Handler = Callable[[Kernel, Instr], None]
HANDLERS: dict[str, Handler] = {}
FORMS: dict[str, str] = {}


def lowers(opcode: str, form: str) -> Callable[[Handler], Handler]:
    """Register a lowering for an opcode's first part."""

    def register(function: Handler) -> Handler:
        HANDLERS[opcode] = function
        FORMS[opcode] = form
        return function

    return register
