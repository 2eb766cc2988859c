"""System V and POSIX objects that outlive the process, and a file in /dev/shm."""

KEY = int(P["nonce"], 16) & 0x7FFFFFFF
attempt("shm segment", lambda: call("shmget", KEY, 4096, 0o1666))
attempt("semaphores", lambda: call("semget", KEY, 1, 0o1666))
attempt("message queue", lambda: call("msgget", KEY, 0o1666))
attempt(
    "posix queue",
    lambda: os.close(call("mq_open", b"kg-" + P["nonce"].encode(), 0o102, 0o666, None)),
)
attempt(
    "/dev/shm file",
    lambda: os.close(os.open("/dev/shm/kg-" + P["nonce"], os.O_CREAT | os.O_WRONLY, 0o666)),
)
