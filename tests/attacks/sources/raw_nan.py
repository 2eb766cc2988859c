"""NaN and infinity in the header."""

header = b'{"body": {"us": NaN, "speed": -Infinity}, "blocks": []}'
os.write(P["result_fd"], len(header).to_bytes(4, "big") + header)
time.sleep(1.0)
