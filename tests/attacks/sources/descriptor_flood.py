"""Open more descriptors than the limit allows."""


def flood():
    return [os.open("/dev/null", os.O_RDONLY) for _ in range(P["descriptors"])]


attempt("descriptors", flood)
