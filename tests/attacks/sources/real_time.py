"""Take the processors for itself: real-time and deadline scheduling, negative nice."""

attempt(
    "real time",
    lambda: (
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0)),
    ),
)
attempt(
    "nice", lambda: (os.setpriority(os.PRIO_PROCESS, 0, -5), os.setpriority(os.PRIO_PROCESS, 0, 0))
)
