"""`doctor`: what this machine can do, and where settings come from. Keys are named, never shown."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from agent.commands import common
from agent.config import KEYS, default_device, file_defaults, has_gpu
from agent.models.base import Unavailable
from agent.services import Wanted, device_facts, judge_state, new_compiler, new_judge, roll
from agent.versions import version, versions
from agent.workspace import Workspace
from sandbox.compile_client import NoIsolation
from sandbox.judge_client import describe_isolation as describe

STORED_FACTS = "device_facts.json"


def _chosen(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    return value if value is None else common._device(ctx, param, value)


@click.command()
@click.option(
    "--probe/--no-probe",
    default=True,
    help="Start the compile jail and the judge to see them work.",
)
@click.option("--device", default=None, metavar="cuda|cuda:N|cpu", callback=_chosen,
              help="Look at this device alone.  [default: every device here]")  # fmt: skip
@click.option(
    "--remeasure", is_flag=True, help="Forget what was measured of the GPUs here and measure again."
)
@common.workers_option
@common.db_option
@common.json_option
def doctor(
    probe: bool, device: str | None, remeasure: bool, workers: str, db: Path, as_json: bool
) -> int:
    """Say what works here: versions, assembler, jail, devices, keys, settings files.

    Of a GPU it measures, once, and keeps: streaming reads (plain and bulk) and copies, L2, the gaps between launches
    and between graph nodes, a grid barrier, a flag. Floors use the streaming rate, and the
    specified rate beside it.

    \b
    Examples:
      kernelgen doctor
      kernelgen doctor --device cuda --json
      kernelgen doctor --no-probe
      kernelgen doctor --workers ray://10.0.0.1:6379 --device cuda

    With --workers it joins the cluster, starts its workers, lists them and lets them go.

    Exit code 4 if kernels cannot be compiled here or no device works.
    """
    if remeasure:
        (judge_state() / STORED_FACTS).unlink(missing_ok=True)
    found, files = file_defaults(Path.cwd())
    data: dict[str, Any] = {
        "versions": versions(), "ptxas": _ptxas(), "gpu_present": has_gpu(),
        "keys": {name: bool(os.environ.get(key)) for name, key in KEYS.items()},
        "settings_files": [str(f) for f in files], "settings": sorted(found),
        "environment": sorted(k for k in os.environ if k.startswith("KERNELGEN_")),
        "record": {"path": str(db), "exists": db.exists()}, "jail": None, "devices": {},
        "ray": version("ray"), "workers": None,
    }  # fmt: skip
    if probe:
        data["jail"] = _jail(Workspace.beside(db))
        there = ("cuda", "cpu") if has_gpu() else ("cpu",)
        data["devices"] = {d: _device(d) for d in ((device,) if device else there)}
    if workers:
        wanted = Wanted(device or default_device(), workers=workers)
        data["workers"] = roll(wanted, Workspace.beside(db))
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


def roofline(facts: Mapping[str, Any]) -> list[str]:
    """What was measured of a device, a line each; nothing for one that models its times."""
    lines = []
    spec, stream = facts.get("spec_rate"), facts.get("stream_rate")
    if stream:
        share = f", {stream / spec:.0%} of the specified {spec / 1e12:.2f} TB/s" if spec else ""
        lines.append(f"streaming reads {stream / 1e12:.2f} TB/s{share}")
    found = (facts.get("extra") or {}).get("roofline") or {}
    rates = {
        "bulk_read_bytes_per_s": "the same by bulk copies into shared memory",
        "copy_bytes_per_s": "copies (read and written)",
        "l2_read_bytes_per_s": "reads that hit L2",
    }
    lines += [f"{what} {found[k] / 1e12:.2f} TB/s" for k, what in rates.items() if k in found]
    if "l2_bytes" in found:
        lines.append(f"L2 {found['l2_bytes'] / 2**20:.0f} MiB")
    gaps = {
        "launch_gap_us": "from launch to launch", "graph_node_gap_us": "from graph node to graph node",
        "graph_node_gap_pdl_us": "the same with programmatic launches", "grid_barrier_us": "grid barrier",
        "flag_us": "flag from SM to SM",
    }  # fmt: skip
    lines += [f"{what} {found[k]:.2f} us" for k, what in gaps.items() if k in found]
    lines += [f"{k} not measured: {why}" for k, why in (found.get("missing") or {}).items()]
    return [*lines, f"measured {found['date']}"] if "date" in found else lines


def isolation(jail: Mapping[str, Any]) -> list[str]:
    """What isolates the compiler, and why nothing stronger does."""
    lines = [f"compile jail: {jail['sentence'] if jail['ok'] else jail['message']}"]
    return lines + [f"  not used: {' '.join(why.split())}" for why in jail.get("passed_over", ())]


def _text(d: dict[str, Any], probed: bool) -> str:
    lines = [f"{name} {v}" for name, v in d["versions"].items()]
    lines.append(f"ptxas: {d['ptxas'] or 'missing: install nvidia-cuda-nvcc'}")
    if probed:
        lines += isolation(d["jail"])
        for name, facts in d["devices"].items():
            words = (
                f"{facts['name']}, {facts['arch']}, {facts['sms']} SMs"
                if facts["ok"]
                else facts["message"]
            )
            lines.append(f"device {name}: {words}")
            lines += [f"  {line}" for line in roofline(facts)] if facts["ok"] else []
            if facts["ok"]:
                lines.append(f"judge on {name}: {describe(facts['isolation'])}")
    lines.append(
        f"Ray: {d['ray'] or 'not installed; --workers ray needs the extra: kernelgen[ray]'}"
    )
    for w in d["workers"] or ():
        kind = f", {w['kind']}" if w["kind"] else ""
        lines.append(f"worker {w['name']}: {w['state']}{kind}{': ' + w['why'] if w['why'] else ''}")
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
