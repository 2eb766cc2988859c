"""A number with so many digits that converting it takes minutes."""

header = b'{"body": {"n": ' + b"9" * 900000 + b'}, "blocks": []}'
data = len(header).to_bytes(4, "big") + header
while data:
    data = data[os.write(P["result_fd"], data) :]
time.sleep(1.0)
