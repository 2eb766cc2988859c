"""What `--workers` says, and which workers a cluster's nodes get."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.strict import Malformed
from sandbox.workers import parcel, store
from sandbox.workers.address import BadAddress, Farm, parse
from sandbox.workers.places import Node, posts


def count(nodes: list[Node], farm: Farm, device: str, arch: str = "") -> dict[str, tuple[int, int]]:
    """By node: compile slots and judges."""
    found = posts(nodes, farm, device, arch)
    for node in nodes:
        mine = [p for p in found if p.node == node.id]
        assert sum(p.cpus for p in mine) <= node.cpus and sum(p.gpus for p in mine) <= node.gpus
    return {
        n.id: (
            sum(p.slots for p in found if p.node == n.id and p.role == "compile"),
            sum(p.node == n.id and p.role == "judge" for p in found),
        )
        for n in nodes
    }


@pytest.mark.parametrize("text", ["", "local"])
def test_local_work_needs_no_farm(text: str) -> None:
    assert parse(text) is None


def test_addresses_and_counts() -> None:
    assert parse("ray") == Farm()
    assert parse("ray://10.0.0.1:6379") == Farm("10.0.0.1:6379")
    assert parse("ray?judges=8&compilers=2") == Farm("", 8, 2)
    assert parse("ray://[::1]:6379?gpus=2") == Farm("[::1]:6379", gpus=2)


@pytest.mark.parametrize(
    "text",
    ["ray://", "ray://host", "ray://host:x", "slurm", "ray:host", "ray?judges=0", "ray?judges=", "ray?x=1",
     "ray?judges=-1", "ray://host:6379/x", "ray://host:10001", "RAY"],
)  # fmt: skip
def test_what_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(BadAddress):
        parse(text)


def test_a_judge_for_every_gpu_and_processors_left_for_compiling() -> None:
    nodes = [Node("gpus", "a", 64, 8), Node("plain", "b", 16, 0), Node("tiny", "c", 1, 1)]
    assert count(nodes, Farm(), "cuda") == {"gpus": (8, 8), "plain": (4, 0), "tiny": (1, 0)}
    assert count(nodes, Farm(gpus=2), "cuda")["gpus"] == (8, 4)
    assert count(nodes, Farm(judges=3, compilers=2), "cuda") == {
        "gpus": (2, 3), "plain": (0, 0), "tiny": (0, 0),
    }  # fmt: skip


def test_on_cpu_judges_get_what_compiling_leaves() -> None:
    nodes = [Node("a", "a", 9, 0), Node("b", "b", 2, 0)]
    assert count(nodes, Farm(), "cpu") == {"a": (2, 7), "b": (1, 1)}
    assert count(nodes, Farm(judges=8, compilers=1), "cpu") == {"a": (1, 8), "b": (0, 0)}


def test_labels_keep_judges_off_other_architectures() -> None:
    hopper = Node("h", "h", 16, 2, {"ray.io/accelerator-type": "H200"})
    blackwell = Node("b", "b", 16, 2, {"kernelgen-arch": "sm_100a"})
    unknown = Node("u", "u", 16, 2)
    found = count([hopper, blackwell, unknown], Farm(), "cuda", "sm_100a")
    assert {n: judges for n, (_, judges) in found.items()} == {"h": 0, "b": 2, "u": 2}
    assert all(judges == 2 for _, judges in count([hopper, blackwell], Farm(), "cuda").values())


def test_posts_of_a_node_stay_when_others_come_and_go() -> None:
    nodes = [Node(n, n, 16, 2) for n in "abc"]
    before = {p for p in posts(nodes, Farm(), "cuda") if p.node == "b"}
    assert before == {p for p in posts([replace(nodes[1])], Farm(), "cuda")}


def test_the_store_forgets_what_was_used_longest_ago(tmp_path: Path) -> None:
    for i in range(5):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "blob").write_bytes(b"x" * 100)
        os.utime(folder, (i, i))
    store.touch(tmp_path / "0")
    assert store.prune(tmp_path, 250) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "4"]
    assert store.prune(tmp_path / "missing") == 0


@pytest.mark.parametrize(
    "data", [b"", b"\x00\x00\x00\x02{}", parcel.pack({})[:-1], parcel.pack({}, {"json": b"[]"})]
)
def test_what_is_no_parcel_is_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        parcel.unpack(data)


def test_a_parcel_keeps_bytes_and_makes_numbers_finite() -> None:
    body, blocks = parcel.unpack(
        parcel.pack({"a": float("inf"), "b": [1]}, {"source": b"\x00\xff"})
    )
    assert body["b"] == [1] and body["a"] > 1e300 and blocks == {"source": b"\x00\xff"}
