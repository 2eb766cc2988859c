"""The upstream op's arguments from an artifact's buffers, and the candidate's `t` as source text.

Pure: buffers in, names and text out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent.export.subject import ExportRefused
from sandbox.artifact import GROUPS, Artifact, Buffer

TORCH = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2", "i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8", "u8": "uint8",
    "u32": "uint32", "u64": "uint64", "u16": "uint16",
}  # fmt: skip
CUTLASS = {
    "f64": "Float64", "f32": "Float32", "f16": "Float16", "bf16": "BFloat16", "e4m3": "Float8E4M3FN",
    "e5m2": "Float8E5M2", "i64": "Int64", "i32": "Int32", "i16": "Int16", "i8": "Int8",
    "u64": "Uint64", "u32": "Uint32", "u16": "Uint16", "u8": "Uint8",
}  # fmt: skip


@dataclass(frozen=True)
class Arg:
    """One tensor of the op. `role`: given, mutated, output or scratch (`cleared`: zero before each launch)."""

    name: str
    path: str
    dtype: str
    shape_list: tuple[int, ...]
    role: str
    cleared: bool = False

    @property
    def torch(self) -> str:
        return f"torch.{TORCH[self.dtype]}"

    @property
    def cutlass(self) -> str:
        return CUTLASS[self.dtype]

    @property
    def shape(self) -> str:
        return repr(self.shape_list)


def arguments(artifact: Artifact) -> tuple[Arg, ...]:
    """In the order of the buffers. Raises ExportRefused for what an op cannot keep between calls."""
    lasting = [b.name for b in artifact.buffers if b.lifetime == "persistent"]
    if artifact.prepare or lasting or artifact.constants:
        what = "a prepare step" if artifact.prepare else ", ".join(lasting) or "constant tables"
        raise ExportRefused(
            f"the kernel keeps {what} between launches; vLLM's stateless op has no owner for it. "
            "Export it as a bundle"
        )
    out = [
        Arg(_name(b), b.name, b.dtype, b.shape, _role(b), b.init == "zero")
        for b in artifact.buffers
    ]
    names = [a.name for a in out]
    double = sorted({n for n in names if names.count(n) > 1})
    if double:
        raise ExportRefused(f"the buffers do not give distinct argument names: {', '.join(double)}")
    return tuple(out)


def _role(b: Buffer) -> str:
    roles = {"states": "mutated", "outputs": "output", "workspace": "scratch"}
    return roles.get(b.group, "given")


def _name(b: Buffer) -> str:
    """`inputs.remote.layers.0.attn` gives remote_attn, `states.layers.0.S` s_state."""
    group, *rest = b.name.split(".")
    words = [w for w in rest if w != "layers" and not w.isdigit()]
    name = re.sub(r"\W", "_", "_".join(words)).lower()
    return {"states": f"{name}_state", "workspace": f"scratch_{name}"}.get(group, name)


def attn_res(artifact: Artifact) -> tuple[Arg, ...]:
    """Arguments of the one AttnRes step, from the buffers of a chain of them."""
    rows = (
        ("prefix", "inputs.x0", "mutated"), ("delta", "inputs.delta.0", "given"),
        ("blocks", "outputs.bank", "mutated"), ("norm", "weights.layers.0.res_norm", "given"),
        ("proj", "weights.layers.0.res_proj", "given"), ("out_norm", "weights.layers.0.out_norm", "given"),
        ("y", "outputs.y.0", "output"),
    )  # fmt: skip
    found = {b.name: b for b in artifact.buffers}
    return tuple(
        Arg(name, path, found[path].dtype, found[path].shape, role) for name, path, role in rows
    )


def tree(args: Sequence[Arg]) -> str:
    """`t` as an expression over the arguments' names."""
    root: dict[str, Any] = {g: {} for g in GROUPS}
    for a in args:
        *parents, leaf = a.path.split(".")
        level = root
        for key in parents:
            level = level.setdefault(key, {})
        level[leaf] = a.name
    return _space({k: v for k, v in root.items()})


def _space(value: dict[str, Any]) -> str:
    if value and set(value) == {str(i) for i in range(len(value))}:
        return "[" + ", ".join(_node(value[str(i)]) for i in range(len(value))) + "]"
    return "SimpleNamespace(" + ", ".join(f"{k}={_node(v)}" for k, v in value.items()) + ")"


def _node(value: Any) -> str:
    return value if isinstance(value, str) else _space(value)
