"""Boxes: a worker process that runs untrusted code and can only hand back frames.

    found = box.choose(spec, box.Settings())            # once: probe the tiers with the real flags
    if isinstance(found, box.Refusal): ...              # found.sentence: why, and what would help
    boxed = box.start(spec, found)                      # one box per candidate source, used once
    if isinstance(boxed, box.Broken): ...               # ours: infra
    with boxed:
        facts = boxed.wait_ready(30)                    # dict, or Broken (still ours)
        broken = boxed.verify()                         # the kernel's word, before the source goes in
        broken = boxed.send({"source": text}, {}, 5)    # None when sent
        frame = boxed.read(box.Caps({"ptx": 16 << 20, "constants": 64 << 20}), 60)   # Frame or Broken
        boxed.output()                                  # tail of stdout and stderr, cleaned, never a result
    boxed.isolation.to_json()                           # stored with the artifact and the verdict

`offered` lists every way that works here (doctor), `Choice.sentence` and `Choice.passed_over` say it in words.

All methods return within their deadlines and return failures as `Broken(reason, detail)`; `kill` may be called from
anywhere and repeated. `start` never steps down to a weaker tier. The worker script runs as `python -I worker.py` with
an empty environment apart from `Spec.env`, in a writable scratch folder (HOME, TMPDIR, the current folder), and finds
`boxed` (frames, `narrow`, `ready`) in `BOX_LIB`; see `sandbox.box.inside.boxed`.

Not covered: exploits of the kernel or of a GPU driver, side channels, and what a frame claims.
"""

from sandbox.box.frames import Broken, Caps, Frame
from sandbox.box.process import Boxed
from sandbox.box.spec import BoxTier, Isolation, Limits, Settings, Spec
from sandbox.box.tiers import Choice, Refusal, choose, offered, start

__all__ = [
    "BoxTier", "Boxed", "Broken", "Caps", "Choice", "Frame", "Isolation", "Limits", "Refusal", "Settings", "Spec",
    "choose", "offered", "start",
]  # fmt: skip
