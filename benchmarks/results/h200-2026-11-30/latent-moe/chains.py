"""The judge's own timed chains on an artifact, but where two of them differ: which tensor, step, instance, token, how many. Goes on.

chains.py FOLDER MASTER BLOCKS ROUNDS BASELINES(0/1) [SECONDS]
"""
import dataclasses, json, sys, time
from pathlib import Path
import torch
from sandbox import artifact_store
from sandbox.devices.cuda import CudaDevice
from sandbox.jobs import JudgeJob
from sandbox.judge import chains, judge, tiers, timing
from sandbox.verdict import Tier

folder, master, blocks, rounds, base = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
until = time.time() + float(sys.argv[6] if len(sys.argv) > 6 else 1e9)
here = next(folder.glob("*/manifest.json")).parent
art = artifact_store.load(here)
T0 = time.time()
seen = {"chains": 0, "odd": 0, "shown": 0}
kept = {}
ORDER = []

def spans(t, bad):
    at = bad.nonzero()
    lows, highs = at.min(0).values.tolist(), at.max(0).values.tolist()
    many = [len(at[:, k].unique()) for k in range(at.shape[1])]
    return {"n": len(at), "low": lows, "high": highs, "distinct": many, "first": at[:4].tolist()}

def locate(lanes, arm, clean):
    found = []
    for group, arena, count in (("outputs", lanes.outputs, lanes.steps), ("states", lanes.states, lanes.sets)):
        for raw, old in zip(arena.raws, clean[group]):
            if torch.equal(raw, old):
                continue
            whole = int((raw != old).sum())
            found.append({"group": group, "bytes": whole})
            for i in range(count):
                for b in lanes.case.buffers(group):
                    name = f"{i}/{b.name}"
                    s = arena.slot(name)
                    if s.raw.data_ptr() != raw.data_ptr():
                        continue
                    was, now = old[s.start:s.end], raw[s.start:s.end]
                    if torch.equal(was, now):
                        continue
                    size = s.tensor.element_size()
                    bad = (was.view(-1, size) != now.view(-1, size)).any(-1).reshape(s.tensor.shape)
                    a, z = was.view(s.tensor.dtype).reshape(s.tensor.shape), s.tensor
                    d = spans(z, bad)
                    d["values"] = [[float(a[tuple(x)]), float(z[tuple(x)])] for x in d["first"]]
                    found.append({"lane": i, "tensor": b.name, "shape": list(b.shape), **d})
    return found

def timed(self, arm):
    seen["chains"] += 1
    key = (self._round, arm.name)
    raws = {"outputs": self.lanes.outputs.raws, "states": self.lanes.states.raws}
    if key not in kept:
        kept.clear()
        kept[key] = {g: tuple(r.clone() for r in x) for g, x in raws.items()}
        self._left[arm.name] = self.lanes.digest()
        return
    if all(torch.equal(a, b) for g in raws for a, b in zip(raws[g], kept[key][g])):
        return
    seen["odd"] += 1
    if seen["shown"] < 6:
        seen["shown"] += 1
        print(json.dumps({"odd": seen["odd"], "chain": seen["chains"], "round": self._round, "at": round(time.time() - T0, 2), "arms": ORDER[-3:]}), flush=True)
        for x in locate(self.lanes, arm, kept[key])[:40]:
            print("   ", json.dumps(x), flush=True)
chains.ChainCheck.timed = timed
old_untimed = chains.ChainCheck.untimed
def untimed(self, arm, watch):
    """First with the others: does an untimed run leave what the timed chains left?"""
    self._walk(arm, set(), set())
    key = (self._round, arm.name)
    raws = {"outputs": self.lanes.outputs.raws, "states": self.lanes.states.raws}
    same = all(torch.equal(a, b) for g in raws for a, b in zip(raws[g], kept[key][g]))
    print(json.dumps({"untimed": same, "round": self._round, "chains": seen["chains"], "odd": seen["odd"], "at": round(time.time() - T0, 2)}), flush=True)
    if not same:
        for x in locate(self.lanes, arm, kept[key])[:12]:
            print("   ", json.dumps(x), flush=True)
    if time.time() > until:
        raise KeyboardInterrupt
chains.ChainCheck.untimed = untimed
old_lap = timing._lap
def lap(s, arm):
    ORDER.append(arm.name)
    return old_lap(s, arm)
timing._lap = lap

w = art.workload
options = {k: w[k] for k in ("preset", "layers", "rows", "context", "q", "ranks") if k in w}
device = CudaDevice.open()
job = JudgeJob(here, art.target, options, "cuda", Tier.SCREEN, baselines=("usual",) if base else (), seed=master or None)
todo = dataclasses.replace(tiers.SCREEN, seeds=1, steps=2, repeats=2, blocks=blocks, rounds=rounds)
try:
    v = judge.run(job, device, lambda p: print(json.dumps({"phase": p, "at": round(time.time() - T0, 2)}), flush=True), todo)
    print(json.dumps({"name": folder.name, "status": str(v.status), "failure": v.failure.message if v.failure else None, **seen, "s": round(time.time() - T0, 1)}), flush=True)
except KeyboardInterrupt:
    print(json.dumps({"name": folder.name, "status": "stopped", **seen, "s": round(time.time() - T0, 1)}), flush=True)
