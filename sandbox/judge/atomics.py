"""Whether a candidate may legitimately differ from run to run: does its PTX add floats atomically?

The order of such sums is the hardware's. Everything else must repeat bit for bit.
"""

from __future__ import annotations

import re

from sandbox.artifact import Artifact

_FLOAT_ADD = re.compile(
    r"\b(?:atom|red|cp\.reduce\.async\.bulk)[.\w:]*\.add[.\w:]*\.(?:f16|bf16|f32|f64)\w*"
)


def float_atomics(artifact: Artifact) -> bool:
    plans = (artifact.step, artifact.prepare)
    return any(_FLOAT_ADD.search(p.ptx) is not None for p in plans if p is not None)
