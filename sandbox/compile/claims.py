"""What a compile worker sent, read as hostile input, becomes an Artifact.

Every count, size and name is checked here or in `sandbox.artifact.from_manifest`; hashes are computed here. The PTX is
data: that it assembles and obeys the lint rules is for the devices to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sandbox import strict
from sandbox.artifact import (
    MAX_CONSTANT_BYTES,
    MAX_LAUNCHES,
    MAX_PARAM_BYTES,
    MAX_PTX_BYTES,
    MAX_RANKS,
    SCHEMA,
    TIMELINE,
    Artifact,
    Buffer,
    buffer_dict,
    digest,
    from_manifest,
)
from sandbox.box import Caps
from sandbox.compile import module as modules
from sandbox.compile import relocate
from sandbox.jobs import CompileJob
from sandbox.ptx import PtxError
from sandbox.strict import Malformed

PLANS = ("step", "prepare")
MAX_PLAN_BYTES = 16 << 20
CAPS = Caps(
    {
        "ptx": 2 * MAX_PTX_BYTES,
        "constants": MAX_CONSTANT_BYTES,
        "plan": 2 * MAX_PLAN_BYTES,
        "params": 64 << 20,
        "declared": 4 << 20,
    },
    count=300,
)


class PlanError(ValueError):
    """The recording makes no plan: `rule` is a short id, the message says why."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


@dataclass(frozen=True)
class Claim:
    """An artifact and the candidate's declared tunables."""

    artifact: Artifact
    tunables: Mapping[str, tuple[Any, ...]]


def read(
    job: CompileJob,
    body: Mapping[str, Any],
    blocks: Mapping[str, bytes],
    toolchain: Mapping[str, str],
) -> Claim:
    """Check a worker's result frame and build the artifact. Raises Malformed or PlanError."""
    fields = strict.keys(body, "result", {"ok", "plans", "tunables", "seconds"})
    plans = [strict.choice(p, "plans", PLANS) for p in strict.items(fields["plans"], "plans", 2)]
    if "step" not in plans or len(set(plans)) != len(plans):
        raise Malformed("plans", "has no step, or one plan twice")
    declared_tunables = tunables(fields["tunables"])
    buffers = [*job.buffers, *_declared(_block(blocks, "declared"))]
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "target": job.target,
        "workload": dict(job.workload),
        "arch": job.arch,
    }
    files: dict[str, bytes] = {}
    manifest["prepare"] = None
    for name in plans:
        text, launches = _plan(name, blocks, buffers)
        files[digest(text)] = text
        manifest[name] = {"ptx": digest(text), "launches": launches}
    constants = {}
    for buffer in buffers:
        if buffer.group == "constants":
            data = _block(blocks, buffer.name.partition("@")[0])  # the same on every rank
            constants[buffer.name] = digest(data)
            files[digest(data)] = data
    manifest |= {
        "buffers": [buffer_dict(b) for b in buffers],
        "constants": constants,
        "tunables": chosen(job, declared_tunables),
        "source_sha256": digest(job.source.encode("utf-8", "surrogatepass")),
        "toolchain": dict(toolchain),
    }
    return Claim(from_manifest(manifest, files), declared_tunables)


def tunables(value: object) -> dict[str, tuple[Any, ...]]:
    """Declared TUNABLES: at most 64 names of at most 256 plain values each. Raises Malformed."""
    if not isinstance(value, dict) or len(value) > 64:
        raise Malformed("tunables", "is no object of at most 64 entries")
    out = {}
    for name, values in value.items():
        listed = strict.items(values, f"tunables.{strict.name(name, 'tunables')}", 256)
        strict.scalars({f"v{i}": v for i, v in enumerate(listed)}, f"tunables.{name}")
        if not listed or None in listed:
            raise Malformed(f"tunables.{name}", "has no values, or None among them")
        out[name] = tuple(listed)
    return out


