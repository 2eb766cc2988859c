"""A run as a folder, and its candidates judged again: what the folder holds, and when an order is the same one."""

from __future__ import annotations

import json
from pathlib import Path

from agent.commands.replay import in_words
from agent.fakes import kernel
from agent.ranking import Result, compare
from tests.agent.test_cli import TARGET, Call, call, optimize

__all__ = ["call"]

OWN = ("--target", TARGET)


def results(*us: float | None) -> list[Result]:
    return [Result(n, "passed" if x is not None else "wrong", x) for n, x in enumerate(us)]


def test_times_closer_than_the_margin_may_swap_and_others_may_not() -> None:
    before = results(10.0, 8.0, 8.1)
    found = compare(before, results(20.0, 16.5, 16.0))
    assert (found.before, found.after) == ((1, 2, 0), (2, 1, 0))
    assert found.same and found.pairs == 2
    found = compare(before, results(15.0, 16.5, 14.0))
    assert found.swapped == ((1, 0),) and not found.same
    found = compare(before, results(16.6, 16.5, 14.0))
    assert found.close == ((1, 0),) and found.same
    assert not compare(before, results(16.0, 16.0, 16.1)).same, "nothing is confirmed"


def test_another_status_and_a_candidate_that_is_gone_are_told() -> None:
    found = compare(results(10.0, None, 8.0), results(10.0, 9.0))
    assert found.changed == ((1, "wrong", "passed"),)
    assert found.missing == (2,) and found.pairs == 0 and not found.same


def test_a_record_without_a_ranking_is_not_said_to_be_reproduced() -> None:
    rows = [{"seq": 0, "status": "passed", "us": 10.0}, {"seq": 1, "status": "wrong", "us": None}]
    found = compare(results(10.0, None), results(11.0, None))
    assert found.same and in_words(rows, rows, found)[-1].endswith("no ranking")
    rows[1] |= {"status": "passed", "us": 8.0}
    found = compare(results(10.0, 8.0), results(11.0, 8.0))
    assert in_words(rows, rows, found)[-1].startswith("the ranking is reproduced: 1 of 1 pairs")


def test_a_run_goes_to_a_folder_and_comes_out_in_the_same_order_elsewhere(
    call: Call, tmp_path: Path
) -> None:
    assert optimize(call, "--rounds", "2").exit_code == 0
    folder = Path(json.loads(call("trajectory", "last", "-o", "kept", "--json").stdout)["folder"])
    record = json.loads((folder / "record.json").read_text())
    seqs = [c["seq"] for c in record["candidates"]]
    assert len(seqs) > 2 and record["lessons"] and record["decisions"]
    for c in record["candidates"]:
        assert (folder / c["source"]).read_text() and c["verdicts"]
        assert json.loads((folder / c["verdicts"][-1]).read_text())["status"] == c["status"]
    assert (
        record["settings"]["start"] == ""
        and str(tmp_path) not in (folder / "record.json").read_text()
    )
    done = call("replay", str(folder), *OWN, "--device", "cpu", "--db", "other/runs.db", "--json")
    assert done.exit_code == 0, done.output
    again = json.loads(done.stdout)
    assert again["same"] and again["before"] == again["after"] == record["ranking"]
    assert again["pairs"] > 0 and again["run"] != record["run"]


def test_screens_alone_give_the_order_and_leave_no_run(call: Call) -> None:
    """From a folder and from the record itself; without a device times are said to be modelled."""
    assert optimize(call, "--rounds", "2").exit_code == 0
    kept = Path(json.loads(call("trajectory", "last", "-o", "kept", "--json").stdout)["folder"])
    record = json.loads((kept / "record.json").read_text())
    before = len(json.loads(call("runs", "--json").stdout)["runs"])
    for name in (str(kept), "last"):
        done = call("replay", name, *OWN, "--screen", "--device", "cpu", "--json")
        again = json.loads(done.stdout)
        assert done.exit_code == 0 and again["same"] and again["after"] == record["ranking"], (
            done.output
        )
        assert again["run"] is None and again["modelled"] and again["pairs"] > 0
    assert len(json.loads(call("runs", "--json").stdout)["runs"]) == before
    assert "modelled (cpu)" in call("replay", "last", "--screen", "--device", "cpu").stdout


def test_a_screen_sees_another_status_than_the_record(call: Call) -> None:
    assert optimize(call, "--rounds", "2").exit_code == 0
    assert call("trajectory", "last", "-o", "kept").exit_code == 0
    Path("kept/candidates/1.py").write_text("this is no kernel")
    done = call("replay", "kept", *OWN, "--screen", "--device", "cpu")
    assert done.exit_code == 1 and "candidate 1 was passed and is" in done.stdout, done.output


