"""Who may see the pages: a token from the terminal, then a cookie; only this host's name; no foreign forms.

Against other pages in the same browser, other users of the machine and names that point here. Not
against programs that run as the same user: they can read the record itself.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
# Not `no-referrer`: browsers then send `Origin: null` with forms of our own.
HEADERS = {
    "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY", "Referrer-Policy": "same-origin", "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin",
}  # fmt: skip


@dataclass(frozen=True)
class Secrets:
    """What proves that a request comes from the person: derived from one token of this process."""

    token: str
    port: int

    def _derived(self, what: str) -> str:
        return hmac.new(self.token.encode(), what.encode(), hashlib.sha256).hexdigest()

    @property
    def session(self) -> str:
        return self._derived("session")

    @property
    def csrf(self) -> str:
        return self._derived("csrf")

    @property
    def cookie(self) -> str:
        """Cookies do not know ports: another server on this host must not overwrite ours."""
        return f"kernelgen-{self.port}"

    @property
    def hosts(self) -> frozenset[str]:
        return frozenset(f"{name}:{self.port}" for name in ("127.0.0.1", "localhost", "[::1]"))


def same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())


@dataclass(frozen=True)
class Guard:
    """ASGI middleware: answers what may not pass, and puts the headers on everything."""

    app: ASGIApp
    secrets: Secrets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        answer = self._refusal(Request(scope))
        await (answer or self.app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """None lets the request through."""
        secrets = self.secrets
        if request.headers.get("host", "") not in secrets.hosts:
            return PlainTextResponse("this name does not lead here", 421)
        if request.method in ("GET", "HEAD") and "token" in request.query_params:
            return self._entrance(request)
        if not same(request.cookies.get(secrets.cookie, ""), secrets.session):
            return PlainTextResponse("open the address that `kernelgen serve` printed", 403)
        if request.method not in ("GET", "HEAD") and not self._ours(request.headers):
            return PlainTextResponse("this form came from another page", 403)
        return None

    def _entrance(self, request: Request) -> Response:
        """The token becomes a cookie and leaves the address."""
        if not same(request.query_params["token"], self.secrets.token):
            return PlainTextResponse("the token is not of this server", 403)
        rest = [(k, v) for k, v in parse_qsl(request.url.query) if k != "token"]
        # "//host" would be another site
        path = "/" + request.url.path.lstrip("/\\")
        answer = RedirectResponse(path + (f"?{urlencode(rest)}" if rest else ""), 303)
        answer.set_cookie(
            self.secrets.cookie, self.secrets.session, httponly=True, samesite="strict", path="/"
        )
        return answer

    def _ours(self, headers: Headers) -> bool:
        """Browsers say where a form came from; what says nothing needs the form's secret alone."""
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site is not None and site not in ("same-origin", "none"):
            return False
        return origin is None or origin in {f"http://{host}" for host in self.secrets.hosts}
