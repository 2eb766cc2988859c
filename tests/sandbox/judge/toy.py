"""A small target for tests of the judge, its reference, and right kernels for it as Python functions.

Two layers of a recurrent product with slots, a copied output and a top-2 choice:
    h_0 = x;  y_i = bf(h_i W_i^T + s_i[slot]);  s_i[slot] <- 0.5 s_i[slot] + y_i;  h_{i+1} = y_i
    slot <= 0: y_i = 0 and nothing is stored.   ids: the two largest of scores = h_0 G^T, ties to the lower id
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sandbox import artifact_store
from sandbox.artifact import Artifact, Buffer, Launch, LaunchPlan, Relocation
from targets.base import Floor, Options, Workload
from targets.reference import Expected, Tensors, Tie

H, SLOTS, CHOICES, LAYERS = 128, 6, 8, 2
TARGET = f"{Path(__file__)}:Toy"
MARGIN = 1e-4


def buffers(rows: int) -> tuple[Buffer, ...]:
    out = [Buffer("inputs.x", "bf16", (rows, H)), Buffer("inputs.slots", "i32", (rows,))]
    for i in range(LAYERS):
        out.append(Buffer(f"weights.layers.{i}.w", "bf16", (H, H)))
        out.append(Buffer(f"states.layers.{i}.s", "f32", (SLOTS, H)))
    out.append(Buffer("weights.gate", "f32", (CHOICES, H)))
    out.append(Buffer("outputs.y", "bf16", (rows, H)))
    out.append(Buffer("outputs.copy", "bf16", (rows, H)))
    out.append(Buffer("outputs.ids", "i32", (rows, 2)))
    return tuple(out)


@dataclass(frozen=True)
class Toy:
    name: str = TARGET
    summary: str = "toy"
    presets: tuple[str, ...] = ("tiny",)
    reference: str = f"{Path(__file__)}:ToyReference"
    baselines: Mapping[str, str] = field(
        default_factory=lambda: {
            "graph": f"{Path(__file__)}:ToyBaseline",
            "broken": f"{Path(__file__)}:Broken",
            "wrong": f"{Path(__file__)}:WrongBaseline",
        }
    )

    def seed_source(self) -> str:
        return ""

    def workload(self, options: Options) -> Workload:
        all_ = buffers(options.rows)
        moved = sum(b.nbytes for b in all_ if b.group in ("weights", "states"))
        return Workload(
            target=self.name, options=options, layers=LAYERS, rows=options.rows, context=options.context or 1, q=1,
            ranks=1, dims={"rows": options.rows}, buffers=all_, floor=Floor(moved, 0),
        )  # fmt: skip


def _gen(seed: int, *more: int) -> torch.Generator:
    for m in more:
        seed = (seed * 6364136223846793005 + m + 1) % (1 << 62)
    return torch.Generator().manual_seed(seed)


class ToyReference:
    schedules = ("plain", "bf16_products", "reversed")
    axes: Mapping[str, tuple[str, ...]] = {
        "y": ("row", "column"),
        "s": ("slot", "column"),
        "ids": ("row", "rank"),
    }

    def weights(self, w: Workload, seed: int, device: str) -> Tensors:
        out: Tensors = {}
        for i in range(LAYERS):
            out[f"weights.layers.{i}.w"] = (
                torch.randn(H, H, generator=_gen(seed, i)) / H**0.5
            ).bfloat16()
        out["weights.gate"] = torch.randn(CHOICES, H, generator=_gen(seed, 99)) / H**0.5
        return out

    def states(self, w: Workload, seed: int, device: str) -> Tensors:
        return {
            f"states.layers.{i}.s": torch.randn(SLOTS, H, generator=_gen(seed, 7, i))
            for i in range(LAYERS)
        }

    def inputs(self, w: Workload, seed: int, step: int, device: str) -> Tensors:
        g = _gen(seed, 11, step)
        x = torch.randn(w.rows, H, generator=g).bfloat16()
        slots = torch.arange(1, w.rows + 1, dtype=torch.int32)
        if w.rows > 2 and step % 2:
            slots[1] = 0
        return {"inputs.x": x, "inputs.slots": slots}

    def distributions(self, w: Workload) -> tuple[str, ...]:
        return ("large", "zeros", "ties")

    def disturb(self, w: Workload, name: str, seed: int, tensors: Tensors) -> Tensors:
        out = dict(tensors)
        if name == "large":
            out["inputs.x"] = out["inputs.x"] * 30
        elif name == "zeros":
            out["inputs.x"] = torch.zeros_like(out["inputs.x"])
        elif name == "ties":
            gate = out["weights.gate"].clone()
            gate[1:3], gate[4:6] = gate[0], gate[3]
            out["weights.gate"] = gate
        return out

    def run(
        self,
        w: Workload,
        tensors: Tensors,
        schedule: str,
        forced: Mapping[str, torch.Tensor] | None = None,
    ) -> Expected:
        return compute(tensors, schedule)


def compute(t: Mapping[str, torch.Tensor], schedule: str) -> Expected:
    wide = torch.float64 if schedule == "oracle" else torch.float32
    x, slots = t["inputs.x"], t["inputs.slots"].long()
    live = slots > 0
    out: Tensors = {}
    masks = {}
    h = x
    for i in range(LAYERS):
        s = t[f"states.layers.{i}.s"]
        y = product(h, t[f"weights.layers.{i}.w"], schedule, wide) + s[slots].to(wide)
        y = torch.where(live[:, None], y, torch.zeros_like(y))
        rounded = y.bfloat16()
        new = s.clone()
        new[slots[live]] = (0.5 * s[slots[live]].to(wide) + rounded[live].to(wide)).float()
        mask = torch.zeros(SLOTS, 1, dtype=torch.bool)
        mask[slots[live]] = True
        out[f"states.layers.{i}.s"], masks[f"states.layers.{i}.s"] = new, mask
        h = rounded
    out["outputs.y"], out["outputs.copy"] = h, x.clone()
    scores = x.to(wide) @ t["weights.gate"].to(wide).T
    ids, tie = choose(scores)
    out["outputs.ids"] = ids
    return Expected(out, (tie,), masks, frozenset({"outputs.copy"}))


def choose(scores: torch.Tensor) -> tuple[torch.Tensor, Tie]:
    order = scores.sort(dim=1, descending=True, stable=True)
    edge = (order.values[:, 1] - order.values[:, 2]) < MARGIN
    eligible = (scores - order.values[:, 1:2]).abs() < MARGIN
    return order.indices[:, :2].int(), Tie("outputs.ids", edge, eligible)


def product(h: torch.Tensor, w: torch.Tensor, schedule: str, wide: torch.dtype) -> torch.Tensor:
    a, b = h.to(wide), w.to(wide)
    if schedule == "bf16_products":
        half = H // 2
        return (a[:, :half] @ b[:, :half].T).bfloat16().float() + (a[:, half:] @ b[:, half:].T)
    if schedule == "reversed":
        return a.flip(1) @ b.flip(1).T
    return a @ b.T


class ToyBaseline:
    def prepare(self, w: Workload, tensors: Tensors) -> None:
        self.tensors = tensors

    def step(self) -> None:
        right(self.tensors)


class WrongBaseline(ToyBaseline):
    def step(self) -> None:
        right(self.tensors)
        self.tensors["outputs.y"][0] = 0.0


class Broken:
    def prepare(self, w: Workload, tensors: Tensors) -> None:
        raise RuntimeError("no such operator")

    def step(self) -> None:
        """Never reached."""


def right(t: Mapping[str, torch.Tensor]) -> None:
    """The step as a kernel would leave it, in place."""
    e = compute(t, "plain")
    for name, value in e.tensors.items():
        if name.startswith("states"):
            t[name].copy_(torch.where(e.masks[name], value, t[name]))
        else:
            t[name].copy_(value)


def artifact(
    kernels: tuple[str, ...] = ("right",),
    *,
    rows: int = 4,
    prepare: str | None = None,
    workspace: tuple[Buffer, ...] = (),
    ptx: str = "// none",
    **change: Any,
) -> Artifact:
    """An artifact whose launches name Python functions of a FakeDevice."""

    def launches(names: tuple[str, ...], buffer: str) -> tuple[Launch, ...]:
        one = (Relocation(0, buffer),)
        return tuple(Launch(k, (1, 1, 1), (32, 1, 1), bytes(8), (0,), one) for k in names)

    fields: dict[str, Any] = {
        "target": TARGET, "workload": Toy().workload(Options(rows=rows)).key, "arch": "sm_90a",
        "buffers": (*buffers(rows), *workspace), "step": LaunchPlan(ptx, launches(kernels, "outputs.y")),
        "prepare": LaunchPlan(ptx, launches((prepare,), "weights.gate")) if prepare else None,
        "source_sha256": "0" * 64,
    }  # fmt: skip
    return Artifact(**{**fields, **change})


def saved(folder: Path, made: Artifact) -> Path:
    return artifact_store.save(made, folder)
