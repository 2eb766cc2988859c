"""Small PTX kernels whose time is a property of the device. Text only; spins are bounded, so that a fault ends."""

from __future__ import annotations

from dataclasses import dataclass

from sandbox.artifact import Artifact, Buffer, Launch, LaunchPlan, Relocation

SPINS = 1 << 20
BARRIER_THREADS = 128
L2_THREADS, L2_UNROLL = 512, 8
LINE = 128
PING_WORDS = 2 * LINE // 4
BULK_THREADS, BULK_STAGES, BULK_BYTES = 32, 4, 8192
BULK_BLOCKS_PER_SM = 6
"""192 KB of copies on their way in each SM."""

_HEAD = """\
.version 8.8
.target {arch}
.address_size 64

.visible .entry {name}(
    .param .u64 {name}_x,
    .param .u64 {name}_y,
    .param .u32 {name}_n
)
.reqntid {threads}, 1, 1
{{
    .reg .pred %p<8>;
    .reg .b32 %r<64>;
    .reg .b64 %rd<16>;

    ld.param.u64 %rd1, [{name}_x];
    ld.param.u64 %rd2, [{name}_y];
    ld.param.u32 %r1, [{name}_n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %tid.x;
"""
_EMPTY = "    ret;\n}}\n"
_EMPTY_PDL = "    griddepcontrol.wait;\n    griddepcontrol.launch_dependents;\n    ret;\n}}\n"
# y: the last count that each block saw, so that the loop has a result.
_BARRIER = """\
    mov.u32 %r4, %nctaid.x;
    mov.u32 %r5, 0;
    mov.u32 %r6, 0;
    mov.u32 %r7, 0;
$ROUND:
    add.u32 %r5, %r5, 1;
    add.u32 %r6, %r6, %r4;
    bar.sync 0;
    setp.ne.u32 %p1, %r3, 0;
    @%p1 bra $JOIN;
    red.release.gpu.global.add.u32 [%rd1], 1;
    mov.u32 %r8, 0;
$POLL:
    ld.acquire.gpu.global.u32 %r7, [%rd1];
    add.u32 %r8, %r8, 1;
    setp.ge.u32 %p2, %r7, %r6;
    @%p2 bra $JOIN;
    setp.lt.u32 %p3, %r8, {spins};
    @%p3 bra $POLL;
$JOIN:
    bar.sync 0;
    setp.lt.u32 %p4, %r5, %r1;
    @%p4 bra $ROUND;
    mul.wide.u32 %rd3, %r2, 4;
    add.s64 %rd4, %rd2, %rd3;
    @%p1 bra $END;
    st.global.u32 [%rd4], %r7;
$END:
    ret;
}}
"""
# Blocks 0 and 1 answer each other through two words on lines of their own.
_PING = """\
    mul.wide.u32 %rd3, %r2, {line};
    add.s64 %rd4, %rd1, %rd3;
    xor.b32 %r4, %r2, 1;
    mul.wide.u32 %rd5, %r4, {line};
    add.s64 %rd6, %rd1, %rd5;
    mov.u32 %r5, 0;
$ROUND:
    add.u32 %r5, %r5, 1;
    setp.eq.u32 %p1, %r2, 0;
    @!%p1 bra $WAIT;
    st.release.gpu.global.u32 [%rd4], %r5;
$WAIT:
    mov.u32 %r8, 0;
$POLL:
    ld.acquire.gpu.global.u32 %r7, [%rd6];
    add.u32 %r8, %r8, 1;
    setp.ge.u32 %p2, %r7, %r5;
    @%p2 bra $SEEN;
    setp.lt.u32 %p3, %r8, {spins};
    @%p3 bra $POLL;
$SEEN:
    @%p1 bra $NEXT;
    st.release.gpu.global.u32 [%rd4], %r5;
$NEXT:
    setp.lt.u32 %p4, %r5, %r1;
    @%p4 bra $ROUND;
    mul.wide.u32 %rd7, %r2, 4;
    add.s64 %rd8, %rd2, %rd7;
    st.global.u32 [%rd8], %r7;
    ret;
}}
"""
# Every round the blocks read the whole buffer, each another part than the round before, past L1.
_L2 = """\
    mad.lo.s32 %r4, %r2, {threads}, %r3;
    shl.b32 %r4, %r4, 4;
    mov.u32 %r5, 0;
    mov.u32 %r6, 0;
$ROUND:
{loads}    add.u32 %r6, %r6, 1;
    setp.lt.u32 %p1, %r6, %r1;
    @%p1 bra $ROUND;
    mad.lo.s32 %r7, %r2, {threads}, %r3;
    mul.wide.u32 %rd3, %r7, 4;
    add.s64 %rd4, %rd2, %rd3;
    st.global.u32 [%rd4], %r5;
    ret;
}}
"""
# Thread 0 asks for stages of a ring, block by block side by side; the warp reads a line of each that came.
_BULK = """\
    .shared .align 128 .b8 ring[{ring}];
    .shared .align 8 .b64 full[{stages}];
    mov.u32 %r4, full;
    mov.u32 %r5, ring;
    mov.u32 %r12, {stage};
    setp.ne.u32 %p1, %r3, 0;
    mul.wide.u32 %rd3, %r2, {stage};
    add.s64 %rd4, %rd1, %rd3;
    @%p1 bra $READY;
{inits}    fence.mbarrier_init.release.cluster;
{first}$READY:
    bar.sync 0;
    mov.u32 %r6, 0;
    mov.u32 %r9, 0;
$ROUND:
    and.b32 %r10, %r9, {mask};
    shl.b32 %r11, %r10, 3;
    add.u32 %r11, %r4, %r11;
    shr.u32 %r13, %r9, {shift};
    and.b32 %r13, %r13, 1;
    mov.u32 %r14, 0;
$POLL:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r11], %r13;
    @%p2 bra $FULL;
    add.u32 %r14, %r14, 1;
    setp.lt.u32 %p3, %r14, {spins};
    @%p3 bra $POLL;
    bra $END;
$FULL:
    mad.lo.u32 %r15, %r10, {stage}, %r5;
    mad.lo.u32 %r16, %r3, 4, %r15;
    ld.shared.u32 %r17, [%r16];
    xor.b32 %r6, %r6, %r17;
    bar.sync 0;
    add.u32 %r18, %r9, {stages};
    setp.ge.u32 %p4, %r18, %r1;
    or.pred %p4, %p4, %p1;
    @%p4 bra $NEXT;
    mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r11], %r12;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r15], [%rd4], %r12, [%r11];
    add.s64 %rd4, %rd4, {step};
$NEXT:
    add.u32 %r9, %r9, 1;
    setp.lt.u32 %p5, %r9, %r1;
    @%p5 bra $ROUND;
$END:
    mad.lo.s32 %r7, %r2, {threads}, %r3;
    mul.wide.u32 %rd6, %r7, 4;
    add.s64 %rd7, %rd2, %rd6;
    st.global.u32 [%rd7], %r6;
    ret;
}}
"""


