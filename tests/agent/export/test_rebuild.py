"""A rebuild from source: what differs, when it cannot be tried, and the compiler that vLLM pins."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from agent.export import pinned, places, subject, texts
from agent.export.rebuild import Made, compare, rebuild
from sandbox.jobs import CompileJob, CompileOutcome
from sandbox.verdict import Failure, Status
from tests.agent.export import small
from tests.agent.export.test_vllm import piece


def test_a_rebuild_says_what_differs() -> None:
    a = small.artifact()
    assert compare(a, Made(a, None)).same is True
    newer = replace(
        a, toolchain={"cutlass_dsl": "4.8.0"}, step=replace(a.step, ptx=a.step.ptx + "// x\n")
    )
    found = compare(a, Made(newer, None))
    assert found.same is False and found.machine_code_same is False
    assert "cutlass_dsl 4.8.1 then, 4.8.0 now" in found.sentence and "PTX differs" in found.sentence
    same_work = compare(a, Made(replace(a, source_sha256="1" * 64), None))
    assert same_work.same is False and same_work.machine_code_same is True
    assert compare(a, Made(None, None, "no jail")).same is None


class Broken:
    """A compiler on a machine without isolation."""

    def compile(self, job: CompileJob) -> CompileOutcome:
        return CompileOutcome(None, status=Status.INFRA, failure=Failure("server", "it  ended"))

    def close(self) -> None:
        return None


def test_a_rebuild_that_cannot_be_tried_is_no_difference(tmp_path: Path) -> None:
    _, s, _ = piece(tmp_path, "gemv", layers=1)
    found = rebuild(s, Broken())
    assert found.same is None and "infra: it ended" in found.sentence


class Asked(Broken):
    """Keeps what it was asked to compile."""

    def __init__(self) -> None:
        self.jobs: list[CompileJob] = []

    def compile(self, job: CompileJob) -> CompileOutcome:
        self.jobs.append(job)
        return super().compile(job)


def test_an_own_target_is_compiled_again_under_the_name_that_was_judged(tmp_path: Path) -> None:
    """Under the name that it gives itself every field but one would come out the same, and the hash would not."""
    own = tmp_path / "own.py"
    own.write_text("from tests.agent.export.small import Small\nOwn = Small(name='its-name')\n")
    made = replace(small.artifact(), target=f"{own}:Own")
    _, queries, run = small.record(tmp_path / "r", made, "source")
    asked = Asked()
    rebuild(subject.find(queries, run, force=False), asked)
    assert [job.target for job in asked.jobs] == [made.target]


def test_the_pinned_compiler_is_the_release_that_vllm_pins_or_none(tmp_path: Path) -> None:
    found = pinned.prepare(Path(sys.executable))
    assert found.python is None and f"not {places.DSL_PIN}" in found.why
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho none >&2\nexit 1\n")
    broken.chmod(0o755)
    assert "has DSL none" in pinned.prepare(broken).why
    good = tmp_path / "good"
    good.write_text(f"#!/bin/sh\necho {places.DSL_PIN}\n")
    good.chmod(0o755)
    assert pinned.prepare(good).python == good


def test_a_half_made_pinned_environment_is_made_again_or_the_reason_is_given(
    tmp_path: Path,
) -> None:
    home = tmp_path / "file-in-the-way" / "dsl"
    home.parent.write_text("")
    assert "no environment with it could be made" in pinned.prepare(home=home).why


def test_the_command_that_rebuilds_is_read_as_the_tunables_that_were_judged(tmp_path: Path) -> None:
    import shlex

    from agent.commands.evaluate import tunables_of

    _, s, _ = piece(tmp_path / "r", "attn-res")
    chosen = {
        "pdl": True,
        "off": False,
        "n": 4,
        "tile": (8, 16),
        "mode": "fast",
        "two": "2 ways",
        "s": "4",
        "t": "True",
    }
    tuned = replace(s, artifact=replace(s.artifact, tunables=chosen))  # type: ignore[type-var]
    words = shlex.split(texts._compile_command(tuned))
    given = tuple(words[i + 1] for i, w in enumerate(words) if w == "--tunable")
    assert tunables_of(None, None, given) == chosen  # type: ignore[arg-type]
