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
from importlib.util import find_spec, module_from_spec, spec_from_file_location

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
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 40, "beta_fast": 1.5, "beta_slow": 0.3}


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


def gemma3_image(**more):
    text = {k: v for k, v in gemma3_text(sliding_window_pattern=3, rope_scaling={"rope_type": "linear", "factor": 3.0}).items()
            if k not in ("architectures", "torch_dtype", "tie_word_embeddings")}
    vision = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
              "patch_size": 8, "model_type": "siglip_vision_model", "vision_use_head": False}
    return {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text, "vision_config": vision,
            "boi_token_index": 259, "eoi_token_index": 260, "image_token_index": 262, "mm_tokens_per_image": 4,
            "eos_token_id": [1, 2], "torch_dtype": "bfloat16", **more}


def mistral3_image():
    text = config(("MistralForCausalLM", "mistral"), E=72, H=3, K=1, F=99, V=263, L=2, D=32, rope_theta=700.0, sliding_window=None)
    vision = {"hidden_size": 16, "head_dim": 8, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
              "patch_size": 8, "model_type": "pixtral", "num_channels": 3, "rope_theta": 10000.0, "hidden_act": "silu"}
    return {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text, "vision_config": vision,
            "image_token_index": 262, "tie_word_embeddings": False, "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
            "spatial_merge_size": 2, "vision_feature_layer": -1, "torch_dtype": "bfloat16"}


def moe(arch, experts, top, F, **more):
    names = {"num_experts": experts, "num_experts_per_tok": top, "moe_intermediate_size": F, "decoder_sparse_step": 1,
             "mlp_only_layers": [], "router_aux_loss_coef": 0.001, "output_router_logits": False}
    return config(arch, **{"E": 72, "H": 7, "K": 1, "F": 99, "V": 263, "L": 3, "D": 24, "rope_theta": 700.0, **names, **more})


def mixtral(**more):
    return config(("MixtralForCausalLM", "mixtral"), **{**dict(E=84, H=7, K=1, F=51, V=263, L=3, D=24, rope_theta=700.0,
                                                               num_local_experts=5, num_experts_per_tok=2), **more})


QWEN2_MOE, QWEN3_MOE = ("Qwen2MoeForCausalLM", "qwen2_moe"), ("Qwen3MoeForCausalLM", "qwen3_moe")


def gpt_oss(**more):
    return config(("GptOssForCausalLM", "gpt_oss"), E=96, H=7, K=1, F=160, V=263, L=2, D=32, num_local_experts=9, experts_per_token=4,
                  num_experts_per_tok=4, sliding_window=24, swiglu_limit=1.5, attention_bias=True, rope_theta=900.0,
                  rope_scaling={**YARN, "truncate": False}, router_aux_loss_coef=0.9, initial_context_length=40,
                  layer_types=["sliding_attention", "full_attention"], output_router_logits=False, **more)


def deepseek(version, **more):
    names = dict(E=72, H=3, K=3, F=99, V=263, L=3, first_k_dense_replace=1, kv_lora_rank=40, q_lora_rank=None, qk_nope_head_dim=24,
                 qk_rope_head_dim=16, v_head_dim=20, moe_intermediate_size=51, n_routed_experts=12, n_shared_experts=2,
                 num_experts_per_tok=3, moe_layer_freq=1, routed_scaling_factor=1.0, norm_topk_prob=False, scoring_func="softmax",
                 topk_method="greedy", n_group=1, topk_group=1, attention_bias=False, rope_theta=900.0, rope_scaling=None)
    return config((f"DeepseekV{version}ForCausalLM", f"deepseek_v{version}"), **{**names, **more})


def kimi_image(quantization):
    """As published: DeepSeek-V3 under another model_type, in a model that sees images; the quantization is that of the text_config."""
    text = deepseek(3, q_lora_rank=64, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.8, E=96,
                    moe_intermediate_size=64, n_routed_experts=7, n_shared_experts=1, rope_scaling=yarn(1.0), quantization_config=quantization)
    vision = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
              "pos_emb_height": 4, "pos_emb_width": 4, "model_type": "kimi_k25_vision"}
    return {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": {**text, "model_type": "kimi_k2"},
            "vision_config": vision, "projection_hidden_size": 16, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}


MTP = ["enorm.weight", "hnorm.weight", "shared_head.norm.weight"]          # of the layer that predicts one token more, some tensors


