"""Whether chains of steps from the same states leave the same bits on two GPUs, and if not, what differs where.

Words with the number of a step in their lower half (inboxes) are compared by their upper half. It does not say which is
right, and counters and numbers of steps, which go on, are left out.
"""

from __future__ import annotations

from typing import Any

from peer_common import SEED

LEFT_OUT = ("sync", "epochs", "weigh")
NUMBERED = ("inbox",)


def repeated(pair: Any, steps: int, chains: int) -> dict[str, Any]:
    """`chains` graphs of `steps` steps, each from the states that the first began with."""
    pair.fill(pair.reference.inputs(pair.w, SEED, 0, "cuda"))
    start = {n: t.clone() for n, t in pair.memory.items() if n.startswith("states.")}

    def chain() -> None:
        for _ in range(steps):
            pair.step.launch()

    chain()
    pair.device.synchronize()
    graph = pair.device.record(chain, steps)
    first: dict[str, Any] = {}
    odd: dict[str, dict[str, Any]] = {}
    for number in range(chains):
        for name, value in start.items():
            pair.memory[name].copy_(value)
        pair.device.synchronize()
        pair.device.time(graph.launch)
        left = _left(pair)
        if number == 0:
            first = left
        for name in _differ(first, left):
            _note(odd, name, number, (first[name] != left[name]).flatten().nonzero().flatten())
    return {"steps": steps, "chains": chains, "odd": odd}


def _left(pair: Any) -> dict[str, Any]:
    """Bits of what a chain may write, on the host."""
    import torch

    found = {}
    for b in pair.artifact.buffers:
        last = b.name.split("@")[0].rsplit(".", 1)[-1]
        if b.group in ("outputs", "states", "workspace") and last not in LEFT_OUT:
            bits = pair.memory[b.name].contiguous().flatten().view(torch.uint8).cpu()
            if last in NUMBERED:
                bits = bits.view(-1, 4)[:, 2:].contiguous()
            found[b.name] = bits.view(torch.int16)
    return found


def _differ(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [n for n in a if not a[n].equal(b[n])]


def _note(odd: dict[str, dict[str, Any]], name: str, number: int, where: Any) -> None:
    """Halves of words that differ: in how many chains, in which first, the first of them, the last and how many."""
    entry = odd.setdefault(name, {"chains": 0, "first_chain": number, "where": []})
    entry["chains"] += 1
    if len(entry["where"]) < 4:
        entry["where"].append([int(where[0]), int(where[-1]), int(where.numel())])
