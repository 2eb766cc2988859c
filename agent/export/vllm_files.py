"""The files of a vLLM export: device file, op, tests, benchmark, and edits of files that are there.

Text from the record and templates; nothing is imported or run. Edits refuse a checkout in which
their place is not found exactly once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from agent.export import places, signature, style
from agent.export.parts import USUAL_SMS
from agent.export.places import CHIPS, Edit, Place
from agent.export.signature import Arg
from agent.export.subject import ExportRefused, Subject
from sandbox.artifact import Artifact

KERNELS_CI = ".buildkite/test_areas/kernels.yaml"
MODELS_CI = ".buildkite/test_areas/models_basic.yaml"


@dataclass(frozen=True)
class Plan:
    """What is exported to which place. `single`: the artifact of one instance, for the signature."""

    place: Place
    s: Subject
    single: Artifact
    dims: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.place.name(self.s.artifact.arch)

    @property
    def folder(self) -> str:
        return f"{self.place.folder}/{self.name}"

    @property
    def kernel(self) -> str:
        return f"{self.folder}/{'kernel' if self.inside else '_kernel'}.py"

    @property
    def inside(self) -> bool:
        """A kernel inside `specialized_decode`, not an op."""
        return self.place.kind == places.DECODE

    @property
    def test(self) -> str:
        return f"tests/models/kimi_k3/test_{self.name}.py"

    @property
    def benchmark(self) -> str:
        return f"benchmarks/kernels/benchmark_kimi_k3_{self.name}.py"

    @property
    def args(self) -> tuple[Arg, ...]:
        own = signature.attn_res if self.place.entry == "attn_res" else signature.arguments
        return own(self.single)


def check_entry(place: Place, source: str) -> None:
    """That the candidate has the function the op calls. Raises ExportRefused."""
    if place.entry == "step":
        return
    tree = ast.parse(source)
    defined = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    fields = ("prefix", "out_prefix", "delta", "old", "new", "norm", "proj", "out_norm", "y")
    function = defined.get("attn_res")
    named, state = _fields(defined.get("Mix")), _fields(defined.get("MixState"))
    takes = [a.arg for a in function.args.args] if isinstance(function, ast.FunctionDef) else []
    if named != fields or state != ("sources", "row", "add", "closing") or len(takes) != 4:
        raise ExportRefused(
            "vLLM calls one AttnRes step at a time; this candidate has no `attn_res(mix, state, cfg, stream)` over "
            "the seed's `Mix` and `MixState` that could be called so. Export it as a bundle"
        )


def _fields(node: ast.stmt | None) -> tuple[str, ...]:
    """Names of a class's annotated fields."""
    return tuple(
        n.target.id
        for n in (node.body if isinstance(node, ast.ClassDef) else ())
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    )


ADAPTER = """

@cute.jit
def step(t, cfg, stream):
    mix = Mix(
        t.inputs.x0, t.inputs.x0, t.inputs.delta[0], None, t.outputs.bank, t.weights.layers[0].res_norm,
        t.weights.layers[0].res_proj, t.weights.layers[0].out_norm, t.outputs.y[0],
    )
    attn_res(mix, MixState(Int32(1), Int32(1), Int32(1), Int32(0)), cfg, stream)
"""
"""As the op calls it, for a compile of the exported text in the jail."""


