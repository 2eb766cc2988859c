"""The same PTX on a GPU and here: ten kernels, bit for bit or within the approximate functions' error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sandbox.devices.cpu.device import CpuDevice
from sandbox.devices.cpu.ptx_parse import parse
from tests.sandbox.devices.cpu.harness import artifact
from tests.sandbox.devices.cpu.test_styles import FOLDER, HASHES, case

APPROXIMATE = {"softmax", "norm"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(HASHES))
def test_gpu_and_cpu_agree(name: str, tmp_path: Path) -> None:
    from sandbox.devices.cuda import CudaDevice

    text = (FOLDER / f"{name}.ptx").read_text()
    (entry,) = parse(text).entries
    results = []
    for device in (CpuDevice(), CudaDevice.open(0, tmp_path)):
        tensors, shape, _, index = case(name)
        placed = [t.to(device.torch_device) for t in tensors]
        a = artifact(text, tensors, shape, entry)
        device.load(a).bind("step", {f"workspace.b{i}": t for i, t in enumerate(placed)}).launch()
        device.synchronize()
        results.append(placed[index].cpu())
    here, there = results
    if name in APPROXIMATE:
        assert torch.allclose(
            here.float(),
            there.float(),
            rtol=1e-2 if here.dtype == torch.bfloat16 else 1e-5,
            atol=1e-6,
        )
    else:
        assert torch.equal(here.view(torch.uint8), there.view(torch.uint8))
