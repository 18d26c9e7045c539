#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares whole models on a GPU with the references of test/models/, which transformers computed in float32 with the same weights and
without quantizing activations: the families, FP8, int4, mixtures of experts, GPT-OSS.

Run:  python3 test/gpu_models.py GPU_MODEL [NAME ...]     on a machine with a GPU, from the repository root
      GPU_MODEL is the program made of test/gpu_model.c (test/run.sh builds it as test/.build/gpu_model).

With FP8 weights the GPU rounds activations to e4m3, which has 3 bits of mantissa: each product has an error of about 2^-5 of its size, so logits of these
small networks are off by some percent. Else it rounds them to bf16, which has 7 bits.

Then it compares trained models (test/model_sisters.py) in FP8 with the same numbers in bf16, both on the GPU, on held-out problems with
greedy answers: log-probabilities, KL divergence, the most likely tokens. This needs ./toka.
"""
import base64
import json
import os
import subprocess
import sys
import tempfile

import numpy as np

import model_sisters
import model_weights as mw

# relative L2 distance of all logits that plain code with the same rounding of activations has (a row scale found from the row, or the
# static scale); of models without FP8 the distance that was measured. Where that is large, rounding x changes which experts a token uses.
ROUNDING = {"gptoss": 3.4e-2, "gptoss-mxfp4": 1.0e-2, "llama": 9.0e-3, "mistral": 9.1e-3, "mixtral": 1.3e-2, "qwen3": 8.0e-3,
            "glm4": 9.9e-3, "glm4moe": 8.0e-3, "glm4moe-groups": 7.5e-3, "granite": 9.8e-3, "gemma2": 1.2e-2, "gemma2-defaults": 1.2e-2, "gemma2-types": 1.1e-2,
            "gemma3": 1.5e-2, "gemma3-image": 1.6e-2,
            "gemma3-types": 1.5e-2, "olmo2": 8.9e-3, "olmo3": 1.4e-2, "olmoe": 1.1e-2, "phi3-partial": 8.4e-3, "phi3-longrope-long": 1.2e-2,
            "smollm3": 1.3e-2, "fp8-block-phi3": 5.6e-2, "fp8-phi3": 6.1e-2, "ct-fp8-phi3": 4.7e-2, "ct-fp8-gemma3-image": 1.2e-1,
            # int4, unpacked to bf16
            "awq-128": 1.2e-2, "awq-32": 1.4e-2, "awq-mixtral": 8.8e-2, "awq-phi3": 7.3e-3, "gptq-128": 1.5e-2, "gptq-32": 1.4e-2,
            "gptq-64-v2": 1.2e-2, "gptq-order": 1.3e-2, "gptq-phi3": 9.0e-3, "gptq-qwen3moe": 2.4e-2, "gptq-whole": 9.8e-3, "packed-128": 1.1e-2,
            "packed-32-zero": 1.4e-2, "packed-64": 1.2e-2, "packed-channel": 7.4e-3, "packed-channel-zero": 1.3e-2, "packed-order": 1.1e-2,
            "packed-phi3": 9.8e-3, "packed-qwen3moe": 1.8e-2,
            "qwen3moe": 6.0e-2, "qwen3moe-mixed": 2.1e-2, "qwen3moe-ties": 1.1e-2, "fp8-block-qwen3moe": 4.0e-2, "fp8-mixtral": 6.7e-2,
            "fp8-block": 8.4e-2, "fp8-block-edge": 4.8e-2, "fp8-dynamic": 4.6e-2, "fp8-static": 7.7e-2, "ct-fp8-block": 8.1e-2,
            "ct-fp8-channel": 5.2e-2, "ct-fp8-static": 4.1e-2, "fbgemm-fp8": 4.8e-2, "modelopt-fp8": 7.1e-2, "modelopt-fp8-file": 3.4e-2,
            "deepseek2": 9.0e-3, "deepseek2-groups": 4.8e-2, "deepseek3": 2.2e-2, "deepseek3-plain": 2.7e-2, "fp8-block-deepseek3": 5.6e-2}
# trained models: largest mean |difference of log-probabilities|, largest mean KL, smallest share of equal top tokens. Measured: 0.032,
# 0.0018, 0.990; 0.031, 0.0019, 0.988; 0.050, 0.0104, 0.982.
TRAINED = {"fp8-block": (0.042, 0.0025, 0.985), "fp8-channel": (0.042, 0.0025, 0.983), "moe-fp8": (0.065, 0.014, 0.975)}
# fixtures with heads of another size, so that the kernels for 64, 128 and 256 run: the size, what the configuration says then, and the
# distance from the CPU that was measured
WIDE = {"glm4": (128, {}, 9.1e-3), "glm4moe": (64, {}, 8.6e-2), "granite": (64, {"attention_multiplier": 0.125}, 1.0e-2),
        "gemma2": (256, {"query_pre_attn_scalar": 256}, 9.6e-3),
        "gemma3": (256, {"query_pre_attn_scalar": 256}, 1.6e-2), "olmo2": (128, {}, 9.1e-3), "olmo3": (64, {}, 1.5e-2),
        "phi3-partial": (128, {}, 6.6e-3), "smollm3": (128, {}, 8.5e-3)}
MAX_ERROR, MAX_ROW_ERROR = 1.4, 3                        # times that: of all logits, and of those of one position
MAX_REROUTED_ERROR = 6                                   # of one position, where rounding x changes its experts
REROUTED = {"awq-mixtral", "deepseek2-groups", "deepseek3", "deepseek3-plain", "fp8-block-deepseek3", "gptoss", "qwen3moe", "qwen3moe-mixed"}


def logits(program, folder, ids, device):
    out = os.path.join(folder, "out")
    with open(os.path.join(folder, "ids"), "w") as f:
        f.write(" ".join(map(str, ids)))
    subprocess.run([program, "logits", folder, f.name, out, device], check=True)
    return np.fromfile(out, dtype=np.float32).reshape(len(ids), -1).astype(np.float64)


def distance(got, want):
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def compare(program, name, tmp):
    spec, got, want = mw.load(name), [], []
    folder = os.path.join(tmp, name)
    mw.write(folder, spec)
    for case in spec["cases"]:
        rows = np.frombuffer(base64.b64decode(case["logits"]), "<f4").reshape(len(case["positions"]), -1)
        want.append(rows.astype(np.float64))
        got.append(logits(program, folder, case["prompt"], "cuda")[case["positions"]])
    got, want = np.concatenate(got), np.concatenate(want)
    error, worst = distance(got, want), max(distance(a, b) for a, b in zip(got, want))
    agree = float((got.argmax(1) == want.argmax(1)).mean())
    max_row = MAX_REROUTED_ERROR if name in REROUTED else MAX_ROW_ERROR
    ok = bool(error <= MAX_ERROR * ROUNDING[name] and worst <= max_row * ROUNDING[name])
    print(f"{'ok    ' if ok else 'FAILED'} {name:20} relative L2 {error:.2e}, worst of {len(got)} positions {worst:.2e}, same argmax "
          f"{100 * agree:.0f} %", flush=True)
    return ok


def widen(spec, size):
    """The fixture with heads of `size` elements."""
    config = spec["config"]
    before = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    tensors = []
    for dtype, shape, centre, width, names, *rest in spec["tensors"]:
        for part, axis in ((".self_attn.o_proj.weight", 1), (".self_attn.", 0), ("", None)):
            mine = [n for n in names if part in n]
            names = [n for n in names if part not in n]
            wide = [d * size // before if i == axis else d for i, d in enumerate(shape)]
            tensors += [[dtype, wide, centre, width, mine, *rest]] * bool(mine)
    spec["tensors"] = tensors
    config["head_dim"] = size
    return spec


def compare_wide(program, name, tmp):
    size, changed, rounding = WIDE[name]
    spec, folder = widen(mw.load(name), size), os.path.join(tmp, name + "-wide")
    spec["config"].update(changed)
    mw.write(folder, spec)
    prompts = [case["prompt"] for case in spec["cases"]]
    want, got = (np.concatenate([logits(program, folder, ids, device) for ids in prompts]) for device in ("cpu", "cuda"))
    error, worst = distance(got, want), max(distance(a, b) for a, b in zip(got, want))
    ok = bool(error <= MAX_ERROR * rounding)
    print(f"{'ok    ' if ok else 'FAILED'} {name + ', heads of ' + str(size):24} beside the CPU: relative L2 {error:.2e}, worst of {len(got)} "
          f"positions {worst:.2e}", flush=True)
    return ok


def toka(*args, text=""):
    return subprocess.run([os.path.join(mw.HERE, "..", "toka"), *args], input=text, check=True, capture_output=True, text=True).stdout


def held_out_ids(n):
    """Token ids of n held-out problems with the embedded model's answers."""
    with open(os.path.join(mw.HERE, "model", "heldout.jsonl")) as f:
        prompts = [json.loads(line)["prompt"] for line in f][:n]
    asked = [{"role": "user", "content": p} for p in prompts]
    lines = "".join(json.dumps({"custom_id": str(i), "messages": [m], "temperature": 0, "max_tokens": 160}) + "\n" for i, m in enumerate(asked))
    answers = [json.loads(line) for line in toka("batch", "-q", "-i", "-", "-o", "-", text=lines).splitlines()]
    text = ""
    for a in answers:
        said = a["response"]["body"]["choices"][0]["message"]["content"]
        chat = {"messages": [asked[int(a["custom_id"])], {"role": "assistant", "content": said}]}
        text += toka("template", "-q", text=json.dumps(chat))
    return [int(x) for x in toka("tokenize", "-q", "--no-special", text=text).split()]


