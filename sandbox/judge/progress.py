"""Where a judging child is, in shared memory that its parent can read when the child hangs or dies.

The child says which phase it is in and whether kernels are in flight; the parent only reads. A child that lies harms
its own verdict and nothing else.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sandbox import strict
from sandbox.artifact import Artifact, PlanName
from sandbox.devices.base import Bound, Device, DeviceFacts, Faulted, Program
from sandbox.judge import liveness
from sandbox.strict import Malformed
from sandbox.verdict import Failure, Status

if TYPE_CHECKING:
    import torch

_LAYOUT = struct.Struct("<QQ32s")
_NOTE_AT, _NOTE_MOST = 1024, 3000
_NOTE = struct.Struct("<I")
_ALREADY_REGISTERED = 712
_ROWS_AT, _ROWS = 512, struct.Struct("<I")


class Progress:
    """In anonymous shared memory: whether kernels are in flight, launches so far, and the name of the phase."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE + liveness.MOST_BYTES)
        self._in_flight = False
        self._launches = 0
        self._phase = b""
        self.result_fd = -1
        """In the child: where its result goes, the one descriptor that it must keep."""
        self.enter("start")

    def enter(self, phase: str) -> None:
        """Say what happens now; names longer than 32 ASCII characters are cut."""
        self._phase = phase.encode("ascii", "replace")[:32]
        self._write()

    def launching(self) -> None:
        self._in_flight = True
        self._launches += 1
        self._write()

    def landed(self) -> None:
        """All launches are known to have ended."""
        self._in_flight = False
        self._write()

    def read(self) -> tuple[str, bool, int]:
        """Phase, whether kernels are in flight, launches so far."""
        in_flight, launches, phase = _LAYOUT.unpack_from(self._memory, 0)
        text = phase.rstrip(b"\0").decode("ascii", "replace")
        return "".join(c for c in text if c.isprintable()), bool(in_flight), launches

    def confined(self, isolation: Mapping[str, Any]) -> None:
        """What the child has given up, for verdicts of children that end without one."""
        data = json.dumps(isolation).encode()
        if len(data) <= _NOTE_MOST:
            self._memory[_NOTE_AT + _NOTE.size : _NOTE_AT + _NOTE.size + len(data)] = data
            _NOTE.pack_into(self._memory, _NOTE_AT, len(data))

    def isolation(self) -> dict[str, Any]:
        """What `confined` was told; empty where nothing sensible stands there."""
        (size,) = _NOTE.unpack_from(self._memory, _NOTE_AT)
        if not 0 < size <= _NOTE_MOST:
            return {}
        try:
            found = strict.parse(
                self._memory[_NOTE_AT + _NOTE.size : _NOTE_AT + _NOTE.size + size],
                "isolation",
                _NOTE_MOST,
            )
        except Malformed:
            return {}
        return found if isinstance(found, dict) else {}

    def kernel_words(self, rows: int) -> memoryview:
        """Shared memory for the words of a kernel: rows of liveness.COLUMNS 32-bit words."""
        _ROWS.pack_into(self._memory, _ROWS_AT, rows)
        size = 4 * liveness.COLUMNS * rows
        return memoryview(self._memory)[mmap.PAGESIZE : mmap.PAGESIZE + size]

    def kernel_rows(self) -> list[tuple[int, ...]]:
        """What stands there now; empty where no kernel was given a place."""
        (rows,) = _ROWS.unpack_from(self._memory, _ROWS_AT)
        if not 0 < rows <= liveness.MOST_BYTES // (4 * liveness.COLUMNS):
            return []
        row = struct.Struct(f"<{liveness.COLUMNS}i")
        return [row.unpack_from(self._memory, mmap.PAGESIZE + i * row.size) for i in range(rows)]

    def close(self) -> None:
        with suppress(
            BufferError
        ):  # a tensor over it may still be there; the memory goes with the process
            self._memory.close()

    def _write(self) -> None:
        _LAYOUT.pack_into(self._memory, 0, self._in_flight, self._launches, self._phase)


