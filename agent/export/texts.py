"""The prose of a bundle: README, RFC, project file. Filled from the record; it judges nothing."""

from __future__ import annotations

import json
import keyword
import shlex
from typing import Any

from agent.export.provenance import not_verified, table
from agent.export.rebuild import Rebuilt
from agent.export.subject import Subject
from sandbox.artifact import GROUPS

WHOLE_STACK = {"kimi-k3-decode"}
MOST_ROWS = 24


def is_whole_stack(s: Subject) -> bool:
    """Kernels that cross layers: no per-layer hook of an inference engine takes them."""
    return s.artifact.target in WHOLE_STACK


def pyproject(s: Subject) -> str:
    return f"""[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{s.slug.replace("_", "-")}"
version = "0.1.0"
description = "Generated GPU kernel for {s.artifact.target.rpartition("/")[2]}, as machine code"
requires-python = ">=3.10"
dependencies = ["torch>=2.6", "cuda-bindings>=13,<14"]

[tool.setuptools]
packages = ["{s.slug}"]

[tool.setuptools.package-data]
"{s.slug}" = ["manifest.json", "data/*"]
"""


def readme(s: Subject, manifest: dict[str, Any], rebuilt: Rebuilt) -> str:
    """How to run it, what it takes, what was checked."""
    review = f"Review: {s.reviewed}."
    return "\n".join([
        f"# {s.slug}", "",
        f"The kernel `{s.name}` for `{s.artifact.target}` as machine code with its launch plan. It runs "
        "from plain torch; neither kernelgen nor the DSL is needed.", "",
        review if s.decision else f"**{review}**", "",
        "## Run it", "", "```", "pip install 'cuda-bindings>=13,<14' torch numpy",
        f"python -m {s.slug}        # in this folder: verifies all hashes, runs the self-check on the GPU",
        "```", "", "```python", *_example(s), "```", "",
        "- `call()` enqueues on torch's current stream, allocates nothing, waits for nothing; capture it in a "
        "`torch.cuda.graph` like any torch code. States and outputs are written in place.",
        "- One `Kernel` has one set of scratch: use it from one stream at a time, from one thread, with its device "
        "current.",
        "- Change weights, then call `prepare` and `bind` again.",
        f"- `{s.slug}.kernel_or(fallback)` gives the kernel, or `fallback` with a warning where it cannot be "
        "used or fails its check.",
        f"- As a torch operator (`torch.compile`, eager): `from {s.slug} import op; h = op.register(kernel)`, then "
        "`op.step(h, inputs, states, outputs)` with lists in the order of `kernel.names(group)`. A bound call has "
        "less overhead.", "",
        "## Devices", "", *_devices(manifest, s), "",
        "## Self-check", "", _record(manifest), "",
        "## Numbers", "", table(s),
        "## Buffers", "", *_buffers(s), "",
        "## Not verified", "", *(f"- {x}" for x in not_verified(s) or ["(nothing listed)"]), "",
        "## Rebuild", "",
        f"`source/kernel.py` with `source/tunables.json` is what was compiled. {rebuilt.sentence}",
        "", "```", _compile_command(s), "```", "",
        f"gives an artifact `{s.artifact.sha256}` with the toolchain of PROVENANCE.md; ptxas here was "
        f"{manifest['ptxas']}.", "",
    ])  # fmt: skip


def _example(s: Subject) -> list[str]:
    return [
        f"from {s.slug} import Kernel",
        "kernel = Kernel(\"cuda\")                  # checks the device and, once, a recorded result",
        "weights = kernel.empty(\"weights\")        # dicts: buffer name -> tensor; fill in your own",
        "kernel.prepare(weights)",
        "inputs, states, outputs = (kernel.empty(g) for g in (\"inputs\", \"states\", \"outputs\"))",
        "call = kernel.bind(inputs, states, outputs)",
        "call()",
    ]  # fmt: skip


def _devices(manifest: dict[str, Any], s: Subject) -> list[str]:
    out = []
    judged = f"judged on {s.verdict.device.get('name') or s.verdict.device.get('kind') or 'an unknown device'}"
    if s.verdict.device.get("kind") == "cpu":
        judged = "judged on the device `cpu`, which executes translated PTX; **never run on a GPU**"
    for arch, e in sorted(manifest["parts"]["main"].items()):
        said = judged if e["judged"] else "compiled now, **never judged or run**"
        out.append(f"- {arch}, at least {e['sms']} SMs: {said}.")
    return out + [f"- {x}" for x in manifest["notes"]]


def _record(manifest: dict[str, Any]) -> str:
    r = manifest["record"]
    if not r["part"]:
        return f"There is no recorded result ({r['why']}): the first use checks nothing."
    of = "the kernel itself" if r["part"] == "main" else (
        "**the same source compiled for tiny sizes**: it tests driver, loader and device, not the large kernel"
    )  # fmt: skip
    near = f" In {r['ties']} rows routing is near a tie." if r.get("ties") else ""
    return (
        f"The first use on a device runs a recorded step and compares outputs and states with the fp64 reference "
        f"(seed {r['seed']}). It is of {of}.{near} A failure raises `SelfCheckFailed`."
    )


