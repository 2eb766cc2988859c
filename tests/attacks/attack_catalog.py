"""Every attack: what shows that it got through, and where it is known to.

`through` returns what got through, or "" when the attack was stopped. The same function judges the box and the control
without one, so an attack that shows nothing cannot pass as stopped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Outcome = dict[str, Any]
Through = Callable[[Outcome], str]

# Ways in which an attack is known to get through, as the tier's sentence tells its users.
SHARED = frozenset({"seccomp", "weak"})  # /tmp and /dev/shm are everybody's
SAME_USER = frozenset({"weak"})  # the box has the user's own rights on files and other programs


@dataclass(frozen=True)
class Attack:
    """`control`: as whom it gets through without a box: any user, root alone, or nobody (`why_no_control`)."""

    name: str
    through: Through
    control: str = "any"
    why_no_control: str = ""
    open_in: frozenset[str] = frozenset()
    runs: int = 1
    deadline_s: float = 20.0
    slow: bool = False
    expect: tuple[str, ...] = ()
    ran: str = "RAN "
    quiet: str = ""
    """What stops it without a refusal that it could report."""

    def asked(self, way: str) -> dict[str, Any]:
        """What a client is asked to run."""
        return {"attack": self.name, "way": way, "runs": self.runs, "deadline_s": self.deadline_s}


# Which layer refused a system call shows in how it was refused.
REFUSED_BY = {
    "system call filter": {1, 38, 97}, "Landlock or another user": {13}, "namespaces": {2, 3, 22, 30, 101},
    "limits": {11, 12, 24, 27, 28, 122},
}  # fmt: skip
ENDED_BY = {
    "malformed": "reader", "oversized": "reader", "closed": "reader", "timeout": "deadline", "disk": "watchdog",
    "memory": "watchdog", "output": "watchdog", "processes": "watchdog",
}  # fmt: skip


def layers(attack: Attack, outcome: Outcome) -> tuple[str, ...]:
    """What stopped it, by how its calls were refused and how its run ended; for a box alone."""
    found = {attack.quiet, ENDED_BY.get(outcome["reason"], "")}
    for line in lines(outcome, "NO "):
        numbers = {int(n) for n in re.findall(r"\[Errno (\d+)\]", line)}
        found |= {name for name, refusals in REFUSED_BY.items() if numbers & refusals}
        found |= {"limits"} if "MemoryError" in line or "start new thread" in line else set()
    return tuple(sorted(found - {""}))


def text(outcome: Outcome) -> str:
    """All that came back from the box."""
    return f"{outcome['output']}\n{outcome['body']}\n{outcome['detail']}"


def lines(outcome: Outcome, start: str) -> list[str]:
    return [line for line in text(outcome).splitlines() if line.startswith(start)]


def got(outcome: Outcome) -> str:
    """The script's own word, for what nothing else can show."""
    return "; ".join(lines(outcome, "GOT "))


def got_but(*harmless: str) -> Through:
    return lambda o: "; ".join(x for x in lines(o, "GOT ") if x[4:] not in harmless)


def nodes(outcome: Outcome) -> str:
    """Without namespaces and Landlock a box opens what everybody may open; that alone gives no power over a device."""
    bare_tier = outcome.get("isolation", {}).get("tier") in SHARED
    free = [p for p in ("/dev/fuse", "/dev/net/tun", "/dev/kvm") if bare_tier and everybodys(p)]
    return got_but(*free)(outcome)


def everybodys(path: str) -> bool:
    try:
        return bool(os.stat(path).st_mode & 0o002)
    except OSError:
        return False


def says(what: str) -> Through:
    """A planted secret is in something that came back."""
    return lambda o: f"the planted {what} came back" if o["planted"][what] in text(o) else ""


def found_token(outcome: Outcome) -> str:
    return "; ".join(lines(outcome, "FOUND ") + lines(outcome, "GOT "))


def network(*kinds: str) -> Through:
    return lambda o: ", ".join(k for k in kinds if o["evidence"]["network"][k])


def victim_died(outcome: Outcome) -> str:
    return "" if outcome["evidence"]["victim"] else "the planted process was killed"


