#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes test/models/: for each architecture and weight format a tiny model's config, the seed of its weights, and reference logits
from transformers. test/model_weights.py makes the weights from these files; test/test_models.py compares toka with the logits.

Run:       python3 test/make_models.py [NAME ...]        (all: some minutes on two CPU cores, no GPU)
           python3 test/make_models.py --check [NAME ...]   compares the files with the transformers that is installed
           python3 test/make_models.py --packers         compares the formats with their own packers, as far as they are installed
Made with: Python 3.11, torch 2.15.0, transformers 5.24.0, compressed-tensors 0.20.0, autoawq 0.2.9.

A file has these fields; where a field is missing, the model has no such thing:

    seed, config          of the checkpoint
    tensors               [dtype, shape, centre, width, [name ...]] ...: see model_weights.py
    quant                 form of the tensors whose dtype is "quant"
    extra                 as tensors: what only the quantized checkpoint has, or what must be ignored
    as                    name -> another name, whose numbers it has
    equal_rows            name -> [[row, row that is made equal] ...]
    files                 more JSON files of the folder
    max_model_len         length with which the model must be opened
    cases                 prompt   ids
                          positions  8 positions in the prompt
                          logits   base64 of 8 rows of V little-endian float32: the logits after the token at each position
                          greedy   ids of greedy continuation; an end-of-sequence id does not stop it
                          min_gap  the smallest difference of the two highest logits in it

The reference: model_weights.py writes the folder, transformers loads it with from_pretrained in float32 with eager attention, and must
find each tensor that it wants and no other. Each prompt runs alone, without a KV cache. If the weights are quantized, the folder has
their values in float32 instead: activations are never quantized.

