"""The CUDA device on a GPU. `pytest -m gpu`. Faults end a process: tests/sandbox/judge/test_server_gpu.py has them."""

from dataclasses import replace
from pathlib import Path

import pytest

from sandbox import canary
from sandbox.devices import cuda_rate
from sandbox.devices.base import Refused
from sandbox.devices.cuda import CudaDevice
from sandbox.devices.roofline import measure as roofline
from sandbox.verdict import Status
from tests.sandbox.devices import kernels

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
N = 1 << 16


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return CudaDevice.open()


@pytest.fixture
def buffers(device: CudaDevice) -> dict[str, "torch.Tensor"]:
    x = torch.arange(N, dtype=torch.float32, device="cuda") % 1000
    return {"inputs.x": x, "outputs.y": torch.zeros_like(x)}


def test_canary(device: CudaDevice) -> None:
    assert canary.run(device).message == "ok"


def test_graph_and_plain_launches_agree(device: CudaDevice, buffers: dict) -> None:
    program = device.load(kernels.artifact(kernels.DOUBLE, N))
    bound = program.bind("step", buffers)
    graph = bound.capture()
    device.synchronize()
    assert not buffers["outputs.y"].any()
    graph.launch()
    device.synchronize()
    assert torch.equal(buffers["outputs.y"], 2 * buffers["inputs.x"] + 1)
    buffers["outputs.y"].zero_()
    bound.launch()
    device.synchronize()
    assert torch.equal(buffers["outputs.y"], 2 * buffers["inputs.x"] + 1)
    assert program.facts["k"].params == ((0, 8), (8, 8), (16, 4))


@pytest.mark.parametrize("captured", [False, True])
def test_programmatic_launches_keep_their_order(
    device: CudaDevice, buffers: dict, captured: bool
) -> None:
    launches = (replace(kernels.launch(N), pdl=True),) * 10
    bound = device.load(kernels.artifact(kernels.CHAINED, N, launches)).bind("step", buffers)
    (bound.capture() if captured else bound).launch()
    device.synchronize()
    assert (buffers["outputs.y"] == 2**10 - 1).all()


def test_a_capture_keeps_programmatic_edges(device: CudaDevice, buffers: dict) -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    launches = (replace(kernels.launch(N), pdl=True),) * 4
    bound = device.load(kernels.artifact(kernels.CHAINED, N, launches)).bind("step", buffers)
    device.driver.begin_capture(device.stream)
    bound.launch()
    error, graph = driver.cuStreamEndCapture(driver.CUstream(device.stream))
    assert not error
    count = driver.cuGraphGetEdges(graph)[-1]
    error, _, _, data, _ = driver.cuGraphGetEdges(graph, count)
    assert not error
    kind = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    assert [int(d.type) for d in data[:count]] == [int(kind)] * 3


@pytest.mark.parametrize("captured", [False, True])
def test_clusters_and_cooperative_launches(
    device: CudaDevice, buffers: dict, captured: bool
) -> None:
    one = replace(
        kernels.launch(N),
        cluster=(2, 1, 1),
        cooperative=True,
        smem=200_000,
        grid=(64, 1, 1),
        block=(1024, 1, 1),
    )
    bound = device.load(kernels.artifact(kernels.CLUSTER, N, (one,))).bind("step", buffers)
    (bound.capture() if captured else bound).launch()
    device.synchronize()
    expected = 1.0 - (torch.arange(N, device="cuda") // 1024) % 2
    assert torch.equal(buffers["outputs.y"], expected)


def test_a_cluster_of_sixteen_is_allowed(device: CudaDevice, buffers: dict) -> None:
    one = replace(kernels.launch(N), cluster=(16, 1, 1), smem=1024)
    bound = device.load(kernels.artifact(kernels.CLUSTER, N, (one,))).bind("step", buffers)
    bound.launch()
    device.synchronize()
    assert buffers["outputs.y"].max() == 15


@pytest.mark.parametrize(
    ("change", "status", "rule"),
    [
        ({"cooperative": True, "grid": (5000, 1, 1)}, Status.LINT, "co-residency"),
        ({"cooperative": True, "grid": (265, 1, 1), "smem": 115_000}, Status.LINT, "co-residency"),
        ({"params": bytes(24)}, Status.PLAN_ERROR, "parameters"),
        ({"kernel": "missing"}, Status.PLAN_ERROR, "unknown-kernel"),
    ],
)
def test_plans_that_do_not_fit_are_refused(
    device: CudaDevice, change: dict, status: Status, rule: str
) -> None:
    one = replace(kernels.launch(N), **change)
    with pytest.raises(Refused) as refused:
        device.load(kernels.artifact(kernels.DOUBLE, N, (one,)))
    assert (refused.value.status, refused.value.failure.rule) == (status, rule)


def test_torch_work_and_launches_share_one_order(device: CudaDevice, buffers: dict) -> None:
    """Memsets before a launch are recorded with it, as clearing of scratch is."""
    bound = device.load(kernels.artifact(kernels.CHAINED, N)).bind("step", buffers)

    def work() -> None:
        buffers["outputs.y"].fill_(3.0)
        bound.launch()
        bound.launch()

    work()
    graph = device.record(work, 2)
    for _ in range(3):
        graph.launch()
    device.synchronize()
    assert (buffers["outputs.y"] == 2 * (2 * 3 + 1) + 1).all()
    assert graph.launches == 2


def test_facts_are_of_this_card(device: CudaDevice) -> None:
    f = device.facts()
    properties = torch.cuda.get_device_properties(0)
    assert (f.name, f.sms) == (properties.name, properties.multi_processor_count)
    assert f.l2_bytes == properties.L2_cache_size
    assert f.extra["pageable_memory_access"] in (0, 1)
    assert f.spec_rate is None or 1e12 < f.spec_rate < 2e13


def test_stopwatch_and_flush(device: CudaDevice, buffers: dict) -> None:
    from sandbox.devices.cuda_timing import L2Flusher, Stopwatch

    flusher, watch = L2Flusher(device), Stopwatch(device)
    assert flusher.buffer.numel() == 2 * device.facts().l2_bytes
    watch.start()
    flusher.flush()
    watch.stop()
    device.synchronize()
    assert 1 < watch.us() < 10_000


def test_the_streaming_rate_is_plausible_and_kept(device: CudaDevice, tmp_path: Path) -> None:
    rate = cuda_rate.measure(device)
    spec = device.facts().spec_rate
    assert spec is None or 0.6 * spec < rate < 1.05 * spec
    device.state = tmp_path
    kept = cuda_rate.remember(device)
    assert kept == device.facts().stream_rate
    assert kept == pytest.approx(rate, rel=0.1)
    device.state = None


def test_the_roofline_is_plausible_and_kept(device: CudaDevice, tmp_path: Path) -> None:
    device.state = tmp_path
    device.forget_facts()
    found = roofline.remember(device)
    assert found is not None and "missing" not in found, found
    assert 0.05 < found["flag_us"] < 5 and 0.2 < found["grid_barrier_us"] < 10
    assert 0.8 < found["bulk_read_bytes_per_s"] / found["stream_read_bytes_per_s"] < 1.1
    assert found["graph_node_gap_us"] < 20 and found["launch_gap_us"] < 50
    assert (
        found["l2_read_bytes_per_s"]
        > found["stream_read_bytes_per_s"]
        > 0.5 * found["copy_bytes_per_s"]
    )
    assert device.facts().extra["roofline"]["flag_us"] == found["flag_us"]
