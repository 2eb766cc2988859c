"""A defect of this program while it worked on a candidate: the candidate ends as `infra`, the
traceback is kept.
"""

from __future__ import annotations

import traceback
from typing import Any

from agent.outcome import Ending, end_step, ended
from agent.propose import keep
from agent.state import CandidateState, Deps
from agent.types import Proposal
from agent.workspace import read_json, write_bytes, write_json
from sandbox.verdict import Status


def crashed(state: CandidateState, deps: Deps, error: Exception) -> dict[str, Any]:
    """Close the version being worked on wherever it stood, so that `confirm` finds a verdict."""
    seq, step = state["seq"], state.get("step", 0)
    trace = "".join(traceback.format_exception(error))
    path = deps.files.folder / "crashes" / f"{seq}-{step}.txt"
    write_bytes(path, trace.encode())
    text = f"{type(error).__name__}: {error}"[:500]
    deps.reporter.say(f"candidate {seq}: a defect in kernelgen: {text} ({path})")
    ending = Ending(Status.INFRA, "defect", text)
    if read_json(deps.files.proposal(seq, step)) is None:
        keep(deps, state, step, Proposal("", "no proposal"), "propose")
    if read_json(deps.files.compiled(seq, step)) is None:
        end_step(deps, seq, step, ending)
    elif read_json(deps.files.judged(seq, step, deps.settings.tier)) is None:
        blob = deps.workspace.put_verdict(ended(deps, ending))
        write_json(
            deps.files.judged(seq, step, deps.settings.tier), {"verdict": blob, "gpu_seconds": 0.0}
        )
    return {"step": step, "go": "confirm"}
