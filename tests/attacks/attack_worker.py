"""The smallest worker that runs an attack as a compile worker runs a candidate: narrowed, by exec, errors sent back."""

import os
import sys

sys.path.insert(0, os.environ["BOX_LIB"])
import boxed

boxed.narrow()
boxed.ready()
body, _ = boxed.receive()
answer = {"status": "done"}
try:
    exec(compile(body["source"], "candidate.py", "exec"), {"__name__": "candidate"})
except BaseException as error:
    answer = {"status": "error", "text": f"{type(error).__name__}: {error}"[:200_000]}
boxed.send(answer)
