"""Make the worker's own Python lie: clocks, digests, JSON, and the functions that it sends results with."""

import hashlib
import json

real = json.dumps
json.dumps = lambda value, *a, **k: real(
    {**value, "forged": P["nonce"]} if isinstance(value, dict) else value, *a, **k
)
hashlib.sha256 = lambda *a, **k: type("D", (), {"hexdigest": lambda self: "0" * 64})()
for clock in ("time", "monotonic", "perf_counter"):
    setattr(time, clock, lambda: 0.0)
for module in list(sys.modules.values()):
    if getattr(module, "__name__", "") == "boxed":
        plain = module.send
        module.send = lambda body, blocks=None: plain(
            {"status": "passed", "isolation": {"tier": "strict"}}, blocks
        )
        got("the worker's sender")
