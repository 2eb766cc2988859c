"""The equations of the Kimi K3 step as text, for prompts and readers: `brief(part)`. The reference is `maths`."""

from __future__ import annotations

RULES = """\
bf(v) rounds to nearest even BF16; sg is the sigmoid. Products take BF16 operands and accumulate in FP32; weights are
row-major [out, in]. RMS(v; w) = v * rsqrt(mean(v^2) + 1e-5) * w in FP32. Everything not inside bf() stays FP32.
With ranks > 1 this is rank 0; what the others contribute is in inputs.remote (absent with one rank):
reduce(p, r) = bf(p + r), p the own BF16 partial, r the FP32 sum of the others; gather(p, r) = own columns p, then r.
With one rank both give p."""

ATTN_RES = """\
AttnRes over sources v_0..v_n (earlier bank rows, the prefix P last, at most 9), per row, in FP32:
  l_s = rsqrt(mean(v_s^2) + 1e-5) * sum_j v_s[j] norm[j] proj[j];  p = softmax(l);  m = sum_s p_s v_s  (v as it is)
  result bf(RMS(m; out)), m not rounded before; one source gives m = P exactly."""

KDA = """\
KDA on x, D = heads * 128, slots[m] the state slot of row m:
  Y = bf(x in_proj^T), rows q D | k D | v D | g D | f_a 128 | b heads | padding;  raw = bf(f_a f_b^T)
  per channel of q, k, v, c0 c1 c2 = states conv[slot, 0..2], y the new value, w0..w3 = weights conv:
  t = c0 w0 + c1 w1 + c2 w2 + y w3, u = t sg(t);  states conv[slot] <- (c1, c2, y)
  per head: qn = u_q rsqrt(sum u_q^2 + 1e-6) 128^-0.5;  kn = u_k rsqrt(sum u_k^2 + 1e-6);  v = u_v;  beta = sg(b)
    gam_k = -5 sg(exp(A_log) (raw_k + dt_bias_k));  S[v,k] <- S[v,k] exp(gam_k)
    d_v = beta (v_v - sum_k S[v,k] kn_k);  S[v,k] <- S[v,k] + d_v kn_k;  o_v = sum_k S[v,k] qn_k
    out = bf(RMS(o; o_norm) sg(g))       o_norm [128] shared by the heads
  a = reduce(bf(out o_proj^T), remote attn)
  u and o may be rounded to BF16 or kept. slots[m] <= 0: out = 0 and no state is read or written.
  With q > 1 tokens a request (rows b q + t), slots [B, q] and inputs accepted [B]: request b walks its tokens from
  S[slots[b, accepted - 1]]; after token t, S goes to S[slots[b, t]] unless that id is <= 0; conv[slots[b, 0]] has q + 2
  taps, those before token 0 are taps accepted - 1, accepted, accepted + 1, and it becomes taps accepted, accepted + 1,
  y_0 .. y_{q-1}. A request whose first-named slot is <= 0 gives q rows of zeros and touches nothing."""

GLM_KDA = """\
Here the output gate has low rank: rows of in_proj are q D | k D | v D | b heads | f_a 128 | g_a 128 | padding, and
g = bf(g_a g_b^T)."""

MLA = """\
MLA on x, cache kv [page, row, c | k_pe], one latent head, no RoPE:
  A = bf(x a_proj^T), rows q_c | kv_c | k_pe | gate;  qn = bf(RMS(q_c; q_a_norm));  c = bf(RMS(kv_c; kv_a_norm))
  Q = bf(qn q_b^T), per head nope | pe;  ql = bf(Q_nope w_uk[h]);  insert [c | k_pe] at flat row slot_mapping[m]
  (negative: do not insert);  s_t = (qk_nope + qk_rope)^-0.5 (ql . c_t + Q_pe . k_pe_t), t < lengths[m], pages from
  block_table[m];  p = softmax(s);  lat = bf(sum_t p_t c_t);  v = bf(w_uv[h] lat);  y = bf(v sg(gate))
  a = reduce(bf(y o_proj^T), remote attn). The inserted row is visible to its own query. lengths[m] = 0: y = 0.
  With q > 1, lengths and block_table are per request, with its q new tokens: row t sees lengths - q + 1 + t tokens.
  fp8 cache: E4M3, saturating: [c | k_pe] / k_scale is stored, [ql | Q_pe] / q_scale is the query, the score takes the
  factor q_scale k_scale and lat k_scale (before it is rounded)."""

ROUTER = """\
Router: logit = y router^T, FP32, never rounded;  s = sg(logit);  z = s + router_bias. Take the topk largest z; equal z:
lower id first. ids by descending z;  weight_e = bf(s_e / (sum of the chosen s + 1e-20)): s, not z."""

