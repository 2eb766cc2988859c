"""The machine code of a bundle: one part per artifact and architecture, as files named by their hash.

`main` is the judged kernel; `check` the same source compiled for tiny sizes, for the self-check.
Assembling and the reference run in processes of the sandbox.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent.export.processes import sandbox_json
from agent.export.rebuild import Made, compiler, job, make
from agent.export.subject import ExportRefused, Subject, pretty
from agent.offline import options_json, options_of
from sandbox.artifact import Artifact, buffer_dict, digest, launch_dict
from sandbox.compile_client import NoIsolation
from targets.base import Options, UnknownOption, find

USUAL_SMS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148}
SHIPPED_BYTES = 32 << 20


@dataclass
class Parts:
    """What the package's manifest says of machine code. `record`: what the self-check compares."""

    data: Path
    parts: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    ptxas: str = ""
    resources: list[Any] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, part: str, artifact: Artifact, folder: Path, facts: Mapping[str, Any]) -> None:
        """Assemble and write a part. Raises ExportRefused."""
        made = sandbox_json("sandbox.assemble_cli", str(folder.resolve()), str(self.data))
        if "refused" in made:
            raise ExportRefused(f"the artifact cannot be assembled here: {made['refused']}")
        self.ptxas = made["ptxas"]
        plan = pretty(_plan(artifact, made["cubins"]))
        for data in artifact.constants.values():
            (self.data / f"{digest(data)}.bin").write_bytes(data)
        name = f"data/{digest(plan)}.json"
        (self.data.parent / name).write_bytes(plan)
        self.parts.setdefault(part, {})[artifact.arch] = {
            "plan": name, "sha256": digest(plan), "artifact": artifact.sha256,
            "workload": dict(artifact.workload), "resources": made["resources"],
            "cubins": sorted(set(made["cubins"].values())), **facts,
        }  # fmt: skip


def _plan(artifact: Artifact, cubins: Mapping[str, str]) -> dict[str, Any]:
    def plan(name: Any) -> dict[str, Any] | None:
        found = artifact.plan(name)
        if found is None:
            return None
        launches = [launch_dict(x) for x in found.launches]
        return {"cubin": cubins[digest(found.ptx.encode())], "launches": launches}

    return {
        "buffers": [buffer_dict(b) for b in artifact.buffers],
        "constants": {k: digest(v) for k, v in artifact.constants.items()},
        "step": plan("step"), "prepare": plan("prepare"),
    }  # fmt: skip


def collect(s: Subject, data: Path, archs: tuple[str, ...]) -> Parts:
    """Every part of the bundle. Raises ExportRefused, NoIsolation."""
    out = Parts(data)
    own = s.artifact.arch
    sms = int(s.verdict.device.get("sms") or 0) if s.verdict.device.get("kind") == "cuda" else 0
    out.add("main", s.artifact, s.folder, {"judged": True, "sms": sms or USUAL_SMS[own]})
    options = options_of(s.artifact)
    for arch in archs:
        if arch != own:
            _compiled(out, "main", s, (options, arch))
    _record(out, s, options)
    return out


def _compiled(out: Parts, part: str, s: Subject, how: tuple[Options, str]) -> bool:
    """Add a part compiled now and judged by nobody; whether it was possible."""
    options, arch = how
    with tempfile.TemporaryDirectory(prefix="kernelgen-export-") as store:
        with compiler(Path(store), arch) as compiling:
            try:
                made = make(compiling, job(s, options, arch))
            except NoIsolation as error:
                made = Made(None, None, f"no compile jail works here: {error}")
            if made.artifact is None or made.folder is None:
                out.notes.append(f"{part} for {arch} ({options.preset}): {made.why}")
                return False
            facts = {"judged": False, "sms": USUAL_SMS[arch]}
            out.add(part, made.artifact, made.folder, facts)
    return True


def _record(out: Parts, s: Subject, options: Options) -> None:
    """The recorded result, of the kernel itself if it is small, else of a tiny twin."""
    target = find(s.artifact.target)
    given = sum(b.nbytes for b in s.artifact.buffers if b.group in ("inputs", "weights", "states"))
    part, of = "main", options
    if given > SHIPPED_BYTES:
        part = "check"
        twin = _twin(s, options)
        archs = tuple(out.parts["main"])
        if twin is None:
            out.record = _none("the target has no tiny preset")
            return
        of = twin
        if not all(_compiled(out, part, s, (of, arch)) for arch in archs):
            out.parts.pop(part, None)
            out.record = _none(f"the source does not compile for tiny sizes: {out.notes[-1]}")
            return
    found = sandbox_json(
        "sandbox.record_cli", s.artifact.target, json.dumps(options_json(of)), str(out.data)
    )
    if "refused" in found:
        out.parts.pop("check", None)
        out.record = _none(found["refused"])
        return
    index = pretty(found)
    (out.data / "record.json").write_bytes(index)
    key = target.workload(of).key
    out.record = {
        "part": part, "sha256": digest(index), "workload": key, "seed": found["seed"],
        "ties": found["ties"],
    }  # fmt: skip


def _twin(s: Subject, options: Options) -> Options | None:
    """The tiny preset with the same rows where it has them."""
    target = find(s.artifact.target)
    for o in (Options("tiny", rows=options.rows), Options("tiny")):
        try:
            target.workload(o)
        except UnknownOption:
            continue
        return replace(o)
    return None


def _none(why: str) -> dict[str, Any]:
    return {"part": "", "why": why}
