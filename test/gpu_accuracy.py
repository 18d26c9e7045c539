#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that accuracy does not change on the GPU. Compares the embedded model's accuracy and pass@k with the CPU's, over 1,024 samples of
20 problems, with shared prefixes, run-ahead and preemption on. Also compares greedy answers with prefix sharing on and off.

    python3 test/gpu_accuracy.py               on a machine with a GPU, from the repository root, after ./build.sh
    python3 test/gpu_accuracy.py make          on any machine: computes the CPU's figures again and writes them to test/model/passk.json
                                               (about 10 minutes on two cores)

Prompts are conversations: three solved problems, the same for all, then the problem itself. So samples share pages at two levels. The
samples of the two devices are independent, so the numbers of right answers are two binomial samples. Totals may differ by 4 standard
errors, those of one problem by 5, pass@k (the unbiased estimate) by 4.5. If a greedy answer differs with sharing on and off, the two
tokens at the first difference must be a tie up to rounding: their log-probabilities differ by less than 0.2.
"""
import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FIGURES = os.path.join(ROOT, "test/model/passk.json")
ENV = {k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}
N, SHOTS, PROBLEMS, TEMPS, KS = 1024, 3, 20, ["1", "2"], [1, 2, 8, 32, 128, 1024]
passed = failed = 0


def check(ok, what):
    global passed, failed
    passed, failed = passed + bool(ok), failed + (not ok)
    print(f"{'ok    ' if ok else 'FAILED'} {what}", flush=True)


# ---- Batches ----

def make_problems(n):
    made = subprocess.run([sys.executable, "test/model/make/problems.py", "--seed", "99", "--n", str(SHOTS + n), "--jsonl"], check=True,
                          capture_output=True, text=True, cwd=ROOT).stdout.splitlines()
    made = [json.loads(line) for line in made]
    head = []
    for p in made[:SHOTS]:
        head += [{"role": "user", "content": p["prompt"]}, {"role": "assistant", "content": f"The answer is {p['answer']}."}]
    return [(head + [{"role": "user", "content": p["prompt"]}], str(p["answer"])) for p in made[SHOTS:]]


def batch(problems, device, tmp, *flags, long=0, **fields):
    """Runs a batch. Returns the choices by (problem, index), and the report. long: this many lines come first; their samples all have
    100 tokens, so that they need their next page in the same step."""
    source, out, report = (os.path.join(tmp, name) for name in ("in.jsonl", "out.jsonl", "report.json"))
    for path in (out, report):
        if os.path.exists(path):
            os.remove(path)
    with open(source, "w") as f:
        for i in range(long):
            f.write(json.dumps({"custom_id": f"long-{i}", "messages": problems[0][0], "max_tokens": 100, "seed": i, "ignore_eos": True, **fields}) + "\n")
        for i, (messages, _) in enumerate(problems):
            f.write(json.dumps({"custom_id": str(i), "messages": messages, "max_tokens": 100, "seed": 7, **fields}) + "\n")
    p = subprocess.run(["./toka", "batch", "--device", device, "-i", source, "-o", out, "--report", report, "--quiet", *flags], env=ENV, cwd=ROOT,
                       capture_output=True, text=True)
    if p.returncode:
        sys.exit(f"toka batch ended with status {p.returncode}: {p.stderr}")
    rows = [r for r in map(json.loads, open(out)) if not r["custom_id"].startswith("long")]
    choices = {(int(r["custom_id"]), c["index"]): c for r in rows for c in r["response"]["body"]["choices"]}
    return choices, json.load(open(report))


def right_answers(choices, problems):
    """The number of right answers of each problem."""
    counts = [0] * len(problems)
    for (i, _), c in choices.items():
        counts[i] += re.findall(r"The answer is (-?\d+)", c["message"]["content"])[-1:] == [problems[i][1]]
    return counts


# ---- pass@k ----

def pass_at(counts, k):
    """The mean over problems of the probability that one of k samples, taken from the N without replacement, is right."""
    def miss(c):
        return 0 if N - c < k else math.exp(math.lgamma(N - c + 1) - math.lgamma(N - c - k + 1) - math.lgamma(N + 1) + math.lgamma(N - k + 1))
    return sum(1 - miss(c) for c in counts) / len(counts)


def spread(counts, k, rng):
    """The standard deviation of the difference of two such estimates."""
    def again():
        return [min(N, max(0, round(rng.gauss(c, math.sqrt(c * (N - c) / N))))) for c in counts]
    diffs = [pass_at(again(), k) - pass_at(again(), k) for _ in range(200)]
    return math.sqrt(sum(d * d for d in diffs) / len(diffs))


def compare(what, got, want):
    """Compares the right answers of each problem with the CPU's."""
    n, a, b = N * len(want), sum(got), sum(want)
    p = (a + b) / (2 * n)
    sigma = math.sqrt(2 * n * p * (1 - p)) + 1
    check(abs(a - b) <= 4 * sigma, f"{what}: {a} of {n} right, {b} on the CPU: {(a - b) / sigma:+.1f} standard errors")
    worst = max((abs(x - y) / (math.sqrt((x + y) * (1 - (x + y) / (2 * N))) + 1), i) for i, (x, y) in enumerate(zip(got, want)))
    check(worst[0] <= 5, f"{what}: problem {worst[1]} differs most, {got[worst[1]]} and {want[worst[1]]} of {N}: {worst[0]:.1f} standard errors")
    rng, pooled = random.Random(1), [(x + y) / 2 for x, y in zip(got, want)]
    rows = [(k, pass_at(got, k), pass_at(want, k), 4.5 * spread(pooled, k, rng) + 1e-3) for k in KS]
    check(all(abs(x - y) <= allowed for _, x, y, allowed in rows),
          f"{what}: pass@k " + ", ".join(f"{k}: {x:.4f} ({y:.4f} +- {allowed:.4f})" for k, x, y, allowed in rows))


