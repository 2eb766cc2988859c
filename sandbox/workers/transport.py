"""What a cluster must offer to carry workers: nodes, workers on them, calls of bytes, blobs by reference.

`sandbox.workers.ray_cluster` does it on Ray, `sandbox.workers.fake_cluster` with threads of this process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from sandbox.workers.places import Node, Post

Fetch = Callable[[str], bytes]
"""The blob of that hash, fetched from wherever it lies. Raises KeyError, or what the cluster raises."""


class Lost(Exception):
    """The worker, its node, or the way to it is gone; nothing is known of what it was doing."""


class StationFailed(Exception):
    """The worker is there, and its own code failed: a defect of ours or of its machine."""


@dataclass(frozen=True)
class Call:
    """`blobs`: tokens of `Cluster.put`, by content hash; the worker fetches those that it lacks."""

    method: str
    header: bytes = b""
    blobs: Mapping[str, Any] = field(default_factory=dict)


class Worker(Protocol):
    def call(self, call: Call) -> Future[bytes]:
        """Start a call. The future raises Lost or StationFailed."""
        ...

    def kill(self) -> None:
        """End it now, whatever it does. Harmless when repeated."""
        ...


class Cluster(Protocol):
    def nodes(self) -> list[Node]:
        """Those that are alive. Raises Lost when the cluster itself is gone."""
        ...

    def hire(self, post: Post, setup: str) -> Worker:
        """Start a worker; its first answer may take long. Raises Lost."""
        ...

    def put(self, data: bytes) -> Any:
        """A token for a blob; it lives as long as somebody holds the token. Raises Lost."""
        ...

    def close(self) -> None: ...
