"""A failure is traced to the smallest problem on which it still shows."""

from types import SimpleNamespace
from typing import Any

import torch

from sandbox.devices.fake import FakeDevice
from sandbox.judge import smallest
from sandbox.judge.case import Case
from sandbox.judge.checks import Moment
from sandbox.judge.dtypes import TORCH
from sandbox.judge.locate import Where, spell
from sandbox.judge.seeds import Seeds
from sandbox.verdict import Failure
from tests.targets.kimi import REFERENCE, run, tensors, workload


def test_cases_go_from_one_short_request_to_one_long_one() -> None:
    w = workload("mla", rows=4)
    t = tensors(w)
    made = list(REFERENCE.smaller(w, t))
    assert made[0][0] == "request 0 alone, length 1" and len(made) <= 8
    lengths = made[1][1]["inputs.lengths"].tolist()
    assert lengths == [0, 1, 0, 0]
    assert int((made[1][1]["inputs.slot_mapping"] >= 0).sum()) == 1
    assert t["inputs.lengths"].min() > 1, "the given tensors stay"
    assert all(torch.isfinite(v.float()).all() for v in run(w, made[1][1]).tensors.values())
    assert list(REFERENCE.smaller(workload("attn-res"), tensors(workload("attn-res")))) == []


class BrokenRig:
    """A kernel that is wrong for request 1 as soon as it has two tokens."""

    def __init__(self, case: Case, t: dict[str, torch.Tensor]) -> None:
        self.case, self.t = case, dict(t)
        self.arena = self.t
        for b in case.buffers("outputs"):
            self.t[b.name] = torch.zeros(b.shape, dtype=TORCH[b.dtype])

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.t.update({n: x.clone() for n, x in states.items()})

    set_inputs = set_states

    def dirty(self, *how: Any) -> None:
        """Outputs stay as they are."""

    check_integrity = dirty

    def copy_out(self, *groups: str) -> dict[str, torch.Tensor]:
        return {b.name: self.t[b.name].clone() for b in self.case.buffers(*groups)}

    def launch(self, phase: str) -> None:
        e = run(self.case.workload, self.t, "split")
        for name, value in e.tensors.items():
            mask = e.masks.get(name)
            while mask is not None and mask.ndim < value.ndim:
                mask = mask.unsqueeze(-1)
            self.t[name] = value if mask is None else torch.where(mask, value, self.t[name])
        if int(self.t["inputs.lengths"][1]) > 1:
            self.t["outputs.y.0"] = self.t["outputs.y.0"].clone()
            self.t["outputs.y.0"][1] *= 2


def test_the_smallest_failing_case_is_named() -> None:
    w = workload("mla", rows=2)
    case = Case(SimpleNamespace(), None, REFERENCE, w, FakeDevice({}), Seeds(1))  # type: ignore[arg-type]
    t = tensors(w)
    trial: Any = SimpleNamespace(rig=BrokenRig(case, t))
    m = Moment(t, {}, {}, Where(0, 0))
    found = smallest.shrunk(trial, m, Failure("band", "outputs.y.0: wrong"))
    page = int(w.dims["page"])
    assert found.where["smallest"] == f"request 1 alone, length {page + 1}", found
    assert "smallest case found that fails: request 1 alone" in found.message


def test_places_are_named_by_token_slot_and_head() -> None:
    where = Where(0, 0, axes=REFERENCE.axes)
    assert spell([2, 1, 78], where.names("states.layers.2.S")) == "slot 2, head 1, value 78"
    assert spell([3], where.names("outputs.y.0")) == "token 3"
    assert spell([0, 4], where.names("states.layers.3.kv")) == "page 0, row 4"
