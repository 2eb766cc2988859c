"""The first things: arithmetic on global memory, loops, shared memory with barriers, warp shuffles, guards and
bounds."""

from __future__ import annotations

import weakref

import pytest
import torch

from sandbox.devices.base import Faulted, Refused
from sandbox.devices.cpu.device import CpuDevice
from sandbox.verdict import Status
from tests.sandbox.devices.cpu.harness import Shape, artifact, kernel, run

INDEX = """
mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mad.lo.s32 %r3, %r1, %r2, %r99;
mul.wide.s32 %rd1, %r3, 4; add.s64 %rd2, %rd100, %rd1;
"""


def test_every_thread_of_every_block_updates_its_element() -> None:
    x = torch.arange(1000, dtype=torch.float32)
    body = (
        INDEX
        + """
    setp.ge.s32 %p1, %r3, %r101; @%p1 bra END;
    ld.global.f32 %r4, [%rd2]; fma.rn.f32 %r5, %r4, 0f40000000, 0f3F800000; st.global.f32 [%rd2], %r5;
    END: ret;
    """
    )
    run(kernel(body, "pi"), [x, 1000], Shape(grid=(8, 1, 1), block=(128, 1, 1)))
    assert torch.equal(x, torch.arange(1000) * 2.0 + 1)


def test_loop_sums_a_row() -> None:
    x = torch.randint(-100, 100, (32, 77), dtype=torch.int32)
    out = torch.zeros(32, dtype=torch.int32)
    body = """
    mul.lo.s32 %r1, %r99, 308; cvt.u64.u32 %rd1, %r1; add.s64 %rd2, %rd100, %rd1; mov.b32 %r2, 0; mov.b32 %r3, 77;
    LOOP: ld.global.s32 %r4, [%rd2]; add.s32 %r2, %r2, %r4; add.s64 %rd2, %rd2, 4; add.s32 %r3, %r3, -1;
    setp.ne.s32 %p1, %r3, 0; @%p1 bra LOOP;
    mul.wide.u32 %rd3, %r99, 4; add.s64 %rd4, %rd101, %rd3; st.global.u32 [%rd4], %r2; ret;
    """
    run(kernel(body, "pp"), [x, out])
    assert torch.equal(out, x.sum(1, dtype=torch.int32))


def test_shared_memory_reversal_across_a_barrier() -> None:
    x = torch.arange(256, dtype=torch.int32)
    body = """
    mul.wide.u32 %rd1, %r99, 4; add.s64 %rd2, %rd100, %rd1; ld.global.b32 %r1, [%rd2];
    mov.b32 %r2, sm; shl.b32 %r3, %r99, 2; add.s32 %r4, %r2, %r3; st.shared.b32 [%r4], %r1;
    bar.sync 0;
    sub.s32 %r5, 1020, %r3; add.s32 %r6, %r2, %r5; ld.shared.b32 %r7, [%r6]; st.global.b32 [%rd2], %r7; ret;
    """
    run(
        kernel(body, "p", extra=".extern .shared .align 16 .b8 sm[];"),
        [x],
        Shape(block=(256, 1, 1), smem=1024),
    )
    assert torch.equal(x, torch.arange(255, -1, -1, dtype=torch.int32))


@pytest.mark.parametrize("how,expect", [
    ("bfly.b32 %r2|%p1, %r1, 16, 31, -1", lambda v, i: v[i ^ 16]),
    ("down.b32 %r2|%p1, %r1, 3, 31, -1", lambda v, i: v[i + 3] if i + 3 < 32 else v[i]),
    ("up.b32 %r2|%p1, %r1, 5, 0, -1", lambda v, i: v[i - 5] if i >= 5 else v[i]),
    ("idx.b32 %r2|%p1, %r1, 7, 31, -1", lambda v, i: v[7]),
    ("idx.b32 %r2|%p1, %r1, 2, 6175, -1", lambda v, i: v[(i & 24) | 2]),
])  # fmt: skip
def test_shuffles(how: str, expect: object) -> None:
    x = torch.randint(0, 1 << 30, (32,), dtype=torch.int32)
    v = x.tolist()
    body = f"{INDEX} ld.global.b32 %r1, [%rd2]; shfl.sync.{how}; st.global.b32 [%rd2], %r2; ret;"
    run(kernel(body, "p"), [x])
    assert x.tolist() == [expect(v, i) for i in range(32)]  # type: ignore[operator]