def cohere(arch, **more):
    return config(arch, E=72, H=9, K=3, F=99, V=263, L=4, tied=True, rms_norm_eps="absent", layer_norm_eps=1e-2, rope_theta=700.0,
                  logit_scale=0.5, attention_bias=False, pad_token_id=0, **more)


LINEAR_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 20, "linear_value_head_dim": 12,
                "linear_conv_kernel_dim": 4}


def qwen3next(**more):
    """Three of four layers have a state instead of K and V."""
    return moe(("Qwen3NextForCausalLM", "qwen3_next"), 9, 3, 45, **{**dict(
        D=256, H=2, L=5, partial_rotary_factor=0.25, norm_topk_prob=True, shared_expert_intermediate_size=57, full_attention_interval=4,
        attention_bias=False, **LINEAR_HEADS), **more})


def qwen3_5(kind="", **more):
    """As published: the language model in a model that sees images, with sections of RoPE for images."""
    names = dict(E=72, H=3, K=1, F=99, V=263, L=4, D=40, rms_norm_eps=1e-2, attn_output_gate=True, mtp_num_hidden_layers=1,
                 layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"], full_attention_interval=4,
                 rope_parameters={"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5, "mrope_interleaved": True,
                                  "mrope_section": [4, 3, 3]}, **LINEAR_HEADS)
    text = config(("", f"qwen3_5{kind}_text"), **{**names, **more})
    tied = text.pop("tie_word_embeddings")
    for name in ("architectures", "torch_dtype"):
        text.pop(name)
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2,
              "temporal_patch_size": 2, "out_hidden_size": 72, "num_position_embeddings": 16, "in_channels": 3,
              "model_type": f"qwen3_5{kind}"}
    name = {"": "Qwen3_5ForConditionalGeneration", "_moe": "Qwen3_5MoeForConditionalGeneration"}[kind]
    return {"architectures": [name], "model_type": f"qwen3_5{kind}", "text_config": text, "vision_config": vision,
            "image_token_id": 262, "video_token_id": 261, "vision_start_token_id": 259, "vision_end_token_id": 260,
            "tie_word_embeddings": tied, "torch_dtype": "bfloat16"}


