"""Launch plans against limits and cubins, without a driver."""

import ctypes
from dataclasses import replace

import cuda.bindings.driver as cu
import pytest

from sandbox import canary
from sandbox.artifact import Artifact, Buffer, Launch, LaunchPlan, Relocation
from sandbox.devices import cuda_facts, cuda_plan
from sandbox.devices.cuda_driver import launch_config
from sandbox.devices.cuda_plan import KernelFacts, ParamBlock, Residency
from sandbox.verdict import Status
from tests.sandbox.devices.fake_driver import H200

LIMITS = cuda_facts.limits(H200)
FACTS = KernelFacts("k", ((0, 8), (8, 4), (16, 8)), 64, 0, 1024, 512)
LAUNCH = Launch(
    kernel="k",
    grid=(132, 1, 1),
    block=(256, 1, 1),
    params=bytes(8) + b"\x07\0\0\0" + bytes(4) + bytes(8),
    param_offsets=(0, 8, 16),
    relocations=(Relocation(0, "inputs.x"), Relocation(16, "outputs.y", 12)),
    smem=200_000,
)


def test_patch_writes_addresses_and_nothing_else() -> None:
    block = cuda_plan.patch(LAUNCH, {"inputs.x": 0x7F0000000100, "outputs.y": 0x7F1000000000})
    assert block == (
        (0x7F0000000100).to_bytes(8, "little")
        + b"\x07\0\0\0"
        + bytes(4)
        + (0x7F100000000C).to_bytes(8, "little")
    )


def test_param_block_points_at_each_parameter_and_is_aligned() -> None:
    data = bytes(range(200))
    block = ParamBlock(data, (0, 64, 192))
    assert block.start % 128 == 0
    pointers = (ctypes.c_void_p * 3).from_address(block.address)
    assert [ctypes.string_at(p, 8) for p in pointers] == [data[0:8], data[64:72], data[192:200]]


@pytest.mark.parametrize(
    ("change", "status", "rule"),
    [
        ({"params": LAUNCH.params + bytes(8)}, Status.PLAN_ERROR, "parameters"),
        ({"params": LAUNCH.params[:-8]}, Status.PLAN_ERROR, "parameters"),
        ({"param_offsets": (0, 12, 16)}, Status.PLAN_ERROR, "parameters"),
        ({"relocations": (Relocation(8, "inputs.x"),)}, Status.PLAN_ERROR, "relocation"),
        ({"block": (513, 1, 1)}, Status.PLAN_ERROR, "block"),
        ({"grid": (1, 65536, 1)}, Status.UNSUPPORTED, "grid"),
        ({"smem": 232448 - 1023}, Status.UNSUPPORTED, "shared-memory"),
        ({"cluster": (5, 1, 1)}, Status.PLAN_ERROR, "cluster"),
    ],
)
def test_a_launch_that_does_not_fit_is_refused(change: dict, status: Status, rule: str) -> None:
    found = cuda_plan.check_launch(replace(LAUNCH, **change), FACTS, LIMITS)
    assert found is not None
    assert (found.status, found.failure.rule) == (status, rule)


def test_a_launch_at_the_limits_is_accepted() -> None:
    edge = replace(LAUNCH, block=(512, 1, 1), smem=232448 - 1024, cluster=(4, 1, 1))
    assert cuda_plan.check_launch(LAUNCH, FACTS, LIMITS) is None
    assert cuda_plan.check_launch(edge, FACTS, LIMITS) is None


def test_clusters_must_match_what_the_kernel_was_compiled_for() -> None:
    fixed = replace(FACTS, required_cluster=(2, 1, 1))
    assert cuda_plan.check_launch(replace(LAUNCH, cluster=(2, 1, 1)), fixed, LIMITS) is None
    assert cuda_plan.check_launch(LAUNCH, fixed, LIMITS) is None
    assert cuda_plan.check_launch(replace(LAUNCH, cluster=(4, 1, 1)), fixed, LIMITS) is not None
    assert cuda_plan.check_launch(LAUNCH, replace(FACTS, must_set_cluster=True), LIMITS) is not None


