"""What a device has parsed and translated, so that artifacts with the same PTX (a probe leaves out one launch after the
other) share it.

A module with variables of its own is not shared: they lie in memory that belongs to one program.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sandbox.devices.base import Refused
from sandbox.devices.cpu.ptx_ast import Entry, Module, PtxError
from sandbox.devices.cpu.ptx_parse import parse
from sandbox.devices.cpu.translate import ModuleData, Translated, module_data, translate
from sandbox.verdict import Failure, Status


@dataclass(frozen=True)
class Parsed:
    """A module, its variables, and its kernels as far as they are translated."""

    module: Module
    data: ModuleData
    kernels: dict[str, Translated] = field(default_factory=dict)

    @property
    def has_variables(self) -> bool:
        return any(size for _, size in self.data.ranges.values())

    def kernel(self, entry: Entry, exact: bool) -> Translated:
        """Raises Refused."""
        if entry.name not in self.kernels:
            self.kernels[entry.name] = translate(entry, self.module, self.data, exact)
        return self.kernels[entry.name]


class Shelf:
    """Parsed modules by their text, of one device and so of one mode."""

    def __init__(self) -> None:
        self._kept: dict[str, Parsed] = {}

    def module(self, ptx: str) -> Parsed:
        """Raises Refused."""
        found = self._kept.get(ptx)
        if found is None:
            found = self._kept[ptx] = _parsed(ptx)
            return found
        return Parsed(found.module, module_data(found.module)) if found.has_variables else found


def _parsed(ptx: str) -> Parsed:
    try:
        module = parse(ptx)
    except PtxError as error:
        where = {"ptx_line": error.line}
        raise Refused(Status.COMPILE_ERROR, Failure("ptx-syntax", str(error), where)) from error
    return Parsed(module, module_data(module))