# ---- Greedy with sharing on and off ----

def tie(one, other):
    """None if two answers are equal. Otherwise the difference in nats between the two tokens at the first difference, in the first
    answer."""
    for x, y in zip(one, other):
        if x["token"] != y["token"]:
            there = {t["token"]: t["logprob"] for t in x["top_logprobs"]}
            return x["logprob"] - there.get(y["token"], -math.inf)
    return None if len(one) == len(other) else math.inf


def greedy(tmp):
    problems = make_problems(600)
    runs = [batch(problems, "cuda", tmp, *flags, temperature=0, logprobs=True, top_logprobs=3)
            for flags in (["--max-num-seqs", "512"], ["--max-num-seqs", "512", "--no-enable-prefix-caching"])]
    hits = [r["prefix_hit_share"] for _, r in runs]
    check(hits[0] > 0.3 and hits[1] == 0, f"greedy: {100 * hits[0]:.0f} % of the prompts from shared pages, {100 * hits[1]:.0f} % with sharing off")
    on, off = (choices for choices, _ in runs)
    gaps = [g for g in (tie(on[k]["logprobs"]["content"], off[k]["logprobs"]["content"]) for k in on) if g is not None]
    check(on.keys() == off.keys() and all(g < 0.2 for g in gaps), f"greedy: {len(on) - len(gaps)} of {len(on)} answers are equal with sharing on and off, "
          f"the others differ first at a tie of at most {max(gaps, default=0):.3f}")
    a, b = (sum(right_answers(c, problems)) for c in (on, off))
    check(abs(a - b) <= len(gaps), f"greedy: {a} and {b} of {len(problems)} right")


def make():
    problems = make_problems(PROBLEMS)
    figures = {"n": N, "problems": [p[0][-1]["content"] for p in problems], "right": {}}
    with tempfile.TemporaryDirectory() as tmp:
        for temp in TEMPS:
            choices, _ = batch(problems, "cpu", tmp, n=N, temperature=float(temp))
            figures["right"][temp] = right_answers(choices, problems)
            print(f"temperature {temp}: {sum(figures['right'][temp])} of {N * PROBLEMS} right")
    with open(FIGURES, "w") as f:
        f.write("{" + ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in figures.items()) + "}\n")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("mode", nargs="?", choices=["compare", "make"], default="compare")
    if p.parse_args().mode == "make":
        return make()
    figures, problems = json.load(open(FIGURES)), make_problems(PROBLEMS)
    check(figures["n"] == N and figures["problems"] == [m[-1]["content"] for m, _ in problems], "the CPU's figures are of these problems")
    with tempfile.TemporaryDirectory() as tmp:
        texts = {}
        for temp in TEMPS:
            choices, report = batch(problems, "cuda", tmp, n=N, temperature=float(temp))
            texts[temp] = {k: c["message"]["content"] for k, c in choices.items()}
            compare(f"temperature {temp}", right_answers(choices, problems), figures["right"][temp])
            check(report["prefix_hit_share"] > 0.5, f"temperature {temp}: {100 * report['prefix_hit_share']:.1f} % of the prompts from shared pages")
        choices, report = batch(problems, "cuda", tmp, "--kv-tokens", "16384", long=1, n=N, temperature=2.0)
        compare("few KV pages", right_answers(choices, problems), figures["right"]["2"])
        same = sum(c["message"]["content"] == texts["2"][k] for k, c in choices.items())
        check(report["preemptions"] > 0, f"few KV pages: {report['preemptions']} preemptions, {same} of {len(choices)} texts as with many")
        greedy(tmp)
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
