"""What a worker does on its node: holds one judge process or one compile server, and answers calls of bytes.

Candidates are run and compiled where they always are, in the confined children of `sandbox.judge.server` and in the
boxes of `sandbox.compile.server`; this wraps their clients. Artifacts lie below the node's own store by hash and are
verified before each use: also against a disk that rots. It knows no cluster: blobs come through `fetch`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from sandbox import artifact_store, compile_wire, judge_wire
from sandbox.artifact import Artifact
from sandbox.compile_client import CompileClient, CompileSettings, NoIsolation
from sandbox.jobs import CompileJob, CompileOutcome, JudgeJob
from sandbox.judge_client import ClientOptions, JudgeClient, JudgeFailed, state_folder
from sandbox.strict import Malformed
from sandbox.verdict import Failure, Status, Verdict
from sandbox.workers import keys, parcel, store
from sandbox.workers.transport import Fetch

ROLES = ("artifact", "incumbent", "timeline")


@dataclasses.dataclass(frozen=True)
class Setup:
    """What the driver tells a worker once. `runner` and `extra` are of the judge's server (`--runner`, `--opener`)."""

    role: str
    number: int = 0
    device: str = "cpu"
    arch: str = "sm_90a"
    tier: str | None = None
    trust_this_code: bool = False
    slots: int = 1
    deadline_s: float = 120.0
    lock_s: float = 600.0
    extra: tuple[str, ...] = ()

    def to_text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def of(text: str) -> Setup:
        fields = json.loads(text)
        return Setup(**{**fields, "extra": tuple(fields["extra"])})


def node_folder() -> Path:
    """The node's store of artifacts and compile results; not where a judging child may write."""
    return state_folder().parent / "workers"


class JudgeService(Protocol):
    """What a station needs of `JudgeClient`."""

    def judge(self, job: JudgeJob) -> Verdict: ...
    def probe(self, device: str) -> Mapping[str, Any]: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


class CompileService(Protocol):
    """What a station needs of `CompileClient`."""

    def start(self) -> dict[str, Any]: ...
    def compile(self, job: CompileJob) -> CompileOutcome: ...
    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Tools:
    """The node's store, and one of the two services."""

    root: Path
    judge: JudgeService | None = None
    compiler: CompileService | None = None


def tools_of(setup: Setup) -> Tools:
    """Clients of the real services; their processes start with the first call."""
    root = node_folder()
    if setup.role == "judge":
        which = f"{os.environ.get('CUDA_VISIBLE_DEVICES') or 'cpu'}-{setup.number}".replace(
            "/", "_"
        )
        log = f"judge-server-{which}.log"
        return Tools(
            root,
            JudgeClient(ClientOptions(state_folder(), setup.lock_s, extra=setup.extra, log=log)),
        )
    settings = CompileSettings(
        store=root / "compile", tier=setup.tier, trust_this_code=setup.trust_this_code, arch=setup.arch,
        idle=setup.slots, jobs=setup.slots, deadline_s=setup.deadline_s,
    )  # fmt: skip
    return Tools(root, compiler=CompileClient(settings))


