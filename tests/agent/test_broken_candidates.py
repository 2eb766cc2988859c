"""`evaluate` on the example's kernel and on broken versions of it: each gets its status, and the next one is judged.

On the `cpu` device, and (marked gpu) on the first GPU. Guard zones name a store just beyond a buffer; a GPU itself
notices only one far away.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NORMAL = (ROOT / "examples/my_seed.py").read_text()
STORE = "            y[row, i] = v.to(BFloat16)\n"
SCALE = "scale = cute.math.rsqrt(total"
TOTAL = "        total = cute.arch.warp_reduction_sum(total)\n"
ENDLESS = """\
        going = True
        while going:
            total = total + Float32(1.0)
            y[row, lane] = total.to(BFloat16)
            cute.arch.fence_acq_rel_gpu()
            going = y[row, lane].to(Float32) > Float32(-1.0)
"""
BROKEN = {
    "wrong": (SCALE, SCALE.replace("cute", "Float32(1.05) * cute")),
    "hanging": (TOTAL, TOTAL + ENDLESS),
    "beyond": (STORE, STORE.replace("row,", "row + cfg.dims.rows,")),
    "wild": (STORE, STORE.replace("row,", "row + 100000000,")),
    "unwritten": (STORE, "            if i < cfg.dims.hidden - 32:\n    " + STORE),
}
EXPECTED = {
    "cpu": {
        "wrong": "wrong", "hanging": "hang", "beyond": "fault", "wild": "fault", "unwritten": "wrong",
    },
    "cuda": {
        "wrong": "wrong", "hanging": "hang", "beyond": "cheat", "wild": "fault", "unwritten": "wrong",
    },
}  # fmt: skip


def statuses(folder: Path, device: str) -> list[tuple[str, str]]:
    """(file, status) in the order of judging: a normal one before, between and after the broken ones."""
    (folder / "normal.py").write_text(NORMAL)
    files = ["normal.py"]
    for name, (before, after) in BROKEN.items():
        assert before in NORMAL, name
        # the last place: the first is the same line in the loop of the sum
        head, _, tail = NORMAL.rpartition(before)
        (folder / f"{name}.py").write_text(head + after + tail)
        files += [f"{name}.py", "normal.py"]
    target = f"{ROOT / 'examples/my_target.py'}:RmsNorm"
    call = "import sys; from agent.cli import main; sys.argv[0] = 'kernelgen'; main()"
    done = subprocess.run(
        [sys.executable, "-c", call, "evaluate", "--target", target, "--device", device, "--deadline", "60",
         "--db", str(folder / "runs.db"), "--json", *files],
        cwd=folder, capture_output=True, text=True, check=False, timeout=800,
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(done.stdout)
    got = [c["verdict"]["status"] for c in answer["results"]]
    assert len(got) == len(files), done.stderr
    return [(n.removesuffix(".py"), s) for n, s in zip(files, got, strict=True)]


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_broken_kernels_get_their_status_and_the_next_is_judged(
    device: str, tmp_path: Path
) -> None:
    found = statuses(tmp_path, device)
    assert [s for n, s in found if n == "normal"] == ["passed"] * 6
    assert {n: s for n, s in found if n != "normal"} == EXPECTED[device]
