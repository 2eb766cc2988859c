"""Keys are hidden in whatever a provider, or a gateway before it, sends back: some repeat them in an error.

It knows the values that this process was started with, nothing that merely looks like a key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from agent.config import KEYS

NAMES = (*KEYS.values(), "ANTHROPIC_AUTH_TOKEN")
SHORTEST = 8
"""Characters: what is shorter is a stand-in such as `local`, and would be found everywhere."""
HIDDEN = "[key]"


def hidden(value: Any, environment: Mapping[str, str] = os.environ) -> Any:
    """The same text, or JSON with the same texts, without the keys of the environment."""
    secrets = [v for name in NAMES if len(v := environment.get(name, "")) >= SHORTEST]
    return _without(value, secrets) if secrets else value


def _without(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        return value
    if isinstance(value, Mapping):
        return {k: _without(v, secrets) for k, v in value.items()}
    return [_without(v, secrets) for v in value] if isinstance(value, list) else value
