"""The graph: plan -> Send x k -> candidate [propose -> compile -> repair* -> judge -> tune* ->
confirm] -> record -> reflect -> plan | review (interrupt) -> end.

The only module that knows LangGraph. Nodes are functions of (state, deps) in modules of their own;
here they are wired, and `Waiting` becomes an interrupt.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.errors import GraphBubbleUp, GraphDrained
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import RunControl, Runtime
from langgraph.types import Command, Send, interrupt

from agent.config import RunSettings
from agent.crash import crashed
from agent.evaluate import compile, confirm, judge
from agent.models.base import StopRun, Unavailable, Waiting
from agent.plan import plan
from agent.propose import propose, repair
from agent.record import record
from agent.reflect import reflect
from agent.state import CandidateOut, CandidateState, Deps, RunState
from agent.store import Corrupt, database, translate
from agent.tune import tune
from agent.workspace import Missing
from sandbox.compile_client import NoIsolation

Work = Callable[[Any, Deps], dict[str, Any]]
PASSING = (GraphBubbleUp, OSError, StopRun, Corrupt, Missing, NoIsolation, Unavailable)


@dataclass(frozen=True)
class Stopped:
    """How an invocation ended: `end`, `review`, `waiting` or `drained`; with the state and what is
    awaited.
    """

    how: Literal["end", "review", "waiting", "drained"]
    state: RunState
    waiting: tuple[str, ...] = ()


def node(work: Work) -> Any:
    """A graph node of a plain function. Waiting re-runs the node on resume, so it has done nothing
    yet.
    """

    def run(state: Any, runtime: Runtime[Deps]) -> dict[str, Any]:
        try:
            return work(state, runtime.context)
        except Waiting as waiting:
            interrupt({"waiting": str(waiting)})
            raise

    run.__name__ = work.__name__
    return run


def guarded(work: Work) -> Any:
    """A candidate's node: a defect of ours costs its candidate, not the run, and is written down.

    What is not about the candidate (a full disk, a missing toolchain, waiting, a budget) passes.
    """
    inner = node(work)

    def run(state: Any, runtime: Runtime[Deps]) -> dict[str, Any]:
        try:
            found: dict[str, Any] = inner(state, runtime)
            return found
        except PASSING:
            raise
        except Exception as error:
            return crashed(state, runtime.context, error)

    run.__name__ = work.__name__
    return run


def review(state: RunState) -> dict[str, Any]:
    """Where a person decides; the answer is recorded by the command that gives it.

    What is sent back opens another round; its comment reaches the proposer through the record.
    """
    answer = interrupt({"review": state["incumbent"], "stop": state["stop"]})
    back = isinstance(answer, dict) and answer.get("decision") == "send_back"
    return {"stop": None, "stale": 0} if back else {}


def _go(state: CandidateState) -> str:
    return state["go"]


def _fan(state: RunState) -> list[Send] | str:
    """One branch a candidate; none when the plan found a reason to stop."""
    if not state["seqs"]:
        return "record"
    shared = {"run": state["run"], "round": state["round"], "incumbent": state.get("incumbent", 0)}
    return [Send("candidate", {**shared, "seq": seq, "step": 0}) for seq in state["seqs"]]


def _next(state: RunState) -> str:
    if not state.get("stop"):
        return "plan"
    return "review" if state.get("incumbent", 0) else END


def _reviewed(state: RunState) -> str:
    return END if state.get("stop") else "plan"


def candidate_graph() -> StateGraph[Any, Any, Any, Any]:
    g = StateGraph(CandidateState, context_schema=Deps, output_schema=CandidateOut)
    for work in (propose, compile, repair, judge, tune):
        g.add_node(work.__name__, guarded(work))
    g.add_node("confirm", node(confirm))
    g.add_edge(START, "propose")
    g.add_conditional_edges("propose", _go, ["compile", "confirm"])
    g.add_conditional_edges("compile", _go, ["judge", "repair", "tune", "confirm"])
    g.add_conditional_edges("repair", _go, ["compile", "confirm"])
    g.add_conditional_edges("judge", _go, ["repair", "tune", "confirm"])
    g.add_conditional_edges("tune", _go, ["compile", "confirm"])
    g.add_edge("confirm", END)
    return g


def run_graph() -> StateGraph[Any, Any, Any, Any]:
    g = StateGraph(RunState, context_schema=Deps)
    g.add_node("plan", node(plan))
    g.add_node("candidate", candidate_graph().compile())
    g.add_node("record", node(record))
    g.add_node("reflect", node(reflect))
    g.add_node("review", review)
    g.add_edge(START, "plan")
    g.add_conditional_edges("plan", _fan, ["candidate", "record"])
    g.add_edge("candidate", "record")
    g.add_edge("record", "reflect")
    g.add_conditional_edges("reflect", _next, ["plan", "review", END])
    g.add_conditional_edges("review", _reviewed, ["plan", END])
    return g


class Drain:
    """Asks a running graph to stop at the next superstep. Safe from a signal handler."""

    def __init__(self) -> None:
        self.control = RunControl()

    def request(self) -> None:
        self.control.request_drain("interrupted")


@dataclass(frozen=True)
class Engine:
    """A compiled graph on a checkpoint file, for one run."""

    graph: Any
    run: str
    width: int
    steps: int

    @property
    def config(self) -> dict[str, Any]:
        return {
            "configurable": {"thread_id": self.run}, "max_concurrency": self.width,
            "recursion_limit": self.steps,
        }  # fmt: skip

    def started(self) -> bool:
        return bool(self.graph.get_state(self.config).values)

    def state(self) -> RunState:
        return cast(RunState, self.graph.get_state(self.config).values)

    def at_rest(self) -> bool:
        """Whether the graph has ended or is at its review; a killed run is neither, whatever it was
        about to do.

        `next` alone does not tell: it leaves out a task that has finished and whose writes a kill
        kept from becoming a checkpoint. Such a task is still among `tasks`.
        """
        found = self.graph.get_state(self.config)
        resting = found.next in ((), ("review",)) and len(found.tasks) == len(found.next)
        return bool(found.values and resting)

    def at_review(self) -> bool:
        """Whether the graph waits for a person."""
        return bool(self.graph.get_state(self.config).next == ("review",))

    def answer(self, reply: Mapping[str, Any]) -> None:
        """Give the review its answer, from any process; what comes after it is left to `advance`."""
        self.graph.invoke(
            Command(resume=dict(reply)), self.config, durability="sync", interrupt_after=["review"]
        )

    def settle(self) -> None:
        """Finish an answer that a kill cut off after the review had taken it and before its checkpoint: it is
        answered, and nothing waits.
        """
        found = self.graph.get_state(self.config)
        if not found.next and [task.name for task in found.tasks] == ["review"]:
            self.graph.invoke(None, self.config, durability="sync", interrupt_after=["review"])

    def send_back(self, reply: Mapping[str, Any]) -> None:
        """Open another round of a run that has ended; `reply` is as for `answer`."""
        self.graph.update_state(self.config, {"stop": None, "stale": 0}, as_node="review")

    def reopen(self) -> None:
        """Let a run that stopped decide again whether to go on, under limits that may have
        changed.
        """
        self.graph.update_state(self.config, {"stop": None, "stale": 0}, as_node="record")

    def advance(self, deps: Deps, drain: Drain) -> Stopped:
        """Start or go on until the graph ends, waits or is drained."""
        begin: RunState | None = (
            None if self.started() else {"run": self.run, "round": -1, "next": 0}
        )
        try:
            out = self.graph.invoke(
                begin, self.config, context=deps, durability="sync", control=drain.control,
                version="v2",
            )  # fmt: skip
        except GraphDrained:
            return Stopped("drained", self.state())
        except StopRun as stop:  # before anything was written: a resumed run tries again
            return Stopped("end", cast(RunState, {**self.state(), "stop": stop.reason}))
        values = [i.value for i in out.interrupts]
        waiting = tuple(sorted(v["waiting"] for v in values if "waiting" in v))
        if waiting:
            return Stopped("waiting", self.state(), waiting)
        return Stopped("review" if values else "end", self.state())


def most_steps(settings: RunSettings) -> int:
    """Supersteps that a session can need: four a round, and those of one candidate. A wrong edge
    ends there.
    """
    limits = settings.limits
    rounds = limits.rounds if limits.rounds is not None else limits.candidates or 10_000
    return 4 * rounds + 3 * (2 + settings.repairs + settings.tunings) + 40


@contextmanager
def engine(db: str | Path, run: str, settings: RunSettings) -> Iterator[Engine]:
    """Checkpoints lie in runs.db beside the record. Raises Corrupt, OSError."""
    conn = sqlite3.connect(str(db), timeout=database.BUSY_S, check_same_thread=False)
    try:
        graph = run_graph().compile(checkpointer=SqliteSaver(conn))
        yield Engine(graph, run, max(1, settings.k), most_steps(settings))
    except sqlite3.DatabaseError as error:
        raise translate(error, Path(db)) from error
    finally:
        conn.close()
