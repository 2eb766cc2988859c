"""Lowering of control flow and of everything threads of a block wait at: branches, exits, barriers, fences.

A branch back in the text takes from the thread's slice; a thread whose slice is used up yields, so that no
loop can keep others from running.
"""

from __future__ import annotations

from sandbox.devices.cpu import layout as L
from sandbox.devices.cpu.emit import Mods, Unsupported
from sandbox.devices.cpu.kernel import Kernel
from sandbox.devices.cpu.lower_warp import warp_sync
from sandbox.devices.cpu.ptx_ast import Instr, Not, Operand
from sandbox.devices.cpu.registry import lowers


def _edge(k: Kernel, target: int) -> str:
    """Label to branch to: the block itself, or code that takes from the slice first for a branch back."""
    if target > k.block.index:
        return f"bb{target}"
    return k.fresh("back")


def _back(k: Kernel, instr: Instr, label: str, target: int) -> None:
    """Place the code of a backward edge."""
    if label == f"bb{target}":
        return
    k.place(label)
    cost = sum(len(b.instrs) for b in k.graph.blocks[target : k.block.index + 1])
    fuel = k.let("load i32, ptr %fuel")
    left = k.let(f"sub i32 {fuel}, {max(1, cost)}")
    k.do(f"store i32 {left}, ptr %fuel")
    out = k.fresh("yield")
    k.split(k.let(f"icmp sge i32 {left}, 0"), f"bb{target}", out, likely=True)
    k.place(out)
    dirty = k.dirty
    k.dirty_all()
    k.suspend(instr, L.YIELD, k.graph.live_in[target], certain=False)
    k.dirty = dirty
    k.go(f"bb{target}")


