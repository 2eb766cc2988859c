"""How near the 16th and the 17th expert of one token are (verdict seed 1843616178336346984, step 11, layer 1, token 1), and what each
schedule of the reference makes of it. Weights drawn as torch draws them on an H200, on the host.

    python near_tie_host.py        (from the root of the checkout)
"""
import sys, numpy as np, torch
torch.set_num_threads(1)
from sandbox.judge.seeds import Seeds
from targets import base
from targets.kimi_k3 import generate
from targets.kimi_k3.maths import ffn
from targets.kimi_k3.maths.layer import Layer
from targets.kimi_k3.maths.exchange import Loopback
from targets.kimi_k3.maths.precision import SCHEDULES, bf
from targets.kimi_k3 import routing
from card_draws import Emu
def setup(master, step, layers=12, label=("trial", 0)):
    w = base.find("kimi-k3-latent-moe").workload(base.Options(preset="tp8", rows=8, layers=layers))
    seeds = Seeds(master)
    return w, seeds.of("weights", 0), seeds.of(*label)
master, step, token = 1843616178336346984, 11, 1
w, ws, ts = setup(master, step)
bufs = {b.name: b for b in w.buffers}
inp = generate.inputs(w, ts, step, "cpu")
inp = {k: v[token:token + 1] for k, v in inp.items() if ".0" in k or ".1." in k or k.endswith("x.1")}
def weight(n, leaf, rows=None):
    b = bufs[f"weights.layers.{n}.{leaf}"]
    return generate._weight(w, b, Emu(b, ws, rows))
W0 = {l: weight(0, l) for l in ("router", "router_bias", "latent_down", "latent_norm", "latent_up", "shared_gate_up", "shared_down")}
W1 = {l: weight(1, l) for l in ("router", "router_bias")}
x0 = inp["inputs.x.0"].double()
logits = x0 @ W0["router"].double().T
ids0 = ffn.top(ffn.scores(logits, W0["router_bias"])[1], 17)
z = ffn.scores(logits, W0["router_bias"])[1]
print("layer 0 ids", ids0.tolist(), "gap", z[0, ids0[0, :16]].min().item() - z[0, ids0[0, 16]].item())
ids = ids0[:, :16]
rows = ids[0].tolist()
for l in ("w1", "w1_scale", "w3", "w3_scale", "w2", "w2_scale"): W0[l] = weight(0, l, rows)
import torch, sys
torch.set_num_threads(1)
from targets.kimi_k3.maths import ffn
from targets.kimi_k3.maths.layer import Layer
from targets.kimi_k3.maths.exchange import Loopback
from targets.kimi_k3.maths.precision import SCHEDULES, bf
from targets.kimi_k3 import routing
def run(name):
    s = SCHEDULES[name]
    rem = {k.split("layers.0.")[1]: v.to(s.dtype) if v.dtype==torch.bfloat16 else v for k, v in inp.items() if "remote.layers.0." in k}
    lay = Layer(W0, {}, rem) 
    # experts by local number
    x = inp["inputs.x.0"].to(s.dtype)
    keep = {}
    def choose(lg, b): return ids
    old = ffn.experts
    ffn.experts = lambda s_, latent, i_, w_: old(s_, latent, torch.arange(16)[None], w_)
    try: r = ffn.moe(s, x, lay, choose)
    finally: ffn.experts = old
    y = r.delta
    x1 = bf(inp["inputs.x.1"].to(s.dtype) + y)
    lg = ffn.linear_wide(s, x1, W1["router"])
    return y, x1, lg, r
out = {n: run(n) for n in SCHEDULES}
o = out["oracle"]; lg = o[2]
z = ffn.scores(lg, W1["router_bias"])[1][0]
top = torch.sort(z, descending=True, stable=True)
print("top:", [(int(i), round(float(v), 6)) for i, v in zip(top.indices[:20], top.values[:20])])
print("z731", z[731].item(), "z421", z[421].item(), "diff", (z[731]-z[421]).item())
s = torch.sigmoid(lg[0])
for n, r in out.items():
    d = (r[2].double() - lg)[0]
    zz = ffn.scores(r[2], W1["router_bias"])[1][0]
    print(n, "y flips", int((r[0].double()!=o[0].double()).sum()), "x1 flips", int((r[1].double()!=o[1].double()).sum()), "max logit dev", d.abs().max().item(), "rms", d.pow(2).mean().sqrt().item(), "gap 731-421", (zz[731]-zz[421]).item())
seen = max((out[n][2].double()-lg).abs().max().item() for n in ("split","rounded"))
err = 2*seen + 2**-20*(1+lg[0].abs())
b = err*s*(1-s)+2**-20
print("bound 731", b[731].item(), "421", b[421].item(), "sum", (b[731]+b[421]).item(), "gap", (z[731]-z[421]).item())
print("nearties gaps", [(round(float(top.values[i]-top.values[i+1]),6), round(float(b[top.indices[i]]+b[top.indices[i+1]]),6)) for i in range(16)])
