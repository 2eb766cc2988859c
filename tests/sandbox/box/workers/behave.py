"""Does what the job names, for tests of deadlines, limits and output."""

import ctypes
import os
import sys
import time

sys.path.insert(0, os.environ["BOX_LIB"])
import boxed

boxed.narrow()
boxed.ready()
body, _ = boxed.receive()
do = body["do"]
if do == "spin":
    while True:
        pass
if do == "sleep":
    time.sleep(600)
if do == "fault":
    ctypes.string_at(0)
if do == "exit":
    os._exit(7)
if do == "print":
    sys.stdout.write("head\n" + "x" * body["size"] + "\x1b[31mtail\u202e\n")
if do == "hold":
    held = b"\1" * body["size"]
    time.sleep(600)
boxed.send({"did": do})
time.sleep(600)