def chosen(job: CompileJob, declared: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The full setting that was compiled: the job's choice, first declared values for the rest."""
    values = {name: job.tunables.get(name, values[0]) for name, values in declared.items()}
    return values | ({TIMELINE: True} if job.tunables.get(TIMELINE) is True else {})


def _block(blocks: Mapping[str, bytes], name: str) -> bytes:
    if name not in blocks:
        raise Malformed("result", f"lacks the block {name}")
    return blocks[name]


def _declared(data: bytes) -> list[Buffer]:
    out = []
    for i, row in enumerate(
        strict.items(strict.parse(data, "declared", len(data)), "declared", 8192)
    ):
        at = f"declared[{i}]"
        fields = strict.items(row, at, 5)
        if len(fields) != 5:
            raise Malformed(at, "is not [name, dtype, shape, init, lifetime]")
        name = strict.ranked(fields[0], at, MAX_RANKS)
        if not name.startswith(("workspace.", "constants.")):
            raise Malformed(at, f"declares {name}, which is neither workspace nor a constant")
        dtype = strict.dtype(fields[1], at)
        shape = tuple(strict.integer(x, at, 1, 1 << 40) for x in strict.items(fields[2], at, 8))
        init = (
            fields[3] if fields[3] is None else strict.choice(fields[3], at, ("zero", "undefined"))
        )
        lifetime = (
            fields[4] if fields[4] is None else strict.choice(fields[4], at, ("step", "persistent"))
        )
        out.append(Buffer(name, dtype, shape, 128, init, lifetime))  # type: ignore[arg-type]
    return out


def _plan(
    name: str, blocks: Mapping[str, bytes], buffers: Sequence[Buffer]
) -> tuple[bytes, list[dict[str, Any]]]:
    """The PTX of a plan and its launches in manifest form."""
    at = f"plan.{name}"
    recordings = strict.items(strict.parse(_block(blocks, at), at, MAX_PLAN_BYTES), at, 2)
    if len(recordings) != 2 or recordings[0] != recordings[1]:
        raise PlanError(
            "unstable",
            f"two runs of `{name}`'s host code recorded different launches; "
            "a plan must not depend on addresses or host state",
        )
    try:
        module = modules.read(_block(blocks, f"ptx.{name}"), f"ptx.{name}")
    except PtxError as error:
        raise PlanError("ptx", str(error)[:300]) from error
    raw = _Raw(f"params.{name}", [_block(blocks, f"params.{name}.{i}") for i in range(2)])
    launches = [
        _launch(row, f"{at}[{i}]", _Context(module, raw, buffers))
        for i, row in enumerate(strict.items(recordings[0], at, MAX_LAUNCHES))
    ]
    raw.end()
    return module.text.encode("ascii"), launches


class _Raw:
    """Parameter bytes of both recordings, taken launch by launch."""

    def __init__(self, name: str, recordings: Sequence[bytes]) -> None:
        self._name, self._recordings, self._at = name, recordings, 0

    def take(self, size: int) -> tuple[bytes, bytes]:
        first, second = (r[self._at : self._at + size] for r in self._recordings)
        if len(first) != size or len(second) != size:
            raise Malformed(self._name, "is shorter than its launches need")
        self._at += size
        return first, second

    def end(self) -> None:
        if any(len(r) != self._at for r in self._recordings):
            raise Malformed(self._name, "is longer than its launches need")


@dataclass(frozen=True)
class _Context:
    """What a launch of a plan refers to."""

    module: modules.Module
    raw: _Raw
    buffers: Sequence[Buffer]


def _launch(row: object, at: str, context: _Context) -> dict[str, Any]:
    """One recorded launch in manifest form; the fields that are passed on are checked by `from_manifest`."""
    fields = strict.items(row, at, 8)
    if len(fields) not in (7, 8):
        raise Malformed(at, "is no launch")
    kernel = strict.name(fields[0], f"{at}.kernel", 4096)
    entry = context.module.entries.get(kernel)
    if entry is None:
        raise Malformed(at, "names a kernel that is not in the PTX")
    if entry.param_bytes > MAX_PARAM_BYTES:
        text = f"kernel {kernel[:120]} takes {entry.param_bytes} bytes of parameters, more than {MAX_PARAM_BYTES}"
        raise PlanError("parameters", text)
    pair = context.raw.take(sum(p.size for p in entry.params))
    try:
        block = relocate.block(entry, context.module.used(kernel), pair, context.buffers)
    except relocate.Unstable as error:
        raise PlanError("unstable", str(error)) from error
    keys = ("grid", "block", "smem", "cooperative", "pdl", "cluster")
    rank = {"rank": fields[7]} if fields[7:] else {}
    return (
        dict(zip(keys, fields[1:7], strict=True))
        | rank
        | {
            "kernel": context.module.kept[kernel],
            "params": block.data.hex(),
            "param_offsets": [p.offset for p in entry.params],
            "relocations": [[r.offset, r.buffer, r.addend] for r in block.relocations],
        }
    )
