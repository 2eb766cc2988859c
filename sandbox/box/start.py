"""Start a box: pipes, groups, uid, launcher. What fails here is ours, and nothing of it stays behind."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from functools import partial

from sandbox.box import adopt, bwrap, cgroup, recipe, scratch, seccomp, uids
from sandbox.box.frames import Broken
from sandbox.box.guard import ProcessGuard
from sandbox.box.process import Boxed, Parts
from sandbox.box.recipe import Way, Wiring
from sandbox.box.spec import BoxTier, Isolation, Spec


def start_way(spec: Spec, way: Way) -> Boxed | Broken:
    """Start the worker in exactly this way. Broken("box") when it cannot be had; never a weaker one."""
    with ExitStack() as undo:
        try:
            boxed = _start(spec, way, undo)
        except (OSError, subprocess.SubprocessError) as error:
            return Broken("box", f"cannot start: {error}")
        undo.pop_all()
        return boxed


def _start(spec: Spec, way: Way, undo: ExitStack) -> Boxed:
    uid = os.getuid()
    if way.drop:
        uid = uids.take()
        undo.callback(uids.give_back, uid)
    folder = None
    if way.tier is not BoxTier.STRICT:
        folder = scratch.make(uid)
        undo.callback(scratch.wipe, folder)
    groups = cgroup.Groups() if way.tier is BoxTier.NONE else cgroup.make(spec.limits)
    undo.callback(groups.remove)
    isolation = describe(spec, way, uid, groups.memory)
    pipes = _Pipes()
    undo.callback(pipes.close_all)
    stdin, result, output = pipes.pair(), pipes.pair(), pipes.pair()
    filter_fd = pipes.filled(seccomp.box_filter()) if way.tier is BoxTier.STRICT else -1
    wiring = Wiring(isolation, result[1], filter_fd, folder or bwrap.SCRATCH, tuple(groups.entries))
    argv = recipe.command(spec, way, wiring)
    inherited = [fd for fd in (result[1], filter_fd) if fd >= 0]
    child = adopt.spawn(partial(_popen, argv, stdin[0], output[1], inherited))
    pipes.close(stdin[0], output[1], *inherited)
    expected = adopt.filters_of_ours() + isolation.filters
    guard = ProcessGuard(child, spec.limits, isolation, groups, way.drop, folder, expected)
    return Boxed(Parts(child, stdin[1], result[0], output[0], spec.limits, isolation, guard))


def describe(spec: Spec, way: Way, uid: int, memory: str) -> Isolation:
    version = way.bwrap.version if way.bwrap else ""
    filters = recipe.filters(spec, way.tier)
    variant = way.variant + (", user namespaces refused by filter alone" if way.nested else "")
    return Isolation(way.tier, variant, uid, version, way.abi, filters, memory or "watchdog")


def _popen(
    argv: list[str], stdin: int, output: int, inherited: list[int]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv, stdin=stdin, stdout=output, stderr=output, pass_fds=inherited, env={}, cwd="/",
        start_new_session=True,
    )  # fmt: skip


class _Pipes:
    """The pipe ends of a box that is being started; what is still here when it fails is closed."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def pair(self) -> tuple[int, int]:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        self._open |= {reading, writing}
        return reading, writing

    def filled(self, data: bytes) -> int:
        """The reading end of a pipe that holds `data` (a filter has about 1 KB, a pipe takes 64)."""
        reading, writing = self.pair()
        os.write(writing, data)
        self.close(writing)
        return reading

    def close(self, *fds: int) -> None:
        for fd in fds:
            self._open.remove(fd)
            os.close(fd)

    def close_all(self) -> None:
        self.close(*self._open)
