"""Timed chains as the judge's, each step followed by a copy of mail and counters: what a step left in its boxes where it differs from the other times.

boxes.py FOLDER MASTER SECONDS [STEPS]
"""
import json, sys, time
from collections import Counter
from pathlib import Path
import torch
from sandbox import artifact_store
from sandbox.devices.cuda import CudaDevice
from sandbox.jobs import JudgeJob
from sandbox.judge import lanes as lane_memory, arms
from sandbox.judge import rig as rigs
from sandbox.judge.case import open_case, read_artifact
from sandbox.verdict import Tier

folder, master, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
steps = int(sys.argv[4]) if len(sys.argv) > 4 else 64
here = next(folder.glob("*/manifest.json")).parent
art = artifact_store.load(here)
w = art.workload
options = {k: w[k] for k in ("preset", "layers", "rows", "context", "q", "ranks") if k in w}
device = CudaDevice.open()
case = open_case(JudgeJob(here, art.target, options, "cuda", Tier.SCREEN, seed=master), device)
T0 = time.time()
def say(**x): print(json.dumps(x), flush=True)

def words(t): return t.reshape(-1).view(torch.uint8).view(torch.int32)

with torch.inference_mode():
    program = device.load(read_artifact(here, case))
    rig = rigs.build(case, art, program)
    rig.load_weights(case.reference.weights(case.workload, case.seeds.of("weights", 0), device.torch_device))
    lanes = lane_memory.build(case, rig.arena, steps)
    lanes.refresh(-1)
    lanes.refresh(0)
    arm = arms.plan_arm("candidate", (art, program), lanes, rig)
    mail, sync = rig.arena["workspace.mail"] if "workspace.mail" in rig.arena else rig.arena["mail"], None
    names = [n for n in rig.arena if n.endswith("sync")]
    sync = rig.arena[names[0]]
    boxes = torch.empty((lanes.steps, words(mail).numel()), dtype=torch.int32, device="cuda")
    counts = torch.empty((lanes.steps, words(sync).numel()), dtype=torch.int32, device="cuda")
    def every():
        for i in range(lanes.steps):
            arm.step(i)
            boxes[i].copy_(words(mail)); counts[i].copy_(words(sync))
    every(); device.synchronize()
    chain = device.record(every, lanes.steps)
    say(name=folder.name, ready=round(time.time() - T0, 1), mail_words=words(mail).numel())
    key = torch.randint(-(2**62), 2**62, (max(words(mail).numel(), 1 << 24),), device="cuda", dtype=torch.int64) | 1
    outs = [[(b.name, words(lanes.outputs[f"{i}/{b.name}"])) for b in case.buffers("outputs")] for i in range(lanes.steps)]
    kept, sums, bad, n, end = {}, {}, [], 0, time.time() + seconds
    gaveup = 0
    def digest():
        out = []
        for i in range(lanes.steps):
            a = (boxes[i].long() * key[: boxes.shape[1]]).sum()
            b = sum((t.long() * key[: t.numel()]).sum() * (2 * k + 3) for k, (_, t) in enumerate(outs[i]))
            out += [a, b]
        return torch.stack(out).view(-1, 2).tolist()
    while time.time() < end:
        lanes.restore()
        chain.launch()
        device.synchronize()
        n += 1
        now = digest()
        gaveup += int((counts[:, 64:68] != 0).any())
        for i, two in enumerate(now):
            for what, x in zip(("mail", "outputs"), two):
                c = sums.setdefault((i, what), Counter())
                c[x] += 1
            key_ = (i, two[0], two[1])
            if key_ not in kept and len([1 for k in kept if k[0] == i]) < 4 and len(kept) < 6 * lanes.steps:
                kept[key_] = (n, boxes[i].clone(), [(m, t.clone()) for m, t in outs[i]], counts[i].clone())
    usual = {i: max(sums[(i, "mail")].items(), key=lambda x: x[1])[0] for i in range(lanes.steps)}
    odd = sum(sum(sorted(sums[(i, "outputs")].values())[:-1]) for i in range(lanes.steps))
    oddm = sum(sum(c for k, c in sums[(i, "mail")].items() if k != usual[i]) for i in range(lanes.steps))
    say(lanes_with_odd_mail={i: sum(sums[(i, "mail")].values()) - sums[(i, "mail")][usual[i]] for i in range(lanes.steps) if len(sums[(i, "mail")]) > 1})
    dump = []
    say(name=folder.name, chains=n, steps=n * lanes.steps, odd_outputs=odd, odd_mail=oddm, spins_that_gave_up=gaveup, s=round(time.time() - T0, 1))
    shown = 0
    for (i, m, o), (chain_no, box, out, cnt) in kept.items():
        if m == usual[i] or shown >= 14:
            continue
        right = [v for (j, m2, o2), v in kept.items() if j == i and m2 == usual[i]]
        if not right:
            continue
        shown += 1
        ref = right[0]
        diff = (box != ref[1]).nonzero().flatten()
        say(lane=i, chain=chain_no, mail_differs=len(diff), sync=cnt[:1].tolist() + cnt[32:33].tolist() + cnt[64:68].tolist() + cnt[96:102].tolist())
        if len(diff):
            cuts = ((diff[1:] - diff[:-1]) > 64).nonzero().flatten().tolist()
            parts, first = [], 0
            for c in [*cuts, len(diff) - 1]:
                parts.append([int(diff[first]), int(diff[c]), c - first + 1]); first = c + 1
            print("    runs (first word, last, how many):", json.dumps(parts[:60]), flush=True)
            before = [v for (j, m2, o2), v in kept.items() if j == (i - 1) % lanes.steps and m2 == usual[j]]
            f = torch.stack([ref[1], box] + ([before[0][1]] if before else []))[:, diff[:8]].view(torch.float32).T.tolist()
            print("    right, found, what the step before left:", json.dumps([[round(x, 5) for x in y] for y in f]), flush=True)
            take = diff[:20000]
            dump.append({"lane": i, "chain": chain_no, "at": take.cpu(), "right": ref[1][take].cpu(), "found": box[take].cpu(), "before": before[0][1][take].cpu() if before else None, "x0": lanes.inputs[f"{i}/inputs.x.0"].clone().cpu() if f"{i}/inputs.x.0" in lanes.inputs else None})
            if before:
                print("    words equal to the step before's:", int((box[diff] == before[0][1][diff]).sum()), flush=True)
        for (name, a), (_, b) in zip(out, ref[2]):
            if not torch.equal(a, b):
                d = (a != b).nonzero().flatten()
                print("   ", name, "words", len(d), int(d[0]), int(d[-1]), flush=True)
    import os
    if dump:
        torch.save(dump[:8], os.path.join(os.environ.get("OUT", "."), f"mail-{folder.name}.pt"))
