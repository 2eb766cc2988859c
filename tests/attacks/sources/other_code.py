"""Write into the planted process's memory through /proc/PID/mem: its token must stay what it is."""


def write():
    with open(f"/proc/{P['victim']}/mem", "r+b", buffering=0):
        pass


attempt("another process's memory", write)
attempt("process_vm_writev", lambda: call("process_vm_writev", P["victim"], None, 0, None, 0, 0))
