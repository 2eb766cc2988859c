"""A kernel of ours, compiled and captured before a worker says READY.

The first compile in a process loads passes and lookups that later ones reuse; a waiting worker pays for them while
nobody waits for it. It also shows that compiling works here at all, so that a failure after READY is the candidate's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute

from . import capture, trace
from .signature import Tensor


@cute.kernel
def _kernel(source: cute.Tensor, target: cute.Tensor) -> None:
    tid, _, _ = cute.arch.thread_idx()
    if tid < cute.size(source):
        target[tid] = source[tid] + cutlass.Float32(1.0)


@cute.jit
def _step(t: Any, cfg: Any, stream: Any) -> None:
    _kernel(t.inputs.x, t.outputs.y).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def run() -> None:
    """Compile and capture once. Raises whatever fails, which is then no candidate's fault."""
    used = [(0, Tensor("inputs.x", "f32", (32,))), (1, Tensor("outputs.y", "f32", (32,)))]
    traced = trace.compile_plan(trace.Plan("warmup", _step, used), SimpleNamespace())
    recording = capture.Program(traced, {"sms": 1}).record([1 << 40, 2 << 40])
    if len(recording.launches) != 1:
        raise RuntimeError(f"the warm-up recorded {len(recording.launches)} launches, not 1")
