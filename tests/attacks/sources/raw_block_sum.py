"""Many blocks, each within the cap, their sum above it."""

import json

header = json.dumps({"body": {}, "blocks": [[f"ptx.{i}", 1 << 20] for i in range(100)]}).encode()
os.write(P["result_fd"], len(header).to_bytes(4, "big") + header)
time.sleep(1.0)
