"""Held-out cases: lawful, each really different from the plain problem, and unknown to those who propose."""

import pytest
import torch

from targets.kimi_k3 import disturb, held_out
from targets.reference import Tensors
from tests.targets.kimi import PARTS, REFERENCE, run, tensors, workload


def changed(before: Tensors, after: Tensors) -> list[str]:
    return [n for n in before if after[n] is not before[n] and not torch.equal(after[n], before[n])]


@pytest.mark.parametrize("part", PARTS)
def test_no_public_list_names_them(part: str) -> None:
    w = workload(part, rows=4)
    hidden = REFERENCE.held_out(w)
    assert len(hidden) >= 5 and not set(hidden) & set(REFERENCE.distributions(w))
    assert not {n.removeprefix("held-out.") for n in hidden} & set(disturb.names(w))


@pytest.mark.parametrize("name", held_out.names(workload("mla", rows=4)))
def test_attention_stays_finite_and_changes(name: str) -> None:
    w = workload("mla", rows=4)
    t = tensors(w, seed=3)
    made = REFERENCE.disturb(w, name, 5, t)
    assert changed(t, made), "nothing changed"
    before, after = run(w, t), run(w, made)
    assert all(
        torch.isfinite(v.float()).all() for v in after.tensors.values() if v.is_floating_point()
    )
    assert any(not torch.equal(before.tensors[n], after.tensors[n]) for n in after.tensors)


def test_paging_stays_lawful() -> None:
    """Rows to be written are the last of each request, in pages of its own."""
    w = workload("mla", rows=8)
    page = int(w.dims["page"])
    for name in ("length_one", "page_edges", "ragged", "hot_page"):
        made = REFERENCE.disturb(w, f"held-out.{name}", 4, tensors(w, seed=2))
        lengths, table = made["inputs.lengths"], made["inputs.block_table"].long()
        assert int(lengths.min()) >= 0 and int(lengths.max()) <= int(w.dims["context"])
        rows = made["inputs.slot_mapping"].view(len(lengths), -1)[:, -1]
        for b, row in enumerate(rows.tolist()):
            last = int(lengths[b]) - 1
            assert row == (-1 if last < 0 else int(table[b, last // page]) * page + last % page), (
                name
            )
        live = rows[rows >= 0]
        assert len(set(live.tolist())) == len(live), f"{name}: two requests write one row"


def test_near_ties_are_proved_and_one_expert_is_chosen_by_all() -> None:
    w = workload("router", rows=8)
    t = tensors(w, seed=1)
    near = run(w, REFERENCE.disturb(w, "held-out.near_ties", 1, t))
    assert bool(near.ties[0].allowed.any())
    ids = run(w, REFERENCE.disturb(w, "held-out.one_expert", 6, t)).tensors["outputs.ids"]
    assert bool((ids == 6 % int(w.dims["experts"])).any(-1).all())


def test_a_hot_row_is_seen_by_its_request_alone() -> None:
    """The change of one request's cache row leaves the others' outputs bit for bit."""
    w = workload("mla", rows=4)
    t = tensors(w, seed=7)
    made = REFERENCE.disturb(w, "held-out.hot_row", 2, t)
    one = dict(t)
    rows = {
        n: (made[n] != t[n]).view(-1, t[n].shape[-1]).any(-1).nonzero().flatten().tolist()
        for n in changed(t, made)
    }
    name, found = next(iter(rows.items()))
    assert len(found) == 4
    one[name] = t[name].clone()
    one[name].view(-1, t[name].shape[-1])[found[0]] = made[name].view(-1, t[name].shape[-1])[
        found[0]
    ]
    a, b = run(w, t).tensors, run(w, one).tensors
    different = {
        n: (a[n] != b[n]).view(a[n].shape[0], -1).any(-1).sum().item()
        for n in a
        if n.startswith("outputs.y")
    }
    assert max(different.values()) == 1