def test_a_folder_whose_numbers_were_changed_is_not_reproduced(call: Call) -> None:
    assert optimize(call, "--rounds", "2").exit_code == 0
    assert call("trajectory", "last", "-o", "kept").exit_code == 0
    path = Path("kept/record.json")
    record = json.loads(path.read_text())
    best = record["ranking"][0]
    record["candidates"][best]["us"] = 1e6
    path.write_text(json.dumps(record))
    done = call("replay", "kept", *OWN, "--device", "cpu")
    assert done.exit_code == 1 and "was faster than" in done.stdout, done.output
    path.write_text("{}")
    broken = call("replay", "kept", *OWN, "--device", "cpu")
    assert broken.exit_code == 1 and "another form" in broken.stderr


def test_what_a_run_was_still_at_work_on_is_kept_too(call: Call) -> None:
    """A screen was done when time ran out: no row tells of the candidate, its files do."""
    run = json.loads(optimize(call, "--rounds", "2", "--json").stdout)["run"]
    folder = Path(".kernelgen/runs") / run / "candidates"
    last = max(int(p.name) for p in folder.iterdir())
    cut = folder / str(last + 1)
    cut.mkdir()
    for name in ("0-proposal.json", "0-screen.json"):
        (cut / name).write_text((folder / str(last) / name).read_text())
    assert call("trajectory", run, "-o", "kept").exit_code == 0
    record = json.loads(Path("kept/record.json").read_text())
    found = record["candidates"][last + 1]
    assert found["unfinished"] and not found["promoted"] and found["tier"] == "screen"
    assert (
        found["seq"] in record["ranking"] and "unfinished |" in Path("kept/README.md").read_text()
    )
    assert Path("kept", found["source"]).exists() and Path("kept", found["verdicts"][0]).exists()


def test_no_file_that_only_a_folder_names_is_run_and_a_moved_target_is_found(
    call: Call, tmp_path: Path
) -> None:
    """A folder may come from anybody; what its record names as target would be imported beside the keys."""
    assert optimize(call, "--rounds", "1").exit_code == 0
    assert call("trajectory", "last", "-o", "kept").exit_code == 0
    evil, mine = tmp_path / "kept" / "candidates" / "0.py", tmp_path / "mine.py"
    evil.write_text("from pathlib import Path\nPath('ran').touch()\n")
    mine.write_text("from agent.fakes import FakeTarget as Fake")
    path = tmp_path / "kept" / "record.json"
    record = json.loads(path.read_text())
    for where in (record, record["settings"]):
        where["target"] = f"{evil}:X"
    path.write_text(json.dumps(record))
    for how in ((), ("--screen",)):
        done = call("replay", "kept", "--device", "cpu", *how)
        assert (done.exit_code, Path("ran").exists()) == (2, False), done.output
        assert "give --target" in done.stderr
    Path("kept/candidates/0.py").write_text((tmp_path / "kept/candidates/1.py").read_text())
    for how in ((), ("--screen",)):
        done = call("replay", "kept", "--target", f"{mine}:Fake", "--device", "cpu", *how)
        assert done.exit_code in (0, 1) and "0      " in done.stdout, done.output
    other = call("replay", "last", "--target", "kimi-k3-gemv", "--device", "cpu")
    assert other.exit_code == 2 and "Fake, not of kimi-k3-gemv" in other.stderr, other.output


def test_a_record_that_lacks_something_is_one_line(call: Call) -> None:
    assert optimize(call, "--rounds", "1").exit_code == 0
    assert call("trajectory", "last", "-o", "kept").exit_code == 0
    path = Path("kept/record.json")
    whole = json.loads(path.read_text())
    first, *rest = whole["candidates"]
    for change in (
        {"candidates": []}, {"candidates": [3]}, {"settings": {}}, {"settings": None}, {"run": None},
        {"candidates": [{**first, "tunables": "x"}, *rest]}, {"candidates": [{"seq": 0}, *rest]},
        {"candidates": [{**first, "us": "fast"}, *rest]}, {"target": 7},
    ):  # fmt: skip
        path.write_text(json.dumps({**whole, **change}))
        for how in ((), ("--screen",)):
            done = call("replay", "kept", *OWN, "--device", "cpu", *how)
            assert done.exit_code == 1 and "record.json" in done.stderr, (change, done.output)


def test_a_run_that_started_from_a_file_and_files_judged_by_hand_are_judged_again_as_they_were(
    call: Call, tmp_path: Path
) -> None:
    for name, us in (("start", 70), ("other", 60)):
        (tmp_path / f"{name}.py").write_text(kernel(us))
    assert optimize(call, "--start", "start.py", "--rounds", "1").exit_code in (0, 1)
    evaluate = ("evaluate", *OWN, "--device", "cpu", "start.py", "other.py")
    assert call(*evaluate).exit_code == 0
    Path("start.py").unlink()
    first, second = (r["id"] for r in json.loads(call("runs", "--json").stdout)["runs"])
    for run in (second, first):
        for how in ((), ("--screen",)):
            done = call("replay", run, "--device", "cpu", "--json", *how)
            assert done.exit_code == 0 and json.loads(done.stdout)["same"], done.output
