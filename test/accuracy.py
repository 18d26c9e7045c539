#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a large batch of word problems, kills it several times, scores each sample, and compares with runs of single requests.

    python3 test/accuracy.py --dir /tmp/accuracy                           10,000 lines x 16 samples: 10 to 60 minutes of 2 cores
    python3 test/accuracy.py --dir /tmp/accuracy --lines 200 --alone 20    a short run, under a minute

The steps, with `toka batch` and the embedded model:
  1. Write --lines problems of test/model/make/problems.py (--seed) as chat lines of --n samples at --temp.
  2. Run the batch; kill it with -9 --kills times, at equal distances of the output; then let the same command finish.
  3. Check that each custom_id appears exactly once, with all its samples and without an error.
  4. Compare each sample with the known answer.
  5. Run --alone random lines with `toka -p`, one sample at a time, each line in its own process. The texts must equal those of the
     batch, byte for byte.
Prints a report in markdown (example: test/results/batch-10000.md). The exit status is 1 if a check fails. Needs only ./toka and the
standard library. An unfinished batch in --dir is continued.
"""
import argparse
import datetime
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ENV = {k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}


def arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--dir", required=True, help="folder for the input, the output and the reports")
    p.add_argument("--toka", default=os.path.join(ROOT, "toka"))
    p.add_argument("--lines", type=int, default=10000)
    p.add_argument("--n", type=int, default=16)
    p.add_argument("--seed", type=int, default=31, help="of the problems and of the samples")
    p.add_argument("--temp", type=float, default=1.0)
    p.add_argument("--kills", type=int, default=3)
    p.add_argument("--alone", type=int, default=300)
    return p.parse_args()


def write_input(o, path):
    """Writes the batch file; returns prompt and answer by custom_id."""
    made = subprocess.run([sys.executable, os.path.join(ROOT, "test/model/make/problems.py"), "--seed", str(o.seed), "--n",
                           str(o.lines), "--jsonl"], check=True, capture_output=True, text=True).stdout.splitlines()
    problems = {f"problem-{i}": json.loads(line) for i, line in enumerate(made)}
    with open(path, "w") as f:
        for i, (name, problem) in enumerate(problems.items()):
            f.write(json.dumps({"custom_id": name, "messages": [{"role": "user", "content": problem["prompt"]}], "n": o.n,
                                "temperature": o.temp, "seed": o.seed + i}) + "\n")
    return problems


def count_lines(path):
    if not os.path.exists(path):
        return 0
    with open(path, "rb") as f:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: f.read(1 << 20), b""))


def run_batch(o, source, out):
    """Runs the batch, kills it --kills times, and runs it to its end; returns the number of lines written at each kill, and the last
    standard error."""
    command = [o.toka, "batch", "-i", source, "-o", out, "--report", os.path.join(o.dir, "report.json")]
    kills = []
    for part in range(1, o.kills + 2):
        stop_at = o.lines * part // (o.kills + 1)
        p = subprocess.Popen(command, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while part <= o.kills and p.poll() is None and count_lines(out) < stop_at:
            time.sleep(0.2)
        if part <= o.kills and p.poll() is None:
            p.send_signal(signal.SIGKILL)
        err = p.communicate()[1].decode()
        if p.returncode == -signal.SIGKILL:
            kills.append(count_lines(out))
        elif p.returncode:
            sys.exit(err)
    return kills, err


def read_results(o, out, problems):
    """The texts by custom_id; exits if a line is missing, appears twice, is an error or is incomplete."""
    texts = {}
    for line in open(out):
        v = json.loads(line)
        choices = v["response"]["body"]["choices"] if v["error"] is None else []
        if v["custom_id"] in texts or v["custom_id"] not in problems or len(choices) != o.n:
            sys.exit(f"{v['custom_id']}: twice, unknown or incomplete")
        texts[v["custom_id"]] = [c["message"]["content"] for c in choices]
    if texts.keys() != problems.keys():
        sys.exit(f"{len(problems) - len(texts)} lines are missing")
    return texts


def n_right(texts, answer):
    return sum(re.findall(r"The answer is (-?\d+)", t)[-1:] == [str(answer)] for t in texts)


def run_alone(o, problems, names):
    """The texts of single runs, by custom_id."""
    texts = {}
    for name in names:
        seed = o.seed + int(name.split("-")[1])
        flags = ["--temp", str(o.temp), "--samples", str(o.n), "--seed", str(seed), "--json", "--max-num-seqs", "1"]
        p = subprocess.run([o.toka, "-p", problems[name]["prompt"], *flags], env=ENV, capture_output=True, check=True)
        texts[name] = [s["text"] for s in json.loads(p.stdout)["samples"]]
    return texts


def commit():
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return f"commit {git.stdout.strip()}" if git.returncode == 0 else "not in a repository"


def share(right, n):
    """A share with its 95 % interval (Wilson)."""
    p, z = right / n, 1.96
    middle, half = (p + z * z / (2 * n)) / (1 + z * z / n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return f"{right:,} of {n:,} = {100 * p:.3f} % (95 %: {100 * (middle - half):.3f} to {100 * (middle + half):.3f})"


def main():
    o = arguments()
    os.makedirs(o.dir, exist_ok=True)
    source, out = os.path.join(o.dir, "in.jsonl"), os.path.join(o.dir, "out.jsonl")
    problems = write_input(o, source)
    t0 = time.time()
    kills, err = run_batch(o, source, out)
    took = time.time() - t0
    texts = read_results(o, out, problems)
    right = {name: n_right(texts[name], problems[name]["answer"]) for name in problems}
    names = random.Random(o.seed).sample(sorted(problems), min(o.alone, o.lines))
    alone = run_alone(o, problems, names)
    same = sum(a == b for name in names for a, b in zip(texts[name], alone[name]))
    last = "\n    ".join(line for line in err.strip().split("\n") if "ETA" not in line)
    right_in_batch = sum(right[name] for name in names)
    right_alone = sum(n_right(alone[name], problems[name]["answer"]) for name in names)
    flags = f"--lines {o.lines} --n {o.n} --seed {o.seed} --temp {o.temp:g} --kills {o.kills}"
    print(f"""# {o.lines:,} word problems x {o.n} samples in one batch

{datetime.date.today()}, {commit()}. Single runs: `toka -p`, one sample at a time, one process for each problem.
`python3 test/accuracy.py --dir DIR {flags} --alone {o.alone}`

| check | result |
|---|---|
| lines in the output | {len(texts):,}, each custom_id once, {o.n} samples each, no error record |
| lines written when it was killed with -9 | {', '.join(f'{k:,}' for k in kills) or 'never'} |
| samples with the right answer, temperature {o.temp:g} | {share(sum(right.values()), o.lines * o.n)} |
| problems with all samples right | {sum(r == o.n for r in right.values()):,} |
| problems with more than half of the samples right | {sum(2 * r > o.n for r in right.values()):,} |
| right samples of the {len(names)} problems of the single runs, in the batch | {share(right_in_batch, len(names) * o.n)} |
| right samples of these problems in single runs | {share(right_alone, len(names) * o.n)} |
| samples with equal bytes in both | {same:,} of {len(names) * o.n:,} |
| wall-clock time of all parts | {took:.0f} s |

Standard error of the last part of the batch, from the last kill to the end:

    {last}
""")
    sys.exit(same != len(names) * o.n or len(kills) < o.kills)


if __name__ == "__main__":
    main()
