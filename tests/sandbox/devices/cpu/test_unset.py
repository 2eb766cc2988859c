"""What nothing has written holds noise: registers, shared and local memory. A kernel that relies on it ends differently
each time; one whose results do not depend on it ends right; the reads are named."""

from __future__ import annotations

import pytest
import torch

from sandbox.devices.cpu.device import CpuDevice
from tests.sandbox.devices.cpu.harness import Ran, Shape, kernel, run

STORE = "mul.wide.u32 %rd1, %r99, 4; add.s64 %rd2, %rd100, %rd1; st.global.b32 [%rd2], {0}; ret;"
BLOCK = Shape(block=(64, 1, 1))
LOOP = """
mov.b32 %r1, 0;
again: {first}
add.s32 %r2, %r2, %r1; add.s32 %r1, %r1, 1;
setp.lt.u32 %p1, %r1, 5; @%p1 bra again;
""" + STORE.format("%r2")
CONDITIONAL = """
setp.lt.u32 %p1, %r99, 20;
mul.wide.u32 %rd1, %r99, 4; add.s64 %rd2, %rd100, %rd1;
@!%p1 bra past; ld.global.b32 %r1, [%rd2];
past: add.s32 %r1, %r1, 7;
@%p1 st.global.b32 [%rd2], %r1; ret;
"""


def filled(body: str, extra: str = "", smem: int = 0) -> tuple[Ran, torch.Tensor]:
    x = torch.zeros(64, dtype=torch.int32)
    ran = run(kernel(body, extra=extra), [x], Shape(block=(64, 1, 1), smem=smem))
    return ran, x


def test_an_unset_register_differs_by_thread_and_by_launch_and_is_often_nan() -> None:
    ran, x = filled(STORE.format("%r5"))
    first = x.clone()
    ran.bound.launch()
    for found in (first, x):
        assert 0 not in found.tolist()
        assert 16 <= (found == -1).sum() <= 48
        assert len(set(found.tolist())) > 10
    assert (first != x).sum() > 30
    assert torch.isnan(x.view(torch.float32)).sum() >= 16


def test_the_secret_decides_the_noise_and_the_same_secret_repeats_it() -> None:
    text, seen = kernel(STORE.format("%r5")), []
    for secret in (1, 2, 1):
        x = torch.zeros(64, dtype=torch.int32)
        ran = run(text, [x], BLOCK)
        ran.program._started = 0
        ran.program.scramble(secret)
        ran.bound.launch()
        seen.append(x.tolist())
    assert seen[0] == seen[2] != seen[1]


@pytest.mark.parametrize("kind,value", [
    ("pred", "selp.b32 %r1, 5, 6, %p7;"), ("b16", "mov.b32 %r1, {%rs5, %rs6};"),
    ("b64", "cvt.u32.u64 %r1, %rd9;"),
])  # fmt: skip
def test_unset_registers_of_every_width_hold_noise(kind: str, value: str) -> None:
    _, x = filled(value + STORE.format("%r1"))
    assert len(set(x.tolist())) > (1 if kind == "pred" else 10), kind


def test_what_an_unset_register_holds_outlives_a_barrier() -> None:
    body = "mov.b32 %r1, %r5; bar.sync 0; xor.b32 %r1, %r1, %r5;" + STORE.format("%r1")
    _, x = filled(body)
    assert not x.any()


@pytest.mark.parametrize("first", ["", "@%p2 mov.b32 %r2, 0;"])
def test_a_sum_that_does_not_begin_at_zero_ends_wrong(first: str) -> None:
    ran, x = filled("setp.ne.u32 %p2, %r99, %r99;" + LOOP.format(first=first))
    assert (x != 10).all()
    assert [f.rule for f in ran.program.doubts()] == ["unset-register"]


def test_a_sum_that_begins_at_zero_ends_right_without_a_doubt() -> None:
    ran, x = filled("mov.b32 %r2, 0;" + LOOP.format(first=""))
    assert (x == 10).all()
    assert ran.program.doubts() == ()


def test_a_path_whose_value_nothing_uses_changes_no_result() -> None:
    x = torch.arange(64, dtype=torch.int32)
    run(kernel(CONDITIONAL), [x], BLOCK)
    assert x.tolist() == [i + 7 if i < 20 else i for i in range(64)]


def test_the_doubt_names_instruction_and_line_of_the_read() -> None:
    text = kernel(CONDITIONAL)
    ran = run(text, [torch.zeros(64, dtype=torch.int32)], BLOCK)
    (doubt,) = ran.program.doubts()
    line = 1 + next(i for i, t in enumerate(text.splitlines()) if "add.s32 %r1, %r1, 7" in t)
    assert doubt.where == {"ptx_line": line, "instruction": "add.s32"}
    assert f"`add.s32` (PTX line {line})" in doubt.message


def test_shared_memory_holds_other_noise_in_each_launch_and_reading_it_is_found() -> None:
    body = "mov.b32 %r2, sm; ld.shared.b32 %r1, [%r2+4];" + STORE.format("%r1")
    ran, x = filled(body, ".extern .shared .align 16 .b8 sm[];", smem=64)
    seen = {int(x[0])}
    for _ in range(40):
        ran.bound.launch()
        seen.add(int(x[0]))
    assert -1 in seen and len(seen) > 5
    assert [f.rule for f in ran.program.findings()] == ["unwritten-read"]


def test_local_memory_holds_noise_of_its_thread_and_keeps_what_is_written() -> None:
    body = ".local .align 16 .b8 own[32]; mov.u64 %rd3, own; ld.local.b32 %r1, [%rd3+8];" + STORE
    ran, x = filled(body.format("%r1"))
    first = x.clone()
    ran.bound.launch()
    for found in (first, x):
        assert 0 not in found.tolist() and len(set(found.tolist())) > 10
    assert (first != x).sum() > 30
    kept = "st.local.b32 [%rd3+8], %r99; bar.sync 0; ld.local.b32 %r1, [%rd3+8];"
    _, x = filled(body.replace("ld.local.b32 %r1, [%rd3+8];", kept).format("%r1"))
    assert x.tolist() == list(range(64))


def test_noise_does_not_depend_on_the_order_of_blocks() -> None:
    text = kernel("mov.u32 %r98, %ctaid.x; mad.lo.u32 %r99, %r98, 32, %r99;" + STORE.format("%r5"))
    seen = []
    for seed in (0, 7):
        x = torch.zeros(128, dtype=torch.int32)
        run(text, [x], Shape(grid=(4, 1, 1)), device=CpuDevice(seed=seed))
        seen.append(x.tolist())
    assert seen[0] == seen[1]
