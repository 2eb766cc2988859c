"""Drivers for the attack tests: one process per user that starts boxes, started when the first test wants it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ASK, ANSWER = "#ask ", "#answer "
ORDINARY_UID = 58321
SYSTEM_PYTHON = Path("/usr/bin/python3")


class Client:
    """Speaks to one driver process. `problem` says why there is none."""

    def __init__(self, user: str, base: Path) -> None:
        self.base, self.process, self.problem = base, None, ""
        me = "root" if os.getuid() == 0 else "user"
        python, extra = Path(sys.executable), {}
        if user != me:
            if me != "root":
                self.problem = "these tests do not run as root"
                return
            extra = {"user": ORDINARY_UID, "group": ORDINARY_UID, "extra_groups": []}
            python = SYSTEM_PYTHON
            os.chown(base, ORDINARY_UID, ORDINARY_UID)
        self.process = subprocess.Popen(
            [str(python), "-B", str(HERE / "attack_driver.py"), str(base), packaged_bwrap()], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=(base / "stderr").open("wb"), text=True, **extra,
        )  # fmt: skip
        try:
            self.facts = self.ask({})
        except EOFError:
            self.problem = "no box can be started as this user: " + self.said()[-300:]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process and self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(ASK + json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise EOFError(self.said()) from error
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line[len(ANSWER) :])
        raise EOFError(self.said())

    def said(self) -> str:
        return (self.base / "stderr").read_text(errors="replace")

    def close(self) -> None:
        if self.process is not None and self.process.stdin and self.process.stdout:
            self.process.stdin.close()
            self.process.wait(120)
            self.process.stdout.close()


def packaged_bwrap() -> str:
    """bubblewrap for drivers whose interpreter does not know the package; "" leaves them to look."""
    from sandbox.box import bwrap

    found = bwrap.candidates(None)
    return str(found[0]) if found else ""


@pytest.fixture(scope="session")
def drivers() -> Iterator[Any]:
    """drivers(user) -> Client; below /tmp, because an ordinary user cannot enter pytest's own folder."""
    import tempfile

    clients: dict[str, Client] = {}

    def get(user: str) -> Client:
        if user not in clients:
            base = Path(tempfile.mkdtemp(prefix=f"kernelgen-attacks-{user}-"))
            clients[user] = Client(user, base)
        return clients[user]

    yield get
    for client in clients.values():
        client.close()
        shutil.rmtree(client.base, ignore_errors=True)