Names and shapes of the tensors are those of transformers' save_pretrained, which are those of the published checkpoints, but for the
prefix of Gemma 3's vision tower.
"""
import argparse
import base64
import json
import os
import re
import sys
import tempfile

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import model_weights as mw

N_GREEDY, N_POSITIONS, MIN_GAP, MIN_DISTINCT = 20, 8, 2e-3, 6
TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 700.0}


def config(arch, E, H, K, F, V, L, D=None, dtype="bfloat16", tied=False, eps=1e-2, max_pos=512, **more):
    """A config.json. arch: the class and the model_type."""
    c = {"architectures": [arch[0]], "model_type": arch[1], "hidden_size": E, "num_attention_heads": H, "num_key_value_heads": K,
         "intermediate_size": F, "num_hidden_layers": L, "vocab_size": V, "max_position_embeddings": max_pos, "hidden_act": "silu",
         "rms_norm_eps": eps, "tie_word_embeddings": tied, "torch_dtype": dtype, "bos_token_id": 1, "eos_token_id": 2,
         "use_cache": True, **more}
    if D is not None:
        c["head_dim"] = D
    return {k: v for k, v in c.items() if v != "absent"}


def row(config, lengths, **more):
    """A fixture to be: prompt lengths, and more fields of the file."""
    return {"config": config, "lengths": lengths, **more}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 48, "rope_type": "llama3"}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 40, "beta_fast": 32.0, "beta_slow": 1.0}


def yarn(mscale):
    """As DeepSeek writes it."""
    return {"type": "yarn", **{k: v for k, v in YARN.items() if k != "rope_type"}, "mscale": mscale, "mscale_all_dim": mscale}


def longrope(n, style="longrope"):
    return {"type": style, "short_factor": [1 + 0.05 * i for i in range(n)], "long_factor": [1.5 + 0.75 * i for i in range(n)]}


def phi3(**more):
    return config(("Phi3ForCausalLM", "phi3"), E=84, H=7, K=1, F=99, V=263, L=2, rope_theta=900.0, sliding_window=None,
                  pad_token_id=0, attention_bias=False, **more)


def gemma2(**more):
    return config(("Gemma2ForCausalLM", "gemma2"), E=72, H=6, K=2, F=91, V=263, L=3, D=16, tied=True, hidden_act="gelu_pytorch_tanh",
                  hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=2.5, final_logit_softcapping=4.0,
                  query_pre_attn_scalar=20, rope_theta=700.0, sliding_window=24, pad_token_id=0, **more)


def gemma3_text(**more):
    return config(("Gemma3ForCausalLM", "gemma3_text"), E=72, H=3, K=1, F=91, V=263, L=4, D=40, tied=True, query_pre_attn_scalar=30,
                  hidden_activation="gelu_pytorch_tanh", hidden_act="absent", rope_theta=5000.0, rope_local_base_freq=300.0,
                  sliding_window=24, pad_token_id=0, **more)


def gemma3_image():
    text = {k: v for k, v in gemma3_text(sliding_window_pattern=3, rope_scaling={"rope_type": "linear", "factor": 3.0}).items()
            if k not in ("architectures", "torch_dtype", "tie_word_embeddings")}
    vision = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
              "patch_size": 8, "model_type": "siglip_vision_model", "vision_use_head": False}
    return {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text, "vision_config": vision,
            "boi_token_index": 259, "eoi_token_index": 260, "image_token_index": 262, "mm_tokens_per_image": 4,
            "eos_token_id": [1, 2], "torch_dtype": "bfloat16"}


def moe(arch, experts, top, F, **more):
    names = {"num_experts": experts, "num_experts_per_tok": top, "moe_intermediate_size": F, "decoder_sparse_step": 1,
             "mlp_only_layers": [], "router_aux_loss_coef": 0.001, "output_router_logits": False}
    return config(arch, **{"E": 72, "H": 7, "K": 1, "F": 99, "V": 263, "L": 3, "D": 24, "rope_theta": 700.0, **names, **more})


QWEN2_MOE, QWEN3_MOE = ("Qwen2MoeForCausalLM", "qwen2_moe"), ("Qwen3MoeForCausalLM", "qwen3_moe")


def gpt_oss(**more):
    return config(("GptOssForCausalLM", "gpt_oss"), E=96, H=7, K=1, F=160, V=263, L=2, D=32, num_local_experts=9, experts_per_token=4,
                  num_experts_per_tok=4, sliding_window=24, swiglu_limit=1.5, attention_bias=True, rope_theta=900.0,
                  rope_scaling={**YARN, "truncate": False}, router_aux_loss_coef=0.9, initial_context_length=40,
                  layer_types=["sliding_attention", "full_attention"], output_router_logits=False, **more)


def deepseek(version, **more):
    names = dict(first_k_dense_replace=1, kv_lora_rank=40, q_lora_rank=None, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20,
                 moe_intermediate_size=51, n_routed_experts=12, n_shared_experts=2, num_experts_per_tok=3, moe_layer_freq=1,
                 routed_scaling_factor=1.0, norm_topk_prob=False, scoring_func="softmax", topk_method="greedy", n_group=1, topk_group=1,
                 attention_bias=False, rope_theta=900.0, rope_scaling=None)
    return config((f"DeepseekV{version}ForCausalLM", f"deepseek_v{version}"), E=72, H=3, K=3, F=99, V=263, L=3, **{**names, **more})


MTP = ["enorm.weight", "hnorm.weight", "shared_head.norm.weight"]          # of the layer that predicts one token more, some tensors


def cohere(arch, **more):
    return config(arch, E=72, H=9, K=3, F=99, V=263, L=4, tied=True, rms_norm_eps="absent", layer_norm_eps=1e-2, rope_theta=700.0,
                  logit_scale=0.25, attention_bias=False, pad_token_id=0, **more)


MODELS = {
    # ---- Dense -------------------------------------------------------------------------------------------------------
    "llama": row(config(("LlamaForCausalLM", "llama"), E=84, H=7, K=1, F=99, V=263, L=3, D=24, rope_theta=5000.0, attention_bias=True,
                        mlp_bias=False, rope_scaling=LLAMA3), [1, 5, 100]),
    "llama-mlp-bias": row(config(("LlamaForCausalLM", "llama"), E=51, H=3, K=3, F=67, V=259, L=2, D=18, attention_bias=False,
                                 mlp_bias=True, rope_parameters=DEFAULT_ROPE), [5, 60]),
    "mistral": row(config(("MistralForCausalLM", "mistral"), E=72, H=3, K=1, F=99, V=263, L=3, D=32, rope_theta=700.0,
                          sliding_window=24), [5, 24, 25, 100]),
    "qwen2": row(config(("Qwen2ForCausalLM", "qwen2"), E=84, H=7, K=1, F=99, V=263, L=3, tied=True, rope_theta=700.0,
                        use_sliding_window=True, sliding_window=24, max_window_layers=1), [5, 70]),
    "qwen3": row(config(("Qwen3ForCausalLM", "qwen3"), E=72, H=3, K=1, F=99, V=263, L=3, D=40, tied=True, rope_theta=700.0,
                        attention_bias=True), [5, 70]),
    "phi3": row(phi3(), [5, 70]),
    "phi3-partial": row({**phi3(partial_rotary_factor=0.5, tied=True), "hidden_size": 112}, [5, 70]),
    "phi3-longrope-short": row(phi3(original_max_position_embeddings=64, rope_scaling=longrope(6)), [1, 5, 44], max_model_len=64),
    "phi3-longrope-long": row({**phi3(original_max_position_embeddings=64, partial_rotary_factor=0.75, rope_scaling=longrope(6)),
                               "hidden_size": 112}, [65, 100, 150], max_model_len=200),
    "gemma2": row(gemma2(), [5, 24, 25, 100]),
    "gemma2-types": row({**gemma2(attention_bias=False, eps=1e-3), "final_logit_softcapping": None,
                         "layer_types": ["full_attention", "sliding_attention", "full_attention"]}, [5, 70]),
    "gemma3": row(gemma3_text(sliding_window_pattern=2), [5, 24, 25, 100]),
    "gemma3-types": row({**gemma3_text(layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"]),
                         "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 9000.0},
                                             "sliding_attention": {"rope_type": "default", "rope_theta": 200.0}}}, [5, 70]),
    "gemma3-image": row(gemma3_image(), [5, 70]),
    "olmo2": row(config(("Olmo2ForCausalLM", "olmo2"), E=72, H=9, K=3, F=99, V=263, L=2, rope_theta=700.0, attention_bias=False,
                        pad_token_id=0), [5, 70]),
    "olmo3": row(config(("Olmo3ForCausalLM", "olmo3"), E=72, H=9, K=9, F=99, V=263, L=4, rope_theta=700.0, sliding_window=24,
                        pad_token_id=0, rope_scaling={**YARN, "attention_factor": 1.2079441541679836}), [5, 24, 25, 100]),
    "smollm3": row(config(("SmolLM3ForCausalLM", "smollm3"), E=72, H=9, K=3, F=99, V=263, L=4, tied=True, rope_theta=700.0,
                          no_rope_layers=[1, 0, 1, 0], no_rope_layer_interval=2, pad_token_id=0), [5, 70]),
    "smollm3-interval": row(config(("SmolLM3ForCausalLM", "smollm3"), E=84, H=7, K=1, F=99, V=263, L=4, rope_theta=700.0,
                                   no_rope_layer_interval=3, pad_token_id=0), [5, 70]),
    "granite": row(config(("GraniteForCausalLM", "granite"), E=72, H=9, K=3, F=99, V=263, L=3, tied=True, rope_theta=700.0,
                          embedding_multiplier=1.6, logits_scaling=0.4, residual_multiplier=0.9, attention_multiplier=0.21,
                          attention_bias=False), [5, 70]),
    "glm4": row(config(("Glm4ForCausalLM", "glm4"), E=84, H=7, K=1, F=99, V=263, L=3, D=24, rope_theta=700.0, attention_bias=True,
                       partial_rotary_factor=0.5, pad_token_id=0), [5, 70]),
    "cohere2": row(cohere(("Cohere2ForCausalLM", "cohere2"), sliding_window=24, sliding_window_pattern=3), [5, 24, 25, 100]),
    "cohere": row(cohere(("CohereForCausalLM", "cohere"), use_qk_norm=True), [5, 70]),
    # ---- Mixtures of experts ---------------------------------------------------------------------------------------------
    "qwen2moe": row(moe(QWEN2_MOE, 11, 3, 51, D="absent", E=84, shared_expert_intermediate_size=57, norm_topk_prob=False), [5, 70]),
    "qwen2moe-mixed": row(moe(QWEN2_MOE, 6, 2, 51, D="absent", E=84, L=4, shared_expert_intermediate_size=57, norm_topk_prob=True,
                              decoder_sparse_step=2, mlp_only_layers=[3], tied=True), [5, 40]),
    "qwen3moe": row(moe(QWEN3_MOE, 24, 3, 45, norm_topk_prob=True), [1, 5, 70]),
    "qwen3moe-mixed": row(moe(QWEN3_MOE, 7, 2, 51, norm_topk_prob=False, L=4, mlp_only_layers=[1], tied=True), [5, 40]),
    "qwen3moe-ties": row(moe(QWEN3_MOE, 10, 3, 33, norm_topk_prob=True, L=2), [5, 40], ties=[(0, 7), (2, 3), (4, 9)]),
    "mixtral": row(config(("MixtralForCausalLM", "mixtral"), E=84, H=7, K=1, F=51, V=263, L=3, D=24, rope_theta=700.0,
                          num_local_experts=5, num_experts_per_tok=2, sliding_window=24), [5, 60]),
    "olmoe": row(config(("OlmoeForCausalLM", "olmoe"), E=72, H=9, K=3, F=51, V=263, L=3, rope_theta=700.0, num_experts=12,
                        num_experts_per_tok=4, norm_topk_prob=False, clip_qkv=None), [5, 60]),
    "olmoe-clip": row(config(("OlmoeForCausalLM", "olmoe"), E=72, H=9, K=9, F=51, V=263, L=2, rope_theta=700.0, num_experts=8,
                             num_experts_per_tok=3, norm_topk_prob=True, clip_qkv=1.5), [5, 40]),
    "gptoss": row(gpt_oss(), [5, 24, 25, 100]),
    "glm4moe": row(config(("Glm4MoeForCausalLM", "glm4_moe"), E=72, H=7, K=1, F=99, V=263, L=3, D=24, rope_theta=700.0,
                          moe_intermediate_size=45, num_experts_per_tok=3, n_routed_experts=12, n_shared_experts=1, n_group=1,
                          topk_group=1, routed_scaling_factor=1.7, norm_topk_prob=True, first_k_dense_replace=1, use_qk_norm=True,
                          partial_rotary_factor=0.5, attention_bias=True, num_nextn_predict_layers=1), [5, 70], next_layer=3),
    "glm4moe-groups": row(config(("Glm4MoeForCausalLM", "glm4_moe"), E=72, H=7, K=1, F=99, V=263, L=2, D=24, rope_theta=700.0,
                                 moe_intermediate_size=45, num_experts_per_tok=3, n_routed_experts=12, n_shared_experts=2, n_group=4,
                                 topk_group=2, routed_scaling_factor=1.0, norm_topk_prob=False, first_k_dense_replace=0,
                                 use_qk_norm=False, partial_rotary_factor=0.25, attention_bias=False), [5, 40]),
    "deepseek2": row(deepseek(2), [1, 5, 70]),
    "deepseek2-groups": row(deepseek(2, q_lora_rank=36, n_group=4, topk_group=2, topk_method="group_limited_greedy",
                                     routed_scaling_factor=3.0, rope_scaling=yarn(0.707)), [5, 100]),
    "deepseek3": row(deepseek(3, q_lora_rank=36, n_group=4, topk_group=2, topk_method="noaux_tc", scoring_func="sigmoid",
                              norm_topk_prob=True, routed_scaling_factor=2.5, n_shared_experts=1, num_nextn_predict_layers=1,
                              rope_scaling=yarn(1.0)), [1, 5, 100], next_layer=3),
    "deepseek3-plain": row(deepseek(3, topk_method="noaux_tc", scoring_func="sigmoid", first_k_dense_replace=0, n_group=3,
                                    topk_group=1, tied=True), [5, 40]),
}


# ---- Weights: each part of a model changes the logits ----

# Where an embedding is also the LM head, its deviation times sqrt(E). With more, each token would predict itself; with less, all
# logits would be nearly equal.
TIED_EMBEDDING = {"gemma2": 0.7, "gemma3_text": 0.7, "granite": 0.7, "cohere": 3.0, "cohere2": 3.0}


def scale_of(name, shape, c):
    """(centre, deviation) of a tensor's numbers. Scores q.k have a deviation of about 1.5, logits of about 2."""
    tied, model = c["tie_word_embeddings"] if "tie_word_embeddings" in c else True, c["model_type"]
    width = shape[-1] if not ("experts." in name and len(shape) == 3) else shape[1]
    part = name.rsplit(".", 2)[-2] if name.endswith((".weight", ".bias")) else name.rsplit(".", 1)[-1]
    if "norm" in part:
        gemma = model.startswith("gemma")                # it adds 1 to the weight
        strong = 0.25 if part in ("q_norm", "k_norm") else 1.0 if gemma and part.startswith("post") else 0.0
        return strong + (0.0 if gemma else 1.0), 0.3
    if part == "e_score_correction_bias":
        return 0.0, 0.2
    if part == "sinks":
        return 0.5, 1.0
    if name.endswith("bias"):
        return 0.0, 0.5 if part in ("q_proj", "k_proj") else 0.2
    if part in ("gate", "router", "shared_expert_gate"):
        return 0.0, 2.0 / width ** 0.5
    if part == "lm_head":
        return 0.0, 2.0 / width ** 0.5
    if part == "embed_tokens":
        return 0.0, TIED_EMBEDDING.get(model, 1.5) / width ** 0.5 if tied else 0.5
    strong = part in ("q_proj", "k_proj", "qkv_proj", "q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa")
    return 0.0, (1.25 if strong else 1.0) / width ** 0.5


