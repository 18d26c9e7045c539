#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares raw logits of toka on a GPU with Hugging Face transformers on the same GPU.

Run:  python3 test/gpu_hf.py GPU_MODEL [--small]      on a machine with a GPU, torch and transformers, from the repository root
      GPU_MODEL is the program made of test/gpu_model.c (test/run.sh builds it as test/.build/gpu_model).

Models: random weights in the shapes of Llama-3.2-1B, Qwen2.5-0.5B and Qwen3-0.6B, and the fixtures. The reference is the forward pass of
transformers in float32 (for the fixtures in float64: their golden.bin). The error of toka must not be larger than that of transformers'
own bf16 forward pass. Errors are relative L2 over all rows of one prompt of several hundred tokens.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

SHAPES = {
    "llama-3.2-1b": dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=2048, num_attention_heads=32,
                         num_key_value_heads=8, head_dim=64, intermediate_size=8192, num_hidden_layers=16, vocab_size=128256,
                         tie_word_embeddings=True, rms_norm_eps=1e-5, rope_theta=500000.0, max_position_embeddings=131072,
                         rope_scaling=dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                           original_max_position_embeddings=8192)),
    "qwen2.5-0.5b": dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"], hidden_size=896, num_attention_heads=14,
                         num_key_value_heads=2, intermediate_size=4864, num_hidden_layers=24, vocab_size=151936,
                         tie_word_embeddings=True, rms_norm_eps=1e-6, rope_theta=1000000.0, max_position_embeddings=32768),
    "qwen3-0.6b": dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], hidden_size=1024, num_attention_heads=16,
                       num_key_value_heads=8, head_dim=128, intermediate_size=3072, num_hidden_layers=28, vocab_size=151936,
                       tie_word_embeddings=True, rms_norm_eps=1e-6, rope_theta=1000000.0, max_position_embeddings=40960),
}


def randomise(model):
    """Sets weights with which every part of the network matters: products of about 1, norms around 1, biases of about 0.5."""
    g = torch.Generator(device="cuda").manual_seed(torch.seed() % 2**31)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=g, device="cuda")
        if p.dim() == 1:
            p.data = (noise * 0.5 if name.endswith("bias") else 1 + 0.2 * noise).to(torch.bfloat16)
        elif "embed_tokens" in name:
            p.data = noise.to(torch.bfloat16)
        else:
            p.data = (noise * p.shape[1] ** -0.5).to(torch.bfloat16)


def logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids], device="cuda")).logits[0].double().cpu().numpy()


def toka_logits(program, folder, ids, tmp):
    path, out = os.path.join(tmp, "ids"), os.path.join(tmp, "logits")
    open(path, "w").write(" ".join(map(str, ids)))
    subprocess.run([program, "logits", folder, path, out], check=True)
    return np.fromfile(out, dtype=np.float32).reshape(len(ids), -1).astype(np.float64)


def error(got, want):
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def compare(name, got, hf, want):
    mine, theirs = error(got, want), error(hf, want)
    agree = float((got.argmax(1) == want.argmax(1)).mean())
    ok = np.isfinite(mine) and mine <= theirs
    print(f"{'ok    ' if ok else 'FAILED'} {name:24} error {mine:.3e}, transformers bf16 {theirs:.3e}, ratio {mine / theirs:.3f}, "
          f"same argmax {100 * agree:.1f} %", flush=True)
    return ok


def big(program, name, cfg, tmp):
    folder = os.path.join(tmp, name)
    os.makedirs(folder)
    json.dump(dict(cfg, torch_dtype="bfloat16", hidden_act="silu", bos_token_id=1, eos_token_id=2), open(os.path.join(folder, "config.json"), "w"))
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    torch.set_default_dtype(torch.float32)
    randomise(model)
    model.save_pretrained(folder)
    ids = [int(i) for i in np.random.default_rng().integers(3, cfg["vocab_size"], 333)]
    del model
    # loaded again for each type: model.to(bfloat16) would also round the RoPE frequencies, permanently
    torch.backends.cuda.matmul.allow_tf32 = False
    hf, want = (logits(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().cuda(), ids)
                for dtype in (torch.bfloat16, torch.float32))
    torch.cuda.empty_cache()
    return compare(name, toka_logits(program, folder, ids, tmp), hf, want)


def fixture(program, folder, tmp):
    """Compares all rows of golden.bin, of all prompts together."""
    golden = json.load(open(os.path.join(folder, "golden.json")))
    raw, V = open(os.path.join(folder, "golden.bin"), "rb").read(), golden["vocab"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().cuda()
    rows = {"got": [], "hf": [], "want": []}
    for c in golden["cases"]:
        at = c["logit_positions"]
        rows["want"].append(np.frombuffer(raw, np.float32, len(at) * V, c["logits_offset"]).reshape(-1, V).astype(np.float64))
        rows["hf"].append(logits(model, c["prompt_ids"])[at])
        rows["got"].append(toka_logits(program, folder, c["prompt_ids"], tmp)[at])
    return compare(os.path.basename(folder), *(np.concatenate(rows[k]) for k in ("got", "hf", "want")))


def main():
    a = argparse.ArgumentParser()
    a.add_argument("program")
    a.add_argument("--small", action="store_true", help="fixtures only")
    a = a.parse_args()
    results = []
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as tmp:
        for name in sorted(os.listdir("test/fixtures")):
            results.append(fixture(a.program, os.path.join("test/fixtures", name), tmp))
        for name, cfg in [] if a.small else SHAPES.items():
            results.append(big(a.program, name, cfg, tmp))
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed, 0 skipped")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
