"""The pages: who is let in, what forms may do, what is shown, and that hostile text stays text."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("matplotlib")

from starlette.testclient import TestClient

from agent.fakes import kernel
from agent.review.decide import decisions
from agent.search import Limits
from agent.serve.app import MOST_BODY, build
from agent.serve.guard import Secrets
from tests.agent.report.pages import harmless, read
from tests.agent.review.staged import EVIL, stage

SECRETS = Secrets("a-token-of-the-test", 8808)
HERE = "http://127.0.0.1:8808"


@pytest.fixture
def stranger(kit: Any) -> TestClient:
    stage(kit)
    app = build(kit.place, f"Ada {EVIL}", SECRETS)
    return TestClient(app, base_url=HERE, follow_redirects=False)


@pytest.fixture
def client(stranger: TestClient) -> TestClient:
    answer = stranger.get("/", params={"token": SECRETS.token})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    return stranger


def run_of(kit: Any) -> str:
    return str(kit.queries.run("last")["id"])


def form(client: TestClient, path: str, **changes: str) -> dict[str, str]:
    """The fields of the page's form, as a browser would send them."""
    fields = {
        a["name"]: a["value"] for t, a in read(client.get(path).text).elements if t == "input"
    }
    return {**fields, "note": "", **changes}


def test_without_the_token_nothing_is_shown(stranger: TestClient, kit: Any) -> None:
    for path in ("/", f"/runs/{run_of(kit)}", "/style.css", "/?token=wrong", "/?token="):
        answer = stranger.get(path)
        assert answer.status_code == 403 and run_of(kit) not in answer.text
    assert (
        stranger.post(f"/runs/{run_of(kit)}/candidates/3", data={"kind": "approve"}).status_code
        == 403
    )
    assert decisions(kit.queries, run_of(kit)) == ()


def test_the_token_becomes_a_cookie_of_this_site_alone(stranger: TestClient) -> None:
    answer = stranger.get("/runs/x?a=1&token=" + SECRETS.token)
    assert answer.headers["location"] == "/runs/x?a=1"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and SECRETS.token not in cookie


