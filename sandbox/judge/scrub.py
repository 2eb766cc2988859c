"""Noise into the shared memory of every SM (cuda): nothing clears it between launches, so a kernel could leave words
there and find them again, which no workspace shows. Local memory and registers keep what was in them, too; they are not
reached here.
"""

from __future__ import annotations

from typing import Any

from sandbox.artifact import Launch
from sandbox.devices.cuda_plan import ParamBlock

THREADS = 1024
PTX = """\
.version 8.8
.target {arch}
.address_size 64
.extern .shared .align 16 .b8 scrub_room[];
.visible .entry kernelgen_scrub(.param .u32 scrub_bytes, .param .u32 scrub_seed)
.reqntid 1024, 1, 1
{{
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    ld.param.u32 %r1, [scrub_bytes];
    ld.param.u32 %r2, [scrub_seed];
    mov.u32 %r3, %tid.x;
    shl.b32 %r4, %r3, 2;
    mov.u32 %r5, scrub_room;
AGAIN:
    setp.ge.u32 %p1, %r4, %r1;
    @%p1 bra DONE;
    add.u32 %r6, %r5, %r4;
    mad.lo.u32 %r7, %r4, -1640531535, %r2;
    st.shared.b32 [%r6], %r7;
    add.u32 %r4, %r4, 4096;
    bra AGAIN;
DONE:
    ret;
}}
"""


class Scrubber:
    """One block an SM, as it takes all of an SM's shared memory."""

    def __init__(self, device: Any) -> None:
        from sandbox.assemble import assemble

        facts = device.facts()
        self.device, self.driver = device, device.driver
        self.sms, self.room = facts.sms, int(facts.smem_optin_bytes)
        module = self.driver.load(assemble(PTX.format(arch=facts.arch), facts.arch).cubin)
        self.kernel = self.driver.kernel(module, "kernelgen_scrub")
        self.driver.allow(self.kernel, self.room, 1)

    def scrub(self, seed: int) -> None:
        """Enqueue on the device's stream."""
        words = self.room.to_bytes(4, "little") + (seed & 0xFFFFFFFF).to_bytes(4, "little")
        launch = Launch(
            "kernelgen_scrub", (self.sms, 1, 1), (THREADS, 1, 1), bytes(8), (0, 4), (), smem=self.room
        )  # fmt: skip
        params = ParamBlock(words, (0, 4))
        self.driver.launch(
            [self.driver.call(self.kernel, launch, params, self.device.stream, pdl=False)]
        )
