# Put in front of every attack source; P, a dict of parameters, comes before it.
import contextlib
import ctypes
import errno
import os
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def say(text):
    print(text[:300].replace("\n", " "), flush=True)


def got(text):
    """Something came through."""
    say("GOT " + text)


def attempt(label, action):
    """Run `action`; say whether it came through. Returns its result, or None."""
    try:
        result = action()
    except (OSError, MemoryError, RuntimeError, ValueError, AttributeError) as error:
        say(f"NO {label}: {type(error).__name__} {error}")
        return None
    got(label)
    return result


def call(name, *arguments):
    """A system call by name. Raises OSError."""
    number = P["numbers"].get(name)
    if number is None:
        raise OSError(errno.ENOSYS, f"{name} does not exist here")
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


def rename_process(name):
    """A name that the outside can look for."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)
    libc.prctl(15, name.encode(), 0, 0, 0)


say("RAN " + P["name"])
