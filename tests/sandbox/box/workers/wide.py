"""Says READY without narrowing itself, as a broken worker would."""

import os
import sys

sys.path.insert(0, os.environ["BOX_LIB"])
import boxed

boxed.ready()
boxed.receive()
