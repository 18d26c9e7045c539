#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures what adapters (LoRA) cost: the time of decode steps of `toka bench throughput` with dummy weights, without adapters, with
adapters that no row has, and with each row having one of N adapters of a rank.

    python3 test/bench_lora.py [-m llama-3.1-8b] [--rows 512] [--rank 16] [--adapters 1,16] [--turns 2] [--device cuda]

Prints a table for test/results: the median time of a step with all rows, and how much longer than without adapters. The adapters change
all matrices of attention and MLP. Standard library only.
"""
import argparse
import json
import os
import statistics
import subprocess
import tempfile

from gpu_lora import shapes_of, write_adapter


def config_of(name):
    for line in open("models.txt"):
        fields = line.split(None, 3)
        if len(fields) == 4 and fields[0] == name:
            return json.loads(fields[3])
    raise SystemExit(f"{name}: not a name of models.txt")


def measure(args, tmp, flags):
    """Microseconds of each step with all rows, without the first and last few."""
    timeline = f"{tmp}/timeline.csv"
    command = ["./toka", "bench", "throughput", "-m", args.model, "--dummy-weights", "--device", args.device, "--dataset", f"{tmp}/rows.jsonl",
               "--max-num-seqs", str(args.rows), "--max-model-len", "1024", "--temp", "1", "--timeline", timeline, *flags]
    p = subprocess.run(command, capture_output=True, text=True)
    if p.returncode:
        raise SystemExit(p.stderr)
    steps = [line.split(",") for line in open(timeline)][1:]
    times = [float(s[5]) - float(s[4]) for s in steps if int(s[2]) == args.rows and int(s[3]) == args.rows]
    if len(times) < 10:
        raise SystemExit(f"only {len(times)} steps of {args.rows} rows")
    return times[3:-3]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="llama-3.1-8b")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", default="1,16")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--output", type=int, default=100)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    counts = [int(n) for n in args.adapters.split(",")]
    with tempfile.TemporaryDirectory() as tmp:
        with open(f"{tmp}/rows.jsonl", "w") as f:
            for i in range(args.rows):
                f.write(json.dumps({"prompt_token_ids": [100 + (i * 31 + j * 7) % 900 for j in range(args.prompt)], "output_lengths": [args.output]}) + "\n")
        shapes = shapes_of(config_of(args.model))
        for i in range(max(counts)):
            write_adapter(f"{tmp}/a{i}", shapes, args.rank, i, strength=0.01)
        ways = {"without adapters": [], "adapters may be loaded, none is": ["--max-loras", "1"]}
        for n in counts:
            ways[f"{n} of rank {args.rank}"] = ["--max-lora-rank", str(args.rank), "--lora-modules", *(f"a{i}={tmp}/a{i}" for i in range(n))]
        times = {way: [] for way in ways}
        for _ in range(args.turns):
            for way, flags in ways.items():
                times[way].append(statistics.median(measure(args, tmp, flags)))
        first = statistics.median(times["without adapters"])
        print(f"| {args.model}, {args.rows} rows, {os.uname().machine} | step, us | of each turn | longer |\n|---|---|---|---|")
        for way, each in times.items():
            us = statistics.median(each)
            print(f"| {way} | {us:,.0f} | {', '.join(f'{x:,.0f}' for x in each)} | {100 * (us / first - 1):.1f} % |")


if __name__ == "__main__":
    main()
