"""Every attack in every tier that this machine offers, as root and as an ordinary user, and without a box.

Judged by evidence from outside (`attack_world.py`); after each attack an honest job must work in the same tier. The
control runs the same source in a careless harness and must get through: an attack that shows nothing proves nothing.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from sandbox.box import syscalls
from tests.attacks.attack_catalog import ATTACKS, Attack, layers

ME = "root" if os.getuid() == 0 else "user"
ROOT_WAYS = ("strict A", "strict B", "landlock", "seccomp")
USER_WAYS = ("strict A", "landlock", "weak")
BY_NAME = {attack.name: attack for attack in ATTACKS}
# Without the compile filter, as ptxas and the judge run: what is left when a worker may fork and send signals.
TOOL_ATTACKS = (
    "environment_keys", "home_file", "inherited_descriptors", "other_memory", "file_handles", "keyrings", "tcp_and_udp",
    "socket_families", "abstract_socket", "kernel_interfaces", "double_fork", "pipe_holder", "kill_by_number",
    "kill_by_mark", "kill_by_input", "trace_attach", "other_code", "other_limits", "links_outside", "deep_folders",
    "new_namespaces", "mounts", "devices", "become_root", "foreign_calls", "process_flood", "thread_flood",
    "memory_hog", "memory_in_parts", "memory_files", "shm_fill", "disk_fill", "shared_memory_left", "forged_records",
)  # fmt: skip


# Without bubblewrap, and as an ordinary user with it: the quick attacks there are in CI, all in all ways are `soak`.
IN_CI = {("root", "landlock"), ("user", "strict A"), ("user", "landlock")}


def everywhere(user: str, ways: tuple[str, ...]) -> list[Any]:
    """Every attack in every way, marked by how long they take together."""
    return [
        pytest.param(way, attack.name, marks=pytest.mark.slow if in_ci and not attack.slow else pytest.mark.soak)
        for way in ways
        for in_ci in [(user, way) in IN_CI]
        for attack in ATTACKS
    ]  # fmt: skip


def run(client: Any, attack: Attack, way: str) -> dict[str, Any]:
    if client.problem:
        pytest.skip(client.problem)
    outcome = client.ask(attack.asked(way))
    if "missing" in outcome:
        pytest.skip(f"this machine does not offer {way}; it offers {', '.join(outcome['ways'])}")
    assert attack.ran in outcome["output"], f"the attack did not run: {outcome}"
    assert "NameError" not in str(outcome["body"]), f"the attack is broken: {outcome['body']}"
    return outcome


def judge(attack: Attack, tier: str, outcome: dict[str, Any]) -> None:
    """Stopped, by what was expected, nothing left, and the next job is as if nothing had happened."""
    if tier not in attack.open_in:
        assert attack.through(outcome) == "", (
            f"{attack.name} got through: {outcome['output'][-2000:]}"
        )
        assert layers(attack, outcome), f"nothing says what stopped {attack.name}: {outcome}"
    if attack.expect:
        assert outcome["reason"] in attack.expect, outcome["detail"]
    assert outcome["left"] == ""
    assert outcome["honest"], f"an honest job failed afterwards: {outcome['honest_said']}"


@pytest.mark.parametrize("name", [
    pytest.param(attack.name, marks=pytest.mark.soak if attack.slow else ()) for attack in ATTACKS
])  # fmt: skip
def test_strongest_tier_stops(name: str, drivers: Any) -> None:
    client = drivers(ME)
    way = client.facts["ways"][0] if not client.problem else ""
    judge(BY_NAME[name], way.split()[0] if way else "", run(client, BY_NAME[name], way))


@pytest.mark.parametrize(("way", "name"), everywhere("root", ROOT_WAYS))
def test_started_by_root(name: str, way: str, drivers: Any) -> None:
    judge(BY_NAME[name], way.split()[0], run(drivers("root"), BY_NAME[name], way))


@pytest.mark.parametrize(("way", "name"), everywhere("user", USER_WAYS))
def test_started_by_an_ordinary_user(name: str, way: str, drivers: Any) -> None:
    judge(BY_NAME[name], way.split()[0], run(drivers("user"), BY_NAME[name], way))


@pytest.mark.soak
@pytest.mark.parametrize("name", TOOL_ATTACKS)
@pytest.mark.parametrize("way", ["root/strict A", "root/strict B", "user/strict A"])
def test_without_the_compile_filter(name: str, way: str, drivers: Any) -> None:
    user, tier = way.split("/")
    judge(BY_NAME[name], "strict", run(drivers(user), BY_NAME[name], f"{tier} tool"))


@pytest.mark.soak
@pytest.mark.parametrize("user", ["root", "user"])
def test_the_filter_alone_keeps_nested_namespaces_out(user: str, drivers: Any) -> None:
    """Where a kernel refuses bubblewrap's own way to do it, and with the fork that the attack needs."""
    attack = BY_NAME["new_namespaces"]
    way = "strict A, user namespaces refused by filter alone tool"
    judge(attack, "strict", run(drivers(user), attack, way))


@pytest.mark.soak
@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("user", ["root", "user"])
def test_control_without_a_box_gets_through(name: str, user: str, drivers: Any) -> None:
    attack = BY_NAME[name]
    if attack.control == "nobody":
        pytest.skip(attack.why_no_control)
    if attack.control == "root" and user != "root":
        pytest.skip("needs root's powers")
    if attack.control == "x86_64" and syscalls.machine() != "x86_64":
        pytest.skip("needs the 32-bit entry of x86_64")
    outcome = run(drivers(user), attack, "bare")
    assert attack.through(outcome), f"{name} shows nothing without a box: {outcome}"


def test_there_are_enough_attacks_and_each_has_a_source() -> None:
    from pathlib import Path

    sources = {path.stem for path in (Path(__file__).parent / "sources").glob("*.py")}
    assert sources == set(BY_NAME)
    assert len(BY_NAME) >= 40
