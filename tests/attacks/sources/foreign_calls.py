"""Call the kernel through the 32-bit entry, whose numbers a filter for 64 bits would misread."""

import mmap

# push rbx; mov eax, 20 (getpid of i386); int 0x80; pop rbx; ret
CODE = bytes([0x53, 0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0x5B, 0xC3])
page = mmap.mmap(-1, 4096, prot=7)
page.write(CODE)
function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
result = function()
if result > 0:
    got(f"32-bit call {result}")
say(f"32-bit call returned {result}")


def x32():
    if libc.syscall(ctypes.c_long(0x40000000 + 39)) <= 0:
        raise OSError(errno.ENOSYS, "x32")


attempt("x32 call", x32)
