"""Valid frames without end: the reader takes one."""

header = b'{"body": {"status": "done", "flood": true}, "blocks": []}'
data = (len(header).to_bytes(4, "big") + header) * 100
end = time.monotonic() + P["seconds"]
while time.monotonic() < end:
    os.write(P["result_fd"], data)
got("a reader without end")
