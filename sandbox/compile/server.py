"""The compile server: `python -m sandbox.compile.server --store DIR`, one per client, frames on stdin and stdout.

Trusted: it holds no keys and starts the boxed workers. It ends when its stdin closes and takes its workers along;
Ctrl-C is the client's to handle. Talk goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from sandbox import box
from sandbox import compile_wire as wire
from sandbox.box.frames import Reader, encode
from sandbox.compile.cache import OutcomeCache
from sandbox.compile.pool import Pool, spec, starter
from sandbox.compile.service import Service
from sandbox.jobs import CompileOutcome
from sandbox.verdict import Failure, Status

JOB_CAPS = box.Caps({"job": 8 << 20, "source": 8 << 20})


def main(argv: list[str] | None = None) -> int:
    """Serve until stdin ends. Exit code 4: no allowed tier of isolation works here."""
    args = _arguments(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever prints must not break the protocol
    settings = box.Settings(
        tier=box.BoxTier(args.tier) if args.tier else None,
        bwrap=args.bwrap,
        trust_this_code=args.trust_this_code,
    )
    choice = box.choose(spec(args.arch, args.deadline), settings)
    if isinstance(choice, box.Refusal):
        reasons = "; ".join(choice.tried[-4:])
        answers.write(
            encode(
                {"refused": f"{choice.sentence} ({reasons})" if reasons else choice.sentence}, {}
            )
        )
        return 4
    pool = Pool(starter(choice, args.deadline), args.idle)
    if args.idle:
        pool.refill(args.arch)
    service = Service(pool, OutcomeCache(args.store), choice, args.deadline)
    about = {"sentence": choice.sentence, "passed_over": list(choice.passed_over)}
    answers.write(encode({"isolation": choice.isolation.to_json(), "about": about}, {}))
    try:
        _serve(service, answers, args.jobs)
    finally:
        service.close()
        sys.stderr.flush()
        os._exit(0)  # jobs in flight have no reader any more


def _serve(service: Service, answers: BinaryIO, jobs: int) -> None:
    lock = threading.Lock()

    def work(number: int, blocks: dict[str, bytes]) -> None:
        try:
            outcome = service.compile(wire.job_from_blocks(blocks))
        except Exception as error:  # a bug of ours must reach the caller, who waits for this answer
            text = f"the compile server failed: {type(error).__name__}: {str(error)[:300]}"
            outcome = CompileOutcome(None, status=Status.INFRA, failure=Failure("internal", text))
        with lock, contextlib.suppress(OSError):  # the client may be gone
            answers.write(encode({"id": number, "outcome": wire.outcome_json(outcome)}, {}))

    reader = Reader(JOB_CAPS)
    executor = ThreadPoolExecutor(jobs)
    while data := os.read(0, max(1, min(reader.wanted, 1 << 20))):
        reader.feed(data)
        frame = reader.next()
        if frame is not None:
            executor.submit(work, frame.body["id"], dict(frame.blocks))
    executor.shutdown(wait=False, cancel_futures=True)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sandbox.compile.server", description=__doc__)
    parser.add_argument(
        "--store", type=Path, required=True, help="folder of artifacts and outcomes"
    )
    parser.add_argument("--arch", default="sm_90a", help="architecture to warm workers for")
    parser.add_argument("--idle", type=int, default=2, help="warm workers to keep")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="jobs at once")
    parser.add_argument(
        "--deadline", type=float, default=60.0, help="processor seconds one compile may use"
    )
    parser.add_argument(
        "--tier", choices=[t.value for t in box.BoxTier], help="this isolation or none"
    )
    parser.add_argument("--bwrap", type=Path, help="path of bubblewrap")
    parser.add_argument("--trust-this-code", action="store_true", help="allow the tier none")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
