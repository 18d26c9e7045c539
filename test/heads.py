#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draft heads in numpy: EAGLE-3 as its formulas say it, and folders of random heads in the layouts that are published.

Run:  python3 test/heads.py MODEL FOLDER [--layout specforge|speculators] [--seed N]     MODEL: a folder of Llama weights in bf16 or f32

A head is one layer. Row p (from 1 on) reads the token at position p and the state g of position p - 1:
    g      fc [a0, a1, a2], where a is the model's residual stream before three of its layers; for a position that the model has not
           computed, the head's own residual stream at the end of its layer in that position's row
    x      g, or with norm_before_residual hidden_norm(g)
    q k v  of [input_layernorm(embedding of the token), hidden_norm(g)]: 2 E columns
    x += o attention(q, K, V);  x += mlp(post_attention_layernorm(x));  logits = lm_head norm(x)
and guesses the token at position p + 1. Logit i is that of the model's id i + d2t[i].
"""
import json
import os
import struct
import sys

import numpy as np

TYPES = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "BOOL": "?"}


def read_safetensors(path):
    with open(path, "rb") as f:
        data = f.read()
    n = struct.unpack("<Q", data[:8])[0]
    out = {}
    for name, t in json.loads(data[8:8 + n]).items():
        if name == "__metadata__":
            continue
        raw = data[8 + n + t["data_offsets"][0]:8 + n + t["data_offsets"][1]]
        if t["dtype"] == "BF16":
            x = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            x = np.frombuffer(raw, TYPES[t["dtype"]])
        out[name] = x.reshape(t["shape"])
    return out


def write_safetensors(path, tensors):
    """float32 arrays are written as BF16: round them first, with bf16()."""
    header, body = {}, b""
    for name, x in tensors.items():
        if x.dtype == np.float32:
            dtype, raw = "BF16", (x.view(np.uint32) >> 16).astype("<u2").tobytes()
        else:
            dtype, raw = {"int64": "I64", "bool": "BOOL"}[str(x.dtype)], x.tobytes()
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + body)


def bf16(x):
    """Rounds to bfloat16, to nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rope(x, pos, theta):  # x: [T][heads][D]
    half = x.shape[-1] // 2
    angle = pos[:, None] * theta ** (-np.arange(half) / half)
    cosine, sine = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)


