#!/usr/bin/env python3
"""Runs the schemas of MaskBench through test/con_driver.c, with the vocabulary of a real model, and prints a table: schemas that are
refused, instances that are wrongly accepted or refused, times of compilation and of each mask. One thread.

    cc -O3 -o con_driver test/con_driver.c -lm -lpthread
    test/maskbench.py con_driver ../shared/data/suites/maskbench/maskbench.jsonl.zst ../shared/data/tokenizers/llama-3.1/tokenizer.json 20

The last number: every 20th schema. Each instance is read compact and indented. Instances whose members are in another order than the
schema's properties are refused by design, and counted as wrong rejections."""
import collections
import json
import subprocess
import sys

driver, data, tokenizer, step = *sys.argv[1:4], int(sys.argv[4])
rows = [json.loads(line) for i, line in enumerate(subprocess.Popen(["zstd", "-dc", data], stdout=subprocess.PIPE).stdout) if i % step == 0]
lines = [{"kind": 1, "grammar": json.dumps(r["schema"], ensure_ascii=False),
          "texts": [json.dumps(t["data"], ensure_ascii=False, indent=indent) for t in r["tests"] for indent in (None, 2)]} for r in rows]
output = subprocess.run([driver, tokenizer], input="".join(json.dumps(x) + "\n" for x in lines).encode(), stdout=subprocess.PIPE, check=True).stdout
errors, masks, compiles = collections.Counter(), [], []
n_schemas = n_good = wrong_accepted = wrong_refused = 0
for row, got in zip(rows, map(json.loads, output.splitlines())):
    if "error" in got:
        errors[got["error"].split(": ")[-1][:60]] += 1
        continue
    valid = [t["valid"] for t in row["tests"] for _ in (0, 1)]
    accepted = [a == -1 for a in got["accepted"]]
    wrong_accepted += sum(a and not v for a, v in zip(accepted, valid))
    wrong_refused += sum(v and not a for a, v in zip(accepted, valid))
    n_good += accepted == valid
    compiles.append(got["compile_us"])
    masks += got["mask_us"]
print(f"{len(rows)} schemas: {len(compiles)} compile, {n_good} read all their instances right")
print(f"instances wrongly accepted: {wrong_accepted}, wrongly refused: {wrong_refused} (each counted compact and indented)")
for name, times in (("compile", sorted(compiles)), ("mask", sorted(masks))):
    at = {p: times[min(len(times) - 1, int(len(times) * p / 100))] for p in (50, 95, 99, 99.9)}
    print(f"{name}, us: n {len(times)}, mean {sum(times) / len(times):.0f}, " + ", ".join(f"p{p} {v:.0f}" for p, v in at.items()) + f", max {times[-1]:.0f}")
for error, n in errors.most_common():
    print(f"  {n:4d} {error}")