class WatchedBound:
    """A `Bound` that notes its launches. On cpu a launch ends before it returns."""

    def __init__(self, inner: Bound, progress: Progress, synchronous: bool) -> None:
        self._inner, self._progress, self._synchronous = inner, progress, synchronous
        self.launches = inner.launches

    def launch(self) -> None:
        self._progress.launching()
        self._inner.launch()
        if self._synchronous:
            self._progress.landed()

    def capture(self) -> WatchedBound:
        return WatchedBound(self._inner.capture(), self._progress, self._synchronous)

    def modelled_us(self) -> float | None:
        return self._inner.modelled_us()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class WatchedProgram:
    """A `Program` whose bound plans note their launches."""

    def __init__(self, inner: Program, progress: Progress, synchronous: bool) -> None:
        self._inner, self._progress, self._synchronous = inner, progress, synchronous
        self.resources = inner.resources

    def bind(
        self,
        plan: PlanName,
        buffers: Mapping[str, torch.Tensor],
        undefined: frozenset[str] = frozenset(),
    ) -> WatchedBound:
        bound = self._inner.bind(plan, buffers, undefined)
        return WatchedBound(bound, self._progress, self._synchronous)

    def findings(self) -> tuple[Failure, ...]:
        return self._inner.findings()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class WatchedDevice:
    """A `Device` that keeps `progress` up to date; all else is the inner device's."""

    def __init__(self, inner: Device, progress: Progress) -> None:
        self.inner, self._progress = inner, progress
        self.kind, self.torch_device = inner.kind, inner.torch_device

    def facts(self) -> DeviceFacts:
        return self.inner.facts()

    def load(self, artifact: Artifact) -> WatchedProgram:
        return WatchedProgram(self.inner.load(artifact), self._progress, self.inner.kind == "cpu")

    def synchronize(self) -> None:
        """As the device's; a hang is explained by what the kernel wrote on its way, if it did."""
        try:
            self.inner.synchronize()
        except Faulted as end:
            if end.status is not Status.HANG:
                raise
            failure = liveness.explain(end.failure, self._progress.kernel_rows)
            raise Faulted(end.status, failure) from end
        self._progress.landed()

    def kernel_progress(self, rows: int) -> torch.Tensor | None:
        """Host memory for that many rows of progress words, as a tensor of this device, i32; None where it cannot be
        had. Each call starts a table of its own in the same place."""
        if not 0 < rows <= liveness.MOST_BYTES // (4 * liveness.COLUMNS):
            return None
        words = self._progress.kernel_words(rows)
        words[:] = bytes(len(words))
        return host_words(words, rows, self.inner.torch_device)

    def record(self, work: Callable[[], None], launches: int = 0) -> WatchedBound:
        """What is recorded is not in flight."""
        _, before, _ = self._progress.read()
        graph = self.inner.record(work, launches)
        if not before:
            self._progress.landed()
        return WatchedBound(graph, self._progress, self.inner.kind == "cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def host_words(words: memoryview, rows: int, device: str) -> torch.Tensor | None:
    """The memory as an i32 tensor [rows, COLUMNS]; for a GPU pinned and mapped, at its own address."""
    import torch

    plain = torch.frombuffer(words, dtype=torch.int32).view(rows, liveness.COLUMNS)
    if not device.startswith("cuda"):
        return plain
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    size = -(-words.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    code = int(runtime.cudaHostRegister(plain.data_ptr(), size, 2))
    if code not in (0, _ALREADY_REGISTERED):
        return None
    try:
        mapped: torch.Tensor = torch.as_tensor(_Mapped(plain, rows), device=device)
    except (RuntimeError, TypeError, ValueError):
        return None
    return mapped if mapped.data_ptr() == plain.data_ptr() else None


class _Mapped:
    """Memory that the GPU reaches at the host's address, described so that torch takes it as it is."""

    def __init__(self, plain: torch.Tensor, rows: int) -> None:
        self.plain = plain
        self.__cuda_array_interface__ = {
            "shape": (rows, liveness.COLUMNS), "typestr": "<i4", "data": (plain.data_ptr(), False), "version": 3,
            "strides": None,
        }  # fmt: skip
