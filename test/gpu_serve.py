#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times what a user gets of the engine's speed through `toka batch` and `toka serve`: text in, text out.

    python3 test/gpu_serve.py [--folder DIR] [--what throughput,batch,serve] [--samples 24] [--seqs 1,16,64,256,1024] [--device cuda]

Makes a model in the shape of Llama-3.2-1B (that of test/gpu_start.py with random weights, and with Llama 3.1's tokenizer if
TOKA_TEST_DATA has it). The prompts are GSM8K's, or made up if that is missing; answers have 100 to 200 tokens, the temperature is 0.6.
Times:

  throughput  `toka bench throughput`: the engine alone, ids in, no text
  batch       `toka batch` with the same load as text; with ids and log-probabilities as lists, or packed; with five top log-probabilities
              for each token; and only the log-probabilities of prompts, as evaluation harnesses request them
  serve       `toka bench serve` against `toka serve`: as many concurrent streams as --seqs says, 64 tokens in, 256 out

For each it also prints how busy the program's threads were, from /proc. Standard library only.
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import gpu_start
from make_dataset import DATA, few_shot_prompts

ROOT = gpu_start.ROOT
KINDS = {"text": {}, "packed": {"return_packed": True, "logprobs": 0}, "lists": {"return_token_ids": True, "logprobs": 0}, "top5": {"logprobs": 5},
         "score": {"echo": True, "logprobs": 1, "n": 1, "max_tokens": 1}}


class Busy(threading.Thread):
    """Reads the CPU times of a process's threads every 0.2 s. busiest() gives the share of a core of each thread since `begin`."""

    def __init__(self, pid):
        super().__init__(daemon=True)
        self.pid, self.seen, self.ended = pid, [], False
        self.start()

    def run(self):
        while not self.ended:
            now = {}
            try:
                for tid in os.listdir(f"/proc/{self.pid}/task"):
                    field = open(f"/proc/{self.pid}/task/{tid}/stat").read().rsplit(")", 1)[1].split()
                    sleeps = re.search(r"\nvoluntary_ctxt_switches:\s*(\d+)", open(f"/proc/{self.pid}/task/{tid}/status").read())
                    now[tid] = int(field[11]), int(field[12]), int(sleeps[1]) if sleeps else 0
            except (FileNotFoundError, ProcessLookupError):
                pass
            if now:
                self.seen.append((time.time(), now))
            time.sleep(0.2)

    def busiest(self, begin=0.0, n=5):
        seen = [s for s in self.seen if s[0] >= begin]
        if len(seen) < 2:
            return "too short to say"
        first, last, (t0, t1) = {}, {}, (seen[0][0], seen[-1][0])
        for _, threads in seen:
            for t, spent in threads.items():
                first.setdefault(t, spent if t in seen[0][1] else (0, 0, 0)), last.update({t: spent})
        share = [[(b - a) / (t1 - t0) for a, b in zip(first[t], last[t])] for t in last]
        share.sort(key=lambda s: -sum(s[:2]))
        percent = 100 / os.sysconf("SC_CLK_TCK")
        return ", ".join(f"{percent * u:.0f} + {percent * k:.0f} ({w:.0f})" for u, k, w in share[:n]) + \
               f": % of a core, user + system (sleeps a second), over {t1 - t0:.1f} s"


def prompts(n):
    try:
        return few_shot_prompts(n)
    except FileNotFoundError:
        head = "".join(f"Tom has {i} boxes with {i + 3} apples each and buys {i % 7} more. " for i in range(20))
        return [head + f"How many apples are in box {i}?" for i in range(n)]


def run(args):
    """Runs the program. Returns its standard output, its standard error and its Busy."""
    p = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    busy = Busy(p.pid)
    out, err = p.communicate()
    busy.ended = True
    if p.returncode:
        sys.exit(f"gpu_serve.py: {' '.join(args)}: status {p.returncode}\n{err[-2000:]}")
    return out, err, busy


def report(name, lines, busy, begin=0.0):
    print(f"== {name}")
    for line in lines:
        print(f"   {line}")
    print(f"   threads: {busy.busiest(begin)}", flush=True)


def output_len(i):
    return 100 + i * 37 % 101


def throughput(a, model):
    path = os.path.join(a.work, "throughput.jsonl")
    with open(path, "w") as f:
        for i, text in enumerate(prompts(a.problems)):
            f.write(json.dumps({"prompt": text, "output_lengths": [output_len(i)] * a.samples}) + "\n")
    out, err, busy = run([a.program, "bench", "throughput", "-m", model, "--device", a.device, "--dataset", path, "--temp", "0.6"] + a.flags)
    report("bench throughput", (out + err).splitlines()[-16:], busy)


