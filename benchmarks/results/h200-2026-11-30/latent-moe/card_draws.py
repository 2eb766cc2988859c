"""Tensors as torch draws them on an H200, made on the host: Philox by the card's order of threads. For the scripts beside it."""
import hashlib, math, numpy as np, torch
from targets.kimi_k3.generate import Draw
M0, M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
W = (0x9E3779B9, 0xBB67AE85)
def philox(seed, k, idx):
    lo = np.uint64(0xFFFFFFFF)
    c0 = k.astype(np.uint64) & lo; c1 = np.zeros_like(c0); c2 = idx.astype(np.uint64) & lo; c3 = np.zeros_like(c0)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for r in range(10):
        p0, p1 = M0 * c0, M1 * c2
        c0, c1, c2, c3 = (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0), p1 & lo, (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1), p0 & lo
        k0, k1 = (k0 + W[0]) & 0xFFFFFFFF, (k1 + W[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3
def raw(seed, li, numel, sms=132):
    grid = min(sms * 8, (numel + 255) // 256); stride = 256 * grid
    k, r = li // (4 * stride), li % (4 * stride)
    ii, idx = r // stride, r % stride
    return philox(seed, k, idx), ii
def seed_of(seed, name):
    word = hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8]
    return int.from_bytes(word, "little") >> 1
def randint(seed, li, numel, low, high):
    c, ii = raw(seed, li, numel)
    v = np.choose(ii, c)
    return (v % np.uint64(high - low)).astype(np.int64) + low
def randn(seed, li, numel):
    c, ii = raw(seed, li, numel)
    f = np.float32
    inv = f(2.3283064e-10); inv2 = f(f(2.3283064e-10) * f(6.2831855))
    hi = ii >= 2
    x = np.where(hi, c[2], c[0]).astype(f); y = np.where(hi, c[3], c[1]).astype(f)
    u = (x * inv + inv / f(2)).astype(f); v = (y * inv2 + inv2 / f(2)).astype(f)
    s = np.sqrt((f(-2) * np.log(u)).astype(f)).astype(f)
    t = np.where(ii % 2 == 0, np.sin(v.astype(np.float64)), np.cos(v.astype(np.float64))).astype(f)
    return (s * t).astype(f)
class Emu(Draw):
    def __init__(self, buffer, seed, rows=None):
        self.shape, self.s, self.rows = buffer.shape, seed_of(seed, buffer.name), rows
    def _li(self):
        n = math.prod(self.shape)
        if self.rows is None: return np.arange(n, dtype=np.int64), self.shape, n
        per = n // self.shape[0]
        li = (np.asarray(self.rows, dtype=np.int64)[:, None] * per + np.arange(per)[None]).ravel()
        return li, (len(self.rows), *self.shape[1:]), n
    def normal(self, std, mean=0.0, dtype=torch.bfloat16):
        li, shape, n = self._li()
        out = np.empty(len(li), np.float32)
        for a in range(0, len(li), 1 << 20): out[a:a + (1 << 20)] = randn(self.s, li[a:a + (1 << 20)], n)
        return (torch.from_numpy(out) * std + mean).to(dtype).reshape(shape)
    def integers(self, low, high, dtype):
        li, shape, n = self._li()
        out = np.empty(len(li), np.int64)
        for a in range(0, len(li), 1 << 20): out[a:a + (1 << 20)] = randint(self.s, li[a:a + (1 << 20)], n, low, high)
        return torch.from_numpy(out).to(dtype).reshape(shape)
    def uniform(self, *a, **k): raise NotImplementedError("no tensor that is drawn here is uniform")
