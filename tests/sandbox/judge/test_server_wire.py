"""The server's request loop over pipes, without children, and the wire against arbitrary input."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox import judge_wire
from sandbox.jobs import JudgeJob
from sandbox.judge.server import Channel, serve
from sandbox.strict import Malformed
from sandbox.verdict import Failure, Status, Verdict

JOB = JudgeJob(Path("/a/b"), "t", {"preset": "tiny"}, "cpu")


@dataclass
class Keeper:
    """Answers at once and remembers what it was asked."""

    asked: list[Any] = field(default_factory=list)

    def judge(self, job: JudgeJob) -> Verdict:
        self.asked.append(job)
        return judge_wire.without_judging(job, Status.WRONG, Failure("r", "m"))

    def probe(self, device: str) -> Mapping[str, Any]:
        self.asked.append(device)
        return {"ok": True}


def talk(*requests: object, tail: bytes = b"") -> tuple[list[dict[str, Any]], Keeper]:
    """All replies to these requests, in order, until the stream ends."""
    into, asks = os.pipe()
    answers, out = os.pipe()
    for request in requests:
        os.write(asks, judge_wire.pack(request))  # type: ignore[arg-type]
    os.write(asks, tail)
    os.close(asks)
    keeper = Keeper()
    try:
        serve(Channel(into, out), keeper)
    finally:
        os.close(out)
        os.close(into)
        frames = judge_wire.Frames(answers)
        while not frames.closed:
            frames.pump()
        os.close(answers)
    replies = []
    while (reply := frames.next()) is not None:
        replies.append(reply)
    return replies, keeper


def test_requests_are_answered_in_order_and_cancelling_nothing_is_silent() -> None:
    job = judge_wire.job_to_json(JOB)
    replies, keeper = talk(
        {"op": "cancel", "id": 9}, {"op": "probe", "id": 1, "device": "cuda"}, {"op": "judge", "id": 2, "job": job},
        {"op": "dance", "id": 3}, {"op": "judge", "id": 4, "job": {**job, "tier": "best"}},
    )  # fmt: skip
    assert [r["id"] for r in replies] == [1, 2, 3, 4]
    assert replies[0]["probe"] == {"ok": True}
    assert judge_wire.verdict_from_json(replies[1]["verdict"]).status is Status.WRONG
    assert "unknown request 'dance'" in replies[2]["error"]
    assert "best" in replies[3]["error"]
    assert keeper.asked == ["cuda", JOB]


@pytest.mark.parametrize(
    "tail", [b"\x00\x00\x00\x02[]", b"\x00\x00\x00\x03abc", b"\xff\xff\xff\xff"]
)
def test_a_broken_stream_ends_the_server(tail: bytes) -> None:
    with pytest.raises(Malformed):
        talk(tail=tail)


def test_half_a_frame_is_no_request() -> None:
    replies, keeper = talk(tail=b'\x00\x00\x00\x09{"op"')
    assert (replies, keeper.asked) == ([], [])


def test_a_cancellation_is_seen_while_a_job_runs() -> None:
    into, asks = os.pipe()
    channel = Channel(into, 1)
    channel.current = 5
    assert not channel.ready()
    os.write(
        asks, judge_wire.pack({"op": "cancel", "id": 4}) + judge_wire.pack({"op": "probe", "id": 6})
    )
    assert not channel.ready()
    os.write(asks, judge_wire.pack({"op": "cancel", "id": 5}))
    assert channel.ready()
    os.close(asks)
    channel.current = 6
    assert channel.ready()  # nobody is left to answer
    os.close(into)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from(sorted(JudgeJob.__dataclass_fields__)), anything)
def test_a_job_with_any_field_replaced_is_a_job_or_malformed(name: str, value: object) -> None:
    try:
        job = judge_wire.job_from_json({**judge_wire.job_to_json(JOB), name: value})
    except Malformed:
        return
    assert isinstance(job, JudgeJob)
    assert 0 < job.deadline_s <= judge_wire.MAX_DEADLINE_S


@given(anything)
def test_a_frame_holds_what_went_in_but_for_numbers_json_lacks(value: object) -> None:
    data = judge_wire.pack({"value": value})
    body = json.loads(data[4:])
    assert body == judge_wire.finite({"value": value})
    assert int.from_bytes(data[:4], "big") == len(data) - 4


@given(anything)
def test_what_is_no_verdict_is_malformed(value: object) -> None:
    with pytest.raises(Malformed):
        judge_wire.verdict_from_json(value)
