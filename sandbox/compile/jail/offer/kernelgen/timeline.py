"""Marks at phase boundaries inside a kernel: from here on this thread's block is in phase NAME (of layer LAYER).

In a normal build (`cfg.timeline` false) everything here is None and nothing is compiled. In an instrumented build one
thread of each track writes a row a mark: phase, layer, clocks; the judge turns the rows into a waterfall. A mark is two
plain stores; it takes part in no synchronisation and changes no result.

    phases = timeline.buffer(t, cfg)                                   # in step(): pass it to the kernel
    track = timeline.track(phases, cta, tid == 0)                      # in the kernel, once per track
    timeline.mark(track, "in_proj", layer)                             # work: bytes are moved, sums are made
    timeline.mark(track, "edge 1", layer, kind="edge")                 # waiting until every block has arrived
    timeline.mark(track, "ring full", layer, kind="wait")              # waiting for a flag or an mbarrier
    timeline.end(track)                                                # the last phase is over
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

TRACKS, ROWS = 1024, 2048
NAMES_BYTES = 16384
KINDS = ("work", "edge", "wait", "end")
_phases: list[tuple[str, str]] = []


class Track(NamedTuple):
    """Rows of one block and role, at `base`. count[slot]: rows so far, in shared memory; lead: this thread writes."""

    base: Any
    count: Any
    slot: Any
    lead: Any


def buffer(t: Any, cfg: Any) -> Any:
    """The tensor that kernels write marks to, or None in a normal build."""
    return t.workspace.timeline if cfg.timeline else None


def track(phases: Any, number: Any, lead: Any) -> Any:
    """Track `number` (a block's index; further roles take numbers from the grid's size on), written where `lead`.

    One call for all threads of a block; a warp has at most one leading thread.
    """
    return None if phases is None else _open(phases, Int32(number), cutlass.Boolean(lead))


def mark(track: Any, name: str, layer: Any = 0, kind: str = "work") -> None:
    """The phase before ends here, `name` begins. `kind`: work, edge (all blocks meet), wait (a flag or mbarrier)."""
    if track is not None:
        _mark(track, _number(name, kind), Int32(layer))


def end(track: Any) -> None:
    """The last phase ends here."""
    if track is not None:
        _mark(track, _number("end", "end"), Int32(0))


def names() -> bytes:
    """The phases that were marked while tracing, for the artifact: JSON padded to a fixed size."""
    text = json.dumps([list(p) for p in _phases]).encode()
    if len(text) > NAMES_BYTES:
        raise ValueError(f"the names of {len(_phases)} phases are longer than {NAMES_BYTES} bytes")
    return text.ljust(NAMES_BYTES)


def _number(name: str, kind: str) -> int:
    if kind not in KINDS:
        raise ValueError(
            f"the kind of phase {name!r} is {kind!r}, it must be one of {', '.join(KINDS[:3])}"
        )
    if (name, kind) not in _phases:
        _phases.append((name, kind))
    return _phases.index((name, kind)) + 1


@cute.jit
def _open(phases: cute.Tensor, number: Int32, lead: cutlass.Boolean):  # type: ignore[no-untyped-def]
    count = cutlass.memory.SmemAllocator().allocate_tensor(
        Int32, cute.make_layout((32,)), byte_alignment=16
    )
    tid, _, _ = cute.arch.thread_idx()
    slot = tid // 32 % 32
    inside = lead and number < TRACKS
    base = phases.iterator.toint() + Int64(number) * (16 * ROWS)  # type: ignore[union-attr]
    if inside:
        head = cute.make_ptr(Int32, base, cute.AddressSpace.gmem, assumed_align=16)
        count[slot] = cute.make_tensor(head, cute.make_layout((4,)))[0]
        cute.arch.inline_ptx(
            "st.global.u32 [{$r0}], {$r1};", read_only_args=[base + 8, cute.arch.smid()]
        )
    return Track(base, count, slot, inside)


@cute.jit
def _mark(track: Track, phase: cutlass.Constexpr, layer: Int32):  # type: ignore[no-untyped-def, name-defined]
    if track.lead:
        n = track.count[track.slot] + 1
        if n < ROWS:
            now, ticks = cute.arch.globaltimer(), cute.arch.clock()
            cute.arch.inline_ptx(
                "{ .reg .b64 what; mov.b64 what, {{$r2}, {$r3}}; st.global.v2.b64 [{$r0}], {{$r1}, what}; }",
                read_only_args=[
                    track.base + Int64(n) * 16, now, ticks, Int32(phase) + (layer << 16)
                ],
            )  # fmt: skip
        track.count[track.slot] = n
        cute.arch.inline_ptx("st.global.u32 [{$r0}], {$r1};", read_only_args=[track.base, n])
