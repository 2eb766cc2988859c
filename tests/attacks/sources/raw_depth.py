"""JSON nested so deep that a recursive reader overflows."""

header = b'{"body": ' + b"[" * 500000 + b"]" * 500000 + b"}"
data = len(header).to_bytes(4, "big") + header
while data:
    data = data[os.write(P["result_fd"], data) :]
time.sleep(1.0)
