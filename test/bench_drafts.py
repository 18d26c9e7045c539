#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What speculative decoding costs or brings on a CPU: `toka bench throughput` without drafts and with each method, in turns, so that
other work of the machine hits all of them. Prints for each workload and method (seconds without drafts / seconds with them): of the
least CPU seconds of all rounds, which other work disturbs least, and the medians over the rounds of CPU seconds and of elapsed seconds.

  bench_drafts.py [--rounds 5] [--only NAME] [--threads 1]

Workloads, for the embedded model, as in PERFORMANCE.md but smaller:
  chat     prompts and outputs of many lengths, nothing shared: drafts are hardly ever right
  samples  one prompt with 48 samples, temperature 0.8: text of the model itself
  greedy   32 problems, one greedy answer each
  single   one sequence after the other, greedy
  edit     outputs that are the prompt with one id in 20 changed
Methods: ngram, suffix, and draft models: the model's first two layers (rarely right) and the model itself (always right, and as slow)."""
import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODEL = os.path.join(ROOT, "test/model")
PROBLEM = "<|im_start|>user\nTom has {} apples. He buys {} more apples. How many apples does Tom have now?<|im_end|>\n<|im_start|>assistant\n"


def small_model(folder):
    """The first two layers of the embedded model."""
    os.mkdir(folder)
    config = json.load(open(MODEL + "/config.json"))
    json.dump(config | {"num_hidden_layers": 2}, open(folder + "/config.json", "w"))
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        os.symlink(os.path.join(MODEL, name), os.path.join(folder, name))
    return folder


def workloads(rng):
    def ids(n):
        return [rng.randrange(4, 1000) for _ in range(n)]
    edit = []
    for _ in range(64):
        prompt = ids(200)
        edit.append({"prompt_token_ids": prompt, "output_token_ids": [[rng.randrange(4, 1000) if rng.random() < 0.05 else i for i in prompt]]})
    problems = [{"prompt": PROBLEM.format(i % 50 + 3, i % 7 + 2), "output_lengths": [300 + 10 * (i % 30)]} for i in range(16)]
    return {
        "chat": ([{"prompt_token_ids": ids(rng.randrange(20, 300)), "output_lengths": [rng.randrange(20, 150)]} for _ in range(150)], ["--temp", "1"]),
        "samples": ([{"prompt": PROBLEM.format(12, 7), "output_lengths": [rng.randrange(150, 400) for _ in range(24)]}], ["--temp", "0.8"]),
        "greedy": (problems, ["--temp", "0"]),
        "single": (problems[:6], ["--temp", "0", "--max-num-seqs", "1"]),
        "edit": (edit, ["--temp", "0"])}


def run(path, flags):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    p = subprocess.run([os.environ.get("TOKA_BINARY", os.path.join(ROOT, "toka")), "bench", "throughput", "-q", "--json", "--device", "cpu", "-m", MODEL, "--dataset", path, *flags],
                       capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if p.returncode:
        sys.exit(p.stderr)
    v = json.loads(p.stdout)
    return {"cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, "elapsed": v["elapsed_time"]} | v


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--only", help="one workload")
    p.add_argument("--method", help="one method")
    p.add_argument("--threads", default="1")
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        methods = {"ngram": ["--speculative-config", '{"method":"ngram"}'], "suffix": ["--speculative-config", '{"method":"suffix"}'],
                   "small model": ["--draft-model", small_model(folder + "/small")], "same model": ["--draft-model", MODEL]}
        methods = {k: v for k, v in methods.items() if a.method in (None, k)}
        print(f"{'workload':<10}{'method':<14}{'least':>7}{'cpu':>7}{'elapsed':>9}{'right':>8}{'drafts/token':>14}")
        for name, (lines, flags) in workloads(random.Random(1)).items():
            if a.only not in (None, name):
                continue
            path = os.path.join(folder, name)
            with open(path, "w") as f:
                f.write("".join(json.dumps(line) + "\n" for line in lines))
            flags = [*flags, "--threads", a.threads]
            ratios = {method: [] for method in methods}
            least = {method: [1e9, 1e9] for method in methods}
            last = {}
            for _ in range(a.rounds):
                for method, more in methods.items():  # A B A B: each has its own run without drafts before it
                    plain = run(path, flags)
                    last[method] = run(path, flags + more)
                    ratios[method].append([plain[k] / last[method][k] for k in ("cpu", "elapsed")])
                    least[method] = [min(a, v["cpu"]) for a, v in zip(least[method], (plain, last[method]))]
            for method, found in ratios.items():
                v = last[method]
                cpu, elapsed = (statistics.median(r[i] for r in found) for i in (0, 1))
                right = v["draft_tokens_accepted"] / max(v["draft_tokens"], 1)
                print(f"{name:<10}{method:<14}{least[method][0] / least[method][1]:>7.3f}{cpu:>7.3f}{elapsed:>9.3f}{right:>8.2f}{v['draft_tokens'] / v['total_output_tokens']:>14.3f}", flush=True)


if __name__ == "__main__":
    main()
