"""Entry of a compile worker: import the DSL, narrow the process, say READY, compile one job, send what came of it.

Single use: it ends after one job. It does not judge its own results; see `sandbox.compile.claims`.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    here = Path(__file__).resolve().parent
    sys.path[:0] = [os.environ["BOX_LIB"], str(here.parent)]
    boxed: Any = importlib.import_module("boxed")
    started = time.monotonic()
    compilation: Any = importlib.import_module("jail.compilation")
    boxed.narrow()
    boxed.ready({"toolchain": compilation.toolchain(), "import_s": time.monotonic() - started})
    body, blocks = boxed.receive()
    boxed.send(*compilation.run(body, blocks))
    os._exit(0)  # an interpreter exit would take 0.7 s and run the candidate's atexit hooks


if __name__ == "__main__":
    main()
