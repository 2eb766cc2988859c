"""Read a private file of the user by its path, relative to other processes' roots, and through their descriptors."""

paths = [P["file"], os.path.relpath(P["file"])]
for pid in (1, os.getppid(), P["victim"], "self"):
    paths += [f"/proc/{pid}/root{P['file']}", f"/proc/{pid}/cwd/{os.path.basename(P['file'])}"]
    with contextlib.suppress(OSError):
        paths += [
            f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd") if int(name) > 2
        ]
for path in paths:
    with contextlib.suppress(OSError, ValueError):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        say(f"read {path}: {os.read(fd, 200)!r}")
        os.close(fd)
