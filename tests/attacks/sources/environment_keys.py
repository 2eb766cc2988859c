"""Look for the planted key in every environment within reach. Stopped: its value is in nothing that comes back."""

places = (
    ["self", *[name for name in os.listdir("/proc") if name.isdigit()]]
    if os.path.isdir("/proc")
    else []
)
own = os.environ.get(P["key_name"])
say(f"own environment: {own}")
for place in places:
    with contextlib.suppress(OSError):
        content = open(f"/proc/{place}/environ", "rb").read()
        for entry in content.split(b"\0"):
            if entry.startswith(P["key_name"].encode()):
                got(f"{place} {entry.decode('latin-1')}")
# what the loader put on the stack lies above the environment pointer
pointer = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
index = 0
while pointer and pointer[index]:
    say("stack " + pointer[index].decode("latin-1")[:60])
    index += 1