MODELS = {
    # ---- Dense -------------------------------------------------------------------------------------------------------
    "llama": row(config(("LlamaForCausalLM", "llama"), E=84, H=7, K=1, F=99, V=263, L=3, D=24, rope_theta=5000.0, attention_bias=True,
                        mlp_bias=False, rope_scaling=LLAMA3), [1, 5, 100]),
    "llama-mlp-bias": row(config(("LlamaForCausalLM", "llama"), E=51, H=3, K=3, F=67, V=259, L=2, D=18, attention_bias=False,
                                 mlp_bias=True, rope_parameters=DEFAULT_ROPE), [5, 60]),
    "mistral": row(config(("MistralForCausalLM", "mistral"), E=72, H=3, K=1, F=99, V=263, L=3, D=32, rope_theta=700.0,
                          sliding_window=24), [5, 24, 25, 100]),
    "ministral": row(config(("MinistralForCausalLM", "ministral"), E=72, H=9, K=3, F=99, V=263, L=3, D=16, rope_theta=700.0,
                            sliding_window=24, layer_types=["sliding_attention", "full_attention", "sliding_attention"]), [5, 24, 25, 100]),
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
    # As newer versions of transformers name the tensors of such a folder.
    "gemma3-image-names": row(gemma3_image(), [5, 40], rename=[("language_model.model.", "model.language_model."),
                                                               ("vision_tower.vision_model.", "model.vision_tower."),
                                                               ("multi_modal_projector.", "model.multi_modal_projector.")]),
    "mistral3-image": row(mistral3_image(), [5, 70]),
    # Only the fields that the published files have; the others have the class's defaults, such as 8 heads of 256 numbers.
    "gemma2-defaults": row({"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 72, "intermediate_size": 91,
                            "num_hidden_layers": 2, "vocab_size": 263, "sliding_window": 24, "torch_dtype": "bfloat16"}, [5, 40]),
    "gemma3-image-defaults": row({**gemma3_image(), "text_config": {
        "hidden_size": 72, "intermediate_size": 91, "model_type": "gemma3_text", "num_hidden_layers": 7, "vocab_size": 263,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 24}}, [5, 40]),
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
    "cohere-plain": row(cohere(("CohereForCausalLM", "cohere"), use_qk_norm=False), [5, 70]),
    # ---- Mixtures of experts ---------------------------------------------------------------------------------------------
    "qwen2moe": row(moe(QWEN2_MOE, 11, 3, 51, D="absent", E=84, shared_expert_intermediate_size=57, norm_topk_prob=False), [5, 70]),
    "qwen2moe-mixed": row(moe(QWEN2_MOE, 6, 2, 51, D="absent", E=84, L=4, shared_expert_intermediate_size=57, norm_topk_prob=True,
                              decoder_sparse_step=2, mlp_only_layers=[3], tied=True), [5, 40]),
    "qwen3moe": row(moe(QWEN3_MOE, 24, 3, 45, norm_topk_prob=True), [1, 5, 70]),
    "qwen3moe-mixed": row(moe(QWEN3_MOE, 7, 2, 51, norm_topk_prob=False, L=4, mlp_only_layers=[1], tied=True), [5, 40]),
    "qwen3moe-ties": row(moe(QWEN3_MOE, 10, 3, 33, norm_topk_prob=True, L=2), [5, 40], ties=[(0, 7), (2, 3), (4, 9)]),
    "mixtral": row(mixtral(sliding_window=24), [5, 60]),
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
    # ---- Linear mixers ----------------------------------------------------------------------------------------------------
    "qwen3next": row(qwen3next(), [1, 3, 5, 70, 100], mtp=True),
    "qwen3next-types": row(qwen3next(layer_types=["full_attention", "linear_attention", "linear_attention"], L=3, tied=True, D=24,
                                     mlp_only_layers=[1], linear_num_value_heads=2, linear_conv_kernel_dim=3, attention_bias=True),
                           [1, 5, 70]),
    "qwen35": row(qwen3_5(), [1, 5, 70, 100], mtp=True),
    "qwen35-tied": row(qwen3_5(tied=True, layer_types="absent", linear_num_key_heads=3), [5, 40]),
    "qwen35moe": row(qwen3_5("_moe", num_experts=9, num_experts_per_tok=3, moe_intermediate_size=45, intermediate_size="absent",
                             shared_expert_intermediate_size=57), [1, 5, 70], stacked=True),
    "qwen35moe-experts": row(qwen3_5("_moe", num_experts=5, num_experts_per_tok=2, moe_intermediate_size=45, F="absent",
                                     shared_expert_intermediate_size=57, L=2, layer_types=["linear_attention", "full_attention"]),
                             [5, 40]),
}


# ---- Weight formats ------------------------------------------------------------------------------------------------------
# A "quant" field: the form (FORMS of model_weights.py) and its parameters; "modules": a pattern of the names of its matrices.

LINEAR = r"layers.*_proj\.weight$"


def dense_model(quantization, dtype="bfloat16", **more):
    """A Qwen3 whose matrices are multiples of 128: two or three blocks each way."""
    return config(("Qwen3ForCausalLM", "qwen3"), **{**dict(E=256, H=4, K=2, F=384, V=263, L=2, D=64, rope_theta=700.0, tied=True,
                                                           dtype=dtype, quantization_config=quantization), **more})


def edge_model(quantization, dtype="bfloat16", **more):
    """A Llama whose matrices end within a block of 128, and none of whose sizes is a power of two."""
    return config(("LlamaForCausalLM", "llama"), **{**dict(E=160, H=5, K=1, F=224, V=263, L=2, D=40, rope_theta=700.0, dtype=dtype,
                                                           quantization_config=quantization), **more})


