"""Strict readers for JSON from untrusted processes: each returns the checked value or raises Malformed.

They check form and bounds only; what a value means is for the caller.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sandbox.dtypes import ITEM_BYTES

_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_.$]*")
_HEX = re.compile(r"[0-9a-f]*")
Scalar = str | int | float | bool | None


class Malformed(ValueError):
    """Untrusted data breaks the schema. `where` is the field, `why` the rule."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where} {why}")
        self.where, self.why = where, why


def parse(data: bytes, at: str, limit: int) -> Any:
    """JSON without NaN, infinity, duplicate keys or endless nesting, at most `limit` bytes."""
    if len(data) > limit:
        raise Malformed(at, f"has {len(data)} bytes, more than {limit}")

    def constant(text: str) -> None:
        raise Malformed(at, f"holds {text}")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) != len(items):
            raise Malformed(at, "has a key twice")
        return out

    try:
        return json.loads(data, parse_constant=constant, object_pairs_hook=pairs)
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed(at, f"is no JSON: {str(error)[:120]}") from error


def keys(value: object, at: str, expected: set[str]) -> dict[str, Any]:
    """A JSON object with exactly these keys."""
    if not isinstance(value, dict):
        raise Malformed(at, "is no object")
    if set(value) != expected:
        odd = sorted(map(str, set(value) ^ expected))[:5]
        raise Malformed(at, f"has missing or unknown fields: {', '.join(odd)[:200]}")
    return value


def items(value: object, at: str, most: int) -> Sequence[Any]:
    if not isinstance(value, list):
        raise Malformed(at, "is no list")
    if len(value) > most:
        raise Malformed(at, f"has {len(value)} entries, more than {most}")
    return value


def integer(value: object, at: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Malformed(at, "is no integer")
    if not low <= value <= high:
        raise Malformed(
            at, f"is {value if abs(value) < 1 << 64 else 'huge'}, outside {low} to {high}"
        )
    return value


def boolean(value: object, at: str) -> bool:
    if not isinstance(value, bool):
        raise Malformed(at, "is neither true nor false")
    return value


def text(value: object, at: str, most: int) -> str:
    """Printable single-line text."""
    if not isinstance(value, str) or len(value) > most or not value.isprintable():
        raise Malformed(at, f"is no printable text of at most {most} characters")
    return value


def name(value: object, at: str, most: int = 256) -> str:
    if not isinstance(value, str) or len(value) > most or not _NAME.fullmatch(value):
        raise Malformed(at, "is no name of letters, digits, '_', '.' and '$'")
    return value


def ranked(value: object, at: str, ranks: int) -> str:
    """A name, or `name@N` with N from 1 to `ranks` - 1."""
    if not isinstance(value, str):
        raise Malformed(at, "is no name")
    plain, mark, number = value.partition("@")
    if mark and number not in {str(r) for r in range(1, ranks)}:
        raise Malformed(at, f"names no rank of 1 to {ranks - 1} after '@'")
    return name(plain, at) + mark + number


def dtype(value: object, at: str) -> str:
    return choice(value, at, tuple(ITEM_BYTES))


def choice(value: object, at: str, allowed: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise Malformed(at, f"is none of {', '.join(allowed)}")
    return value


def sha256(value: object, at: str) -> str:
    if not isinstance(value, str) or len(value) != 64 or not _HEX.fullmatch(value):
        raise Malformed(at, "is no sha256")
    return value


def hexbytes(value: object, at: str, most: int) -> bytes:
    if (
        not isinstance(value, str)
        or len(value) > 2 * most
        or len(value) % 2
        or not _HEX.fullmatch(value)
    ):
        raise Malformed(at, f"is no lower-case hex of at most {most} bytes")
    return bytes.fromhex(value)


def triple(
    value: object, at: str, most: tuple[int, int, int], product: int | None = None
) -> tuple[int, int, int]:
    got = items(value, at, 3)
    if len(got) != 3:
        raise Malformed(at, "is no triple")
    x, y, z = (integer(v, at, 1, m) for v, m in zip(got, most, strict=True))
    if product is not None and x * y * z > product:
        raise Malformed(at, f"has the product {x * y * z}, more than {product}")
    return x, y, z


def scalars(value: object, at: str) -> dict[str, Scalar]:
    """An object of at most 256 plain values, numbers finite."""
    if not isinstance(value, dict) or len(value) > 256:
        raise Malformed(at, "is no object of at most 256 entries")
    for k, v in value.items():
        name(k, at)
        if isinstance(v, str):
            text(v, f"{at}.{k}", 1024)
        elif isinstance(v, float):
            if not math.isfinite(v):
                raise Malformed(f"{at}.{k}", "is not finite")
        elif isinstance(v, int):
            if abs(v) >= 1 << 63:
                raise Malformed(f"{at}.{k}", "does not fit 64 bits")
        elif v is not None:
            raise Malformed(f"{at}.{k}", "is no plain value")
    return dict(value)


def blob(value: object, at: str, blobs: Mapping[str, bytes]) -> bytes:
    """The bytes of that sha256; the hash is checked."""
    key = sha256(value, at)
    data = blobs.get(key)
    if data is None:
        raise Malformed(at, f"names the blob {key[:12]}, which is missing")
    if hashlib.sha256(data).hexdigest() != key:
        raise Malformed(at, f"names the blob {key[:12]}, whose content has another hash")
    return data
