"""The pages: runs, a run, a candidate with its decision form. Server-rendered, no script at all.

Shows what `agent.report` shows, from the same functions; writes nothing but decisions.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from jinja2 import Environment
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from agent.locks import state_of
from agent.models.base import Unavailable
from agent.report.html import environment, style
from agent.report.pages import RunPage, dossier_page, run_page
from agent.report.views import run_view
from agent.review.decide import EFFECTS, Refused, decide
from agent.review.dossier import dossier, queue
from agent.serve.guard import Guard, Secrets, same
from agent.store import Corrupt, Queries, Store
from agent.store.queries import NotFound
from agent.workspace import Missing, Place

FOLDER = Path(__file__).with_name("templates")
REFRESH_S = 15
MOST_BODY = 64 << 10
KEPT_PAGES = 8


@dataclass(frozen=True)
class Desk:
    """What the pages need: where the record is, who decides, the secrets. Pages of runs that have
    not changed are kept, since drawing them takes a while.
    """

    place: Place
    queries: Queries
    who: str
    secrets: Secrets
    templates: Environment = field(default_factory=lambda: environment(FOLDER))
    kept: dict[tuple[Any, ...], RunPage] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def render(self, name: str, status: int = 200, **values: Any) -> Response:
        return HTMLResponse(self.templates.get_template(name).render(**values), status)

    def page(self, queries: Queries, run: Mapping[str, Any]) -> RunPage:
        view = run_view(queries, run)
        key = (
            run["id"], run["state"], run["updated"], run["message"],
            tuple((p.seq, p.result, p.us, p.word) for p in view.points), len(view.decisions),
            len(view.lessons), view.spent,
        )  # fmt: skip
        with self.lock:
            if key not in self.kept:
                self.kept[key] = run_page(view, whole=False)
                while len(self.kept) > KEPT_PAGES:
                    del self.kept[next(iter(self.kept))]
            return self.kept[key]


def build(place: Place, who: str, secrets: Secrets) -> Starlette:
    """The application. Raises Corrupt for a record that is none."""
    desk = Desk(place, Queries(Store(place.db), place.workspace), who, secrets)

    def bound(work: Callable[[Desk, Request], Response]) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            return answered(desk, request, work)

        return endpoint

    async def decision(request: Request) -> Response:
        body = await small_body(request)
        return await run_in_threadpool(
            answered, desk, request, lambda d, r: take_decision(d, r, body)
        )

    return Starlette(
        routes=[
            Route("/", bound(runs)),
            Route("/style.css", bound(stylesheet)),
            Route("/runs/{run}", bound(one_run)),
            Route("/runs/{run}/candidates/{seq:int}", bound(candidate), methods=["GET"]),
            Route("/runs/{run}/candidates/{seq:int}", decision, methods=["POST"]),
        ],
        middleware=[Middleware(Guard, secrets=secrets)],
    )


def answered(desk: Desk, request: Request, work: Callable[[Desk, Request], Response]) -> Response:
    """Expected failures as pages."""
    try:
        return work(desk, request)
    except NotFound as error:
        return desk.render("message.html.j2", 404, title="Not found", text=str(error))
    except Refused as error:
        return desk.render("message.html.j2", 409, title="Not recorded", text=str(error))
    except (Missing, Unavailable, Corrupt, OSError, sqlite3.Error) as error:
        return desk.render("message.html.j2", 500, title="Cannot be shown", text=str(error))


def stylesheet(desk: Desk, request: Request) -> Response:
    return Response(style(), media_type="text/css")


def runs(desk: Desk, request: Request) -> Response:
    queries = desk.queries
    rows = queries.runs()
    for row in rows:
        row["state"] = state_of(desk.place.workspace, row)
        row["waiting"] = len(queue(queries, row["id"]))
    return desk.render("runs.html.j2", rows=rows, refresh=_refresh(rows))


def one_run(desk: Desk, request: Request) -> Response:
    queries = desk.queries
    run = queries.run(request.path_params["run"])
    run = {**run, "state": state_of(desk.place.workspace, run)}
    waiting = queue(queries, run["id"])
    return desk.render(
        "run.html.j2", page=desk.page(queries, run), run=run, waiting=waiting,
        refresh=_refresh([run]),
    )  # fmt: skip


def candidate(desk: Desk, request: Request) -> Response:
    queries = desk.queries
    run = queries.run(request.path_params["run"])
    d = dossier(queries, run, request.path_params["seq"])
    waiting = [seq for seq in queue(queries, run["id"]) if seq != d.me.seq]
    return desk.render(
        "candidate.html.j2", d=dossier_page(d), run=run, hashes=d.hashes, who=desk.who,
        csrf=desk.secrets.csrf, waiting=waiting, decided=d.standing, refresh=None,
        passed=d.me.row["status"] == "passed",
        effect=EFFECTS.get(request.query_params.get("done", ""), ""),
    )  # fmt: skip


async def small_body(request: Request) -> bytes:
    """At most MOST_BODY bytes; a longer body is none."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BODY:
            return b""
    return body


def take_decision(desk: Desk, request: Request, body: bytes) -> Response:
    """A form of ours, about the artifact that the person saw. Raises Refused, NotFound."""
    form = {k: v[-1] for k, v in parse_qs(body.decode("utf-8", "replace")).items()}
    if not same(form.get("csrf", ""), desk.secrets.csrf):
        return desk.render(
            "message.html.j2", 403, title="Not recorded", text="The form is not ours."
        )
    run, seq = request.path_params["run"], request.path_params["seq"]
    row = desk.queries.candidate(f"{run}-{seq}")
    seen = (form.get("source", ""), form.get("artifact", ""))
    if seen != (row["source"], row["artifact"] or ""):
        raise Refused("the candidate is not what the page showed: load it again")
    note = form.get("note", "").replace("\r\n", "\n")
    done = decide(desk.place, row, form.get("kind", ""), (note, desk.who))
    return RedirectResponse(f"/runs/{row['run']}/candidates/{seq}?done={done.effect}", 303)


def _refresh(rows: list[dict[str, Any]]) -> int | None:
    return REFRESH_S if any(r["state"] == "running" for r in rows) else None
