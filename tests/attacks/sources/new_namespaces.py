"""Make namespaces of one's own: in a new user namespace everybody is root, with all of the kernel that root sees."""

import struct

NEWUSER, NEWNS, NEWNET, NEWTIME = 0x10000000, 0x20000, 0x40000000, 0x80


def in_child(action):
    """In a child, so that the rest of this script stays where it is."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        raise OSError(1, "refused")


def by_clone3(flags):
    arguments = ctypes.create_string_buffer(struct.pack("=QQQQQQQQ", flags, 0, 0, 0, 17, 0, 0, 0))
    pid = call("clone3", arguments, 64)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


attempt("user namespace", lambda: in_child(lambda: call("unshare", NEWUSER)))
attempt("user namespace, no fork", lambda: call("unshare", NEWUSER | NEWNS))
attempt("network namespace by clone3", lambda: by_clone3(NEWUSER | NEWNET))
for kind in ("user", "mnt", "net", "pid"):
    attempt(
        f"{kind} namespace of pid 1",
        lambda kind=kind: in_child(lambda: call("setns", os.open(f"/proc/1/ns/{kind}", 0), 0)),
    )
