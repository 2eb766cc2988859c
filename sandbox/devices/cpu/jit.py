"""From LLVM IR text to callable machine code, with a cache of object files.

An object is found by the hash of its IR, the LLVM version and this CPU's features. The cache is a folder of
the user's; a file counts only if the hash in its first line fits, and is written under a temporary name
first. Not a defence against someone who can write to that folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import platformdirs

LIBM = ("exp2", "log2", "sin", "cos", "tanh", "fma", "fmaf")


class Code:
    """Linked machine code. Addresses stay valid as long as this object lives."""

    def __init__(self, objects: Sequence[bytes]) -> None:
        _start()
        empty = llvm.parse_assembly("")
        self._engine = llvm.create_mcjit_compiler(empty, _machine(1))
        for data in objects:
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(data))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Raises KeyError: a null address must never be called."""
        found = int(self._engine.get_function_address(name))
        if found == 0:
            raise KeyError(name)
        return found


def cache_folder() -> Path:
    """Where objects are kept: KERNELGEN_CPU_CACHE, or the user's cache folder."""
    chosen = os.environ.get("KERNELGEN_CPU_CACHE")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("kernelgen")) / "cpu"


def compile_ir(text: str, level: int, folder: Path | None = None) -> bytes:
    """Object code of an IR module, from the cache if it is there."""
    _start()
    key = hashlib.sha256(
        f"{llvmlite.__version__}|{level}|{_target_key()}|{text}".encode()
    ).hexdigest()
    path = (folder or cache_folder()) / f"{key}.o"
    data = _read(path)
    if data is None:
        data = _compile(text, level)
        _write(path, data)
    return data


def has_feature(name: str) -> bool:
    """Whether this CPU has a feature, by LLVM's name."""
    return bool(llvm.get_host_cpu_features().get(name, False))


@cache
def _start() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    library = ctypes.CDLL(None)
    for name in LIBM:
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)


@cache
def _target_key() -> str:
    return f"{llvm.get_host_cpu_name()}|{llvm.get_host_cpu_features().flatten()}"


def _machine(level: int) -> llvm.TargetMachine:
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(),
        opt=level, reloc="pic", codemodel="large",
    )  # fmt: skip


def _compile(text: str, level: int) -> bytes:
    module = llvm.parse_assembly(text)
    module.verify()
    machine = _machine(level)
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=level)
    builder = llvm.create_pass_builder(machine, options)
    if level > 1:
        builder.getModulePassManager().run(module, builder)
    else:
        # kernels are long and run briefly: registers out of memory, peepholes, branches, nothing else pays
        passes = llvm.create_new_module_pass_manager()
        passes.add_sroa_pass()
        passes.add_instruction_combine_pass()
        passes.add_simplify_cfg_pass()
        passes.run(module, builder)
    return bytes(machine.emit_object(module))


def _read(path: Path) -> bytes | None:
    try:
        blob = path.read_bytes()
    except OSError:
        return None
    digest, _, data = blob.partition(b"\n")
    if digest.decode("ascii", "replace") != hashlib.sha256(data).hexdigest():
        return None
    return data


def _write(path: Path, data: bytes) -> None:
    """A cache that cannot be written costs time, nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        with os.fdopen(fd, "wb") as file:
            file.write(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
        os.replace(name, path)
    except OSError:
        return
