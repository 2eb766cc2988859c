"""Runs attacks for the tests, one request a line on stdin, one answer a line on stdout, as the user it was started as.

A process of its own, because it hides its memory, adopts orphans, and may have to be an ordinary user where the tests
run as root. `bare` runs the same source without any box: the control that shows what a box stops.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from attack_world import KEY_NAME, World  # noqa: E402
from sandbox import box  # noqa: E402
from sandbox.box import syscalls  # noqa: E402
from sandbox.box.scratch import wipe  # noqa: E402

MB = 1 << 20
ASK, ANSWER = "#ask ", "#answer "  # attacks write into the pipes of this process, too
CARELESS = 128 * MB  # even the careless reader must not fill this machine
CAPS = box.Caps({"ptx": MB})
LIMITS = box.Limits(
    address_space=1024 * MB, file_bytes=8 * MB, processes=64, memory=512 * MB, scratch=32 * MB, temporary=16 * MB,
    shared=16 * MB, inodes=4096, output=256 << 10, output_flood=64 * MB,
)  # fmt: skip
# Each size is above the limit that should stop it.
SIZES = {
    "seconds": 6, "processes": 100, "threads": 400, "memory_mb": 768, "fill_mb": 64, "files": 20000,
    "descriptors": 600, "flood_mb": 40, "depth": 2500,
}  # fmt: skip
CONTROL_S = 15.0
HONEST = "print('an honest line')"


class Driver:
    def __init__(self, base: Path, bwrap: Path | None) -> None:
        self.world = World(base)
        self.settings = box.Settings(bwrap=bwrap)
        self.choices: dict[str, tuple[box.Spec, box.Choice]] = {}
        for python in (Path(sys.executable), Path("/usr/bin/python3")):
            spec = box.Spec(HERE / "attack_worker.py", python=python, limits=LIMITS)
            for choice in box.offered(spec, self.settings) if python.exists() else []:
                name = f"{choice.isolation.tier} {choice.isolation.variant}".strip()
                self.choices.setdefault(name, (spec, choice))
                tool = (replace(spec, narrow=False), choice)
                self.choices.setdefault(name + " tool", tool)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "attack" not in request:
            return {"ways": list(self.choices), "uid": os.getuid()}
        if request["way"] == "bare":
            return self.run(request, lambda source: self.bare(source, request))
        if request["way"] not in self.choices:
            return {"missing": request["way"], "ways": list(self.choices)}
        spec, choice = self.choices[request["way"]]
        return self.run(request, lambda source: self.boxed(spec, choice, source, request))

    def run(self, request: dict[str, Any], runner: Any) -> dict[str, Any]:
        """One attack, as often as it wants, then the evidence."""
        self.world.plant()
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        outcome: dict[str, Any] = {}
        for _ in range(request.get("runs", 1)):
            outcome = runner(self.source(request))
        outcome["seconds"] = time.monotonic() - start
        outcome["grown_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
        outcome["evidence"] = self.world.evidence()
        outcome["planted"] = {
            "key": self.world.key,
            "text": self.world.text,
            "token": self.world.token,
        }
        self.world.clear()
        return outcome

    def source(self, request: dict[str, Any]) -> str:
        world, listen = self.world, self.world.listeners
        arch = syscalls.machine()
        names = {*syscalls.NUMBERS}
        assert world.victim is not None
        parameters = {
            **SIZES, "name": request["attack"], "nonce": world.nonce, "key_name": KEY_NAME, "file": str(world.file),
            "victim": world.victim.pid, "mark": world.mark, "token": world.token, "port": listen.port,
            "abstract": listen.abstract, "socket": listen.file, "shared": str(world.base / "shared"),
            "keep": [str(world.base / "shared"), *("/tmp", "/var/tmp", "/dev/shm")],
            "result_file": str(world.result_file), "numbers": {n: syscalls.number(n, arch) for n in names},
        }  # fmt: skip
        if request["way"] == "bare":
            parameters["seconds"] = 3
        prelude = (HERE / "prelude.py").read_text()
        attack = (HERE / "sources" / f"{request['attack']}.py").read_text()
        head = f"P = {parameters!r}\nimport os\nP['result_fd'] = int(os.environ['BOX_RESULT_FD'])\n"
        return f"{head}{prelude}\n{attack}"

    def boxed(
        self, spec: box.Spec, choice: box.Choice, source: str, request: dict[str, Any]
    ) -> dict[str, Any]:
        outcome = self.job(spec, choice, source, request.get("deadline_s", 20.0))
        honest = self.job(spec, choice, HONEST, 60.0)
        outcome["honest"] = (
            honest["body"] == {"status": "done"} and "an honest line" in honest["output"]
        )
        outcome["honest_said"] = honest
        return outcome

    def job(
        self, spec: box.Spec, choice: box.Choice, source: str, deadline_s: float
    ) -> dict[str, Any]:
        boxed = box.start(spec, choice)
        if isinstance(boxed, box.Broken):
            return {"reason": "not started", "detail": boxed.detail, "body": None, "output": ""}
        with boxed:
            ready = boxed.wait_ready(60)
            problem = ready if isinstance(ready, box.Broken) else boxed.verify()
            if problem is not None:
                return {
                    "reason": "not started",
                    "detail": problem.detail,
                    "body": None,
                    "output": "",
                }
            start = time.monotonic()
            sent = boxed.send({"source": source}, {}, 20)
            answer = sent or boxed.read(CAPS, deadline_s)
            took = time.monotonic() - start
            left = boxed.kill()
            common = {
                "output": boxed.output(1 << 18), "took": took, "isolation": boxed.isolation.to_json(),
                "left": left.detail if left else "",
            }  # fmt: skip
        if isinstance(answer, box.Broken):
            return {"reason": answer.reason, "detail": answer.detail, "body": None, **common}
        return {"reason": "frame", "detail": "", "body": answer.body, **common}

    def bare(self, source: str, request: dict[str, Any]) -> dict[str, Any]:
        """A careless harness: same user, same environment, inherited descriptors, a time limit and nothing else."""
        scratch = tempfile.mkdtemp(dir=self.world.base / "scratch")
        reading, writing = os.pipe()
        os.set_inheritable(writing, True)
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", source], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, close_fds=False, cwd=scratch, start_new_session=True,
            env={**os.environ, "TMPDIR": scratch, "BOX_RESULT_FD": str(writing)},
        )  # fmt: skip
        os.close(writing)
        said, answer = _collect(child, reading, CONTROL_S)
        outcome = {
            "reason": "bare", "detail": f"exit status {child.returncode}", "body": None, "naive": naive(answer),
            "output": said.decode("utf-8", "surrogateescape").encode("utf-8", "replace").decode()[-1 << 18 :],
            "left": "",
        }  # fmt: skip
        try:
            shutil.rmtree(scratch)
        except (RecursionError, OSError) as error:
            outcome["left"] = f"careless clean-up: {type(error).__name__}"
            wipe(scratch)
        return outcome


def _collect(child: subprocess.Popen[bytes], result: int, limit_s: float) -> tuple[bytes, bytes]:
    """All output, uncapped as a careless reader has it, until the child ends (not its heirs)."""
    assert child.stdout is not None
    pipes = {child.stdout.fileno(): bytearray(), result: bytearray()}
    until = time.monotonic() + limit_s
    while pipes and time.monotonic() < until:
        ended = child.poll() is not None
        ready, _, _ = select.select(list(pipes), [], [], 0 if ended else 0.1)
        if ended and not ready:
            break
        for fd in ready:
            data = os.read(fd, MB)
            pipes[fd] += data
            del pipes[fd][:-CARELESS]
            if not data and ended:
                until = 0
    out, answer = bytes(pipes[child.stdout.fileno()]), bytes(pipes[result])
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    child.stdout.close()
    os.close(result)
    return out, answer


def naive(data: bytes) -> str:
    """What a careless reader makes of an answer: `accepted`, `crashed`, or `nothing`."""
    if not data:
        return "nothing"
    body = data[4:]
    try:
        if body.startswith(b"{"):
            json.JSONDecoder(strict=False).raw_decode(body.decode())
        else:
            pickle.loads(body)
    except Exception as error:
        return f"crashed: {type(error).__name__}"
    return "accepted"


def main() -> None:
    base, bwrap = Path(sys.argv[1]), sys.argv[2]
    driver = Driver(base, Path(bwrap) if bwrap else None)
    for line in sys.stdin:
        if not line.startswith(ASK):
            continue
        answer = driver.answer(json.loads(line[len(ASK) :]))
        print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
