"""What an attack could reach from outside its box: planted secrets, processes, listeners, files, and how they fared.

Everything is planted by this process, bounded, on loopback, and removed at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from sandbox.box import procfs

KEY_NAME = "KG_PLANTED_KEY"
VICTIM = "import os, sys, time\ntoken = sys.stdin.readline()\nprint('up', flush=True)\ntime.sleep(3600)\n"
FOLDERS = {"home": 0o700, "shared": 0o777, "scratch": 0o777, "results": 0o777}
PLACES = ("/tmp", "/var/tmp", "/dev/shm")


class Listeners:
    """Counts what arrives by TCP, UDP, an abstract socket and a socket file."""

    def __init__(self, base: Path) -> None:
        self.counts = dict.fromkeys(("tcp", "udp", "abstract", "named"), 0)
        self.abstract = "kg-" + secrets.token_hex(6)
        self.file = str(base / "agent.sock")
        tcp, udp = self._pair()
        self.port = tcp.getsockname()[1]
        abstract, named = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        abstract.bind("\0" + self.abstract)
        named.bind(self.file)
        os.chmod(self.file, 0o777)
        abstract.listen()
        named.listen()
        for name, sock in (("tcp", tcp), ("udp", udp), ("abstract", abstract), ("named", named)):
            threading.Thread(target=self._count, args=(name, sock), daemon=True).start()

    def _pair(self) -> tuple[socket.socket, socket.socket]:
        """Of one number that is free for TCP and for UDP. Raises OSError."""
        for left in reversed(range(20)):
            tcp = socket.create_server(("127.0.0.1", 0))
            udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                udp.bind(("127.0.0.1", tcp.getsockname()[1]))
                return tcp, udp
            except OSError:
                tcp.close()
                udp.close()
                if not left:
                    raise
        raise AssertionError("unreachable")

    def _count(self, name: str, sock: socket.socket) -> None:
        while True:
            if name == "udp":
                sock.recv(100)
            else:
                sock.accept()[0].close()
            self.counts[name] += 1


class World:
    """One attack run's surroundings. `base` is writable for the user that starts the boxes."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.key = secrets.token_hex(16)
        os.environ[KEY_NAME] = self.key
        self.listeners = Listeners(base)
        self.victim: subprocess.Popen[bytes] | None = None
        self.plant()

    def plant(self) -> None:
        """Fresh secrets and a fresh victim for the next attack."""
        for name, mode in FOLDERS.items():
            (self.base / name).mkdir(exist_ok=True)
            (self.base / name).chmod(mode)
        self.nonce = secrets.token_hex(4)
        self.text, self.token = secrets.token_hex(16), secrets.token_hex(16)
        self.file = self.base / "home" / "private.txt"
        self.file.unlink(missing_ok=True)
        self.file.write_text(self.text)
        self.file.chmod(0o600)
        self.result_file = self.base / "results" / "verdict.json"
        self.result_file.write_text("{}")
        self.result_file.chmod(0o666)
        # open in this process and inheritable: a box that is started carelessly has it
        self.open_file = os.open(self.file, os.O_RDONLY)
        os.set_inheritable(self.open_file, True)
        self._start_victim()
        self.before = dict(self.listeners.counts)

    def _start_victim(self) -> None:
        self.mark = "mark-" + secrets.token_hex(8)
        self.victim = subprocess.Popen(
            [sys.executable, "-I", "-c", VICTIM, self.mark], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True, env={},
        )  # fmt: skip
        assert self.victim.stdin and self.victim.stdout
        self.victim.stdin.write(self.token.encode() + b"\n")
        self.victim.stdin.flush()
        self.victim.stdout.readline()
        os.set_blocking(self.victim.stdout.fileno(), False)
        self.facts = self._victim_facts()

    def _victim_facts(self) -> dict[str, Any]:
        assert self.victim is not None
        pid = self.victim.pid
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        return {
            "descriptors": next(x.split()[3:5] for x in limits if x.startswith("Max open files")),
            "processors": sorted(os.sched_getaffinity(pid)),
            "priority": os.getpriority(os.PRIO_PROCESS, pid),
            "scheduler": os.sched_getscheduler(pid),
            "tracer": procfs.status(pid).get("TracerPid"),
        }

    def evidence(self) -> dict[str, Any]:
        """What is to be seen from outside after a run, half a second later at most."""
        assert self.victim is not None and self.victim.stdout is not None
        alive = self.victim.poll() is None
        named = self._wait_for_processes()
        return {
            "victim": alive,
            "victim_changed": alive and self._victim_facts() != self.facts,
            "victim_pipe": self.nonce in (self.victim.stdout.read() or b"").decode("latin-1"),
            "network": {k: n - self.before[k] for k, n in self.listeners.counts.items()},
            "processes": named,
            "files": self._marks(),
            "sysv": self._system_v(),
            "result_file": self.result_file.read_text() != "{}",
            "file_intact": self.file.is_file() and self.file.read_text() == self.text,
        }

    def _wait_for_processes(self) -> int:
        until = time.monotonic() + 0.5
        while (left := len(self._named())) and time.monotonic() < until:
            time.sleep(0.05)
        return left

    def _named(self) -> list[int]:
        found = []
        for name in os.listdir("/proc"):
            fields = procfs.status(int(name)) if name.isdigit() else {}
            if fields.get("Name") == f"kg-{self.nonce}" and fields.get("State", "Z")[:1] != "Z":
                found.append(int(name))
        return found

    def _marks(self) -> list[str]:
        """Files with this run's mark outside the box."""
        folders = [*PLACES, *(str(self.base / x) for x in ("home", "shared", "results"))]
        found = []
        for folder in folders:
            with contextlib.suppress(OSError):
                found += [
                    f"{folder}/{x}" for x in os.listdir(folder) if x.startswith(f"kg-{self.nonce}")
                ]
        return found

    def _system_v(self) -> list[str]:
        key = int(self.nonce, 16) & 0x7FFFFFFF
        found = []
        for kind in ("shm", "sem", "msg"):
            rows = Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
            found += [kind for row in rows if int(row.split()[0]) & 0x7FFFFFFF == key]
        return found

    def clear(self) -> None:
        """Remove what this run planted and what an unjailed control left."""
        for pid in self._named():
            os.kill(pid, signal.SIGKILL)
        for path in self._marks():
            os.unlink(path)
        self._clear_system_v()
        os.close(self.open_file)
        assert self.victim is not None and self.victim.stdin and self.victim.stdout
        self.victim.kill()
        self.victim.wait()
        self.victim.stdin.close()
        self.victim.stdout.close()

    def _clear_system_v(self) -> None:
        libc, key = ctypes.CDLL(None), int(self.nonce, 16) & 0x7FFFFFFF
        for get, control, arguments in (
            (libc.shmget, libc.shmctl, (0, None)),
            (libc.semget, libc.semctl, (0, 0)),
            (libc.msgget, libc.msgctl, (0, None)),
        ):  # fmt: skip
            found = get(key, 0) if get is libc.msgget else get(key, 0, 0)
            if found >= 0:
                control(found, *arguments)
        if hasattr(libc, "mq_unlink"):
            libc.mq_unlink(f"/kg-{self.nonce}".encode())
