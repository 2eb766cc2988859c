"""Operators and intrinsics of the runtime's language (`sandbox.devices.cpu.subset`) as LLVM IR templates.

A template is a list of steps `name <- instruction`, or an instruction alone; arguments are {a0}, {a1}, ...,
earlier steps {aNAME}, and the step `r` is the result.
"""

from __future__ import annotations

BINARY = {
    "Add": "add", "Sub": "sub", "Mult": "mul", "FloorDiv": "sdiv", "Mod": "srem", "LShift": "shl",
    "RShift": "ashr", "BitAnd": "and", "BitOr": "or", "BitXor": "xor",
}  # fmt: skip
FLOAT_BINARY = {"Add": "fadd", "Sub": "fsub", "Mult": "fmul", "Div": "fdiv"}
COMPARE = {"Eq": "eq", "NotEq": "ne", "Lt": "slt", "LtE": "sle", "Gt": "sgt", "GtE": "sge"}
FLOAT_COMPARE = {"Eq": "oeq", "NotEq": "une", "Lt": "olt", "LtE": "ole", "Gt": "ogt", "GtE": "oge"}

Intrinsic = tuple[tuple[str, ...], str, str]
WORD = "i64"
_PTR = "p <- inttoptr i64 {a0} to ptr\n"


def _load(bits: int) -> Intrinsic:
    if bits == 64:
        return (WORD,), WORD, _PTR + "r <- load i64, ptr {ap}, align 1"
    return (
        (WORD,),
        WORD,
        _PTR + f"x <- load i{bits}, ptr {{ap}}, align 1\nr <- zext i{bits} {{ax}} to i64",
    )


def _store(bits: int) -> Intrinsic:
    if bits == 64:
        return (WORD, WORD), WORD, _PTR + "store i64 {a1}, ptr {ap}, align 1"
    return (
        (WORD, WORD),
        WORD,
        _PTR + f"x <- trunc i64 {{a1}} to i{bits}\nstore i{bits} {{ax}}, ptr {{ap}}, align 1",
    )


def _two(code: str) -> Intrinsic:
    return (WORD, WORD), WORD, f"r <- {code} i64 {{a0}}, {{a1}}"


def _below(code: str) -> Intrinsic:
    return (WORD, WORD), WORD, f"x <- icmp {code} i64 {{a0}}, {{a1}}\nr <- zext i1 {{ax}} to i64"


def _sext(bits: int) -> Intrinsic:
    return (WORD,), WORD, f"x <- trunc i64 {{a0}} to i{bits}\nr <- sext i{bits} {{ax}} to i64"


def _math(name: str, kind: str = "f64") -> Intrinsic:
    llvm = {"f64": "double", "f32": "float"}[kind]
    return (kind,), kind, f"r <- call {llvm} @llvm.{name}.{kind}({llvm} {{a0}})"


INTRINSICS: dict[str, Intrinsic] = {
    **{f"ld{b}": _load(b) for b in (8, 16, 32, 64)},
    **{f"st{b}": _store(b) for b in (8, 16, 32, 64)},
    "ldf32": ((WORD,), "f32", _PTR + "r <- load float, ptr {ap}, align 1"),
    "ldf64": ((WORD,), "f64", _PTR + "r <- load double, ptr {ap}, align 1"),
    "stf32": ((WORD, "f32"), WORD, _PTR + "store float {a1}, ptr {ap}, align 1"),
    "stf64": ((WORD, "f64"), WORD, _PTR + "store double {a1}, ptr {ap}, align 1"),
    "ult": _below("ult"),
    "ule": _below("ule"),
    "udiv": _two("udiv"),
    "urem": _two("urem"),
    "lshr": _two("lshr"),
    **{f"sext{b}": _sext(b) for b in (8, 16, 32)},
    "popcount": ((WORD,), WORD, "r <- call i64 @llvm.ctpop.i64(i64 {a0})"),
    "low_bit": ((WORD,), WORD, "r <- call i64 @llvm.cttz.i64(i64 {a0}, i1 false)"),
    "leading_zeros": ((WORD,), WORD, "r <- call i64 @llvm.ctlz.i64(i64 {a0}, i1 false)"),
    "f32_of": ((WORD,), "f32", "x <- trunc i64 {a0} to i32\nr <- bitcast i32 {ax} to float"),
    "f64_of": ((WORD,), "f64", "r <- bitcast i64 {a0} to double"),
    "bits32": (("f32",), WORD, "x <- bitcast float {a0} to i32\nr <- zext i32 {ax} to i64"),
    "bits64": (("f64",), WORD, "r <- bitcast double {a0} to i64"),
    "wide": (("f32",), "f64", "r <- fpext float {a0} to double"),
    "narrow": (("f64",), "f32", "r <- fptrunc double {a0} to float"),
    "float_of": ((WORD,), "f64", "r <- sitofp i64 {a0} to double"),
    "fma64": (("f64",) * 3, "f64", "r <- call double @llvm.fma.f64(double {a0}, double {a1}, double {a2})"),
    "abs64": _math("fabs"),
    "sqrt64": _math("sqrt"),
    "copy": ((WORD, WORD, WORD), WORD,
             "d <- inttoptr i64 {a0} to ptr\ns <- inttoptr i64 {a1} to ptr\n"
             "call void @llvm.memmove.p0.p0.i64(ptr {ad}, ptr {as}, i64 {a2}, i1 false)"),
    "fill": ((WORD, WORD, WORD), WORD,
             _PTR + "x <- trunc i64 {a1} to i8\ncall void @llvm.memset.p0.i64(ptr {ap}, i8 {ax}, i64 {a2}, i1 false)"),
    "enter": ((WORD, WORD, WORD, WORD), WORD,
              "f <- inttoptr i64 {a0} to ptr\nt <- inttoptr i64 {a1} to ptr\nb <- inttoptr i64 {a2} to ptr\n"
              "c <- inttoptr i64 {a3} to ptr\ncall void {af}(ptr {at}, ptr {ab}, ptr {ac})"),
}  # fmt: skip

DECLARATIONS = """
declare i64 @llvm.ctpop.i64(i64)
declare i64 @llvm.cttz.i64(i64, i1)
declare i64 @llvm.ctlz.i64(i64, i1)
declare double @llvm.fma.f64(double, double, double)
declare double @llvm.fabs.f64(double)
declare double @llvm.sqrt.f64(double)
declare void @llvm.memmove.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
"""
