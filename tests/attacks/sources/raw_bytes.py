"""A header that is no text at all."""

header = bytes(range(256)) * 4
os.write(P["result_fd"], len(header).to_bytes(4, "big") + header)
time.sleep(1.0)