@dataclass(frozen=True)
class Probe:
    """A kernel with its launch. `words` of x may be written: a state; y has a word for each thread or block."""

    name: str
    body: str
    grid: int
    threads: int
    n: int
    words: int
    out: int
    cooperative: bool = False
    pdl: bool = False
    count: int = 1


def empty(count: int, pdl: bool = False) -> Probe:
    """`count` launches that do nothing."""
    body = _EMPTY_PDL if pdl else _EMPTY
    return Probe("empty", body.format(), 1, 32, 0, 32, 32, pdl=pdl, count=count)


def barrier(blocks: int, rounds: int) -> Probe:
    """`rounds` barriers over the grid: a release add by each block, one poller a block. x[0] starts at 0."""
    body = _BARRIER.format(spins=SPINS)
    return Probe(
        "barrier", body, blocks, BARRIER_THREADS, rounds, LINE // 4, blocks, cooperative=True
    )


def ping(rounds: int) -> Probe:
    """`rounds` flags from block 0 to block 1 and as many back. x starts at 0."""
    body = _PING.format(spins=SPINS, line=LINE)
    return Probe("ping", body, 2, 1, rounds, PING_WORDS, 2, cooperative=True)


def l2_read(blocks: int, size: int, rounds: int) -> Probe:
    """Reads of a buffer of `size` bytes, a power of two, round after round."""
    stride = blocks * L2_THREADS * 16
    lines = []
    for u in range(L2_UNROLL):
        lines += [
            f"    and.b32 %r9, %r4, {size - 16};", "    cvt.u64.u32 %rd5, %r9;", "    add.s64 %rd6, %rd1, %rd5;",
            f"    ld.global.cg.v4.u32 {{{', '.join(f'%r{10 + 4 * u + i}' for i in range(4))}}}, [%rd6];",
            f"    add.u32 %r4, %r4, {stride};",
        ]  # fmt: skip
    lines += [f"    xor.b32 %r5, %r5, %r{10 + i};" for i in range(4 * L2_UNROLL)]
    # a block's share further: the next round meets other lines in the same SM
    lines += [f"    add.u32 %r4, %r4, {L2_THREADS * 16};"]
    body = _L2.format(threads=L2_THREADS, loads="\n".join(lines) + "\n")
    return Probe("l2_read", body, blocks, L2_THREADS, rounds, size // 4, blocks * L2_THREADS)


def l2_bytes(p: Probe) -> int:
    return p.grid * L2_THREADS * 16 * L2_UNROLL * p.n


def bulk_read(blocks: int, rounds: int) -> Probe:
    """Bulk copies of a buffer into shared memory, once: `rounds` stages a block, BULK_STAGES at least."""
    step = blocks * BULK_BYTES
    inits = [f"    mbarrier.init.shared.b64 [%r4+{8 * s}], 1;\n" for s in range(BULK_STAGES)]
    first = [
        f"    mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r4+{8 * s}], %r12;\n"
        f"    add.u32 %r15, %r5, {s * BULK_BYTES};\n"
        f"    add.u32 %r11, %r4, {8 * s};\n"
        "    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r15], [%rd4], %r12, [%r11];\n"
        f"    add.s64 %rd4, %rd4, {step};\n"
        for s in range(BULK_STAGES)
    ]
    body = _BULK.format(
        ring=BULK_STAGES * BULK_BYTES, stages=BULK_STAGES, stage=BULK_BYTES, mask=BULK_STAGES - 1,
        shift=BULK_STAGES.bit_length() - 1, spins=SPINS, step=step, threads=BULK_THREADS, inits="".join(inits),
        first="".join(first),
    )  # fmt: skip
    words = step * rounds // 4
    return Probe("bulk_read", body, blocks, BULK_THREADS, rounds, words, blocks * BULK_THREADS)


def artifact(p: Probe, arch: str) -> Artifact:
    head = _HEAD.format(arch=arch, name=p.name, threads=p.threads)
    launch = Launch(
        kernel=p.name, grid=(p.grid, 1, 1), block=(p.threads, 1, 1), params=bytes(16) + p.n.to_bytes(4, "little"),
        param_offsets=(0, 8, 16), relocations=(Relocation(0, "states.x"), Relocation(8, "outputs.y")),
        cooperative=p.cooperative, pdl=p.pdl,
    )  # fmt: skip
    return Artifact(
        target="roofline", workload={"probe": p.name}, arch=arch,
        buffers=(
            Buffer("states.x", "u32", (p.words,), align=16), Buffer("outputs.y", "u32", (p.out,), align=16),
        ),
        step=LaunchPlan(head + p.body, (launch,) * p.count), source_sha256="0" * 64,
    )  # fmt: skip
