"""Artifact: all that crosses the trust boundary between the compile jail and the judge, as plain data.

PTX, the launch plans of `step` and `prepare`, the buffers they name and read-only constants. An artifact is hostile
input wherever it is read: `from_manifest` checks every field before anything else sees it. Nothing here runs code,
imports torch or touches a GPU; that a plan is harmless on a device is for `sandbox.devices` to check again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sandbox import strict
from sandbox.dtypes import nbytes
from sandbox.strict import Malformed

SCHEMA = 1
MAX_PTX_BYTES = 16 << 20
MAX_CONSTANT_BYTES = 64 << 20
MAX_LAUNCHES = 4096
MAX_PARAM_BYTES = 32764
MAX_BUFFERS = 8192
MAX_BUFFER_BYTES = 1 << 40
MAX_RANKS = 8
ARCHS = ("sm_90a", "sm_100a", "sm_103a")
TIMELINE = "timeline"  # the reserved tunable that asks for a build with marks
GROUPS = ("inputs", "weights", "states", "outputs", "workspace", "constants")

PlanName = Literal["step", "prepare"]


@dataclass(frozen=True)
class Buffer:
    """A named dense row-major tensor. `name` is its path in the candidate's `t`, such as `weights.layers.3.w_in`.

    `init` and `lifetime` are set for workspace alone: `zero` or `undefined`, `step` or `persistent`. In a job of
    several GPUs the buffers of rank N > 0 are named `NAME@N`; those of rank 0, and of all other jobs, have no mark.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    align: int = 128
    init: Literal["zero", "undefined"] | None = None
    lifetime: Literal["step", "persistent"] | None = None

    @property
    def group(self) -> str:
        return self.name.split(".", 1)[0]

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape)

    @property
    def rank(self) -> int:
        return rank_of(self.name)

    @property
    def mailbox(self) -> bool:
        """Whether other ranks may have its address: what lives from step to step and no caller reads or clears."""
        return self.lifetime == "persistent"


def rank_of(name: str) -> int:
    """The rank that holds a buffer."""
    return int(name.partition("@")[2] or 0)


def on_rank(name: str, rank: int) -> str:
    """The buffer of a rank by the name that it has on rank 0."""
    return f"{name}@{rank}" if rank else name


@dataclass(frozen=True)
class Relocation:
    """Eight bytes at `offset` of a launch's parameter block hold the address of `buffer` plus `addend` bytes."""

    offset: int
    buffer: str
    addend: int = 0


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `params` is the whole parameter block, relocated words zero; sizes are in bytes. `rank`: the
    GPU of the job that runs it; launches of one rank keep their order, different ranks run at once."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params: bytes
    param_offsets: tuple[int, ...]
    relocations: tuple[Relocation, ...]
    smem: int = 0
    cluster: tuple[int, int, int] | None = None
    cooperative: bool = False
    pdl: bool = False
    rank: int = 0


@dataclass(frozen=True)
class LaunchPlan:
    """The exact launches of `step` or `prepare`, in stream order, and the PTX module their kernels are in."""

    ptx: str
    launches: tuple[Launch, ...]

    def of(self, rank: int) -> LaunchPlan:
        """What one rank launches; may be nothing in `prepare`."""
        return LaunchPlan(self.ptx, tuple(x for x in self.launches if x.rank == rank))


