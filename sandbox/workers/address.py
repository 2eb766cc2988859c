"""What `--workers` says: `local`, `ray`, or `ray://HOST:PORT`, with counts: `ray?judges=8&compilers=2`.

Parsing only; nothing is contacted.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

LOCAL = ("", "local")
COUNTS = ("judges", "compilers", "gpus")
CLIENT_PORT = 10001
MOST = 4096


class BadAddress(ValueError):
    """The text names no workers; the message says what would."""


@dataclass(frozen=True)
class Farm:
    """`address` '' starts a Ray on this machine that ends with us; else HOST:PORT of a running one.

    `judges`, `compilers`: at most so many in all; None: what the nodes have room for. `gpus`: of one host, held by
    each judge.
    """

    address: str = ""
    judges: int | None = None
    compilers: int | None = None
    gpus: int = 1


def parse(text: str) -> Farm | None:
    """None for local work. Raises BadAddress."""
    if text in LOCAL:
        return None
    head, _, query = text.partition("?")
    scheme, mark, rest = head.partition("://")
    if scheme != "ray" or (mark and not rest):
        raise BadAddress(f"{text!r} is not local, ray or ray://HOST:PORT")
    counts = _counts(query)
    return Farm(
        _host_port(rest) if rest else "",
        counts.get("judges"),
        counts.get("compilers"),
        counts.get("gpus", 1),
    )


def _host_port(rest: str) -> str:
    found = urlsplit(f"//{rest}")
    try:
        port = found.port
    except ValueError:
        port = None
    if not found.hostname or port is None or found.path:
        raise BadAddress(
            f"ray://{rest} has no HOST:PORT (of the cluster's head, as in `ray start`)"
        )
    if port == CLIENT_PORT:
        raise BadAddress(
            f"port {CLIENT_PORT} is Ray's client proxy; give the head's own port (6379), on a node of the cluster"
        )
    return rest


def _counts(query: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in COUNTS or not value.isdecimal() or not 1 <= int(value) <= MOST:
            raise BadAddress(f"{name}={value} is none of {', '.join(COUNTS)} with a number")
        counts[name] = int(value)
    return counts
