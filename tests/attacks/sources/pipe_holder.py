"""Leave a child that holds the result and output pipes open, then end: a reader that waits for end of file hangs."""


def hold():
    if os.fork() == 0:
        rename_process("kg-" + P["nonce"])
        time.sleep(P["seconds"])
        os._exit(0)


attempt("a child with the pipes", hold)
os._exit(0)
