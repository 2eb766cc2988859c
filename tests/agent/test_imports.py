"""Who may import whom, read from the syntax trees: the borders of the project."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AGENT = sorted((ROOT / "agent").rglob("*.py"))
SANDBOX = sorted((ROOT / "sandbox").rglob("*.py"))
# The sandbox's modules that the agent may see: data, and clients that start processes.
OPEN = {
    "sandbox.artifact", "sandbox.artifact_store", "sandbox.verdict", "sandbox.jobs", "sandbox.strict",
    "sandbox.dtypes", "sandbox.compile_client", "sandbox.judge_client", "sandbox.workers", "sandbox.workers.farm",
}  # fmt: skip


def imported(path: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere in it, without those for type checking only."""
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(n for child in node.body for n in ast.walk(child))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def heads(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def is_module(name: str) -> bool:
    file = ROOT / (name.replace(".", "/") + ".py")
    return file.is_file() or (file.with_suffix("") / "__init__.py").is_file()


@pytest.mark.parametrize("path", AGENT, ids=name_of)
def test_the_agent_imports_no_gpu_library_and_no_compile_or_judge_code(path: Path) -> None:
    assert not heads(path) & {"torch", "cutlass", "cuda", "llvmlite", "numpy"}
    seen = {n for n in imported(path) if n.startswith("sandbox.") and is_module(n)}
    assert seen <= OPEN


@pytest.mark.parametrize("path", AGENT, ids=name_of)
def test_each_library_stays_where_it_belongs(path: Path) -> None:
    name, used = name_of(path), heads(path)
    if "langgraph" in used:
        assert name == "agent/graph.py"
    if used & {"openai", "anthropic", "genai_prices"}:
        assert name.startswith("agent/models/")
    if used & {"sqlite_utils"}:
        assert name.startswith("agent/store/")
    if "click" in used:
        assert name == "agent/cli.py" or name.startswith("agent/commands/")
    if "matplotlib" in used:
        assert name.startswith(("agent/report/", "agent/bench/"))
    if "starlette" in used:
        assert name.startswith(("agent/serve/", "agent/mcp"))
    if "rich" in used:
        assert name == "agent/render.py" or name.startswith("agent/commands/")


@pytest.mark.parametrize("path", SANDBOX, ids=name_of)
def test_the_sandbox_knows_nothing_of_the_agent(path: Path) -> None:
    assert not heads(path) & {
        "agent",
        "prompts",
        "langgraph",
        "openai",
        "anthropic",
        "click",
        "rich",
    }


@pytest.mark.parametrize("path", [p for p in SANDBOX if "/compile/jail/" in str(p)], ids=name_of)
def test_the_jail_knows_nothing_of_targets_or_judge(path: Path) -> None:
    assert not heads(path) & {"targets", "torch"}


def test_ray_is_known_to_one_module() -> None:
    named = {path: set(imported(path)) for path in [*AGENT, *SANDBOX]}
    used = {
        name_of(p) for p, names in named.items() if any(n.split(".")[0] == "ray" for n in names)
    }
    assert used == {"sandbox/workers/ray_cluster.py"}
    users = {name_of(p) for p, names in named.items() if "sandbox.workers.ray_cluster" in names}
    assert users == {"sandbox/workers/farm.py"}  # and there only when it is asked for


def test_search_is_pure() -> None:
    used = heads(ROOT / "agent" / "search.py")
    assert not used & {"time", "datetime", "os", "pathlib", "random", "secrets", "sqlite3", "agent"}


def test_clients_start_processes_and_import_no_service() -> None:
    workers = sorted((ROOT / "sandbox" / "workers").glob("*.py"))
    for client in [
        ROOT / "sandbox" / f"{c}.py" for c in ("compile_client", "judge_client", "jobs")
    ] + workers:
        for name in imported(client):
            assert not name.startswith(("sandbox.compile.", "sandbox.judge.", "sandbox.devices"))
            assert name.split(".")[0] != "torch"


def writing(path: Path, mark: str) -> set[str]:
    """Functions and methods of a module in whose body `mark` occurs."""
    return {
        n.name
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.FunctionDef) and re.search(mark, ast.unparse(n))
    }


def names_used(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    used = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    return used | {n.id for n in nodes if isinstance(n, ast.Name)}


def test_record_is_the_single_writer_of_runs_db() -> None:
    """The store's writing methods are called by agent/record.py alone, and SQL is spoken by the
    store alone; LangGraph's checkpointer gets its connection in agent/graph.py.
    """
    store = ROOT / "agent" / "store" / "store.py"
    methods = {n for n in writing(store, r"transaction\(") if not n.startswith("_")}
    assert {"add_run", "set_run", "add_candidates", "add_verdict", "add_export"} <= methods
    raw = {"transaction", "insert_all", "upsert", "upsert_all", "execute", "executescript"}
    for path in AGENT:
        name, used = name_of(path), names_used(path)
        if name.startswith("agent/store/"):
            continue
        assert name == "agent/record.py" or not used & methods, (name, used & methods)
        assert not used & raw, (name, used & raw)
        assert name == "agent/graph.py" or "connect" not in used, name


def test_no_node_but_record_reaches_the_writer() -> None:
    nodes = ("plan", "propose", "evaluate", "tune", "reflect", "outcome", "crash", "promote")
    for node in nodes:
        assert "agent.record" not in set(imported(ROOT / "agent" / f"{node}.py")), node
    callers = {name_of(p) for p in AGENT if {"agent.record"} & set(imported(p))}
    assert callers == {
        "agent/graph.py", "agent/runner.py", "agent/offline.py", "agent/commands/judge.py",
        "agent/commands/export.py", "agent/review/decide.py",
    }  # fmt: skip


def test_no_pickle_and_no_side_effects_of_importing_the_command_line() -> None:
    for path in [*AGENT, *SANDBOX]:
        assert not heads(path) & {"pickle", "marshal", "shelve", "dill"}
    assert importlib.util.find_spec("agent.cli") is not None


def test_every_module_says_what_it_is() -> None:
    for path in AGENT:
        assert ast.get_docstring(ast.parse(path.read_text())), name_of(path)
