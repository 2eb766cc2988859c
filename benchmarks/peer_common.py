"""What the parts of `peer.py` share: rows on stdout, sizes of a measurement. Imports nothing that needs a GPU."""

from __future__ import annotations

import json
from typing import Any

CHAIN, REPEATS, SEED = 16, 15, 1
"""Steps in a chain, chains timed, seed of the tensors."""


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)