def _buffers(s: Subject) -> list[str]:
    rows = [b for b in s.artifact.buffers if b.group in GROUPS[:4]]
    out = ["| name | dtype | shape |", "|---|---|---|"]
    out += [f"| {b.name} | {b.dtype} | {list(b.shape)} |" for b in rows[:MOST_ROWS]]
    if len(rows) > MOST_ROWS:
        out.append(f"| ... {len(rows) - MOST_ROWS} more: `kernel.buffers` | | |")
    scratch = sum(b.nbytes for b in s.artifact.buffers if b.group == "workspace")
    return [*out, "", f"Scratch, allocated once: {scratch / 2**20:.1f} MiB."]


def _compile_command(s: Subject) -> str:
    w = s.artifact.workload
    extra = "".join(f" --option {k[2:]}={v}" for k, v in w.items() if k.startswith("x_"))
    chosen = "".join(f" --tunable {k}={_plain(v)}" for k, v in sorted(s.tunables.items()))
    return (
        f"kernelgen compile --target {s.artifact.target} --preset {w.get('preset')} --layers {w.get('layers')} "
        f"--rows {w.get('rows')} --context {w.get('context')}{extra}{chosen} --arch {s.artifact.arch} -o out "
        "source/kernel.py"
    )


def _plain(value: Any) -> str:
    """As `--tunable` reads it: a Python literal. Words go without quotes, unless they are a literal's (True)."""
    word = isinstance(value, str) and value.isidentifier() and not keyword.iskeyword(value)
    return value if word else shlex.quote(repr(value))


def _overlap(launches: int, layers: Any) -> str:
    """What a chain of few launches may claim that one of many may not."""
    if isinstance(layers, int) and launches <= layers:
        return ", so that weight traffic of an operation can start before the one before it ends"
    return "; with so many it shows the mathematics in one step, and little of the gain that fewer would bring"


def _kind(s: Subject) -> str:
    kind = s.verdict.timing.kind if s.verdict.timing else "not timed"
    return (
        kind.capitalize()
        if kind == "measured"
        else f"Times are **{kind}**, nothing was measured on a GPU"
    )


def rfc(s: Subject) -> str:
    """RFC.md: what a discussion upstream needs before any patch of a whole-stack kernel."""
    w = s.artifact.workload
    launches = len(s.artifact.step.launches)
    return "\n".join([
        "# [RFC]: Whole-stack decode kernel for Kimi K3 behind specialized decode", "",
        "Draft. A person completes and submits it; the blanks are marked.", "",
        "## Motivation", "",
        "A decode step at small batch reads each weight once; between kernels the memory system idles. This kernel "
        f"runs a {w.get('layers')}-layer step of one tensor-parallel rank in {launches} launch"
        f"{'es' if launches != 1 else ''}{_overlap(launches, w.get('layers'))}. {_kind(s)}:", "", table(s),
        "## Why this is no patch", "",
        "vLLM's hooks are per layer and per operation: `build_providers()` and `Attention.run`, `PreparedMoE.run` in "
        "`specialized_decode`, quant methods and `attn_res` elsewhere. A kernel that crosses layers replaces the loop "
        "in `SpecializedDecode.run()` for the batches it serves, with its own reading of `plan`, KV layout, aux "
        "streams and collectives. That is an executor, not a kernel, and needs agreement before code.", "",
        "## Proposed change", "",
        "1. A switch in `SpecializedDecode.run()`: for prepared batch sizes, one call in place of the layer loop; "
        "everything else unchanged.",
        "2. Gates: device capability and SM count, TP size, rows, context limit, weight formats, no LoRA, no sleep "
        "mode, FULL decode graphs only. Any miss takes the present path.",
        "3. Compile before capture, in the executor's `warmup`; bounded waits with a fail-stop equal on all ranks.",
        "4. Tests of the step against the layer-by-layer path, graph replay, null slots, mutated state.", "",
        "## What exists", "",
        "- The source, and a bundle (this folder) that runs it from plain torch on one GPU.",
        f"- Judged at `{json.dumps(dict(w), sort_keys=True)}` on {s.verdict.device.get('name', 'unknown')}; "
        "tensors of other ranks were inputs, so **no collective has run**.",
        f"- Review: {s.reviewed}.", "",
        "## Not verified", "", *(f"- {x}" for x in not_verified(s) or ["(nothing listed)"]),
        "- End-to-end serving, model quality, several GPUs.", "",
        "## Open questions", "",
        "- Does the project want an executor of this kind for this device class?",
        "- Which predecessor work covers part of it? (search results: ____)",
        "- Who runs 8-GPU end-to-end and GSM8K before and after? ____", "",
        "## AI assistance", "",
        f"The kernel was proposed by kernelgen, a loop around language models (this candidate: {s.proposer}), and "
        "judged automatically. The submitter states here what they reviewed and ran themselves: ____", "",
    ])  # fmt: skip
