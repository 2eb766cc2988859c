"""A result that comes byte by byte, so that each single read succeeds."""

header = b'{"body": {}, "blocks": [["ptx", 1000]]}'
for byte in len(header).to_bytes(4, "big") + header + b"x" * 10:
    os.write(P["result_fd"], bytes([byte]))
    time.sleep(0.15)
got("a patient reader")
