"""The worker that a probe starts: it narrows itself, says READY and waits to be killed."""

import os
import sys

sys.path.insert(0, os.environ["BOX_LIB"])
import boxed

boxed.narrow()
boxed.ready()
boxed.receive()
