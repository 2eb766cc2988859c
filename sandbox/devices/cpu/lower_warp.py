"""Lowering of what a warp does together: the operands go to exchange slots, the thread waits, the results come back."""

from __future__ import annotations

from sandbox.devices.cpu import layout as L
from sandbox.devices.cpu.access import address
from sandbox.devices.cpu.emit import Mods, Unsupported
from sandbox.devices.cpu.kernel import BITS, Kernel
from sandbox.devices.cpu.modifiers import space_of
from sandbox.devices.cpu.ptx_ast import Instr, Operand, Pair, Vec
from sandbox.devices.cpu.registry import lowers

FULL = "4294967295"


def meet(
    k: Kernel, instr: Instr, op: int, mask: str, slots: dict[int, str], variant: int = 0
) -> None:
    """Wait for the lanes of `mask` (i64) with 64-bit `slots`."""
    for slot, value in slots.items():
        k.put("%t", L.T_X + 8 * slot, value)
    k.put("%t", L.T_OP, str(op))
    k.put("%t", L.T_MASK, mask)
    k.put("%t", L.T_A, str(variant))
    k.suspend(instr, L.MEET, k.survivors(instr), certain=True)


def slot(k: Kernel, index: int, bits: int) -> str:
    return k.resize(k.field("%t", L.T_X + 8 * index), 64, bits)


def _word(k: Kernel, op: Operand, instr: Instr, bits: int = 32) -> str:
    return k.resize(k.word(op, bits, instr), bits, 64)


def _results(k: Kernel, instr: Instr, value: int, bits: int, flag: int) -> None:
    """Write `d` or `d|p` from slots."""
    dest = instr.operands[0]
    if isinstance(dest, Pair):
        k.write(dest.second, 1, slot(k, flag, 1), instr)
        dest = dest.first
    k.write(dest, bits, slot(k, value, bits), instr)


def warp_sync(k: Kernel, instr: Instr) -> None:
    meet(k, instr, L.O_SYNC, _word(k, instr.operands[0], instr), {})


@lowers("elect", "elect.sync")
def elect(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    m.need("sync")
    m.end()
    meet(k, instr, L.O_ELECT, _word(k, instr.operands[1], instr), {})
    _results(k, instr, 3, 32, 4)


@lowers("shfl", "shfl.sync.{idx,up,down,bfly}.b32")
def shfl(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    m.need("sync")
    op = {"idx": L.O_SHFL_IDX, "up": L.O_SHFL_UP, "down": L.O_SHFL_DOWN, "bfly": L.O_SHFL_BFLY}[
        m.need("idx", "up", "down", "bfly")
    ]
    m.need("b32")
    m.end()
    a, b, c = (_word(k, o, instr) for o in instr.operands[1:4])
    meet(k, instr, op, _word(k, instr.operands[4], instr), {0: a, 1: b, 2: c})
    _results(k, instr, 3, 32, 4)


@lowers("vote", "vote.sync.{all,any,uni}.pred, vote.sync.ballot.b32")
def vote(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    m.need("sync")
    what = m.need("all", "any", "uni", "ballot")
    m.need("pred", "b32")
    m.end()
    op = {"all": L.O_VOTE_ALL, "any": L.O_VOTE_ANY, "uni": L.O_VOTE_UNI, "ballot": L.O_BALLOT}[what]
    p = k.resize(k.flag(instr.operands[1], instr), 1, 64)
    meet(k, instr, op, _word(k, instr.operands[2], instr), {0: p})
    k.write(
        instr.operands[0],
        32 if what == "ballot" else 1,
        slot(k, 3, 32 if what == "ballot" else 1),
        instr,
    )


@lowers("redux", "redux.sync.{add,min,max,and,or,xor}.{u32,s32,b32}")
def redux(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    m.need("sync")
    kind = m.kind()
    what = m.need("add", "min", "max", "and", "or", "xor")
    m.end()
    if kind not in ("u32", "s32", "b32"):
        raise Unsupported(instr, f"type .{kind}")
    ops = {
        "add": L.O_REDUX_ADD, "and": L.O_REDUX_AND, "or": L.O_REDUX_OR, "xor": L.O_REDUX_XOR,
        "min": L.O_REDUX_MIN if kind == "s32" else L.O_REDUX_UMIN,
        "max": L.O_REDUX_MAX if kind == "s32" else L.O_REDUX_UMAX,
    }  # fmt: skip
    value = _word(k, instr.operands[1], instr)
    meet(k, instr, ops[what], _word(k, instr.operands[2], instr), {0: value})
    k.write(instr.operands[0], 32, slot(k, 3, 32), instr)


@lowers("match", "match.{any,all}.sync.{b32,b64}")
def match(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    m.need("sync")
    bits = BITS[m.kind()]
    op = L.O_MATCH_ANY if m.need("any", "all") == "any" else L.O_MATCH_ALL
    m.end()
    value = _word(k, instr.operands[1], instr, bits)
    meet(k, instr, op, _word(k, instr.operands[2], instr), {0: value})
    _results(k, instr, 3, 32, 4)


@lowers("activemask", "activemask.b32 (the lanes that wait here when no other lane can run)")
def activemask(k: Kernel, instr: Instr) -> None:
    meet(k, instr, L.O_ACTIVE, FULL, {})
    k.write(instr.operands[0], 32, slot(k, 3, 32), instr)


@lowers("ldmatrix", "ldmatrix.sync.aligned.m8n8.{x1,x2,x4}{.trans}{.shared}.b16")
@lowers("stmatrix", "stmatrix.sync.aligned.m8n8.{x1,x2,x4}{.trans}{.shared}.b16")
def matrix(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    m.need("sync")
    m.need("aligned")
    m.need("m8n8")
    count = int(m.need("x1", "x2", "x4")[1:])
    trans = m.take("trans")
    m.need("b16")
    space = space_of(m)
    m.end()
    loads = instr.parts[0] == "ldmatrix"
    memory, vector = (instr.operands[1], instr.operands[0]) if loads else instr.operands[:2]
    items = vector.items if isinstance(vector, Vec) else (vector,)
    if len(items) != count:
        raise Unsupported(instr, "vector of another length")
    slots = {0: address(k, memory, instr, space)}
    if not loads:
        k.change()
        slots |= {3 + i: _word(k, v, instr) for i, v in enumerate(items)}
    variant = count | int(trans) << 8 | space << 16
    meet(k, instr, L.O_LDMATRIX if loads else L.O_STMATRIX, FULL, slots, variant)
    if loads:
        for i, d in enumerate(items):
            k.write(d, 32, slot(k, 3 + i, 32), instr)


@lowers("movmatrix", "movmatrix.sync.aligned.m8n8.trans.b16")
def movmatrix(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    for name in ("sync", "aligned", "m8n8", "trans", "b16"):
        m.need(name)
    m.end()
    meet(k, instr, L.O_MOVMATRIX, FULL, {0: _word(k, instr.operands[1], instr)})
    k.write(instr.operands[0], 32, slot(k, 3, 32), instr)