@dataclass(frozen=True)
class Artifact:
    """A compiled candidate. `sha256` is its content address: equal plans, PTX and constants, equal address."""

    target: str
    workload: Mapping[str, Any]
    arch: str
    buffers: tuple[Buffer, ...]
    step: LaunchPlan
    prepare: LaunchPlan | None = None
    constants: Mapping[str, bytes] = field(default_factory=dict)
    tunables: Mapping[str, Any] = field(default_factory=dict)
    source_sha256: str = ""
    toolchain: Mapping[str, str] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(canonical(self.manifest()).encode()).hexdigest()

    @property
    def instrumented(self) -> bool:
        """A build with marks inside its kernels: looked at once, never judged or timed against others."""
        return self.tunables.get(TIMELINE) is True

    @property
    def ptx_sha256(self) -> str:
        """Identity of the machine work alone: equal for near-clones whose sources differ only in text."""
        plans = (self.step, self.prepare) if self.prepare else (self.step,)
        body = [
            [digest(_without_lines(p.ptx)), [launch_dict(x) for x in p.launches]] for p in plans
        ]
        return digest(canonical(body).encode())

    @property
    def ranks(self) -> int:
        """GPUs of one host that a job of this artifact holds."""
        return 1 + max((b.rank for b in self.buffers), default=0)

    def plan(self, name: PlanName) -> LaunchPlan | None:
        return self.step if name == "step" else self.prepare

    def buffer(self, name: str) -> Buffer:
        """The buffer of that name. Raises KeyError."""
        for b in self.buffers:
            if b.name == name:
                return b
        raise KeyError(name)

    def manifest(self) -> dict[str, Any]:
        """JSON form; PTX and constants appear by hash and lie beside it (`sandbox.artifact_store`)."""
        return {
            "schema": SCHEMA,
            "target": self.target,
            "workload": dict(self.workload),
            "arch": self.arch,
            "buffers": [buffer_dict(b) for b in self.buffers],
            "step": plan_dict(self.step),
            "prepare": plan_dict(self.prepare) if self.prepare else None,
            "constants": {k: digest(v) for k, v in sorted(self.constants.items())},
            "tunables": dict(self.tunables),
            "source_sha256": self.source_sha256,
            "toolchain": dict(self.toolchain),
        }


def _without_lines(ptx: str) -> bytes:
    """PTX without its line table, which follows every comment of the source and changes no instruction."""
    lines = (x for x in ptx.splitlines() if not x.lstrip().startswith((".loc", ".file")))
    return "\n".join(lines).encode()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def canonical(value: object) -> str:
    """One JSON text per value. Raises ValueError for NaN and infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def buffer_dict(b: Buffer) -> dict[str, Any]:
    return {
        "name": b.name, "dtype": b.dtype, "shape": list(b.shape), "align": b.align,
        "init": b.init, "lifetime": b.lifetime,
    }  # fmt: skip


def launch_dict(x: Launch) -> dict[str, Any]:
    return {
        "kernel": x.kernel, "grid": list(x.grid), "block": list(x.block), "smem": x.smem,
        "cluster": list(x.cluster) if x.cluster else None, "cooperative": x.cooperative, "pdl": x.pdl,
        "params": x.params.hex(), "param_offsets": list(x.param_offsets),
        "relocations": [[r.offset, r.buffer, r.addend] for r in x.relocations],
        **({"rank": x.rank} if x.rank else {}),
    }  # fmt: skip


def plan_dict(plan: LaunchPlan) -> dict[str, Any]:
    return {"ptx": digest(plan.ptx.encode()), "launches": [launch_dict(x) for x in plan.launches]}


def from_manifest(manifest: object, blobs: Mapping[str, bytes]) -> Artifact:
    """Check a manifest as hostile input and build the artifact. `blobs`: sha256 -> bytes of PTX and constants.

    Raises Malformed naming the field.
    """
    m = strict.keys(manifest, "manifest", {
        "schema", "target", "workload", "arch", "buffers", "step", "prepare", "constants",
        "tunables", "source_sha256", "toolchain",
    })  # fmt: skip
    if m["schema"] != SCHEMA:
        raise Malformed("schema", f"is {repr(m['schema'])[:40]}, this version reads {SCHEMA}")
    buffers = tuple(
        _buffer(b, f"buffers[{i}]")
        for i, b in enumerate(strict.items(m["buffers"], "buffers", MAX_BUFFERS))
    )
    by_name = {b.name: b for b in buffers}
    if len(by_name) != len(buffers):
        raise Malformed("buffers", "has two buffers of one name")
    constants = _constants(m["constants"], by_name, blobs)
    artifact = Artifact(
        target=strict.text(m["target"], "target", 256),
        workload=strict.scalars(m["workload"], "workload"),
        arch=strict.choice(m["arch"], "arch", ARCHS),
        buffers=buffers,
        step=_plan(m["step"], "step", by_name, blobs),
        prepare=None if m["prepare"] is None else _plan(m["prepare"], "prepare", by_name, blobs),
        constants=constants,
        tunables=strict.scalars(m["tunables"], "tunables"),
        source_sha256=strict.sha256(m["source_sha256"], "source_sha256"),
        toolchain={
            k: strict.text(v, f"toolchain.{k}", 256)
            for k, v in strict.scalars(m["toolchain"], "toolchain").items()
        },
    )
    _check_ranks(artifact)
    return artifact


def _check_ranks(artifact: Artifact) -> None:
    """Every rank has launches of its own, and of another rank's memory knows its mailboxes alone."""
    if artifact.ranks == 1 and all(x.rank == 0 for x in artifact.step.launches):
        return
    if {x.rank for x in artifact.step.launches} != set(range(artifact.ranks)):
        raise Malformed("step.launches", f"do not run on each of the {artifact.ranks} ranks")
    shared = {b.name for b in artifact.buffers if b.mailbox}
    for plan in filter(None, (artifact.step, artifact.prepare)):
        for x in plan.launches:
            for r in x.relocations:
                if rank_of(r.buffer) != x.rank and r.buffer not in shared:
                    text = f"of rank {x.rank} names {r.buffer}: of other ranks only persistent workspace is in reach"
                    raise Malformed("launches", text)


