#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes workloads for `toka bench throughput --dataset FILE`. Each line is one request:
{"prompt_token_ids": [...], "output_lengths": [...]}: one sample for each length, forced to this length. A line may have a json_schema, or
output_token_ids, which replace the draws; after: the number of the line whose end it waits for; arrival_s: its time, from the start.

  make_dataset.py monkeys OUT [--problems 128] [--samples 1024]   GSM8K, 4-shot: all prompts share four examples and have about 715
                                                                  tokens; output lengths of about 150 tokens
  make_dataset.py chat OUT [--requests 2000]                      prompt and output lengths of a public conversation trace; random ids
                                                                  without shared prefixes
  make_dataset.py latency OUT                                     one sequence, 128 tokens in, 512 out
  make_dataset.py long OUT [--requests 96]                        8,192 random ids in, 1,024 out
  make_dataset.py agent OUT [--requests 200] [--plain]            a public trace of conversations at its times: equal blocks of 512 ids where
                                                                  the trace has equal hashes; a prompt that goes on where an earlier one
                                                                  ended waits for that one's answer, which it contains. --plain: without
                                                                  after, arrival_s and output_token_ids
  make_dataset.py edit OUT [--requests 64] [--length 256]         prompts of --length random ids, and outputs that are the prompt with one
                                                                  id in 20 changed: output_token_ids, for drafts from the prompt
  make_dataset.py json OUT [--rows 64] [--length 256] [--plain]   16 schemas of MaskBench, each the items of an endless array; --rows samples
                                                                  of them in all, each of --length tokens. --plain: the same without schemas

The same seed gives the same file. Monkeys, chat and agent need public data in the folder TOKA_TEST_DATA (default ../shared/data):
  datasets/gsm8k_train.jsonl, datasets/gsm8k_test.jsonl   GSM8K as published: a line is {"question": "...", "answer": "..."}
  tokenizers/llama-3.1/tokenizer.json                     tokenizer of any Llama 3 (--tokenizer names another folder); needs the Python
                                                          package tokenizers
  traces/AzureLLMInferenceTrace_conv.csv                  from Azure's public dataset: columns ContextTokens, GeneratedTokens
  traces/mooncake_conversation.jsonl                      from Mooncake's: {"timestamp": ms, "input_length", "output_length", "hash_ids"}
