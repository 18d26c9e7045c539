#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the checkpoint folder of a fixture of test/models/: config.json and model.safetensors, in Hugging Face layout.

Run:  python3 test/model_weights.py FIXTURE FOLDER [EDIT]    FIXTURE: a name or a path of a .json file; EDIT: a name of EDITS
      python3 test/model_weights.py                          lists the fixtures and the edits

The fixture has a seed and, for each tensor, name, shape, dtype, centre and width. It has no weights: they are computed here. It needs
numpy only. All arithmetic is exact or rounds once in float32, so every machine writes the same bytes.

Numbers. FNV1A is the 64-bit FNV-1a hash, MIX the last step of splitmix64; all integers are unsigned and wrap at 2^64:

    GOLD            0x9E3779B97F4A7C15
    MIX(x)          x ^= x >> 30, x *= 0xBF58476D1CE4E5B9, x ^= x >> 27, x *= 0x94D049BB133111EB, x ^= x >> 31
    key             MIX(seed * GOLD + FNV1A(tensor name))
    word(i)         MIX(key + (i + 1) * GOLD), i: index of the element in row-major order, from 0
    unit(i)         ((word(i) >> 40) - 2^23) * 2^-23: float32 in [-1, 1)
    integer(i, n)   ((word(i) >> 40) * n) >> 24: 0 to n - 1
    value(i)        float32 centre + float32(float32 width * unit(i)), then rounded to the tensor's dtype (ties to even)

A tensor of dtype "quant" is a matrix [N][K] that the checkpoint has in another form: see FORMS. Its codes and scales are generated,
not quantized, so the values that they stand for are exact. Those values are what transformers computes the reference with.
"""
import json
import os
import shutil
import struct
import sys

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
MODELS = os.path.join(HERE, "models")
GOLD = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
SIZES = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16, "F8_E4M3": np.uint8, "U8": np.uint8, "I32": np.uint32, "I64": np.uint64}


# ---- The generator ----

def fnv1a(text):
    h = 0xCBF29CE484222325
    for byte in text.encode():
        h = (h ^ byte) * 0x100000001B3 & MASK
    return h


def mix(x):
    """x: array of uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def words(seed, name, n):
    """The first n words of the tensor's stream, 24 bits each."""
    key = mix(np.array([(seed * GOLD + fnv1a(name)) & MASK], np.uint64))
    return (mix(key + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(GOLD)) >> np.uint64(40)).astype(np.int64)


def unit(seed, name, shape):
    n = int(np.prod(shape))
    return ((words(seed, name, n) - (1 << 23)).astype(np.float32) * np.float32(2.0 ** -23)).reshape(shape)


def integers(seed, name, shape, limit):
    n = int(np.prod(shape))
    return ((words(seed, name, n) * limit) >> 24).reshape(shape)


# ---- Number formats ----

def bf16_bits(x):
    """float32 to bfloat16, to nearest, ties to even."""
    b = x.astype(np.float32).view(np.uint32)
    return ((b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def to_bits(x, dtype):
    """float32 to the bits of a dtype of SIZES."""
    if dtype == "BF16":
        return bf16_bits(x)
    if dtype == "F16":
        return x.astype(np.float16).view(np.uint16)
    return x.astype(np.float32).view(np.uint32)


def from_bits(bits, dtype):
    """The reverse."""
    if dtype == "BF16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float16).astype(np.float32) if dtype == "F16" else bits.view(np.float32)


def rounded(x, dtype):
    return from_bits(to_bits(x, dtype), dtype)


E4M3 = np.array([(c & 7) * 2.0 ** -9 if c < 8 else (8 + (c & 7)) * 2.0 ** ((c >> 3) - 10) for c in range(127)], np.float32)
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def e4m3_codes(x):
    """float32 in [-448, 448] to FP8 e4m3, to nearest, ties to even."""
    a = np.abs(x)
    middle = (E4M3[:-1] + E4M3[1:]) / np.float32(2)
    code = np.searchsorted(middle, a)                    # the number of middles below a
    tie = (code < 126) & (a == middle[np.minimum(code, 125)]) & (code % 2 == 1)
    return ((code + tie) | np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def e4m3_values(code):
    return np.where(code & 128, -1, 1).astype(np.float32) * E4M3[code & 127]


def pack4(q, axis, order=range(8)):
    """Eight numbers of four bits to a word, along an axis; the last word may have zeros. Nibble i of a word, from the low end, holds
    number order[i]."""
    q = np.moveaxis(q, axis, -1).astype(np.uint32)
    q = np.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, -q.shape[-1] % 8)])
    q = q.reshape(*q.shape[:-1], -1, 8)
    word = np.zeros(q.shape[:-1], np.uint32)
    for i, k in enumerate(order):
        word |= q[..., k] << np.uint32(4 * i)
    return np.ascontiguousarray(np.moveaxis(word, -1, axis))