def _buffer(value: object, at: str) -> Buffer:
    m = strict.keys(value, at, {"name", "dtype", "shape", "align", "init", "lifetime"})
    name = strict.ranked(m["name"], f"{at}.name", MAX_RANKS)
    group = name.split(".", 1)[0]
    if group not in GROUPS or "." not in name:
        raise Malformed(f"{at}.name", f"{name!r} is in none of the groups {', '.join(GROUPS)}")
    dtype = strict.dtype(m["dtype"], f"{at}.dtype")
    shape = tuple(
        strict.integer(x, f"{at}.shape", 1, 1 << 40)
        for x in strict.items(m["shape"], f"{at}.shape", 8)
    )
    if nbytes(dtype, shape) > MAX_BUFFER_BYTES:
        raise Malformed(f"{at}.shape", "is too large")
    align = strict.integer(m["align"], f"{at}.align", 1, 4096)
    if align & (align - 1):
        raise Malformed(f"{at}.align", "is no power of two")
    init = lifetime = None
    if group == "workspace":
        init = strict.choice(m["init"], f"{at}.init", ("zero", "undefined"))
        lifetime = strict.choice(m["lifetime"], f"{at}.lifetime", ("step", "persistent"))
    elif m["init"] is not None or m["lifetime"] is not None:
        raise Malformed(at, "only workspace has init and lifetime")
    return Buffer(name, dtype, shape, align, init, lifetime)  # type: ignore[arg-type]


def _constants(
    value: object, by_name: Mapping[str, Buffer], blobs: Mapping[str, bytes]
) -> dict[str, bytes]:
    declared = {n for n in by_name if n.startswith("constants.")}
    m = strict.keys(value, "constants", declared)
    out = {}
    for name in sorted(declared):
        data = strict.blob(m[name], f"constants.{name}", blobs)
        if len(data) != by_name[name].nbytes:
            raise Malformed(name, f"has {len(data)} bytes, its shape says {by_name[name].nbytes}")
        out[name] = data
    if sum(map(len, out.values())) > MAX_CONSTANT_BYTES:
        raise Malformed("constants", "are larger than 64 MB together")
    return out