def victim_changed(outcome: Outcome) -> str:
    changed = outcome["evidence"]["victim_changed"] or not outcome["evidence"]["victim"]
    return "the planted process was changed" if changed else ""


def traced(outcome: Outcome) -> str:
    return got(outcome) or victim_changed(outcome)


def left_process(outcome: Outcome) -> str:
    return "a process outlived the run" if outcome["evidence"]["processes"] else ""


def flooded(outcome: Outcome) -> str:
    return got(outcome) or left_process(outcome)


def left_files(outcome: Outcome) -> str:
    return ", ".join(outcome["evidence"]["files"])


def filled(outcome: Outcome) -> str:
    return got(outcome) or left_files(outcome)


def left_objects(outcome: Outcome) -> str:
    left = outcome["evidence"]["sysv"] + outcome["evidence"]["files"]
    return ", ".join(left) or got_but("/dev/shm file")(outcome)


def poisoned(outcome: Outcome) -> str:
    return "; ".join(lines(outcome, "EARLIER ")) or left_files(outcome)


def touched_file(outcome: Outcome) -> str:
    if not outcome["evidence"]["file_intact"]:
        return "the planted file is gone or changed"
    return says("text")(outcome)


def forged(outcome: Outcome) -> str:
    evidence = outcome["evidence"]
    return "the record is in the " + ("file" if evidence["result_file"] else "pipe") if (
        evidence["result_file"] or evidence["victim_pipe"]
    ) else ""  # fmt: skip


def late_by(outcome: Outcome, limit_s: float) -> bool:
    """In a box the end may be waited for on a busy machine; attacks that would go on do so for longer than that."""
    took = outcome.get("took")
    return outcome["seconds"] > limit_s if took is None else took > limit_s + 1.5


def overran(limit_s: float) -> Through:
    def through(outcome: Outcome) -> str:
        late = late_by(outcome, limit_s)
        return got(outcome) or ("it ran past its deadline" if late else left_process(outcome))

    return through


def believed(outcome: Outcome) -> str:
    """A result that nobody computed: success by output and exit status, or an answer that a careless reader takes."""
    if outcome["reason"] == "bare":
        status = outcome["detail"] == "exit status 0" and "passed" in outcome["output"].lower()
        return "exit status 0 and PASSED" if status else ""
    return "" if outcome["body"] is None else f"a frame was read: {outcome['body']}"


def misread(outcome: Outcome) -> str:
    """An answer that the frame reader must refuse; without it a careless reader takes it, or breaks on it."""
    if outcome["reason"] == "bare":
        return outcome["naive"] if outcome["naive"] != "nothing" else ""
    if outcome["evidence"]["files"]:
        return "reading it ran its code"
    return "" if outcome["body"] is None else f"a frame was read: {outcome['body']}"


def hung_reader(outcome: Outcome) -> str:
    """The reader waited for a process that the worker left, or was left with it."""
    late = late_by(outcome, 4)
    return left_process(outcome) or ("the reader waited" if late else "")


def grew(most_mb: int) -> Through:
    def through(outcome: Outcome) -> str:
        if outcome["grown_mb"] > most_mb:
            return f"the parent grew by {outcome['grown_mb']} MB"
        dirty = [c for c in outcome["output"] if not (c.isprintable() or c in "\n\t")]
        return f"control characters came back: {dirty[:3]}" if dirty else ""

    return through


def lied(outcome: Outcome) -> str:
    """Claims may say anything; what is ours (isolation, the next job) must not move."""
    if outcome["reason"] == "bare":
        return got(outcome)
    stored = outcome["isolation"]
    return (
        ""
        if outcome["honest"] and set(stored) >= {"tier", "uid"} and stored["uid"]
        else "our record moved"
    )


_OWN = "it acts on the process itself; there is nothing to shed without a box"
_TIME = ("timeout",)
_MALFORMED, _OVERSIZED = ("malformed",), ("oversized",)

