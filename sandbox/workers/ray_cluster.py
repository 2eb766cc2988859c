"""A cluster on Ray: the only module that imports it, and only when workers on Ray were asked for.

Each worker is an actor on a node of its own choosing, with the processors and GPUs of its post; Ray gives it its GPUs
and hides the others. Messages are bytes, artifacts are objects of Ray's store, fetched by reference. Ray itself
pickles what it carries, so whoever can speak to the cluster can run code on it: it belongs on a closed network, and
processes that meet candidates have no network at all.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sandbox.workers.address import Farm
from sandbox.workers.places import Node, Post
from sandbox.workers.station import Setup, Station
from sandbox.workers.transport import Call, Lost, StationFailed

STORE_BYTES = 256 << 20
ANSWER_S = 5.0
THREADS = 4
"""Calls besides jobs that a worker answers at once: heartbeat, cancel, close."""
# What Ray's own processes and so the workers inherit. Keys of models are not among it.
KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "USER", "LOGNAME",
        "XDG_CACHE_HOME", "XDG_STATE_HOME", "OMP_NUM_THREADS")  # fmt: skip
KEPT_PREFIXES = ("KERNELGEN_", "RAY_", "CUDA_", "NVIDIA_")


class NoRay(RuntimeError):
    """Ray is not installed, or does not start or answer; the message says what would help."""


def load() -> Any:
    """The module `ray`. Raises NoRay."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise NoRay(f"Ray cannot be imported ({error}): pip install 'kernelgen[ray]'") from error
    return ray


@contextlib.contextmanager
def _only_kept() -> Iterator[None]:
    """The environment without secrets while Ray starts its processes."""
    held = {
        k: v for k, v in os.environ.items() if k not in KEPT and not k.startswith(KEPT_PREFIXES)
    }
    for name in held:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(held)


def _answers(address: str) -> None:
    """Ray itself tries for minutes where nobody listens. Raises NoRay."""
    found = urlsplit(f"//{address}")
    try:
        socket.create_connection((found.hostname or "", found.port or 0), ANSWER_S).close()
    except OSError as error:
        raise NoRay(f"nothing answers at {address}: {error.strerror or error}") from error


class RayStation:
    """The actor: a station, and blobs out of Ray's store."""

    def __init__(self, setup: str) -> None:
        self._station = Station(Setup.of(setup))

    def handle(self, method: str, header: bytes, blobs: Mapping[str, Any]) -> bytes:
        def fetch(sha256: str) -> bytes:
            data: bytes = load().get(blobs[sha256])
            return data

        return self._station.handle(method, header, fetch)


class RayWorker:
    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    def call(self, call: Call) -> Future[bytes]:
        out: Future[bytes] = Future()
        try:
            ref = self._actor.handle.remote(call.method, call.header, dict(call.blobs))
            inner = ref.future()
        except Exception as error:  # Ray's own kinds, and those of a connection that is gone
            out.set_exception(_meant(self._ray, error))
            return out

        def done(found: Future[bytes]) -> None:
            error = found.exception()
            if error is None:
                out.set_result(found.result())
            else:
                out.set_exception(_meant(self._ray, error))

        inner.add_done_callback(done)
        return out

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # it is gone, or Ray is
            self._ray.kill(self._actor, no_restart=True)


def _meant(ray: Any, error: BaseException) -> Exception:
    """Ray's failures in our words: the station's own exception, or the loss of whoever was to answer."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, ray.exceptions.RayTaskError):
        return StationFailed(lines[-1][:300])
    return Lost(f"{type(error).__name__}: {lines[0][:200]}")


class RayCluster:
    """Joins the cluster at `farm.address`, or starts one on this machine that ends with this object.

    `cpus` of the latter count jobs, not processors. Raises NoRay.
    """

    def __init__(self, farm: Farm, cpus: int = 0, gpus: int | None = 0) -> None:
        if farm.address:
            _answers(farm.address)
        else:
            # Nobody else on this machine is to have a say in it: Ray runs what it is sent. Read when it is imported.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        self._ray = load()
        self._own: Path | None = None
        try:
            if farm.address:
                self._ray.init(address=farm.address, log_to_driver=False, configure_logging=False)
            else:
                self._start({"num_cpus": cpus, "num_gpus": gpus})
        except (
            Exception
        ) as error:  # Ray raises many kinds, ValueError and ConnectionError among them
            self.close()
            where = f"the cluster at {farm.address}" if farm.address else "Ray on this machine"
            text = " ".join(str(error).split())[:300]
            raise NoRay(f"{where} cannot be used: {type(error).__name__}: {text}") from error

    def _start(self, counts: Mapping[str, Any]) -> None:
        # Names of sockets must be short.
        self._own = Path(tempfile.mkdtemp(prefix="kg-ray-", dir="/tmp"))
        with _only_kept():
            self._ray.init(
                include_dashboard=False, log_to_driver=False, configure_logging=False,
                object_store_memory=STORE_BYTES, _temp_dir=str(self._own), **counts,
            )  # fmt: skip

    def nodes(self) -> list[Node]:
        try:
            found = self._ray.nodes()
        except Exception as error:
            raise Lost(f"Ray does not answer: {type(error).__name__}") from error
        return [_node(n) for n in found if n.get("Alive")]

    def hire(self, post: Post, setup: str) -> RayWorker:
        options: dict[str, Any] = {
            "num_cpus": post.cpus, "max_concurrency": post.slots + THREADS, "max_restarts": 0, "max_task_retries": 0,
            "label_selector": {"ray.io/node-id": post.node},
        }  # fmt: skip
        if post.gpus:
            options["num_gpus"] = post.gpus
        try:
            actor = self._ray.remote(RayStation).options(**options).remote(setup)
        except Exception as error:
            raise Lost(f"Ray starts no worker: {type(error).__name__}: {error}"[:300]) from error
        return RayWorker(self._ray, actor)

    def put(self, data: bytes) -> Any:
        try:
            return self._ray.put(data)
        except Exception as error:
            raise Lost(
                f"Ray's store takes no artifact: {type(error).__name__}: {error}"[:300]
            ) from error

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._ray.shutdown()
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)


def _node(found: Mapping[str, Any]) -> Node:
    resources = found.get("Resources", {})
    return Node(
        found["NodeID"], str(found.get("NodeManagerAddress", "?")), int(resources.get("CPU", 0)),
        int(resources.get("GPU", 0)), dict(found.get("Labels") or {}),
    )  # fmt: skip
