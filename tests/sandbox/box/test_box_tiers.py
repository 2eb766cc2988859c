"""Choosing a tier: by trying, strongest first, and closed when nothing may be used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sandbox import box
from sandbox.box import bwrap, landlock, tiers
from sandbox.box.recipe import Way
from tests.sandbox.box.specs import spec

ORDER = list(box.BoxTier)


def test_what_is_chosen_is_the_strongest_on_offer(
    choice: box.Choice, offered: list[box.Choice]
) -> None:
    assert offered[0].isolation.tier is choice.isolation.tier
    ranks = [ORDER.index(found.isolation.tier) for found in offered]
    assert ranks == sorted(ranks)


def test_each_tier_on_offer_runs_a_job(offered: list[box.Choice]) -> None:
    for found in offered:
        boxed = box.start(spec("echo"), found)
        assert isinstance(boxed, box.Boxed), found
        with boxed:
            assert not isinstance(boxed.wait_ready(60), box.Broken), found
            assert boxed.verify() is None, found
            assert boxed.send({"n": 1}, {}, 60) is None
            frame = boxed.read(box.Caps(), 60)
        assert isinstance(frame, box.Frame) and frame.body == {"echo": {"n": 1}}
        stored = json.loads(json.dumps(boxed.isolation.to_json()))
        assert stored["tier"] == found.isolation.tier
        assert set(stored) == {
            "tier",
            "variant",
            "uid",
            "bwrap",
            "landlock_abi",
            "filters",
            "memory",
        }


def test_none_needs_a_word_of_trust() -> None:
    refused = box.choose(spec("echo"), box.Settings(tier=box.BoxTier.NONE))
    assert isinstance(refused, box.Refusal) and "trust" in refused.sentence
    found = box.choose(spec("echo"), box.Settings(tier=box.BoxTier.NONE, trust_this_code=True))
    assert isinstance(found, box.Choice)
    assert found.isolation.tier is box.BoxTier.NONE and not found.isolation.tier.jailed
    assert found.isolation.filters == 0
    assert "NO ISOLATION" in found.sentence


def test_trust_alone_weakens_nothing(choice: box.Choice) -> None:
    found = box.choose(spec("echo"), box.Settings(trust_this_code=True))
    assert isinstance(found, box.Choice)
    assert found.isolation.tier is choice.isolation.tier


def test_a_named_tier_that_fails_is_not_replaced(tmp_path: Path) -> None:
    settings = box.Settings(tier=box.BoxTier.STRICT, bwrap=tmp_path / "no-such-bwrap")
    refused = box.choose(spec("echo"), settings)
    assert isinstance(refused, box.Refusal)
    assert "strict" in refused.sentence
    assert refused.tried == (f"strict: {tmp_path / 'no-such-bwrap'} does not run",)


def test_a_bwrap_that_only_pretends_is_found_out(tmp_path: Path) -> None:
    """It reports a version and starts nothing that could be looked at: that a program answers proves nothing."""
    fake = tmp_path / "bwrap"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && { echo bubblewrap 9.9; exit; }\nsleep 30\n')
    fake.chmod(0o755)
    os.chmod(tmp_path, 0o755)
    way = Way(box.BoxTier.STRICT, "A", os.getuid() == 0, bwrap.Bwrap(fake, "9.9"))
    found = tiers.probe(spec("echo"), way) if bwrap.version(fake) else None
    assert isinstance(found, box.Broken)


def test_a_chosen_tier_that_breaks_later_is_not_replaced(
    choice: box.Choice, tmp_path: Path
) -> None:
    if choice.way.bwrap is None:
        pytest.skip("the tier here does not use bubblewrap")
    gone = Way(
        choice.way.tier, choice.way.variant, choice.way.drop, bwrap.Bwrap(tmp_path / "gone", "0")
    )
    boxed = box.start(spec("echo"), box.Choice(choice.isolation, gone, ""))
    assert isinstance(boxed, box.Boxed)
    with boxed:
        ready = boxed.wait_ready(60)
    assert isinstance(ready, box.Broken) and ready.reason == "box"


def test_weak_is_never_tried_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(landlock, "abi", lambda: 0)
    monkeypatch.setattr(bwrap, "candidates", lambda configured: [])
    assert list(tiers.ways(box.Settings())) == []
    assert [way.tier for way in tiers.ways(box.Settings(tier=box.BoxTier.WEAK))] == [
        box.BoxTier.WEAK
    ]


def test_root_always_gives_the_box_another_uid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(landlock, "abi", lambda: 1)
    for tier in (None, *box.BoxTier):
        for way in tiers.ways(box.Settings(tier=tier)):
            assert way.drop, way


def test_an_ordinary_user_needs_a_landlock_that_guards_truncation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    settings = box.Settings(tier=box.BoxTier.LANDLOCK)
    for version, offered in ((0, False), (2, False), (3, True)):
        monkeypatch.setattr(landlock, "abi", lambda version=version: version)
        assert bool(list(tiers.ways(settings))) is offered, version


@pytest.mark.parametrize(
    ("version", "files", "network", "scope", "size"),
    [(1, 0x1FFF, 0, 0, 8), (2, 0x3FFF, 0, 0, 8), (3, 0x7FFF, 0, 0, 8), (4, 0x7FFF, 3, 0, 16), (5, 0xFFFF, 3, 0, 16),
     (6, 0xFFFF, 3, 3, 24), (7, 0xFFFF, 3, 3, 24)],
)  # fmt: skip
def test_landlock_asks_for_what_each_abi_knows(
    version: int, files: int, network: int, scope: int, size: int
) -> None:
    rules = landlock.rules(version, [Path("/opt/python")], "/scratch")
    assert rules["handled"] == [files, network, scope] and rules["size"] == size
    granted = dict(rules["paths"])
    assert all(rights & ~files == 0 for rights in granted.values())
    assert granted["/usr"] & landlock.WRITE_FILE == 0
    assert granted["/scratch"] & landlock.WRITE_FILE and not granted["/scratch"] & landlock.EXECUTE
    assert not {"/", "/tmp", "/home", "/proc", "/dev", "/dev/shm"} & set(granted)
