"""Which bytes made the wrong logits of `boxes.py`? Weights drawn as torch draws them on an H200, on the host; pieces of 32
columns of a row of stage 0 to 3 are replaced by what the stage five later has in the same place of the ring, one, two or
a warp's at a time.

    python which_bytes.py mail-m2.pt        (what boxes.py saved; from the root of the checkout)
"""
import sys, numpy as np, torch
torch.set_num_threads(1)
from sandbox.judge.seeds import Seeds
from targets import base
from targets.kimi_k3 import generate
from card_draws import Emu
d=torch.load(sys.argv[1])
w=base.find("kimi-k3-latent-moe").workload(base.Options(preset="tp8", rows=8, layers=2))
seeds=Seeds(2732654314832823606); ws=seeds.of("weights",0)
bufs={b.name:b for b in w.buffers}
def rows(leaf, r): 
    b=bufs[f"weights.layers.0.{leaf}"]
    return generate._weight(w,b,Emu(b,ws,r)).double().numpy()
for c in d:
    at=c["at"].numpy(); lg=at[at<7168]
    es=sorted(set(int(a)%896 for a in lg))
    f=c["found"].view(torch.float32).double().numpy(); r_=c["right"].view(torch.float32).double().numpy()
    pos={int(a):i for i,a in enumerate(at)}
    x=c["x0"].double().numpy()
    print("lane",c["lane"],"chain",c["chain"],"rows",es)
    for e in es[:3]:
        cta=max(k for k in range(132) if 896*k//132<=e); r=e-896*cta//132
        delta=np.array([f[pos[t*896+e]]-r_[pos[t*896+e]] if t*896+e in pos else 0. for t in range(8)])
        WR=rows("router",[e])[0]
        check=WR@x.T; got=np.array([r_[pos[t*896+e]] if t*896+e in pos else np.nan for t in range(8)])
        fl,nl=448*cta//132, 448*(cta+1)//132-448*cta//132; fs,ns=768*cta//132, 768*(cta+1)//132-768*cta//132
        def front(q):
            if q<nl: return rows("latent_down",[fl+q])[0]
            k=q-nl
            if k//2>=ns: return None
            return rows("shared_gate_up",[fs+k//2 if k%2==0 else 768+fs+k//2])[0]
        best=[]
        for s in range(4):
            it=s+5; tile,sl=(it-4)//4,(it-4)%4
            N=front(8*tile+r)
            if N is None: continue
            V=[]
            for wp in range(14):
                for j in range(4):
                    c0=32*(j//2*28+wp*2+j%2)
                    dw=N[sl*1792+c0:sl*1792+c0+32]-WR[s*1792+c0:s*1792+c0+32]
                    V.append((dw*x[:,s*1792+c0:s*1792+c0+32]).sum(1))
            V=np.array(V)
            n0=np.linalg.norm(delta)
            for a in range(56):
                best.append((np.linalg.norm(delta-V[a])/n0,s,[(a//4,a%4)]))
            G=V[:,None,:]+V[None,:,:]
            R=np.linalg.norm(G-delta,axis=2)/n0
            R[np.tril_indices(56)]=9
            k=np.unravel_index(R.argmin(),R.shape); best.append((R[k],s,[(k[0]//4,k[0]%4),(k[1]//4,k[1]%4)]))
            for wp in range(14):
                for m in range(1,16):
                    sel=[4*wp+q for q in range(4) if m>>q&1]
                    best.append((np.linalg.norm(delta-V[sel].sum(0))/n0,s,[(wp,q) for q in range(4) if m>>q&1]))
        best.sort(key=lambda z:z[0])
        print("  expert",e,"cta",cta,"row",r,"emulated logit err",np.nanmax(abs(check-got)).round(4),"best", [(round(float(b[0]),4),"stage",b[1],b[2]) for b in best[:3]], flush=True)
