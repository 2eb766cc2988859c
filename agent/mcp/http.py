"""The server over streamable HTTP, on loopback alone and behind a bearer token.

Against other users of the machine and pages in a browser. Not against programs of the same user:
they can read the record itself.
"""

from __future__ import annotations

import hmac
import socket
from dataclasses import dataclass

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from agent.mcp.stdio import Server

HOST = "127.0.0.1"
PATH = "/mcp"
TOKEN_VARIABLE = "KERNELGEN_MCP_TOKEN"
SHORTEST_TOKEN = 16
CLOSING_S = 3


@dataclass(frozen=True)
class Bearer:
    """ASGI middleware: answers what has another host's name, comes from a page, or lacks the token."""

    app: ASGIApp
    token: str
    port: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        answer = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        await (answer or self.app)(scope, receive, send)

    def _refusal(self, headers: Headers) -> Response | None:
        """None lets the request through."""
        hosts = {f"{name}:{self.port}" for name in (HOST, "localhost")}
        if headers.get("host", "") not in hosts:
            return PlainTextResponse("this name does not lead here", 421)
        if "origin" in headers and headers["origin"] not in {f"http://{host}" for host in hosts}:
            return PlainTextResponse("not from a page", 403)
        kind, _, given = headers.get("authorization", "").partition(" ")
        wanted = self.token.encode()
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), wanted):
            return PlainTextResponse(
                f"send the token of this server as a bearer token ({TOKEN_VARIABLE})", 401,
                {"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        return None


def bind(port: int) -> socket.socket:
    """A socket on loopback; port 0 takes a free one. Raises OSError."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((HOST, port))
    except BaseException:
        bound.close()
        raise
    return bound


def serve(server: Server, bound: socket.socket, token: str) -> None:
    """Until a signal ends it."""
    port = bound.getsockname()[1]
    app = Bearer(server.streamable_http_app(streamable_http_path=PATH, host=HOST), token, port)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=CLOSING_S,
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[bound])
