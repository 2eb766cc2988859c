"""Clocks of every stage of the ring, from a candidate that `stage_clocks_patch.py` made; lint, which refuses clocks, is off.

    python stage_clocks.py ARTIFACT_FOLDER OUT.npz
"""
import sys, os
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parents[3]))
import torch, numpy as np
from replay_check import SEED, Bench
from sandbox import artifact_store
from sandbox.devices.cuda import CudaDevice
import sandbox.devices.cuda_toolchain as ct
ct._lint = lambda *a, **k: []
device = CudaDevice.open()
art = artifact_store.load(next(Path(sys.argv[1]).glob("*/manifest.json")).parent)
b = Bench(device, art); b.reset()
for name, t in b.reference.inputs(b.workload, SEED, 0, device.torch_device).items(): b.buffers[name].copy_(t)
device.synchronize()
g = b.step.capture()
for _ in range(20): g.launch()
device.synchronize()
x = b.buffers["workspace.sync"].cpu().numpy()[128:].reshape(132, 1024, 8)
np.savez_compressed(sys.argv[2], x=x)
print("stages", [(x[c, :, 2] != 0).sum() for c in range(0, 132, 20)])
