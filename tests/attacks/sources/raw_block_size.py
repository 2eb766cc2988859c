"""Declare a block of a terabyte, then blocks whose sum passes the cap, with names that point elsewhere."""

import json

header = json.dumps({"body": {}, "blocks": [["ptx", 1 << 40]]}).encode()
os.write(P["result_fd"], len(header).to_bytes(4, "big") + header)
time.sleep(1.0)
