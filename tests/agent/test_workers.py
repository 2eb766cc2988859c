"""The loop on workers: its record does not depend on how many there are, or on what happens to them."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agent import fakes, runner
from agent.cli import main
from agent.models.scripted import ScriptedProposer
from agent.runner import Ended, Party, Run, Services, Session, advance, make_ledger
from agent.workspace import Place
from sandbox.jobs import JudgeJob
from sandbox.workers import farm
from targets import base
from tests.agent.conftest import Kit, Quiet
from tests.agent.test_kill import record
from tests.sandbox.workers.shop import QUICK, Shop, ToldJudge, facts, gpus, infra

SOURCES = [
    fakes.kernel(90, extra='TUNABLES = {"threads": (256, 128)}\n# cost: threads 128=0.9\n'),
    fakes.kernel(70, "wrong"), fakes.kernel(95), fakes.kernel(95), fakes.kernel(60, "fault"),
    fakes.kernel(75), fakes.kernel(74.9), fakes.kernel(200), fakes.kernel(50, "hang"),
]  # fmt: skip


def services(crew: farm.Crew) -> Services:
    def fresh() -> Any:
        return crew.fresh_judge("h200")

    return Services(crew.compiler(), crew.judge("h200"), fresh, nullcontext(), 256, "h200")


def optimize(folder: Path, workers: Services | None) -> Ended:
    """One run of the same proposals, on workers or on this process's fakes."""
    kit = Kit(
        Place(folder / "runs.db", folder / "kernels_out"),
        fakes.FakeCompiler(folder / "jail"),
        fakes.FakeJudge(),
    )
    run = kit.new(k=3, tunings=1, repairs=0)
    settings = runner.load_settings(kit.place, run)
    session, ledger = Session(kit.place, Quiet()), make_ledger(kit.place, run, settings)
    party = Party(ScriptedProposer(SOURCES))
    return advance(Run(run, settings, session, workers or kit.services(), party, ledger))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, dict[str, Any]]:
    """How it ends without workers, and the record."""
    folder = tmp_path_factory.mktemp("local")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(base._TARGETS, "fake", fakes.FakeTarget)
        return optimize(folder, None), record(folder)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_the_record_is_the_same_with_any_number_of_workers(
    tmp_path: Path, alone: tuple[Ended, dict[str, Any]], count: int
) -> None:
    shop = Shop(tmp_path / "shop", gpus(*[1] * count))
    crew = shop.open()
    ended = optimize(tmp_path / "farmed", services(crew))
    crew.close()
    assert (ended.how, ended.stop, ended.incumbent) == (
        alone[0].how, alone[0].stop, alone[0].incumbent,
    )  # fmt: skip
    assert len(alone[1]["candidates"]) == 10 and record(tmp_path / "farmed") == alone[1]


