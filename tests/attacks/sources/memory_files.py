"""Memory that no process maps: files of memfd_create, written and kept."""


def fill():
    written = 0
    while written < P["memory_mb"]:
        fd = call("memfd_create", b"kg", 0)
        for _ in range(4):
            os.write(fd, b"\1" * (8 << 20))
        os.ftruncate(fd, 32 << 20)
        written += 32
    time.sleep(0.5)


attempt("memory files", fill)
