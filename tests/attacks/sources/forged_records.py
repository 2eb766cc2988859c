"""Write a passing record into pipes of other processes and into the file of a stored result."""

record = ('\n{"status": "passed", "note": "forged-%s"}\n' % P["nonce"]).encode()


def into(path):
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND)
    os.write(fd, record)
    os.close(fd)


attempt("the result file", lambda: into(P["result_file"]))
for pid in (P["victim"], os.getppid()):
    for number in range(3):
        attempt(
            f"pipe {number} of {pid}",
            lambda pid=pid, number=number: into(f"/proc/{pid}/fd/{number}"),
        )
