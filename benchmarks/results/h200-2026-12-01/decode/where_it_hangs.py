"""Where a step hangs: a build with marks whose rows of marks lie in host memory, read while the kernel is stuck.

    python where_it_hangs.py ARTIFACT_FOLDER
"""
import os, sys, threading, time, collections
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parents[3]))
import numpy as np, torch
from replay_check import SEED, Bench
from sandbox import artifact_store
from sandbox.devices.cuda import CudaDevice
from sandbox.judge import timeline as tl
device = CudaDevice.open()
art = artifact_store.load(next(Path(sys.argv[1]).glob("**/manifest.json")).parent)
b = Bench(device, art)
rows = b.buffers.get("workspace.timeline")
phases, n = (tl._phases(art), tl._blocks(art)) if rows is not None else ((), 0)
plain = None
if rows is not None:
    plain = torch.zeros(rows.numel() + 4096, dtype=torch.int32).pin_memory()
    class Mapped: pass
    m = Mapped(); m.__cuda_array_interface__ = {"shape": tuple(rows.shape), "typestr": "<i4", "data": (plain.data_ptr(), False), "version": 3, "strides": None}
    b.buffers["workspace.timeline"] = torch.as_tensor(m, device=device.torch_device)
    b.step = b.program.bind("step", b.buffers)
b.reset()
if plain is not None: plain.zero_()
for name, t in b.reference.inputs(b.workload, SEED, 0, device.torch_device).items(): b.buffers[name].copy_(t)
device.synchronize()
names = [p[0] for p in phases]
def told():
    t = plain[: rows.numel()].numpy().reshape(rows.shape).astype(np.int64)
    for role in range(3):
        last = collections.Counter(); ex = collections.defaultdict(list)
        for i in range(role * n, min((role + 1) * n, t.shape[0])):
            used = np.nonzero(t[i, 1:, 0])[0]
            if len(used) == 0: last["none"] += 1; continue
            w = int(t[i, 1 + used[-1], 3])
            key = (len(used), hex(w & 0xffffffff)); last[key] += 1; ex[key].append(i - role * n)
        print("role", role, [(k, v, ex[k][:5]) for k, v in last.most_common(8)], flush=True)
    print("first track marks", [hex(int(x) & 0xffffffff) for x in t[0, 1:60, 3]], names, flush=True)
for k in range(2):
    b.step.launch()
    th = threading.Thread(target=device.synchronize, daemon=True); th.start(); th.join(6)
    if th.is_alive():
        print("hangs at step", k, flush=True)
        if plain is not None: told(); time.sleep(0.5); told()
        os._exit(3)
    sync = b.buffers["workspace.sync"].cpu()
    print("step", k, "gave up", [hex(x & 0xffffffff) for x in sync[64:80].tolist()], "counts", sync[0].item(), sync[32].item(), "base", sync[96:104].tolist())
    for nme, t in b.buffers.items():
        if nme.startswith("outputs.") and t.is_floating_point() and "send" not in nme:
            print("  ", nme, torch.isfinite(t.double()).all().item(), round(t.double().norm().item(), 3))
    print("   ids", b.buffers["outputs.ids"].view(-1)[:20].tolist(), flush=True)
