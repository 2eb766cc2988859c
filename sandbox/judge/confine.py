"""What a judging child gives up before it looks at an artifact, and what the verdict may say about it.

This is tier `none`: no namespace, no file or network filter. It drops cheap things only: new privileges, core dumps,
and outliving its parent. A box around judge children belongs here and nowhere else.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from typing import Any

UNBOXED = {"tier": "none"}
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38


def confine(parent: int) -> dict[str, Any]:
    """Apply to this process, forked from `parent`. Returns the `isolation` entry of the judge for verdicts."""
    libc = ctypes.CDLL(None, use_errno=True)
    follows = libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    locked = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return {**UNBOXED, "no_new_privs": locked, "dies_with_parent": follows, "uid": os.getuid()}
