"""`replay --screen`: every candidate of a recorded run judged once, at tier screen, against the one that was the
incumbent when it was proposed. No run is made and nothing is promoted or recorded: it takes a few seconds of a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent import offline, trajectory
from agent.commands import common
from agent.config import deadline
from agent.offline import File, Setting
from agent.runner import Services
from agent.services import DEFAULT_ARCH, Wanted, start
from sandbox.jobs import JudgeJob
from sandbox.verdict import Status, Tier, Verdict
from targets.base import Options, find


def rejudge(
    folder: Path, recorded: Mapping[str, Any], asked: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Rows as a record's candidates have them: seq, status, us, and whether us is `modelled`."""
    place = common.place_of(asked["db"], asked["out"])
    wanted = Wanted(
        asked["device"], asked["arch"] or "", asked["sandbox"] or "", asked["trust_this_code"]
    )
    services, facts = start(wanted, place.workspace)
    try:
        setting = _setting(recorded, asked, asked["arch"] or str(facts.get("arch") or DEFAULT_ARCH))
        rows, incumbent = [], None
        for candidate in recorded["candidates"]:
            row, artifact = _judged(services, setting, folder, candidate, incumbent)
            common.talk().print(
                f"candidate {row['seq']}: {row['status']}", soft_wrap=True, markup=False
            )
            rows.append(row)
            incumbent = artifact if candidate["promoted"] and artifact else incumbent
        return rows
    finally:
        services.close()


def _setting(recorded: Mapping[str, Any], asked: Mapping[str, Any], arch: str) -> Setting:
    """The recorded workload, but for what was asked."""
    target, kept = recorded["target"], recorded["settings"]["options"]
    chosen = Options(
        asked["preset"] or kept["preset"],
        asked.get("layers") or kept.get("layers"),
        kept.get("rows") or 1,
        kept.get("context"),
        dict(kept.get("extra", {})),
    )
    limit = deadline(Tier.SCREEN, asked["deadline"], asked["device"])
    workload = find(target).workload(chosen)
    return Setting(target, workload, asked["device"], arch, Tier.SCREEN, limit)


def _judged(
    services: Services,
    setting: Setting,
    folder: Path,
    candidate: Mapping[str, Any],
    incumbent: Path | None,
) -> tuple[dict[str, Any], Path | None]:
    text = trajectory.source(folder, candidate["seq"])
    file = File(f"candidate {candidate['seq']}", text, candidate["tunables"] or {})
    outcome = offline.compile_file(services, setting, file)
    if outcome.artifact is None:
        return _row(candidate["seq"], outcome.status or Status.INFRA, None), None
    job = JudgeJob(
        artifact=outcome.artifact, target=setting.target, options=offline.options_json(setting.workload.options),
        device=setting.device, tier=setting.tier, incumbent=incumbent, deadline_s=setting.deadline_s,
        compile_isolation=outcome.isolation,
    )  # fmt: skip
    verdict = services.judge.judge(job)
    return _row(candidate["seq"], verdict.status, verdict), outcome.artifact


def _row(seq: int, status: Status, verdict: Verdict | None) -> dict[str, Any]:
    timing = verdict.timing if verdict else None
    timed = timing is not None and bool(timing.workloads)
    return {
        "seq": seq, "status": str(status), "us": timing.workloads[0].us if timing and timed else None,
        "modelled": bool(timing and timing.kind == "modelled"),
    }  # fmt: skip