def new_files(p: Plan) -> dict[str, str]:
    """Path -> text of device file, op, test and benchmark, not yet formatted."""
    env = jinja2.Environment(
        loader=jinja2.PackageLoader("agent.export", "templates/vllm"), undefined=jinja2.StrictUndefined,
        variable_start_string="<<", variable_end_string=">>", block_start_string="<%", block_end_string="%>",
        comment_start_string="<#", comment_end_string="#>", trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    values = _values(p)
    if p.inside:
        return {
            f"{p.folder}/__init__.py": style.HEADER,
            p.kernel: style.device_file(p.s.source),
            f"{p.folder}/prepared.py": env.get_template("decode_prepared.py.j2").render(values),
            p.test: env.get_template("decode_test.py.j2").render(values),
            p.benchmark: env.get_template("decode_benchmark.py.j2").render(values),
        }
    op = env.get_template("op.py.j2").render(values)
    if p.place.part == "gemv":
        used = "from vllm.platforms import current_platform\n"
        extra = "from vllm.model_executor.layers.linear import UnquantizedLinearMethod\n"
        op = op.replace(used, used + extra)
    return {
        f"{p.folder}/__init__.py": style.HEADER,
        p.kernel: style.device_file(p.s.source),
        f"{p.folder}/_host.py": env.get_template("host.py.j2").render(values),
        f"{p.folder}/op.py": op,
        p.test: env.get_template("test.py.j2").render(values),
        p.benchmark: env.get_template("benchmark.py.j2").render(values),
    }


def _values(p: Plan) -> dict[str, Any]:
    arch, args = p.s.artifact.arch, p.args
    given = [a for a in args if a.role in ("given", "mutated")]
    outputs = [a for a in args if a.role == "output"]
    used = _mentioned(p.s.source) | set(p.place.dims)
    mutated = ", ".join(f"`{a.name}`" for a in args if a.role == "mutated")
    return {
        "title": p.place.title, "part": p.place.module, "entry": p.place.entry, "name": p.name,
        "arch": arch, "chip": CHIPS[arch], "capability": places.CAPABILITIES[arch],
        "rows": int(str(p.s.artifact.workload["rows"])), "sms": USUAL_SMS[arch],
        "align": max(b.align for b in p.single.buffers), "tunables": repr(p.s.tunables),
        "dims": repr({k: v for k, v in p.dims.items() if k in used}), "cls": _class(p.name),
        "given": given, "outputs": outputs, "tensors": list(args), "tree": signature.tree(args),
        "made": [a for a in args if a.role in ("output", "scratch")],
        "cleared": [a for a in args if a.role == "scratch" and a.cleared],
        "imports": "Mix, MixState, attn_res" if p.place.entry == "attn_res" else "step",
        "returns": ", ".join(f"`{a.name}` {list(a.shape_list)}" for a in outputs),
        "mutated": mutated, "eps": p.dims.get("eps"),
        "output_names": repr(tuple(a.name for a in outputs)), "scale": _scale,
    }  # fmt: skip


def _mentioned(source: str) -> set[str]:
    """Attributes and strings of a source: more than the sizes it reads, never less."""
    nodes = list(ast.walk(ast.parse(source)))
    texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return {n.attr for n in nodes if isinstance(n, ast.Attribute)} | texts


def _class(name: str) -> str:
    return "".join(w.capitalize() for w in name.split("_")) + "Kernel"


def _scale(a: Arg) -> str:
    """Standard deviation of a test input: products come out near one."""
    if a.path.startswith("weights."):
        return f"{a.shape_list[-1] ** -0.5:.4g}" if len(a.shape_list) > 1 else "0.1"
    return "0.1" if a.role == "mutated" else "1.0"


def edit(text: str, e: Edit, name: str) -> str:
    """Raises ExportRefused unless the place is there exactly once."""
    found = text.count(e.anchor)
    if found != 1:
        line = e.anchor.strip().splitlines()[0]
        raise ExportRefused(
            f"{e.file}: expected the line `{line}` once, found it {found} times; this vLLM differs from 0.33 "
            "there, and the call site has to be found by hand"
        )
    new = e.text.replace("NAME", name)
    return text.replace(e.anchor, e.anchor + new if e.after else new + e.anchor)


def collected(tree: Path, p: Plan, area: str | None) -> str:
    """Which job of the checkout's CI runs the new test, as a sentence."""
    if area is not None:
        return f"CI: a job for {p.test} was added to {KERNELS_CI}"
    try:
        listed = (tree / MODELS_CI).read_text()
    except OSError:
        listed = ""
    found = re.search(r"^\s*-\s*pytest\b.*\bmodels/kimi_k3(?=\s|$)", listed, re.M)
    return (
        f"CI: a job in {MODELS_CI} runs all of tests/models/kimi_k3 (`{found[0].strip(' -')}`)"
        if found
        else f"CI: NO job was found in {MODELS_CI} that runs tests/models/kimi_k3; list {p.test} somewhere"
    )


def ci(p: Plan, text: str) -> str | None:
    """The kernels' test area with the new test in it; None where an existing job collects it."""
    if p.s.artifact.arch != "sm_90a":
        return None
    chip = CHIPS[p.s.artifact.arch]
    return (
        text.rstrip("\n")
        + f"""

- label: ":nvidia: (H100) {p.place.title} {chip}"
  key: kimi-k3-{p.name.replace("_", "-")}-h100
  timeout_in_minutes: 20
  device: h100
  num_devices: 1
  source_file_dependencies:
  - {p.folder}/
  - vllm/model_executor/warmup/jit_warmup_cutedsl_helper.py
  - {p.test}
  commands:
    - pytest -v -s {p.test.removeprefix("tests/")}
"""
    )
