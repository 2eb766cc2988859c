"""Print without end. Stopped: the box is ended at the limit of output or of time, and little is kept."""

block = b"B" * (1 << 20)
end = time.monotonic() + P["seconds"]
while time.monotonic() < end:
    os.write(2, block)
os.write(2, b"\n")  # a word of its own, which is looked for at the start of a line
got("all the output that it wanted")