@pytest.mark.parametrize(
    ("launch", "room", "rule"),
    [
        (replace(LAUNCH, cooperative=True), Residency(1), None),
        (replace(LAUNCH, cooperative=True, grid=(133, 1, 1)), Residency(1), "co-residency"),
        (replace(LAUNCH, cooperative=True, grid=(264, 1, 1)), Residency(2), None),
        (replace(LAUNCH, grid=(10_000, 1, 1)), Residency(1), None),
        (LAUNCH, Residency(0), "residency"),
        (
            replace(LAUNCH, cooperative=True, cluster=(4, 1, 1), grid=(120, 1, 1)),
            Residency(1, 30),
            None,
        ),
        (
            replace(LAUNCH, cooperative=True, cluster=(4, 1, 1), grid=(124, 1, 1)),
            Residency(1, 30),
            "co-residency",
        ),
        (replace(LAUNCH, cluster=(12, 1, 1)), Residency(1, 0), "residency"),
    ],
)
def test_residency(launch: Launch, room: Residency, rule: str | None) -> None:
    found = cuda_plan.check_residency(launch, FACTS, LIMITS, room)
    assert (found.failure.rule if found else None) == rule
    assert found is None or found.status is Status.LINT


@pytest.mark.parametrize(
    ("change", "polls", "room", "fits"),
    [
        ({}, True, Residency(1), True),
        ({"grid": (133, 1, 1)}, True, Residency(1), False),
        ({"grid": (133, 1, 1)}, False, Residency(1), True),
        ({"grid": (133, 1, 1), "pdl": False}, True, Residency(1), True),
        ({"grid": (7, 8, 1), "cluster": (7, 1, 1)}, True, Residency(4, 8), True),
        ({"grid": (7, 8, 1), "cluster": (7, 1, 1)}, True, Residency(4, 7), False),
    ],
)
def test_a_programmatic_grid_that_polls_fits_whole(
    change: dict, polls: bool, room: Residency, fits: bool
) -> None:
    """Without PDL such a grid was refused before (`spin-not-cooperative`), or is one block or one cluster."""
    launch = replace(LAUNCH, **{"pdl": True, **change})
    found = cuda_plan.check_residency(launch, replace(FACTS, polls=polls), LIMITS, room)
    assert (found is None) is fits
    assert fits or (found is not None and found.failure.rule == "co-residency")


def test_prepare_may_name_weights_constants_and_persistent_scratch_only() -> None:
    buffers = (
        Buffer("weights.w", "f32", (8,)),
        Buffer("inputs.x", "f32", (8,)),
        Buffer("workspace.kept", "f32", (8,), init="zero", lifetime="persistent"),
        Buffer("workspace.step", "f32", (8,), init="zero", lifetime="step"),
    )

    def plan(*names: str) -> LaunchPlan:
        n = len(names)
        relocations = tuple(Relocation(8 * i, name) for i, name in enumerate(names))
        offsets = tuple(8 * i for i in range(n))
        return LaunchPlan(
            "", (Launch("k", (1, 1, 1), (1, 1, 1), bytes(8 * n), offsets, relocations),)
        )

    artifact = Artifact(
        "t", {}, "sm_90a", buffers, plan("inputs.x"), plan("weights.w", "workspace.kept")
    )
    assert cuda_plan.prepare_reads(artifact) == ()
    bad = replace(artifact, prepare=plan("weights.w", "inputs.x", "workspace.step"))
    assert cuda_plan.prepare_reads(bad) == ("inputs.x", "workspace.step")


def test_addresses_must_exist_and_be_aligned() -> None:
    artifact = canary.artifact("sm_90a")
    cuda_plan.check_addresses(artifact.step, artifact, {"inputs.x": 4096, "outputs.y": 8192 + 16})
    with pytest.raises(ValueError, match=r"outputs\.y"):
        cuda_plan.check_addresses(artifact.step, artifact, {"inputs.x": 4096})
    with pytest.raises(ValueError, match="not aligned to 16"):
        cuda_plan.check_addresses(
            artifact.step, artifact, {"inputs.x": 4096, "outputs.y": 8192 + 8}
        )


def test_driver_configuration_carries_sizes_and_the_three_attributes() -> None:
    launch = replace(
        LAUNCH, cooperative=True, cluster=(4, 2, 1), grid=(132, 2, 3), block=(64, 2, 1)
    )
    config = launch_config(cu, launch, 0xABC0, pdl=True)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (132, 2, 3)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (64, 2, 1)
    assert (config.sharedMemBytes, int(config.hStream), config.numAttrs) == (200_000, 0xABC0, 3)
    ids = cu.CUlaunchAttributeID
    by_id = {a.id: a.value for a in config.attrs}
    assert by_id[ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE].cooperative == 1
    dims = by_id[ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION].clusterDim
    assert (dims.x, dims.y, dims.z) == (4, 2, 1)
    pdl = by_id[ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION]
    assert pdl.programmaticStreamSerializationAllowed == 1
    assert launch_config(cu, LAUNCH, 0, pdl=False).numAttrs == 0
