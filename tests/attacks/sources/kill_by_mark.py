"""Find a planted process by a mark in its command line and SIGKILL it; no other process is signalled."""

import signal

names = os.listdir("/proc") if os.access("/proc", os.R_OK) else []
for name in names:
    with contextlib.suppress(OSError):
        words = open(f"/proc/{name}/cmdline", "rb").read().split(b"\0") if name.isdigit() else []
        if P["mark"].encode() in words:
            attempt(f"kill of {name}", lambda name=name: os.kill(int(name), signal.SIGKILL))
