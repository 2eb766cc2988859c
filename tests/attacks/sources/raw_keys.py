"""The same key twice: readers differ in which one they believe."""

header = b'{"body": {"status": "wrong", "status": "passed"}, "blocks": []}'
os.write(P["result_fd"], len(header).to_bytes(4, "big") + header)
time.sleep(1.0)
