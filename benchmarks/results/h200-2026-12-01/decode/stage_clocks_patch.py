"""Clocks into a decode candidate: producer before and behind its waits, consumers before and behind theirs.

    python stage_clocks_patch.py CANDIDATE.py OUT.py
"""
import sys
src,out=sys.argv[1:3]
s=open(src).read()
rec='''
@cute.jit
def clocked(c: Ctx, it: Int32, k: cutlass.Constexpr):
    if it < 1024:
        t = Uint32(cute.arch.clock())
        a = (c.sync + 128).toint() + Int64((c.cta * 1024 + it) * 8 + k) * 4
        cute.arch.inline_ptx("st.relaxed.gpu.global.b32 [{$r0}], {$r1};", read_only_args=[a, t])

@cute.jit
def stage_free('''
assert s.count("@cute.jit\ndef stage_free(")==1
s=s.replace("@cute.jit\ndef stage_free(", rec.lstrip("\n"))
a="    near, turn = at_hand(before % op.stages)"
assert s.count(a)==1
s=s.replace(a,"    clocked(c, it, 0)\n"+a)
a="        cute.arch.mbarrier_wait(c.empty + slot, (it // op.stages - 1) & 1)\n"
assert s.count(a)==1
s=s.replace(a,a+"    clocked(c, it, 1)\n")
i=s.index("@cute.jit\ndef stage_free("); j=s.index("    return slot\n",i)
s=s[:j]+"    clocked(c, it, 2)\n"+s[j:]
a="    slot = it % op.stages\n    cute.arch.mbarrier_wait(c.full + slot, (it // op.stages) & 1)\n    return slot\n"
assert s.count(a)==1
s=s.replace(a,"    slot = it % op.stages\n    if c.tid == 0:\n        clocked(c, it, 3)\n    cute.arch.mbarrier_wait(c.full + slot, (it // op.stages) & 1)\n    if c.tid == 0:\n        clocked(c, it, 4)\n    return slot\n")
a='"sync": ("i32", (128,)'; assert s.count(a)==1
s=s.replace(a,'"sync": ("i32", (128 + 132 * 8192,)')
open(out,'w').write(s)
