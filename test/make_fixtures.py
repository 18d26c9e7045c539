#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes test/fixtures/: tiny random models in Hugging Face layout with reference logits from transformers.

Run:       python3 test/make_fixtures.py [--only NAME]       (about two minutes on two CPU cores, no GPU)
           python3 test/make_fixtures.py --check             compares the files with the transformers that is installed
Made with: Python 3.11.7, torch 2.11.0, transformers 5.17.0, safetensors 0.8.0, on 2026-11-21.

A fixture is an ordinary model folder (config.json, generation_config.json, model.safetensors or shards with an index; no
tokenizer) with two more files:

    golden.json   {"vocab":V, "dtype":"float32", "float32_rel_l2":x, "cases":[case ...]}
    golden.bin    raw little-endian float32 logits, rows of V

    case          prompt_ids             1 to 300 random ids
                  greedy_ids             24 ids of greedy continuation; an end-of-sequence id does not stop it
                  gaps, min_gap          top logit minus second logit at each of the 24 steps; each gap is over 1e-3
                  logit_positions        positions p in the prompt; row i has the logits after token p[i]; the last p is the prompt's end
                  logits_offset          byte offset of those rows in golden.bin
                  decode_logits_offset   byte offset of one more row, to check the decode path: the logits after the prompt and the
                                         first 23 of greedy_ids, which chose the last of them

