"""SIGKILL a planted process by its number: kill, its group, tgkill, rt_sigqueueinfo, a pidfd."""

import signal

victim, KILL = P["victim"], signal.SIGKILL
info = ctypes.create_string_buffer(128)
ctypes.memmove(info, (ctypes.c_int * 3)(KILL, 0, -1), 12)
for label, send in (
    ("rt_sigqueueinfo", lambda: call("rt_sigqueueinfo", victim, KILL, info)),
    (
        "pidfd_send_signal",
        lambda: call("pidfd_send_signal", call("pidfd_open", victim, 0), KILL, None, 0),
    ),
    ("tkill", lambda: call("tkill", victim, KILL)),
    ("tgkill", lambda: call("tgkill", victim, victim, KILL)),
    ("kill", lambda: os.kill(victim, KILL)),
):
    attempt(label, send)