MOE = """\
Routed FFN on y (latent_sharded: latent_down has latent / ranks rows and the rest is gathered):
  l = gather(bf(y latent_down^T), remote latent);  per chosen expert g = w1 l, u = w3 l (FP32), h = bf(SiTU(g, u)),
  f = bf(w2 h);  SiTU(g, u) = 4 tanh(g/4) sg(g) 25 tanh(u/25)
  z = reduce(bf(sum of weight_e f_e in the order of ids, FP32), remote moe)
  R = bf(RMS(z; latent_norm));  U = bf(R latent_up^T), hidden / ranks columns
  shared expert: G | H = bf(y shared_gate_up^T);  sp = bf(bf(SiTU(G, H)) shared_down^T);  own columns first:
  Sh = reduce(sp[:, :hidden_local], remote shared);  outputs.send shared = sp[:, hidden_local:]
  delta = gather(bf(U + Sh), remote delta)
MXFP4: byte j of a row holds columns 2j (low nibble) and 2j + 1; code bit 3 is the sign, bits 2..0 index
{0, 0.5, 1, 1.5, 2, 3, 4, 6}; a scale byte b covers 32 columns and means 2^(b - 127). All values are exact in BF16.
NVFP4 (experts = nvfp4): the same codes, E4M3 scales of 16 columns, and g, u and f take the f32 factors w1_factor[e],
w3_factor[e], w2_factor[e] of the expert, f before it is rounded."""

DENSE = """\
Dense FFN (layer 0): G | H = bf(y dense_gate_up^T);  delta = reduce(bf(bf(SiTU(G, H)) dense_down^T), remote dense)."""

STACK = """\
Stack: P = inputs.x0; delta = inputs.delta if first > 0. Layer N of the run is i = first + N, n = ceil(i / block):
  P <- bf(P + delta) if there is a delta;  if i % block == 0: bank row i / block <- P
  x = AttnRes(bank rows 0..n-1, P; attn_res_norm, attn_res_proj, attn_norm);  a = KDA or MLA of x
  if i % block == 0: P <- a and AttnRes takes rows 0..n, else P <- bf(P + a) and rows 0..n-1:
  y = AttnRes(..., P; mlp_res_norm, mlp_res_proj, mlp_norm);  delta = FFN(y), added by the next layer
End: P <- bf(P + delta);  m mixed from all bank_rows rows and P with out_res_norm, out_res_proj;
out = bf(RMS(bf(m); out_norm)).
Bank rows below bank_old are inputs.bank; row r >= bank_old is outputs.bank[:, r - bank_old].
With dims.taps = "1,4": outputs.taps[j] = P on entry of the j-th layer i of that list, after P <- bf(P + delta)."""

CHAIN = """\
Chain: x_0 = inputs.x.0, x_i = bf(inputs.x.i + y_{i-1}); instance i uses weights.layers[i], writes outputs.y[i]."""

PEERS = """\
With dims.gpus = 2 both ranks run, on a GPU each, from one source: t.rank (Int32, known when launches are recorded) is
this rank, t.peers[0].workspace the other's persistent workspace. There is no inputs.remote and no outputs.send:
reduce(p) = bf of the FP32 sum of the ranks' BF16 partials in rank order, gather = columns of rank 0, then of rank 1;
this rank's columns begin at t.rank times their number. Both ranks must hold the same bits. Partials go into the other's
mailbox (st.relaxed.sys) and are waited for (ld.relaxed.sys); no step is followed by a reset; no multicast."""

_REDUCED = (
    ATTN_RES,
    PEERS,
    "Chain on two GPUs: P = inputs.x0; instance i: a = the ranks' sum of the partials; P <- bf(P + a);\n"
    "outputs.y[i] = AttnRes of bank rows 0..min(i, bank_rows)-1 and P with weights.layers[i].{res_norm, res_proj,\n"
    "out_norm}; then bank row i <- P if i < bank_rows. At the end outputs.prefix = P. x0, bank, prefix and y are the\n"
    "same on both ranks.",
)
_PIECES = {
    "allreduce-attn-res": (
        *_REDUCED,
        "The partial of a rank is bf(inputs.partial[i] + y_{i-1}), at first inputs.partial[0].",
    ),
    "oproj-allreduce": (
        *_REDUCED,
        "The partial of a rank is bf(x_i o_proj^T), x_i = bf(inputs.x[i] + y_{i-1}[:, :columns of x]),\n"
        "x_0 = inputs.x[0], o_proj [hidden, kda_dim] of weights.layers[i], each rank's own.",
    ),
    "gemv": (CHAIN, "y_i = bf(x_i w^T), w [hidden, hidden]."),
    "kda": (CHAIN, KDA, "y_i = a."),
    "mla": (CHAIN, MLA, "y_i = a."),
    "latent-moe": (CHAIN, ROUTER, MOE, "y_i = delta; outputs.ids[i] = ids."),
    "router": (
        ROUTER,
        "Instances are independent: y = inputs.x[i], outputs.ids[i], outputs.weights[i].",
    ),
    "attn-res": (
        ATTN_RES,
        "Chain: P = inputs.x0; instance i: P <- bf(P + inputs.delta[i]); outputs.y[i] = AttnRes of bank rows\n"
        "0..min(i, bank_rows)-1 and P with weights.layers[i].{res_norm, res_proj, out_norm}; then bank row i <- P if\n"
        "i < bank_rows. At the end outputs.prefix = P.",
    ),
    "decode": (STACK, ATTN_RES, KDA, MLA, ROUTER, MOE, DENSE, PEERS),
}


def brief(part: str, family: str = "kimi-k3") -> str:
    """What one step computes, a few dozen lines."""
    more = () if family == "kimi-k3" else (GLM_KDA,)
    return "\n\n".join((RULES, *_PIECES[part], *more))
