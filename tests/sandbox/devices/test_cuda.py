"""The CUDA device over a driver without a GPU: real PTX is assembled, parameters patched, launches run in Python."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sandbox import canary
from sandbox.artifact import Artifact, LaunchPlan
from sandbox.devices import cuda_elf, cuda_facts
from sandbox.devices.base import Faulted, Refused
from sandbox.devices.cuda import CudaDevice
from sandbox.devices.cuda_plan import Residency
from sandbox.verdict import Status
from tests.sandbox.devices import kernels
from tests.sandbox.devices.fake_driver import CANARY, H200, FakeDriver

N = 1000


@pytest.fixture(autouse=True, scope="module")
def cubin_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Assemble each module once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNELGEN_CACHE", str(tmp_path_factory.mktemp("cubins")))
        yield


def device(driver: FakeDriver, state: Path | None = None) -> CudaDevice:
    return CudaDevice(driver, 1, state, torch_device="cpu")


def aligned(values: torch.Tensor) -> torch.Tensor:
    """A copy at a multiple of 128 bytes, as the judge allocates."""
    raw = torch.zeros(values.numel() + 32, dtype=values.dtype)
    skip = -raw.data_ptr() % 128 // values.element_size()
    out = raw[skip : skip + values.numel()]
    out.copy_(values)
    return out


def buffers() -> Mapping[str, torch.Tensor]:
    return {
        "inputs.x": aligned(torch.arange(N, dtype=torch.float32)),
        "outputs.y": aligned(torch.full((N,), float("nan"))),
    }


def chain(n: int, pdl: bool = True) -> Artifact:
    """`n` launches of the canary, each with programmatic serialization."""
    one = canary.artifact("sm_90a", N)
    launch = replace(one.step.launches[0], pdl=pdl)
    return replace(one, step=LaunchPlan(one.step.ptx, (launch,) * n))


def test_a_plan_runs_and_its_capture_does_the_same_without_running_early() -> None:
    driver = FakeDriver()
    t = buffers()
    bound = device(driver).load(chain(3)).bind("step", t)
    graph = bound.capture()
    assert driver.launched == []
    assert torch.isnan(t["outputs.y"]).all()
    graph.launch()
    assert torch.equal(t["outputs.y"], 2 * t["inputs.x"] + 1)
    t["outputs.y"].fill_(0)
    bound.launch()
    assert torch.equal(t["outputs.y"], 2 * t["inputs.x"] + 1)
    assert (bound.launches, graph.launches, len(driver.launched)) == (3, 3, 6)


def test_the_first_launch_never_overlaps_what_came_before() -> None:
    driver = FakeDriver()
    device(driver).load(chain(3)).bind("step", buffers()).launch()
    assert [pdl for _, pdl in driver.launched] == [False, True, True]


def test_resources_are_those_of_ptxas() -> None:
    program = device(FakeDriver()).load(chain(1))
    (r,) = program.resources
    assert (r.kernel, r.stack, r.spill_loads) == ("canary", 0, 0)
    assert 4 <= r.registers <= 32
    assert program.findings() == ()


def test_one_module_for_step_and_prepare_that_share_their_ptx() -> None:
    driver = FakeDriver()
    one = chain(1)
    named = [
        replace(b, name=b.name.replace("inputs.", "weights.").replace("outputs.", "constants."))
        for b in one.buffers
    ]
    launch = one.step.launches[0]
    moved = tuple(replace(r, buffer=b.name) for r, b in zip(launch.relocations, named, strict=True))
    plan = LaunchPlan(one.step.ptx, (replace(launch, relocations=moved),))
    device(driver).load(replace(one, buffers=(*one.buffers, *named), prepare=plan))
    assert len(driver.loaded) == 1


ONE = chain(1)
LAUNCH = ONE.step.launches[0]
VPRINTF = ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n"


def with_step(ptx: str = ONE.step.ptx, **launch: object) -> Artifact:
    return replace(ONE, step=LaunchPlan(ptx, (replace(LAUNCH, **launch),)))


def taking(*params: tuple[int, int]) -> FakeDriver:
    return FakeDriver(kernels={"canary": replace(CANARY, params=params)})


@pytest.mark.parametrize(
    ("artifact", "driver", "status", "rule"),
    [
        (canary.artifact("sm_100a", N), FakeDriver(), Status.UNSUPPORTED, "arch"),
        (
            with_step(ONE.step.ptx.replace("fma.rn", "fmaz.rn")),
            FakeDriver(),
            Status.COMPILE_ERROR,
            "ptxas",
        ),
        (with_step(kernel="other"), FakeDriver(), Status.PLAN_ERROR, "unknown-kernel"),
        (ONE, taking((0, 8), (8, 8)), Status.PLAN_ERROR, "parameters"),
        (ONE, FakeDriver(room=Residency(0)), Status.LINT, "residency"),
        (with_step(ONE.step.ptx + VPRINTF), FakeDriver(), Status.LINT, "extern-function"),
        (replace(ONE, prepare=ONE.step), FakeDriver(), Status.PLAN_ERROR, "prepare-scope"),
    ],
)
def test_refusals_come_before_any_launch(
    artifact: Artifact, driver: FakeDriver, status: Status, rule: str
) -> None:
    with pytest.raises(Refused) as refused:
        device(driver).load(artifact)
    assert (refused.value.status, refused.value.failure.rule) == (status, rule)
    assert driver.launched == []


def test_a_cooperative_grid_that_is_not_resident_at_once_is_refused() -> None:
    one = canary.artifact("sm_90a", 256 * 300)
    big = replace(
        one, step=LaunchPlan(one.step.ptx, (replace(one.step.launches[0], cooperative=True),))
    )
    device(FakeDriver(room=Residency(3))).load(big)
    with pytest.raises(Refused, match="at most 264 are resident"):
        device(FakeDriver(room=Residency(2))).load(big)


def test_shared_memory_and_clusters_are_allowed_once_for_all_launches_of_a_kernel() -> None:
    driver = FakeDriver(room=Residency(1, 8))
    one = canary.artifact("sm_90a", 256 * 16)
    base = one.step.launches[0]
    launches = (replace(base, smem=1000), replace(base, smem=90_000, cluster=(16, 1, 1)), base)
    device(driver).load(replace(one, step=LaunchPlan(one.step.ptx, launches)))
    assert driver.allowed == [("canary", 90_000, 16)]


def test_a_kernel_of_step_and_prepare_keeps_the_larger_allowance() -> None:
    driver = FakeDriver()
    weights = [replace(b, name=f"weights.{b.group}") for b in ONE.buffers]
    own = tuple(replace(r, buffer=b.name) for r, b in zip(LAUNCH.relocations, weights, strict=True))
    prepare = LaunchPlan(ONE.step.ptx, (replace(LAUNCH, smem=500, relocations=own),))
    step = LaunchPlan(ONE.step.ptx, (replace(LAUNCH, smem=90_000),))
    device(driver).load(replace(ONE, buffers=(*ONE.buffers, *weights), step=step, prepare=prepare))
    assert driver.allowed[-1] == ("canary", 90_000, 1)


@pytest.mark.parametrize(
    ("error", "raised"),
    [("CUDA_ERROR_INVALID_CLUSTER_SIZE", Refused), ("CUDA_ERROR_UNKNOWN", Faulted)],
)
def test_what_the_driver_cannot_place_is_refused_before_it_runs(
    error: str, raised: type[Exception]
) -> None:
    with pytest.raises(raised, match=error):
        device(FakeDriver(placement_error=error)).load(ONE)


def test_tensors_that_are_not_their_buffers_are_the_callers_error() -> None:
    program = device(FakeDriver()).load(chain(1))
    t = dict(buffers())
    with pytest.raises(ValueError, match=r"outputs\.y"):
        program.bind("step", {**t, "outputs.y": t["outputs.y"][:-1]})
    with pytest.raises(ValueError, match=r"no tensor for the buffer outputs\.y"):
        program.bind("step", {"inputs.x": t["inputs.x"]})
    with pytest.raises(Refused):
        program.bind("prepare", t)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("CUDA_ERROR_ILLEGAL_ADDRESS", Status.FAULT),
        ("CUDA_ERROR_LAUNCH_FAILED", Status.FAULT),
        ("CUDA_ERROR_LAUNCH_TIMEOUT", Status.HANG),
        ("CUDA_ERROR_OUT_OF_MEMORY", Status.INFRA),
        ("CUDA_ERROR_ECC_UNCORRECTABLE", Status.INFRA),
        ("CUDA_ERROR_UNKNOWN", Status.INFRA),
    ],
)
def test_errors_while_waiting_keep_their_name(error: str, status: Status) -> None:
    with pytest.raises(Faulted) as fault:
        device(FakeDriver(errors=[error])).synchronize()
    assert fault.value.status is status
    assert error in fault.value.failure.message


@pytest.mark.parametrize(
    ("error", "status"),
    [("CUDA_ERROR_INVALID_VALUE", Status.FAULT), ("CUDA_ERROR_OUT_OF_MEMORY", Status.INFRA)],
)
def test_a_refused_launch_is_the_plans_fault(error: str, status: Status) -> None:
    bound = device(FakeDriver(launch_error=error)).load(chain(1)).bind("step", buffers())
    with pytest.raises(Faulted) as fault:
        bound.launch()
    assert fault.value.status is status


def test_a_stream_that_never_gets_idle_is_a_hang() -> None:
    d = device(FakeDriver(hung=True))
    d.hang_s = 0.05
    begin = time.monotonic()
    with pytest.raises(Faulted) as fault:
        d.synchronize()
    assert fault.value.status is Status.HANG
    assert 0.05 <= time.monotonic() - begin < 9  # unasked it waits for ten seconds


def test_a_broken_capture_ends_and_reports_its_own_error() -> None:
    driver = FakeDriver()
    d = device(driver)

    def work() -> None:
        raise RuntimeError("no allocation while recording")

    with pytest.raises(RuntimeError, match="no allocation"):
        d.record(work)
    assert driver.recording is None


def test_facts_name_the_card_its_rate_and_pageable_access(tmp_path: Path) -> None:
    d = device(FakeDriver(), tmp_path)
    f = d.facts()
    assert (f.arch, f.slug, f.sms, f.spec_rate, f.stream_rate) == (
        "sm_90a",
        "h200",
        132,
        4.8e12,
        None,
    )
    assert f.extra["pageable_memory_access"] == 1
    cuda_facts.store_stream_rate(tmp_path, f, 4.39e12)
    assert device(FakeDriver(), tmp_path).facts().stream_rate == 4.39e12
    cuda_facts.store_stream_rate(tmp_path, f, 1.2e12)  # measured while others used the card
    assert device(FakeDriver(), tmp_path).facts().stream_rate is None
    (tmp_path / cuda_facts.STORED).write_text("{broken")
    assert device(FakeDriver(), tmp_path).facts().stream_rate is None


def test_an_unknown_card_gets_its_rate_from_the_memory_clock() -> None:
    f = device(FakeDriver(product="NVIDIA Prototype")).facts()
    assert f.spec_rate == pytest.approx(2 * 3201e6 * 6144 / 8)


def test_canary_passes_and_finds_a_device_that_computes_wrongly() -> None:
    assert canary.run(device(FakeDriver()), N).ok
    broken = replace(CANARY, run=lambda params: None)
    result = canary.run(device(FakeDriver(kernels={"canary": broken})), N)
    assert not result.ok
    assert "1000 of 1000" in result.message
    faulty = canary.run(device(FakeDriver(errors=["CUDA_ERROR_ILLEGAL_ADDRESS"])), N)
    assert not faulty.ok
    assert "fault" in faulty.message


@pytest.mark.parametrize(
    "name", ["DOUBLE", "CHAINED", "CLUSTER", "WILD_STORE", "MISALIGNED", "ENDLESS"]
)
def test_kernels_of_the_gpu_tests_assemble_and_load(name: str) -> None:
    driver = FakeDriver(kernels={"k": replace(CANARY, max_threads=1024)})
    one = replace(kernels.launch(N), grid=(1, 1, 1))
    program = device(driver).load(kernels.artifact(getattr(kernels, name), N, (one,)))
    assert [r.kernel for r in program.resources] == ["k"]


def test_an_endless_loop_over_many_blocks_is_refused_unless_cooperative() -> None:
    driver = FakeDriver(kernels={"k": replace(CANARY, max_threads=1024)})
    with pytest.raises(Refused) as refused:
        device(driver).load(kernels.artifact(kernels.ENDLESS, N))
    assert refused.value.failure.rule == "spin-not-cooperative"
    assert refused.value.failure.where["plan"] == "step"


def test_a_programmatic_launch_that_polls_is_loaded_where_its_grid_fits_whole() -> None:
    early = replace(kernels.launch(N), pdl=True)
    blocks = early.grid[0]
    artifact = kernels.artifact(kernels.ENDLESS, N, (early,))
    known = {"k": replace(CANARY, max_threads=1024)}
    few = dict(H200) | {"MULTIPROCESSOR_COUNT": blocks // 2}
    device(FakeDriver(kernels=known, attribute=few, room=Residency(2))).load(artifact)
    with pytest.raises(Refused, match=f"a waiting grid of {blocks} blocks") as refused:
        device(FakeDriver(kernels=known, attribute=few, room=Residency(1))).load(artifact)
    assert refused.value.failure.rule == "co-residency"
    plain = kernels.artifact(kernels.DOUBLE, N, (early,))
    device(FakeDriver(kernels=known, attribute=few, room=Residency(1))).load(plain)


@pytest.mark.parametrize(
    ("declaration", "body", "rule"),
    [
        (
            ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);",
            kernels.PRINTS,
            "extern-function",
        ),
        (
            ".extern /**/ .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);",
            kernels.PRINTS,
            "extern-function",
        ),
        (
            ".func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);",
            kernels.PRINTS,
            "extern-function",
        ),
        (
            ".weak .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);",
            kernels.PRINTS,
            "extern-function",
        ),
        (".visible /**/ .global .align 4 .u32 state;", kernels.COUNTS, "writable-global"),
        ("/**/ .global .align 4 .u32 state = 7;", kernels.COUNTS, "writable-global"),
    ],
)
def test_device_runtime_and_module_state_are_found_however_they_are_written(
    declaration: str, body: str, rule: str
) -> None:
    a = kernels.artifact(body, N)
    marker = ".extern .shared"
    ptx = a.step.ptx.replace(marker, f"{declaration}\n{marker}")
    driver = FakeDriver(kernels={"k": CANARY})
    with pytest.raises(Refused) as refused:
        device(driver).load(replace(a, step=LaunchPlan(ptx, a.step.launches)))
    assert (refused.value.status, refused.value.failure.rule) == (Status.LINT, rule)
    assert driver.loaded == []


def test_functions_and_constants_of_the_module_itself_are_fine() -> None:
    own = ".func (.reg .b32 o) plus(.reg .b32 i) { add.u32 o, i, 1; ret; }\n.const .align 4 .u32 c = 7;\n"
    ptx = kernels.kernel(kernels.DOUBLE).replace(".extern .shared", own + ".extern .shared")
    ptx = ptx.replace(
        "    ret;\n}", "    call (%r6), plus, (%r5);\n    st.global.u32 [%rd5], %r6;\n    ret;\n}"
    )
    a = kernels.artifact(kernels.DOUBLE, N)
    driver = FakeDriver(kernels={"k": CANARY})
    device(driver).load(replace(a, step=LaunchPlan(ptx, a.step.launches)))
    assert len(driver.loaded) == 1


def test_bytes_that_are_no_elf_are_told_apart() -> None:
    for data in (
        b"",
        b"\x7fELF",
        b"\x7fELF\x02\x01" + bytes(50),
        b"\x7fELF\x02\x01" + b"\xff" * 200,
    ):
        with pytest.raises(cuda_elf.NotElf):
            cuda_elf.undefined(data)
