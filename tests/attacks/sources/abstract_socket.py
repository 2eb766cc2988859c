"""Connect to a socket in the abstract name space, which has no file that could be hidden."""

import socket


def connect(kind, name):
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.settimeout(1)
        sock.connect(name)
        sock.send(b"hello")


attempt("abstract stream socket", lambda: connect(socket.SOCK_STREAM, "\0" + P["abstract"]))
