"""Kernels of public libraries as replacements of a piece of the mix: tried where they can be imported, else noted.

A library's kernel replaces ours only if it gives the same values and is faster on this device, both in a CUDA graph.
Whatever comes of it is a note, which reports show. No adapter is written for FlashInfer's paged MLA, whose plan is made
on the host from lengths that every step changes, and for vLLM's fused MoE, which wants 4-bit weights in another layout.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from targets.kimi_k3.maths.layer import Layer
from targets.kimi_k3.sizes import EPS, GATE_LOWER_BOUND

T = TypeVar("T")
Launch = Callable[[], None]
Clock = Callable[[Sequence[Launch]], float]
Norm = Callable[[Tensor, Tensor, Tensor], None]
"""out = bf(RMS(x; weight)), rows of x contiguous."""
SAME = 0.02
TRIES = 20
FLUSH = 128 << 20
"""Bytes written to empty an L2."""


def quack_norm() -> Norm:
    f = importlib.import_module("quack.rmsnorm").rmsnorm

    def norm(x: Tensor, weight: Tensor, out: Tensor) -> None:
        out.copy_(f(x, weight, eps=EPS))

    return norm


def flashinfer_norm() -> Norm:
    f = importlib.import_module("flashinfer.norm").rmsnorm

    def norm(x: Tensor, weight: Tensor, out: Tensor) -> None:
        f(x, weight, eps=EPS, out=out)

    return norm


def vllm_norm() -> Norm:
    f = importlib.import_module("vllm._custom_ops").rms_norm

    def norm(x: Tensor, weight: Tensor, out: Tensor) -> None:
        f(out, x, weight, EPS)

    return norm


NORMS: dict[str, Callable[[], Norm]] = {
    "quack": quack_norm, "flashinfer": flashinfer_norm, "vllm": vllm_norm,
}  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """Two ways to make `out`. `what` names the library and the piece; `reset` puts back what the launches change."""

    what: str
    ours: list[Launch]
    theirs: list[Launch]
    out: Tensor
    reset: Launch = lambda: None
    least: float = 1.0
    """The part of our time that theirs may take: below 1 where they break the chain of programmatic launches."""


@dataclass
class Shelf:
    """Looks the libraries up once and keeps what came of each."""

    timed: Callable[[Sequence[Launch]], float]
    notes: dict[str, str] = field(default_factory=dict)
    _norms: dict[str, Norm] | None = None

    def norms(self) -> dict[str, Norm]:
        if self._norms is None:
            self._norms = {}
            for name, find in NORMS.items():
                made = self._found(name, find)
                if made is not None:
                    self._norms[name] = made
        return self._norms

    def fla(self) -> Any | None:
        """flash-linear-attention's recurrent KDA."""
        if "fla-core" in self.notes:
            return None
        return self._found(
            "fla-core", lambda: importlib.import_module("fla.ops.kda").fused_recurrent_kda
        )

    def _found(self, name: str, find: Callable[[], Any]) -> Any | None:
        try:
            return find()
        except ImportError as error:
            self.notes[name] = f"skipped: {str(error)[:120]}"
        except Exception as error:  # foreign code at import: whatever it raises, ours is used
            self.notes[name] = f"skipped: {type(error).__name__}: {str(error)[:120]}"
        return None

    def better(self, trial: Trial, timed: Clock | None = None) -> list[Launch]:
        """`theirs` if it leaves the same in `out` in less time than `ours`, by `timed` or the shelf's own clock."""
        clock = timed or self.timed
        try:
            values = []
            for launches in (trial.ours, trial.theirs):
                trial.reset()
                for launch in launches:
                    launch()
                values.append(trial.out.double())
            error = float((values[1] - values[0]).norm() / values[0].norm())
            if not error < SAME:
                self.notes[trial.what] = f"skipped: differs from ours by {error:.3g}"
                return trial.ours
            mine, other = clock(trial.ours), clock(trial.theirs)
        except Exception as error:  # foreign code: whatever it raises, ours is used
            self.notes[trial.what] = f"skipped: {type(error).__name__}: {str(error)[:120]}"
            return trial.ours
        finally:
            trial.reset()
        used = other < trial.least * mine
        said = "used" if used else "not fast enough" if other < mine else "slower"
        self.notes[trial.what] = f"{said}: {other:.2f} us, ours {mine:.2f} us"
        return trial.theirs if used else trial.ours

    def fastest(
        self, options: Mapping[str, T], made: Callable[[T], list[Launch]], to: tuple[Tensor, Clock]
    ) -> T:
        """Which of the options, by name, leaves `to`'s tensor in the least time by its clock."""
        out, timed = to
        (_, best), *others = options.items()
        launches = made(best)
        for name, option in others:
            theirs = made(option)
            if self.better(Trial(name, launches, theirs, out), timed) is theirs:
                best, launches = option, theirs
        return best


