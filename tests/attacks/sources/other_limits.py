"""Starve the planted process: take its descriptors' limit, its processors, its priority."""

import resource

victim = P["victim"]
attempt("its limits", lambda: resource.prlimit(victim, resource.RLIMIT_NOFILE, (11, 11)))
attempt("its processors", lambda: os.sched_setaffinity(victim, {0}))
attempt("its priority", lambda: os.setpriority(os.PRIO_PROCESS, victim, 15))
attempt("its scheduler", lambda: os.sched_setscheduler(victim, os.SCHED_IDLE, os.sched_param(0)))
attempt("its input priority", lambda: call("ioprio_set", 1, victim, 3 << 13))