def test_the_way_in_leads_nowhere_else(stranger: TestClient) -> None:
    for path in ("//evil.example/", "/\\evil.example/"):
        answer = stranger.get(f"{HERE}{path}?token={SECRETS.token}")
        location = answer.headers["location"]
        assert location.startswith("/") and not re.match(r"[/\\]{2}", location)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8808", "127.0.0.1:9999", "127.0.0.1", ""]
)
def test_other_names_do_not_lead_here(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 421


def test_every_answer_has_the_strict_headers(client: TestClient, kit: Any) -> None:
    for path in ("/", "/style.css", f"/runs/{run_of(kit)}", "/runs/none", "/nowhere", "/?token=x"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; style-src 'self';") and "unsafe" not in policy
        assert "script-src" not in policy and "frame-ancestors 'none'" in policy
        assert (
            headers["cache-control"] == "no-store"
            and headers["x-content-type-options"] == "nosniff"
        )


def test_pages_show_the_run_and_hostile_text_stays_text(client: TestClient, kit: Any) -> None:
    run = run_of(kit)
    for path in ("/", f"/runs/{run}", *(f"/runs/{run}/candidates/{n}" for n in range(4))):
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert "\x1b" not in answer.text and "<style" not in answer.text
        harmless(answer.text)
    text = read(client.get(f"/runs/{run}/candidates/3").text).text
    assert text.count("<script>alert(1)</script>") >= 6
    assert "1.1330 to 1.1550" in text and "other devices" in text and "Side by side" in text
    assert "To review" in client.get(f"/runs/{run}").text


def test_pages_can_be_used_with_a_keyboard(client: TestClient, kit: Any) -> None:
    found = read(client.get(f"/runs/{run_of(kit)}/candidates/3").text).elements
    assert ("a", {"class": "skip", "href": "#main"}) in found
    assert [a["value"] for t, a in found if t == "button"] == ["approve", "send_back", "reject"]
    assert any(t == "label" and a.get("for") == "note" for t, a in found)
    assert all("tabindex" not in a or a["tabindex"] == "0" for _, a in found)


def test_approval_is_recorded_and_shown(client: TestClient, kit: Any) -> None:
    run = run_of(kit)
    path = f"/runs/{run}/candidates/3"
    answer = client.post(path, data=form(client, path, kind="approve", note="fine"))
    assert (answer.status_code, answer.headers["location"]) == (303, f"{path}?done=recorded")
    (d,) = decisions(kit.queries, run)
    assert (d.kind, d.note, d.who, d.seq) == ("approve", "fine", f"Ada {EVIL}", 3)
    page = client.get(answer.headers["location"]).text
    assert "Recorded: recorded" in page and "Now: approve" in page
    harmless(page)
    overview = client.get(f"/runs/{run}").text
    assert "approved" in read(overview).text


@pytest.mark.parametrize(
    ("changes", "headers", "status"),
    [
        ({"csrf": "guess"}, {}, 403),
        ({"csrf": ""}, {}, 403),
        ({}, {"origin": "http://evil.example"}, 403),
        ({}, {"origin": "null"}, 403),
        ({}, {"sec-fetch-site": "cross-site"}, 403),
        ({}, {"sec-fetch-site": "same-site"}, 403),
        ({"artifact": "0" * 64}, {}, 409),
        ({"kind": "bless"}, {}, 409),
        ({"kind": "reject"}, {}, 409),
        ({"note": "x" * MOST_BODY}, {}, 403),
    ],
)
def test_forged_and_broken_forms_record_nothing(
    client: TestClient, kit: Any, changes: dict[str, str], headers: dict[str, str], status: int
) -> None:
    path = f"/runs/{run_of(kit)}/candidates/3"
    sent = form(client, path, kind="approve") | changes
    assert client.post(path, data=sent, headers=headers).status_code == status
    assert decisions(kit.queries, run_of(kit)) == ()


def test_a_form_of_our_own_origin_passes(client: TestClient, kit: Any) -> None:
    path = f"/runs/{run_of(kit)}/candidates/3"
    sent = form(client, path, kind="approve")
    answer = client.post(path, data=sent, headers={"origin": HERE, "sec-fetch-site": "same-origin"})
    assert answer.status_code == 303


def test_what_is_not_there_is_said(client: TestClient, kit: Any) -> None:
    answer = client.get("/runs/none")
    assert answer.status_code == 404 and "no run" in answer.text
    assert client.get(f"/runs/{run_of(kit)}/candidates/99").status_code == 404
    assert client.get("/runs/%3Cscript%3E").status_code == 404
    harmless(client.get("/runs/%3Cscript%3E").text)


def test_a_run_at_work_refreshes_its_page_and_a_review_does_not(
    client: TestClient, kit: Any
) -> None:
    from agent.locks import hold

    run = run_of(kit)
    assert "http-equiv" not in client.get(f"/runs/{run}").text
    kit.queries.store.set_run(run, state="running")
    assert "killed" in client.get(f"/runs/{run}").text
    with hold(kit.place.workspace.run(run)):
        page = client.get(f"/runs/{run}").text
        assert re.search(r'<meta http-equiv="refresh" content="\d+">', page)
        assert "http-equiv" not in client.get(f"/runs/{run}/candidates/3").text


def test_pages_are_drawn_again_only_when_something_changed(
    client: TestClient, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import agent.serve.app

    drawn = []
    real = agent.serve.app.run_page
    monkeypatch.setattr(
        agent.serve.app, "run_page", lambda *a, **k: drawn.append(1) or real(*a, **k)
    )
    path = f"/runs/{run_of(kit)}"
    client.get(path)
    client.get(path)
    assert len(drawn) == 1
    kit.queries.store.add_lessons(run_of(kit), 2, ["another"])
    assert "another" in client.get(path).text and len(drawn) == 2


def test_sending_back_answers_a_real_graph(kit: Any) -> None:
    ended = kit.optimize([kernel(80)], limits=Limits(rounds=1))
    client = TestClient(build(kit.place, "Ada", SECRETS), base_url=HERE, follow_redirects=False)
    client.get("/", params={"token": SECRETS.token})
    path = f"/runs/{ended.run}/candidates/1"
    answer = client.post(path, data=form(client, path, kind="send_back", note="two\r\nlines"))
    assert answer.headers["location"].endswith("?done=answered")
    assert kit.queries.run(ended.run)["state"] == "waiting"
    assert decisions(kit.queries, ended.run)[0].note == "two\nlines"