def phi3_128(quantization):
    return {**phi3(quantization_config=quantization), "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 384}


def fp8(block, scale, modules=LINEAR, **more):
    return {"form": "fp8", "block": block, "scale": scale, "modules": modules, **more}


def int4(form, group, dtype="F16", modules=LINEAR, **more):
    return {"form": form, "group": group, "scale_dtype": dtype, "modules": modules, **more}


def compressed(form, weights, inputs=None, ignore=("lm_head",), **more):
    """compressed-tensors' quantization_config."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "config_groups": {"group_0": group},
            "ignore": list(ignore), "kv_cache_scheme": None, "global_compression_ratio": 1.5, **more}


def numbers(bits, kind, strategy, **more):
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, "group_size": None,
            "block_structure": None, "actorder": None, "observer": "minmax", "observer_kwargs": {}, **more}


def gptq(group, **more):
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True, "lm_head": False,
            "damp_percent": 0.01, "true_sequential": True, **more}


def awq(group, skip=None):
    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True, "modules_to_not_convert": skip}


FP8_TENSOR, FP8_TOKEN = numbers(8, "float", "tensor"), numbers(8, "float", "token", dynamic=True)
FP8_BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
ROUTERS = ["lm_head"] + [f"model.layers.{i}.mlp.gate" for i in range(3)]
KV_SCALES = {"self_attn.k_scale": ["BF16", [1]], "self_attn.v_scale": ["BF16", [1]]}
MODELOPT = {"producer": {"name": "modelopt", "version": "0.29.0"},
            "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
MODELOPT_SCALES = {"self_attn.k_proj.k_scale": ["F32", []], "self_attn.v_proj.v_scale": ["F32", []]}
MXFP4_SKIP = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]

MODELS |= {
    # ---- FP8 by blocks: DeepSeek, Qwen3-FP8 ---------------------------------------------------------------------------
    "fp8-block": row(dense_model(FP8_BLOCK), [5, 40], quant=fp8([128, 128], "weight_scale_inv")),
    "fp8-block-edge": row(edge_model({**FP8_BLOCK, "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.up_proj"]}), [5, 40],
                          quant=fp8([128, 128], "weight_scale_inv", r"layers\.(0.*|1.*(?<!up))_proj\.weight$", scale_dtype="BF16")),
    "fp8-block-qwen3moe": row(moe(QWEN3_MOE, 7, 3, 144, norm_topk_prob=True, E=160, L=2,
                                  quantization_config={**FP8_BLOCK, "modules_to_not_convert": ROUTERS}), [5, 40],
                              quant=fp8([128, 128], "weight_scale_inv")),
    "fp8-block-deepseek3": row(deepseek(3, q_lora_rank=136, kv_lora_rank=72, topk_method="noaux_tc", scoring_func="sigmoid", n_group=4,
                                        topk_group=2, norm_topk_prob=True, E=160, quantization_config=FP8_BLOCK), [5, 40],
                               quant=fp8([128, 128], "weight_scale_inv", r"layers.*(_proj|_mqa)\.weight$")),
    # Matrices that hold several: q, k and v; gate and up. The parts begin where a block begins.
    "fp8-block-phi3": row(phi3_128(FP8_BLOCK), [5, 40], quant=fp8([128, 128], "weight_scale_inv")),
    "fp8-phi3": row(phi3_128({"quant_method": "fp8", "activation_scheme": "static"}), [5, 40],
                    quant=fp8([0, 0], "weight_scale", shape=[], inputs=["F32", []])),
    "ct-fp8-phi3": row(phi3_128(compressed("float-quantized", numbers(8, "float", "channel"), FP8_TOKEN)), [5, 40],
                       quant=fp8([1, 0], "weight_scale", scale_dtype="BF16")),
    "gptq-phi3": row(phi3_128(gptq(32, sym=False)), [5, 40], quant=int4("gptq", 32)),
    "awq-phi3": row(phi3_128(awq(64)), [5, 40], quant=int4("awq", 64)),
    "packed-phi3": row(phi3_128(compressed("pack-quantized", numbers(4, "int", "group", group_size=128, symmetric=False))), [5, 40],
                       quant=int4("packed", 128, "BF16")),
    # ---- FP8 by matrix and by row ------------------------------------------------------------------------------------------
    "fp8-static": row(dense_model({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}), [5, 40],
                      quant=fp8([0, 0], "weight_scale", shape=[1], inputs=["F32", [1]])),
    "fp8-dynamic": row(edge_model({"quant_method": "fp8", "activation_scheme": "dynamic",
                                   "ignored_layers": ["lm_head", "model.layers.0.self_attn.o_proj"]}, "float16"), [5, 40],
                       quant=fp8([0, 0], "weight_scale", r"layers\.(1.*|0.*(?<!o))_proj\.weight$", shape=[])),
    "ct-fp8-static": row(edge_model(compressed("float-quantized", FP8_TENSOR, FP8_TENSOR,
                                               kv_cache_scheme=numbers(8, "float", "tensor"))), [5, 40],
                         quant=fp8([0, 0], "weight_scale", shape=[1], scale_dtype="BF16", inputs=["BF16", [1]], layer=KV_SCALES)),
    "ct-fp8-channel": row(edge_model(compressed("float-quantized", numbers(8, "float", "channel"), FP8_TOKEN,
                                                ["lm_head", "re:.*layers.1.mlp.*"])), [5, 40],
                          quant=fp8([1, 0], "weight_scale", r"layers\.(0.*|1\.self.*)_proj\.weight$", scale_dtype="BF16")),
    "ct-fp8-block": row(dense_model(compressed("float-quantized", numbers(8, "float", "block", block_structure=[128, 128]),
                                               numbers(8, "float", "group", group_size=128, dynamic=True))), [5, 40],
                        quant=fp8([128, 128], "weight_scale", scale_dtype="BF16")),
    "fbgemm-fp8": row(edge_model({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0,
                                  "modules_to_not_convert": ["lm_head", *(f"model.layers.1.self_attn.{x}_proj" for x in "qkvo")]}), [5, 40],
                      quant=fp8([1, 0], "weight_scale", r"layers\.(0.*|1\.mlp.*)_proj\.weight$")),
    "modelopt-fp8": row(dense_model({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"],
                                     "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}, **MODELOPT,
                                     "config_groups": {"group_0": {"targets": ["Linear"], "weights": numbers(8, "float", "tensor"),
                                                                   "input_activations": numbers(8, "float", "tensor")}}}), [5, 40],
                        quant=fp8([0, 0], "weight_scale", shape=[], inputs=["F32", []], layer=MODELOPT_SCALES),
                        files={"hf_quant_config.json": MODELOPT}),
    "modelopt-fp8-file": row(edge_model("absent"), [5, 40], files={"hf_quant_config.json": MODELOPT},
                             quant=fp8([0, 0], "weight_scale", shape=[], inputs=["F32", []], layer=MODELOPT_SCALES)),
    "fp8-mixtral": row(mixtral(quantization_config={"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": [
        "lm_head", *(f"model.layers.{i}.block_sparse_moe.gate" for i in range(3))]}), [5, 40],
                       quant=fp8([0, 0], "weight_scale", r"layers.*(_proj|w[123])\.weight$", shape=[1], inputs=["F32", [1]])),
    "ct-fp8-gemma3-image": row(gemma3_image(quantization_config=compressed(
        "float-quantized", numbers(8, "float", "channel"), FP8_TOKEN, ["re:.*lm_head", "re:vision_tower.*", "re:multi_modal_projector.*"])),
                               [5, 40], quant=fp8([1, 0], "weight_scale", r"language_model.*_proj\.weight$", scale_dtype="BF16")),
    # ---- Four bits: AWQ, GPTQ, compressed-tensors -----------------------------------------------------------------------
    "awq-128": row(dense_model(awq(128), "float16"), [5, 40], quant=int4("awq", 128)),
    "awq-32": row(edge_model(awq(32, ["mlp.down_proj"]), "float16", D=32, K=5), [5, 40],
                  quant=int4("awq", 32, modules=r"layers.*(?<!down)_proj\.weight$")),
    "awq-mixtral": row(mixtral(E=96, F=64, H=3, D=32, dtype="float16", quantization_config=awq(32, ["gate"])), [5, 40],
                       quant=int4("awq", 32, modules=r"layers.*(_proj|w[123])\.weight$")),
    "gptq-128": row(dense_model(gptq(128), "float16"), [5, 40], quant=int4("gptq", 128, sym=True)),
    "gptq-32": row(edge_model(gptq(32, sym=False, checkpoint_format="gptq"), "float16", D=32, K=5), [5, 40],
                   quant=int4("gptq", 32)),
    "gptq-64-v2": row(dense_model(gptq(64, sym=False, checkpoint_format="gptq_v2")), [5, 40], quant=int4("gptq", 64, "BF16", v2=True)),
    "gptq-whole": row(dense_model(gptq(-1, sym=False, checkpoint_format="gptq"), "float16"), [5, 40], quant=int4("gptq", -1)),
    "gptq-order": row(dense_model(gptq(32, sym=False, desc_act=True, checkpoint_format="gptq"), "float16"), [5, 40],
                      quant=int4("gptq", 32, order=True)),
    "packed-128": row(dense_model(compressed("pack-quantized", numbers(4, "int", "group", group_size=128))), [5, 40],
                      quant=int4("packed", 128, "BF16", sym=True)),
    "packed-32-zero": row(edge_model(compressed("pack-quantized", numbers(4, "int", "group", group_size=32, symmetric=False)),
                                     D=32, K=5), [5, 40], quant=int4("packed", 32, "BF16")),
    "packed-64": row(dense_model(compressed("pack-quantized", numbers(4, "int", "group", group_size=64), None,
                                            ["lm_head", "model.layers.0.mlp.down_proj"]), "float16"), [5, 40],
                     quant=int4("packed", 64, "F16", r"layers\.(1.*|0.*(?<!down))_proj\.weight$", sym=True)),
    "packed-channel": row(edge_model(compressed("pack-quantized", numbers(4, "int", "channel"))), [5, 40],
                          quant=int4("packed", -1, "BF16", sym=True)),
    "packed-channel-zero": row(dense_model(compressed("pack-quantized", numbers(4, "int", "channel", symmetric=False))), [5, 40],
                               quant=int4("packed", -1, "BF16")),
    "packed-order": row(dense_model(compressed("pack-quantized", numbers(4, "int", "group", group_size=32, actorder="group"))), [5, 40],
                        quant=int4("packed", 32, "BF16", sym=True, order=True)),
    "packed-qwen3moe": row(moe(QWEN3_MOE, 7, 3, 96, norm_topk_prob=True, E=160, L=2,
                               quantization_config=compressed("pack-quantized", numbers(4, "int", "group", group_size=32), None,
                                                              ["lm_head", "re:.*mlp.gate$", "re:.*self_attn.*"])), [5, 40],
                           quant=int4("packed", 32, "BF16", r"experts.*_proj\.weight$", sym=True)),
    "packed-kimi-image": row(kimi_image(compressed(
        "pack-quantized", numbers(4, "int", "group", group_size=32), None,
        ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"])), [5, 70],
                             quant=int4("packed", 32, "BF16", r"language_model.*experts\.\d+\..*_proj\.weight$", sym=True),
                             rename=[("language_model.model.blocks.", "language_model.model.layers.")]),
    "gptq-qwen3moe": row(moe(QWEN3_MOE, 7, 3, 96, norm_topk_prob=True, E=160, D=32, L=2, dtype="float16",
                             quantization_config=gptq(32)), [5, 40], quant=int4("gptq", 32, sym=True)),
    "gptoss-mxfp4": row(gpt_oss(quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": MXFP4_SKIP}), [5, 24, 25, 100],
                        quant={"form": "mxfp4", "modules": r"experts\.(gate_up|down)_proj$"}),
}


# ---- Weights: each part of a model changes the logits ----

# Where an embedding is also the LM head, its deviation times sqrt(E). With more, each token would predict itself; with less, all
# logits would be nearly equal.
TIED_EMBEDDING = {"gemma2": 0.7, "gemma3_text": 0.7, "granite": 0.7, "cohere": 2.0, "cohere2": 2.0}


def scale_of(name, shape, c):
    """(centre, deviation) of a tensor's numbers. Scores q.k have a deviation of about 1.5, logits of about 2."""
    tied, model = c["tie_word_embeddings"] if "tie_word_embeddings" in c else True, c["model_type"]
    width = shape[-1] if not ("experts." in name and len(shape) == 3) else shape[1]
    part = name.rsplit(".", 2)[-2] if name.endswith((".weight", ".bias")) else name.rsplit(".", 1)[-1]
    if part == "A_log":
        return -2.0, 1.0
    if part == "dt_bias" or "conv1d" in part:
        return 0.0, 0.7
    if "norm" in part:
        gemma = model.startswith("gemma") or ("linear_attn" not in name and model.startswith(("qwen3_next", "qwen3_5")))  # 1 + weight
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
        mw.write(folder, {"config": c, "tensors": [], "seed": 0}, dense=True)
        settings = AutoConfig.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as folder:
        auto_class(c).from_config(settings, dtype=torch.float32).save_pretrained(folder)
        with open(f"{folder}/model.safetensors", "rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    shapes = {k: v["shape"] for k, v in header.items() if k != "__metadata__"}
    old, new = "vision_tower.", "vision_tower.vision_model." if "gemma" in c["model_type"] else "vision_tower."
    return {k.replace(old, new): v for k, v in shapes.items()}


def natural(name):
    return [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)]


def tensor_groups(c, shapes, quant):
    """The "tensors" field: names with the same dtype, shape, centre and width together."""
    text, groups = c.get("text_config", c), {}
    for name in sorted(shapes, key=natural):
        centre, deviation = scale_of(name, shapes[name], text)
        dtype = "F32" if name.endswith(("e_score_correction_bias", "A_log")) else TYPES[c["torch_dtype"]]
        if quant and re.search(quant["modules"], name):
            dtype = "quant"
        key = (dtype, tuple(shapes[name]), centre, float(np.float32(round(deviation * 3 ** 0.5, 4))))
        groups.setdefault(key, []).append(name)
    return [[k[0], list(k[1]), k[2], k[3], names] for k, names in groups.items()]


def scale_groups(spec):
    """Scales of activations, of K and of V, as "extra": toka reads and does not need them."""
    quant, groups = spec["quant"], []
    names = [name.removesuffix(".weight") for dtype, *_, names in spec["tensors"] if dtype == "quant" for name in names]
    if "inputs" in quant:
        groups.append([*quant["inputs"], 0.02, 0.01, [name + ".input_scale" for name in names]])
    for part, kind in quant.get("layer", {}).items():
        groups.append([*kind, 0.03, 0.01, [f"model.layers.{i}.{part}" for i in range(spec["config"]["num_hidden_layers"])]])
    return groups


def stack_experts(shapes):
    """All experts of a layer in two tensors, as Qwen3.5 is published: gate_up_proj [X][2*F][E], down_proj [X][E][F]."""
    out = {}
    for name, shape in shapes.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if not match:
            out[name] = shape
        elif match[3] != "up":
            down = match[3] == "down"
            stacked = out.setdefault(f"{match[1]}.{'down' if down else 'gate_up'}_proj", [0, shape[0] * (1 if down else 2), shape[1]])
            stacked[0] += 1
    return out


def make_spec(seed, row):
    """The fixture without its cases."""
    c, quant = row["config"], row.get("quant")
    spec = {"seed": seed, "config": c, **{k: v for k, v in row.items() if k in ("quant", "extra", "files", "max_model_len")}}
    shapes = published_shapes(c)
    for old, new in row.get("rename", []):
        shapes = {k.replace(old, new) if k.startswith(old) else k: v for k, v in shapes.items()}
    if row.get("stacked"):
        shapes = stack_experts(shapes)
    spec["tensors"] = tensor_groups(c, shapes, quant)
    if quant and scale_groups(spec):
        spec["extra"] = scale_groups(spec)
    if "ties" in row:
        layers = range(c["num_hidden_layers"])
        spec["equal_rows"] = {f"model.layers.{i}.mlp.gate.weight": row["ties"] for i in layers}
        spec["as"] = {f"model.layers.{i}.mlp.experts.{b}.{p}_proj.weight": f"model.layers.{i}.mlp.experts.{a}.{p}_proj.weight"
                      for i in layers for a, b in row["ties"] for p in ("gate", "up", "down")}
    if row.get("mtp"):
        E = c.get("text_config", c)["hidden_size"]
        spec["extra"] = [["BF16", [E], 1.0, 0.5, ["mtp.norm.weight", "mtp.layers.0.input_layernorm.weight"]],
                         ["BF16", [E, 2 * E], 0.0, 0.1, ["mtp.fc.weight"]]]
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


def make(name):
    spec = make_spec(mw.fnv1a(name) % 100000, MODELS[name])
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


# ---- The formats' own packers ----

TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8,
         "I32": torch.int32, "I64": torch.int64}


