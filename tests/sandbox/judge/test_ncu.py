"""Nsight Compute's raw page becomes metrics by kernel; hosts without counters are told why. A fake tool stands in."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.judge import ncu
from tests.sandbox.judge import toy

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","dram__bytes_read.sum","dram__throughput.avg.pct_of_peak_sustained_elapsed","gpu__time_duration.sum",'
    '"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"'
)
UNITS = '"","","","","","","","","","","","byte","%","ns","inst"'
PAGE = f"""==PROF== Connected to process 4242 (/usr/bin/python3.12)
==PROF== Profiling "kernel_cutlass_gemv_tensorptr" - 0: 0%....50%....100% - 7 passes
==PROF== Profiling "kernel_cutlass_gemv_tensorptr" - 1: 0%....50%....100% - 7 passes
replayed 4 launches in 0.4 s
==PROF== Disconnected from process 4242
{HEAD}
{UNITS}
"0","4242","python3.12","host","kernel_cutlass_gemv_tensorptrbf16_0","1","7","(256, 1, 1)","(132, 1, 1)","0","9.0",\
"90,177,536","81.5","25,000","12.5"
"1","4242","python3.12","host","kernel_cutlass_gemv_tensorptrbf16_0","1","7","(256, 1, 1)","(132, 1, 1)","0","9.0",\
"90,177,536","61.5","75,000","16.5"
"2","4242","python3.12","host","kernel_cutlass_norm_tensorptrbf16_0","1","7","(128, 1, 1)","(1, 1, 1)","0","9.0",\
"14,336","0.1","2,400","n/a"
"""


def test_rows_of_one_kernel_are_summed_or_weighted_by_time() -> None:
    found = ncu.by_kernel(ncu.parse(PAGE))
    assert list(found) == ["gemv", "norm"]
    gemv = found["gemv"]
    assert gemv["launches"] == 2 and gemv["us"] == pytest.approx(100.0)
    assert gemv["memory read, bytes"] == 2 * 90_177_536
    assert gemv["memory, GB/s"] == pytest.approx(2 * 90_177_536 / 100e-6 / 1e9, rel=1e-3)
    assert gemv["memory throughput, %"] == pytest.approx(0.25 * 81.5 + 0.75 * 61.5)
    assert gemv["stall long scoreboard"] == pytest.approx(0.25 * 12.5 + 0.75 * 16.5)
    assert "stall long scoreboard" not in found["norm"]  # n/a is no number


@pytest.mark.parametrize(
    "text, word",
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "may not read"),
        ("==WARNING== No kernels were profiled.\n", "no kernel of the plan"),
        ("==ERROR== something new\n", "something new"),
        ("", "printed nothing"),
    ],
)
def test_output_without_metrics_says_why(text: str, word: str) -> None:
    with pytest.raises(ncu.Unreadable, match=word):
        ncu.parse(text)


def fake(folder: Path, body: str) -> Path:
    tool = folder / "ncu"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)
    return tool


def described(tmp_path: Path) -> Path:
    folder = tmp_path / "replay"
    folder.mkdir()
    artifact = toy.saved(tmp_path, toy.artifact(("k", "tail")))
    (folder / "artifact").write_text(str(artifact))
    return folder


def test_the_tool_is_asked_for_the_plans_kernels_with_clocks_left_alone(tmp_path: Path) -> None:
    folder = described(tmp_path)
    (tmp_path / "page").write_text(PAGE)
    tool = fake(tmp_path, f'printf "%s\\n" "$@" > {tmp_path}/asked; cat {tmp_path}/page')
    assert set(ncu.collect(tool, folder)) == {"gemv", "norm"}
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[asked.index("--clock-control") + 1] == "none"
    assert asked[asked.index("--kernel-name") + 1] == "regex:^(k|tail)$"
    assert asked[asked.index("--launch-skip") + 1] == "2"  # the first step loads code
    assert asked[-3:] == ["sandbox.judge.replay", str(folder), "plain"]


def test_a_tool_that_hangs_is_stopped(tmp_path: Path) -> None:
    found = ncu.collect(fake(tmp_path, "sleep 60"), described(tmp_path), 0.3)
    assert "stopped" in found["unavailable"]


def test_a_page_recorded_on_an_h200() -> None:
    """A bf16 GEMV of torch, 90.2 MB of weights: what Nsight Compute 2025.3 wrote, device attributes left out."""
    (row,) = ncu.parse((Path(__file__).parent / "ncu_h200.csv").read_text())
    assert row["us"] == pytest.approx(26.016) and row["memory read, bytes"] == 90_177_280
    assert (row["memory throughput, %"], row["L2 hit, %"], row["tensor pipe, %"]) == (
        74.02,
        28.31,
        2.89,
    )
    assert (row["stall long scoreboard"], row["stall membar"]) == (11.94, 0.0)
    (found,) = ncu.by_kernel([row]).values()
    assert found["memory, GB/s"] == pytest.approx(3554.8, abs=0.1)
