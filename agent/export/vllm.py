"""`--to vllm`: a branch and a `git format-patch` series for one piece, on a person's checkout.

Three commits: kernel with dispatch, tests with their CI entry, benchmark. Beside the patches lie the
pull request's text, the provenance and a list of what was checked here. It never pushes, and imports
nothing of vLLM.
"""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from agent.export import pinned, places, rebuild, style, vllm_files, vllm_text
from agent.export.checkout import Checkout, commit, open_checkout, patches, set_branch, worktree
from agent.export.places import Place
from agent.export.processes import git
from agent.export.provenance import markdown, provenance
from agent.export.subject import ExportRefused, Subject, pretty
from agent.export.vllm_files import ADAPTER, KERNELS_CI, Plan
from agent.offline import options_of
from agent.store import Queries
from sandbox.artifact import Artifact
from targets.base import Options, UnknownOption, find

STATE = "export.json"


@dataclass(frozen=True)
class Wanted:
    """The checkout, where the patches go, whether the source was compiled again, and the kind of place.

    `pinned`: the DSL that vLLM pins, to compile the exported file with as well, or why it is not.
    """

    checkout: Path
    folder: Path
    rebuilt: rebuild.Rebuilt
    kind: str = places.OP
    pinned: pinned.Pinned = pinned.Pinned(None, "not asked for")


@dataclass(frozen=True)
class Exported:
    folder: Path
    branch: str
    tip: str
    patches: tuple[str, ...]
    said: tuple[str, ...]


@dataclass
class Checks:
    """What was tried here, for the checklist: sentences. `pinned`: the DSL that vLLM pins, or why not."""

    done: list[str]
    pinned: pinned.Pinned


def write(queries: Queries, s: Subject, wanted: Wanted) -> Exported:
    """Raises ExportRefused, NoIsolation, OSError."""
    place = place_for(s, wanted.kind)
    vllm_files.check_entry(place, s.source)
    may_write(wanted.folder)
    checkout = open_checkout(wanted.checkout)
    checks = Checks([f"reproduction: {wanted.rebuilt.sentence}"], wanted.pinned)
    plan = _plan(s, place)
    branch = f"kernelgen/{s.slug}" + ("-specialized-decode" if plan.inside else "")
    origin = provenance(queries, s, wanted.rebuilt)
    with worktree(checkout) as tree:
        tip = _commits(tree, plan, checkout, checks)
        text = vllm_text.pull_request(plan, checkout, checks.done, _template(tree))
    how = set_branch(checkout, branch, tip, _earlier(wanted.folder))
    wanted.folder.mkdir(parents=True, exist_ok=True)
    state = {"branch": branch, "base": checkout.base, "tip": tip}
    (wanted.folder / STATE).write_bytes(
        pretty({**state, "patches": []})
    )  # first: it says whose folder this is
    series = patches(checkout, tip, wanted.folder)
    files = {
        "PR.md": text.encode(), "PROVENANCE.md": markdown(origin).encode(),
        "provenance.json": pretty(origin),
        STATE: pretty({**state, "patches": series}),
    }  # fmt: skip
    for name, data in files.items():
        (wanted.folder / name).write_bytes(data)
    where = (p for p in (*vllm_text.warnings(plan), place.note, vllm_text.other_place(plan)) if p)
    said = (
        *checks.done, *(x.replace("**", "") for x in where),
        f"branch {branch} {how} in {checkout.root}; nothing was checked out or pushed",
        f"next: read every line, then git -C {checkout.root} switch {branch}, and PR.md",
    )  # fmt: skip
    return Exported(wanted.folder, branch, tip, series, said)


