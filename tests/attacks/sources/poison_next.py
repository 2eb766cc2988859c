"""Leave something for the next candidate. Run twice with one nonce: the second run must find nothing of the first."""

import builtins

mark = "kg-" + P["nonce"]
places = [
    os.getcwd(),
    os.environ.get("TMPDIR", ""),
    "/tmp",
    "/var/tmp",
    "/dev/shm",
    P["shared"],
    os.path.dirname(os.path.abspath(sys.argv[0])),
    os.environ.get("BOX_LIB", ""),
    os.path.dirname(os.__file__),
]
for place in dict.fromkeys(filter(None, places)):
    path = os.path.join(place, mark)
    if os.path.exists(path):
        say(f"EARLIER file in {place}")
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666))
        say(f"left {place}")
        if place not in P["keep"]:
            os.unlink(path)
if hasattr(builtins, mark):
    say("EARLIER interpreter")
setattr(builtins, mark, True)