class Layer:
    """A layer of a Llama, with its K and V so far."""

    def __init__(self, weights, prefix, config):
        self.w = {k.removeprefix(prefix).removesuffix(".weight"): v.astype(np.float64) for k, v in weights.items() if k.startswith(prefix)}
        self.c, self.k, self.v = config, None, None

    def __call__(self, x, entry, pos):
        """x: [T][E] residual stream; entry: what q, k and v read; pos: [T]."""
        c, w, T = self.c, self.w, len(x)
        H, K = c["num_attention_heads"], c["num_key_value_heads"]
        D = c.get("head_dim") or c["hidden_size"] // H
        theta = c.get("rope_theta", 10000.0)
        q = rope((entry @ w["self_attn.q_proj"].T).reshape(T, H, D), pos, theta)
        k = rope((entry @ w["self_attn.k_proj"].T).reshape(T, K, D), pos, theta)
        v = (entry @ w["self_attn.v_proj"].T).reshape(T, K, D)
        old = 0 if self.k is None else len(self.k)
        self.k = k if self.k is None else np.concatenate([self.k, k])
        self.v = v if self.v is None else np.concatenate([self.v, v])
        o = np.zeros((T, H, D))
        for t in range(T):
            n = old + t + 1
            for h in range(H):
                s = self.k[:n, h * K // H] @ q[t, h] / np.sqrt(D)
                p = np.exp(s - s.max())
                o[t, h] = p / p.sum() @ self.v[:n, h * K // H]
        x = x + o.reshape(T, H * D) @ w["self_attn.o_proj"].T
        y = norm(x, w["post_attention_layernorm"], c["rms_norm_eps"])
        gate = y @ w["mlp.gate_proj"].T
        return x + (gate / (1 + np.exp(-gate)) * (y @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T


def aux_states(model, tokens, layers):
    """[T][3 E]: the residual stream of a Llama before three of its layers."""
    config, w = json.load(open(model + "/config.json")), read_safetensors(model + "/model.safetensors")
    x, found = w["model.embed_tokens.weight"].astype(np.float64)[tokens], []
    for i in range(max(layers) + 1):
        if i in layers:
            found.append(x)
        layer = Layer(w, f"model.layers.{i}.", config)
        x = layer(x, norm(x, layer.w["input_layernorm"], config["rms_norm_eps"]), np.arange(len(tokens)))
    return np.concatenate(found, -1)


def draft(model, folder, tokens, k):
    """Greedy drafts behind tokens, of which the model has computed all but the last: ([k] ids, [k][V] logits)."""
    outer, w = json.load(open(folder + "/config.json")), read_safetensors(folder + "/model.safetensors")
    c = outer.get("transformer_layer_config", outer)
    nested = (outer.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = [i + 1 for i in nested] if nested else outer["eagle_aux_hidden_state_layer_ids"]
    first = outer.get("norm_before_residual")
    first = c is not outer if first is None else first
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in w else "layers.0."
    embed = w.get("embed_tokens.weight", read_safetensors(model + "/model.safetensors")["model.embed_tokens.weight"]).astype(np.float64)
    layer, eps, V = Layer(w, prefix, c), c["rms_norm_eps"], len(embed)
    ids = np.arange(len(w["lm_head.weight"])) + w.get("d2t", 0)
    g = aux_states(model, tokens[:-1], layers) @ w["fc.weight"].astype(np.float64).T
    row, pos, drafts, logits = np.array(tokens[1:]), np.arange(1, len(tokens)), [], []
    for _ in range(k):
        normed = norm(g, layer.w["hidden_norm"], eps)
        entry = np.concatenate([norm(embed[row], layer.w["input_layernorm"], eps), normed], -1)
        g = layer(normed if first else g, entry, pos)[-1:]
        logits.append(np.full(V, -np.inf))
        logits[-1][ids] = (norm(g, w["norm.weight"], eps) @ w["lm_head.weight"].astype(np.float64).T)[0]
        drafts.append(int(logits[-1].argmax()))
        row, pos = np.array(drafts[-1:]), pos[-1:] + 1
    return drafts, np.array(logits)


def config_of(model, layout, layers, draft_vocab, **more):
    """config.json of a head with the sizes of the model."""
    base = json.load(open(model + "/config.json"))
    sizes = {k: base[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
                                  "rms_norm_eps", "rope_theta", "max_position_embeddings", "hidden_act") if k in base}
    layer = {**sizes, "model_type": "llama", "num_hidden_layers": 1}
    if layout == "specforge":
        return {**layer, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_vocab,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in layers], "use_aux_hidden_state": True}, **more}
    return {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": layer,
            "draft_vocab_size": draft_vocab, "eagle_aux_hidden_state_layer_ids": layers, "norm_before_residual": True,
            "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy",
                                   "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
                                   "verifier": {"name_or_path": "x", "architectures": base["architectures"]}}, **more}


def shapes_of(config):
    """The tensors of a head and their shapes, but for d2t and t2d."""
    c = config.get("transformer_layer_config", config)
    E, F, H, K = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"], c["num_key_value_heads"]
    D = c.get("head_dim") or E // H
    layer = {"self_attn.q_proj": (H * D, 2 * E), "self_attn.k_proj": (K * D, 2 * E), "self_attn.v_proj": (K * D, 2 * E),
             "self_attn.o_proj": (E, H * D), "mlp.gate_proj": (F, E), "mlp.up_proj": (F, E), "mlp.down_proj": (E, F),
             "input_layernorm": (E,), "hidden_norm": (E,), "post_attention_layernorm": (E,)}
    prefix = "layers.0." if c is not config else "midlayer."
    shapes = {"fc": (E, 3 * config.get("target_hidden_size", E)), **{prefix + k: v for k, v in layer.items()}, "norm": (E,),
              "lm_head": (config["draft_vocab_size"], E)}
    return {k + ".weight": v for k, v in shapes.items()}


def make(model, folder, layout="specforge", seed=1, layers=(1, 3, 5), draft_vocab=None, **more):
    """Writes the folder of a random head."""
    rng = np.random.default_rng(seed)
    V = json.load(open(model + "/config.json"))["vocab_size"]
    config = config_of(model, layout, list(layers), draft_vocab or V // 2, **more)
    tensors, n = {}, config["draft_vocab_size"]
    for name, shape in shapes_of(config).items():
        x = rng.standard_normal(shape)
        tensors[name] = bf16(1 + 0.2 * x if len(shape) == 1 else x / np.sqrt(shape[1]))
    if n < V:
        known = np.sort(rng.permutation(V)[:n])
        tensors["d2t"], tensors["t2d"] = (known - np.arange(n)).astype(np.int64), np.isin(np.arange(V), known)
    os.makedirs(folder, exist_ok=True)
    json.dump(config, open(folder + "/config.json", "w"), indent=1)
    write_safetensors(folder + "/model.safetensors", tensors)


if __name__ == "__main__":
    args = dict(zip(sys.argv[3::2], sys.argv[4::2]))
    make(sys.argv[1], sys.argv[2], args.get("--layout", "specforge"), int(args.get("--seed", 1)))
