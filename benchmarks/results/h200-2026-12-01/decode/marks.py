"""Raw rows of marks of several replays, for each artifact folder: OUT/NAME.npz"""
import os, sys
from pathlib import Path
sys.path.insert(0, "benchmarks")
import numpy as np, torch
from replay_check import SEED, Bench
from sandbox import artifact_store
from sandbox.devices.cuda import CudaDevice
from sandbox.judge.clock import CudaClock
from sandbox.judge import timeline as tl
device = CudaDevice.open(); clock = CudaClock(device)
for f in sys.argv[1:]:
    art = artifact_store.load(next(Path(f).glob("*/manifest.json")).parent)
    bench = Bench(device, art)
    bench.program = device.load(art); bench.step = bench.program.bind("step", bench.buffers)
    bench.reset()
    inputs = bench.reference.inputs(bench.workload, SEED, 0, device.torch_device)
    for n, t in inputs.items(): bench.buffers[n].copy_(t)
    bench.step.launch(); device.synchronize()
    g = bench.step.capture(); g.launch(); device.synchronize()
    rows = bench.buffers["workspace.timeline"]
    tabs = []
    for k in range(10):
        rows.zero_(); clock.flush_l2() if k % 2 else None; device.synchronize()
        g.launch(); device.synchronize()
        t = rows.view(torch.int32).cpu().numpy()
        tabs.append(t[:2 * tl.blocks_of(art) + 200, :int(t[:, 0, 0].max()) + 2].copy())
    m = min(x.shape[1] for x in tabs)
    np.savez_compressed(os.path.join(os.environ["OUT"], Path(f).name + ".npz"), t=np.stack([x[:, :m] for x in tabs]), phases=np.array(tl.phases_of(art)), blocks=tl.blocks_of(art))
    print(f, tabs[0].shape, flush=True)
