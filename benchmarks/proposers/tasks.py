"""The fixed set of small targets that proposers are compared on. Never changed in place: add a set under a new name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One run's workload. `preset` by device: sizes that the cpu device runs, and those of a rank on cuda."""

    name: str
    target: str
    layers: int
    rows: int

    def options(self, device: str) -> list[str]:
        preset = "tiny" if device == "cpu" else "tp8"
        found = [
            "--target",
            self.target,
            "--preset",
            preset,
            "--rows",
            str(self.rows),
            "--device",
            device,
        ]
        return [*found, "--layers", str(self.layers)]


SETS = {
    "small-1": (
        Task("attn-res", "kimi-k3-attn-res", 1, 1),
        Task("router", "kimi-k3-router", 1, 1),
        Task("kda-step", "kimi-k3-kda", 1, 1),
        Task("gemv", "kimi-k3-gemv", 1, 1),
        Task("latent-moe", "kimi-k3-latent-moe", 1, 1),
    )
}
