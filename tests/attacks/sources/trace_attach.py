"""Stop the planted process and keep it stopped with ptrace. Stopped attack: the process is not traced."""


def seize():
    call("ptrace", 0x4206, P["victim"], 0, 0)
    call("ptrace", 0x4207, P["victim"], 0, 0)


attempt("seize", seize)
attempt("attach", lambda: call("ptrace", 16, P["victim"], 0, 0))
say(
    "TRACER " + [x for x in open(f"/proc/{P['victim']}/status") if x.startswith("TracerPid")][0]
    if os.path.exists(f"/proc/{P['victim']}/status")
    else "no victim in sight"
)
