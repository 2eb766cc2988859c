"""Wide kernel interfaces: io_uring (its connect passes no filter on socket), bpf, perf, userfaultfd, kernel log."""

import struct

buffer = ctypes.create_string_buffer(4096)
hash_map = ctypes.create_string_buffer(struct.pack("=IIII", 2, 4, 4, 1), 128)
clock = ctypes.create_string_buffer(struct.pack("=IIQQQQQ", 1, 112, 0, 0, 0, 0, 0x61), 128)
attempt("io_uring", lambda: os.close(call("io_uring_setup", 4, buffer)))
attempt("bpf", lambda: os.close(call("bpf", 0, hash_map, 72)))
attempt("perf", lambda: os.close(call("perf_event_open", clock, 0, -1, -1, 0)))
attempt("userfaultfd", lambda: os.close(call("userfaultfd", 1)))
attempt("kernel log", lambda: call("syslog", 3, buffer, 4096))
attempt("personality", lambda: call("personality", 0x0040000) or call("personality", 0))
attempt("memory comparison", lambda: call("kcmp", os.getpid(), os.getpid(), 1, 0, 0))
