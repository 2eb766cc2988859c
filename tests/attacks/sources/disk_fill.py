"""Fill every folder that takes files, in files that are each below the limit of one file."""


def fill(folder):
    made = []
    try:
        for index in range(P["fill_mb"] // 4):
            made.append(f"{folder}/kg-{P['nonce']}-{index}")
            with open(made[-1], "xb", buffering=0) as file:
                for _ in range(4):
                    if file.write(b"\1" * (1 << 20)) < 1 << 20:
                        raise OSError(errno.ENOSPC, "no more space")
        time.sleep(0.5)
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                os.unlink(path)


for place in (os.getcwd(), "/tmp", "/var/tmp", os.path.dirname(P["file"]), P["shared"]):
    attempt(f"{P['fill_mb']} MB in {place}", lambda place=place: fill(place))
