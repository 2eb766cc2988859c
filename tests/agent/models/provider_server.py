"""A local HTTP server that speaks the two providers' streaming protocols, one scripted answer a request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    """`end` is the provider's own word for how it ended; `status` other than 200 answers with `error`."""

    text: str = ""
    end: str = ""
    status: int = 200
    error: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    delay: float = 0.0
    cached: int = 0
    hang_after: int = 1000  # events; then the connection stays open and silent
    fetched: list[str] = field(default_factory=list)  # states that fetching by id meets, then done


@dataclass
class Server:
    """`requests`: what was asked and is paid; `fetches`: ids that were asked for again."""

    url: str
    answers: list[Answer]
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    fetches: list[str] = field(default_factory=list)
    kept: dict[str, Answer] = field(default_factory=dict)
    sent: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serve(
    *answers: Answer, by: Callable[[dict[str, Any]], Answer] | None = None
) -> Iterator[Server]:
    """Answers in their order, or `by` what was asked."""
    state = Server("", list(answers))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            return

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            state.requests.append({"path": self.path, **json.loads(body)})
            state.headers.append({k.lower(): v for k, v in self.headers.items()})
            answer = by(state.requests[-1]) if by else state.answers.pop(0)
            time.sleep(answer.delay)
            if answer.status != 200:
                self._plain(answer)
            else:
                make = {"/v1/messages": messages, "/v1/responses": responses}.get(self.path, chat)
                events = make(answer)
                if self.path == "/v1/responses":
                    events = self._created(answer) + events
                self._stream(events, answer.hang_after)

        def _created(self, answer: Answer) -> list[tuple[str, Any]]:
            """The first event of a response; one in the background is kept under its id."""
            asked = state.requests[-1]
            name = f"resp_{len(state.requests)}"
            if asked.get("store") and asked.get("background"):
                state.kept[name] = answer
            first = {
                **responses(replace(answer, cut=False))[-1][1]["response"],
                "id": name,
                "status": "in_progress",
            }
            first |= {"usage": None, "error": None, "incomplete_details": None}
            first |= {k: asked.get(k, False) for k in ("store", "background")}
            event = {"type": "response.created", "response": first, "sequence_number": 0}
            return [("response.created", event)]

        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            state.fetches.append(name)
            answer = state.kept.get(name)
            if answer is None:
                missing = {"error": {"message": "no such response", "type": "x"}}
                return self._plain(Answer(status=404, error=missing))
            whole = {**responses(replace(answer, cut=False))[-1][1]["response"], "id": name}
            part = {"type": "output_text", "text": answer.text, "annotations": []}
            item = {"type": "message", "id": "i", "role": "assistant", "status": "completed"}
            whole["output"] = [{**item, "content": [part]}]
            if answer.fetched:
                whole |= {"status": answer.fetched.pop(0), "usage": None, "output": []}
            return self._plain(Answer(status=200, error=whole))

        def _plain(self, answer: Answer) -> None:
            data = json.dumps(answer.error).encode()
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, events: list[tuple[str, Any]], most: int) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            for name, event in events[:most]:
                data = event if isinstance(event, str) else json.dumps(event)
                line = f"event: {name}\n" if name else ""
                self.wfile.write(f"{line}data: {data}\n\n".encode())
                self.wfile.flush()
            if most < len(events):
                state.sent.set()
                state.over.wait(300)
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.over.set()
        server.shutdown()
        server.server_close()


def _halves(text: str) -> list[str]:
    middle = len(text) // 2
    return [x for x in (text[:middle], text[middle:]) if x]


def messages(a: Answer) -> list[tuple[str, Any]]:
    """Anthropic: 100 input tokens, of which `cached` came from the cache; 7 output tokens."""
    usage = {
        "input_tokens": 100 - a.cached, "output_tokens": 1,
        "cache_read_input_tokens": a.cached, "cache_creation_input_tokens": 0,
    }  # fmt: skip
    message = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [],
        "stop_reason": None, "stop_sequence": None, "usage": usage,
    }  # fmt: skip
    block = {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    events: list[tuple[str, Any]] = [
        ("message_start", {"type": "message_start", "message": message}),
        ("content_block_start", block),
    ]
    for piece in _halves(a.text):
        delta = {"type": "text_delta", "text": piece}
        events.append(
            ("content_block_delta", {"type": "content_block_delta", "index": 0, "delta": delta})
        )
    if a.error:
        return [*events, ("error", {"type": "error", "error": a.error})]
    if a.cut:
        return events
    stop = {"stop_reason": a.end or "end_turn", "stop_sequence": None}
    return [
        *events,
        ("content_block_stop", {"type": "content_block_stop", "index": 0}),
        ("message_delta", {"type": "message_delta", "delta": stop, "usage": {"output_tokens": 7}}),
        ("message_stop", {"type": "message_stop"}),
    ]


def responses(a: Answer) -> list[tuple[str, Any]]:
    """OpenAI Responses: 100 input tokens including `cached`; 7 output tokens."""
    kind = "response.refusal.delta" if a.end == "refusal" else "response.output_text.delta"
    events: list[tuple[str, Any]] = [
        (
            kind,
            {
                "type": kind,
                "delta": piece,
                "item_id": "i",
                "output_index": 0,
                "content_index": 0,
                "sequence_number": n,
                "logprobs": [],
            },  # fmt: skip
        )
        for n, piece in enumerate(_halves(a.text))
    ]
    if a.cut:
        return events
    incomplete = a.end in ("max_output_tokens", "content_filter")
    status = "failed" if a.error else "incomplete" if incomplete else "completed"
    response = {
        "id": "r", "object": "response", "created_at": 1, "model": "m", "output": [],
        "status": status, "error": a.error or None,
        "incomplete_details": {"reason": a.end} if incomplete else None,
        "parallel_tool_calls": False, "tool_choice": "auto", "tools": [], "metadata": {},
        "usage": {
            "input_tokens": 100, "output_tokens": 7, "total_tokens": 107,
            "input_tokens_details": {"cached_tokens": a.cached, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }  # fmt: skip
    last = {"type": f"response.{status}", "response": response, "sequence_number": 99}
    return [*events, (last["type"], last)]  # type: ignore[list-item]


def chat(a: Answer) -> list[tuple[str, Any]]:
    """Chat completions with usage in the last chunk."""

    def chunk(**more: Any) -> tuple[str, Any]:
        base = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        return "", {**base, "choices": [], **more}

    events = [
        chunk(choices=[{"index": 0, "delta": {"content": piece}, "finish_reason": None}])
        for piece in _halves(a.text)
    ]
    if a.cut:
        return events
    usage = {
        "prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107,
        "prompt_tokens_details": {"cached_tokens": a.cached},
    }  # fmt: skip
    end = {"index": 0, "delta": {}, "finish_reason": a.end or "stop"}
    return [*events, chunk(choices=[end]), chunk(usage=usage), ("", "[DONE]")]


@contextmanager
def broken(body: bytes) -> Iterator[Server]:
    """A server whose 200 says one chunk is to come, sends `body` and hangs up."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            self.wfile.write(head + b"\r\n%x\r\n%b\r\n" % (len(body), body))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_address[1]}", [])
    finally:
        server.shutdown()
        server.server_close()
