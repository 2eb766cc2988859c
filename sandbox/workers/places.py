"""Which workers a cluster's nodes get: a pure function from nodes to posts.

A GPU node gets a judge for each of its GPUs (or for so many GPUs as a judge holds); for the device `cpu`, judges and
compile jobs share the processors. Labels keep workers off nodes of another architecture before anything is started
there; what a device really is, its worker says later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sandbox.workers.address import Farm

Role = Literal["compile", "judge"]
ARCH_LABEL = "kernelgen-arch"
ACCELERATOR_LABEL = "ray.io/accelerator-type"
ARCHS = {
    "H100": "sm_90a", "H200": "sm_90a", "GH200": "sm_90a", "B200": "sm_100a", "GB200": "sm_100a",
    "B300": "sm_103a", "GB300": "sm_103a",
}  # fmt: skip
MOST_COMPILES = 8
"""Compile jobs at once on one node: a judge needs the processors too."""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster. Counts are what Ray may give away, in all."""

    id: str
    host: str
    cpus: int
    gpus: int
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def arch(self) -> str | None:
        """By its labels; None if they do not say."""
        given = self.labels.get(ARCH_LABEL)
        return given or ARCHS.get(self.labels.get(ACCELERATOR_LABEL, "").upper())


@dataclass(frozen=True)
class Post:
    """A place for a worker. `slots`: jobs at once; `cpus`, `gpus`: what it holds."""

    role: Role
    node: str
    host: str
    number: int
    slots: int = 1
    cpus: int = 1
    gpus: int = 0

    @property
    def name(self) -> str:
        return f"{self.role}-{self.number}@{self.host}/{self.node[:8]}"


def posts(nodes: Sequence[Node], farm: Farm, device: str, arch: str = "") -> tuple[Post, ...]:
    """Posts on these nodes, in their order. `device`: cuda or cpu; `arch` '' takes any.

    A node's posts do not depend on the other nodes, but for the counts in `farm`.
    """
    judges: list[Post] = []
    compilers: list[Post] = []
    left = farm.compilers
    for node in nodes:
        mine = _judges(node, farm, device, arch)
        judges += mine
        slots = _compiles(node, len(mine), farm)
        if left is not None:
            slots = min(slots, left)
            left -= slots
        if slots:
            compilers.append(Post("compile", node.id, node.host, 0, slots, slots))
    return (*compilers, *judges[: farm.judges])


def _judges(node: Node, farm: Farm, device: str, arch: str) -> list[Post]:
    if device != "cuda":
        count = max(0, node.cpus - _compiles(node, 0, farm))
        return [Post("judge", node.id, node.host, i) for i in range(count)]
    if arch and node.arch and node.arch != arch:
        return []
    count = min(node.gpus // farm.gpus, max(0, node.cpus - 1))
    return [Post("judge", node.id, node.host, i, gpus=farm.gpus) for i in range(count)]


def _compiles(node: Node, judges: int, farm: Farm) -> int:
    """A quarter of the processors, but what the judges leave, and at least one if there is one."""
    free = node.cpus - judges
    wanted = farm.compilers if farm.compilers is not None else max(1, node.cpus // 4)
    return max(0, min(wanted, MOST_COMPILES, free))
