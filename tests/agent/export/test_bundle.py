"""A bundle through a driver on host memory: same bytes as the judge's, right results, and honest failures."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from agent.export import bundle, subject, texts
from sandbox.artifact import digest, launch_dict
from sandbox.devices import cuda_plan
from sandbox.devices.cuda_driver import launch_config
from tests.agent.export import small

pytestmark = pytest.mark.slow  # a real export and its assembler, and torch operators

ALLOWED = {
    "__future__", "collections", "ctypes", "cuda", "hashlib", "json", "math", "pathlib", "sys", "torch", "typing",
    "warnings", "weakref",
}  # fmt: skip


def kernel(package: ModuleType, **driver: Any) -> tuple[Any, small.FakeDriver]:
    fake = small.FakeDriver(**driver)
    return package.Kernel("cpu", driver=fake), fake


def tensors(k: Any) -> tuple[dict[str, torch.Tensor], ...]:
    """Weights, inputs, states, outputs."""
    ref, w = small.SmallReference(), small.Small().workload(small.Options("tiny"))
    out = k.empty("outputs")
    return ref.weights(w, 5, "cpu"), ref.inputs(w, 5, 0, "cpu"), ref.states(w, 5, "cpu"), out


def wanted(weights: Any, inputs: Any, states: Any) -> torch.Tensor:
    return inputs["inputs.x"] * (2 * weights["weights.w"]) + states["states.s"]


def test_parameters_are_patched_as_the_judge_patches_them(package: ModuleType) -> None:
    k, _ = kernel(package)
    weights, inputs, states, outputs = tensors(k)
    k.prepare(weights)
    call = k.bind(inputs, states, outputs)
    given = {**weights, **inputs, **states, **outputs, **k._memory}
    addresses = {n: t.data_ptr() for n, t in given.items()}
    plan = small.artifact().step
    for launch, block in zip(plan.launches, call._plan.blocks, strict=True):
        assert block.bytes() == cuda_plan.patch(launch, addresses)
        assert block.start % 128 == 0


def test_a_call_computes_clears_scratch_and_follows_the_current_stream(package: ModuleType) -> None:
    k, fake = kernel(package)
    weights, inputs, states, outputs = tensors(k)
    k.prepare(weights)
    call = k.bind(inputs, states, outputs)
    for stream in (7, 9):
        expected, fake.now, fake.log = wanted(weights, inputs, states), stream, []
        call()
        torch.testing.assert_close(outputs["outputs.y"], expected)
        torch.testing.assert_close(states["states.s"], expected)
        assert fake.log == [("clear", 4 * small.N, stream), ("launch", "small", stream, False)]
    assert outputs["outputs.copy"].tolist() == small.TABLE.tolist()


def test_tensors_may_move_between_calls(package: ModuleType) -> None:
    k, _ = kernel(package)
    weights, inputs, states, outputs = tensors(k)
    k.prepare(weights)
    for _ in range(3):
        inputs, states = ({n: t.clone() for n, t in d.items()} for d in (inputs, states))
        outputs = k.empty("outputs")
        expected = wanted(weights, inputs, states)
        k(inputs, states, outputs)
        torch.testing.assert_close(outputs["outputs.y"], expected)


def test_a_tensor_is_checked_again_whenever_it_has_changed(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, _ = kernel(package)
    weights, inputs, states, outputs = tensors(k)
    looked: list[str] = []
    whole = package.Kernel.fit
    monkeypatch.setattr(
        package.Kernel, "fit", lambda self, n, t: looked.append(n) or whole(self, n, t)
    )
    k.prepare(weights)

    def step() -> list[str]:
        looked.clear()
        expected = wanted(weights, inputs, states)
        k(inputs, states, outputs)
        torch.testing.assert_close(outputs["outputs.y"], expected)
        return list(looked)

    everything = ["inputs.x", "states.s", "outputs.y", "outputs.copy"]
    assert step() == everything and step() == []
    x = inputs["inputs.x"]
    x.data = torch.randn(small.N)  # the same object elsewhere
    assert step() == ["inputs.x"] and step() == []
    inputs["inputs.x"] = x.clone()
    assert step() == ["inputs.x"]
    inputs["inputs.x"] = inputs["inputs.x"].view(small.N)  # another object at the same address
    assert step() == ["inputs.x"]
    k.prepare(weights)  # a new plan knows no address yet
    assert step()[-4:] == everything
    y = inputs["inputs.x"]
    for spoil, message in (
        (lambda: y.resize_(small.N - 1), "not f32"),
        (lambda: y.as_strided_((small.N,), (0,)), "contiguous"),
    ):
        kept = y.detach().clone()
        spoil()
        with pytest.raises(ValueError, match=message):
            k(inputs, states, outputs)
        y.set_(kept)
        step()


def test_calls_keep_no_tensor_alive(package: ModuleType) -> None:
    k, _ = kernel(package)
    weights, inputs, states, outputs = tensors(k)
    k.prepare(weights)(inputs, states, outputs)
    alive = weakref.ref(inputs.pop("inputs.x"))
    assert alive() is None
    with pytest.raises(ValueError, match="no tensor for inputs.x"):
        k(inputs, states, outputs)


def test_a_call_allocates_nothing(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    k, _ = kernel(package)
    weights, inputs, states, outputs = tensors(k)
    call = k.prepare(weights).bind(inputs, states, outputs)
    for name in ("empty", "zeros", "empty_like", "tensor", "frombuffer"):
        monkeypatch.setattr(torch, name, lambda *a, **k: pytest.fail("a call allocates"))
    call()
    k(inputs, states, outputs)


def test_the_torch_op_passes_opcheck(package: ModuleType) -> None:
    import importlib

    op = importlib.import_module(f"{package.__name__}.op")
    k, _ = kernel(package)
    weights, inputs, states, outputs = tensors(k)
    handle = op.register(k.prepare(weights))
    lists = [list(x.values()) for x in (inputs, states, outputs)]
    found = torch.library.opcheck(
        getattr(torch.ops, package.__name__).step.default, (handle, *lists)
    )
    assert set(found.values()) == {"SUCCESS"}
    expected = wanted(weights, inputs, states)
    op.step(handle, *lists)
    torch.testing.assert_close(outputs["outputs.y"], expected)
    with pytest.raises(ValueError, match="shorter|longer"):
        op.step(handle, [], *lists[1:])


def test_the_op_survives_torch_compile(package: ModuleType) -> None:
    import importlib

    op = importlib.import_module(f"{package.__name__}.op")
    k, _ = kernel(package)
    weights, inputs, states, outputs = tensors(k)
    handle = op.register(k.prepare(weights))

    def f(x: torch.Tensor, s: torch.Tensor, y: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        op.step(handle, [x * 2], [s], [y, c])
        return y + 1

    args = (inputs["inputs.x"], states["states.s"], *outputs.values())
    expected = wanted(weights, {"inputs.x": 2 * args[0]}, states) + 1
    out = torch.compile(f, backend="aot_eager", fullgraph=True)(*args)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.double(), "not f32"),
        (lambda t: t[:-1], "not f32"),
        (lambda t: torch.stack([t, t], 1)[:, 0], "contiguous"),
        (lambda t: torch.zeros(small.N + 1)[1:], "aligned to 16"),
        (lambda t: t.to("meta"), "must be contiguous and on cpu"),
    ],
)
def test_tensors_that_do_not_fit_are_named(package: ModuleType, change: Any, message: str) -> None:
    k, _ = kernel(package)
    weights, inputs, states, outputs = tensors(k)
    k.prepare(weights)
    inputs["inputs.x"] = change(inputs["inputs.x"])
    for use in (k.bind, k):
        with pytest.raises(package.WrongTensor, match=f"inputs.x.*{message}"):
            use(inputs, states, outputs)


def test_what_is_missing_is_named(package: ModuleType) -> None:
    k, _ = kernel(package)
    weights, inputs, states, outputs = tensors(k)
    with pytest.raises(RuntimeError, match="prepare"):
        k.bind(inputs, states, outputs)
    with pytest.raises(package.WrongTensor, match="weights.w"):
        k.prepare({})
    with pytest.raises(package.WrongTensor, match="states.s"):
        k.prepare(weights).bind(inputs, {}, outputs)


def test_the_readme_says_where_the_kernel_was_judged(tmp_path: Path) -> None:
    _, queries, run = small.record(tmp_path, small.artifact(), small.SOURCE)
    s = subject.find(queries, run, force=False)
    manifest = {"parts": {"main": {"sm_90a": {"judged": True, "sms": 132}}}, "notes": []}
    assert texts._devices(manifest, s) == ["- sm_90a, at least 132 SMs: judged on NVIDIA H200."]
    emulated = replace(s, verdict=replace(s.verdict, device={"kind": "cpu", "name": "cpu"}))
    assert "never run on a GPU" in texts._devices(manifest, emulated)[0]


@pytest.mark.parametrize(("arch", "sms", "message"), [("sm_100a", 148, "this device is sm_100a"),
                                                      ("sm_90a", 60, "has 60")])  # fmt: skip
def test_other_devices_are_refused(package: ModuleType, arch: str, sms: int, message: str) -> None:
    with pytest.raises(package.Unsupported, match=message):
        kernel(package, arch=arch, sms=sms)


def test_the_self_check_passes_and_finds_a_wrong_kernel(package: ModuleType) -> None:
    ok, why = package.self_check("cpu", small.FakeDriver())
    assert ok, why
    ok, why = package.self_check("cpu", small.FakeDriver(wrong=True))
    assert not ok and "outputs.y" in why
    with pytest.raises(package.SelfCheckFailed, match="outputs.y"):
        kernel(package, wrong=True)


def test_the_fallback_is_taken_with_a_warning(package: ModuleType) -> None:
    def plain() -> None:
        raise AssertionError

    if torch.cuda.is_available():
        pytest.skip("needs a machine where the kernel cannot run")
    with pytest.warns(RuntimeWarning, match="not used"):
        assert package.kernel_or(plain, "cuda:0") is plain
    with pytest.warns(RuntimeWarning, match="not used"):
        assert package.kernel_or(plain) is plain


def test_the_real_driver_describes_launches_as_the_judges_does(package: ModuleType) -> None:
    import importlib

    import cuda.bindings.driver as cu

    module = importlib.import_module(f"{package.__name__}.driver")
    driver = object.__new__(module.CudaDriver)
    driver._cu = cu
    plain = small.artifact().step.launches[0]
    for launch in (
        plain, replace(plain, smem=4096, cooperative=True),
        replace(plain, grid=(4, 2, 1), cluster=(2, 1, 1), pdl=True),
    ):  # fmt: skip
        config = driver.config(launch_dict(launch), launch.pdl)
        driver.set_stream([config], 77)
        assert described(config) == described(launch_config(cu, launch, 77, launch.pdl))


def described(config: Any) -> list[Any]:
    sizes = (
        "gridDimX",
        "gridDimY",
        "gridDimZ",
        "blockDimX",
        "blockDimY",
        "blockDimZ",
        "sharedMemBytes",
        "numAttrs",
    )
    attributes = [
        (
            int(a.id),
            int(a.value.cooperative),
            a.value.clusterDim.x,
            a.value.clusterDim.y,
            a.value.clusterDim.z,
        )
        for a in config.attrs
    ]
    return [*(int(getattr(config, s)) for s in sizes), int(config.hStream), *attributes]


def test_a_package_without_a_gpu_says_so(made: bundle.Bundle) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    done = subprocess.run(
        [sys.executable, "-m", made.package], cwd=made.folder, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 1 and "cannot run here" in done.stdout


def test_a_damaged_file_is_found(copied: Path) -> None:
    cubin = next((copied / "data").glob("*.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:-1] + b"x")
    done = subprocess.run(
        [sys.executable, "-m", copied.name], cwd=copied.parent, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 1 and "damaged" in done.stdout and cubin.name in done.stdout


def test_the_package_needs_torch_and_cuda_bindings_alone(made: bundle.Bundle) -> None:
    for path in (made.folder / made.package).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert {n.split(".")[0] for n in names} <= ALLOWED, path


def test_the_manifest_says_what_is_there_and_where_it_comes_from(made: bundle.Bundle) -> None:
    root = made.folder / made.package
    manifest = small.manifest(root / "manifest.json")
    on_disk = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()} - {"manifest.json"}
    assert set(manifest["files"]) == {n for n in on_disk if "__pycache__" not in n}
    for name, sha in manifest["files"].items():
        assert digest((root / name).read_bytes()) == sha
    origin = manifest["provenance"]
    assert origin["hashes"]["artifact"] == small.artifact().sha256
    assert origin["device"]["name"] == "NVIDIA H200" and origin["judged"]["date"].startswith("2026")
    assert origin["review"].startswith("approved by Ada")
    assert manifest["record"]["part"] == "main" and manifest["ptxas"].startswith("13.")
    readme = (made.folder / "README.md").read_text()
    assert "two GPUs" in readme and "rows 2" in readme and made.package in readme
    assert not (made.folder / "RFC.md").exists()


def test_the_assembler_that_the_environment_names_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, queries, run = small.record(tmp_path, small.artifact(), small.SOURCE)
    found = subject.find(queries, f"{run}-0", force=False)
    monkeypatch.setenv("KERNELGEN_PTXAS", "/nowhere/ptxas")
    with pytest.raises(subject.ExportRefused, match="/nowhere/ptxas"):
        bundle.write(queries, found, bundle.Wanted(tmp_path / "out"))


def test_a_second_export_replaces_a_bundle_and_nothing_else(tmp_path: Path) -> None:
    _, queries, run = small.record(tmp_path, small.artifact(), small.SOURCE, decided="")
    with pytest.raises(subject.ExportRefused, match="no standing approval"):
        subject.find(queries, run, force=False)
    found = subject.find(queries, run, force=True)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(subject.ExportRefused, match="no bundle"):
        bundle.write(queries, found, bundle.Wanted(mine))
    first = bundle.write(queries, found, bundle.Wanted(tmp_path / "b"))
    again = bundle.write(queries, found, bundle.Wanted(tmp_path / "b"))
    assert json.dumps(first.manifest) == json.dumps(again.manifest)
    assert "NOBODY HAS REVIEWED" in (again.folder / "README.md").read_text()


def test_a_folder_that_is_no_bundle_is_left_as_it_is(
    made: bundle.Bundle, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As `compile -o` leaves one: folders of artifacts, each with a manifest."""
    folder = tmp_path_factory.mktemp("kept")
    _, queries, run = small.record(folder, small.artifact(), small.SOURCE)
    found = subject.find(queries, f"{run}-0", force=False)
    artifacts = queries.workspace.artifacts
    assert list(artifacts.glob("*/manifest.json"))
    before = sorted(p for p in folder.rglob("*"))
    with pytest.raises(subject.ExportRefused, match="is no bundle"):
        bundle.write(queries, found, bundle.Wanted(artifacts))
    assert sorted(p for p in folder.rglob("*")) == before
    again = bundle.write(queries, found, bundle.Wanted(made.folder))  # its own is replaced
    assert again.manifest["files"] == made.manifest["files"]
    assert [p.name for p in made.folder.parent.iterdir()] == [made.folder.name]
