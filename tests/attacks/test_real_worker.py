"""Attacks through the real compile worker: past the lint, in the tier that compile jobs get, with the DSL imported.

Only what shows from outside is judged here; the candidate's own words come back as an error text at most. After the
attacks the documented example still compiles, to the same address as before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox import box
from sandbox.artifact import Buffer
from sandbox.box import syscalls
from sandbox.compile import pool, service, source_lint
from sandbox.compile.cache import OutcomeCache
from sandbox.jobs import CompileJob, CompileOutcome
from sandbox.verdict import Status
from tests.attacks.attack_world import KEY_NAME, World

HERE = Path(__file__).parent
DEADLINE_S = 10.0
BUFFERS = (Buffer("inputs.x", "f32", (4, 256)), Buffer("outputs.y", "f32", (4, 256)))
CANDIDATE = (HERE.parents[1] / "docs" / "candidate.md").read_text()
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[service.Service]:
    choice = box.choose(pool.spec("sm_90a", DEADLINE_S), box.Settings())
    if isinstance(choice, box.Refusal):
        pytest.skip(choice.sentence)
    workers = pool.Pool(pool.starter(choice, DEADLINE_S), 1)
    cache = OutcomeCache(tmp_path_factory.mktemp("store"))
    compiling = service.Service(workers, cache, choice, DEADLINE_S)
    yield compiling
    compiling.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv(KEY_NAME, "")
    planted = World(tmp_path)
    yield planted
    planted.clear()


def job(source: str) -> CompileJob:
    return CompileJob(
        source=source, target="demo", workload={"preset": "tiny"}, buffers=BUFFERS, dims={"rows": 4, "hidden": 256}
    )  # fmt: skip


def honest() -> CompileJob:
    found = re.search(r"```python\n(.*?)```", CANDIDATE, re.S)
    assert found
    return job(found[1])


def hostile(name: str, world: World) -> CompileJob:
    assert world.victim is not None
    arch, listen = syscalls.machine(), world.listeners
    parameters = {
        "name": name, "nonce": world.nonce, "key_name": KEY_NAME, "file": str(world.file), "victim": world.victim.pid,
        "mark": world.mark, "token": world.token, "port": listen.port, "abstract": listen.abstract,
        "socket": listen.file, "shared": str(world.base / "shared"), "result_file": str(world.result_file),
        "keep": [], "seconds": 30, "depth": 100,
        "numbers": {n: syscalls.number(n, arch) for n in syscalls.NUMBERS},
    }  # fmt: skip
    attack = (HERE / "sources" / f"{name}.py").read_text()
    prelude = (HERE / "prelude.py").read_text()
    head = f"P = {parameters!r}\nimport os\nP['result_fd'] = int(os.environ['BOX_RESULT_FD'])\n"
    return job(f"{head}{prelude}\n{attack}\nraise RuntimeError('RAN ' + P['name'])\n")


@pytest.fixture
def run(compiler: service.Service, world: World, monkeypatch: pytest.MonkeyPatch) -> Any:
    def one(name: str) -> tuple[CompileOutcome, dict[str, Any]]:
        with monkeypatch.context() as patch:
            patch.setattr(
                source_lint, "lint", lambda source, filename="": source_lint.Findings(None, ())
            )
            outcome = compiler.compile(hostile(name, world))
        return outcome, world.evidence()

    return one


@pytest.mark.parametrize(
    "name",
    ["environment_keys", "home_file", "inherited_descriptors", "other_memory", "tcp_and_udp", "abstract_socket",
     "named_socket", "double_fork", "kill_by_number", "kill_by_mark", "kill_by_input", "links_outside",
     "shared_memory_left", "forged_records", "own_code", "patched_worker"],
)  # fmt: skip
def test_nothing_outside_shows_it(name: str, run: Any, world: World) -> None:
    outcome, seen = run(name)
    assert outcome.artifact is None and outcome.status not in (None, Status.INFRA, Status.PASSED)
    assert f"RAN {name}" in str(outcome.failure) or name == "patched_worker", outcome
    assert not any(secret in str(outcome) for secret in (world.key, world.text, world.token))
    assert seen == {
        "victim": True, "victim_changed": False, "victim_pipe": False, "processes": 0, "files": [], "sysv": [],
        "network": {"tcp": 0, "udp": 0, "abstract": 0, "named": 0}, "result_file": False, "file_intact": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["fake_pass", "early_exit", "raw_pickle", "raw_block_size", "raw_nan", "raw_stream"]
)
def test_a_forged_result_is_an_error_of_the_candidate(name: str, run: Any) -> None:
    outcome, seen = run(name)
    assert outcome.artifact is None
    assert outcome.status in (Status.COMPILE_ERROR, Status.PLAN_ERROR, Status.REJECTED), outcome
    assert seen["files"] == []


@pytest.mark.parametrize("name", ["endless_loop", "ignore_signals"])
def test_the_deadline_ends_it(name: str, run: Any) -> None:
    outcome, seen = run(name)
    assert outcome.status is Status.COMPILE_ERROR, outcome
    assert outcome.seconds["total"] < 3 * DEADLINE_S + outcome.seconds["worker"] + 30
    assert seen["processes"] == 0


def test_an_honest_candidate_compiles_as_before(compiler: service.Service, run: Any) -> None:
    run("patched_worker")
    first = compiler.compile(honest())
    assert first.failure is None and first.artifact is not None, first
    assert first.isolation["tier"] in ("strict", "landlock", "seccomp")