@lowers("bra", "bra{.uni}")
def bra(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    m.drop("uni")
    m.end()
    target = k.graph.label[k.graph.branch_targets(instr)[0]]
    label = _edge(k, target)
    if instr.guard is None:
        k.go(label)
    else:
        guard = k.flag(Not(instr.guard) if instr.negated else instr.guard, instr)
        if k.block.next is None:
            raise Unsupported(instr, "falls off the end")
        k.split(guard, label, f"bb{k.block.next}")
    _back(k, instr, label, target)


@lowers("brx", "brx.idx{.uni}")
def brx(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    m.need("idx")
    m.drop("uni")
    m.end()
    if instr.guard is not None:
        raise Unsupported(instr, "with a guard")
    targets = [k.graph.label[n] for n in k.graph.branch_targets(instr)]
    index = k.word(instr.operands[0], 32, instr)
    labels = [_edge(k, t) for t in targets]
    bad = k.fresh("outside")
    k.do(f"switch i32 {index}, label %{bad} [")
    for i, label in enumerate(labels):
        k.do(f"  i32 {i}, label %{label}")
    k.do("]")
    for label, target in zip(labels, targets, strict=True):
        _back(k, instr, label, target)
    k.place(bad)
    k.runtime("rt_fault", str(L.F_TRAP), str(k.site(instr)), "0", "0")
    k.go("fault")


@lowers("ret", "ret{.uni}")
@lowers("exit", "exit")
def leave(k: Kernel, instr: Instr) -> None:
    k.finish()
    if instr.guard is not None:
        k.place(k.fresh("dead"))


@lowers("trap", "trap")
@lowers("brkpt", "brkpt")
def trap(k: Kernel, instr: Instr) -> None:
    k.runtime("rt_fault", str(L.F_TRAP), str(k.site(instr)), "0", "0")
    k.go("fault")
    if instr.guard is not None or instr.parts[0] == "brkpt":
        k.place(k.fresh("dead"))


def _bar_count(k: Kernel, instr: Instr, op: Operand | None) -> str:
    return "-1" if op is None else k.resize(k.word(op, 32, instr), 32, 64)


@lowers("bar", "bar.{sync,arrive,red.{popc.u32,and.pred,or.pred},warp.sync}")
@lowers("barrier", "barrier{.cta}.{sync,arrive,red...}{.aligned}, barrier.cluster.{arrive,wait}")
def bar(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    if m.take("cluster"):
        _cluster(k, instr, m)
        return
    if m.take("warp"):
        m.need("sync")
        m.end()
        warp_sync(k, instr)
        return
    what = m.need("sync", "arrive", "red")
    m.drop("cta", "aligned")
    ops = list(instr.operands)
    if what == "red":
        _bar_red(k, instr, m, ops)
        return
    m.end()
    number = k.resize(k.word(ops[0], 32, instr), 32, 64)
    count = _bar_count(k, instr, ops[1] if len(ops) > 1 else None)
    if what == "arrive":
        k.change()
        k.check(k.runtime("rt_bar_arrive", str(k.site(instr)), number, count))
        return
    k.put("%t", L.T_A, number)
    k.put("%t", L.T_B, count)
    k.suspend(instr, L.BAR, k.survivors(instr), certain=True)


def _bar_red(k: Kernel, instr: Instr, m: Mods, ops: list[Operand]) -> None:
    how = m.need("popc", "and", "or")
    m.drop("u32", "pred")
    m.end()
    k.put("%t", L.T_A, k.resize(k.word(ops[1], 32, instr), 32, 64))
    k.put("%t", L.T_B, _bar_count(k, instr, ops[2] if len(ops) > 3 else None))
    k.put("%t", L.T_X, k.let(f"zext i1 {k.flag(ops[-1], instr)} to i64"))
    k.suspend(instr, L.BAR, k.survivors(instr), certain=True)
    votes = k.field("%t", L.T_X + 24)
    if how == "popc":
        k.write(ops[0], 32, k.resize(votes, 64, 32), instr)
    elif how == "or":
        k.write(ops[0], 1, k.let(f"icmp ne i64 {votes}, 0"), instr)
    else:
        k.write(ops[0], 1, k.let(f"icmp ne i64 {k.field('%t', L.T_X + 32)}, 0"), instr)


def _cluster(k: Kernel, instr: Instr, m: Mods) -> None:
    what = m.need("arrive", "wait")
    m.drop("release", "acquire", "relaxed", "aligned")
    m.end()
    if what == "arrive":
        k.change()
        k.runtime("rt_cluster_arrive")
        return
    k.suspend(instr, L.CLUSTER, k.survivors(instr), certain=True)


@lowers("membar", "membar.{cta,gl,sys}")
@lowers(
    "fence",
    "fence{.acq_rel,.sc,.acquire,.release}.{cta,cluster,gpu,sys}, fence.proxy..., fence.mbarrier_init...",
)
def fence(k: Kernel, instr: Instr) -> None:
    m = Mods(instr)
    m.drop(
        "cta", "cluster", "gpu", "sys", "gl", "acq_rel", "sc", "acquire", "release", "mbarrier_init"
    )
    m.drop(
        "proxy",
        "async",
        "async::generic",
        "alias",
        "global",
        "shared::cta",
        "shared::cluster",
        "sync_restrict::shared::cta",
    )
    m.drop(
        "async.shared::cta",
        "async.global",
        "tensormap::generic",
        "generic::tensormap",
        "sync_restrict::shared::cluster",
    )
    m.end()
    if k.options.exact:
        k.runtime("rt_race_fence")


@lowers("griddepcontrol", "griddepcontrol.{launch_dependents,wait}")
@lowers("setmaxnreg", "setmaxnreg.{inc,dec}.sync.aligned.u32")
@lowers("nanosleep", "nanosleep.u32")
@lowers("prefetch", "prefetch...")
@lowers("prefetchu", "prefetchu...")
@lowers("applypriority", "applypriority...")
@lowers("discard", "discard... (the data stay)")
@lowers("pmevent", "pmevent")
def nothing(k: Kernel, instr: Instr) -> None:
    """Hints: they change no value here."""