def batch(a, model):
    for kind in a.kinds.split(","):
        where = os.path.join(a.work, f"{kind}.jsonl")
        with open(where, "w") as f:
            for i, text in enumerate(prompts(a.problems)):
                f.write(json.dumps({"custom_id": f"{kind}-{i}", "prompt": text, "n": a.samples, "max_tokens": output_len(i), "ignore_eos": True,
                                    "temperature": 0.6, **KINDS[kind]}) + "\n")
        result = where + ".out"
        begin = time.time()
        _, err, busy = run([a.program, "batch", "-m", model, "--device", a.device, "-i", where, "-o", result] + a.flags)
        took = time.time() - begin
        lines = [x for x in err.splitlines() if x.strip()][-14:]
        report(f"batch, {kind}: {os.path.getsize(result) / 1e6:.1f} MB of results, {took:.1f} s with the start", lines, busy)
        os.remove(result)


def serve(a, model):
    log = open(os.path.join(a.work, "serve.log"), "w")
    p = subprocess.Popen([a.program, "serve", "-m", model, "--device", a.device, "--port", "0", "--files-dir", "off"] + a.flags, stdout=log, stderr=log, cwd=ROOT)
    busy, url = Busy(p.pid), None
    try:
        for _ in range(600):
            found = re.search(r"http://[\d.]+:\d+", open(log.name).read())
            if found:
                url = found[0]
                break
            if p.poll() is not None:
                break
            time.sleep(0.1)
        if not url:
            sys.exit("gpu_serve.py: the server does not start\n" + open(log.name).read()[-2000:])
        for n in a.seqs.split(","):
            for endpoint in a.endpoints.split(","):
                begin = time.time()
                out, _, client = run([a.program, "bench", "serve", "--base-url", url, "--num-prompts", str(max(4, a.rounds * int(n))), "--max-concurrency", n,
                                      "--random-input-len", str(a.input_len), "--random-output-len", str(a.output_len), "--ignore-eos", "--temp", "0.6",
                                      "--endpoint", endpoint, "-q", "--num-warmups", "2", *a.client])
                keep = [x for x in out.splitlines() if re.search(r"duration|throughput|Mean|Median|P99|Failed|Successful", x)]
                report(f"serve, {n} clients, {endpoint}", keep, busy, begin)
                print(f"   client: {client.busiest()}", flush=True)
    finally:
        p.terminate()
        p.wait()
        busy.ended = True
        print("   server's last lines:\n   " + "\n   ".join(open(log.name).read().splitlines()[-14:]), flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--folder", default=tempfile.gettempdir(), help="the folder in which the model is made, and removed afterwards")
    p.add_argument("--model", help="use the model of this folder instead")
    p.add_argument("--what", default="throughput,batch,serve")
    p.add_argument("--kinds", default=",".join(KINDS), help="kinds of batches")
    p.add_argument("--endpoints", default="/v1/completions", help="endpoints for serve")
    p.add_argument("--problems", type=int, default=128)
    p.add_argument("--samples", type=int, default=24)
    p.add_argument("--seqs", default="1,16,64,256,1024")
    p.add_argument("--rounds", type=int, default=4, help="for serve: requests of each client")
    p.add_argument("--input-len", type=int, default=64)
    p.add_argument("--output-len", type=int, default=256)
    p.add_argument("--layers", type=int, default=16)
    p.add_argument("--device", default="cuda")
    p.add_argument("--program", default=os.path.join(ROOT, "toka"))
    p.add_argument("--flag", dest="flags", action="append", default=[], help="for the program, as --flag=--max-num-seqs --flag=64")
    p.add_argument("--client", action="append", default=[], help="for bench serve, likewise")
    a = p.parse_args()
    a.work = tempfile.mkdtemp(prefix="toka-serve-", dir=a.folder)
    try:
        model = a.model
        if not model:
            gpu_start.make(a.work, a.layers)
            real = os.path.join(DATA, "tokenizers/llama-3.1/tokenizer.json")
            if os.path.exists(real):
                shutil.copy(real, a.work)
            model = a.work
        for what in a.what.split(","):
            {"throughput": throughput, "batch": batch, "serve": serve}[what](a, model)
    finally:
        shutil.rmtree(a.work)


if __name__ == "__main__":
    main()
