"""Results on the driver's disk, by content address, written as soon as they arrive.

A driver that is killed and started again finds what came before it died. A file that cannot be read is a miss.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Results:
    """One JSON file a result, below `folder`; safe for several processes at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: str) -> dict[str, Any] | None:
        try:
            found = json.loads(self._path(key).read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        """Raises OSError."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(value, file, allow_nan=False)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"