ATTACKS = (
    # secrets
    Attack("environment_keys", says("key"), quiet="an empty environment"),
    Attack("home_file", says("text"), open_in=SAME_USER, quiet="namespaces, Landlock or another user"),
    Attack("inherited_descriptors", says("text"), quiet="closed descriptors"),
    Attack("other_memory", found_token, open_in=SAME_USER),
    Attack("file_handles", got, control="root", slow=True),
    Attack("keyrings", got, runs=2, slow=True),
    # network
    Attack("tcp_and_udp", network("tcp", "udp")),
    Attack("socket_families", got),
    Attack("abstract_socket", network("abstract")),
    Attack("named_socket", network("named"), slow=True),
    Attack("kernel_interfaces", got),
    # escape
    Attack("double_fork", left_process),
    Attack("pipe_holder", hung_reader),
    Attack("kill_by_number", victim_died),
    Attack("kill_by_mark", victim_died, slow=True, quiet="no process to be seen"),
    Attack("kill_by_input", victim_died),
    Attack("trace_attach", traced),
    Attack("other_code", got, open_in=SAME_USER),
    Attack("other_limits", victim_changed, slow=True),
    Attack("links_outside", touched_file, open_in=SAME_USER),
    Attack("deep_folders", lambda o: o["left"], quiet="clean-up by descriptors"),
    Attack("own_code", got_but("own code"), control="root", slow=True),
    Attack("new_namespaces", got),
    Attack("mounts", got, control="root"),
    Attack("devices", nodes, control="root"),
    Attack("become_root", got),
    Attack("foreign_calls", got, control="x86_64", quiet="system call filter"),
    Attack("shed_filters", got, control="nobody", why_no_control=_OWN, slow=True),
    Attack("real_time", got, control="root", slow=True),
    Attack("poison_next", poisoned, runs=2, open_in=SHARED, slow=True, quiet="single use"),
    Attack("shared_memory_left", left_objects, open_in=SHARED),
    # floods
    Attack("process_flood", flooded),
    Attack("thread_flood", got, slow=True),
    Attack("memory_hog", got, slow=True),
    Attack("memory_in_parts", flooded, slow=True),
    Attack("memory_files", got, slow=True),
    Attack("shm_fill", filled, open_in=SHARED),
    Attack("disk_fill", filled, open_in=SHARED, slow=True),
    Attack("big_file", got, slow=True),
    Attack("file_flood", got, slow=True),
    Attack("descriptor_flood", got, control="nobody", why_no_control="the machine's own limit varies", slow=True),
    Attack("output_flood", grew(24), ran="AAAA", slow=True, quiet="reader"),
    Attack("endless_output", overran(5), deadline_s=3.0, ran="BBBB", slow=True, quiet="reader"),
    Attack("endless_loop", overran(4), deadline_s=2.0, expect=_TIME, slow=True),
    Attack("ignore_signals", overran(4), deadline_s=2.0, expect=_TIME, slow=True),
    Attack("sleep_on", overran(4), deadline_s=2.0, expect=_TIME, slow=True),
    # forged results
    Attack("fake_pass", believed, expect=("closed",)),
    Attack("early_exit", misread, expect=("closed",), slow=True),
    Attack("forged_records", forged, open_in=SAME_USER),
    Attack("patched_worker", lied, control="nobody", why_no_control="there is no worker to patch", slow=True,
           quiet="judged elsewhere"),
    Attack("raw_pickle", misread, expect=_MALFORMED + _OVERSIZED),
    Attack("raw_header_size", misread, expect=_OVERSIZED),
    Attack("raw_block_size", misread, expect=_OVERSIZED),
    Attack("raw_block_sum", misread, expect=_OVERSIZED, slow=True),
    Attack("raw_names", misread, expect=_MALFORMED),
    Attack("raw_twice", misread, expect=_MALFORMED, slow=True),
    Attack("raw_nan", misread, expect=_MALFORMED),
    Attack("raw_keys", misread, expect=_MALFORMED, slow=True),
    Attack("raw_depth", misread, expect=_MALFORMED, slow=True),
    Attack("raw_number", misread, expect=_MALFORMED, slow=True),
    Attack("raw_bytes", misread, expect=_MALFORMED, slow=True),
    Attack("raw_drip", overran(4), deadline_s=2.0, expect=_TIME, slow=True),
    Attack("raw_stream", overran(4), quiet="reader"),
)  # fmt: skip
