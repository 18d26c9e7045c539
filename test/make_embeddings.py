#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes test/embeddings.json: tiny models for embeddings and scores, with the vectors of sentence-transformers and the scores of
transformers. model_weights.py makes the weights from it; test/test_embeddings.py compares toka with it. The tokenizer is that of
test/model.

Run:       python3 test/make_embeddings.py
Made with: Python 3.11, torch 2.9.1, transformers 5.24.0, sentence-transformers 6.2.0.

A model has the fields of test/models/ (make_models.py), and:

    texts     what is embedded
    vectors   prompt name or "" -> base64 of [texts][E] little-endian float32: what SentenceTransformer.encode returns in float32
    pairs     [query, document] ..., and scores: softmax of the logits of the two tokens of LogitScore after the rendered template
    rendered  the prompts of the pairs
"""
import base64
import json
import os
import sys
import tempfile

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForCausalLM, AutoTokenizer

import make_models as mm
import model_weights as mw

HERE = os.path.dirname(os.path.abspath(__file__))
OLD = "sentence_transformers.models."
TEXTS = ["Tom has 3 apples.", "x", "How many boxes does Ann have? " * 12, "héllo 한국어 🙂", "Each box holds 12 eggs. How many eggs are in 5 boxes?"]
PAIRS = [["How many eggs?", "Each box holds 12 eggs."], ["How many eggs?", "Tom has 3 apples."], ["Who?", "Ann. " * 40]]
TEMPLATE = ("{%- set q = messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first -%}\n"
            "{%- set d = messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first -%}\n"
            "Query: {{ q }} Document: {{ d }} Answer:")


def modules(*kinds, prefix=OLD):
    return [{"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"{prefix}{kind}"} for i, kind in enumerate(kinds)]


def qwen3(**more):
    return mm.config(("Qwen3ForCausalLM", "qwen3"), E=64, H=4, K=2, F=96, V=1024, L=3, D=32, **more)


MODELS = {
    # as Qwen3-Embedding: names without "model.", no LM head, the last token, two prompts
    "last": {"config": qwen3(), "rename": [("model.", "")], "drop": ["lm_head.weight"], "files": {
        "modules.json": modules("Transformer", "Pooling", "Normalize"),
        "1_Pooling/config.json": {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False,
                                  "pooling_mode_lasttoken": True, "include_prompt": True},
        "config_sentence_transformers.json": {"prompts": {"query": "Instruct: find it\nQuery:", "document": ""},
                                              "default_prompt_name": None, "similarity_fn_name": "cosine"}}},
    # the newer names, no Normalize, a default prompt, a tied LM head
    "mean": {"config": qwen3(tied=True), "files": {
        "modules.json": modules("Transformer", "Pooling", prefix="sentence_transformers.sentence_transformer.modules.x."),
        "1_Pooling/config.json": {"embedding_dimension": 64, "pooling_mode": "mean", "include_prompt": True},
        "config_sentence_transformers.json": {"prompts": {"query": "find: "}, "default_prompt_name": "query"}}},
    # as e5-mistral: the bare transformer, with a window; the first token
    "cls": {"config": {**mm.config(("MistralForCausalLM", "mistral"), E=64, H=4, K=2, F=96, V=1024, L=2, D=16, sliding_window=24),
                       "architectures": ["MistralModel"]}, "as_causal": "MistralForCausalLM", "rename": [("model.", "")],
            "drop": ["lm_head.weight"], "files": {
        "modules.json": modules("Transformer", "Pooling", "Normalize"),
        "1_Pooling/config.json": {"word_embedding_dimension": 64, "pooling_mode_cls_token": True}}},
    # as Qwen3-Reranker in the form of sentence-transformers
    "reranker": {"config": qwen3(tied=True), "template": TEMPLATE, "files": {
        "modules.json": modules("Transformer", "LogitScore", prefix="sentence_transformers.cross_encoder.modules.x."),
        "1_LogitScore/config.json": {"true_token_id": 400, "false_token_id": 401}}},
}


def make_spec(name, row):
    config = {**row["config"], "architectures": [row.get("as_causal", row["config"]["architectures"][0])]}
    spec = mm.make_spec(mw.fnv1a("embeddings " + name) % 100000, {**row, "config": config})
    spec["config"] = row["config"]
    spec["tensors"] = [[*group[:4], kept] for group in spec["tensors"] if (kept := [n for n in group[4] if n not in row.get("drop", [])])]
    return spec


def packed(rows):
    return base64.b64encode(np.asarray(rows, "<f4").tobytes()).decode()


def reference(name, row):
    spec = make_spec(name, row)
    spec.update({k: row[k] for k in ("template",) if k in row})
    with tempfile.TemporaryDirectory() as folder:
        mw.write_whole(folder, spec)
        if "template" not in row:
            # sentence-transformers wants the modules that it has under these names
            path = os.path.join(folder, "modules.json")
            with open(path, "w") as f:
                json.dump(modules(*(m["type"].rsplit(".", 1)[1] for m in row["files"]["modules.json"])), f)
            model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": torch.float32, "attn_implementation": "eager"})
            names = ["", *row["files"].get("config_sentence_transformers.json", {}).get("prompts", {})]
            spec["texts"] = TEXTS
            spec["vectors"] = {p: packed([model.encode(text, prompt_name=p or None) for text in TEXTS]) for p in names}
            return spec
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        ids = row["files"]["1_LogitScore/config.json"]
        spec["pairs"], spec["rendered"], spec["scores"] = PAIRS, [], []
        for query, document in PAIRS:
            text = tokenizer.apply_chat_template([{"role": "query", "content": query}, {"role": "document", "content": document}], tokenize=False,
                                                 add_generation_prompt=True)
            tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
            with torch.no_grad():
                logits = model(tokens).logits[0, -1].double()
            spec["rendered"].append(text)
            spec["scores"].append(torch.softmax(logits[[ids["true_token_id"], ids["false_token_id"]]], 0)[0].item())
        return spec


def main():
    out = {name: reference(name, row) for name, row in MODELS.items()}
    with open(os.path.join(HERE, "embeddings.json"), "w") as f:
        f.write("{" + ",\n".join(f"{json.dumps(name)}: {json.dumps(spec, ensure_ascii=False)}" for name, spec in out.items()) + "}\n")
    print({name: spec.get("scores", [k for k in spec.get("vectors", {})]) for name, spec in out.items()})


if __name__ == "__main__":
    sys.exit(main())
