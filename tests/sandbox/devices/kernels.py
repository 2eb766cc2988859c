"""Small PTX kernels for the CUDA device: one parameter x (inputs.x), one y (outputs.y), a length. Some misbehave."""

from __future__ import annotations

from dataclasses import replace

from sandbox import canary
from sandbox.artifact import Artifact, Launch, LaunchPlan

HEADER = """\
.version 8.8
.target {arch}
.address_size 64

.extern .shared .align 16 .b8 dynamic[];

.visible .entry {name}(
    .param .u64 x_ptr,
    .param .u64 y_ptr,
    .param .u32 count
)
{{
    .reg .pred %p<4>;
    .reg .b32 %r<16>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [x_ptr];
    ld.param.u64 %rd2, [y_ptr];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    mul.wide.u32 %rd3, %r5, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    setp.lt.u32 %p1, %r5, %r1;
"""
DOUBLE = """
    @%p1 ld.global.f32 %f1, [%rd4];
    @%p1 fma.rn.f32 %f2, %f1, 0f40000000, 0f3F800000;
    @%p1 st.global.f32 [%rd5], %f2;
    ret;
}}
"""
# y = 2y + 1 after waiting for the launch before: wrong if the wait is not honoured.
CHAINED = """
    griddepcontrol.wait;
    @%p1 ld.global.f32 %f1, [%rd5];
    @%p1 fma.rn.f32 %f2, %f1, 0f40000000, 0f3F800000;
    @%p1 st.global.f32 [%rd5], %f2;
    griddepcontrol.launch_dependents;
    ret;
}}
"""
# Each block reads a word of its neighbour in the cluster: y[i] = rank of the other block.
CLUSTER = """
    mov.u32 %r6, %cluster_ctarank;
    st.shared.u32 [dynamic], %r6;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    xor.b32 %r7, %r6, 1;
    mov.u32 %r8, dynamic;
    mapa.shared::cluster.u32 %r9, %r8, %r7;
    ld.shared::cluster.u32 %r10, [%r9];
    cvt.rn.f32.u32 %f1, %r10;
    @%p1 st.global.f32 [%rd5], %f1;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    ret;
}}
"""
WILD_STORE = """
    mov.u64 %rd6, 8;
    st.global.f32 [%rd6], 0f3F800000;
    ret;
}}
"""
MISALIGNED = """
    add.s64 %rd6, %rd5, 1;
    ld.global.f32 %f1, [%rd6];
    st.global.f32 [%rd5], %f1;
    ret;
}}
"""
ENDLESS = """
$AGAIN:
    ld.volatile.global.f32 %f1, [%rd4];
    setp.neu.f32 %p2, %f1, 0fFF800000;
    @%p2 bra $AGAIN;
    ret;
}}
"""
PRINTS = """
    {{
        .param .b64 format;
        .param .b64 values;
        .param .b32 done;
        st.param.b64 [format], %rd1;
        st.param.b64 [values], %rd2;
        call.uni (done), vprintf, (format, values);
    }}
    ret;
}}
"""
COUNTS = """
    ld.global.u32 %r6, [state];
    add.u32 %r6, %r6, 1;
    st.global.u32 [state], %r6;
    ret;
}}
"""


def kernel(body: str, name: str = "k", arch: str = "sm_90a") -> str:
    return (HEADER + body).format(arch=arch, name=name)


def artifact(body: str, elements: int, launches: tuple[Launch, ...] | None = None) -> Artifact:
    """An artifact of one kernel `k`, launched once over `elements` unless told otherwise."""
    one = canary.artifact("sm_90a", elements)
    launch = replace(one.step.launches[0], kernel="k")
    return replace(one, step=LaunchPlan(kernel(body), launches or (launch,)))


def launch(elements: int) -> Launch:
    """The plain launch that `artifact` uses, to be varied."""
    return replace(canary.artifact("sm_90a", elements).step.launches[0], kernel="k")
