"""Connect to a socket file that all may write to, as an agent for keys or a container daemon has."""

import socket


def connect():
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(1)
        sock.connect(P["socket"])
        sock.send(b"hello")


attempt("socket file", connect)
