"""Compiler of a small subset of Python to LLVM IR: the language that the native runtime of this device is written in.

Functions over 64-bit integers (which are addresses too), f32 and f64: assignments, if, while, for over range, calls,
return. `<`, `//`, `%` and `>>` are signed; unsigned forms and memory are intrinsics (`sandbox.devices.cpu.words`).
Not a Python compiler: what it does not know raises SubsetError when the runtime is built, that is, in our own tests.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

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


def signature(function: Callable[..., Any]) -> Signature:
    notes = dict(function.__annotations__)
    result = str(notes.pop("return", "i64"))
    return Signature(tuple(str(t) for t in notes.values()), result)


def compile_functions(
    functions: Sequence[FunctionType], callable_: Sequence[FunctionType] = ()
) -> str:
    """LLVM IR of the functions. They may call one another and `callable_`, and read globals of their modules."""
    known = {f.__name__: signature(f) for f in (*callable_, *functions)}
    return "\n".join(_Function(f, known).text() for f in functions)


def declarations(functions: Sequence[FunctionType]) -> str:
    """`declare` lines for another module that calls them."""
    lines = []
    for f in functions:
        s = signature(f)
        params = ", ".join(LLVM[p] for p in s.params)
        lines.append(f"declare {LLVM[s.result]} @{f.__name__}({params})")
    return "\n".join(lines)


class _Function:
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

    def text(self) -> str:
        names = [a.arg for a in self.node.args.args]
        params = []
        for name, kind in zip(names, self.sig.params, strict=True):
            self._declare(name, kind)
            params.append(f"{LLVM[kind]} %arg.{name}")
            self.emit(f"store {LLVM[kind]} %arg.{name}, ptr %v.{name}")
        for statement in self.node.body:
            self.statement(statement)
        if not self.dead:
            zero = "0" if self.sig.result == "i64" else "0.0"
            self.emit(f"ret {LLVM[self.sig.result]} {zero}")
        head = f"define {LLVM[self.sig.result]} @{self.node.name}({', '.join(params)}) nounwind {{"
        return "\n".join([head, "entry:", *self.allocas, *self.lines, "}"])

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

    def _declare(self, name: str, kind: str) -> None:
        if name not in self.types:
            self.types[name] = kind
            self.allocas.append(f"  %v.{name} = alloca {LLVM[kind]}")

    # statements

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Expr):
            if not isinstance(node.value, ast.Constant):
                self.expression(node.value)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._assign(node.targets[0], self.scalar(node.value))
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            left = ast.Name(node.target.id, ast.Load())
            value = self.expression(ast.copy_location(ast.BinOp(left, node.op, node.value), node))
            self._assign(node.target, value)
        elif isinstance(node, ast.If):
            self._if(node)
        elif isinstance(node, ast.While):
            self._while(node.test, node.body, None)
        elif isinstance(node, ast.For):
            self._for(node)
        elif isinstance(node, ast.Return):
            value = self.scalar(node.value) if node.value else Value("i64", "0")
            if value.type != self.sig.result:
                raise self.fail(node, f"returns {value.type}")
            self.emit(f"ret {LLVM[value.type]} {value.text}")
            self.dead = True
        elif isinstance(node, ast.Break):
            self.jump(self.loops[-1][1])
        elif isinstance(node, ast.Continue):
            self.jump(self.loops[-1][0])
        elif not isinstance(node, ast.Pass):
            raise self.fail(node, type(node).__name__)

    def _assign(self, target: ast.expr, value: Value) -> None:
        if not isinstance(target, ast.Name):
            raise self.fail(target, "target is no name")
        self._declare(target.id, value.type)
        if self.types[target.id] != value.type:
            raise self.fail(target, f"{target.id} changes its type")
        self.emit(f"store {LLVM[value.type]} {value.text}, ptr %v.{target.id}")

    def _if(self, node: ast.If) -> None:
        then, other, end = self.label("then"), self.label("else"), self.label("fi")
        self.branch(node.test, then, other)
        self.place(then)
        for s in node.body:
            self.statement(s)
        if not self.dead:
            self.jump(end)
        self.lines.append(f"{other}:")
        self.dead = False
        for s in node.orelse:
            self.statement(s)
        self.place(end)

    def _while(self, test: ast.expr, body: list[ast.stmt], step: Callable[[], None] | None) -> None:
        head, run, again, end = (self.label(n) for n in ("head", "body", "next", "done"))
        self.place(head)
        self.branch(test, run, end)
        self.place(run)
        self.loops.append((again, end))
        for s in body:
            self.statement(s)
        self.loops.pop()
        self.place(again)
        if step:
            step()
        self.jump(head)
        self.lines.append(f"{end}:")
        self.dead = False

    def _for(self, node: ast.For) -> None:
        call = node.iter
        if not (
            isinstance(call, ast.Call)
            and getattr(call.func, "id", "") == "range"
            and isinstance(node.target, ast.Name)
        ):
            raise self.fail(node, "for needs range")
        args = [self.scalar(a) for a in call.args]
        start, stop = (Value("i64", "0"), args[0]) if len(args) == 1 else (args[0], args[1])
        name, bound = node.target.id, f"{node.target.id}.stop{self.count}"
        self._declare(bound, "i64")
        self.emit(f"store i64 {stop.text}, ptr %v.{bound}")
        self._assign(node.target, start)
        test = ast.Compare(ast.Name(name, ast.Load()), [ast.Lt()], [ast.Name(bound, ast.Load())])

        def step() -> None:
            now = self.temp("i64", f"load i64, ptr %v.{name}")
            more = self.temp("i64", f"add i64 {now.text}, 1")
            self.emit(f"store i64 {more.text}, ptr %v.{name}")

        self._while(test, node.body, step)

    # expressions

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
        self._declare(name, "i64")
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
