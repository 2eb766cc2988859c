"""The nodes of one GPU that a judging process may open."""

from __future__ import annotations

from pathlib import Path

from sandbox.box import gpu


def test_only_the_nodes_of_one_gpu_are_shown(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-modeset", "mem"):
        (tmp_path / name).touch()
    assert [node.name for node in gpu.nodes(1, tmp_path)] == ["nvidia1", "nvidiactl", "nvidia-uvm"]
