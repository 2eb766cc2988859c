"""Compute past the deadline."""

end = time.monotonic() + P["seconds"]
while time.monotonic() < end:
    pass
got("all the time that it wanted")