class Station:
    """Answers calls; safe for several threads. A judge takes one job at a time, whoever asks."""

    def __init__(self, setup: Setup, tools: Tools | None = None) -> None:
        tools = tools or tools_of(setup)
        self.setup = setup
        self.root = tools.root
        self._turn = threading.Lock()
        self._doing: dict[str, float] = {}
        self._judge, self._compiler = tools.judge, tools.compiler
        store.prune(self.root / "artifacts")
        self._methods: Mapping[str, Callable[[bytes, Fetch], bytes]] = {
            "hello": self._hello, "beat": self._beat, "compile": self._compile, "judge": self._judged,
            "cancel": self._cancel, "close": self._close,
        }  # fmt: skip

    def handle(self, method: str, header: bytes, fetch: Fetch) -> bytes:
        """The answer as a parcel. Raises for what is wrong with this machine or this code."""
        return self._methods[method](header, fetch)

    def _hello(self, header: bytes, fetch: Fetch) -> bytes:
        """Starts the service and says what it found; a GPU has run its canary then."""
        said: dict[str, Any] = {"versions": dict(keys.versions()), "pid": os.getpid()}
        if self._judge is not None:
            with self._turn:
                try:
                    said["probe"] = dict(self._judge.probe(self.setup.device))
                except JudgeFailed as error:
                    said["probe"] = {"ok": False, "rule": "judge-server", "message": str(error)}
        else:
            assert self._compiler is not None
            try:
                said["probe"] = {"ok": True, "isolation": self._compiler.start()}
            except (NoIsolation, OSError) as error:
                said["probe"] = {"ok": False, "rule": "no-isolation", "message": str(error)}
        return parcel.pack(said)

    def _beat(self, header: bytes, fetch: Fetch) -> bytes:
        now = time.monotonic()
        return parcel.pack({"doing": {key: now - since for key, since in self._doing.items()}})

    def _compile(self, header: bytes, fetch: Fetch) -> bytes:
        assert self._compiler is not None
        body, blocks = parcel.unpack(header)
        job_block = json.dumps(body["job"]).encode()
        job = compile_wire.job_from_blocks({"job": job_block, "source": blocks["source"]})
        with self._busy(body["key"]):
            outcome = self._compiler.compile(job)
        if outcome.artifact is None:
            return parcel.pack({"outcome": compile_wire.outcome_json(outcome)})
        artifact = artifact_store.load(outcome.artifact)
        artifact_store.save(artifact, self.root / "artifacts")
        said = compile_wire.outcome_json(dataclasses.replace(outcome, artifact=None))
        blocks = parcel.artifact_blocks(artifact)
        return parcel.pack({"outcome": said, "sha256": artifact.sha256}, blocks)

    def _judged(self, header: bytes, fetch: Fetch) -> bytes:
        assert self._judge is not None
        body, _ = parcel.unpack(header)
        with self._turn, self._busy(body["key"]):
            begin = time.monotonic()
            try:
                job = self._job(body, fetch)
            except (Malformed, OSError) as error:
                return parcel.pack({"refused": f"{type(error).__name__}: {error}"[:500]})
            brought = time.monotonic()
            if body["fresh"]:
                self._judge.close()  # the next job starts a server that has judged nothing
            verdict = self._judge.judge(job)
            seconds = {"brought": brought - begin, "worker": time.monotonic() - begin}
            held = {"held": time.monotonic() - brought} | dict(verdict.seconds)
            verdict = dataclasses.replace(verdict, seconds=held | seconds)
        return parcel.pack({"verdict": verdict.to_json()})

    def _job(self, body: Mapping[str, Any], fetch: Fetch) -> JudgeJob:
        """The job with artifacts on this node. Raises Malformed, OSError."""
        fields = dict(body["job"])
        for role in ROLES:
            sha = body["artifacts"][role]
            fields[role] = None if sha is None else str(self._artifact(sha, fetch))
        if keys.target_hash(fields["target"]) != body["target_hash"]:
            raise Malformed("target", f"{fields['target']} is another file on this node")
        return judge_wire.job_from_json(fields)

    def _artifact(self, sha256: str, fetch: Fetch) -> Path:
        root = self.root / "artifacts"
        folder = parcel.held(root, sha256)
        if folder is not None:
            store.touch(folder)
            return folder
        _, blocks = parcel.unpack(fetch(sha256))
        artifact: Artifact = parcel.artifact_of(blocks, sha256)
        store.drop(root / sha256)
        return artifact_store.save(artifact, root)

    def _cancel(self, header: bytes, fetch: Fetch) -> bytes:
        """The judge's job in flight ends as `cancelled`, if it is the one named."""
        body, _ = parcel.unpack(header)
        found = self._judge is not None and (not body.get("key") or body["key"] in self._doing)
        if self._judge is not None and found:
            self._judge.cancel()
        return parcel.pack({"cancelled": found})

    def _close(self, header: bytes, fetch: Fetch) -> bytes:
        """End the service and what it runs."""
        if self._judge is not None:
            self._judge.cancel()
            with self._turn:
                self._judge.close()
        if self._compiler is not None:
            self._compiler.close()
        return parcel.pack({})

    def _busy(self, key: str) -> _Doing:
        return _Doing(self._doing, key)


class _Doing:
    """Notes a job for the heartbeat while it lasts."""

    def __init__(self, table: dict[str, float], key: str) -> None:
        self._table, self._key = table, key

    def __enter__(self) -> None:
        self._table[self._key] = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._table.pop(self._key, None)


def verdict_of(data: bytes, job: JudgeJob, sha256: str) -> Verdict:
    """The verdict in a worker's answer, about this artifact. What is no such thing is `infra`."""
    try:
        body, _ = parcel.unpack(data)
        if "refused" in body:
            return _infra(job, "worker-refused", str(body["refused"]))
        verdict = judge_wire.verdict_from_json(body.get("verdict"))
    except Malformed as error:
        return _infra(job, "garbled", f"the worker's answer is malformed: {error}")
    if verdict.artifact and verdict.artifact != sha256:
        return _infra(job, "garbled", "the worker's verdict is of another artifact")
    return verdict


def _infra(job: JudgeJob, rule: str, message: str) -> Verdict:
    return judge_wire.without_judging(job, Status.INFRA, Failure(rule, message[:500]))
