"""Print far more than anybody reads, then fail with a huge text full of terminal controls and broken Unicode."""

block = b"A" * (1 << 20)
for index in range(P["flood_mb"]):
    os.write(1 + index % 2, block)
print("\x1b[2J\x1b]0;title\x07 \0 \u202e reversed", flush=True)
raise RuntimeError("\x1b[2J\x1b]0;title\x07 \0 \ud800 \u202e " + "A" * (4 << 20))
