#!/usr/bin/env python3
"""What constraints cost a step: `toka bench throughput` with a JSON schema for each row, and without, in turns.

  bench_json.py make DIR                 writes the workloads and the tokenizer: needs the public test data (TOKA_TEST_DATA) and zstd
  bench_json.py run DIR [OPTIONS]        measures; needs only DIR, ./toka and models.txt

Sizes are ROWS:LENGTH. At the first size there are two more runs: no mask is kept (TOKA_DEBUG_NO_MASKS), and twice as many workers make
masks (TOKA_DEBUG_WORKERS). Each size runs without and with schemas, --rounds times; a ratio is that of the best runs. Weights are
random, and each sample is forced to its length. 4,096 rows of 64 tokens need 35 GB for K and V beside the weights."""
import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
DATA = os.environ.get("TOKA_TEST_DATA") or os.path.join(HERE, "..", "..", "shared", "data")
SIZES = ["64:256", "1024:96", "4096:40"]


def names(folder, size):
    return [os.path.join(folder, f"{kind}-{size.replace(':', 'x')}.jsonl") for kind in ("plain", "json")]


def make(a):
    os.makedirs(a.dir, exist_ok=True)
    shutil.copy(os.path.join(DATA, "tokenizers", "llama-3.1", "tokenizer.json"), a.dir)
    for size in a.sizes:
        rows, length = size.split(":")
        for name, more in zip(names(a.dir, size), (["--plain"], [])):
            subprocess.run([sys.executable, HERE + "/make_dataset.py", "json", name, "--rows", rows, "--length", length, *more], check=True)


def measure(a, size, name, env):
    """The results of one run, as `--json` prints them."""
    rows = size.split(":")[0]
    command = ["./toka", "bench", "throughput", "-q", "--json", "--dummy-weights", "-m", a.model, "--models-file", a.models_file, "--tokenizer",
               a.dir, "--dataset", name, "--max-num-seqs", rows, "--temp", "1", "--device", a.device, *a.flags]
    began = time.time()
    r = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **env}, timeout=a.timeout)
    if r.returncode:
        sys.exit(f"{' '.join(command)}: status {r.returncode}: {r.stderr.decode()[-2000:]}")
    return json.loads(r.stdout) | {"seconds": time.time() - began}


def line(size, what, r, best):
    masks = r["masks"]
    kept = f"{100 * (masks - min(r['masks_made'], masks)) / masks:6.1f} %" if masks else "      - "
    cost = f"{1e6 * r['mask_s'] / masks:7.2f}" if masks else "      -"
    print(f"{size:>9}  {what:<22} {r['output_tokens_per_second']:>10.0f} {1e3 * r['elapsed_time'] / r['steps']:>9.2f} {r['steps']:>6} {kept} {cost}"
          f" {r['output_tokens_per_second'] / best if best else 1:>7.3f} {r['seconds']:>6.1f} {r['masks_late']:>6}", flush=True)


def run(a):
    workers = max(1, min(8, (os.cpu_count() or 4) // 2))
    print(f"{a.model}, {a.device}, {os.cpu_count()} cores, {platform.processor() or platform.machine()}, {time.strftime('%Y-%m-%d')}")
    print(f"{'rows:len':>9}  {'':<22} {'tok/s':>10} {'ms/step':>9} {'steps':>6} {'kept':>8} {'us/mask':>7} {'ratio':>7} {'wall s':>6} {'late':>6}")
    ratios = []
    for i, size in enumerate(a.sizes):
        plain, schemas = names(a.dir, size)
        runs = [("plain", plain, {}), ("schemas", schemas, {})] * a.rounds
        if not i:
            runs += [("no mask kept", schemas, {"TOKA_DEBUG_NO_MASKS": "1"}), (f"{workers} workers", schemas, {"TOKA_DEBUG_WORKERS": str(workers)})]
        best = {}
        for what, name, env in runs:
            r = measure(a, size, name, env)
            best[what] = max(best.get(what, 0), r["output_tokens_per_second"])
            line(size, what, r, best["plain"] if what != "plain" else 0)
        ratios += [f"{size.split(':')[0]} rows: {what} {rate / best['plain']:.3f}" for what, rate in best.items() if what != "plain"]
    print("ratios of the best runs, with / without: " + "; ".join(ratios))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("do", choices=["make", "run"])
    p.add_argument("dir")
    p.add_argument("--sizes", nargs="+", default=SIZES)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--model", default="llama-3.1-8b")
    p.add_argument("--models-file", default="models.txt")
    p.add_argument("--device", default="auto")
    p.add_argument("--timeout", type=float, default=150)
    p.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of toka bench throughput; the last option")
    a = p.parse_args()
    {"make": make, "run": run}[a.do](a)


if __name__ == "__main__":
    main()