def is_image(c):
    return "vision_config" in c


def auto_class(c):
    return AutoModelForImageTextToText if is_image(c) else AutoModelForCausalLM


def published_shapes(c):
    """name -> shape of the tensors that save_pretrained writes."""
    with tempfile.TemporaryDirectory() as folder:
        mw.write(folder, {"config": c, "tensors": [], "seed": 0})
        settings = AutoConfig.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as folder:
        auto_class(c).from_config(settings, dtype=torch.float32).save_pretrained(folder)
        with open(f"{folder}/model.safetensors", "rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    published = {k.replace("vision_tower.", "vision_tower.vision_model."): v for k, v in header.items() if k != "__metadata__"}
    return {k: v["shape"] for k, v in published.items()}


def natural(name):
    return [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)]


def tensor_groups(c, shapes, quant):
    """The "tensors" field: names with the same dtype, shape, centre and width together."""
    text, groups = c.get("text_config", c), {}
    for name in sorted(shapes, key=natural):
        centre, deviation = scale_of(name, shapes[name], text)
        dtype = "F32" if name.endswith("e_score_correction_bias") else TYPES[c["torch_dtype"]]
        if quant and re.search(quant["modules"], name):
            dtype = "quant"
        key = (dtype, tuple(shapes[name]), centre, float(np.float32(round(deviation * 3 ** 0.5, 4))))
        groups.setdefault(key, []).append(name)
    return [[k[0], list(k[1]), k[2], k[3], names] for k, names in groups.items()]


