"""Capture: run the DSL's host object with recording callbacks in place of the CUDA runtime, on a machine without a GPU.

Tensors are passed as sentinel addresses; what each launch was given is recorded as bytes. Which of those bytes are
addresses is decided outside the box, from two recordings with different sentinels.
"""

from __future__ import annotations

import ctypes as C
import re
import struct
from typing import Any

import llvmlite.binding as llvm

from .errors import Refused
from .trace import PREFIX, Traced

MAX_LAUNCHES = 4096
STREAM = 0x5EED_57AE_A000
SMEM_OPTIN = 232_448
DEVICE_ATTRIBUTES = {97: SMEM_OPTIN, 95: 1, 10: 32, 1: 1024, 81: 233_472, 12: 65_536, 39: 2048}
ATTRIBUTE_BYTES, COOPERATIVE, CLUSTER, PDL = 72, 2, 4, 6
ATTRIBUTE_NAMES = {
    1: "access policy window", 3: "synchronization policy", 5: "cluster scheduling policy", 7: "programmatic event",
    8: "priority", 9: "memory sync domain map", 10: "memory sync domain", 11: "preferred (fallback) cluster",
    12: "launch completion event", 13: "device-updatable node", 14: "preferred shared memory carve-out",
    16: "NVLink utilisation",
}  # fmt: skip
_IGNORED_SYMBOLS = ("_GLOBAL_OFFSET_TABLE_", "")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)", re.S)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[a-z]+(\d+)\b[^\[]*?(?:\[(\d+)\])?\s*$", re.S
)


class Dim3(C.Structure):
    _fields_ = [("x", C.c_uint), ("y", C.c_uint), ("z", C.c_uint)]


class LaunchConfig(C.Structure):
    _fields_ = [
        ("grid", Dim3), ("block", Dim3), ("smem", C.c_size_t), ("stream", C.c_void_p),
        ("attributes", C.c_void_p), ("count", C.c_uint),
    ]  # fmt: skip


class Recording:
    """Launches of one run: [kernel, grid, block, smem, cooperative, pdl, cluster] each, and parameter bytes beside."""

    def __init__(self) -> None:
        self.launches: list[list[Any]] = []
        self.params: list[bytes] = []
        self.refusal: Refused | None = None


class Program:
    """A host object loaded with recording callbacks."""

    def __init__(self, traced: Traced, facts: dict[str, int]) -> None:
        self._traced = traced
        self._device = {**DEVICE_ATTRIBUTES, 16: facts["sms"]}
        self._sizes = param_sizes(traced.ptx)
        self._kernels: list[str] = []
        self._recording = Recording()
        self._keep: list[Any] = []  # callbacks must outlive the code that calls them
        refuse_unknown_symbols(undefined_symbols(traced.object), set(self._callbacks()))
        for symbol, callback in self._callbacks().items():
            self._keep.append(callback)
            llvm.add_symbol(symbol, C.cast(callback, C.c_void_p).value)
        self._engine = _engine(traced.object)
        library, device = C.c_void_p(0), C.c_int(0)
        self._call("cuda_init", C.c_void_p(C.addressof(library)))
        self._call("cuda_load_to_device", C.c_void_p(C.addressof(library)), device)

    def record(self, addresses: list[int], rank: int | None = None) -> Recording:
        """Run the host function once with these tensor addresses, and as that rank of several."""
        self._recording = recording = Recording()
        numbers = [] if rank is None else [C.c_int32(rank)]
        self._call(self._traced.function, *map(C.c_void_p, addresses), *numbers, C.c_void_p(STREAM))
        return recording

    def _call(self, function: str, *values: Any) -> None:
        status = C.c_int(-1)
        pointers = [C.addressof(v) for v in values] + [C.addressof(status)]
        packed = (C.c_void_p * len(pointers))(*pointers)
        address = self._engine.get_function_address(f"_mlir_{PREFIX}_{function}")
        if not address:
            raise Refused(
                "plan_error", "host-object", f"the host object has no function {function[:100]}"
            )
        C.CFUNCTYPE(None, C.c_void_p)(address)(C.addressof(packed))
        if self._recording.refusal:
            raise self._recording.refusal
        if status.value != 0:
            raise Refused(
                "plan_error", "host-object", f"the host function ended with status {status.value}"
            )

    def _callbacks(self) -> dict[str, Any]:
        pointer, integer = C.c_void_p, C.c_int
        return {
            "_cudaLibraryLoadData": C.CFUNCTYPE(integer, *[pointer] * 8)(self._load),
            "_cudaLibraryGetKernel": C.CFUNCTYPE(integer, pointer, pointer, C.c_char_p)(
                self._get_kernel
            ),
            "_cudaLaunchKernelEx": C.CFUNCTYPE(
                integer, C.POINTER(LaunchConfig), pointer, C.POINTER(pointer)
            )(self._launch),
            "_cudaDeviceGetAttribute": C.CFUNCTYPE(integer, pointer, integer, integer)(
                self._device_attribute
            ),
            "_cuKernelGetAttribute": C.CFUNCTYPE(integer, pointer, integer, pointer, integer)(
                self._kernel_attribute
            ),
            "_cudaGetDevice": C.CFUNCTYPE(integer, pointer)(lambda out: _store(out, 0)),
            "_cudaFuncSetAttribute": C.CFUNCTYPE(integer, pointer, integer, integer)(lambda *_: 0),
            "_cudaKernelSetAttributeForDevice": C.CFUNCTYPE(
                integer, pointer, integer, integer, integer
            )(lambda *_: 0),
        }

    def _load(self, library: int, *_: Any) -> int:
        C.c_void_p.from_address(library).value = 0x1000
        return 0

    def _get_kernel(self, out: int, library: int, name: bytes) -> int:
        self._kernels.append(name.decode("ascii", "replace"))
        C.c_void_p.from_address(out).value = len(self._kernels)
        return 0

    def _device_attribute(self, out: int, attribute: int, device: int) -> int:
        if attribute not in self._device:
            return self._refuse(
                "device-attribute",
                f"the host code asks for device attribute {attribute}; use cfg instead",
            )
        return _store(out, self._device[attribute])

    def _kernel_attribute(self, out: int, attribute: int, kernel: int, device: int) -> int:
        return _store(out, 0)

    def _launch(self, config: Any, kernel: int | None, arguments: Any) -> int:
        try:
            return self._record_launch(config.contents, kernel, arguments)
        except Refused as refused:
            self._recording.refusal = self._recording.refusal or refused
            return 1

    def _record_launch(self, config: LaunchConfig, kernel: int | None, arguments: Any) -> int:
        out = self._recording
        if len(out.launches) >= MAX_LAUNCHES:
            return self._refuse("launches", f"the plan has more than {MAX_LAUNCHES} launches")
        name = self._kernels[kernel - 1] if kernel and kernel <= len(self._kernels) else ""
        if name not in self._sizes:
            return self._refuse(
                "kernel", f"a launch names the kernel {name[:100]!r}, which is not in the PTX"
            )
        if config.stream != STREAM:
            return self._refuse(
                "stream", "a launch does not use `stream`: pass stream=stream to every .launch()"
            )
        attributes = _attributes(config)
        out.launches.append(
            [name, _triple(config.grid), _triple(config.block), config.smem, *attributes]
        )
        sizes = self._sizes[name]
        out.params.append(b"".join(C.string_at(arguments[i], size) for i, size in enumerate(sizes)))
        return 0

    def _refuse(self, rule: str, message: str) -> int:
        self._recording.refusal = self._recording.refusal or Refused("plan_error", rule, message)
        return 1


