#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the draft head of the embedded model, an EAGLE-3 head in SpecForge's layout: test/model_head. RECORD.md there says what one run gave.

    python3 test/model/make/head.py [--seconds 900] [--out test/model_head]      needs torch, tokenizers, numpy; a CPU is enough

test/heads.py has the formulas of a head. A row learns the model's own distribution of the next token but one. It does so three times: with
states of the model, with the head's own state in the place of the last one, and with its own states in the last two places, as when it
drafts several tokens. A row of pass j sees the rows of pass 0 up to j positions before it, and of its own chain those behind.
"""
import argparse
import json
import math
import os
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "..")]
import heads     # noqa: E402
import problems  # noqa: E402
import train     # noqa: E402

MODEL = os.path.join(HERE, "..")
LAYERS, PASSES, LENGTH, DOCS = [1, 3, 5], 3, 96, 16
H, K, D, MLP, KNOWN = 2, 1, 64, 128, 384     # the head's sizes; KNOWN: ids that it knows
E, V, EPS = train.E, train.V, train.EPS


def norm(x, weight):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def rope(x):  # [B][T][heads][D]
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] * train.THETA ** (-torch.arange(half) / half)
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def attend(q, k, v):  # causal; GQA
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    n = q.shape[1] // k.shape[1]
    o = F.scaled_dot_product_attention(q, k.repeat_interleave(n, 1), v.repeat_interleave(n, 1), is_causal=True)
    return o.transpose(1, 2).flatten(2)


def mlp(x, w, prefix):
    return (F.silu(x @ w[prefix + "mlp.gate_proj.weight"].T) * (x @ w[prefix + "mlp.up_proj.weight"].T)) @ w[prefix + "mlp.down_proj.weight"].T


@torch.no_grad()
def model_states(w, tokens):
    """(the residual stream before LAYERS, logits)"""
    x, found = w["model.embed_tokens.weight"][tokens], []
    for i in range(train.L):
        p = f"model.layers.{i}."
        if i in LAYERS:
            found.append(x)
        y = norm(x, w[p + "input_layernorm.weight"])
        q, k, v = ((y @ w[p + f"self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, train.D)) for n in "qkv")
        x = x + attend(rope(q), rope(k), v) @ w[p + "self_attn.o_proj.weight"].T
        x = x + mlp(norm(x, w[p + "post_attention_layernorm.weight"]), w, p)
    return torch.cat(found, -1), norm(x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T


def head_passes(w, embeds, aux):
    """embeds: [B][T][E] of the tokens at positions 1 ..; aux: [B][T][3 E] of the positions before. Logits of each pass."""
    T, p, keys, values = embeds.shape[1], "midlayer.", [], []
    g, logits = aux @ w["fc.weight"].T, []
    at, before = torch.arange(T)[:, None], torch.arange(T)[None]
    for j in range(PASSES):
        y = torch.cat([norm(embeds, w[p + "input_layernorm.weight"]), norm(g, w[p + "hidden_norm.weight"])], -1)
        q, k, v = ((y @ w[p + f"self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, D)) for n in "qkv")
        q, k, v = (x.transpose(1, 2) for x in (rope(q), rope(k), v))
        k, v = (x.repeat_interleave(H // K, 1) for x in (k, v))
        keys.append(k), values.append(v)
        scores = [(q @ keys[0].transpose(2, 3)).masked_fill(before > at - j, -math.inf)]
        shifted = [values[0]]
        for i in range(1, j + 1):  # the row of pass i that is j - i positions before
            shift = j - i
            scores.append((q * F.pad(keys[i], (0, 0, shift, 0))[:, :, :T]).sum(-1, keepdim=True))
            shifted.append(F.pad(values[i], (0, 0, shift, 0))[:, :, :T])
        weights = (torch.cat(scores, -1) / D ** 0.5).softmax(-1)
        o = weights[..., :T] @ shifted[0]
        for i in range(1, j + 1):
            o = o + weights[..., T + i - 1:T + i] * shifted[i]
        x = g + o.transpose(1, 2).flatten(2) @ w[p + "self_attn.o_proj.weight"].T
        x = x + mlp(norm(x, w[p + "post_attention_layernorm.weight"]), w, p)
        logits.append(norm(x, w["norm.weight"]) @ w["lm_head.weight"].T)
        g = F.pad(x, (0, 0, 1, 0))[:, :T]  # the state of the position before
    return logits


def documents(seed):
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(os.path.join(MODEL, "tokenizer.json"))
    special = {s: [tok.token_to_id(s)] for s in train.SPECIAL}
    r, held_out = problems.Draw(f"toka head {seed}"), train.held_out_prompts()
    while True:
        batch = np.zeros((DOCS, LENGTH + 1), np.int64)
        for row in batch:
            pieces = [special.get(text) or tok.encode(text, add_special_tokens=False).ids for text, _ in train.document(r, held_out)]
            row[:] = (sum(pieces, []) + [1] * LENGTH)[:LENGTH + 1]
        yield torch.from_numpy(batch)


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--seconds", type=float, default=900), a.add_argument("--out", default=os.path.join(MODEL, "..", "model_head"))
    o = a.parse_args()
    torch.manual_seed(1)
    model = {k: torch.from_numpy(v.astype(np.float32)) for k, v in heads.read_safetensors(MODEL + "/model.safetensors").items()}
    source = documents(1)
    counts = sum(torch.bincount(next(source).flatten(), minlength=V) for _ in range(8))
    known = counts.argsort(descending=True, stable=True)[:KNOWN].sort().values
    config = heads.config_of(MODEL, "specforge", LAYERS, KNOWN, hidden_size=E, intermediate_size=MLP, num_attention_heads=H,
                             num_key_value_heads=K, head_dim=D)
    shapes = heads.shapes_of(config)
    w = {k: (torch.ones(s) if len(s) == 1 else torch.randn(s) / s[1] ** 0.5).requires_grad_() for k, s in shapes.items()}
    with torch.no_grad():
        w["lm_head.weight"].copy_(model["model.embed_tokens.weight"][known])
        w["fc.weight"][:, :2 * E] *= 0.1
        w["fc.weight"][:, 2 * E:].copy_(torch.eye(E))
        w["midlayer.self_attn.o_proj.weight"] *= 0.1
    optimizer = torch.optim.AdamW(w.values(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    begin, step = time.time(), 0
    while (done := (time.time() - begin) / o.seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 30) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
        tokens = next(source)
        aux, logits = model_states(model, tokens)
        wanted = logits[:, 1:].softmax(-1)[..., known]
        mask = (tokens[:, 1:] != 1).float()
        got = head_passes(w, model["model.embed_tokens.weight"][tokens[:, 1:]], aux[:, :-1])
        loss = 0
        for j, x in enumerate(got):
            loss = loss - ((wanted * x.log_softmax(-1)).sum(-1) * mask)[:, j:].sum() / mask[:, j:].sum() * 0.8 ** j
        optimizer.zero_grad(), loss.backward()
        torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            best = logits[:, 1:].argmax(-1)
            right = [((known[x.argmax(-1)] == best).float() * mask)[:, j:].sum() / mask[:, j:].sum() for j, x in enumerate(got)]
            print(f"step {step} {time.time() - begin:.0f} s loss {loss.item():.3f} right " + " ".join(f"{x:.3f}" for x in right), flush=True)
        step += 1
    tensors = {k: heads.bf16(v.detach().numpy()) for k, v in w.items()}
    tensors["d2t"] = (known - torch.arange(KNOWN)).numpy()
    tensors["t2d"] = np.isin(np.arange(V), known.numpy())
    os.makedirs(o.out, exist_ok=True)
    with open(o.out + "/config.json", "w") as f:
        json.dump(config, f, indent=1)
        f.write("\n")
    heads.write_safetensors(o.out + "/model.safetensors", tensors)


if __name__ == "__main__":
    main()
