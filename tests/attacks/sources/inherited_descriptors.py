"""Read whatever descriptors came along from the process that started this one."""

for fd in range(3, 1024):
    with contextlib.suppress(OSError, BlockingIOError):
        os.set_blocking(fd, False)
        say(f"fd {fd}: {os.pread(fd, 200, 0)!r}")
