"""Two ranks that hand each other a number, as an artifact: for tests of devices and of the contract. No tests here."""

from __future__ import annotations

from dataclasses import replace

from sandbox.artifact import Artifact, Buffer, Launch, LaunchPlan, Relocation, on_rank

PTX = """\
.version 8.8
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 own, .param .u64 peer, .param .u64 x, .param .u64 y, .param .u32 wanted)
.reqntid 32, 1, 1
{
    .reg .pred %p<3>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<6>;
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra DONE;
    ld.param.u64 %rd1, [own];
    ld.param.u64 %rd2, [peer];
    ld.param.u64 %rd3, [x];
    ld.param.u64 %rd4, [y];
    ld.param.u32 %r2, [wanted];
    ld.global.u32 %r3, [%rd3];
    st.relaxed.sys.global.u32 [%rd2], %r3;
SPIN:
    ld.relaxed.sys.global.u32 %r4, [%rd1];
    setp.ne.u32 %p2, %r4, %r2;
    @%p2 bra SPIN;
    st.global.u32 [%rd4], %r4;
DONE:
    ret;
}
"""
"""y = what the other rank stored into the own mailbox, once it is `wanted`; before, x goes into the other's."""


def artifact(wanted: tuple[int, int] = (11, 10)) -> Artifact:
    """Rank r waits for `wanted[r]`; with x = 10 on rank 0 and 11 on rank 1 both end."""
    buffers, launches = [], []
    for rank in range(2):
        buffers += [
            Buffer(on_rank("inputs.x", rank), "i32", (1,)), Buffer(on_rank("outputs.y", rank), "i32", (1,)),
            Buffer(on_rank("workspace.mail", rank), "i32", (1,), 128, "zero", "persistent"),
        ]  # fmt: skip
        named = (
            on_rank("workspace.mail", rank), on_rank("workspace.mail", 1 - rank), on_rank("inputs.x", rank),
            on_rank("outputs.y", rank),
        )  # fmt: skip
        relocations = tuple(Relocation(8 * i, n) for i, n in enumerate(named))
        params = bytes(32) + wanted[rank].to_bytes(4, "little")
        launches.append(
            Launch("k", (1, 1, 1), (32, 1, 1), params, (0, 8, 16, 24, 32), relocations, rank=rank)
        )
    return Artifact(
        "pair",
        {},
        "sm_90a",
        tuple(buffers),
        LaunchPlan(PTX, tuple(launches)),
        source_sha256="0" * 64,
    )


def reaching(buffer: str) -> Artifact:
    """Rank 0 names that buffer where the other's mailbox belongs."""
    whole = artifact()
    first, second = whole.step.launches
    own, _, *rest = first.relocations
    odd = replace(first, relocations=(own, Relocation(8, buffer), *rest))
    return replace(whole, step=LaunchPlan(PTX, (odd, second)))
