"""Spread more memory than the limit over forks, each below any limit of its own. It counts what is held at once."""

import select

reading, writing = os.pipe()
children, holding = [], 0
try:
    while len(children) * 128 < P["memory_mb"]:
        pid = os.fork()
        if pid == 0:
            rename_process("kg-" + P["nonce"])
            held = b"\1" * (128 << 20)
            os.write(writing, b"h")
            time.sleep(P["seconds"])
            os._exit(len(held) & 1)
        children.append(pid)
except OSError as error:
    say(f"NO more forks: {error}")
end = time.monotonic() + 5
while children and holding < len(children) and time.monotonic() < end:
    if select.select([reading], [], [], 0.2)[0]:
        holding += len(os.read(reading, 100))
time.sleep(0.3)
alive = sum(os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in children)
say(f"{len(children)} children, {holding} held their part, {alive} alive")
if min(alive, holding) * 128 >= P["memory_mb"]:
    got(f"{holding * 128} MB in parts")
