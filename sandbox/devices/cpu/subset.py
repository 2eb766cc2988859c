"""Compiler of a small subset of Python to LLVM IR: the language that the native runtime of this device is written in.

Functions over 64-bit integers (which are addresses too), f32 and f64: assignments, if, while, for over range, calls,
return. `<`, `//`, `%` and `>>` are signed; unsigned forms and memory are intrinsics (`sandbox.devices.cpu.words`).
Not a Python compiler: what it does not know raises SubsetError when the runtime is built, that is, in our own tests.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from sandbox.devices.cpu.subset_expr import LLVM, Expressions, Signature, Value


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


class _Function(Expressions):
    """Statements of one function, and its text."""

    def text(self) -> str:
        names = [a.arg for a in self.node.args.args]
        params = []
        for name, kind in zip(names, self.sig.params, strict=True):
            self.declare(name, kind)
            params.append(f"{LLVM[kind]} %arg.{name}")
            self.emit(f"store {LLVM[kind]} %arg.{name}, ptr %v.{name}")
        for statement in self.node.body:
            self.statement(statement)
        if not self.dead:
            zero = "0" if self.sig.result == "i64" else "0.0"
            self.emit(f"ret {LLVM[self.sig.result]} {zero}")
        head = f"define {LLVM[self.sig.result]} @{self.node.name}({', '.join(params)}) nounwind {{"
        return "\n".join([head, "entry:", *self.allocas, *self.lines, "}"])

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
        self.declare(target.id, value.type)
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
        self.declare(bound, "i64")
        self.emit(f"store i64 {stop.text}, ptr %v.{bound}")
        self._assign(node.target, start)
        test = ast.Compare(ast.Name(name, ast.Load()), [ast.Lt()], [ast.Name(bound, ast.Load())])

        def step() -> None:
            now = self.temp("i64", f"load i64, ptr %v.{name}")
            more = self.temp("i64", f"add i64 {now.text}, 1")
            self.emit(f"store i64 {more.text}, ptr %v.{name}")

        self._while(test, node.body, step)
