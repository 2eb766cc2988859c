"""A server process over fakes, as `kernelgen mcp` would be: to be talked to, and to be killed.

`python -m tests.agent.mcp.child FOLDER RUN DELAY [PORT_FILE]`: stdio, or HTTP on a free port whose
number is written to PORT_FILE. DELAY: seconds a judgement against an incumbent takes.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from agent import fakes
from agent.mcp import stdio
from agent.mcp.driver import Driver, Opened
from agent.mcp.http import bind, serve
from agent.mcp.server import build
from agent.runner import Services
from agent.workspace import Place
from sandbox.jobs import JudgeJob
from sandbox.verdict import Verdict
from targets import base

TOKEN = "a-token-for-tests-only"


class CountingJudge(fakes.FakeJudge):
    """Notes each finished judgement on disk and prints, as a careless library would."""

    book = Path()
    slow = 0.0

    def judge(self, job: JudgeJob) -> Verdict:
        print("this line must not reach the protocol")
        if job.incumbent is not None:
            time.sleep(self.slow)
        verdict = super().judge(job)
        with self.book.open("a") as file:
            file.write(f"{job.artifact.name} {job.tier}\n")
        return verdict


def main(folder: Path, run: str, delay: float, port_file: Path | None) -> None:
    base._TARGETS["fake"] = fakes.FakeTarget
    CountingJudge.book, CountingJudge.slow = folder / "judged", delay
    judge = CountingJudge()
    services = Services(fakes.FakeCompiler(folder / "jail"), judge, lambda: judge)
    place = Place(folder / "runs.db", folder / "kernels_out")
    driver = Driver(place, lambda: Opened(run, services))
    server = build(driver)
    if port_file is None:
        stdio.serve(server, driver.start)
    else:
        driver.start()
        with bind(0) as bound:
            # When the port is there the server may still be starting: the socket listens already.
            bound.listen()
            threading.Thread(
                target=port_file.write_text, args=(str(bound.getsockname()[1]),)
            ).start()
            serve(server, bound, TOKEN)
    driver.stop()
    driver.join()


if __name__ == "__main__":
    main(
        Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]),
        Path(sys.argv[4]) if len(sys.argv) > 4 else None,
    )  # fmt: skip