def log_softmax(x):
    x = x - x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def compare_trained(program, name, ids, tmp):
    """The FP8 model beside the same numbers in bf16."""
    parts = []
    for dense in (True, False):
        folder = os.path.join(tmp, f"{name}-{dense}")
        os.mkdir(folder)
        model_sisters.write(name, folder, dense)
        parts.append(np.concatenate([log_softmax(logits(program, folder, ids[i:i + 500], "cuda"))[:-1] for i in range(0, len(ids), 500)]))
    want, got = parts
    after = np.concatenate([ids[i + 1:i + 500] for i in range(0, len(ids), 500)])
    rows = np.arange(len(after))
    change = float(np.abs(got[rows, after] - want[rows, after]).mean())
    kl = float((np.exp(want) * (want - got)).sum(1).mean())
    agree = float((got.argmax(1) == want.argmax(1)).mean())
    max_change, max_kl, min_agree = TRAINED[name]
    ok = change <= max_change and kl <= max_kl and agree >= min_agree
    print(f"{'ok    ' if ok else 'FAILED'} {name:20} beside bf16, {len(after)} tokens: log-probabilities differ by {change:.4f}, KL {kl:.5f} nats, "
          f"same argmax {100 * agree:.2f} %", flush=True)
    return ok


def main():
    program, names = sys.argv[1], sys.argv[2:] or ROUNDING
    with tempfile.TemporaryDirectory() as tmp:
        results = [compare(program, name, tmp) for name in names]
        if not sys.argv[2:]:
            results += [compare_wide(program, name, tmp) for name in WIDE]
            ids = held_out_ids(40)
            results += [compare_trained(program, name, ids, tmp) for name in TRAINED]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed, 0 skipped")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
