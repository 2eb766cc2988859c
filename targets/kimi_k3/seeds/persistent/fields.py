"""The table of addresses: one line per layer, so that one body of code serves all layers of a kind."""

KDA = ("in_proj", "f_b", "conv", "A_log", "dt_bias", "o_norm", "o_proj")
MLA = ("a_proj", "q_a_norm", "kv_a_norm", "q_b", "w_uk", "w_uv", "o_proj")
MOE = (
    "router", "router_bias", "latent_down", "w1", "w1_scale", "w3", "w3_scale", "w2", "w2_scale", "latent_norm",
    "latent_up", "shared_gate_up", "shared_down",
)  # fmt: skip
DENSE = ("dense_gate_up", "dense_down")
MIX = ("attn_res_norm", "attn_res_proj", "attn_norm", "mlp_res_norm", "mlp_res_proj", "mlp_norm")
REMOTE = ("attn", "latent", "logits", "moe", "shared", "delta", "dense")
NAMES = tuple(
    dict.fromkeys(
        [
            *KDA,
            *MLA,
            *MOE,
            *DENSE,
            *MIX,
            *(f"remote_{n}" for n in REMOTE),
            "state_conv",
            "state_S",
            "kv",
            "send",
            "kind",
            "x",
            "y",
        ]
    )
)
COUNT = len(NAMES)
F = {name: i for i, name in enumerate(NAMES)}
IS_MLA, IS_DENSE = 1, 2


def layer_tensors(t, n, dims):
    """Field -> tensor of layer n, those it has."""
    found = {}
    w = t.weights.layers[n]
    for name in (
        *MIX,
        *(KDA if dims.attn[n] == "K" else MLA),
        *(MOE if dims.ffn[n] == "E" else DENSE),
    ):
        found[name] = getattr(w, name)
    state = t.states.layers[n]
    if dims.attn[n] == "K":
        found |= {"state_conv": state.conv, "state_S": state.S}
    else:
        found |= {"kv": state.kv}
    if dims.ranks > 1 and dims.gpus == 1:
        remote = t.inputs.remote.layers[n]
        found |= {f"remote_{r}": getattr(remote, r) for r in REMOTE if hasattr(remote, r)}
        if dims.ffn[n] == "E":
            sends = t.outputs.send.layers
            # where a layer without experts leaves a gap, the numbers are names, not indices
            found["send"] = (sends[n] if isinstance(sends, list) else getattr(sends, str(n))).shared
    return found


def chain_tensors(t, n, dims):
    """As `layer_tensors` for instance n of a chain of FFNs or KDAs, its own input and output included."""
    found = {"x": t.inputs.x[n], "y": t.outputs.y[n]}
    w = t.weights.layers[n]
    found |= {name: getattr(w, name) for name in (MOE if dims.ffn else KDA)}
    if not dims.ffn:
        found |= {"state_conv": t.states.layers[n].conv, "state_S": t.states.layers[n].S}
    if dims.ranks > 1:
        remote = t.inputs.remote.layers[n]
        found |= {f"remote_{r}": getattr(remote, r) for r in REMOTE if hasattr(remote, r)}
        if dims.ffn:
            found["send"] = t.outputs.send.layers[n].shared
    return found


def table(layers):
    """(names, tensors) of the fields of every layer, as a kernel takes them."""
    found = list(layers)
    return tuple(tuple(x) for x in found), tuple(tuple(x.values()) for x in found)


def kind(dims, n):
    return (IS_MLA if dims.attn[n] == "M" else 0) | (IS_DENSE if dims.ffn[n] == "D" else 0)


def vectors(dims):
    """(field, bytes, kinds of layer that have it): small things that are wanted just after an edge."""
    d = dims
    found = [(name, 2 * d.hidden, "KM") for name in MIX]
    if "K" in d.attn:
        found += [
            ("o_norm", 2 * d.head_dim, "K"),
            ("dt_bias", 4 * d.kda_dim, "K"),
            ("A_log", 4 * d.kda_heads, "K"),
        ]
    if "M" in d.attn:
        found += [("q_a_norm", 2 * d.q_lora, "M"), ("kv_a_norm", 2 * d.kv_lora, "M")]
    if "E" in d.ffn:
        found += [("router_bias", 4 * d.experts, "E"), ("latent_norm", 2 * d.latent, "E")]
    if d.ranks > 1 and d.gpus == 1:
        found.append(("remote_attn", 4 * d.hidden, "KM"))
        if "E" in d.ffn:
            found += [
                ("remote_moe", 4 * d.latent, "E"), ("remote_shared", 4 * d.hidden_local, "E"),
                ("remote_delta", 2 * (d.hidden - d.hidden_local), "E"),
            ]  # fmt: skip
            found += (
                [("remote_latent", 2 * (d.latent - d.latent_rows), "E")] if d.latent_sharded else []
            )
            found += (
                [("remote_logits", 4 * (d.experts - d.router_rows), "E")]
                if d.router_sharded
                else []
            )
    return found
