"""Reach a listener on the loopback address by TCP and by UDP. Stopped: the listener counts nothing."""

import socket

for kind, label in ((socket.SOCK_STREAM, "tcp"), (socket.SOCK_DGRAM, "udp")):

    def reach(kind=kind):
        with socket.socket(socket.AF_INET, kind) as sock:
            sock.settimeout(1)
            sock.connect(("127.0.0.1", P["port"]))
            sock.send(b"hello")

    attempt(label, reach)
attempt(
    "tcp fast open",
    lambda: socket.socket(socket.AF_INET).sendto(b"x", 0x20000000, ("127.0.0.1", P["port"])),
)
