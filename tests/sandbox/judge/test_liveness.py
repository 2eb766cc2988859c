"""Hangs told apart by what kernels wrote on the way: by readings, through a hanging fake child, and on a GPU."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sandbox.artifact import Artifact, Buffer, Launch, LaunchPlan, Relocation
from sandbox.devices.base import Faulted
from sandbox.judge import child, liveness
from sandbox.judge.keeper import explain
from sandbox.judge.liveness import classify
from sandbox.judge.progress import Progress, WatchedDevice
from sandbox.verdict import Failure, Status
from tests.sandbox.devices import kernels
from tests.sandbox.judge.overdue import overdue

WAITS = (3, 1, 4, 3)
"""Phase 3, waiting, 4 wanted, 3 seen."""


def same(*rows: tuple[int, ...]) -> liveness.Kind:
    return classify(rows, rows)


def test_everybody_waiting_is_a_deadlock() -> None:
    kind = same(WAITS, WAITS, WAITS)
    assert kind.name == "deadlock"
    assert "all 3 blocks wait at the end of phase 3, 3 seen of 4 wanted" in kind.text
    apart = same(WAITS, (2, 1, 7, 5), WAITS)
    assert (apart.name, apart.where["behind"]) == ("deadlock", [1])
    assert "block 1 in phase 2, 5 seen of 7 wanted" in apart.text


def test_a_block_that_does_not_come_is_stuck_in_its_phase() -> None:
    kind = same(WAITS, (3, 0, 0, 0), WAITS)
    assert kind.name == "stuck"
    assert "block 1 never came to the end of phase 3" in kind.text and "2 wait" in kind.text
    assert kind.where["working"] == [1]


def test_a_block_that_never_started_is_named() -> None:
    kind = same(WAITS, (0, 0, 0, 0))
    assert kind.name == "stuck" and "block 1 never started" in kind.text
    assert "no block has written" in same((0, 0, 0, 0)).text


def test_words_that_change_are_a_loop() -> None:
    kind = classify([(3, 0, 0, 1), WAITS], [(3, 0, 0, 2), WAITS])
    assert kind.name == "moving" and kind.where["blocks"] == [0]


def test_without_words_the_advice_says_how() -> None:
    failure = liveness.explain(Failure("hang", "the kernels did not end within 10 s"), list)
    assert (
        failure.where["liveness"] == "unknown" and "declare workspace progress" in failure.message
    )


class Hanging:
    """A device whose stream never becomes idle."""

    kind, torch_device = "cuda", "cpu"

    def synchronize(self) -> None:
        raise Faulted(Status.HANG, Failure("hang", "the kernels did not end within 10 s"))


def test_the_watchdog_reads_what_the_kernel_wrote() -> None:
    progress = Progress()
    device = WatchedDevice(Hanging(), progress)  # type: ignore[arg-type]
    words = device.kernel_progress(3)
    assert words is not None
    words[:] = torch.tensor([WAITS, (2, 0, 0, 0), WAITS])
    with pytest.raises(Faulted) as end:
        device.synchronize()
    assert end.value.failure.where["liveness"] == "stuck"
    assert "block 1 never came to the end of phase 2" in end.value.failure.message
    assert device.kernel_progress(5000) is None  # larger than the page


@pytest.mark.parametrize(("moves", "name"), [(False, "deadlock"), (True, "moving")])
def test_the_parent_reads_them_before_it_kills(
    monkeypatch: pytest.MonkeyPatch, moves: bool, name: str
) -> None:
    if moves:  # no GPU: what counts needs a turn on a processor between the two readings
        monkeypatch.setattr(liveness, "APART_S", 2.0)

    def work(progress: Progress, begun: Callable[[], None]) -> dict[str, object]:
        device = WatchedDevice(Hanging(), progress)  # type: ignore[arg-type]
        words = device.kernel_progress(2)
        assert words is not None
        words[:] = torch.tensor([WAITS, WAITS])
        progress.launching()
        begun()
        while True:
            time.sleep(0.01)
            words[0, 3] += int(moves)

    ended = overdue(work, 1.0)
    status, failure = explain(ended, 1.0)
    assert (status, failure.where["liveness"]) == (Status.HANG, name), failure.message


# Block 2 loops for ever; the others announce themselves and wait for four arrivals. Words: %rd2 + 16 * block.
HANGS = """\
.version 8.8
.target sm_90a
.address_size 64
.visible .entry hangs(.param .u64 hangs_count, .param .u64 hangs_words)
.reqntid 1, 1, 1
{
    .reg .pred %p<3>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [hangs_count];
    ld.param.u64 %rd2, [hangs_words];
    mov.u32 %r1, %ctaid.x;
    mul.wide.u32 %rd3, %r1, 16;
    add.s64 %rd4, %rd2, %rd3;
    mov.u32 %r2, 1;
    st.relaxed.sys.global.u32 [%rd4], %r2;
    setp.eq.u32 %p1, %r1, 2;
    @%p1 bra WAIT;
    atom.add.release.gpu.global.u32 %r3, [%rd1], 1;
    st.relaxed.sys.global.u32 [%rd4+8], 4;
    st.relaxed.sys.global.u32 [%rd4+4], %r2;
WAIT:
    ld.acquire.gpu.global.u32 %r4, [%rd1];
    @!%p1 st.relaxed.sys.global.u32 [%rd4+12], %r4;
    setp.lt.u32 %p2, %r4, 4;
    @%p2 bra WAIT;
    ret;
}
"""


def hanging_artifact() -> Artifact:
    one = Launch(
        "hangs", (4, 1, 1), (1, 1, 1), bytes(16), (0, 8),
        (Relocation(0, "outputs.y"), Relocation(8, liveness.NAME)), cooperative=True,
    )  # fmt: skip
    words = Buffer(liveness.NAME, "i32", (4, 4), init="zero", lifetime="persistent")
    made = kernels.artifact(kernels.DOUBLE, 4)
    buffers = (*made.buffers, words)
    return replace(made, buffers=buffers, step=LaunchPlan(HANGS, (one,)))


@pytest.mark.gpu
def test_a_hanging_kernel_on_a_gpu_says_which_block_is_missing(tmp_path: Path) -> None:
    def work(progress: Progress) -> dict[str, object]:
        from sandbox.devices.cuda import CudaDevice

        inner = CudaDevice.open(0)
        inner.hang_s = 2.0
        device = WatchedDevice(inner, progress)
        words = device.kernel_progress(4)
        assert words is not None and words.is_cuda
        y = torch.zeros(4, dtype=torch.float32, device="cuda")
        program = device.load(hanging_artifact())
        program.bind("step", {"outputs.y": y, liveness.NAME: words}).launch()
        try:
            device.synchronize()
        except Faulted as end:
            return {"message": end.failure.message, "where": dict(end.failure.where)}
        return {"message": "it ended"}

    ended = child.run(work, 60)
    assert ended.result is not None, ended.log
    assert (
        "block 2 never came to the end of phase 1; 3 wait, 3 seen of 4 wanted"
        in ended.result["message"]
    ), ended
