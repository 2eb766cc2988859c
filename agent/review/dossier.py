"""The dossier of a candidate: everything a reviewer, a report or a page shows of it, read once.

Reads the record and the blobs beside it; decides and writes nothing. A lost artifact is said, not
an error: the rest can still be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent.review import changes
from agent.review.decide import Decision, decisions, hashes_of, standing
from agent.review.risks import Matter, Risk, risks
from agent.review.sides import unified
from agent.store import Queries
from agent.workspace import Missing
from sandbox import artifact_store
from sandbox.strict import Malformed
from sandbox.verdict import Verdict


@dataclass(frozen=True)
class Version:
    """One recorded kernel: its row of `Queries.candidates`, source, last verdict and PTX."""

    row: Mapping[str, Any]
    matter: Matter

    @property
    def name(self) -> str:
        return f"{self.row['run']}-{self.row['seq']}"

    @property
    def seq(self) -> int:
        return int(self.row["seq"])

    @property
    def source(self) -> str:
        return self.matter.source

    @property
    def verdict(self) -> Verdict | None:
        return self.matter.verdict

    @property
    def used(self) -> changes.Used:
        return changes.Used(self.matter.verdict, self.matter.launches)


@dataclass(frozen=True)
class Dossier:
    """A candidate beside its parent and the seed. `standing`: the last word of a person, if any."""

    run: Mapping[str, Any]
    me: Version
    parent: Version | None
    seed: Version | None
    hashes: Mapping[str, str]
    risks: tuple[Risk, ...]
    lessons: tuple[str, ...]
    decisions: tuple[Decision, ...]
    standing: Decision | None
    promoted_because: str

    @property
    def bases(self) -> tuple[tuple[str, Version], ...]:
        """What it is compared with: parent, then the seed where that is another one."""
        found = [("parent", self.parent), ("seed", self.seed)]
        seen = {self.me.seq}
        out = []
        for word, version in found:
            if version is not None and version.seq not in seen:
                seen.add(version.seq)
                out.append((word, version))
        return tuple(out)

    def diff(self, base: Version) -> str:
        return unified((f"{base.name}.py", base.source), (f"{self.me.name}.py", self.me.source))

    def tuned(self, base: Version) -> str:
        """Tunables that differ, which no diff of sources shows."""
        was, now = (json.loads(v.row["tunables"] or "{}") for v in (base, self.me))
        return ", ".join(
            f"{k}: {was.get(k, 'unset')} -> {now.get(k, 'unset')}"
            for k in sorted({*was, *now})
            if was.get(k) != now.get(k)
        )

    @property
    def speedups(self) -> tuple[changes.Speedup, ...]:
        return changes.speedups(self.me.verdict)

    @property
    def kernel_times(self) -> tuple[changes.KernelTime, ...]:
        return changes.kernel_times(self.parent.verdict if self.parent else None, self.me.verdict)

    @property
    def resources(self) -> tuple[changes.Resource, ...]:
        return changes.resources(self.parent.used if self.parent else changes.Used(), self.me.used)


def queue(queries: Queries, run: str) -> list[int]:
    """Promoted candidates without a standing decision, the newest first; the seed needs none."""
    rows = [r for r in queries.candidates(run) if r["promoted"] and r["seq"]]
    return [r["seq"] for r in reversed(rows) if standing(queries, r) is None]


def promoted(queries: Queries, run: str) -> list[int]:
    """Every promoted candidate but the seed, the newest first."""
    return [r["seq"] for r in reversed(queries.candidates(run)) if r["promoted"] and r["seq"]]


def dossier(
    queries: Queries, run: Mapping[str, Any], seq: int, known: dict[int, Version] | None = None
) -> Dossier:
    """`known`: versions read so far, for several dossiers of one run. Raises NotFound, Missing (a
    lost source or verdict).
    """
    known = {} if known is None else known

    def read(row: Mapping[str, Any]) -> Version:
        if row["seq"] not in known:
            known[row["seq"]] = version(queries, row)
        return known[row["seq"]]

    rows = {r["seq"]: r for r in queries.candidates(run["id"])}
    row = rows.get(seq) or queries.candidate(f"{run['id']}-{seq}")
    me = read(row)
    above = rows.get(row["parent_seq"]) if row["parent_seq"] is not None else None
    parent = read(above) if above else None
    seed = read(rows[0]) if 0 in rows and seq else None
    because = [
        d["reason"]
        for d in queries.decisions(run["id"])
        if d["kind"] == "promote" and d["seq"] == seq
    ]
    return Dossier(
        run=run, me=me, parent=parent, seed=seed, hashes=hashes_of(queries, row),
        risks=risks(parent.matter if parent else None, me.matter),
        lessons=queries.lessons(run["id"]),
        decisions=tuple(d for d in decisions(queries, run["id"]) if d.seq == seq),
        standing=standing(queries, row), promoted_because=because[-1] if because else "",
    )  # fmt: skip


def version(queries: Queries, row: Mapping[str, Any]) -> Version:
    """Raises Missing."""
    source = queries.workspace.text(row["source"])
    verdict = queries.workspace.verdict(row["blob"]) if row["blob"] else None
    ptx, plan = _machine_work(queries, row["artifact"])
    return Version(row, Matter(source, ptx, plan, verdict))


def _machine_work(
    queries: Queries, sha256: str | None
) -> tuple[str | None, tuple[Mapping[str, Any], ...]]:
    """PTX of both plans and the step's launches; (None, ()) when the artifact is gone or damaged."""
    if not sha256:
        return None, ()
    try:
        artifact = artifact_store.load(queries.workspace.artifact(sha256))
    except (Missing, Malformed, OSError):
        return None, ()
    plans = [p for p in (artifact.step, artifact.prepare) if p]
    flags = tuple(
        {
            "kernel": x.kernel,
            "smem": x.smem,
            "cooperative": x.cooperative,
            "pdl": x.pdl,
            "cluster": x.cluster,
        }
        for x in artifact.step.launches
    )
    return "\n".join(p.ptx for p in plans), flags
