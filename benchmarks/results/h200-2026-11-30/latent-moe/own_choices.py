"""One step of a trial that a judge called wrong, again: are the experts right for the x that the kernel itself had?

    python own_choices.py MASTER STEP LAYER TOKEN FOLDER...        (from the root of the checkout; MASTER: the verdict's seed)

Runs each artifact 25 times on that step's inputs. It judges nothing.
"""
import json, sys, time
from pathlib import Path
import torch
from sandbox import artifact_store
from sandbox.devices.cuda import CudaDevice
from sandbox.jobs import JudgeJob
from sandbox.judge import rig as rigs
from sandbox.judge.case import open_case, read_artifact
from sandbox.judge.locate import Where
from sandbox.judge.observe import observe
from sandbox.verdict import Tier
from targets.kimi_k3.maths import ffn

master, step, layer, token = map(int, sys.argv[1:5])
device = CudaDevice.open()
T0, given, oracle = time.time(), None, None
def rnd(x): return x.to(torch.bfloat16).to(torch.float64)
for f in map(Path, sys.argv[5:]):
    try:
        here = next(f.glob("*/manifest.json")).parent
        art = artifact_store.load(here)
        w = art.workload
        options = {k: w[k] for k in ("preset", "layers", "rows", "context", "q", "ranks") if k in w}
        case = open_case(JudgeJob(here, art.target, options, "cuda", Tier.SCREEN, seed=master), device)
        with torch.inference_mode():
            rig = rigs.build(case, read_artifact(here, case), device.load(art))
            ws, ts = case.seeds.of("weights", 0), case.seeds.of("trial", 0)
            if given is None:
                weights = case.reference.weights(case.workload, ws, device.torch_device)
                given = case.reference.inputs(case.workload, ts, step, device.torch_device)
                print(json.dumps({"drawn": round(time.time() - T0, 1)}), flush=True)
            rig.load_weights(weights)
            outs, differ = None, 0
            for k in range(25):
                m = observe(rig, given, ("random" if k % 2 else "nan", k + 1), Where(0, step, axes=case.axes))
                if outs is None: outs = m.after
                differ += any(not torch.equal(outs[n].view(-1).view(torch.uint8), m.after[n].view(-1).view(torch.uint8)) for n in outs)
            if oracle is None:
                oracle = case.reference.run(case.workload, {**weights, **given}, "oracle")
            ids, mine = oracle.tensors["outputs.ids"], outs["outputs.ids"]
            bad = (mine != ids).nonzero().tolist()
            y = f"outputs.y.{layer - 1}"
            x = rnd(given[f"inputs.x.{layer}"].double() + outs[y].double())
            xo = rnd(given[f"inputs.x.{layer}"].double() + oracle.tensors[y].double())
            router, bias = weights[f"weights.layers.{layer}.router"].double(), weights[f"weights.layers.{layer}.router_bias"].double()
            z, zo = (ffn.scores(v[token:token + 1] @ router.T, bias)[1][0] for v in (x, xo))
            row = mine[layer, token].tolist()
            top = len(row)
            own = ffn.top(z[None], top + 1)[0].tolist()
            a, b = own[top - 1], own[top]
            print(json.dumps({"name": f.name, "runs_that_differ": differ, "ids_that_differ": bad[:8], "many": len(bad), "flips_of_y": (outs[y] != oracle.tensors[y].to(outs[y].dtype)).sum(1).tolist(),
                "row": row, "right_for_own_x": own[:top] == row, "own_top17": own, "oracle_top16": ids[layer, token].tolist(),
                "last_and_next": [a, b], "gap_own": float(z[a] - z[b]), "gap_oracle": float(zo[a] - zo[b]), "s": round(time.time() - T0, 1)}), flush=True)
            # every layer and token: right for the x that the kernel itself had?
            wrong = []
            for n in range(case.workload.layers):
                xx = given[f"inputs.x.{n}"].double()
                if n: xx = rnd(xx + outs[f"outputs.y.{n - 1}"].double())
                zz = ffn.scores(xx @ weights[f"weights.layers.{n}.router"].double().T, weights[f"weights.layers.{n}.router_bias"].double())[1]
                best = ffn.top(zz, top)
                for t in range(case.workload.rows):
                    if best[t].tolist() != mine[n, t].tolist():
                        where = [k for k in range(top) if best[t, k] != mine[n, t, k]]
                        wrong.append([n, t, where, [float(zz[t, best[t, k]] - zz[t, mine[n, t, k]]) for k in where]])
            print(json.dumps({"name": f.name, "rows": case.workload.rows * case.workload.layers, "not_right_for_own_x": wrong[:8], "many": len(wrong), "s": round(time.time() - T0, 1)}), flush=True)
    except Exception as e:
        import traceback; traceback.print_exc()
        print(json.dumps({"name": f.name, "error": repr(e)[:300]}), flush=True)