def test_out_of_bounds_names_buffer_thread_and_line() -> None:
    x = torch.zeros(100, dtype=torch.float32)
    body = INDEX + "\nst.global.f32 [%rd2], 0f3F800000;\nret;"
    with pytest.raises(Faulted) as e:
        run(kernel(body, "p"), [x], Shape(block=(128, 1, 1)))
    f = e.value.failure
    assert e.value.status is Status.FAULT and f.rule == "out-of-bounds"
    assert "workspace.b0" in f.message and f.where["thread"] >= 100 and "st.global.f32" in f.message
    assert kernel(body, "p").splitlines()[f.where["ptx_line"] - 1].startswith("st.global")


def test_misaligned_access_is_a_fault() -> None:
    x = torch.zeros(64, dtype=torch.int32)
    body = "add.s64 %rd1, %rd100, 4; ld.global.v2.b32 {%r1, %r2}, [%rd1]; ret;"
    with pytest.raises(Faulted) as e:
        run(kernel(body, "p"), [x])
    assert e.value.failure.rule == "misaligned"


def test_missing_arrival_is_a_proven_deadlock() -> None:
    x = torch.zeros(64, dtype=torch.int32)
    body = "setp.lt.u32 %p1, %r99, 32; @%p1 bra W; bar.sync 1, 96; W: ret;"
    with pytest.raises(Faulted) as e:
        run(kernel(body, "p"), [x], Shape(block=(64, 1, 1)))
    assert e.value.status is Status.HANG and e.value.failure.rule == "deadlock"
    assert "32 of 96 arrived" in e.value.failure.message


def test_unknown_instruction_is_refused_by_name_and_line() -> None:
    x = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(Refused) as e:
        run(kernel("\nwgmma.fence.sync.aligned;\nret;", "p"), [x])
    assert e.value.status is Status.UNSUPPORTED and e.value.failure.rule == "cpu-unsupported"
    assert (
        "wgmma.fence.sync.aligned" in e.value.failure.message
        and "PTX line" in e.value.failure.message
    )


def test_a_bound_plan_keeps_its_memory_alive() -> None:
    """Callers may drop the tensors; a launch afterwards must not touch freed memory."""
    a = artifact(kernel("ret;", "p"), [torch.zeros(4)], Shape())
    tensors = {"workspace.b0": torch.zeros(4)}
    kept = weakref.ref(tensors["workspace.b0"])
    bound = CpuDevice().load(a).bind("step", tensors)
    del tensors
    bound.launch()
    assert kept() is not None


def test_programs_of_one_device_share_what_is_translated_but_no_variables() -> None:
    device = CpuDevice()
    text = kernel("st.global.b32 [%rd100], 5; ret;", "p")
    a, b = (run(text, [torch.zeros(1, dtype=torch.int32)], device=device).program for _ in "ab")
    assert a.kernel(a.artifact.step, "k") is b.kernel(b.artifact.step, "k")
    count = (
        "mov.u64 %rd1, n; ld.global.b32 %r1, [%rd1]; add.s32 %r1, %r1, 1; st.global.b32 [%rd1], %r1;"
        "st.global.b32 [%rd100], %r1; ret;"
    )
    own = kernel(count, "p", extra=".global .align 4 .u32 n;")
    for _ in range(2):  # the second program counts in memory of its own
        x = torch.zeros(1, dtype=torch.int32)
        ran = run(own, [x], Shape(block=(1, 1, 1)), device=device)
        ran.bound.launch()
        assert x.item() == 2


@pytest.mark.parametrize(
    ("body", "extra", "rule"),
    [
        ("mov.u64 %rd1, %clock64; st.global.b64 [%rd100], %rd1; ret;", "", "clock"),
        ("mov.u64 %rd1, %gridid; st.global.b64 [%rd100], %rd1; ret;", "", "launch-number"),
        ("ret;", ".const .align 4 .u32 c = 1; .global .align 4 .u32 n;", "writable-global"),
    ],
)
def test_for_a_judge_it_refuses_what_a_gpu_refuses(body: str, extra: str, rule: str) -> None:
    text, x = kernel(body, "p", extra=extra), torch.zeros(2, dtype=torch.int32)
    run(text, [x])
    with pytest.raises(Refused) as refused:
        run(text, [x], device=CpuDevice(lint=True))
    assert (refused.value.status, refused.value.failure.rule) == (Status.LINT, rule)


def test_what_is_recorded_runs_again() -> None:
    x = torch.zeros(1, dtype=torch.int32)
    device = CpuDevice()
    bound = run(
        kernel("ld.global.b32 %r1, [%rd100]; add.s32 %r1, %r1, 1; st.global.b32 [%rd100], %r1; ret;", "p"),
        [x], Shape(block=(1, 1, 1)), device=device,
    ).bound  # fmt: skip
    device.record(bound.launch, 1).launch()
    assert x.item() == 2