# ---- Forms of a quantized matrix ----
# A form takes (make, name, N, K, how) and returns (tensors of the checkpoint, the matrix in float32). `name` is that of the matrix
# without ".weight"; `make` has the seed and the width of the matrix; `how` is the "quant" object of the fixture.

class Make:
    def __init__(self, seed, name, width):
        self.seed, self.name, self.width = seed, name, np.float32(width)

    def unit(self, what, shape):
        return unit(self.seed, f"{self.name}.{what}", shape)

    def integers(self, what, shape, limit):
        return integers(self.seed, f"{self.name}.{what}", shape, limit)

    def scales(self, shape, step, dtype):
        """Scales from half to one and a half of width / step, in a dtype. They differ so much that a wrong one shows."""
        return rounded(self.width / np.float32(step) * (np.float32(1) + np.float32(0.5) * self.unit("scale", shape)), dtype)


def spread(scale, N, K, rows, cols):
    """One number for each element, from one for each block; the last blocks may be cut."""
    return np.repeat(np.repeat(scale, rows, 0)[:N], cols, 1)[:, :K]


def form_fp8(make, name, N, K, how):
    """FP8 e4m3. how: block [rows, cols] of numbers with one scale, 0: all; scale: name of the scale; shape: of the scale if it is
    one number; scale_dtype. A weight is code * scale."""
    rows, cols = (how["block"][i] or n for i, n in enumerate((N, K)))
    u = make.unit("codes", (N, K))
    code = e4m3_codes(np.float32(448) * u * np.abs(u))   # squared: many small numbers
    dtype = how.get("scale_dtype", "F32")
    scale = make.scales((-(-N // rows), -(-K // cols)), 448, dtype)
    shape = how.get("shape", scale.shape)
    return ({f"{name}.weight": ("F8_E4M3", code), f"{name}.{how['scale']}": (dtype, to_bits(scale, dtype).reshape(shape))},
            e4m3_values(code) * spread(scale, N, K, rows, cols))


def int4_parts(make, N, K, how):
    """Codes [N][K], scales and zero points [N][groups], the group of each column, and the matrix. how: group, -1: one group; sym: the
    zero point is 8; order: columns belong to groups in a random order; scale_dtype."""
    group = how["group"] if how["group"] > 0 else K
    q = make.integers("codes", (N, K), 16)
    scale = make.scales((N, K // group), 8, how["scale_dtype"])
    zero = np.full(scale.shape, 8) if how.get("sym") else 4 + make.integers("zeros", scale.shape, 9)
    order = np.argsort(words(make.seed, f"{make.name}.order", K), kind="stable") if how.get("order") else np.arange(K)
    index = np.empty(K, np.int64)
    index[order] = np.arange(K) // group
    dense = (q - zero[:, index]).astype(np.float32) * scale[:, index]
    return q, scale, zero, index, dense


def form_awq(make, name, N, K, how):
    q, scale, zero, _, dense = int4_parts(make, N, K, how)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {f"{name}.qweight": ("I32", pack4(q.T, 1, order)), f"{name}.qzeros": ("I32", pack4(zero.T, 1, order)),
            f"{name}.scales": (how["scale_dtype"], np.ascontiguousarray(to_bits(scale, how["scale_dtype"]).T))}, dense


def form_gptq(make, name, N, K, how):
    """The first version stores zero points that are one less than meant; how["v2"]: the second does not."""
    q, scale, zero, index, dense = int4_parts(make, N, K, how)
    return {f"{name}.qweight": ("I32", pack4(q.T, 0)), f"{name}.qzeros": ("I32", pack4(zero.T - (0 if how.get("v2") else 1), 1)),
            f"{name}.scales": (how["scale_dtype"], np.ascontiguousarray(to_bits(scale, how["scale_dtype"]).T)),
            f"{name}.g_idx": ("I32", index.astype(np.uint32))}, dense


def form_packed(make, name, N, K, how):
    """compressed-tensors' pack-quantized: a code is the number + 8, and so is a zero point."""
    q, scale, zero, index, dense = int4_parts(make, N, K, how)
    dtype = how["scale_dtype"]
    tensors = {f"{name}.weight_packed": ("I32", pack4(q, 1)), f"{name}.weight_scale": (dtype, to_bits(scale, dtype)),
               f"{name}.weight_shape": ("I64", np.array([N, K], np.uint64))}
    if not how.get("sym"):
        tensors[f"{name}.weight_zero_point"] = ("I32", pack4(zero, 0))
    if how.get("order"):
        tensors[f"{name}.weight_g_idx"] = ("I32", index.astype(np.uint32))
    return tensors, dense


def form_mxfp4(make, name, shape, how):
    """GPT-OSS' experts: [X][N][K] in blocks of 32 numbers of K, the low nibble first, with one power of two. Without quantization
    the file has the transpose, [X][K][N]."""
    X, K, N = shape
    code = make.integers("codes", (X, N, K // 32, 16, 2), 16)
    power = int(np.frexp(make.width / np.float32(6))[1]) - 1 + make.integers("scale", (X, N, K // 32), 3) - 1
    value = np.where(code & 8, -1, 1).astype(np.float32) * FP4[code & 7]
    dense = np.ldexp(value.reshape(X, N, K // 32, 32), power[..., None]).astype(np.float32).reshape(X, N, K)
    return {f"{name}_blocks": ("U8", (code[..., 0] | code[..., 1] << 4).astype(np.uint8)),
            f"{name}_scales": ("U8", (power + 127).astype(np.uint8))}, np.ascontiguousarray(dense.transpose(0, 2, 1))


FORMS = {"fp8": form_fp8, "awq": form_awq, "gptq": form_gptq, "packed": form_packed}


# ---- From a fixture to a folder ----

def load(name):
    """name: of a fixture, or the path of its file."""
    with open(name if name.endswith(".json") else os.path.join(MODELS, name + ".json")) as f:
        return json.load(f)


def groups(spec, dense):
    """(dtype, shape, centre, width, name) of each tensor. "extra" tensors belong to the quantized form only."""
    for dtype, shape, centre, width, names in spec["tensors"] + ([] if dense else spec.get("extra", [])):
        for name in names:
            yield dtype, shape, centre, width, name


def quantized(spec, name, shape, width, dense):
    how, make = spec["quant"], Make(spec["seed"], name, width)
    if how["form"] == "mxfp4":
        parts, matrix = form_mxfp4(make, name, shape, how)
    else:
        parts, matrix = FORMS[how["form"]](make, name.removesuffix(".weight"), *shape, how)
    return {name: ("F32", to_bits(matrix, "F32"))} if dense else parts


def tensors_of(spec, dense=False):
    """name -> (dtype, array of bits). dense: quantized matrices as float32."""
    out = {}
    for dtype, shape, centre, width, name in groups(spec, dense):
        stream = spec.get("as", {}).get(name, name)
        if dtype == "quant":
            out.update(quantized(spec, name, shape, width, dense))
            continue
        out[name] = (dtype, to_bits(np.float32(centre) + np.float32(width) * unit(spec["seed"], stream, shape), dtype))
        for source, copy in spec.get("equal_rows", {}).get(name, []):
            out[name][1][copy] = out[name][1][source]
    return out


def write_safetensors(path, tensors):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, bits) in tensors.items():
        assert bits.dtype == SIZES[dtype], f"{name}: {bits.dtype} for {dtype}"
        header[name] = {"dtype": dtype, "shape": list(bits.shape), "data_offsets": [at, at + bits.nbytes]}
        at += bits.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, bits in tensors.values():
            f.write(np.ascontiguousarray(bits).tobytes())


def write(folder, spec, dense=False, edit=None):
    """Writes the folder. dense: the same numbers without quantization. edit: a function of EDITS."""
    tensors, config = tensors_of(spec, dense), json.loads(json.dumps(spec["config"]))
    files = {} if dense else dict(spec.get("files", {}))
    for part in (config, config.get("text_config", {})) if dense else ():
        part.pop("quantization_config", None)
    if edit:
        edit(config, tensors)
    os.makedirs(folder, exist_ok=True)
    for name, content in {"config.json": config, **files}.items():
        with open(os.path.join(folder, name), "w") as f:
            json.dump(content, f, indent=1)
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors)


# ---- Checkpoints that are wrong in one place ----
# name -> (fixture, what is changed in config and tensors, a word that the message must have). A tensor is (dtype, array of bits).

ATTN, MLP, LINEAR = "model.layers.1.self_attn.", "model.layers.1.mlp.", "model.layers.1.linear_attn."


def field(*path, value):
    """Sets a field of the config; path: its names from outside in."""
    def change(config, tensors):
        for key in path[:-1]:
            config = config[key]
        config[path[-1]] = value
    return change


def removed(name):
    return lambda config, tensors: tensors.pop(name)


def cut(name, axis=0):
    """The tensor has one row or column less."""
    def change(config, tensors):
        dtype, bits = tensors[name]
        tensors[name] = dtype, np.delete(bits, -1, axis)
    return change


def element(name, index, value):
    """value: the bits of one element."""
    def change(config, tensors):
        tensors[name][1].reshape(-1)[index] = value
    return change


def renamed(*path, to):
    """Gives a field of the config another name."""
    def change(config, tensors):
        for key in path[:-1]:
            config = config[key]
        config[to] = config.pop(path[-1])
    return change


def copied(name, to):
    return lambda config, tensors: tensors.update({to: tensors[name]})


def retyped(name, dtype):
    return lambda config, tensors: tensors.update({name: (dtype, np.zeros(tensors[name][1].shape, SIZES[dtype]))})


QUANT = "quantization_config"
WEIGHTS = (QUANT, "config_groups", "group_0", "weights")
EDITS = {
    # scales
    "scale-rows": ("fp8-block", cut(ATTN + "q_proj.weight_scale_inv"), "q_proj.weight_scale_inv"),
    "scale-columns": ("fp8-block-edge", cut(MLP + "down_proj.weight_scale_inv", 1), "down_proj.weight_scale_inv"),
    "scale-missing": ("fp8-block", removed(MLP + "gate_proj.weight_scale_inv"), "gate_proj.weight_scale_inv"),
    "scale-type": ("fp8-block", retyped(MLP + "gate_proj.weight_scale_inv", "I32"), "gate_proj.weight_scale_inv"),
    "scale-nan": ("fp8-block", element(ATTN + "o_proj.weight_scale_inv", 3, 0x7FC00000), "o_proj.weight_scale_inv"),
    "scale-infinite": ("fp8-static", element(ATTN + "o_proj.weight_scale", 0, 0x7F800000), "o_proj.weight_scale"),
    "scale-nan-bf16": ("ct-fp8-channel", element(ATTN + "k_proj.weight_scale", 7, 0x7FC0), "k_proj.weight_scale"),
    "scale-nan-f16": ("awq-128", element(ATTN + "k_proj.scales", 7, 0x7E00), "k_proj.scales"),
    "scale-nan-mxfp4": ("gptoss-mxfp4", element(MLP + "experts.down_proj_scales", 9, 255), "down_proj_scales"),
    "channel-scale-shape": ("ct-fp8-channel", cut(ATTN + "k_proj.weight_scale"), "k_proj.weight_scale"),
    "awq-scale-shape": ("awq-128", cut(ATTN + "k_proj.scales"), "k_proj.scales"),
    "mxfp4-scale-shape": ("gptoss-mxfp4", cut(MLP + "experts.gate_up_proj_scales", 2), "gate_up_proj_scales"),
    "mxfp4-blocks-shape": ("gptoss-mxfp4", cut(MLP + "experts.gate_up_proj_blocks", 3), "gate_up_proj_blocks"),
    # vectors of plain numbers: of infinity there may be biases that exclude an expert
    "norm-nan": ("llama", element("model.layers.1.input_layernorm.weight", 3, 0x7FC0), "input_layernorm.weight: a number is NaN"),
    "last-norm-nan-f16": ("awq-128", element("model.norm.weight", 255, 0xFE01), "model.norm.weight: a number is NaN"),
    "router-bias-nan": ("deepseek3", element(MLP + "gate.e_score_correction_bias", 11, 0x7F800001), "e_score_correction_bias: a number is NaN"),
    "expert-bias-nan": ("gptoss", element(MLP + "experts.down_proj_bias", 800, 0xFFFF), "experts.down_proj_bias: a number is NaN"),
    "sinks-nan": ("gptoss", element(ATTN + "sinks", 6, 0x7F81), "sinks: a number is NaN"),
    # groups, zero points, orders
    "group-does-not-divide": ("gptq-128", field(QUANT, "group_size", value=96), "96"),
    "group-zero": ("awq-128", field(QUANT, "group_size", value=0), "group_size"),
    "group-negative": ("packed-128", field(*WEIGHTS, "group_size", value=-3), "group_size"),
    "group-other": ("packed-64", field(*WEIGHTS, "group_size", value=128), "weight_scale"),
    "zeros-missing": ("packed-32-zero", removed(MLP + "up_proj.weight_zero_point"), "up_proj.weight_zero_point"),
    "zeros-shape": ("gptq-32", cut(MLP + "up_proj.qzeros", 1), "up_proj.qzeros"),
    "zero-of-16": ("gptq-32", element(MLP + "up_proj.qzeros", 4, 0x777F7777), "up_proj.qzeros"),
    "order-above": ("gptq-order", element(ATTN + "v_proj.g_idx", 11, 8), "v_proj.g_idx"),
    "order-below": ("packed-order", element(ATTN + "v_proj.weight_g_idx", 11, 0xFFFFFFFF), "v_proj.weight_g_idx"),
    "order-shape": ("gptq-order", cut(ATTN + "v_proj.g_idx"), "v_proj.g_idx"),
    "packed-columns": ("packed-128", cut(ATTN + "v_proj.weight_packed", 1), "v_proj.weight_packed"),
    "packed-shape": ("packed-128", element(ATTN + "v_proj.weight_shape", 1, 264), "v_proj.weight_shape"),
    "codes-missing": ("gptq-128", removed(ATTN + "v_proj.qweight"), "v_proj"),
    # quantization_config
    "method-unknown": ("gptq-128", field(QUANT, "quant_method", value="quip"), "quip"),
    "method-bitsandbytes": ("gptq-128", field(QUANT, value={"quant_method": "bitsandbytes", "load_in_4bit": True}), "bitsandbytes"),
    "method-missing": ("gptq-128", field(QUANT, value={}), "quant_method"),
    "config-no-object": ("gptq-128", field(QUANT, value=7), "quantization_config"),
    "gptq-3-bits": ("gptq-128", field(QUANT, "bits", value=3), "bits"),
    "gptq-8-bits": ("gptq-128", field(QUANT, "bits", value=8), "bits"),
    "awq-gemv": ("awq-128", field(QUANT, "version", value="gemv"), "gemv"),
    "ct-nvfp4": ("packed-128", field(QUANT, "format", value="nvfp4-pack-quantized"), "nvfp4"),
    "ct-int8": ("packed-128", field(QUANT, "format", value="int-quantized"), "int-quantized"),
    "ct-8-bits": ("packed-128", field(*WEIGHTS, "num_bits", value=8), "num_bits"),
    "modelopt-nvfp4": ("modelopt-fp8", field(QUANT, "quant_algo", value="NVFP4"), "NVFP4"),
    "block-of-zero": ("fp8-block", field(QUANT, "weight_block_size", value=[128, 0]), "weight_block_size"),
    "block-of-one-number": ("fp8-block", field(QUANT, "weight_block_size", value=[128]), "weight_block_size"),
    "gptq-format": ("gptq-128", lambda config, tensors: config[QUANT].update(format="marlin"), "marlin"),
    "gptq-dynamic": ("gptq-128", field(QUANT, "dynamic", value=["-:.*"]), "dynamic"),
    "awq-format": ("awq-128", lambda config, tensors: config[QUANT].update(format="gemv", version=None), "gemv"),
    "ct-no-groups": ("packed-128", field(QUANT, "config_groups", value={}), "one group or more"),
    "ct-fp8-zero-points": ("ct-fp8-channel", field(*WEIGHTS, "symmetric", value=False), "symmetric"),
    "block-huge": ("fp8-block", field(QUANT, "weight_block_size", value=[1 << 40, 128]), "weight_block_size"),
    # experts
    "expert-missing": ("qwen3moe", removed(MLP + "experts.13.up_proj.weight"), "experts.13.up_proj.weight"),
    "expert-extra": ("qwen3moe", copied(MLP + "experts.13.up_proj.weight", MLP + "experts.24.up_proj.weight"), "experts.24"),
    "expert-shape": ("mixtral", cut("model.layers.1.block_sparse_moe.experts.3.w3.weight"), "experts.3.w3.weight"),
    "expert-scale-shape": ("fp8-block-qwen3moe", cut(MLP + "experts.6.down_proj.weight_scale_inv"), "experts.6.down_proj.weight_scale_inv"),
    "router-rows": ("qwen3moe", cut(MLP + "gate.weight"), "mlp.gate.weight"),
    "router-bias-shape": ("deepseek3", cut(MLP + "gate.e_score_correction_bias"), "e_score_correction_bias"),
    "sinks-shape": ("gptoss", cut(ATTN + "sinks"), "sinks"),
    "shared-expert-missing": ("qwen2moe", removed(MLP + "shared_expert_gate.weight"), "shared_expert_gate"),
    "top-above-experts": ("qwen3moe", field("num_experts_per_tok", value=25), "num_experts_per_tok"),
    "top-of-zero": ("mixtral", field("num_experts_per_tok", value=0), "num_experts_per_tok"),
    "experts-huge": ("mixtral", field("num_local_experts", value=1 << 40), "num_local_experts"),
    "groups-do-not-divide": ("deepseek3", field("n_group", value=5), "n_group"),
    "top-groups-above": ("deepseek3", field("topk_group", value=5), "topk_group"),
    # linear mixers
    "linear-heads": ("qwen3next", field("linear_num_value_heads", value=5), "linear_num_value_heads"),
    "linear-heads-zero": ("qwen3next", field("linear_num_key_heads", value=0), "linear_num_key_heads"),
    "linear-size-huge": ("qwen3next", field("linear_key_head_dim", value=1 << 40), "linear_key_head_dim"),
    "linear-taps": ("qwen3next", field("linear_conv_kernel_dim", value=1), "linear_conv_kernel_dim"),
    "linear-rows": ("qwen3next", cut(LINEAR + "in_proj_ba.weight"), "in_proj_ba.weight"),
    "linear-conv-taps": ("qwen3next", cut(LINEAR + "conv1d.weight", 2), "conv1d.weight"),
    "linear-decay-missing": ("qwen3next", removed(LINEAR + "A_log"), "A_log"),
    "linear-parts": ("qwen35", cut("model.language_model.layers.0.linear_attn.in_proj_qkv.weight"), "in_proj_qkv.weight"),
    "linear-types": ("qwen35", field("text_config", "layer_types", value=["sliding_attention"] * 4), "layer_types"),
    "gate-rows": ("qwen35", cut("model.language_model.layers.1.self_attn.q_proj.weight"), "q_proj.weight"),
    "stacked-experts": ("qwen35moe", cut("model.language_model.layers.2.mlp.experts.gate_up_proj"), "experts.gate_up_proj"),
    "stacked-rows": ("qwen35moe", cut("model.language_model.layers.2.mlp.experts.down_proj", 1), "experts.down_proj"),
    # other architectures' fields
    "latent-rows": ("deepseek2", cut(ATTN + "kv_a_proj_with_mqa.weight"), "kv_a_proj_with_mqa"),
    "layer-types-short": ("gemma3-types", field("layer_types", value=["full_attention"]), "layer_types"),
    "no-rope-text": ("smollm3", field("no_rope_layers", value=[1, "0", 1, 0]), "no_rope_layers is \"0\""),
    "dense-layer-text": ("qwen3moe", field("mlp_only_layers", value=["1"]), "mlp_only_layers is \"1\""),
    "architectures-text": ("qwen3", field("architectures", value="Qwen3ForCausalLM"), "architectures is"),
    "no-rope-interval": ("smollm3-interval", field("no_rope_layer_interval", value=0), "no_rope_layer_interval is 0"),
    "types-without-window": ("smollm3", field("layer_types", value=["full_attention", "sliding_attention"] * 2), "layer_types is \"sliding_attention\""),
    "no-rope-short": ("smollm3", field("no_rope_layers", value=[1, 0]), "no_rope_layers"),
    "long-factor-short": ("phi3-longrope-long", field("rope_scaling", "long_factor", value=[1.0, 2.0]), "long_factor"),
    "rope-kind": ("glm4", field("rope_parameters", value={"rope_type": "spiral", "rope_theta": 700.0}), "spiral"),
    "bidirectional": ("gemma3", field("use_bidirectional_attention", value=True), "use_bidirectional_attention"),
    "activation": ("gemma2", field("hidden_activation", value="relu6"), "relu6"),
    "activation-null": ("gemma2", field("hidden_activation", value=None), "hidden_activation is null"),
    "activation-of-linear": ("qwen3next", field("hidden_act", value="gelu_pytorch_tanh"), "hidden_act"),
    "size-null": ("llama", field("intermediate_size", value=None), "intermediate_size is null"),
    "layers-null": ("qwen2", field("num_hidden_layers", value=None), "num_hidden_layers is null"),
    "eps-null": ("olmo3", field("rms_norm_eps", value=None), "rms_norm_eps is null"),
    "theta-null": ("llama", field("rope_theta", value=None), "rope_theta is null"),
    "old-rope-type": ("gemma3", field("rope_scaling", value={"type": "linear", "factor": 3.0}), "rope_scaling.type is \"linear\", expected rope_type"),
    "truncate-of-two-ropes": ("gemma3", field("rope_scaling", value={"rope_type": "yarn", "factor": 4.0, "truncate": False}), "rope_scaling.truncate is false"),
    "factor-null": ("granite", field("attention_multiplier", value=None), "attention_multiplier is null"),
    "scale-null": ("deepseek3", field("routed_scaling_factor", value=None), "routed_scaling_factor is null"),
    "sees-later-tokens": ("gemma3-image", field("architectures", value=["PaliGemmaForConditionalGeneration"]), "PaliGemma"),
    "token-classifier": ("gemma3-image", field("architectures", value=["Qwen3ASRForTokenClassification"]), "Qwen3ASRForTokenClassification"),
    "decider": ("gemma3-image", field("architectures", value=["JevForDecision"]), "JevForDecision"),
    "classifier": ("gemma3-image", field("architectures", value=["Gemma3ForSequenceClassification"]), "Gemma3ForSequenceClassification"),
    "code-of-its-own": ("qwen3", lambda config, tensors: config.update(
        architectures=["OwnForCausalLM"], model_type="own", auto_map={"AutoModelForCausalLM": "own.OwnForCausalLM"}), "OwnForCausalLM"),
}


# ---- Edits that change nothing: fields that transformers does not read, or has under two names ----

NO_CHANGES = {
    "gptq-format": ("gptq-64-v2", renamed(QUANT, "checkpoint_format", to="format")),
    "awq-zero-point": ("awq-128", field(QUANT, "zero_point", value=False)),
    "interval-beside-list": ("smollm3", field("no_rope_layer_interval", value=0)),
    "flags-of-rope": ("smollm3", field("no_rope_layers", value=[True, False, 1.0, 0])),
    "pattern-of-windows": ("mistral", field("sliding_window_pattern", value=2)),
    "border-of-windows": ("mistral", field("max_window_layers", value=1)),
    "dense-layers": ("deepseek3", field("mlp_only_layers", value=[1])),
    "sparse-step": ("deepseek3", field("decoder_sparse_step", value=2)),
    "first-dense": ("qwen3moe", field("first_k_dense_replace", value=1)),
    "experts-scale": ("olmoe", field("routed_scaling_factor", value=2.0)),
    "cap-null": ("gemma2-types", field("final_logit_softcapping", value=None)),
    "pattern-of-gemma2": ("gemma2", field("sliding_window_pattern", value=3)),
    "pattern-of-olmo3": ("olmo3", field("sliding_window_pattern", value=2)),
    "theta-of-windows": ("olmo3", field("rope_local_base_freq", value=33.0)),
    "types-of-mixtral": ("mixtral", lambda config, tensors: config.update(
        layer_types=["full_attention", "sliding_attention"] * (config["num_hidden_layers"] // 2) + ["full_attention"] * (config["num_hidden_layers"] % 2))),
    "length-beside-two-ropes": ("olmo3", field("original_max_position_embeddings", value=500)),
    "both-rope-objects": ("gemma3-types", lambda config, tensors: config.update(
        rope_scaling={"rope_type": "linear", "factor": config["rope_parameters"]["full_attention"].pop("factor")})),
    "both-rope-objects-differ": ("gemma3-types", lambda config, tensors: config.update(
        rope_scaling=dict(config["rope_parameters"]["full_attention"]),
        rope_parameters={**config["rope_parameters"], "full_attention": {"rope_type": "default", "rope_theta": 33.0}})),
    "fields-around-text": ("gemma3-image", lambda config, tensors: config.update(
        final_logit_softcapping=3.0, rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 33.0}}, layer_types=["full_attention"])),
    "rope-around-text": ("qwen35-tied", lambda config, tensors: config.update(
        rope_scaling={"rope_type": "linear", "factor": 3.0}, rope_theta=33.0, full_attention_interval=2)),
    "type-of-kimi": ("deepseek3", field("model_type", value="kimi_k2")),
    "weights-as-they-are": ("mixtral", field("norm_topk_prob", value=False)),
}


def write_whole(folder, spec):
    """Writes a model of test/embeddings.json: the folder, the tokenizer of test/model, the other files, the chat template."""
    os.makedirs(folder, exist_ok=True)
    write(folder, {k: v for k, v in spec.items() if k != "files"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(HERE, "model", name), folder)
    for name, content in spec.get("files", {}).items():
        os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
        with open(os.path.join(folder, name), "w") as f:
            json.dump(content, f)
    if "template" in spec:
        with open(os.path.join(folder, "chat_template.jinja"), "w") as f:
            f.write(spec["template"])


def main():
    if len(sys.argv) < 3:
        print("fixtures:", *sorted(x.removesuffix(".json") for x in os.listdir(MODELS)))
        print("edits:", *(f"{name} ({base})" for name, (base, *_) in EDITS.items()))
        return
    edit = EDITS[sys.argv[3]][1] if len(sys.argv) > 3 else None
    write(sys.argv[2], load(sys.argv[1]), edit=edit)


if __name__ == "__main__":
    main()
