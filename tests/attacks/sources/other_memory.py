"""Read the planted token out of another process's memory: /proc/PID/mem, process_vm_readv, ptrace, pidfd_getfd."""

victim = P["victim"]


def areas():
    """Writable private areas of the victim, as far as this process may know them."""
    for line in open(f"/proc/{victim}/maps"):
        bounds, rights = line.split()[:2]
        low, high = (int(x, 16) for x in bounds.split("-"))
        if rights.startswith("rw") and high - low < 64 << 20:
            yield low, high - low


def through_mem():
    with open(f"/proc/{victim}/mem", "rb", buffering=0) as file:
        for low, size in areas():
            with contextlib.suppress(OSError):
                file.seek(low)
                look("mem", file.read(size))


def through_vm():
    class Vector(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

    for low, size in areas():
        buffer = ctypes.create_string_buffer(size)
        here, there = Vector(ctypes.addressof(buffer), size), Vector(low, size)
        call("process_vm_readv", victim, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        look("process_vm_readv", buffer.raw)


def look(how, data):
    at = data.find(P["token"][:8].encode())
    if at >= 0:
        say(f"FOUND by {how}: {data[at : at + 32].decode('latin-1')}")


def through_ptrace():
    call("ptrace", 16, victim, 0, 0)
    libc.waitpid(victim, None, 0)
    call("ptrace", 17, victim, 0, 0)


def through_pidfd():
    fd = call("pidfd_open", victim, 0)
    call("pidfd_getfd", fd, 0, 0)


for label, way in (
    ("memory by mem", through_mem),
    ("memory by process_vm_readv", through_vm),
    ("ptrace", through_ptrace),
    ("a descriptor by pidfd", through_pidfd),
):
    attempt(label, way)
