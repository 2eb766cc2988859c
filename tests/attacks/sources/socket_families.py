"""Sockets that a network namespace does not cover, or that open wide kernel interfaces. Created, never connected."""

import socket

for label, family, kind in (
    ("vsock", 40, 1),
    ("netlink", 16, 3),
    ("packet", 17, 3),
    ("kernel crypto", 38, 5),
    ("inet", 2, 1),
    ("inet6", 10, 1),
    ("bluetooth", 31, 3),
    ("can", 29, 3),
    ("xdp", 44, 3),
):
    attempt(
        f"{label} socket", lambda family=family, kind=kind: socket.socket(family, kind, 0).close()
    )
