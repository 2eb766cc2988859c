"""Proved ties: integer choices (router ids) that differ from the oracle's only where its own margin is noise.

The oracle is run again with the candidate's choices, and everything else must then match. A choice outside the proof is
a failure, and one that is no valid index never reaches the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from sandbox.judge import locate
from sandbox.judge.case import Case
from sandbox.judge.locate import Where
from sandbox.verdict import Failure
from targets.reference import Expected, Tensors, Tie

FEW = 2
"""Rows of choices that get a second look; a wrong kernel has more of them."""
Oracle = Callable[..., Expected]


@dataclass(frozen=True)
class Settled:
    """The expectation that decides, the choices it was made with (for the schedules), and how many rows were tied."""

    expected: Expected
    choices: Mapping[str, torch.Tensor]
    rows: int = 0


def settle(case: Case, given: Tensors, after: Tensors, where: Where) -> Settled | Failure:
    """What decides, or what no tie explains. A choice or two that few schedules do not explain are looked at again with
    all that the reference has, and with what the candidate itself left before them, which is judged like any output: a
    rounding that falls the other way is rare, and may be in no schedule."""
    run = case.reference.run
    found = _settle(
        case, given, after, where, lambda *forced: run(case.workload, given, "oracle", *forced)
    )
    closely = getattr(case.reference, "closely", None)
    if isinstance(found, Failure) and closely and int(found.where.get("rows", 0)) <= FEW:
        again = _settle(
            case, given, after, where, lambda *forced: closely(case.workload, given, after, *forced)
        )
        return found if isinstance(again, Failure) else again
    return found


def _settle(
    case: Case, given: Tensors, after: Tensors, where: Where, oracle: Oracle
) -> Settled | Failure:
    own = oracle()
    ties = {t.buffer: t for t in own.ties}
    choices = {name: own.tensors[name] for name in ties}
    differing = [n for n in ties if not torch.equal(after[n].to(choices[n].dtype), choices[n])]
    if not differing:
        return Settled(own, choices)
    for name in differing:
        bad = _unproved(case, given, (ties[name], choices[name], after[name]))
        if bad is not None:
            return _wrong(name, after[name], choices[name], (bad, where))
    taken = {name: after[name].clone() for name in ties}
    forced = oracle(taken)
    rows = 0
    for tie in forced.ties:
        theirs, ours = taken[tie.buffer], forced.tensors[tie.buffer]
        odd = _rows(theirs != ours, tie.allowed)
        bad = odd & ~tie.allowed | _ineligible(theirs, ours, tie)
        if bool(bad.any()):
            return _wrong(tie.buffer, theirs, ours, (bad, where))
        rows += int(_rows(theirs != choices[tie.buffer], tie.allowed).sum())
    settled = {**forced.tensors, **taken}
    return Settled(Expected(settled, forced.ties, forced.masks, forced.exact), taken, rows)


def _rows(bad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One flag a row: any element of the trailing dimensions."""
    return bad.reshape(*like.shape, -1).any(-1)


def _unproved(
    case: Case, given: Tensors, found: tuple[Tie, torch.Tensor, torch.Tensor]
) -> torch.Tensor | None:
    """Rows whose difference from the free oracle no tie explains, or whose choices are no valid set; None if none.

    Later rows of the same column (a later layer of the same token) may differ because an earlier one did, so only the
    first differing row of a column must be tied here.
    """
    tie, ours, theirs = found
    odd = _rows(theirs != ours, tie.allowed)
    first = odd if odd.ndim < 2 else odd & (odd.cumsum(0) == 1)
    bad = (first & ~tie.allowed) | _invalid(case, given, found)
    return bad if bool(bad.any()) else None


def _invalid(
    case: Case, given: Tensors, found: tuple[Tie, torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Rows that repeat a choice or name one that does not exist (without `eligible`: that no schedule made)."""
    tie, ours, theirs = found
    flat = theirs.reshape(*tie.allowed.shape, -1).to(torch.int64)
    ordered = flat.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    if tie.eligible is not None:
        return twice | ((flat < 0) | (flat >= tie.eligible.shape[-1])).any(-1)
    made = [ours.reshape(flat.shape)]
    for schedule in case.reference.schedules:
        if schedule != "oracle":
            made.append(
                case.reference.run(case.workload, given, schedule)
                .tensors[tie.buffer]
                .reshape(flat.shape)
            )
    pool = torch.cat(made, -1)
    known = (flat.unsqueeze(-1) == pool.unsqueeze(-2)).any(-1)
    return twice | ~known.all(-1)


def _ineligible(theirs: torch.Tensor, ours: torch.Tensor, tie: Tie) -> torch.Tensor:
    """Rows with a choice that is neither the oracle's nor within its margin."""
    if tie.eligible is None:
        return torch.zeros_like(tie.allowed)
    flat = theirs.reshape(*tie.allowed.shape, -1).to(torch.int64)
    own = (flat.unsqueeze(-1) == ours.reshape(flat.shape).unsqueeze(-2)).any(-1)
    return ~(own | tie.eligible.gather(-1, flat)).all(-1)


def _wrong(
    name: str, theirs: torch.Tensor, ours: torch.Tensor, at: tuple[torch.Tensor, Where]
) -> Failure:
    rows, where = at
    spread = rows.reshape(*rows.shape, *([1] * (theirs.ndim - rows.ndim))).expand(theirs.shape)
    shown = torch.where(spread, ours.to(theirs.dtype), theirs)
    if torch.equal(
        shown, theirs
    ):  # an invalid set equal to the oracle's cannot be; keep the message honest if it is
        shown = ours
    sentence, facts = locate.unequal(name, theirs, shown, where)
    count = {"rows": int(rows.sum())}
    return Failure("integers", f"{sentence}; no tie explains it", {**facts, **count})
