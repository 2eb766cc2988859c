"""One file beyond the limit of a file: written, and sparse."""


def write():
    with open("big", "wb", buffering=0) as file:
        for _ in range(P["fill_mb"]):
            if file.write(b"\1" * (1 << 20)) < 1 << 20:
                raise OSError(errno.EFBIG, "no more")


attempt("a big file", write)
attempt("a sparse file", lambda: os.truncate(os.open("sparse", os.O_CREAT | os.O_RDWR), 1 << 40))