The reference: transformers loads the folder, so config.json has its meaning in transformers. All weights are converted to float64,
and the forward pass runs in float64, except where transformers uses float32 (RoPE angles, the norm's variance, the softmax). Each
prompt runs alone, without a KV cache. float32_rel_l2 is the largest relative L2 distance, over all rows, of the same forward pass in
float32: the error that a correct float32 implementation has.

The models are made so that each mistake shows: eps and theta are far from the defaults, attention scores have a standard deviation of
about 1.5, norm weights vary around 1, biases are large, and the longest prompts exceed the original context of each scaled RoPE.
"""
import argparse
import json
import os
import shutil
import sys

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
N_GREEDY = 24
MIN_GAP = 1e-3
MIN_DISTINCT = 6
ALL_LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 128, 300]
LLAMA, MISTRAL, MINISTRAL = ("LlamaForCausalLM", "llama"), ("MistralForCausalLM", "mistral"), ("MinistralForCausalLM", "ministral")
QWEN2, QWEN3 = ("Qwen2ForCausalLM", "qwen2"), ("Qwen3ForCausalLM", "qwen3")


def config(kind, E, H, K, F, V, L=2, D=None, tied=False, eps=1e-2, dtype="float32", old=True, max_pos=512, **more):
    """The object of a config.json. `old`: the style before transformers 5, with torch_dtype, rope_theta and rope_scaling; else with
    dtype and rope_parameters. D=None: without head_dim, so D = E/H."""
    c = {
        "architectures": [kind[0]], "model_type": kind[1],
        "hidden_size": E, "num_attention_heads": H, "num_key_value_heads": K, "intermediate_size": F,
        "num_hidden_layers": L, "vocab_size": V, "max_position_embeddings": max_pos,
        "hidden_act": "silu", "rms_norm_eps": eps, "tie_word_embeddings": tied,
        "bos_token_id": 1, "eos_token_id": 2, "use_cache": True,
    }
    c["torch_dtype" if old else "dtype"] = dtype
    if D is not None:
        c["head_dim"] = D
    c.update(more)
    return c


# name -> (config, prompt lengths, how the weights are stored)
FIXTURES = {
    # --- default RoPE -------------------------------------------------------------------------------------------------
    # Llama as in 2023: no head_dim, no rope_scaling, one K/V head per query head, head size 8.
    "llama-default": (config(LLAMA, E=72, H=9, K=9, F=68, V=263, rope_theta=777.0, dtype="float32",
                             attention_bias=False, mlp_bias=False, pretraining_tp=1), ALL_LENGTHS, {}),
    # Odd sizes: rows of 51, 67 and 259 values; head_dim is given, because it differs from E/H.
    "llama-odd": (config(LLAMA, E=51, H=3, K=1, F=67, V=259, D=8, old=False, eps=2e-2, dtype="float32",
                         rope_parameters={"rope_type": "default", "rope_theta": 333.0}), [1, 17, 65, 128], {}),
    "llama-tied": (config(LLAMA, E=72, H=9, K=3, F=100, V=301, tied=True, dtype="bfloat16", rope_theta=2500,
                          rope_scaling=None, attention_bias=False), [2, 16, 63, 300], {}),
    # q, k, v and o have a bias; seven query heads per K/V head.
    "llama-bias": (config(LLAMA, E=84, H=7, K=1, F=100, V=263, D=8, L=3, old=False, dtype="float16", attention_bias=True,
                          rope_parameters={"rope_type": "default", "rope_theta": 1234.5}), [1, 15, 64, 65, 300], {}),
    # --- linear -------------------------------------------------------------------------------------------------------
    # "type" was the old name of "rope_type". The weights also have the inv_freq buffers of early checkpoints, which must be ignored.
    "llama-linear-old": (config(LLAMA, E=72, H=3, K=1, F=100, V=263, D=80, dtype="float16", rope_theta=900.0, max_pos=416,
                                rope_scaling={"type": "linear", "factor": 6.5}), [1, 17, 64, 65, 300], {"inv_freq": True}),
    "llama-linear-new": (config(LLAMA, E=75, H=3, K=1, F=84, V=277, D=96, old=False, dtype="bfloat16",
                                rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}),
                         [2, 63, 128, 300], {}),
    # --- llama3 -------------------------------------------------------------------------------------------------------
    "llama-llama3-old": (config(LLAMA, E=72, H=3, K=1, F=100, V=269, D=64, tied=True, dtype="bfloat16", rope_theta=5000.0,
                                eps=3e-3, attention_bias=False, mlp_bias=False,
                                rope_scaling={"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                              "original_max_position_embeddings": 64, "rope_type": "llama3"}),
                         [1, 16, 64, 65, 128, 300], {}),
    "llama-llama3-sharded": (config(LLAMA, E=48, H=3, K=1, F=100, V=263, D=128, old=False, dtype="bfloat16",
                                    rope_parameters={"factor": 32.0, "high_freq_factor": 6.0, "low_freq_factor": 1.5,
                                                     "original_max_position_embeddings": 48, "rope_theta": 50000.0,
                                                     "rope_type": "llama3"}), [2, 63, 65, 300], {"shards": 3}),
    # --- yarn: no options; attention_factor and betas; mscale and mscale_all_dim; only mscale, and truncate off ---------
    "llama-yarn-old": (config(LLAMA, E=72, H=2, K=2, F=68, V=263, D=96, dtype="bfloat16", rope_theta=1000.0,
                              rope_scaling={"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}),
                       [1, 16, 64, 65, 128, 300], {}),
    "llama-yarn-factor": (config(LLAMA, E=72, H=3, K=1, F=68, V=263, D=64, old=False, dtype="float16",
                                 rope_parameters={"rope_type": "yarn", "rope_theta": 2000.0, "factor": 8.0,
                                                  "original_max_position_embeddings": 64, "attention_factor": 0.83,
                                                  "beta_fast": 4.0, "beta_slow": 0.5}), [15, 65, 128, 300], {}),
    "llama-yarn-mscale": (config(LLAMA, E=72, H=3, K=1, F=100, V=263, D=64, old=False, dtype="bfloat16",
                                 rope_parameters={"rope_type": "yarn", "rope_theta": 3000.0, "factor": 8.0,
                                                  "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
                                                  "mscale": 2.0, "mscale_all_dim": 0.7}), [2, 17, 128, 300], {}),
    # mscale without mscale_all_dim does not change the attention factor. With truncate false the ends of the ramp are fractions. The
    # original context is so long that the default beta_fast of 32 has an effect.
    "llama-yarn-truncate": (config(LLAMA, E=48, H=3, K=3, F=100, V=263, D=80, dtype="float16", rope_theta=4000.0,
                                   max_pos=1120,
                                   rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 280,
                                                 "truncate": False, "mscale": 1.5}), [16, 65, 300], {}),
    # --- Mistral ------------------------------------------------------------------------------------------------------
    "mistral": (config(MISTRAL, E=72, H=3, K=1, F=100, V=263, D=80, dtype="bfloat16", rope_theta=50000.0,
                       sliding_window=None), [1, 15, 64, 300], {}),
    # A window that ends inside a page and is shorter than most prompts.
    "mistral-short-window": (config(MISTRAL, E=96, H=4, K=2, D=32, F=72, V=203, dtype="bfloat16", rope_theta=700.0, sliding_window=40),
                             [1, 39, 40, 41, 64, 65, 128, 300], {}),
    # A window as long as the context has no effect and must be accepted. No head_dim: D = 128/2 = 64.
    "mistral-window": (config(MISTRAL, E=128, H=2, K=1, F=68, V=199, old=False, dtype="float16", sliding_window=512,
                              rope_parameters={"rope_type": "default", "rope_theta": 600.0}), [2, 65, 128], {}),
    # --- Qwen2: q, k, v have a bias, o has none -------------------------------------------------------------------------
    "qwen2": (config(QWEN2, E=56, H=7, K=1, F=100, V=263, tied=True, L=3, dtype="bfloat16", rope_theta=1500.0,
                     use_sliding_window=False, sliding_window=32768, max_window_layers=3), [1, 16, 17, 63, 128, 300], {}),
    "qwen2-yarn-sharded": (config(QWEN2, E=128, H=2, K=1, F=68, V=199, dtype="float16", rope_theta=20000.0,
                                  use_sliding_window=False, sliding_window=512, max_window_layers=2,
                                  rope_scaling={"factor": 4.0, "original_max_position_embeddings": 128, "type": "yarn"}),
                           [1, 64, 128, 300], {"shards": 2}),
    # --- Qwen3: a norm on each head of q and k; H*D differs from E ----------------------------------------------------
    "qwen3": (config(QWEN3, E=72, H=3, K=1, F=100, V=263, D=128, tied=True, dtype="bfloat16", rope_theta=7000.0,
                     attention_bias=False, rope_scaling=None, use_sliding_window=False, sliding_window=None,
                     max_window_layers=2), [1, 2, 17, 64, 65, 300], {}),
    "qwen3-yarn": (config(QWEN3, E=56, H=7, K=1, F=100, V=271, D=64, old=False, dtype="bfloat16", attention_bias=False,
                          rope_parameters={"rope_type": "yarn", "rope_theta": 10000, "factor": 8.0,
                                           "original_max_position_embeddings": 64}), [15, 63, 128, 300], {}),
    # --- Ministral: layer_types names the layers with a window, here the first and the last -----------------------------
    "ministral": (config(MINISTRAL, E=72, H=4, K=2, D=32, F=68, V=203, L=3, old=False, dtype="bfloat16", sliding_window=40,
                         layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                         rope_parameters={"rope_type": "default", "rope_theta": 700.0}), [1, 40, 41, 65, 300], {}),
}


def random_weight(name, shape, c, g):
    """Weights for which each part of the model changes the logits; see the last paragraph of the header."""
    w = torch.randn(shape, generator=g, dtype=torch.float32)
    if name.endswith("norm.weight"):                     # all RMSNorms, q_norm and k_norm too
        centre = 1.25 if ("q_norm" in name or "k_norm" in name) else 1.0
        return centre + 0.3 * w
    if name.endswith(".bias"):
        return w * (0.5 if "q_proj" in name or "k_proj" in name else 0.2)
    if name == "lm_head.weight":
        return w * 2.0 / shape[1] ** 0.5                 # logits of standard deviation 2
    if name == "model.embed_tokens.weight" and c["tie_word_embeddings"]:
        return w * 1.0 / shape[1] ** 0.5                 # deviation 1: with more, each token would predict itself
    if name == "model.embed_tokens.weight":
        return w * 0.5                                   # small enough for eps to matter
    if "q_proj" in name or "k_proj" in name:
        return w * 1.25 / shape[1] ** 0.5                # scores q.k/sqrt(D) of standard deviation 1.25^2
    return w / shape[1] ** 0.5


def write_weights(folder, c, how, seed):
    """Writes model.safetensors, or `shards` files and an index, in the dtype of config.json."""
    dtype = getattr(torch, c.get("torch_dtype", c.get("dtype")))
    g = torch.Generator().manual_seed(seed)
    shapes = {k: v.shape for k, v in AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).state_dict().items()}
    if c["tie_word_embeddings"]:
        shapes.pop("lm_head.weight", None)               # the file of a tied model has only one of the two names
    tensors = {k: random_weight(k, s, c, g).to(dtype) for k, s in shapes.items()}
    if how.get("inv_freq"):
        for layer in range(c["num_hidden_layers"]):
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.full((c["head_dim"] // 2,), 9.0)
    if "shards" not in how:
        save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
        return
    names, n, where = list(tensors), how["shards"], {}
    for i in range(n):
        part = names[i * len(names) // n:(i + 1) * len(names) // n]
        file = f"model-{i + 1:05d}-of-{n:05d}.safetensors"
        save_file({k: tensors[k] for k in part}, f"{folder}/{file}", metadata={"format": "pt"})
        where.update({k: file for k in part})
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    write_json(f"{folder}/model.safetensors.index.json", {"metadata": {"total_size": total},
                                                          "weight_map": dict(sorted(where.items()))})


def write_json(path, value):
    with open(path, "w") as f:
        json.dump(value, f, indent=2)
        f.write("\n")


@torch.no_grad()
def logits_of(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def make_case(model, V, n, seed):
    """One prompt of n ids, its greedy continuation and the rows to keep. A prompt is rejected if its continuation has a near tie, or
    if it only repeats a few ids (this would hide a wrong position)."""
    for attempt in range(200):
        rng = np.random.default_rng([seed, n, attempt])
        prompt = rng.integers(3, V, n).tolist()          # ids 0 to 2 stand for padding, bos and eos
        ids, gaps = list(prompt), []
        for _ in range(N_GREEDY):
            rows = logits_of(model, ids)
            top = rows[-1].topk(2)
            gaps.append((top.values[0] - top.values[1]).item())
            if gaps[-1] <= MIN_GAP:
                break
            ids.append(top.indices[0].item())
        if len(gaps) == N_GREEDY and gaps[-1] > MIN_GAP and len(set(ids[n:])) >= MIN_DISTINCT:
            positions = sorted({0, n // 2, max(n - 2, 0), n - 1})
            keep = torch.cat([rows[positions], rows[-1:]])
            return prompt, ids[n:], gaps, positions, keep, ids[:-1]
    raise RuntimeError(f"no suitable prompt of {n} tokens")


def make_fixture(folder, name, seed):
    c, lengths, how = FIXTURES[name]
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    write_json(f"{folder}/config.json", c)
    write_json(f"{folder}/generation_config.json", {"bos_token_id": 1, "eos_token_id": [2, 0] if seed % 2 else 2,
                                                    "do_sample": False})
    write_weights(folder, c, how, seed)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    model32 = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    V, cases, blob, worst = c["vocab_size"], [], b"", 0.0
    for n in lengths:
        prompt, greedy, gaps, positions, rows, ids = make_case(model, V, n, seed)
        rows32 = logits_of(model32, ids)[positions + [len(ids) - 1]]
        worst = max(worst, ((rows32.double() - rows).norm(dim=1) / rows.norm(dim=1)).max().item())
        row_bytes, at = V * 4, len(blob)
        blob += rows.to(torch.float32).numpy().astype("<f4").tobytes()
        cases.append({"prompt_ids": prompt, "greedy_ids": greedy, "min_gap": round(min(gaps), 6),
                      "gaps": [round(x, 6) for x in gaps], "logit_positions": positions,
                      "logits_offset": at, "decode_logits_offset": at + len(positions) * row_bytes})
    golden = {"vocab": V, "dtype": "float32", "float32_rel_l2": worst,
              "made_with": f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}", "cases": cases}
    with open(f"{folder}/golden.json", "w") as f:        # one case per line
        head = json.dumps({k: v for k, v in golden.items() if k != "cases"})[:-1]
        f.write(head + ', "cases": [\n' + ",\n".join(json.dumps(x, separators=(",", ":")) for x in cases) + "\n]}\n")
    with open(f"{folder}/golden.bin", "wb") as f:
        f.write(blob)
    for x in os.listdir(folder):
        os.chmod(os.path.join(folder, x), 0o644)         # safetensors creates files that only the owner can read
    size = sum(os.path.getsize(os.path.join(folder, x)) for x in os.listdir(folder))
    std, rope = rows.std().item(), model.config.rope_parameters
    print(f"{name:22s} {size / 1024:7.1f} KiB  cases {len(cases):2d}  min gap {min(x['min_gap'] for x in cases):.4f}  "
          f"float32 {worst:.1e}  logit std {std:.2f}  distinct greedy {len(set(greedy)):2d}  "
          f"rope {rope['rope_type']} x{model.model.rotary_emb.attention_scaling:.4f}", flush=True)


def check_fixture(folder):
    """The largest relative L2 distance between the file's logits and those that transformers computes from the same folder."""
    with open(f"{folder}/golden.json") as f:
        golden = json.load(f)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    blob, worst = np.fromfile(f"{folder}/golden.bin", "<f4"), 0.0
    for case in golden["cases"]:
        ids, positions = case["prompt_ids"] + case["greedy_ids"][:-1], case["logit_positions"]
        rows = logits_of(model, ids)[positions + [len(ids) - 1]]
        at = case["logits_offset"] // 4
        kept = torch.from_numpy(blob[at:at + rows.numel()].astype(np.float64)).reshape(rows.shape)
        worst = max(worst, ((rows - kept).norm(dim=1) / rows.norm(dim=1)).max().item())
    return worst


def check(folder):
    """Compares all fixtures; returns the number of those that differ by more than float32 rounds."""
    worst = {name: check_fixture(os.path.join(folder, name)) for name in FIXTURES}
    for name, error in worst.items():
        print(f"{name:22s} {error:.1e}")
    print(f"{len(worst)} models, relative L2 of the logits at most {max(worst.values()):.1e}; "
          f"torch {torch.__version__}, transformers {transformers.__version__}")
    return sum(error > 1e-6 for error in worst.values())


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--only", help="one fixture by name")
    p.add_argument("--out", default=os.path.join(HERE, "fixtures"))
    p.add_argument("--check", action="store_true", help="write nothing; compare the files with the installed transformers")
    args = p.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    if args.check:
        sys.exit(check(args.out) != 0)
    if args.only and args.only not in FIXTURES:
        sys.exit(f"no fixture named {args.only}; known: {', '.join(FIXTURES)}")
    for i, name in enumerate(FIXTURES):
        if args.only in (None, name):
            make_fixture(os.path.join(args.out, name), name, seed=1000 + i)


if __name__ == "__main__":
    main()
