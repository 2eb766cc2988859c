"""What the source's text alone tells before anything runs it: refusals, and advice for people and models.

No security: the jail is. A rule refuses only what could never compile; everything else is advice with its reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from sandbox.verdict import Failure

MAX_SOURCE_BYTES = 256 << 10
SIGNATURE = "step(t, cfg, stream)"


@dataclass(frozen=True)
class Findings:
    """`refusal` ends the job before a worker sees it; `advice` travels with the outcome."""

    refusal: Failure | None
    advice: tuple[Failure, ...] = ()


def lint(source: str, filename: str = "candidate.py") -> Findings:
    """Parse and check a candidate's source."""
    refusal, tree = _parse(source, filename)
    if refusal or tree is None:
        return Findings(refusal)
    refusal = _no_step(tree, filename)
    if refusal:
        return Findings(refusal)
    advice: list[Failure] = []
    for function in _functions(tree):
        if _decorated(function, "kernel"):
            advice += _kernel_advice(function, filename)
    advice += _launch_advice(tree, filename)
    return Findings(None, tuple(advice[:20]))


def _parse(source: str, filename: str) -> tuple[Failure | None, ast.Module | None]:
    size = len(source.encode("utf-8", "surrogatepass"))
    if size > MAX_SOURCE_BYTES:
        return Failure("size", f"the source has {size} bytes, more than {MAX_SOURCE_BYTES}"), None
    try:
        return None, ast.parse(source, filename)
    except SyntaxError as error:
        lines = source.splitlines()
        where = {"file": filename, "line": error.lineno}
        if error.lineno and error.lineno <= len(lines):
            where["text"] = lines[error.lineno - 1].strip()[:200]
        return Failure("syntax", f"{type(error).__name__}: {error.msg}", where), None
    except (ValueError, RecursionError, MemoryError) as error:
        return Failure(
            "syntax", f"the source cannot be parsed: {str(error)[:200]}", {"file": filename}
        ), None


def _no_step(tree: ast.Module, filename: str) -> Failure | None:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "step":
            names = [a.arg for a in node.args.posonlyargs + node.args.args]
            required = len(names) - len(node.args.defaults)
            if node.args.vararg is None and not required <= 3 <= len(names):
                return Failure(
                    "signature", f"`step` takes ({', '.join(names)}), it must be {SIGNATURE}",
                    {"file": filename, "line": node.lineno},
                )  # fmt: skip
            return None
        if isinstance(
            node, (ast.Assign, ast.AnnAssign, ast.ImportFrom, ast.If)
        ) and "step" in ast.dump(node):
            return None
    return Failure("no-step", f"the file defines no function `{SIGNATURE}`", {"file": filename})


def _kernel_advice(function: ast.FunctionDef, filename: str) -> Iterator[Failure]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and _name(node.func) in ("pow", "math.pow", "cute.math.pow"):
            yield _advice(
                "pow",
                "pow unrolls into thousands of instructions and minutes of compiling: use exp2",
                node,
                filename,
            )
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            yield _advice(
                "global",
                "global and nonlocal are not supported in kernels: pass and return values",
                node,
                filename,
            )
        elif isinstance(node, ast.BinOp) and _wide_literal(node):
            yield _advice(
                "wide-literal",
                "a literal above 2^31 turns 32-bit operands into Int64: write Uint32(...)",
                node,
                filename,
            )


def _launch_advice(tree: ast.Module, filename: str) -> Iterator[Failure]:
    for node in ast.walk(tree):
        if not (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "launch"
        ):
            continue
        keywords = {k.arg for k in node.keywords}
        if None not in keywords and "stream" not in keywords:
            yield _advice(
                "stream",
                "pass stream=stream to every launch: other streams are refused",
                node,
                filename,
            )
        if "smem" in keywords:
            yield _advice(
                "smem",
                "leave smem out: the DSL adds up what the kernel allocates, a hand-written size can be wrong",
                node,
                filename,
            )
        if "cooperative" in keywords and "min_blocks_per_mp" not in keywords:
            yield _advice(
                "min-blocks",
                "persistent kernels want min_blocks_per_mp=1, or ptxas keeps few registers and few loads in flight",
                node,
                filename,
            )
        if "preferred_smem_carveout" in keywords:
            yield _advice(
                "carveout", "preferred_smem_carveout is dropped by the DSL", node, filename
            )


def _advice(rule: str, message: str, node: ast.AST, filename: str) -> Failure:
    return Failure(rule, message, {"file": filename, "line": getattr(node, "lineno", 0)})


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))


def _decorated(function: ast.FunctionDef, name: str) -> bool:
    return any(
        _name(d.func if isinstance(d, ast.Call) else d).endswith(name)
        for d in function.decorator_list
    )


def _wide_literal(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.BitXor)) and any(
        isinstance(s, ast.Constant) and isinstance(s.value, int) and s.value >= 1 << 31
        for s in sides
    )


def _name(node: ast.AST) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return ".".join(reversed(parts))
