"""Wait past the deadline without using the processor, deaf to exceptions."""

end = time.monotonic() + P["seconds"]
while time.monotonic() < end:
    with contextlib.suppress(BaseException):
        time.sleep(0.5)
got("all the time that it wanted")