Json needs suites/maskbench/maskbench.jsonl.zst and the program zstd."""
import argparse
import csv
import itertools
import json
import os
import random
import re
import subprocess
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
        yield {"prompt_token_ids": tok.encode(text).ids, "output_lengths": [output_length(rng) for _ in range(a.samples)]}


def chat(a, rng):
    rows = list(csv.DictReader(open(os.path.join(DATA, "traces", "AzureLLMInferenceTrace_conv.csv"))))
    for row in rows[: a.requests or 2000]:
        n_in, n_out = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        if n_in and n_out:
            yield {"prompt_token_ids": [rng.randrange(1000, 100000) for _ in range(n_in)], "output_lengths": [n_out]}


def latency(a, rng):
    yield {"prompt_token_ids": [rng.randrange(1000, 100000) for _ in range(128)], "output_lengths": [512]}


def long(a, rng):
    for _ in range(a.requests or 96):
        yield {"prompt_token_ids": [rng.randrange(1000, 100000) for _ in range(8192)], "output_lengths": [1024]}


def turn_before(requests, i, block):
    """Index of the request whose prompt and answer request i goes on from: of those that have two or more whole blocks, all of them the
    first of request i, the one with most; the last of these. None: there is none."""
    def whole(k):
        return requests[k]["hash_ids"][: requests[k]["input_length"] // block]
    before = [k for k in range(i) if len(whole(k)) >= 2 and requests[i]["hash_ids"][: len(whole(k))] == whole(k)
              and requests[i]["input_length"] > requests[k]["input_length"] + requests[k]["output_length"]]
    return max(before, key=lambda k: (len(whole(k)), k), default=None)


def agent(a, rng, block=512):
    with open(os.path.join(DATA, "traces", "mooncake_conversation.jsonl")) as f:
        requests = [json.loads(line) for line in itertools.islice(f, a.requests or 200)]
    blocks, lines = {}, []
    for i, r in enumerate(requests):
        before = turn_before(requests, i, block)
        text = lines[before]["prompt_token_ids"] + lines[before]["output_token_ids"][0] if before is not None else []
        for at, name in zip(range(0, r["input_length"], block), r["hash_ids"]):
            known = text[at : at + block]
            blocks.setdefault(name, known + [rng.randrange(1000, 100000) for _ in range(block - len(known))])
        prompt = [n for name in r["hash_ids"] for n in blocks[name]][: r["input_length"]]
        lines.append({"prompt_token_ids": prompt, "output_lengths": [r["output_length"]], "arrival_s": r["timestamp"] / 1000,
                      "output_token_ids": [[rng.randrange(1000, 100000) for _ in range(r["output_length"])]]})
        if before is not None:
            lines[i]["after"] = before + 1
    for line in lines:
        yield {k: v for k, v in line.items() if not a.plain or k in ("prompt_token_ids", "output_lengths")}


def edit(a, rng):
    for _ in range(a.requests or 64):
        prompt = [rng.randrange(300, 900) for _ in range(a.length)]
        text = [rng.randrange(300, 900) if rng.random() < 0.05 else i for i in prompt]
        yield {"prompt_token_ids": prompt, "output_lengths": [a.length], "output_token_ids": [text]}


def endless(schema):
    """An array of so many items of the schema that no output reaches its end. None: the schema has a $ref that would not be found."""
    refs = re.findall(r'"\$ref": "([^"]*)"', json.dumps(schema))
    if schema.get("type") != "object" or "$id" in schema or not all(r.startswith(("#/definitions/", "#/$defs/")) for r in refs):
        return None
    return {"type": "array", "minItems": 1 << 20, "items": schema} | {k: schema[k] for k in ("definitions", "$defs") if k in schema}


def schemas(n, largest=20000, keywords=r"not|if|oneOf|uniqueItems|unevaluated\w*|dependen\w*|patternProperties"):
    """n schemas from all parts of MaskBench, without keywords that may be refused, and their valid texts."""
    file = os.path.join(DATA, "suites", "maskbench", "maskbench.jsonl.zst")
    lines = subprocess.run(["zstd", "-dc", file], stdout=subprocess.PIPE, check=True).stdout.splitlines()
    for part in range(n):
        for line in lines[part * len(lines) // n:]:
            line = json.loads(line) if len(line) < largest else {"schema": {}, "tests": []}
            schema, valid = endless(line["schema"]), [json.dumps(t["data"]) for t in line["tests"] if t["valid"]]
            text = json.dumps(schema)
            if schema and valid and not re.search(rf'"({keywords})": ', text) and not ('"pattern": ' in text and 'Length": ' in text):
                yield schema, valid
                break


def json_schemas(a, rng):
    for schema, valid in schemas(16):
        line = {"prompt_token_ids": [rng.randrange(300, 900) for _ in range(16)], "output_lengths": [a.length] * (a.rows // 16)}
        yield line if a.plain else line | {"json_schema": schema, "texts": valid}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("workload", choices=["monkeys", "chat", "latency", "long", "agent", "edit", "json"])
    p.add_argument("out")
    p.add_argument("--problems", type=int, default=128)
    p.add_argument("--samples", type=int, default=1024)
    p.add_argument("--requests", type=int)
    p.add_argument("--rows", type=int, default=64)
    p.add_argument("--length", type=int, default=256)
    p.add_argument("--plain", action="store_true")
    p.add_argument("--tokenizer", default="llama-3.1")
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    n_in = n_out = n = 0
    lines = {"monkeys": monkeys, "chat": chat, "latency": latency, "long": long, "agent": agent, "edit": edit, "json": json_schemas}[a.workload](a, random.Random(a.seed))
    try:
        first = next(lines)
    except (FileNotFoundError, ModuleNotFoundError) as e:
        sys.exit(f"make_dataset.py: {e}; --help says what is needed")
    with open(a.out, "w") as f:
        for line in itertools.chain([first], lines):
            f.write(json.dumps(line, separators=(",", ":")) + "\n")
            n, n_in, n_out = n + 1, n_in + len(line["prompt_token_ids"]), n_out + sum(line["output_lengths"])
    print(f"{a.out}: {n} requests, mean prompt {n_in / n:.0f} tokens, {n_out} output tokens")


if __name__ == "__main__":
    main()
