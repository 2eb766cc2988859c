"""Ranks: the exchanges by name and width, and two real ranks through them against one rank and against loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from targets.base import Workload
from targets.kimi_k3.maths.precision import SCHEDULES, bf
from targets.kimi_k3.maths.step import Step
from targets.kimi_k3.options import Run, resolve
from targets.kimi_k3.routing import Chooser
from targets.reference import Tensors
from tests.targets.kimi import rel, run, tensors, workload

RANKS = 2
EXCHANGES = {
    "attn": ("all_reduce", "hidden"), "logits": ("all_gather", "experts"), "latent": ("all_gather", "latent"),
    "moe": ("all_reduce", "latent"), "shared": ("reduce_scatter", "hidden"), "delta": ("all_gather", "hidden"),
    "dense": ("all_reduce", "hidden"),
}  # fmt: skip
"""In the order of the step: what is done, over how many columns of all ranks."""


def exchanges(run: Run, n: int) -> list[str]:
    """The names of those of layer n of a stack."""
    p = run.shape
    if p.sizes.ranks == 1:
        return []
    if run.ffn[n] == "D":
        return ["attn", "dense"]
    here = {"dense": False, "logits": p.router_sharded, "latent": p.latent_sharded}
    return [name for name in EXCHANGES if here.get(name, True)]


@dataclass
class Wire:
    """What the ranks put there, by call; every rank makes the same calls in the same order."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(RANKS, timeout=60))
    put: dict[tuple[int, str, int], Tensor] = field(default_factory=dict)

    def all(self, layer: int, name: str, rank: int, value: Tensor) -> list[Tensor]:
        self.put[layer, name, rank] = value
        self.barrier.wait()
        return [self.put[layer, name, r] for r in range(RANKS)]


@dataclass(frozen=True)
class Peer:
    """An exchange with real ranks, here threads: all that a target on several GPUs has to bring."""

    wire: Wire
    layer: int
    rank: int

    def all_reduce(self, name: str, partial: Tensor) -> Tensor:
        first, *rest = self.wire.all(self.layer, name, self.rank, partial)
        for one in rest:
            first = first + one
        return bf(first)

    def all_gather(self, name: str, own: Tensor) -> Tensor:
        return torch.cat(self.wire.all(self.layer, name, self.rank, own), -1)

    def reduce_scatter(
        self, name: str, partial: Tensor, width: int
    ) -> tuple[Tensor, Tensor | None]:
        mine = slice(self.rank * width, (self.rank + 1) * width)
        parts = self.wire.all(self.layer, name, self.rank, partial)
        send = torch.cat([partial[:, : mine.start], partial[:, mine.stop :]], -1)
        return bf(sum(p[:, mine] for p in parts)), send  # type: ignore[arg-type]


def share(whole: Workload, t: Tensors, rank: int) -> Tensors:
    """Weights, states and inputs of one of two ranks, cut from one rank's."""
    d, v = whole.dims, dict(t)
    heads = int(d["kda_heads"])

    def half(name: str, dim: int, parts: int = 1) -> None:
        """Each of `parts` equal pieces along `dim` is cut by itself."""
        v[name] = torch.cat([p.chunk(RANKS, dim)[rank] for p in v[name].chunk(parts, dim)], dim)

    for n, (attn, kind) in enumerate(zip(str(d["attn"]), str(d["ffn"]), strict=True)):
        w, s = f"weights.layers.{n}.", f"states.layers.{n}."
        half(f"{w}o_proj", 1)
        if attn == "K":
            wide, rank_f = int(d["kda_dim"]), int(d["f_rank"])
            rows = v[f"{w}in_proj"].split([4 * wide, rank_f, heads, 14])
            qkvg = torch.cat([p.chunk(RANKS)[rank] for p in rows[0].chunk(4)])
            b = rows[2].chunk(RANKS)[rank]
            live = torch.cat([qkvg, rows[1], b])
            v[f"{w}in_proj"] = torch.nn.functional.pad(live, (0, 0, 0, -live.shape[0] % 16))
            half(f"{w}conv", 0, 3), half(f"{s}conv", 2, 3), half(f"{s}S", 1)
            for name in ("f_b", "dt_bias", "A_log"):
                half(f"{w}{name}", 0)
        else:
            for name in ("q_b", "w_uk", "w_uv"):
                half(f"{w}{name}", 0)
            gate = int(d["mla_dim"])
            a = v[f"{w}a_proj"]
            v[f"{w}a_proj"] = torch.cat([a[:-gate], a[-gate:].chunk(RANKS)[rank]])
        if kind == "D":
            half(f"{w}dense_gate_up", 0, 2), half(f"{w}dense_down", 1)
            continue
        for name in ("w1", "w3", "w1_scale", "w3_scale"):
            half(f"{w}{name}", 1)
        (
            half(f"{w}w2", 2),
            half(f"{w}w2_scale", 2),
            half(f"{w}latent_down", 0),
            half(f"{w}latent_up", 0),
        )
        half(f"{w}shared_gate_up", 0, 2), half(f"{w}shared_down", 1)
    return v


