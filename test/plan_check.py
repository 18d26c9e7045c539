#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares `toka plan` with the start-up lines of real runs: weights, KV tokens, and the rest of a GPU's memory.

    python3 test/plan_check.py [--gpu H200] [CASE ...]     from the repository root, after ./build.sh; standard library only

A case is MODEL:tp=N,pp=N[,FLAG=VALUE ...][:LOG], e.g. llama-3.1-8b:tp=2,pp=1,max-model-len=8192. LOG is the standard error of a run
with this split and these flags; the start-up line is read from it. Without LOG, `toka bench throughput --dummy-weights` runs on
tp x pp GPUs. Without cases, the cases below run, if there are enough GPUs. Exit status 1 if a value is outside the tolerance.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile

TOKA = os.environ.get("TOKA_BINARY", "./toka")
CASES = ["llama-3.1-8b:tp=1,pp=2", "llama-3.1-8b:tp=2,pp=1", "llama-3.1-8b:tp=4,pp=1", "llama-3.1-70b:tp=4,pp=1", "llama-3.1-70b:tp=1,pp=4",
         "llama-3.1-70b:tp=2,pp=2"]
# Allowed ratios of measured to planned values. The plan of the rest has a reserve: the measured value must not exceed it.
TOLERANCE = {"weights": (0.995, 1.005), "KV tokens": (0.97, 1.03), "all else": (0.25, 1.0)}
LINE = re.compile(r"^toka: (\S+) on (.*), loaded in ([\d.]+) s; KV cache (\d+) tokens, .*; "
                  r"GB on a GPU: weights ([\d.]+), KV ([\d.]+), all else ([\d.]+)$", re.M)


def flags_of(case):
    model, split, *log = case.split(":", 2)
    flags = dict(x.split("=") for x in split.split(","))
    tp, pp = int(flags.pop("tp", 1)), int(flags.pop("pp", 1))
    return model, tp, pp, [x for k, v in flags.items() for x in (f"--{k}", v)], log[0] if log else None


def planned(model, tp, pp, flags, gpu):
    out = subprocess.run([TOKA, "plan", "-m", model, "--gpus", str(tp * pp), "--gpu", gpu, "--json", *flags], capture_output=True,
                         text=True)
    if out.returncode:
        sys.exit(out.stderr.strip())
    split = next((s for s in json.loads(out.stdout)["splits"]
                  if (s["tensor_parallel_size"], s["pipeline_parallel_size"], s["data_parallel_size"]) == (tp, pp, 1)), None)
    if not split:
        sys.exit(f"toka plan knows no split tp {tp} pp {pp} of {model}")
    return {"weights": split["weight_bytes"] / 1e9, "KV tokens": split["kv_tokens"], "all else": split["scratch_bytes"] / 1e9}


def run(model, tp, pp, flags):
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as f:
        f.write(json.dumps({"prompt_token_ids": list(range(1, 33)), "output_lengths": [8] * 8}) + "\n")
        f.flush()
        out = subprocess.run([TOKA, "bench", "throughput", "-m", model, "--dummy-weights", "--dataset", f.name, "--device", "cuda",
                              "--tensor-parallel-size", str(tp), "--pipeline-parallel-size", str(pp), *flags], capture_output=True,
                             text=True, timeout=300)
    return out.stderr


def measured(text):
    found = LINE.search(text)
    if not found:
        return None
    return {"weights": float(found[5]), "KV tokens": int(found[4]), "all else": float(found[7])}


def check(case, gpu):
    model, tp, pp, flags, log = flags_of(case)
    plan = planned(model, tp, pp, flags, gpu)
    text = open(log).read() if log else run(model, tp, pp, flags)
    real = measured(text)
    if not real:
        print(f"FAILED {case}: no start-up line with a GPU's memory: {text.strip()[-300:]}")
        return False
    good = True
    for what, (least, most) in TOLERANCE.items():
        digits = 0 if what == "KV tokens" else 2
        ratio = real[what] / plan[what] if plan[what] else float("inf")
        ok = least <= ratio <= most
        good &= ok
        print(f"{'ok    ' if ok else 'FAILED'} {model:<16} tp {tp} pp {pp}  {what:<10} planned {plan[what]:>12,.{digits}f}"
              f"  measured {real[what]:>12,.{digits}f}  ratio {ratio:.3f}, expected {least} to {most}")
    return good


def n_gpus():
    return len(re.findall(r"^cuda.*compute capability", subprocess.run([TOKA, "devices"], capture_output=True, text=True).stdout, re.M))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gpu", default="H200")
    p.add_argument("cases", nargs="*")
    a = p.parse_args()
    available = n_gpus() if not a.cases else 0
    cases = a.cases or [c for c in CASES if flags_of(c)[1] * flags_of(c)[2] <= available]
    good = [check(c, a.gpu) for c in cases]
    print(f"{sum(good)} passed, {len(good) - sum(good)} failed, {0 if a.cases else len(CASES) - len(cases)} skipped")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
