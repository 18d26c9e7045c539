#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes workloads for `toka bench throughput --dataset FILE`. Each line is one request:
{"prompt_token_ids": [...], "output_lengths": [...]}: one sample for each length, forced to this length.

  make_dataset.py monkeys OUT [--problems 128] [--samples 1024]   GSM8K, 4-shot: all prompts share four examples and have about 715
                                                                  tokens; output lengths of about 150 tokens
  make_dataset.py chat OUT [--requests 2000]                      prompt and output lengths of a public conversation trace; random ids
                                                                  without shared prefixes
  make_dataset.py latency OUT                                     one sequence, 128 tokens in, 512 out

The same seed gives the same file. Monkeys and chat need public data in the folder TOKA_TEST_DATA (default ../shared/data):
  datasets/gsm8k_train.jsonl, datasets/gsm8k_test.jsonl   GSM8K as published: a line is {"question": "...", "answer": "..."}
  tokenizers/llama-3.1/tokenizer.json                     tokenizer of any Llama 3 (--tokenizer names another folder); needs the Python
                                                          package tokenizers
  traces/AzureLLMInferenceTrace_conv.csv                  from Azure's public dataset: columns ContextTokens, GeneratedTokens"""
import argparse
import csv
import itertools
import json
import os
import random
import sys

DATA = os.environ.get("TOKA_TEST_DATA", os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../shared/data"))
SHOTS = 4


def problems(name):
    return [json.loads(line) for line in open(os.path.join(DATA, "datasets", name), encoding="utf-8")]


def output_length(rng, mean=150):
    """A random length between 16 and 512: log-normal, with a long tail like the lengths of real answers."""
    return max(16, min(512, round(rng.lognormvariate(0, 0.4) * mean / 1.083)))  # e^(0.4^2/2) = 1.083


def few_shot_prompts(n):
    """GSM8K problems, each after the same four examples. The answers of the examples have medium length, so a prompt has about 715
    tokens."""
    shots = [p for p in problems("gsm8k_train.jsonl") if 220 < len(p["answer"]) < 280][:SHOTS]
    head = "".join(f"Question: {p['question']}\nAnswer: {p['answer']}\n\n" for p in shots)
    return [head + f"Question: {p['question']}\nAnswer:" for p in problems("gsm8k_test.jsonl")[:n]]


def monkeys(a, rng):
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(os.path.join(DATA, "tokenizers", a.tokenizer, "tokenizer.json"))
    for text in few_shot_prompts(a.problems):
        yield tok.encode(text).ids, [output_length(rng) for _ in range(a.samples)]


def chat(a, rng):
    rows = list(csv.DictReader(open(os.path.join(DATA, "traces", "AzureLLMInferenceTrace_conv.csv"))))
    for row in rows[: a.requests]:
        n_in, n_out = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        if n_in and n_out:
            yield [rng.randrange(1000, 100000) for _ in range(n_in)], [n_out]


def latency(a, rng):
    yield [rng.randrange(1000, 100000) for _ in range(128)], [512]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("workload", choices=["monkeys", "chat", "latency"])
    p.add_argument("out")
    p.add_argument("--problems", type=int, default=128)
    p.add_argument("--samples", type=int, default=1024)
    p.add_argument("--requests", type=int, default=2000)
    p.add_argument("--tokenizer", default="llama-3.1")
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    n_in = n_out = n = 0
    lines = {"monkeys": monkeys, "chat": chat, "latency": latency}[a.workload](a, random.Random(a.seed))
    try:
        first = next(lines)
    except (FileNotFoundError, ModuleNotFoundError) as e:
        sys.exit(f"make_dataset.py: {e}; --help says what is needed")
    with open(a.out, "w") as f:
        for ids, lengths in itertools.chain([first], lines):
            f.write(json.dumps({"prompt_token_ids": ids, "output_lengths": lengths}, separators=(",", ":")) + "\n")
            n, n_in, n_out = n + 1, n_in + len(ids), n_out + sum(lengths)
    print(f"{a.out}: {n} requests, mean prompt {n_in / n:.0f} tokens, {n_out} output tokens")


if __name__ == "__main__":
    main()
