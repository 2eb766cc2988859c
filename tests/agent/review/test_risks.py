"""Risk notes against sources and PTX that have, or only seem to have, what they warn of."""

from __future__ import annotations

import pytest

from agent.review.risks import Matter, closest, risks, spins, used
from sandbox.verdict import TensorCheck
from tests.agent.review.staged import BETTER, PLAIN_PTX, PTX, SEED, artifact, verdict

OLD = Matter(SEED, PLAIN_PTX, ({"cooperative": False},), verdict(artifact(PLAIN_PTX), 100, None))
NEW = Matter(BETTER, PTX, ({"cooperative": True},), verdict(artifact(PTX), 80, 1.25, error=0.85))


def rules(before: Matter | None, after: Matter) -> dict[str, str]:
    return {r.rule: r.message for r in risks(before, after)}


def test_every_kind_of_change_is_noted_with_its_numbers() -> None:
    found = rules(OLD, NEW)
    assert found["spins"] == "loops that poll memory: 0 before, 1 now"
    assert found["inline-ptx"] == "inline assembly blocks in the PTX: 0 before, 1 now"
    assert found["atomics"] == "atomic instructions: 0 before, 1 now"
    assert found["relaxed"] == "relaxed or volatile accesses: 0 before, 1 now"
    assert found["fewer-fences"] == "fences: 1 before, 0 now"
    assert found["spills"] == "registers spilled to memory: 0 bytes before, 16 now"
    assert (
        found["tolerance"] == "outputs.y uses 85% of its error bound; the parent's worst uses 10%"
    )
    assert "cooperative" in found and "not-verified" in found


def test_what_must_be_looked_at_comes_first() -> None:
    levels = [r.level for r in risks(OLD, NEW)]
    assert levels == sorted(levels, key=lambda x: x != "look") and levels[0] == "look"


def test_an_unchanged_kernel_has_no_note_of_change() -> None:
    assert set(rules(NEW, NEW)) == {"tolerance", "not-verified", "findings"}


def test_words_in_docstrings_and_comments_are_no_code() -> None:
    chatty = Matter('"""uses inline_asm"""\n# fastmath inline_ptx\nx = "inline_asm"\n', PLAIN_PTX)
    assert not {"inline-ptx", "fast-math"} & set(rules(Matter("", PLAIN_PTX), chatty))
    assert "inline-ptx" in rules(Matter("", PLAIN_PTX), Matter("llvm.inline_asm(x)\n", PLAIN_PTX))


def test_characters_that_hide_something_are_named() -> None:
    trojan = Matter("x = 1  # \u202e\u2066 hidden\n", PLAIN_PTX)
    assert rules(None, trojan)["hidden-characters"].endswith("U+202E, U+2066")
    assert "hidden-characters" not in rules(None, Matter("x = 'é'\t# ü\n", PLAIN_PTX))


def test_a_lost_artifact_is_said_and_nothing_is_compared() -> None:
    found = rules(Matter(SEED, None), NEW)
    assert "no-ptx" in found and "atomics" not in found


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("$L1:\nld.relaxed.gpu.global.u32 %r1, [%rd1];\n@%p bra $L1;\n", 1),
        ("$L1:\natom.global.cas.b32 %r1, [%rd1], 0, 1;\n@%p bra.uni $L1;\n", 1),
        ("$L1:\natom.shared.cas.b32 %r1, [%rd1], 0, 1;\n@%p bra $L1;\n", 0),
        ("$L1:\nld.global.u32 %r1, [%rd1];\n@%p bra $L1;\n", 0),
        ("ld.acquire.gpu.global.u32 %r1, [%rd1];\n$L1:\n@%p bra $L1;\n", 0),
        ("@%p bra $L1;\nld.acquire.gpu.global.u32 %r1, [%rd1];\n$L1:\nret;\n", 0),
    ],
)
def test_a_spin_is_a_backward_branch_around_a_global_poll(body: str, count: int) -> None:
    assert spins(body) == count


def test_the_share_of_a_bound_takes_the_worst_of_three_and_a_bound_of_zero_is_exact() -> None:
    def check(*numbers: float) -> TensorCheck:
        return TensorCheck("t", *numbers, True)

    assert used(check(0.1, 1.0, 0.9, 1.0, 0.0, 1.0)) == pytest.approx(0.9)
    assert used(check(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)) == 0.0
    assert used(check(1e-9, 0.0, 0.0, 1.0, 0.0, 1.0)) == float("inf")
    correctness = NEW.verdict.correctness if NEW.verdict else None
    assert correctness is not None
    found = closest(correctness)
    assert found is not None and found[0].name == "outputs.y"
