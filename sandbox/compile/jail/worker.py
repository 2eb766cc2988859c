"""Entry of a compile worker: import the DSL, narrow the process, say READY, compile one job, send what came of it.

Single use: it ends after one job. It does not judge its own results; see `sandbox.compile.claims`. Where it stood when
it crashed or ran out of time goes to stderr, for the error message alone.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import math
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    here = Path(__file__).resolve().parent
    sys.path[:0] = [os.environ["BOX_LIB"], str(here.parent), str(here / "offer"), str(Path.cwd())]
    boxed: Any = importlib.import_module("boxed")
    started = time.monotonic()
    compilation: Any = importlib.import_module("jail.compilation")
    importlib.import_module("jail.dsl").prepare()
    gc.freeze()
    gc.disable()  # one job, then the end: collecting would cost 7 % of a trace and free nothing
    boxed.narrow()
    importlib.import_module("jail.warmup").run()
    boxed.ready({"start_s": round(time.monotonic() - started, 3)})
    body, blocks = boxed.receive()
    limit_time(body["cpu_s"], body["wall_s"])
    boxed.send(*compilation.run(body, blocks))
    os._exit(0)  # an interpreter exit would take 0.7 s and run the candidate's atexit hooks


def limit_time(cpu_s: float, wall_s: float) -> None:
    """Say on stderr where the candidate stands when it crashes, and just before its time is used up.

    The signal of the limit itself has no handler: nothing here may send signals, so a handler could not end us.
    """
    faulthandler.enable()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(time.process_time() + cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard < 0 else min(soft, hard), hard))
    faulthandler.register(signal.SIGPROF)
    signal.setitimer(signal.ITIMER_PROF, 0.95 * cpu_s)
    faulthandler.dump_traceback_later(0.95 * wall_s)


if __name__ == "__main__":
    main()
