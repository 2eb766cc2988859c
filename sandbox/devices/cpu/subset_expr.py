"""Expressions of the runtime's language (`subset`) as LLVM IR: values, branches, intrinsics, calls.

Statements are in `subset`, operators and intrinsics as text in `subset_ops`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType

from sandbox.devices.cpu.subset_ops import BINARY, COMPARE, FLOAT_BINARY, FLOAT_COMPARE, INTRINSICS

LLVM = {"i64": "i64", "f32": "float", "f64": "double"}


class SubsetError(Exception):
    """A runtime function leaves the subset."""


@dataclass(frozen=True)
class Signature:
    params: tuple[str, ...]
    result: str


@dataclass(frozen=True)
class Value:
    type: str  # i64, f32, f64 or i1
    text: str


class Expressions:
    """A function being compiled: its lines so far, and code for its expressions."""

    def __init__(self, function: FunctionType, known: Mapping[str, Signature]) -> None:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        self.node: ast.FunctionDef = next(n for n in tree.body if isinstance(n, ast.FunctionDef))
        self.globals = function.__globals__
        self.known = known
        self.sig = known[function.__name__]
        self.lines: list[str] = []
        self.allocas: list[str] = []
        self.types: dict[str, str] = {}
        self.count = 0
        self.loops: list[tuple[str, str]] = []
        self.dead = False

    def fail(self, node: ast.AST, why: str) -> SubsetError:
        return SubsetError(f"{self.node.name}:{getattr(node, 'lineno', 0)}: {why}")

    def emit(self, line: str) -> None:
        if not self.dead:
            self.lines.append("  " + line)

    def temp(self, kind: str, code: str) -> Value:
        self.count += 1
        self.emit(f"%t{self.count} = {code}")
        return Value(kind, f"%t{self.count}")

    def label(self, name: str) -> str:
        self.count += 1
        return f"{name}{self.count}"

    def place(self, label: str) -> None:
        if not self.dead:
            self.lines.append(f"  br label %{label}")
        self.lines.append(f"{label}:")
        self.dead = False

    def jump(self, label: str) -> None:
        self.emit(f"br label %{label}")
        self.dead = True

    def declare(self, name: str, kind: str) -> None:
        if name not in self.types:
            self.types[name] = kind
            self.allocas.append(f"  %v.{name} = alloca {LLVM[kind]}")

    def branch(self, test: ast.expr, yes: str, no: str) -> None:
        """Jump by a condition; `and`, `or` and `not` are lazy, so the right side may load what the left checked."""
        if isinstance(test, ast.BoolOp):
            for part in test.values[:-1]:
                step = self.label("test")
                if isinstance(test.op, ast.And):
                    self.branch(part, step, no)
                else:
                    self.branch(part, yes, step)
                self.lines.append(f"{step}:")
                self.dead = False
            self.branch(test.values[-1], yes, no)
            return
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self.branch(test.operand, no, yes)
            return
        value = self.expression(test)
        if value.type != "i1":
            value = self.temp("i1", f"icmp ne i64 {value.text}, 0")
        self.emit(f"br i1 {value.text}, label %{yes}, label %{no}")
        self.dead = True

    def scalar(self, node: ast.expr) -> Value:
        value = self.expression(node)
        return self.temp("i64", f"zext i1 {value.text} to i64") if value.type == "i1" else value

    def expression(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Constant):
            if isinstance(node.value, bool) or not isinstance(node.value, int | float):
                raise self.fail(node, f"constant {node.value!r}")
            return _constant(node.value)
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.BinOp):
            return self._binary(node, self.scalar(node.left), self.scalar(node.right))
        if isinstance(node, ast.UnaryOp):
            return self._unary(node)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            one, two = self.scalar(node.left), self.scalar(node.comparators[0])
            op = type(node.ops[0]).__name__
            if one.type == two.type == "i64":
                return self.temp("i1", f"icmp {COMPARE[op]} i64 {one.text}, {two.text}")
            if one.type != two.type:
                raise self.fail(node, "compares two types")
            return self.temp(
                "i1", f"fcmp {FLOAT_COMPARE[op]} {LLVM[one.type]} {one.text}, {two.text}"
            )
        if isinstance(node, ast.IfExp):
            return self._select(node)
        if isinstance(node, ast.BoolOp):
            return self._bool(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self._call(node, node.func.id)
        raise self.fail(node, type(node).__name__)

    def _name(self, node: ast.Name) -> Value:
        if node.id in self.types:
            kind = self.types[node.id]
            return self.temp(kind, f"load {LLVM[kind]}, ptr %v.{node.id}")
        value = self.globals.get(node.id)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return _constant(value)
        raise self.fail(node, f"unknown name {node.id}")

    def _unary(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            value = node.operand.value
            if isinstance(value, int | float):
                return _constant(-value)
            raise self.fail(node, "negative of no number")
        inner = self.scalar(node.operand)
        if isinstance(node.op, ast.USub):
            if inner.type == "i64":
                return self.temp("i64", f"sub i64 0, {inner.text}")
            return self.temp(inner.type, f"fneg {LLVM[inner.type]} {inner.text}")
        if isinstance(node.op, ast.Invert) and inner.type == "i64":
            return self.temp("i64", f"xor i64 {inner.text}, -1")
        raise self.fail(node, "unary operator")

    def _binary(self, node: ast.BinOp, left: Value, right: Value) -> Value:
        op = type(node.op).__name__
        if left.type != right.type:
            raise self.fail(node, f"{op} of {left.type} and {right.type}")
        table = BINARY if left.type == "i64" else FLOAT_BINARY
        if op not in table:
            raise self.fail(node, f"operator {op} on {left.type}")
        return self.temp(left.type, f"{table[op]} {LLVM[left.type]} {left.text}, {right.text}")

    def _bool(self, node: ast.BoolOp) -> Value:
        """0 or 1 by way of branches, so that it is lazy too."""
        self.count += 1
        name = f"bool.{self.count}"
        self.declare(name, "i64")
        yes, no, end = self.label("yes"), self.label("no"), self.label("end")
        self.branch(node, yes, no)
        for label, value in ((yes, 1), (no, 0)):
            self.lines.append(f"{label}:")
            self.dead = False
            self.emit(f"store i64 {value}, ptr %v.{name}")
            self.jump(end)
        self.lines.append(f"{end}:")
        self.dead = False
        return self.temp("i64", f"load i64, ptr %v.{name}")

    def _select(self, node: ast.IfExp) -> Value:
        test = self.expression(node.test)
        if test.type != "i1":
            test = self.temp("i1", f"icmp ne i64 {test.text}, 0")
        a, b = self.scalar(node.body), self.scalar(node.orelse)
        if a.type != b.type:
            raise self.fail(node, "two types in a conditional")
        kind = LLVM[a.type]
        return self.temp(a.type, f"select i1 {test.text}, {kind} {a.text}, {kind} {b.text}")

    def _call(self, node: ast.Call, name: str) -> Value:
        args = [self.scalar(a) for a in node.args]
        if name in INTRINSICS:
            return self._intrinsic(node, name, args)
        if name not in self.known:
            raise self.fail(node, f"unknown function {name}")
        sig = self.known[name]
        if tuple(a.type for a in args) != sig.params:
            raise self.fail(node, f"arguments of {name} are {[a.type for a in args]}")
        text = ", ".join(f"{LLVM[a.type]} {a.text}" for a in args)
        return self.temp(sig.result, f"call {LLVM[sig.result]} @{name}({text})")

    def _intrinsic(self, node: ast.Call, name: str, args: list[Value]) -> Value:
        params, result, template = INTRINSICS[name]
        if tuple(a.type for a in args) != params:
            raise self.fail(node, f"arguments of {name} are {[a.type for a in args]}")
        steps = template.split("\n")
        names: dict[str, str] = {f"{i}": a.text for i, a in enumerate(args)}
        for step in steps:
            target, _, code = step.partition(" <- ")
            if not code:
                self.emit(target.format(**{f"a{k}": v for k, v in names.items()}))
                continue
            value = self.temp("i64", code.format(**{f"a{k}": v for k, v in names.items()}))
            names[target] = value.text
        return Value(result, names.get("r", "0"))


def _constant(value: float) -> Value:
    if isinstance(value, int):
        value &= (1 << 64) - 1
        return Value("i64", str(value - (1 << 64) if value >> 63 else value))
    return Value("f64", repr(float(value)) if float(value) != 0 else "0.0")