def param_sizes(ptx: str) -> dict[str, list[int]]:
    """Sizes in bytes of each kernel's parameters."""
    out = {}
    for name, header in _ENTRY.findall(ptx):
        sizes = []
        for piece in filter(str.strip, header.split(",")):
            found = _PARAM.search(piece.strip())
            if not found:
                raise Refused(
                    "plan_error",
                    "parameter",
                    f"kernel {name[:100]} has a parameter of unknown form",
                )
            if int(found[1] or 0) >= 64:
                raise Refused("plan_error", "tensor-map", (
                    "a kernel takes a tensor map (tiled TMA); plans do not carry tensor maps yet: "
                    "use bulk copies (cp_async_bulk_shared_cluster_global) of contiguous tiles instead"
                ))  # fmt: skip
            item = int(found[2]) // 8
            sizes.append(item * int(found[3]) if found[3] else item)
        out[name] = sizes
    return out


def undefined_symbols(data: bytes) -> set[str]:
    """Names that a relocatable ELF64 object expects from outside."""
    sections_at, size, count = (
        *struct.unpack_from("<Q", data, 0x28),
        *struct.unpack_from("<HH", data, 0x3A),
    )
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", data, sections_at + i * size) for i in range(count)
    ]
    out = set()
    for _, kind, _, _, offset, length, link, _, _, entry in headers:
        if kind != 2:  # SHT_SYMTAB
            continue
        names = headers[link][4]
        for at in range(offset, offset + length, entry):
            name, _, _, section = struct.unpack_from("<IBBH", data, at)
            if section == 0:
                start = names + name
                out.add(data[start : data.index(b"\0", start)].decode("ascii", "replace"))
    return out.difference(_IGNORED_SYMBOLS)


def refuse_unknown_symbols(wanted: set[str], known: set[str]) -> None:
    """An unbound symbol would end the process inside LLVM; say what it means instead."""
    odd = sorted(wanted - known)
    if odd:
        what = "tensor maps (tiled TMA) are not supported: use bulk copies" if any("ensorMap" in s for s in odd) else (
            "host code of a candidate may only launch kernels"
        )  # fmt: skip
        raise Refused(
            "plan_error", "host-call", f"the host code calls {', '.join(odd)[:200]}; {what}"
        )


def _attributes(config: LaunchConfig) -> list[Any]:
    cooperative = pdl = False
    cluster = None
    for i in range(config.count):
        at = config.attributes + i * ATTRIBUTE_BYTES
        kind = C.c_uint.from_address(at).value
        value = [C.c_uint.from_address(at + 8 + 4 * j).value for j in range(3)]
        if kind == COOPERATIVE:
            cooperative = value[0] != 0
        elif kind == PDL:
            pdl = value[0] != 0
        elif kind == CLUSTER:
            cluster = value
        elif kind != 0:
            name = ATTRIBUTE_NAMES.get(kind, "unknown")
            raise Refused(
                "plan_error",
                "launch-attribute",
                f"a launch sets attribute {kind} ({name}), which plans do not carry",
            )
    return [cooperative, pdl, cluster]


def _triple(dim: Dim3) -> list[int]:
    return [dim.x, dim.y, dim.z]


def _store(address: int, value: int) -> int:
    C.c_int.from_address(address).value = value
    return 0


def _engine(data: bytes) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        codemodel="large", reloc="pic"
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    return engine
