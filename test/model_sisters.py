#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes sisters of the embedded model: test/model with its weights in another format, or its MLPs cut into experts, and
test/model_moe, which was trained on with experts (test/model/make/moe.py).

Run:  python3 test/model_sisters.py NAME FOLDER [dense]     dense: the same numbers in float32, without quantization
      python3 test/model_sisters.py                         lists the names

A sister answers the held-out problems nearly as well as the model itself: a wrong scale, nibble or expert shows as a wrong sum.
Weights are rounded to nearest. The mixtures of experts but moe-fp8 compute the same sums as the model, in another order: they are not
trained.
"""
import json
import os
import shutil
import sys

import numpy as np

import model_weights as mw

MODEL = os.path.join(mw.HERE, "model")
EXPERTS = os.path.join(mw.HERE, "model_moe")
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def is_linear(name):
    return name.endswith("_proj.weight") or ".experts." in name


def read_folder(folder):
    """(config, name -> (dtype, bits))"""
    with open(os.path.join(folder, "config.json")) as f:
        config = json.load(f)
    with open(os.path.join(folder, "model.safetensors"), "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        data = f.read()
    header.pop("__metadata__", None)
    return config, {name: (x["dtype"], np.frombuffer(data[slice(*x["data_offsets"])], mw.SIZES[x["dtype"]]).reshape(x["shape"]))
                    for name, x in header.items()}


def read_model():
    """(config, name -> float32 matrix) of the embedded model, whose weights are all bfloat16."""
    config, tensors = read_folder(MODEL)
    return config, {name: mw.from_bits(bits, dtype) for name, (dtype, bits) in tensors.items()}


def trained_experts(dense):
    """(config, tensors) of test/model_moe."""
    config, tensors = read_folder(EXPERTS)
    if dense:
        config.pop("quantization_config")
        for name in [x for x in tensors if x.endswith("_scale_inv")]:
            scale, matrix = mw.from_bits(tensors.pop(name)[1], "F32"), name.removesuffix("_scale_inv")
            code = tensors[matrix][1]
            tensors[matrix] = ("F32", mw.to_bits(mw.e4m3_values(code) * mw.spread(scale, *code.shape, 128, 128), "F32"))
    return config, tensors


def block_maxima(w, rows, cols):
    """The largest absolute value of each block; the last blocks may be cut. No block is all zero."""
    N, K = w.shape
    padded = np.zeros((-(-N // rows) * rows, -(-K // cols) * cols), np.float32)
    padded[:N, :K] = np.abs(w)
    return padded.reshape(-1, rows, padded.shape[1] // cols, cols).max((1, 3))


def to_fp8(w, rows, cols, dtype):
    """(codes, scales, values)"""
    rows, cols = rows or w.shape[0], cols or w.shape[1]
    scale = mw.rounded(block_maxima(w, rows, cols) / np.float32(448), dtype)
    wide = mw.spread(scale, *w.shape, rows, cols)
    code = mw.e4m3_codes(np.clip(w / wide, -448, 448))
    return code, scale, mw.e4m3_values(code) * wide


def fp8_block(name, w):
    code, scale, values = to_fp8(w, 128, 128, "F32")
    return {name: ("F8_E4M3", code), name + "_scale_inv": ("F32", mw.to_bits(scale, "F32"))}, values


def fp8_channel(name, w):
    code, scale, values = to_fp8(w, 1, 0, "BF16")
    return {name: ("F8_E4M3", code), name + "_scale": ("BF16", mw.to_bits(scale, "BF16"))}, values


def int4_group(name, w):
    """compressed-tensors' pack-quantized, symmetric, in groups of 32."""
    scale = mw.rounded(block_maxima(w, 1, 32) / np.float32(7.5), "BF16")
    wide = mw.spread(scale, *w.shape, 1, 32)
    q = np.clip(np.rint(w / wide), -8, 7).astype(np.int64)
    return {name + "_packed": ("I32", mw.pack4(q + 8, 1)), name + "_scale": ("BF16", mw.to_bits(scale, "BF16")),
            name + "_shape": ("I64", np.array(w.shape, np.uint64))}, q.astype(np.float32) * wide


def compressed(form, weights, inputs):
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


FP8_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP8_CHANNEL = compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"},
                         {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True})
INT4_GROUP = compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, None)


# ---- Mixtures of experts that compute what the MLP computes: each expert has some of its columns ----

def parts_of_mlp(weights, layer, first, n, width):
    """n experts of `width` columns from `first`: (gate, up, down) each."""
    gate, up, down = (weights[f"model.layers.{layer}.mlp.{x}_proj.weight"] for x in ("gate", "up", "down"))
    return [(gate[i:i + width], up[i:i + width], down[:, i:i + width]) for i in range(first, first + n * width, width)]


