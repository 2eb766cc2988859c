"""Small pure functions whose edges matter: claims, slugs, ids, defaults, limits on steps and deadlines."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.claims import docstring, predicted_gain
from agent.config import RunSettings, deadline, options, settings_from_json
from agent.graph import most_steps
from agent.ids import ALPHABET, new_run_id
from agent.search import Limits
from agent.seats import default_proposer
from agent.summary import resume_command
from agent.winners import device_slug, target_slug
from agent.workspace import Place
from sandbox.verdict import Tier
from targets.base import Options


@pytest.mark.parametrize(
    ("text", "gain"),
    [
        ("Predicted gain: 1.05", 1.05),
        ("predicted gain: 5 %", 1.05),
        ("I predict 1.2x", 1.2),
        ("gains something", None),
        ("Predicted gain: 100000", None),
    ],
)
def test_a_predicted_gain_is_read_as_a_speed_up(text: str, gain: float | None) -> None:
    assert predicted_gain(text) == (None if gain is None else pytest.approx(gain))


@pytest.mark.parametrize("source", ["x = (", "(" * 5000, "\x00", '"' * 3])
def test_a_source_that_does_not_parse_has_no_docstring(source: str) -> None:
    assert docstring(source) == ""


def test_folders_are_named_by_device_and_target() -> None:
    assert device_slug({"kind": "cuda", "name": "NVIDIA H200"}) == "h200"
    assert device_slug({"kind": "cuda", "slug": "../../etc"}) == "etc"
    assert device_slug({"kind": "cpu", "name": "x"}) == "cpu"
    assert target_slug("/a/b/my target.py:Mine") == "my-target-mine"
    assert target_slug("..") == "target"


def test_run_ids_sort_by_time_and_do_not_collide() -> None:
    ids = [new_run_id() for _ in range(50)]
    assert len(set(ids)) == 50
    assert all(len(i) == 26 and set(i) <= set(ALPHABET) for i in ids)
    assert ids[0][:8] <= ids[-1][:8]


def test_without_a_key_the_tuner_is_used() -> None:
    assert default_proposer({}) == "tuner"
    assert default_proposer({"ANTHROPIC_API_KEY": "k"}) == "anthropic"
    assert default_proposer({"OPENAI_BASE_URL": "http://localhost:8000/v1"}) == "openai"


def test_settings_survive_the_disk() -> None:
    s = RunSettings(
        "t", Options("tp8", rows=2, extra={"a": 1.5}), "cuda", "sm_90a", "tuner",
        limits=Limits(usd=2.0), confirm=Tier.FULL,
    )  # fmt: skip
    assert settings_from_json(s.to_json()) == s


def test_options_of_a_target_keep_their_types() -> None:
    found = options("tiny", {"rows": 4}, ("a=1", "b=0.5", "c=true", "d=sharded"))
    assert found.extra == {"a": 1, "b": 0.5, "c": True, "d": "sharded"}
    with pytest.raises(ValueError, match="NAME=VALUE"):
        options("tiny", {}, ("a",))


def test_higher_tiers_have_more_time_and_a_wrong_edge_ends() -> None:
    assert deadline(Tier.SCREEN, None, "cuda") == 120
    assert deadline(Tier.PROMOTE, 60.0, "cpu") == 480
    s = RunSettings("t", Options(), "cpu", "sm_90a", "tuner", limits=Limits(rounds=2))
    assert 4 * 3 < most_steps(s) < 200


def test_what_goes_on_with_a_run_names_a_record_and_a_folder_that_are_not_the_usual_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    usual = Place(Path("runs.db"), tmp_path / "kernels_out")
    assert resume_command(usual, "01AB") == "kernelgen resume 01AB"
    other = Place(Path("a b/runs.db"), Path("won"))
    assert resume_command(other, "01AB") == "kernelgen resume 01AB --db 'a b/runs.db' --out won"
