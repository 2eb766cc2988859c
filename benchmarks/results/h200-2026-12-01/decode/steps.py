"""Three steps of an artifact, for `ncu`: python steps.py ARTIFACT_FOLDER"""
import sys
from pathlib import Path
sys.path.insert(0, "benchmarks")
import torch
from replay_check import SEED, Bench
from sandbox import artifact_store
from sandbox.devices.cuda import CudaDevice
device = CudaDevice.open()
art = artifact_store.load(next(Path(sys.argv[1]).glob("*/manifest.json")).parent)
b = Bench(device, art); b.program = device.load(art); b.step = b.program.bind("step", b.buffers); b.reset()
for n, t in b.reference.inputs(b.workload, SEED, 0, device.torch_device).items(): b.buffers[n].copy_(t)
device.synchronize()
for _ in range(3): b.step.launch()
device.synchronize()
print("ok")
