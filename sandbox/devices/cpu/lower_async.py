"""Lowering of asynchronous copies and mbarriers: cp.async, cp.async.bulk, cp.reduce.async.bulk, st.async, mbarrier.

The runtime queues copies and completes them as late as the program allows (or at once, by the seed). Tensor copies (TMA
with a tensor map) are refused.
"""

from __future__ import annotations

from sandbox.devices.cpu import layout as L
from sandbox.devices.cpu import rt_copy as C
from sandbox.devices.cpu import rt_mbarrier as M
from sandbox.devices.cpu import rt_reduce as R
from sandbox.devices.cpu.access import Access, address, locate
from sandbox.devices.cpu.cfg import has_result
from sandbox.devices.cpu.emit import Mods, Unsupported
from sandbox.devices.cpu.kernel import BITS, Kernel
from sandbox.devices.cpu.modifiers import HINT_PREFIXES, SCOPES, elements, vector_of
from sandbox.devices.cpu.ptx_ast import Imm, Instr, Not, Operand, Reg
from sandbox.devices.cpu.registry import lowers

SHARED_SPACES = ("shared::cluster", "shared::cta", "shared")


@lowers("cp", "cp.async.{ca,cg}.shared.global (with size and ignore-src), commit_group, wait_group, wait_all, "
              "mbarrier.arrive; cp.async.bulk: global to shared (mbarrier, multicast), shared to cluster, shared to "
              "global (bulk_group), prefetch, commit_group, wait_group; cp.reduce.async.bulk to global")  # fmt: skip
