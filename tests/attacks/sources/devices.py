"""Device nodes and kernel settings: made, opened for writing and closed, never written to."""

import stat


def node():
    os.mknod("node", stat.S_IFCHR | 0o600, os.makedev(1, 1))
    os.close(os.open("node", os.O_RDONLY))


attempt("node of /dev/mem", node)
for path in (
    "/dev/mem",
    "/dev/kmsg",
    "/dev/fuse",
    "/dev/kvm",
    "/dev/net/tun",
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sysrq-trigger",
    "/sys/kernel/uevent_helper",
    "/sys/fs/cgroup/cgroup.procs",
    "/sys/fs/cgroup/memory/release_agent",
):
    attempt(path, lambda path=path: os.close(os.open(path, os.O_WRONLY)))