def as_torch(part):
    """A tensor of the checkpoint; scales in float32, in which packers then compute."""
    dtype, bits = part
    t = torch.from_numpy(np.array(bits)).view(TORCH[dtype])
    return t.float() if dtype in ("F16", "BF16") else t


def packing_utils():
    """AutoAWQ's module, without the rest of the package, which wants an older transformers."""
    path = os.path.join(find_spec("awq").submodule_search_locations[0], "utils", "packing_utils.py")
    spec = spec_from_file_location("packing_utils", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unpack_awq(quant, parts, config):
    p, g = parts, quant["group"]
    return packing_utils().dequantize_gemm(p["qweight"], p["qzeros"], p["scales"], 4, g).T


def unpack_gptq(quant, parts, config):
    """There is no packer without a GPU. AutoAWQ can write GPTQ's first version from its own; the way back is the order of nibbles."""
    if quant["group"] < 0 or quant.get("order"):
        return None
    bits = torch.arange(0, 32, 4)
    q = (parts["qweight"][:, None, :] >> bits[None, :, None] & 15).reshape(-1, parts["qweight"].shape[1])
    zero = (parts["qzeros"][:, :, None] >> bits & 15).reshape(parts["qzeros"].shape[0], -1) + (0 if quant.get("v2") else 1)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    first = [torch.from_numpy(mw.pack4(x.numpy(), 1, order).view(np.int32)) for x in (q, zero)]
    awq_form = packing_utils().unpack_reorder_pack(*first, 4)
    want_zeros = parts["qzeros"] - (0x11111111 if quant.get("v2") else 0)
    assert torch.equal(awq_form[0], parts["qweight"]) and torch.equal(awq_form[1], want_zeros)
    return packing_utils().dequantize_gemm(*first, parts["scales"], 4, quant["group"]).T


def unpack_compressed(quant, parts, config):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    c = config["quantization_config"]
    if quant.get("order"):
        return None                                      # this version has no weight_g_idx in packed checkpoints
    scheme = QuantizationScheme(**c["config_groups"]["group_0"])
    return BaseCompressor.get_value_from_registry(c["format"]).decompress(dict(parts), scheme)["weight"]


def unpack_block(quant, parts, config):
    """transformers has only blocks that divide the matrix."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    w, scale = parts["weight"], parts[quant["scale"]]
    if w.shape[0] % 128 or w.shape[1] % 128:
        return None
    return Fp8Dequantize(None)._dequantize_one(w, scale, torch.float32)


def unpack_mxfp4(quant, parts, config):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    return convert_moe_packed_tensors(parts["blocks"], parts["scales"], dtype=torch.float32)


def unpacker_of(spec):
    method = spec["config"].get("quantization_config", {}).get("quant_method")
    if method == "fp8":
        return unpack_block if "weight_block_size" in spec["config"]["quantization_config"] else None
    found = {"mxfp4": unpack_mxfp4}
    if find_spec("awq"):
        found |= {"awq": unpack_awq, "gptq": unpack_gptq}
    if find_spec("compressed_tensors"):
        found |= {"compressed-tensors": unpack_compressed}
    return found.get(method)


def check_packer(name):
    """Compares the matrices of a quantized fixture with what the format's own packer reads from them."""
    spec, n, skipped = mw.load(name), 0, 0
    for dtype, shape, _, width, tensor in mw.groups(spec, True):
        if dtype != "quant" or not unpacker_of(spec):
            continue
        dense = mw.quantized(spec, tensor, shape, width, True)[tensor][1].view(np.float32)
        prefix = tensor.removesuffix(".weight")
        parts = {k[len(prefix) + 1:]: as_torch(v) for k, v in mw.quantized(spec, tensor, shape, width, False).items()}
        got = unpacker_of(spec)(spec["quant"], parts, spec["config"])
        skipped += got is None
        if got is not None:
            assert np.array_equal(got.float().numpy(), dense), f"{name}: {tensor} differs"
            n += 1
    print(f"{name:22s} {n} matrices equal, {skipped} not for the packer", flush=True)
    return n


def check_e4m3():
    """All codes, and the rounding to them."""
    code = torch.arange(256, dtype=torch.uint8)
    number = code[(code & 127) != 127]
    assert np.array_equal(number.view(torch.float8_e4m3fn).float().numpy(), mw.e4m3_values(number.numpy()))
    x = np.concatenate([448 * mw.unit(1, "e4m3", (1 << 16,)), mw.E4M3, (mw.E4M3[1:] + mw.E4M3[:-1]) / 2]).astype(np.float32)
    assert np.array_equal(torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy(), mw.e4m3_codes(x))


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("names", nargs="*")
    p.add_argument("--check", action="store_true", help="write nothing; compare the files with the installed transformers")
    p.add_argument("--packers", action="store_true", help="write nothing; compare the quantized files with the formats' packers")
    args = p.parse_args()
    torch.set_num_threads(1)                             # the models are too small for more
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    os.makedirs(mw.MODELS, exist_ok=True)
    names = args.names or list(MODELS)
    if args.packers:
        check_e4m3()
        n = sum(check_packer(name) for name in names if "quant" in MODELS[name])
        print(f"{n} matrices equal those of the formats' packers")
        sys.exit(n == 0)
    if args.check:
        worst = max(check(name) for name in names)
        print(f"{len(names)} models, relative L2 of the logits at most {worst:.1e}; torch {torch.__version__}, "
              f"transformers {transformers.__version__}")
        sys.exit(worst > 1e-5)
    for name in names:
        make(name)


if __name__ == "__main__":
    main()
