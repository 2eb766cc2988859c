"""Floating-point operations on values, for several lowerings: flushing, directed rounding, min and max, functions.

It knows no instruction. Approximate functions (ex2, lg2, sin, cos, tanh, rcp, rsqrt, sqrt) are computed in f64 and
rounded, so they lie within the hardware's documented error.
"""

from __future__ import annotations

from sandbox.devices.cpu.kernel import FLOATS, Kernel

MODES = {"": 0, "rn": 0, "rz": 1, "rm": 2, "rp": 3}
COMPARISONS = {
    "eq": "oeq", "ne": "one", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge", "equ": "ueq", "neu": "une",
    "ltu": "ult",
    "leu": "ule", "gtu": "ugt", "geu": "uge", "num": "ord", "nan": "uno",
}  # fmt: skip


def flush(k: Kernel, kind: str, value: str) -> str:
    """A subnormal f32 becomes zero of its sign."""
    if kind != "f32":
        return value
    mag = k.let(f"call float @llvm.fabs.f32(float {value})")
    small = k.let(f"fcmp olt float {mag}, 0x3810000000000000")
    zero = k.let(f"call float @llvm.copysign.f32(float 0.0, float {value})")
    return k.let(f"select i1 {small}, float {zero}, float {value}")


def clamp(k: Kernel, kind: str, value: str) -> str:
    """.sat: to [0, 1], NaN to zero."""
    t = FLOATS[kind]
    low = k.let(f"call {t} @llvm.maxnum.{kind}({t} {value}, {t} 0.0)")
    return k.let(f"call {t} @llvm.minnum.{kind}({t} {low}, {t} 1.0)")


def directed(k: Kernel, code: str, args: list[str], mode: int) -> str:
    """f32 arithmetic rounded toward zero, down or up, by way of f64 rounded to odd."""
    wide = [k.let(f"fpext float {a} to double") for a in args]
    if code == "fdiv" or len(wide) == 1:
        raise KeyError(code)
    if code in ("fadd", "fsub"):
        second = k.let(f"fneg double {wide[1]}") if code == "fsub" else wide[1]
        exact = k.let(f"call double @rt_odd_sum(double {wide[0]}, double {second})")
    elif code == "fmul":
        exact = k.let(f"fmul double {wide[0]}, {wide[1]}")
    else:
        exact = k.let(
            f"call double @rt_fma_small(double {wide[0]}, double {wide[1]}, double {wide[2]})"
        )
    bits = k.let(f"call i64 @rt_round32(double {exact}, i64 {mode})")
    return k.let(f"bitcast i32 {k.resize(bits, 64, 32)} to float")


def pick(k: Kernel, kind: str, op: str, a: str, b: str, nan: bool) -> str:
    """min or max: a number beats a NaN unless `nan`; -0 is below +0."""
    t, bits = FLOATS[kind], {"f32": 32, "f64": 64}[kind]
    code = "olt" if op == "min" else "ogt"
    first = k.let(f"fcmp {code} {t} {a}, {b}")
    value = k.let(f"select i1 {first}, {t} {a}, {t} {b}")
    same = k.let(f"fcmp oeq {t} {a}, {b}")
    ia, ib = (k.let(f"bitcast {t} {v} to i{bits}") for v in (a, b))
    both = k.let(f"{'or' if op == 'min' else 'and'} i{bits} {ia}, {ib}")
    value = k.let(f"select i1 {same}, {t} {k.let(f'bitcast i{bits} {both} to {t}')}, {t} {value}")
    a_nan, b_nan = (k.let(f"fcmp uno {t} {v}, {v}") for v in (a, b))
    canonical = "0x7FFFFFFFE0000000" if kind == "f32" else "0x7FFFFFFFFFFFFFFF"
    if nan:
        either = k.let(f"or i1 {a_nan}, {b_nan}")
        return k.let(f"select i1 {either}, {t} {canonical}, {t} {value}")
    value = k.let(f"select i1 {b_nan}, {t} {a}, {t} {value}")
    value = k.let(f"select i1 {a_nan}, {t} {b}, {t} {value}")
    both_nan = k.let(f"and i1 {a_nan}, {b_nan}")
    return k.let(f"select i1 {both_nan}, {t} {canonical}, {t} {value}")


def transcendental(k: Kernel, op: str, x: str) -> str:
    """In f64; one more rounding to f32 leaves at most a hair over half an ulp."""
    if op == "rcp":
        return k.let(f"fdiv double 1.0, {x}")
    if op == "sqrt":
        return k.let(f"call double @llvm.sqrt.f64(double {x})")
    if op == "rsqrt":
        return k.let(f"fdiv double 1.0, {k.let(f'call double @llvm.sqrt.f64(double {x})')}")
    name = {"ex2": "exp2", "lg2": "log2"}.get(op, op)
    return k.let(f"call double @{name}(double {x})")
