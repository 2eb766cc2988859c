"""The judge's box: its nodes and limits anywhere, and CUDA inside it where there is a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox import box
from sandbox.box import gpu
from tests.sandbox.box.specs import HERE


def test_only_the_nodes_of_one_gpu_are_shown(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-modeset", "mem"):
        (tmp_path / name).touch()
    assert [node.name for node in gpu.nodes(1, tmp_path)] == ["nvidia1", "nvidiactl", "nvidia-uvm"]


def test_a_judge_spec_has_no_compile_filter_and_no_address_space_limit() -> None:
    spec = gpu.judge_spec(HERE / "workers" / "cuda.py", 0, (HERE,))
    assert not spec.narrow
    assert spec.limits.address_space is None
    assert spec.binds == (HERE,)


@pytest.mark.gpu
def test_cuda_works_in_the_judges_box() -> None:
    spec = gpu.judge_spec(HERE / "workers" / "cuda.py", 0, ())
    assert spec.devices, "no device nodes"
    choice = box.choose(spec, box.Settings())
    assert isinstance(choice, box.Choice), choice
    boxed = box.start(spec, choice)
    assert isinstance(boxed, box.Boxed), boxed
    with boxed:
        assert not isinstance(boxed.wait_ready(30), box.Broken)
        assert boxed.verify() is None
        assert boxed.send({}, {}, 5) is None
        frame = boxed.read(box.Caps(), 60)
    assert isinstance(frame, box.Frame), (frame, boxed.output())
    assert frame.body == {"values": [3 * i + 7 for i in range(64)]}, (frame.body, boxed.output())
