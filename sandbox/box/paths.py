"""Which paths an interpreter needs to be visible, wherever its virtual environment and its base lie.

Only the parts of a prefix that Python loads from are listed (bin, lib, lib64, pyvenv.cfg), so that an environment
inside a home or project folder does not take its neighbours into the box.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

PARTS = ("bin", "lib", "lib64", "pyvenv.cfg")
MOUNTED = (Path("/usr"), Path("/bin"), Path("/lib"), Path("/lib64"))
MAX_LINKS = 16


def needed(python: Path, more: tuple[Path, ...]) -> list[Path]:
    """Paths to show read-only so that `python` runs, then `more`; nothing that /usr holds, no path twice."""
    return _without_doubles((*_interpreter(python), *more))


def parents(paths: list[Path]) -> list[Path]:
    """Folders above `paths` that none of them holds, outermost first."""
    above = {p for path in paths for p in path.parents if p != Path("/")}
    hidden = [p for p in above if not any(p.is_relative_to(x) for x in (*paths, *MOUNTED))]
    return sorted(hidden, key=lambda p: (len(p.parts), p))


def _without_doubles(candidates: tuple[Path, ...]) -> list[Path]:
    """Those that exist and lie in no earlier one."""
    found: list[Path] = []
    for path in candidates:
        inside = any(path.is_relative_to(other) for other in (*MOUNTED, *found))
        if not inside and path.exists():
            found.append(path)
    return found


@lru_cache(maxsize=8)
def _interpreter(python: Path) -> tuple[Path, ...]:
    """Parts of every prefix on the way from `python` through its links to the real interpreter."""
    prefixes: list[Path] = []
    at = Path(os.path.abspath(python))
    for _ in range(MAX_LINKS):
        prefixes += [at.parent.parent, *_base_of(at.parent.parent)]
        if not at.is_symlink():
            break
        at = Path(os.path.normpath(at.parent / os.readlink(at)))
    prefixes += [Path(os.path.realpath(prefix)) for prefix in list(prefixes)]
    parts = [p / part for p in dict.fromkeys(prefixes) if p != Path("/") for part in PARTS]
    return tuple(_without_doubles(tuple(parts)))


def _base_of(prefix: Path) -> list[Path]:
    """The prefix that a virtual environment's configuration names as its home."""
    try:
        lines = (prefix / "pyvenv.cfg").read_text(errors="replace").splitlines()
    except OSError:
        return []
    homes = [
        line.split("=", 1)[1].strip() for line in lines if line.split("=")[0].strip() == "home"
    ]
    return [Path(home).parent for home in homes]
