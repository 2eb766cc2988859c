"""Outlive the run: double fork, new session, all descriptors closed. Stopped: no such process half a second later."""


def leave():
    if os.fork():
        return
    os.setsid()
    if os.fork() == 0:
        rename_process("kg-" + P["nonce"])
        os.closerange(0, 256)
        time.sleep(P["seconds"])
    os._exit(0)


attempt("a process of its own", leave)
time.sleep(0.3)
