"""The rate at which this GPU streams memory: a kernel of our own that reads a buffer far larger than L2, timed.

What measured floors are fractions of. It reads only; kernels that also write reach a little less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from sandbox.artifact import Artifact, Buffer, Launch, LaunchPlan, Relocation
from sandbox.devices.base import Program
from sandbox.devices.cuda import CudaDevice
from sandbox.devices.cuda_facts import plausible, store_stream_rate
from sandbox.devices.cuda_timing import Stopwatch

BLOCK = 512
BLOCKS_PER_SM = 2
UNROLL = 8  # 16-byte loads in flight in each thread: 128 KB an SM
TOTAL_BYTES = 4 << 30
REPEATS = 20
ROUNDS = 10
"""Of so many reads until one is steady: a card that was idle takes some milliseconds to raise its clocks."""
STEADY = 1.05

_HEAD = """\
.version 8.8
.target {arch}
.address_size 64

.visible .entry stream_read(
    .param .u64 stream_x,
    .param .u64 stream_y,
    .param .u32 stream_n
)
.reqntid {block}, 1, 1
{{
    .reg .pred %p<2>;
    .reg .b32 %r<64>;
    .reg .b64 %rd<8>;

    ld.param.u64 %rd1, [stream_x];
    ld.param.u64 %rd2, [stream_y];
    ld.param.u32 %r1, [stream_n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.s32 %r4, %r2, {block}, %r3;
    mul.wide.u32 %rd3, %r4, 16;
    add.s64 %rd4, %rd1, %rd3;
    mul.wide.u32 %rd5, %r4, 4;
    add.s64 %rd6, %rd2, %rd5;
    mov.u32 %r5, 0;
    mov.u32 %r6, 0;
$NEXT:
"""
_TAIL = """\
    add.s64 %rd4, %rd4, {step};
    add.s32 %r6, %r6, 1;
    setp.lt.u32 %p1, %r6, %r1;
    @%p1 bra $NEXT;
    st.global.u32 [%rd6], %r5;
    ret;
}}
"""


@dataclass(frozen=True)
class Shape:
    """`blocks` read `rounds` times; every thread has UNROLL loads of 16 bytes a round."""

    blocks: int
    rounds: int

    @property
    def stride(self) -> int:
        """Bytes that all threads read with one load each."""
        return self.blocks * BLOCK * 16

    @property
    def bytes(self) -> int:
        return self.stride * UNROLL * self.rounds


def shape_of(sms: int, total: int = TOTAL_BYTES) -> Shape:
    one = Shape(sms * BLOCKS_PER_SM, 1)
    return replace(one, rounds=max(1, total // one.bytes))


def artifact(arch: str, shape: Shape) -> Artifact:
    """The reader as an artifact: outputs.y has the exclusive or of all words that a thread read."""
    lines = []
    for u in range(UNROLL):
        registers = ", ".join(f"%r{10 + 4 * u + i}" for i in range(4))
        lines.append(f"    ld.global.nc.v4.u32 {{{registers}}}, [%rd4+{u * shape.stride}];\n")
    words = [f"%r{10 + i}" for i in range(4 * UNROLL)]
    lines += [f"    xor.b32 %r5, %r5, {w};\n" for w in words]
    text = {"arch": arch, "block": BLOCK, "step": shape.stride * UNROLL}
    ptx = _HEAD.format(**text) + "".join(lines) + _TAIL.format(**text)
    launch = Launch(
        kernel="stream_read",
        grid=(shape.blocks, 1, 1),
        block=(BLOCK, 1, 1),
        params=bytes(16) + shape.rounds.to_bytes(4, "little"),
        param_offsets=(0, 8, 16),
        relocations=(Relocation(0, "inputs.x"), Relocation(8, "outputs.y")),
    )
    return Artifact(
        target="stream-rate",
        workload={"bytes": shape.bytes},
        arch=arch,
        buffers=(
            Buffer("inputs.x", "u32", (shape.bytes // 4,), align=16),
            Buffer("outputs.y", "u32", (shape.blocks * BLOCK,), align=16),
        ),
        step=LaunchPlan(ptx, (launch,)),
        source_sha256="0" * 64,
    )


def measure(device: CudaDevice) -> float:
    """Bytes per second of the fastest of some reads. Raises Refused, Faulted, torch.OutOfMemoryError."""
    size, times = _reads(device)
    return size / (min(times) * 1e-6)


def steady(times: Sequence[float]) -> bool:
    """Whether these reads had the card to themselves: half of them take about as long as the fastest. Beside other
    work on the card even the fastest is slow, and every share of the floor would look better than it is."""
    return median(times) <= STEADY * min(times)


def settled(round_of_reads: Callable[[], list[float]]) -> list[float]:
    """The first round that is steady, else the last."""
    for _ in range(ROUNDS):
        times = round_of_reads()
        if steady(times):
            break
    return times


def _reads(device: CudaDevice) -> tuple[int, list[float]]:
    """Bytes of a read, and the microseconds that each of some took. Raises as `measure`."""
    import torch

    facts = device.facts()
    shape = shape_of(facts.sms)
    program: Program = device.load(artifact(facts.arch, shape))
    x = torch.zeros(shape.bytes // 4, dtype=torch.int32, device=device.torch_device)
    y = torch.empty(shape.blocks * BLOCK, dtype=torch.int32, device=device.torch_device)
    bound = program.bind("step", {"inputs.x": x, "outputs.y": y})
    watch = Stopwatch(device)

    def round_of_reads() -> list[float]:
        times = []
        for _ in range(REPEATS):
            watch.start()
            bound.launch()
            watch.stop()
            device.synchronize()
            times.append(watch.us())
        return times

    return shape.bytes, settled(round_of_reads)


def remember(device: CudaDevice) -> float | None:
    """The stored rate of this card, measured and stored first if there is none; None where that cannot be done, or
    while others use the card: it reads far less than it is specified for, or now this and now that."""
    import torch

    known = device.facts().stream_rate
    if known is not None or device.state is None or device.torch_stream is None:
        return known
    try:
        size, times = _reads(device)
    except torch.OutOfMemoryError:
        return None
    rate = size / (min(times) * 1e-6)
    if not steady(times) or not plausible(rate, device.facts().spec_rate):
        return None
    store_stream_rate(device.state, device.facts(), rate)
    device.forget_facts()
    return rate