def may_write(folder: Path) -> None:
    """Patches of an earlier export are replaced there, nobody else's. Raises ExportRefused."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / STATE).is_file():
        raise ExportRefused(f"{folder} holds other things than an export's: choose another -o")


def place_for(s: Subject, kind: str) -> Place:
    """Where it goes. Raises ExportRefused with the reason if nowhere."""
    place = places.find(s.artifact.target, kind)
    if isinstance(place, str):
        other = places.find(s.artifact.target)
        if kind == places.DECODE and not isinstance(other, str):
            raise ExportRefused(f"{place}. Use `--place {places.OP}`: it has a place as an op")
        raise ExportRefused(f"{place}. Use `--to bundle`: it runs from plain torch" + _rfc(s))
    if place.kind == places.DECODE:
        w = find(s.artifact.target).workload(options_of(s.artifact))
        why = places.decode_gate(s.artifact.arch, w.rows, int(str(w.dims["hidden"])))
        if why:
            raise ExportRefused(f"{why}. Use `--place {places.OP}`: it has a place as an op")
    return place


def _rfc(s: Subject) -> str:
    return ", with the text of an RFC" if s.artifact.target == "kimi-k3-decode" else ""


def _plan(s: Subject, place: Place) -> Plan:
    """Compile one instance, which is what vLLM calls, for its signature. Raises ExportRefused."""
    options = options_of(s.artifact)
    single = options if place.entry == "attn_res" else replace(options, layers=1)
    try:
        dims = find(s.artifact.target).workload(single).dims
    except UnknownOption as error:
        raise ExportRefused(f"the target has no single instance: {error}") from error
    artifact = s.artifact if single == options else _compiled(s, single, s.source)
    return Plan(place, s, artifact, dims)


def _compiled(s: Subject, options: Options, source: str, python: Path | None = None) -> Artifact:
    with tempfile.TemporaryDirectory(prefix="kernelgen-export-") as store:
        folder, arch = Path(store), s.artifact.arch
        with (
            pinned.compiler(python, folder, arch)
            if python
            else rebuild.compiler(folder, arch) as compiling
        ):
            made = rebuild.make(compiling, rebuild.job(s, options, arch, source))
    if made.artifact is None:
        raise ExportRefused(
            f"vLLM calls one instance at a time, and the kernel does not compile so: {made.why}. "
            "Export it as a bundle"
        )
    return made.artifact


def _commits(tree: Path, p: Plan, c: Checkout, checks: Checks) -> str:
    if (tree / p.folder).exists():
        raise ExportRefused(
            f"{c.root} already has {p.folder} at {c.base[:12]}: check out the branch that it should "
            "be based on"
        )
    files = vllm_files.new_files(p)
    edited: list[str] = []
    for e in p.place.edits:
        path = tree / e.file
        path.write_text(vllm_files.edit(path.read_text(), e, p.name))
        edited.append(e.file)
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    listed = (tree / KERNELS_CI).read_text()
    area = vllm_files.ci(p, listed)
    if area is not None:
        (tree / KERNELS_CI).write_text(area)
    checks.done.append(vllm_files.collected(tree, p, area))
    checks.done.append(style.polish(tree, [*files, *dict.fromkeys(edited)], p.kernel))
    _compile_checks(tree, p, checks)
    kernel = [n for n in files if n.startswith(p.folder)] + list(dict.fromkeys(edited))
    groups = [
        ("kernel", kernel), ("tests", [p.test] + ([KERNELS_CI] if area is not None else [])),
        ("benchmark", [p.benchmark]),
    ]  # fmt: skip
    date = _date(tree, p.s, c)
    tip = ""
    for what, names in groups:
        tip = commit(tree, names, vllm_text.message(p, what), date)
    return tip


def _compile_checks(tree: Path, p: Plan, checks: Checks) -> None:
    """The exported device file through the compiler: the judged work, and one call as the op makes it."""
    text = (tree / p.kernel).read_text()
    options = options_of(p.s.artifact)
    whole = _compiled(p.s, options, text)
    same = whole.ptx_sha256 == p.s.artifact.ptx_sha256
    if not same:
        raise ExportRefused(
            "the device file in vLLM's style does not compile to the judged machine work; nothing was exported"
        )
    if p.place.entry == "attn_res":
        one = options, text + ADAPTER
    else:
        one = replace(options, layers=1), text
    ours = _compiled(p.s, *one)
    dsl = p.s.artifact.toolchain.get("cutlass_dsl", "unknown")
    checks.done += [
        f"the exported device file compiles with DSL {dsl} to the judged machine work "
        f"(`{whole.ptx_sha256[:16]}`), and as one call",
        _with_pin(p, one, ours, checks.pinned),
        "vLLM was not imported, its tests and benchmark were not run here",
    ]


def _with_pin(p: Plan, one: tuple[Options, str], ours: Artifact, pin: pinned.Pinned) -> str:
    """One call, as the op makes it, through the DSL that vLLM pins. Raises ExportRefused if it does not compile."""
    if pin.python is None:
        return f"vLLM pins DSL {places.DSL_PIN}, which was NOT tried: {pin.why}"
    theirs = _compiled(p.s, *one, pin.python)
    same = "the same PTX" if theirs.ptx_sha256 == ours.ptx_sha256 else "OTHER PTX than with ours"
    used = theirs.toolchain.get("cutlass_dsl", "unknown")
    return f"it compiles with DSL {used}, which vLLM pins, to {same} (`{theirs.ptx_sha256[:16]}`)"


def _date(tree: Path, s: Subject, c: Checkout) -> str:
    """One date for one export on one base, so that commits are reproducible."""
    if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(Z|[+-]\d\d:\d\d)", s.verdict.date):
        return s.verdict.date
    return git(tree, "show", "-s", "--format=%cI", c.base)


def _earlier(folder: Path) -> str:
    """The tip that an export into this folder made before."""
    try:
        found = json.loads((folder / STATE).read_text())["tip"]
    except (OSError, ValueError, KeyError):
        return ""
    return str(found)


def _template(tree: Path) -> str:
    """The checklist of vLLM's pull-request template, kept below the text."""
    try:
        text = (tree / ".github" / "PULL_REQUEST_TEMPLATE.md").read_text()
    except OSError:
        return ""
    below = text[text.index("\n---\n") :] if "\n---\n" in text else ""
    # The one box that is known to hold; the others are for the person to tick.
    return below.replace("- [ ] AI assistance was used", "- [x] AI assistance was used")
