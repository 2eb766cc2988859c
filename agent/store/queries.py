"""Reading runs.db: rows as dictionaries for listings, and the run's history as the loop's types.

Reads only; every call opens its own connection, so any thread may call.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from agent import search
from agent.store.database import connect
from agent.store.store import Store
from agent.types import Tried
from agent.workspace import Workspace
from sandbox.verdict import Tier, Verdict


class NotFound(LookupError):
    """No such run or candidate; the message says what was looked for."""


@dataclass(frozen=True)
class Queries:
    store: Store
    workspace: Workspace

    def rows(self, sql: str, args: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        with connect(self.store.path) as db:
            return list(db.query(sql, args or {}))

    def runs(self, target: str | None = None, limit: int = 50) -> list[dict[str, Any]]:
        """Newest first, with counts, the best candidate's numbers and what was paid."""
        return self.rows(
            """
            select r.*, (select count(*) from candidates c where c.run = r.id) as candidates,
              (select count(*) from decisions d where d.run = r.id and d.kind = 'promote'
                and d.candidate != (select id from candidates where run = r.id and seq = 0))
                as promotions,
              (select sum(cost) from model_calls m where m.run = r.id) as usd,
              (select sum(input_tokens + output_tokens) from model_calls m where m.run = r.id)
                as tokens
            from runs r where :target is null or r.target = :target
            order by r.rowid desc limit :limit""",
            {"target": target, "limit": limit},
        )

    def run(self, name: str) -> dict[str, Any]:
        """A run by id, unique prefix or suffix (4 characters or more), or `last`: the one that was opened last,
        whatever the clock said. Raises NotFound.
        """
        if name == "last":
            found = self.rows("select * from runs order by rowid desc limit 1")
        else:
            found = self.rows(
                "select * from runs where id = :n or (length(:n) >= 4 and"
                " (substr(id, 1, length(:n)) = :n or substr(id, -length(:n)) = :n))",
                {"n": name.upper()},
            )
        if not found:
            raise NotFound(f"no run {name!r} in {self.store.path}")
        if len(found) > 1:
            raise NotFound(f"{name!r} fits {len(found)} runs; give more of the id")
        return found[0]

    def candidates(self, run: str) -> list[dict[str, Any]]:
        """In order of `seq`, each with the first measurement of its last verdict. Of evidence that came in beside what
        the run waited for, one that passed and timed nothing, or at a lower tier, does not stand for the others."""
        return self.rows(
            """
            select c.*, p.seq as parent_seq, m.us, m.us_per_layer, m.kind, m.launches,
              m.fraction_of_floor_measured, m.fraction_of_floor_spec, m.speedup_incumbent,
              m.incumbent_low, m.incumbent_high, m.speedup_graph, v.blob, v.tier, v.trust,
              exists (select 1 from decisions d where d.candidate = c.id and d.kind = 'promote')
                as promoted
            from candidates c
            left join candidates p on p.id = c.parent
            left join verdicts v on v.id = (select id from verdicts
              where candidate = c.id and (artifact is c.artifact)
              order by origin = 'imported' and status = 'passed' and (
                not exists (select 1 from measurements where verdict = verdicts.id)
                or instr(:tiers, tier) < (select max(instr(:tiers, tier)) from verdicts o
                  where o.candidate = verdicts.candidate and (o.artifact is verdicts.artifact)
                    and o.origin <> 'imported')
              ), id desc limit 1)
            left join measurements m on m.id = (select min(id) from measurements
              where verdict = v.id)
            where c.run = :run order by c.seq""",
            {"run": run, "tiers": " ".join(Tier)},
        )

    def candidate(self, name: str) -> dict[str, Any]:
        """A candidate by RUN-SEQ (RUN as in `run`). Raises NotFound."""
        run, dash, seq = name.rpartition("-")
        if not dash or not seq.isdigit():
            raise NotFound(f"{name!r} is no candidate: write RUN-NUMBER")
        row = self.run(run)
        for candidate in self.candidates(row["id"]):
            if candidate["seq"] == int(seq):
                return candidate
        raise NotFound(f"run {row['id']} has no candidate {seq}")

    def verdicts(self, candidate: int) -> list[dict[str, Any]]:
        return self.rows(
            "select * from verdicts where candidate = :c order by step, id", {"c": candidate}
        )

    def decisions(self, run: str) -> list[dict[str, Any]]:
        return self.rows(
            "select d.*, c.seq from decisions d left join candidates c on c.id = d.candidate"
            " where d.run = :run order by d.round, d.id",
            {"run": run},
        )

    def calls(self, run: str) -> list[dict[str, Any]]:
        return self.rows("select * from model_calls where run = :run order by id", {"run": run})

    def lessons(self, run: str) -> tuple[str, ...]:
        found = self.rows(
            "select text from lessons where run = :run order by round, n", {"run": run}
        )
        return tuple(row["text"] for row in found)

    def history(self, run: str) -> tuple[Tried, ...]:
        """Every recorded candidate with its last verdict. Raises Missing for a lost blob."""
        return tuple(self._tried(row) for row in self.candidates(run) if row["blob"])

    def artifact_owner(self, run: str, sha256: str) -> dict[str, Any] | None:
        """The first candidate of the run of which some version has that artifact."""
        found = self.rows(
            "select c.*, v.step, v.tunables as judged_tunables from candidates c"
            " join verdicts v on v.candidate = c.id"
            " where c.run = :run and v.artifact = :a order by c.seq, v.id limit 1",
            {"run": run, "a": sha256},
        )
        return found[0] if found else None

    def judged_ptx(self, run: str, ptx_sha256: str) -> dict[str, Any] | None:
        """The earliest verdict in the run of the same machine work, for near-clones."""
        found = self.rows(
            "select c.seq, v.blob from verdicts v join candidates c on c.id = v.candidate"
            " join artifacts a on a.sha256 = v.artifact"
            " where c.run = :run and a.ptx_sha256 = :p and v.status not in ('infra', 'cancelled')"
            " order by v.id limit 1",
            {"run": run, "p": ptx_sha256},
        )
        return found[0] if found else None

    def _tried(self, row: dict[str, Any]) -> Tried:
        verdict: Verdict = self.workspace.verdict(row["blob"])
        timing = search.workload(verdict)
        ratio = timing.speedup_incumbent if timing else None
        return Tried(
            seq=row["seq"], round=row["round"], parent=row["parent_seq"],
            direction=row["direction"] or "", note=row["note"] or "",
            predicted_gain=row["predicted_gain"], source=row["source"],
            tunables=json.loads(row["tunables"] or "{}"), verdict=verdict,
            declared={k: tuple(v) for k, v in json.loads(row["declared"] or "{}").items()},
            us=timing.us if timing else None, fraction=search.fraction(verdict),
            speedup=ratio.value if ratio else None, promoted=bool(row["promoted"]),
            twin=row["duplicate_of"] if row["duplicate_of"] != row["seq"] else None,
        )  # fmt: skip