def without_mlp(weights, layers):
    return {k: v for k, v in weights.items() if not any(k.startswith(f"model.layers.{i}.mlp.") for i in layers)}


def as_mixtral(config, weights):
    """Four experts, all of which each token goes to, with a weight of 1/4."""
    layers = range(config["num_hidden_layers"])
    out = without_mlp(weights, layers)
    for i in layers:
        moe = f"model.layers.{i}.block_sparse_moe."
        out[moe + "gate.weight"] = np.zeros((4, config["hidden_size"]), np.float32)
        for k, (gate, up, down) in enumerate(parts_of_mlp(weights, i, 0, 4, 112)):
            out |= {f"{moe}experts.{k}.w1.weight": gate, f"{moe}experts.{k}.w3.weight": up, f"{moe}experts.{k}.w2.weight": 4 * down}
    return {**config, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 4,
            "intermediate_size": 112, "sliding_window": None}, out


def as_glm(config, weights):
    """Half of the MLP is the shared expert. The other half is experts 1, 3, 5 and 7 of 8; the correction bias keeps tokens from the
    even ones, which hold wrong numbers. The first layer stays as it is."""
    layers = range(1, config["num_hidden_layers"])
    out = without_mlp(weights, layers)
    for i in layers:
        moe = f"model.layers.{i}.mlp."
        shared, = parts_of_mlp(weights, i, 0, 1, 224)
        real = parts_of_mlp(weights, i, 224, 4, 56)
        out[moe + "gate.weight"] = np.zeros((8, config["hidden_size"]), np.float32)
        out[moe + "gate.e_score_correction_bias"] = np.array([-0.25, 0.25] * 4, np.float32)
        for k in range(8):
            gate, up, down = real[k // 2]
            expert = (gate, up, 4 * down) if k % 2 else (up, gate, -4 * down)
            out |= {f"{moe}experts.{k}.{x}_proj.weight": w for x, w in zip(("gate", "up", "down"), expert)}
        out |= {f"{moe}shared_experts.{x}_proj.weight": w for x, w in zip(("gate", "up", "down"), shared)}
    return {**config, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 4,
            "n_shared_experts": 4, "moe_intermediate_size": 56, "first_k_dense_replace": 1, "norm_topk_prob": True, "n_group": 1,
            "topk_group": 1, "routed_scaling_factor": 1.0, "use_qk_norm": False, "partial_rotary_factor": 1.0}, out


# name -> (how the layers are changed, how a matrix is written, quantization_config)
SISTERS = {
    "fp8-block": (None, fp8_block, FP8_BLOCK),
    "fp8-channel": (None, fp8_channel, FP8_CHANNEL),
    "int4-32": (None, int4_group, INT4_GROUP),
    "mixtral": (as_mixtral, None, None),
    "glm4moe": (as_glm, None, None),
    "glm4moe-fp8": (as_glm, fp8_block, FP8_BLOCK),
    "moe-fp8": None,                                     # trained_experts
}


def stored(name, w, form, dense):
    """The tensors of the checkpoint that stand for one matrix."""
    if form and is_linear(name):
        parts, values = form(name, w)
        return {name: ("F32", mw.to_bits(values, "F32"))} if dense else parts
    dtype = "F32" if name.endswith("correction_bias") else "BF16"
    return {name: (dtype, mw.to_bits(w, dtype))}


def changed_model(name, dense):
    """(config, tensors) of a sister that is made from the embedded model."""
    change, form, quantization = SISTERS[name]
    config, weights = read_model()
    if change:
        config, weights = change(config, weights)
    if quantization and not dense:
        config = {**config, "quantization_config": quantization}
    tensors = {}
    for key, w in weights.items():
        tensors.update(stored(key, np.ascontiguousarray(w), form, dense))
    return config, tensors


def write(name, folder, dense=False, edit=None):
    """edit: a function of (config, tensors)."""
    config, tensors = changed_model(name, dense) if SISTERS[name] else trained_experts(dense)
    if edit:
        edit(config, tensors)
    os.makedirs(folder, exist_ok=True)
    for file in FILES:
        shutil.copy(os.path.join(MODEL, file), folder)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f, indent=1)
    mw.write_safetensors(os.path.join(folder, "model.safetensors"), tensors)


def main():
    if len(sys.argv) < 3:
        print("sisters:", *SISTERS)
        return
    write(sys.argv[1], sys.argv[2], sys.argv[3:] == ["dense"])


if __name__ == "__main__":
    main()
