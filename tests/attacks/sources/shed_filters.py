"""Loosen what the box put on: seccomp, no_new_privs, dumpable, limits."""

import resource

say(f"mode {libc.prctl(21, 0, 0, 0, 0)}")
attempt("no filter", lambda: call("prctl", 22, 0, 0, 0, 0))
attempt("a filter of its own with a listener", lambda: call("seccomp", 1, 8, None))
attempt("privileges again", lambda: call("prctl", 38, 0, 0, 0, 0))
for name in ("RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_AS", "RLIMIT_NOFILE"):
    number = getattr(resource, name)
    soft, hard = resource.getrlimit(number)
    if hard == resource.RLIM_INFINITY:
        say(f"{name} was never set")
        continue
    attempt(f"a higher {name}", lambda n=number, h=hard: resource.setrlimit(n, (h * 2, h * 2)))
