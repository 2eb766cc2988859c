"""Pauses in PTX: where they go, that the assembler takes them, and that a kernel which depends on timing is found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from sandbox.artifact import LaunchPlan
from sandbox.devices.fake import FakeDevice, FakeProgram
from sandbox.jobs import JudgeJob
from sandbox.judge import judge
from sandbox.judge.delays import delayed
from sandbox.judge.tiers import FULL
from sandbox.verdict import Status, Tier
from tests.sandbox.judge import toy

PTX = """.version 8.8
.target sm_90a
.address_size 64

.visible .entry k(.param .u64 p)
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<5>;
	.reg .b64 	%rd<5>;
	.shared .align 8 .b64 full;

	ld.param.b64 	%rd1, [p];
	mov.u32 	%r1, %tid.x;
	setp.ne.b32 	%p1, %r1, 0;
	mov.b32 	%r3, full;
	@%p1 bra 	$L__BB0_2;
	mbarrier.init.shared.b64 	[%r3], 32;
$L__BB0_2:
	bar.sync 	0;
	@!%p1 red.global.add.u32 	[%rd1], %r1;
	ld.acquire.gpu.global.b32 	%r2, [%rd1];
	st.global.b32 	[%rd1], %r2;
	st.release.gpu.global.b32 	[%rd1+4], %r2;
	ret;
}
"""


def test_pauses_come_before_synchronising_instructions_only() -> None:
    text, sites = delayed(PTX, 3)
    assert sites == 5
    lines = text.splitlines()
    after = [lines[i + 1].split()[0] for i, line in enumerate(lines) if "kg_pause" in line]
    assert after == [
        "mbarrier.init.shared.b64",
        "bar.sync",
        "@!%p1",
        "ld.acquire.gpu.global.b32",
        "st.release.gpu.global.b32",
    ]
    assert "\n".join(line for line in lines if "kg_pause" not in line) + "\n" == PTX
    assert delayed(PTX, 4)[0] != text


def test_the_assembler_takes_them() -> None:
    from sandbox import assemble

    plain, slow = (assemble.assemble(text, "sm_90a") for text in (PTX, delayed(PTX, 1)[0]))
    assert len(slow.cubin) > len(plain.cubin)


def test_a_kernel_that_pauses_change_is_flaky(tmp_path: Path) -> None:
    class Racing(FakeDevice):
        def load(self, artifact: object) -> FakeProgram:
            self.slow = "kg_pause" in artifact.step.ptx  # type: ignore[attr-defined]
            return super().load(artifact)  # type: ignore[arg-type]

    def kernel(t: Mapping[str, torch.Tensor]) -> None:
        toy.right(t)
        if device.slow:
            t["states.layers.0.s"][2, 9] += 1e-6

    device = Racing({"k": kernel})
    made = toy.artifact(("k",))
    made = replace(made, step=LaunchPlan(PTX, made.step.launches))
    job = JudgeJob(toy.saved(tmp_path, made), toy.TARGET, {"rows": 4}, "cpu", Tier.FULL)
    todo = replace(
        FULL, seeds=1, steps=1, long=0, repeats=1, blocks=0, cold=False, distributions=False
    )
    v = judge.run(job, device, todo=todo)
    assert v.status is Status.FLAKY and v.failure is not None and v.failure.rule == "delays"
    assert "5 synchronising" in v.failure.message