def fla_update(f: Any, layer: Layer, given: tuple[Tensor, Tensor, Tensor]) -> Launch:
    """The recurrent update with the library's kernel: given = (projection, slots, out). Its state is [K, V]: copied."""
    y, slots, out = given
    w, state = layer.weights, layer.states
    heads, dim = w["A_log"].shape[0], w["o_norm"].shape[0]
    d, rank = heads * dim, w["f_b"].shape[1]
    rate, taps = torch.exp(w["A_log"]).unsqueeze(-1), w["conv"].T.contiguous()

    def launch() -> None:
        live, index = (slots > 0).view(-1, 1, 1), slots.clamp(min=0).long()
        qkv, g, f_a, b = y.split([3 * d, d, rank, y.shape[1] - 4 * d - rank], -1)
        old = state["conv"].index_select(0, index)
        window = torch.cat([old, qkv.unsqueeze(1)], 1)
        u = torch.nn.functional.silu((window.float() * taps).sum(1)).view(-1, 1, 3, heads, dim)
        arg = (f_a @ w["f_b"].T + w["dt_bias"]).view(-1, 1, heads, dim) * rate
        before = state["S"].index_select(0, index)
        o, after = f(
            q=u[:, :, 0], k=u[:, :, 1], v=u[:, :, 2], g=GATE_LOWER_BOUND * torch.sigmoid(arg),
            beta=torch.sigmoid(b[:, :heads].float()).view(-1, 1, heads), scale=dim**-0.5,
            initial_state=before.transpose(-1, -2).contiguous(), output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        o = o.float().view(-1, heads, dim)
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + EPS) * w["o_norm"]
        o = o * torch.sigmoid(g.float()).view(-1, heads, dim) * live
        out.copy_(o.reshape(out.shape))
        state["conv"].index_copy_(0, index, torch.where(live, window[:, 1:], old))
        new = torch.where(live.unsqueeze(-1), after.transpose(-1, -2), before)
        state["S"].index_copy_(0, index, new)

    return launch


def graph_us(launches: Sequence[Launch]) -> float:
    """Microseconds of the launches in a CUDA graph, the mean of some in a row."""
    graph: Any = torch.cuda.CUDAGraph()
    stream: Any = torch.cuda.current_stream()
    if stream == torch.cuda.default_stream():  # it cannot be captured
        stream = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(TRIES):
            for launch in launches:
                launch()
    make: Any = torch.cuda.Event
    begin, end = make(enable_timing=True), make(enable_timing=True)
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / TRIES


class Cold:
    """The same for launches that find nothing of theirs in L2: what fills the L2 between is measured, once, and taken
    off."""

    def __init__(self) -> None:
        self._wide: Tensor | None = None
        self._fill_us = 0.0

    def __call__(self, launches: Sequence[Launch]) -> float:
        first = self._wide is None
        if self._wide is None:
            self._wide = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")
        fill: list[Any] = [self._wide.zero_]
        if first:
            self._fill_us = graph_us(fill)
        return graph_us([*fill, *launches]) - self._fill_us