def make_spec(seed, row):
    """The fixture without its cases."""
    c, quant = row["config"], row.get("quant")
    spec = {"seed": seed, "config": c, **{k: v for k, v in row.items() if k in ("quant", "extra", "files", "max_model_len")}}
    spec["tensors"] = tensor_groups(c, published_shapes(c), quant)
    if "ties" in row:
        layers = range(c["num_hidden_layers"])
        spec["equal_rows"] = {f"model.layers.{i}.mlp.gate.weight": row["ties"] for i in layers}
        spec["as"] = {f"model.layers.{i}.mlp.experts.{b}.{p}_proj.weight": f"model.layers.{i}.mlp.experts.{a}.{p}_proj.weight"
                      for i in layers for a, b in row["ties"] for p in ("gate", "up", "down")}
    if "next_layer" in row:
        names = [f"model.layers.{row['next_layer']}.{x}" for x in MTP]
        spec["extra"] = [["BF16", [c["hidden_size"]], 1.0, 0.5, names],
                         ["BF16", [c["hidden_size"], 2 * c["hidden_size"]], 0.0, 0.1, [f"model.layers.{row['next_layer']}.eh_proj.weight"]]]
    return spec


# ---- The reference ----

def open_reference(spec):
    """The model that transformers loads from the folder of a fixture."""
    dense = "quant" in spec
    with tempfile.TemporaryDirectory() as folder:
        mw.write(folder, spec, dense=dense)
        model, info = auto_class(spec["config"]).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                                 experts_implementation="eager", output_loading_info=True)
    extra = {name for *_, names in spec.get("extra", []) for name in names}
    wrong = {k: v for k, v in info.items() if v and not (k == "unexpected_keys" and set(v) <= extra)}
    assert not wrong, wrong
    return model.eval()