def test_nor_on_workers_that_die_and_a_gpu_that_is_bad(
    tmp_path: Path, alone: tuple[Ended, dict[str, Any]]
) -> None:
    """Who gets the second job is bad from then on, who gets the fourth dies of it."""
    shop = Shop(tmp_path / "shop", gpus(1, 1, 1))
    chaos = threading.Lock()
    numbers, bad = itertools.count(1), set[str]()

    def script(judge: ToldJudge, at: JudgeJob) -> Any:
        time.sleep(0.01)
        with chaos:
            number = next(numbers)
            if number == 2:
                bad.add(judge.post.node)
            if number == 4:
                shop.worker(judge).kill()
            return infra(at, "judge-error") if judge.post.node in bad else None

    shop.script = script
    crew = shop.open()
    optimize(tmp_path / "farmed", services(crew))
    assert sum(m.state == "gone" for m in crew.pool.roster.members) >= 1
    crew.close()
    assert record(tmp_path / "farmed") == alone[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "slurm"], "ray://HOST:PORT"), (["--kind", "h200"], "give --workers too"),
        (["--workers", "ray", "--device", "cuda:1"], "without a number"),
        (["--workers", "ray", "--kind", "a", "--kind", "b"], "one --kind"),
        (["--workers", "ray", "--judge-elsewhere"], "exclude each other"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_said_before_anything_starts(
    arguments: list[str], words: str
) -> None:
    result = CliRunner().invoke(main, ["optimize", "--target", "fake", *arguments])
    assert result.exit_code == 2 and words in " ".join(result.output.split())


def test_evaluate_on_two_kinds_of_device_records_two_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(tmp_path / "shop", gpus(1, 1))
    shop.kinds[shop.cluster.there[1].id] = facts("B200", "sm_100a")
    monkeypatch.setattr(farm, "hire", shop.hire)
    (tmp_path / "slow.py").write_text(fakes.kernel(200))
    arguments = ["--target", "fake", "--device", "cuda", "--workers", "ray", "--kind", "h200", "--kind", "b200",
                 "--db", str(tmp_path / "runs.db"), "--json", "seed", str(tmp_path / "slow.py")]  # fmt: skip
    result = CliRunner().invoke(main, ["evaluate", *arguments])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["results"]
    assert [(Path(r["file"]).name, r["kind"]) for r in rows] == [
        ("seed", "h200"), ("seed", "b200"), ("slow.py", "h200"), ("slow.py", "b200"),
    ]  # fmt: skip
    assert len({r["verdict"]["artifact"] for r in rows}) == 4  # an architecture each
    assert [len(j.seen) for j in shop.judges] == [2, 2] and shop.cluster.closed
    assert len(record(tmp_path)["verdicts"]) == 4


def test_doctor_lists_the_workers_and_lets_them_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(tmp_path / "shop", gpus(1, 1))
    shop.kinds[shop.cluster.there[1].id] = {}
    monkeypatch.setattr(farm, "hire", shop.hire)
    arguments = [
        "--no-probe",
        "--device",
        "cuda",
        "--workers",
        "ray",
        "--db",
        str(tmp_path / "runs.db"),
    ]
    said = CliRunner().invoke(main, ["doctor", *arguments]).stdout.splitlines()
    judges = [line for line in said if line.startswith("worker judge")]
    assert judges[0].endswith(": ready, h200") and judges[1].endswith(": bad: the canary failed")
    assert any(line.startswith("worker compile") for line in said) and shop.cluster.closed


def test_local_work_starts_and_imports_no_ray(tmp_path: Path) -> None:
    code = (
        "import sys, click.testing as t, agent.cli\n"
        "import agent.commands.optimize, agent.commands.evaluate, agent.commands.judge\n"
        "r = t.CliRunner().invoke(agent.cli.main, ['compile', '--target', 'kimi-k3-gemv', '--help'])\n"
        "assert r.exit_code == 0, r.output\n"
        "from agent.services import Wanted, start_each\n"
        "import agent.services as s\n"
        "s.new_judge = lambda: (_ for _ in ()).throw(OSError('a local judge was asked for'))\n"
        "try: start_each(Wanted('cpu'), None)\n"
        "except OSError as e: print(e)\n"
        "assert not [m for m in sys.modules if m == 'ray' or m.startswith('ray.')]\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert found.returncode == 0, found.stderr
    assert "a local judge was asked for" in found.stdout


def test_where_nobody_listens_is_said_at_once(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
    pytest.importorskip("ray")  # its import takes seconds
    began = time.monotonic()
    with pytest.raises(farm.Unusable, match=f"nothing answers at {address}"):
        farm.hire(farm.Farm(address), farm.Orders("cpu", tmp_path, "run"), None, QUICK)
    assert time.monotonic() - began < 20


def test_without_ray_installed_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(farm.Unusable, match=r"pip install 'kernelgen\[ray\]'"):
        farm.hire(farm.Farm(), farm.Orders("cpu", tmp_path, "run"), None, QUICK)
