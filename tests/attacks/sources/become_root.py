"""Get back what was dropped: uid 0, groups, capabilities, set-uid programs."""

fields = dict(x.rstrip("\n").split(":\t", 1) for x in open("/proc/self/status") if ":\t" in x)
for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
    (got if int(fields[name], 16) else say)(f"{name} {fields[name]}")
(say if fields["NoNewPrivs"] == "1" else got)("no_new_privs " + fields["NoNewPrivs"])
if os.getuid() == 0:
    got("uid 0")
else:
    attempt("uid 0", lambda: os.setresuid(0, 0, 0))
    attempt("gid 0", lambda: os.setresgid(0, 0, 0))
    attempt("groups", lambda: os.setgroups([0]))
attempt("kernel module", lambda: call("init_module", None, 0, b"") if os.getuid() else None)
attempt("host name", lambda: call("sethostname", b"x", 0) if os.getuid() else None)
