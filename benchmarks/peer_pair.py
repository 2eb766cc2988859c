"""A seed of a target on two GPUs, with buffers of its own: compared with the reference, and timed in chains.

It does not judge: one step is compared, states are not followed, and nothing is adversarial.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from peer_common import CHAIN, REPEATS, SEED


class Pair:
    """Memory of both ranks, loaded and prepared."""

    def __init__(self, device: Any, artifact: Any, workload: Any, reference: Any) -> None:
        import torch

        from sandbox.judge.dtypes import TORCH

        self.device, self.artifact, self.w, self.reference = device, artifact, workload, reference
        self.program = device.load(artifact)
        self.memory = {
            b.name: torch.zeros(b.shape, dtype=TORCH[b.dtype], device=device.device_of(b.rank))
            for b in artifact.buffers
        }
        made = {
            **reference.weights(workload, SEED, "cuda"),
            **reference.states(workload, SEED, "cuda"),
        }
        self.fill(made)
        if artifact.prepare is not None:
            self.program.bind("prepare", self.memory).launch()
        device.synchronize()
        self.step = self.program.bind("step", self.memory)

    def fill(self, tensors: Mapping[str, Any]) -> None:
        for name, value in tensors.items():
            self.memory[name].copy_(value)

    def compare(self) -> dict[str, Any]:
        """One step against the oracle: the largest relative distance, and whether ranks agree bit for bit."""
        import torch

        inputs = self.reference.inputs(self.w, SEED, 0, "cuda")
        self.fill(inputs)
        groups = ("weights", "states")
        given = {
            b.name: self.memory[b.name].to("cuda:0").clone()
            for b in self.w.buffers
            if b.group in groups
        }
        self.device.synchronize()
        self.step.launch()
        self.device.synchronize()
        ids = self.memory.get("outputs.ids")
        forced = None if ids is None else {"outputs.ids": ids.clone()}
        expected = self.reference.run(self.w, {**given, **inputs}, "oracle", forced)
        worst = 0.0
        for name, want in expected.tensors.items():
            if want.dtype.is_floating_point:
                got, want = self.memory[name].to("cuda:0").double(), want.double()
                mask = expected.masks.get(name)
                got, want = (got, want) if mask is None else (got[mask], want[mask])
                worst = max(worst, float((got - want).norm() / want.norm().clamp(min=1e-9)))
        same = all(
            torch.equal(self.memory[n].cpu(), self.memory[f"{n}@1"].cpu())
            for n in self.reference.replicated(self.w)
        )
        return {"rel": worst, "ranks_equal": same}

    def times(self) -> dict[str, Any]:
        """Microseconds of a step of a chain: recorded as graphs, and enqueued launch by launch behind the gate."""

        def chain() -> None:
            for _ in range(CHAIN):
                self.step.launch()

        chain()
        self.device.synchronize()
        queued = [self.device.time(chain) / CHAIN for _ in range(REPEATS)]
        graph = self.device.record(chain, CHAIN)
        for _ in range(3):
            graph.launch()
        self.device.synchronize()
        found = sorted(self.device.time(graph.launch) / CHAIN for _ in range(REPEATS))
        return {
            "step_us": median(found), "least_us": found[0], "most_us": found[-1], "queued_us": median(queued),
            "apart": self.device.apart(),
        }  # fmt: skip
