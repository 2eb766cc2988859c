"""`doctor` shows what was measured of a GPU, and nothing of a device that models its times; what isolates, and why."""

from __future__ import annotations

from click.testing import CliRunner

from agent.cli import main
from agent.commands.doctor import isolation, roofline

FOUND = {
    "bulk_read_bytes_per_s": 4.3e12, "copy_bytes_per_s": 4.2e12,
    "l2_read_bytes_per_s": 7.0e12, "l2_bytes": 60 << 20, "launch_gap_us": 2.5,
    "graph_node_gap_us": 1.5, "graph_node_gap_pdl_us": 0.9, "grid_barrier_us": 1.0, "flag_us": 0.5,
    "date": "2026-11-29T00:00:00+00:00", "missing": {"copy": "out of memory"},
}  # fmt: skip


def test_both_rates_and_every_gap_are_shown() -> None:
    facts = {"spec_rate": 4.8e12, "stream_rate": 4.4e12, "extra": {"roofline": FOUND}}
    text = "\n".join(roofline(facts))
    for part in ("4.40 TB/s, 92% of the specified 4.80 TB/s", "bulk copies into shared memory 4.30 TB/s",
                 "4.20 TB/s", "7.00 TB/s", "60 MiB", "2.50 us",
                 "1.50 us", "0.90 us", "grid barrier 1.00 us", "flag from SM to SM 0.50 us", "out of memory",
                 "measured 2026-11-29"):  # fmt: skip
        assert part in text, part


def test_a_modelled_device_has_no_roofline() -> None:
    assert roofline({"spec_rate": None, "stream_rate": None, "extra": {}}) == []


def test_a_weaker_jail_says_why_it_is_no_stronger_one() -> None:
    found = {"ok": True, "sentence": "no namespaces", "passed_over": ["strict A: no bwrap\n"]}
    assert isolation(found) == ["compile jail: no namespaces", "  not used: strict A: no bwrap"]
    assert isolation({"ok": False, "message": "none works"}) == ["compile jail: none works"]


def test_a_device_is_chosen_by_name() -> None:
    assert CliRunner().invoke(main, ["doctor", "--device", "tpu", "--no-probe"]).exit_code == 2
