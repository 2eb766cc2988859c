"""The server over stdio, with stdout kept for the protocol from before anything else runs to the
end of the process.

The library guards stdout only while it serves; the driver starts earlier and ends later, and what
it or a library prints may lie in a buffer meanwhile. POSIX only.
"""

from __future__ import annotations

import fcntl
import io
import os
import sys
from collections.abc import Callable
from typing import Any

import anyio
from mcp.server import MCPServer
from mcp.server.stdio import stdio_server


class Server(MCPServer[Any]):
    """An MCPServer that can speak on a given stream."""

    def run_on(self, wire: io.TextIOWrapper) -> None:
        """Until stdin ends."""

        async def work() -> None:
            low = self._lowlevel_server
            async with stdio_server(stdout=anyio.wrap_file(wire)) as (read, write):
                await low.run(read, write, low.create_initialization_options())

        anyio.run(work)


def take_stdout() -> io.TextIOWrapper:
    """Stdout as a private stream. From here on file descriptor 1 is stderr, for this process and
    its children. Raises OSError.
    """
    sys.stdout.flush()
    private = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
    os.dup2(2, 1)
    return io.TextIOWrapper(os.fdopen(private, "wb"), encoding="utf-8")


def serve(server: Server, start: Callable[[], None]) -> None:
    """Take stdout, call `start`, and serve until stdin ends."""
    with take_stdout() as wire:
        start()
        server.run_on(wire)
