"""`--target path/to/file.py:Name`: the example loads, its reference is one the judge can use, its seed compiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sandbox import artifact_store
from sandbox.compile_client import CompileClient, CompileSettings
from sandbox.jobs import CompileJob
from sandbox.judge.case import load_reference
from targets.base import Options, UnknownOption, UnknownTarget, find

FILE = Path(__file__).parents[2] / "examples" / "my_target.py"
NAME = f"{FILE}:RmsNorm"


def test_the_example_is_short() -> None:
    assert len([line for line in FILE.read_text().splitlines() if line.strip()]) <= 60


def test_reference_computes_the_norm() -> None:
    target = find(NAME)
    w = target.workload(Options(preset="tiny", rows=4))
    r = load_reference(target.reference)
    t = {**r.weights(w, 3, "cpu"), **r.inputs(w, 3, 0, "cpu")}
    assert not torch.equal(t["inputs.x"], r.inputs(w, 3, 1, "cpu")["inputs.x"])
    for tensors in (t, *(r.disturb(w, d, 3, t) for d in r.distributions(w))):
        x = tensors["inputs.x"].double()
        expected = torch.nn.functional.rms_norm(x, (512,), tensors["weights.w"].double(), eps=1e-5)
        got = {s: r.run(w, tensors, s).tensors["outputs.y"] for s in ("oracle", *r.schedules)}
        assert len(got) == 4
        for y in got.values():
            assert torch.allclose(y.double(), expected, rtol=2**-8, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("preset, rows, warps", [("tiny", 1, 4), ("large", 8, 1)])
def test_seed_compiles_to_one_launch(tmp_path: Path, preset: str, rows: int, warps: int) -> None:
    target = find(NAME)
    w = target.workload(Options(preset=preset, rows=rows))
    job = CompileJob(
        target.seed_source(), NAME, w.key, w.dims, w.buffers, tunables={"warps": warps}
    )
    with CompileClient(
        CompileSettings(store=tmp_path, tier="none", trust_this_code=True, jobs=1, idle=0)
    ) as c:
        outcome = c.compile(job)
    assert outcome.failure is None and outcome.artifact, outcome.failure
    (launch,) = artifact_store.load(outcome.artifact).step.launches
    assert (launch.grid, launch.block) == ((-(-rows // warps), 1, 1), (32 * warps, 1, 1))


@pytest.mark.parametrize(
    "text, words",
    [
        (
            "x = 1\ny = 1 / 0\n",
            r"cannot be imported: ZeroDivisionError: division by zero \(line 2\)",
        ),
        ("\ndef (", r"cannot be imported: SyntaxError: invalid syntax \(line 2\)"),
        ("import sys; sys.exit(7)", "cannot be imported: SystemExit: 7"),
        (
            "class T:\n  def __init__(self):\n    raise OSError('no')",
            r"cannot be made: OSError: no \(line 3\)",
        ),
        (
            "class T:\n  name = 'x'\n  summary = ''",
            "lacks presets, reference, seed_source, workload",
        ),
    ],
)
def test_a_file_that_is_no_target_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "t.py"
    file.write_text(text)
    for _ in range(2):  # half a module must not count as loaded the second time
        with pytest.raises(UnknownTarget, match=words):
            find(f"{file}:T")


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(UnknownTarget, match="no file"):
        find("nowhere/x.py:Thing")
    with pytest.raises(UnknownTarget, match="defines no Other"):
        find(f"{FILE}:Other")
    with pytest.raises(UnknownOption, match="tiny, large"):
        find(NAME).workload(Options(preset="huge"))
