"""Two blocks of one name."""

import json

header = json.dumps({"body": {}, "blocks": [["ptx", 1], ["ptx", 1]]}).encode()
os.write(P["result_fd"], len(header).to_bytes(4, "big") + header + b"ab")
time.sleep(1.0)
