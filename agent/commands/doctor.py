"""`doctor`: what this machine can do, and where settings come from. Keys are named, never shown."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from agent.commands import common
from agent.config import KEYS, file_defaults, has_gpu
from agent.models.base import Unavailable
from agent.services import Wanted, device_facts, new_compiler, new_judge
from agent.versions import versions
from agent.workspace import Workspace
from sandbox.compile_client import NoIsolation
from sandbox.judge_wire import describe_isolation as describe


@click.command()
@click.option(
    "--probe/--no-probe",
    default=True,
    help="Start the compile jail and the judge to see them work.",
)
@common.db_option
@common.json_option
def doctor(probe: bool, db: Path, as_json: bool) -> int:
    """Say what works here: versions, assembler, jail, devices, keys, settings files.

    \b
    Examples:
      kernelgen doctor
      kernelgen doctor --no-probe --json

    Exit code 4 if kernels cannot be compiled here or no device works.
    """
    found, files = file_defaults(Path.cwd())
    data: dict[str, Any] = {
        "versions": versions(), "ptxas": _ptxas(), "gpu_present": has_gpu(),
        "keys": {name: bool(os.environ.get(key)) for name, key in KEYS.items()},
        "settings_files": [str(f) for f in files], "settings": sorted(found),
        "environment": sorted(k for k in os.environ if k.startswith("KERNELGEN_")),
        "record": {"path": str(db), "exists": db.exists()}, "jail": None, "devices": {},
    }  # fmt: skip
    if probe:
        data["jail"] = _jail(Workspace.beside(db))
        data["devices"] = {d: _device(d) for d in (("cuda", "cpu") if has_gpu() else ("cpu",))}
    common.emit(as_json, data, _text(data, probe))
    works = any(d["ok"] for d in data["devices"].values())
    compiles = bool(data["ptxas"]) and (not probe or data["jail"]["ok"])
    return 0 if compiles and (works or not probe) else 4


def _ptxas() -> str | None:
    """Where the assembler lies: KERNELGEN_PTXAS, else in the pinned package."""
    chosen = os.environ.get("KERNELGEN_PTXAS")
    if chosen:
        return chosen if os.access(chosen, os.X_OK) else None
    try:
        files = metadata.files("nvidia-cuda-nvcc") or []
    except metadata.PackageNotFoundError:
        return None
    return next((str(f.locate()) for f in files if f.name == "ptxas"), None)


def _jail(workspace: Workspace) -> dict[str, Any]:
    compiler = new_compiler(Wanted("cpu", parallel=1), workspace)
    try:
        return {"ok": True, **compiler.start()}
    except (NoIsolation, OSError) as error:
        return {"ok": False, "message": str(error)}
    finally:
        compiler.close()


def _device(device: str) -> dict[str, Any]:
    judge = new_judge()
    try:
        facts = dict(device_facts(judge, device))
        return {"ok": True, **facts, "isolation": dict(judge.isolation.get(device, {}))}
    except Unavailable as error:
        return {"ok": False, "message": str(error)}
    finally:
        judge.close()


def _text(d: dict[str, Any], probed: bool) -> str:
    lines = [f"{name} {v}" for name, v in d["versions"].items()]
    lines.append(f"ptxas: {d['ptxas'] or 'missing: install nvidia-cuda-nvcc'}")
    if probed:
        jail = d["jail"]
        lines.append(
            f"compile jail: {jail['tier'] + ' ' + jail.get('variant', '') if jail['ok'] else jail['message']}"
        )
        for name, facts in d["devices"].items():
            words = (
                f"{facts['name']}, {facts['arch']}, {facts['sms']} SMs"
                if facts["ok"]
                else facts["message"]
            )
            lines.append(f"device {name}: {words}")
            if facts["ok"]:
                lines.append(f"judge on {name}: {describe(facts['isolation'])}")
    lines.append(f"GPU: {'present' if d['gpu_present'] else 'none'}")
    lines += [
        f"key for {name}: {'set' if there else 'not set'}" for name, there in d["keys"].items()
    ]
    lines.append("settings: " + (", ".join(d["settings_files"]) or "no file") + (
        f"; from the environment: {', '.join(d['environment'])}" if d["environment"] else ""
    ))  # fmt: skip
    lines.append(
        f"record: {d['record']['path']}{'' if d['record']['exists'] else ' (not there yet)'}"
    )
    return "\n".join(lines)
