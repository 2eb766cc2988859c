"""Planted bugs, each found and named: unwritten memory, parities, deadlocks, counts at barriers. Races: test_races."""

from __future__ import annotations

import pytest
import torch

from sandbox.devices.base import Faulted
from sandbox.devices.cpu.device import CpuDevice
from sandbox.verdict import Status
from tests.sandbox.devices.cpu.harness import Shape, kernel, rules, run

SMEM = ".extern .shared .align 16 .b8 sm[];"


def test_reads_of_an_undefined_buffer_are_found_and_written_ones_are_not() -> None:
    x, out = torch.zeros(64, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    body = """
    mul.wide.u32 %rd1, %r99, 4; add.s64 %rd2, %rd100, %rd1; st.global.u32 [%rd2], %r99; ld.global.u32 %r1, [%rd2];
    add.s64 %rd3, %rd101, %rd1; ld.global.u32 %r2, [%rd2+{off}]; st.global.u32 [%rd3], %r2; ret;
    """
    assert rules(run(kernel(body.format(off=0), "pp"), [x, out], undefined=[0])) == set()
    found = run(kernel(body.format(off=64), "pp"), [x, out], undefined=[0]).program.findings()
    assert {f.rule for f in found} == {"unwritten-read"} and "workspace.b0 byte" in found[0].message


@pytest.mark.parametrize("parity,hangs", [(0, False), (1, True)])
def test_waiting_for_the_wrong_parity(parity: int, hangs: bool) -> None:
    """A producer that arrives once: a waiter for the phase after it waits for ever."""
    x = torch.zeros(64, dtype=torch.int32)
    body = f"""
    mov.b32 %r1, sm; setp.ne.u32 %p1, %r99, 0; @%p1 bra A; mbarrier.init.shared.b64 [%r1], 1; A: bar.sync 0;
    @%p1 bra B; mbarrier.arrive.shared.b64 %rd1, [%r1];
    B: bar.sync 0; mov.b32 %r2, {parity};
    W: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], %r2; @!%p2 bra W;
    mul.wide.u32 %rd2, %r99, 4; add.s64 %rd3, %rd100, %rd2; st.global.u32 [%rd3], 7; ret;
    """
    text = kernel(body, "p", extra=SMEM)
    if not hangs:
        run(text, [x], Shape(block=(64, 1, 1), smem=16))
        assert bool((x == 7).all())
        return
    with pytest.raises(Faulted) as e:
        run(text, [x], Shape(block=(64, 1, 1), smem=16))
    assert e.value.status is Status.HANG and e.value.failure.rule == "deadlock"
    assert (
        "64 threads wait for parity 1 of the mbarrier at shared memory byte 0"
        in e.value.failure.message
    )


def test_two_blocks_that_wait_for_each_other() -> None:
    flags = torch.zeros(2, dtype=torch.int32)
    body = """
    setp.ne.u32 %p1, %r99, 0; @%p1 bra E; mov.u32 %r1, %ctaid.x; xor.b32 %r2, %r1, 1;
    mul.wide.u32 %rd1, %r2, 4; add.s64 %rd2, %rd100, %rd1; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd100, %rd3;
    S: ld.acquire.gpu.global.u32 %r3, [%rd2]; setp.eq.u32 %p2, %r3, 0; @%p2 bra S;
    st.release.gpu.global.u32 [%rd4], 1; E: ret;
    """
    with pytest.raises(Faulted) as e:
        run(kernel(body, "p"), [flags], Shape(grid=(2, 1, 1), cooperative=True))
    f = e.value.failure
    assert e.value.status is Status.HANG and f.rule == "deadlock"
    assert (
        "workspace.b0 byte 4 to change from 0" in f.message
        and "workspace.b0 byte 0 to change from 0" in f.message
    )


def test_a_bounded_spin_ends_by_itself() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    body = """
    setp.ne.u32 %p1, %r99, 0; @%p1 bra E; mov.b32 %r1, 0;
    S: ld.relaxed.gpu.global.u32 %r2, [%rd100]; add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 500; @%p2 bra S;
    st.global.u32 [%rd101], %r1; E: ret;
    """
    run(kernel(body, "pp"), [torch.zeros(1, dtype=torch.int32), out])
    assert int(out) == 500


def test_an_endless_loop_meets_the_budget() -> None:
    x = torch.zeros(1, dtype=torch.int32)
    body = "S: ld.global.u32 %r1, [%rd100]; setp.eq.u32 %p1, %r1, 0; @%p1 bra S; ret;"
    with pytest.raises(Faulted) as e:
        run(kernel(body, "p"), [x], device=CpuDevice(budget=50_000_000))
    assert e.value.status is Status.HANG and e.value.failure.rule == "budget"


def test_unequal_counts_at_one_barrier() -> None:
    x = torch.zeros(1, dtype=torch.int32)
    body = "setp.lt.u32 %p1, %r99, 32; @%p1 bra A; bar.sync 1, 64; ret; A: bar.sync 1, 96; ret;"
    with pytest.raises(Faulted) as e:
        run(kernel(body, "p"), [x], Shape(block=(96, 1, 1)))
    assert e.value.failure.rule == "barrier-count"


def test_more_arrivals_than_an_mbarrier_expects() -> None:
    x = torch.zeros(1, dtype=torch.int32)
    body = """
    mov.b32 %r1, sm; setp.ne.u32 %p1, %r99, 0; @%p1 bra E; mbarrier.init.shared.b64 [%r1], 2;
    mov.b32 %r2, 3; mbarrier.arrive.shared.b64 %rd1, [%r1], %r2; E: ret;
    """
    with pytest.raises(Faulted) as e:
        run(kernel(body, "p", extra=SMEM), [x], Shape(smem=16))
    assert e.value.failure.rule == "mbarrier-count"


def test_an_mbarrier_that_was_never_initialised() -> None:
    x = torch.zeros(1, dtype=torch.int32)
    body = "mov.b32 %r1, sm; mbarrier.arrive.shared.b64 %rd1, [%r1]; ret;"
    with pytest.raises(Faulted) as e:
        run(kernel(body, "p", extra=SMEM), [x], Shape(smem=16))
    assert e.value.failure.rule == "mbarrier-invalid"


def test_a_long_loop_may_read_one_word_past_the_cache_again_and_again() -> None:
    x, out = torch.full((1,), 3, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    body = """
    mov.b32 %r1, 0; mov.b32 %r2, 0; mul.wide.u32 %rd1, %r99, 4; add.s64 %rd2, %rd101, %rd1;
    L: ld.relaxed.gpu.global.u32 %r3, [%rd100]; add.u32 %r2, %r2, %r3; st.global.u32 [%rd2], %r2;
    ld.global.cg.u32 %r4, [%rd100]; add.u32 %r2, %r2, %r4; add.u32 %r1, %r1, 1;
    setp.lt.u32 %p1, %r1, 30000; @%p1 bra L; st.global.u32 [%rd2], %r2; ret;
    """
    run(kernel(body, "pp"), [x, out], Shape(block=(64, 1, 1)))
    assert bool((out == 180000).all())


def test_the_languages_meaning_in_python_is_what_the_compiled_runtime_does() -> None:
    """The runtime's functions are Python too: small floats converted both ways give the same bits."""
    import ctypes

    from sandbox.devices.cpu import rt_float
    from sandbox.devices.cpu.translate import runtime

    for name in ("rt_half_bits", "rt_half_value", "rt_e4m3_bits", "rt_e5m2_bits", "rt_half_down"):
        compiled = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(runtime().address(name))
        for i in range(500):
            word = (i * 2654435761) & (0xFFFF if name == "rt_half_value" else 0xFFFFFFFF)
            assert getattr(rt_float, name)(word) == compiled(word), (name, hex(word))
