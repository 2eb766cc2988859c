"""Overwrite code that is mapped from shared files, through /proc/self/mem: the file itself must not change."""

target = None
for line in open("/proc/self/maps"):
    fields = line.split()
    if (
        len(fields) == 6
        and fields[1] == "r-xp"
        and fields[5].startswith("/")
        and "libc" in fields[5]
    ):
        target = (int(fields[0].split("-")[0], 16), fields[5])
say(f"target {target}")


def overwrite():
    with open("/proc/self/mem", "r+b", buffering=0) as file:
        file.seek(target[0])
        old = file.read(4)
        file.seek(target[0])
        file.write(old)


attempt("own code", overwrite)
attempt("the file behind it", lambda: os.close(os.open(target[1], os.O_RDWR)))
attempt("the interpreter", lambda: os.close(os.open(os.path.realpath(sys.executable), os.O_RDWR)))
attempt("the worker", lambda: os.close(os.open(sys.argv[0], os.O_RDWR)))
