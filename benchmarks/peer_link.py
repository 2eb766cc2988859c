"""The link itself: a flag to the other GPU and back, graph launches on both together."""

from __future__ import annotations

import argparse
import time
from statistics import median

from peer_common import REPEATS, say

_PING = """\
.version 8.8
.target sm_90a
.address_size 64
.visible .entry ping(.param .u64 mine, .param .u64 theirs, .param .u32 first, .param .u32 rounds)
.reqntid 32, 1, 1
{
    .reg .pred %p<5>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [mine];
    ld.param.u64 %rd2, [theirs];
    ld.param.u32 %r1, [first];
    ld.param.u32 %r2, [rounds];
    mov.u32 %r3, 1;
    mov.u32 %r6, %tid.x;
    setp.ne.u32 %p1, %r6, 0;
    @%p1 bra DONE;
    setp.eq.u32 %p2, %r1, 0;
ROUND:
    @%p2 bra WAIT;
    st.relaxed.sys.global.u32 [%rd2], %r3;
WAIT:
    mov.u32 %r5, 0;
SPIN:
    ld.relaxed.sys.global.u32 %r4, [%rd1];
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p3, %r4, %r3;
    setp.lt.and.u32 %p3, %r5, 4000000, %p3;
    @%p3 bra SPIN;
    @!%p2 bra NEXT;
    st.relaxed.sys.global.u32 [%rd2], %r3;
NEXT:
    add.u32 %r3, %r3, 1;
    setp.le.u32 %p4, %r3, %r2;
    @%p4 bra ROUND;
DONE:
    ret;
}
"""


def latency(options: argparse.Namespace) -> None:
    """A flag to the other GPU and back; graph launches on both together."""
    import torch

    from sandbox.artifact import Launch as PlanLaunch
    from sandbox.assemble import assemble
    from sandbox.devices.cuda_plan import ParamBlock
    from sandbox.devices.cuda_ranks import CudaRanks

    device = CudaRanks.open(2)
    device.hang_s = 5.0
    cubin, flags, kernels = assemble(_PING, "sm_90a").cubin, [], []
    for rank in range(2):
        flags.append(torch.zeros(32, dtype=torch.int32, device=f"cuda:{rank}"))
        with device.contexts[rank].current():
            driver = device.devices[rank].driver
            kernels.append(driver.kernel(driver.load(cubin), "ping"))
    launch = PlanLaunch("ping", (1, 1, 1), (32, 1, 1), bytes(24), (0, 8, 16, 20), ())

    def ping(rounds: int) -> None:
        for rank in range(2):
            mine, theirs = flags[rank].data_ptr(), flags[1 - rank].data_ptr()
            data = b"".join(
                v.to_bytes(n, "little")
                for v, n in ((mine, 8), (theirs, 8), (1 - rank, 4), (rounds, 4))
            )
            one = device.devices[rank]
            with device.contexts[rank].current():
                call = one.driver.call(
                    kernels[rank], launch, ParamBlock(data, (0, 8, 16, 20)), one.stream, pdl=False
                )
                one.driver.launch([call])

    for rounds in (1, 100, 1000):
        found = []
        for _ in range(REPEATS):
            for flag in flags:
                flag.zero_()
            device.synchronize()
            found.append(device.time(lambda n=rounds: ping(n)))
        ok = int(flags[0][0]) == int(flags[1][0]) == rounds
        say(
            what="ping-pong",
            rounds=rounds,
            us=median(found),
            one_way_us=median(found) / rounds / 2,
            ok=ok,
        )
    say(
        what="empty",
        us=median(device.time(lambda: None) for _ in range(REPEATS)),
        apart=device.apart(),
    )
    graph = device.record(lambda: [f.zero_() for f in flags] and None, 1)  # type: ignore[func-returns-value]
    graph.launch()
    say(
        what="graph of a memset",
        us=median(device.time(graph.launch) for _ in range(REPEATS)),
        apart=device.apart(),
    )
    begin = time.perf_counter()
    for _ in range(100):
        graph.launch()
    say(what="host, graphs of both", us=(time.perf_counter() - begin) * 1e4)