def cp(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    reduces = m.take("reduce")
    m.need("async")
    if m.take("bulk"):
        if m.take("tensor"):
            raise Unsupported(instr, "tensor maps")
        _bulk(k, instr, m, reduces)
        return
    if m.take("commit_group"):
        m.end()
        _bump(k, L.T_COMMITTED)
    elif m.take("wait_group") or "wait_all" in m.rest:
        everything = m.take("wait_all")
        m.end()
        _wait_group(k, instr, everything)
    elif m.take("mbarrier"):
        _copy_arrive(k, instr, m)
    else:
        _copy(k, instr, m)


def _bump(k: Kernel, offset: int) -> None:
    k.put("%t", offset, k.let(f"add i64 {k.field('%t', offset)}, 1"))


def _wait_group(k: Kernel, instr: Instr, everything: bool) -> None:
    k.change()
    if everything:
        k.runtime("rt_copy_flush", "4294967295")
        return
    operand = instr.operands[0]
    if not isinstance(operand, Imm):
        raise Unsupported(instr, "operand")
    limit = k.let(f"sub i64 {k.field('%t', L.T_COMMITTED)}, {operand.value}")
    k.runtime("rt_copy_flush", limit)


def _copy(k: Kernel, instr: Instr, m: Mods) -> None:
    m.need("ca", "cg")
    m.need(*SHARED_SPACES)
    m.need("global")
    m.prefix(*HINT_PREFIXES)
    m.end()
    ops = instr.operands
    size = ops[2]
    if not isinstance(size, Imm) or size.value not in (4, 8, 16):
        raise Unsupported(instr, "size")
    dst = address(k, ops[0], instr, L.SHARED)
    src = address(k, ops[1], instr, L.GLOBAL)
    used = str(size.value)
    hinted = any(p.startswith("L2::cache_hint") for p in instr.parts)
    if len(ops) - hinted > 3:
        third = ops[3]
        if (
            isinstance(third, Not)
            or isinstance(third, Reg)
            and k.entry.regs.get(third.name) == "pred"
        ):
            used = k.let(f"select i1 {k.flag(third, instr)}, i64 0, i64 {size.value}")
        else:
            used = k.resize(k.word(third, 32, instr), 32, 64)
    k.change()
    k.check(k.runtime("rt_copy", str(k.site(instr)), dst, src, str(size.value), used))


def _copy_arrive(k: Kernel, instr: Instr, m: Mods) -> None:
    """All earlier copies of the thread, then an arrival. Without .noinc the arrival is extra: it changes no count."""
    m.need("arrive")
    noinc = m.take("noinc")
    m.drop(*SHARED_SPACES)
    m.need("b64")
    m.end()
    k.change()
    k.runtime("rt_copy_flush", "4294967295")
    if noinc:
        addr = address(k, instr.operands[0], instr, L.SHARED)
        k.runtime("rt_mbar", str(k.site(instr)), addr, str(M.M_ARRIVE), "1")
        k.check_status()


def _bulk(k: Kernel, instr: Instr, m: Mods, reduces: bool) -> None:
    if m.take("commit_group"):
        m.end()
        _bump(k, L.T_BCOMMITTED)
        return
    if m.take("wait_group"):
        m.drop("read")
        m.end()
        operand = instr.operands[0]
        if not isinstance(operand, Imm):
            raise Unsupported(instr, "operand")
        k.change()
        k.runtime("rt_bulk_wait", str(operand.value))
        return
    if m.take("prefetch"):
        return
    hint = m.take("L2::cache_hint")
    multicast = m.take("multicast::cluster")
    barrier = m.take("mbarrier::complete_tx::bytes")
    group = m.take("bulk_group")
    spaces = [p for p in m.rest if p in (*SHARED_SPACES, "global")]
    m.drop(*SHARED_SPACES, "global")
    kind = _reduction(instr, m) if reduces else 0
    m.end()
    ops = list(instr.operands)
    if hint:
        ops.pop()
    if len(spaces) != 2 or barrier == group:
        raise Unsupported(instr, "form")
    k.change()
    if group:
        if spaces[0] != "global" or multicast:
            raise Unsupported(instr, "form")
        way = C.K_REDUCE | kind << 4 if reduces else C.K_OUT
        args = (
            address(k, ops[0], instr, L.GENERIC),
            address(k, ops[1], instr, L.SHARED),
            _size(k, instr, ops[2]),
            "0",
        )
        k.check(k.runtime("rt_bulk", str(k.site(instr)), str(way), *args))
        return
    if reduces or spaces[0] == "global":
        raise Unsupported(instr, "form")
    way = C.K_IN if spaces[1] == "global" else C.K_SHARED
    source = L.GENERIC if way == C.K_IN else L.SHARED
    dst, src = address(k, ops[0], instr, L.SHARED), address(k, ops[1], instr, source)
    size, bar = _size(k, instr, ops[2]), address(k, ops[3], instr, L.SHARED)
    if multicast:
        mask = k.resize(k.word(ops[4], 16, instr), 16, 64)
        k.check(k.runtime("rt_multicast", str(k.site(instr)), str(way), dst, src, size, bar, mask))
        return
    k.check(k.runtime("rt_bulk", str(k.site(instr)), str(way), dst, src, size, bar))


def _size(k: Kernel, instr: Instr, op: Operand) -> str:
    return k.resize(k.word(op, 32, instr), 32, 64)


def _reduction(instr: Instr, m: Mods) -> int:
    kinds = {"u32": R.Y_U32, "b32": R.Y_U32, "s32": R.Y_S32, "u64": R.Y_U64, "b64": R.Y_U64, "s64": R.Y_S64, 
             "f16": R.Y_F16,
             "bf16": R.Y_BF16, "f32": R.Y_F32, "f64": R.Y_F64}  # fmt: skip
    ops = {"add": R.R_ADD, "min": R.R_MIN, "max": R.R_MAX, "and": R.R_AND, "or": R.R_OR, "xor": R.R_XOR, "inc": R.R_INC,
           "dec": R.R_DEC}  # fmt: skip
    m.drop("noftz")
    kind, op = m.kind(), m.need(*ops)
    if kind not in kinds or kind in ("f32", "f64") and op != "add":
        raise Unsupported(instr, "form")
    return kinds[kind] | ops[op] << 4


def store_async(k: Kernel, instr: Instr) -> None:
    """st.async: a store to the cluster that completes bytes of an mbarrier; done at once."""
    m = Mods(instr)
    kind = m.kind()
    m.need("async")
    m.drop("weak")
    count = vector_of(m)
    m.need("mbarrier::complete_tx::bytes")
    m.drop("shared::cluster")
    m.end()
    bits = BITS.get(kind, 0)
    if bits not in (32, 64):
        raise Unsupported(instr, f"type .{kind}")
    values = [k.word(v, bits, instr) for v in elements(instr.operands[1], count, instr)]
    size = bits // 8 * count
    where = locate(
        k, instr, address(k, instr.operands[0], instr, L.SHARED), Access(L.SHARED, size, L.STORE)
    )
    for i, value in enumerate(values):
        k.do(f"store i{bits} {value}, ptr {k.at(where, i * bits // 8)}, align {bits // 8}")
    bar = address(k, instr.operands[2], instr, L.SHARED)
    k.change()
    k.runtime("rt_mbar", str(k.site(instr)), bar, str(M.M_COMPLETE), str(size))
    k.check_status()


@lowers("mbarrier", "mbarrier.{init,inval,arrive,arrive_drop,arrive.expect_tx,expect_tx,complete_tx,test_wait,try_wait,"
                    "pending_count}{.parity}, of the own block and of the cluster")  # fmt: skip
def mbarrier(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    m.drop("acquire", "release", "relaxed", *SCOPES, *SHARED_SPACES)
    m.need("b64")
    what = m.need(
        "init",
        "inval",
        "arrive_drop",
        "arrive",
        "expect_tx",
        "complete_tx",
        "test_wait",
        "try_wait",
        "pending_count",
    )
    if what in ("test_wait", "try_wait"):
        parity = m.take("parity")
        m.end()
        _wait(k, instr, parity)
        return
    if what == "pending_count":
        m.end()
        state = k.word(instr.operands[1], 64, instr)
        k.write(instr.operands[0], 32, k.resize(k.let(f"and i64 {state}, 1048575"), 64, 32), instr)
        return
    both = what.startswith("arrive") and m.take("expect_tx")
    m.drop("noComplete")
    m.end()
    _operate(k, instr, what, both)


def _operate(k: Kernel, instr: Instr, what: str, both: bool) -> None:
    ops = list(instr.operands)
    dest = ops.pop(0) if has_result(instr) else None
    addr = address(k, ops[0], instr, L.SHARED)
    count = k.resize(k.word(ops[1], 32, instr), 32, 64) if len(ops) > 1 else "1"
    code = {"init": M.M_INIT, "inval": M.M_INVAL, "arrive": M.M_ARRIVE, "arrive_drop": M.M_DROP, 
            "expect_tx": M.M_EXPECT,
            "complete_tx": M.M_COMPLETE}[what]  # fmt: skip
    if both:
        code = M.M_ARRIVE_EXPECT if what == "arrive" else M.M_DROP_EXPECT
        count = k.let(f"or i64 {count}, 4294967296")
    k.change()
    state = k.runtime("rt_mbar", str(k.site(instr)), addr, str(code), count)
    k.check_status()
    if dest is not None:
        k.write(dest, 64, state, instr)


def _wait(k: Kernel, instr: Instr, parity: bool) -> None:
    """Test once; if the phase is not complete, wait until it is or nothing else can run, and test again."""
    done, addr = instr.operands[0], address(k, instr.operands[1], instr, L.SHARED)
    slot = L.T_FRAME + k.scratch(16)
    if parity:
        phase = k.resize(k.word(instr.operands[2], 32, instr), 32, 64)
    else:
        phase = k.let(f"lshr i64 {k.word(instr.operands[2], 64, instr)}, 63")
    k.put("%t", slot, addr)
    k.put("%t", slot + 8, phase)
    site = str(k.site(instr))
    first = k.let(f"icmp ne i64 {k.runtime('rt_mbar_test', site, addr, phase)}, 0")
    k.check_status()
    k.write(done, 1, first, instr)
    wait, join = k.fresh("wait"), k.fresh("tested")
    k.split(first, join, wait)
    k.place(wait)
    k.suspend(instr, L.MBAR, k.survivors(instr), certain=False)
    again = k.runtime("rt_mbar_test", site, k.field("%t", slot), k.field("%t", slot + 8))
    k.check_status()
    k.write(done, 1, k.let(f"icmp ne i64 {again}, 0"), instr)
    k.go(join)
    k.place(join)
