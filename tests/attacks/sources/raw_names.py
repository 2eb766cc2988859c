"""Blocks whose names climb out of a folder."""

import json

header = json.dumps({"body": {}, "blocks": [["ptx/../../../" + P["shared"], 4]]}).encode()
os.write(P["result_fd"], len(header).to_bytes(4, "big") + header + b"data")
time.sleep(1.0)
