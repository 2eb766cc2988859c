"""The tool as a process on a real (pseudo) terminal: the live table as a person sees it, and Ctrl-C
once and twice.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGET = f"{Path(__file__).with_name('fake_target.py')}:Fake"
OPTIMIZE = ("optimize", "--target", TARGET, "--device", "cpu", "--proposer", "tuner")
PIECE = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n])")


class Terminal:
    """A process whose stderr is a terminal of 100 x 40; what it drew is kept."""

    def __init__(self, folder: Path, args: tuple[str, ...], **environment: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI", "ANTHROPIC"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.agent.tool", *args],
            cwd=folder, stdin=slave, stdout=subprocess.PIPE, stderr=slave, start_new_session=True,
            env={**keep, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **environment},
        )  # fmt: skip
        os.close(slave)
        self.drawn = ""

    def read(self, seconds: float = 0.1) -> bool:
        """False once the terminal is closed."""
        if not select.select([self.master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.master, 65536)
        except OSError:
            return False
        self.drawn += data.decode()
        return bool(data)

    def until(self, text: str) -> None:
        end = time.monotonic() + 120
        while text not in self.drawn:
            assert time.monotonic() < end and self.process.poll() is None, self.drawn
            self.read()

    def finish(self) -> tuple[int, str]:
        while self.read(1.0) and self.process.poll() is None:
            continue
        out, _ = self.process.communicate(timeout=60)
        while self.read(0.2) and select.select([self.master], [], [], 0.2)[0]:
            continue
        os.close(self.master)
        return self.process.returncode, out.decode()


def screen(drawn: str) -> list[str]:
    """What a terminal shows after these bytes: cursor up, erasing, carriage return, text."""
    lines, row, column = [""], 0, 0
    for number, letter, control, text in PIECE.findall(drawn):
        if letter == "A":
            row = max(0, row - int(number or 1))
        elif letter == "K":
            lines[row] = "" if number == "2" else lines[row][:column]
        elif control == "\r":
            column = 0
        elif control == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif text:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + text + line[column + 1 :]
            column += 1
    return lines


def show(folder: Path) -> Mapping[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.agent.tool", "show", "last", "--json"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=True,
    )  # fmt: skip
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


def test_the_live_table_on_a_terminal_leaves_one_clean_table_behind(tmp_path: Path) -> None:
    args = (*OPTIMIZE, "--rounds", "2", "--candidates", "2")
    shown = Terminal(tmp_path, args, SLOW="0.3")
    code, out = shown.finish()
    assert (code, "kernel: " in out) == (0, True), (out, shown.drawn)
    assert shown.drawn.count("\x1b[?25l") == shown.drawn.count("\x1b[?25h") == 1
    assert len(re.findall(r"\x1b\[1A\x1b\[2K", shown.drawn)) > 10  # it was drawn again and again
    assert "judging" in shown.drawn and "spent: 0.0 min" in shown.drawn
    left = screen(shown.drawn)
    assert sum("fake_target.py:Fake on cpu" in x for x in left) == 1, left
    rows = [x for x in left if re.match(r"\W*[0-4] ?\*?\W", x) and "%" in x]
    assert len(rows) == 5, left
    assert not any("\x1b" in x or "judging" in x for x in left)
    odd = {c for c in "".join(left) if not c.isprintable()}
    assert odd == set(), odd


@pytest.mark.slow  # three processes, one after the other
def test_ctrl_c_twice_stops_at_once_and_the_run_goes_on_where_it_was(tmp_path: Path) -> None:
    shown = Terminal(tmp_path, (*OPTIMIZE, "--rounds", "1", "--candidates", "2"), SLOW="60")
    end = time.monotonic() + 120
    while not (tmp_path / "judging").exists():
        assert time.monotonic() < end, shown.drawn
        shown.read()
    os.kill(shown.process.pid, signal.SIGINT)
    shown.until("Ctrl-C again stops at once")
    assert shown.process.poll() is None  # it finishes what is running
    os.kill(shown.process.pid, signal.SIGINT)
    began = time.monotonic()
    code, out = shown.finish()
    assert (code, time.monotonic() - began < 50) == (130, True)
    assert shown.drawn.count("\x1b[?25h") >= 1  # the cursor is back
    assert list((tmp_path / "kernels_out").glob("*/*/*/kernel.py"))  # the seed, verified before
    again = Terminal(tmp_path, ("resume", "last"))
    code, out = again.finish()
    assert code == 0, (out, again.drawn)
    found = show(tmp_path)
    assert [c["seq"] for c in found["candidates"]] == [0, 1, 2]
    assert {c["status"] for c in found["candidates"]} == {"passed"}