def _plan(
    value: object, at: str, by_name: Mapping[str, Buffer], blobs: Mapping[str, bytes]
) -> LaunchPlan:
    m = strict.keys(value, at, {"ptx", "launches"})
    data = strict.blob(m["ptx"], f"{at}.ptx", blobs)
    if len(data) > MAX_PTX_BYTES:
        raise Malformed(f"{at}.ptx", "is larger than 16 MB")
    try:
        ptx = data.decode("ascii")
    except UnicodeDecodeError as error:
        raise Malformed(f"{at}.ptx", "is not ASCII") from error
    launches = strict.items(m["launches"], f"{at}.launches", MAX_LAUNCHES)
    if not launches:
        raise Malformed(f"{at}.launches", "is empty: the plan launches nothing")
    return LaunchPlan(
        ptx, tuple(_launch(x, f"{at}.launches[{i}]", by_name) for i, x in enumerate(launches))
    )


def _launch(value: object, at: str, by_name: Mapping[str, Buffer]) -> Launch:
    m = strict.keys(value, at, {
        "kernel", "grid", "block", "smem", "cluster", "cooperative", "pdl", "params", "param_offsets", "relocations",
        *(["rank"] if isinstance(value, dict) and "rank" in value else []),
    })  # fmt: skip
    params = strict.hexbytes(m["params"], f"{at}.params", MAX_PARAM_BYTES)
    offsets = tuple(
        strict.integer(x, f"{at}.param_offsets", 0, len(params))
        for x in strict.items(m["param_offsets"], f"{at}.param_offsets", MAX_PARAM_BYTES)
    )
    if list(offsets) != sorted(set(offsets)):
        raise Malformed(f"{at}.param_offsets", "do not ascend")
    return Launch(
        kernel=strict.name(m["kernel"], f"{at}.kernel", 4096),
        grid=strict.triple(m["grid"], f"{at}.grid", (2**31 - 1, 65535, 65535)),
        block=strict.triple(m["block"], f"{at}.block", (1024, 1024, 64), product=1024),
        params=params,
        param_offsets=offsets,
        relocations=_relocations(m["relocations"], f"{at}.relocations", params, by_name),
        smem=strict.integer(m["smem"], f"{at}.smem", 0, 232448),
        cluster=None
        if m["cluster"] is None
        else strict.triple(m["cluster"], f"{at}.cluster", (16, 16, 16), product=16),
        cooperative=strict.boolean(m["cooperative"], f"{at}.cooperative"),
        pdl=strict.boolean(m["pdl"], f"{at}.pdl"),
        # rank 0 is never spelled out, so that one plan has one manifest
        rank=strict.integer(m["rank"], f"{at}.rank", 1, MAX_RANKS - 1) if "rank" in m else 0,
    )


def _relocations(
    value: object, at: str, params: bytes, by_name: Mapping[str, Buffer]
) -> tuple[Relocation, ...]:
    out = []
    end = 0
    for i, item in enumerate(strict.items(value, at, MAX_PARAM_BYTES // 8)):
        fields = strict.items(item, f"{at}[{i}]", 3)
        if len(fields) != 3:
            raise Malformed(f"{at}[{i}]", "is not [offset, buffer, addend]")
        offset = strict.integer(fields[0], f"{at}[{i}].offset", end, max(end, len(params) - 8))
        if offset % 8 or offset + 8 > len(params) or any(params[offset : offset + 8]):
            raise Malformed(f"{at}[{i}].offset", "is no zeroed, aligned word of the parameters")
        buffer = by_name.get(strict.ranked(fields[1], f"{at}[{i}].buffer", MAX_RANKS))
        if buffer is None:
            raise Malformed(f"{at}[{i}].buffer", f"{fields[1]!r} is not declared")
        addend = strict.integer(fields[2], f"{at}[{i}].addend", 0, buffer.nbytes - 1)
        out.append(Relocation(offset, buffer.name, addend))
        end = offset + 8
    return tuple(out)
