"""Touch more memory than the limit allows."""

held = []
try:
    while len(held) * 64 < P["memory_mb"]:
        held.append(b"\1" * (64 << 20))
    time.sleep(0.3)
    got(f"{len(held) * 64} MB")
except MemoryError:
    say(f"NO more than {len(held) * 64} MB")