def together(w: Workload, parts: list[Tensors], ids: Tensor) -> tuple[list[Step], Wire]:
    """All ranks in lockstep, oracle precision, experts as told."""
    wire, run_ = Wire(), resolve("decode", w.options)
    steps = [Step(run_, t, SCHEDULES["oracle"], Chooser(4, ids)) for t in parts]
    failed: list[BaseException] = []

    def go(step: Step) -> None:
        try:
            with torch.no_grad():
                step.decode()
        except BaseException as error:  # told below, in the test's own thread
            failed.append(error)
            wire.barrier.abort()

    def peers(rank: int) -> Callable[[int], Peer]:
        return lambda n: Peer(wire, n, rank)

    for rank, step in enumerate(steps):
        step.peers = peers(rank)
    threads = [threading.Thread(target=go, args=(s,)) for s in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    return steps, wire


def test_two_ranks_make_the_whole_model_and_loopback_makes_one_of_them() -> None:
    whole, split = workload("decode", rows=2), workload("decode", "tiny-tp2", rows=2)
    t = tensors(whole)
    expected = run(whole, t).tensors
    parts = [share(whole, t, rank) for rank in range(RANKS)]
    steps, wire = together(split, parts, expected["outputs.ids"])
    a, b = (s.out for s in steps)
    for name in ("outputs.out", "outputs.prefix", "outputs.bank"):
        assert torch.equal(a[name], b[name]), "ranks hold the same bits"
        assert rel(a[name], expected[name]) < 0.03
    assert (
        rel(
            torch.cat([a["states.layers.0.S"], b["states.layers.0.S"]], 1),
            expected["states.layers.0.S"],
        )
        < 1e-4
    )

    names = {(n, name) for n, name, _ in wire.put}
    run_ = resolve("decode", split.options)
    assert names == {(n, name) for n in range(6) for name in exchanges(run_, n)}
    alone = {k: v for k, v in parts[0].items()}
    width = int(split.dims["hidden_local"])
    for n, name in names:
        other = wire.put[n, name, 1]
        other = other[:, :width] if name == "shared" else other
        buffer = next(x for x in split.buffers if x.name == f"inputs.remote.layers.{n}.{name}")
        alone[buffer.name] = other.to(torch.float32 if buffer.dtype == "f32" else torch.bfloat16)
        assert tuple(alone[buffer.name].shape) == buffer.shape
    got = run(split, alone, ids=expected["outputs.ids"])
    for name, value in got.tensors.items():
        if name != "outputs.ids":
            assert torch.equal(value, a[name].to(value.dtype)), name


@pytest.mark.parametrize("preset, first", [("tp8", 0), ("tp16", 12)])
@pytest.mark.parametrize("router", ["replicated", "sharded"])
@pytest.mark.parametrize("latent_down", ["replicated", "sharded"])
def test_every_exchange_has_its_buffer(
    preset: str, first: int, router: str, latent_down: str
) -> None:
    """inputs.remote holds what the table says, of the right width, for each variant."""
    extra = {"first": first, "router": router, "latent_down": latent_down}
    w = workload("decode", preset, rows=2, extra=extra)
    run_ = resolve("decode", w.options)
    ranks = w.ranks
    for n in range(w.layers):
        found = {
            b.name.rsplit(".", 1)[1]: b
            for b in w.buffers
            if b.name.startswith(f"inputs.remote.layers.{n}.")
        }
        assert sorted(found, key=list(EXCHANGES).index) == exchanges(run_, n)
        for name, buffer in found.items():
            operation, width = EXCHANGES[name]
            columns = int(getattr(run_.shape.sizes, width))
            share = {
                "all_reduce": columns,
                "all_gather": columns - columns // ranks,
                "reduce_scatter": columns // ranks,
            }
            assert buffer.shape == (2, share[operation])


def test_a_rank_alone_exchanges_nothing() -> None:
    w = workload("decode")
    assert exchanges(resolve("decode", w.options), 0) == []
    assert not [b.name for b in w.buffers if b.name.startswith("inputs.remote.")]
