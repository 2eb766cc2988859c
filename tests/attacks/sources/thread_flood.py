"""Have more threads alive at once than the limit allows."""

import threading

threading.stack_size(64 << 10)
stop, count = threading.Event(), 0
try:
    for _ in range(P["threads"]):
        threading.Thread(target=stop.wait, args=(P["seconds"],), daemon=True).start()
        count += 1
except (RuntimeError, MemoryError) as error:
    say(f"NO more threads: {error}")
time.sleep(0.5)
stop.set()
if count >= P["threads"]:
    got(f"{count} threads")
