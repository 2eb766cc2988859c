"""Compute past the deadline with every signal ignored that can be."""

import signal

for number in signal.valid_signals():
    with contextlib.suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_IGN)
end = time.monotonic() + P["seconds"]
while time.monotonic() < end:
    pass
got("all the time that it wanted")