@torch.no_grad()
def logits_of(model, ids):
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def positions_of(n):
    """8 positions, ascending, the last three of the prompt among them; a short prompt repeats some."""
    last = [n - 1, n - 2, n - 3, n // 2, n // 2 - 1, n // 4, 1, 0]
    return sorted(min(max(x, 0), n - 1) for x in last)


def make_case(model, spec, n):
    """A prompt is rejected if its continuation has a near tie, or only repeats a few ids."""
    V = spec["config"].get("text_config", spec["config"])["vocab_size"]
    for attempt in range(200):
        rng = np.random.default_rng([spec["seed"], n, attempt])
        prompt = rng.integers(3, V - 6, n).tolist()      # without the ids of begin, end and images
        ids, gaps = list(prompt), []
        while len(gaps) < N_GREEDY and (not gaps or gaps[-1] > MIN_GAP):
            rows = logits_of(model, ids)
            top = rows[-1].topk(2)
            gaps.append((top.values[0] - top.values[1]).item())
            ids.append(top.indices[0].item())
        if min(gaps) > MIN_GAP and len(set(ids[n:])) >= MIN_DISTINCT:
            kept = logits_of(model, prompt)[positions_of(n)].numpy().astype("<f4")
            return {"prompt": prompt, "positions": positions_of(n), "logits": base64.b64encode(kept.tobytes()).decode(),
                    "greedy": ids[n:], "min_gap": round(min(gaps), 5)}
    raise RuntimeError(f"no suitable prompt of {n} tokens")


def rows_of(case):
    return np.frombuffer(base64.b64decode(case["logits"]), "<f4").reshape(N_POSITIONS, -1)


def write_fixture(path, spec):
    """One field a line, one group of tensors and one case a line."""
    def many(items):
        return "[\n  " + ",\n  ".join(json.dumps(x, separators=(",", ":")) for x in items) + "\n ]"
    lists = ("tensors", "extra", "cases")
    with open(path, "w") as f:
        f.write("{" + ",\n ".join(f'"{k}": {many(v) if k in lists else json.dumps(v)}' for k, v in spec.items()) + "}\n")


def make(name, seed):
    spec = make_spec(seed, MODELS[name])
    model = open_reference(spec)
    spec["cases"] = [make_case(model, spec, n) for n in MODELS[name]["lengths"]]
    path = os.path.join(mw.MODELS, name + ".json")
    write_fixture(path, spec)
    rows = np.concatenate([rows_of(x) for x in spec["cases"]])
    distinct = [len(set(x["greedy"])) for x in spec["cases"]]
    print(f"{name:22s} {os.path.getsize(path) / 1024:6.1f} KiB  min gap {min(x['min_gap'] for x in spec['cases']):.4f}  "
          f"logit deviation {rows.std():.2f}  distinct greedy {distinct}", flush=True)


def check(name):
    """The largest relative L2 distance between the file's logits and those of the transformers that is installed."""
    spec = mw.load(name)
    model, worst = open_reference(spec), 0.0
    for case in spec["cases"]:
        rows, want = logits_of(model, case["prompt"])[case["positions"]].numpy(), rows_of(case)
        worst = max(worst, float((np.linalg.norm(rows - want, axis=1) / np.linalg.norm(want, axis=1)).max()))
    print(f"{name:22s} {worst:.1e}", flush=True)
    return worst


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("names", nargs="*")
    p.add_argument("--check", action="store_true", help="write nothing; compare the files with the installed transformers")
    args = p.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    os.makedirs(mw.MODELS, exist_ok=True)
    names = args.names or list(MODELS)
    if args.check:
        sys.exit(max(check(name) for name in names) > 1e-5)
    for name in names:
        make(name, seed=list(MODELS).index(name) + 1)


if __name__ == "__main__":
    main()
