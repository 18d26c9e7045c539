#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests the program on several GPUs from outside. Every split that there are GPUs for is compared with one GPU; samples are preempted or
cancelled; ranks fail or hang.

Run:  python3 test/gpu_ranks.py [batches] [server] [faults]        on a machine with GPUs, from the repository root, after ./build.sh. Runs
all three if none is named. Standard library only. With TOKA_DEBUG_SHARE_GPU=N all ranks, at most four, are on the first N GPUs
(CUDA_MODULE_LOADING=EAGER and CUDA_DEVICE_MAX_CONNECTIONS=32 are then set). With TOKA_DEBUG_NO_PEER=1 stages send through the host, and
tensor ranks must be refused.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import time

from server import Server, texts

SHARED = os.environ.get("TOKA_DEBUG_SHARE_GPU", "0")
NO_PEER = os.environ.get("TOKA_DEBUG_NO_PEER", "0")
ENV = {k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}
if NO_PEER != "0":
    ENV["TOKA_DEBUG_NO_PEER"] = NO_PEER
if SHARED != "0":
    ENV.update(TOKA_DEBUG_SHARE_GPU=SHARED, CUDA_MODULE_LOADING="EAGER", CUDA_DEVICE_MAX_CONNECTIONS="32")
PROMPT = "Tom has 12 apples. He buys 7 more apples. How many apples does Tom have now?"
WATCHDOG_S, SHUTDOWN_S = 3, 5  # the value of TOKA_DEBUG_PATIENCE below; the time that lost ranks get to return
passed = failed = skipped = 0


def check(ok, what):
    global passed, failed
    passed, failed = passed + bool(ok), failed + (not ok)
    print(f"{'ok    ' if ok else 'FAILED'} {what}", flush=True)


def split(tp, pp, dp):
    sizes = {"tensor": tp, "pipeline": pp, "data": dp}
    return [x for name, n in sizes.items() if n != 1 for x in (f"--{name}-parallel-size", str(n))]


def run(*args, env=None, stdin=None):
    t = time.time()
    try:
        p = subprocess.run(["./toka", *args, "--device", "cuda"], env={**ENV, **(env or {})}, input=stdin, capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired as e:
        return None, "", f"no end: {e.stderr}", time.time() - t
    return p.returncode, p.stdout, p.stderr, time.time() - t


def line(i, **body):
    return {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}


def lines():
    """Prompts of many lengths with common beginnings: sampled and greedy, with stop strings, bad words, scores, log-probabilities, or
    prefill only."""
    for i in range(48):
        prompt = f"Tom has {i} boxes with {i % 5} apples each. " * (1 + i % 4) + PROMPT
        more = [{"n": 5, "temperature": 1.3, "stop": ["pp", " In"]}, {"logprobs": 5, "temperature": 0}, {"max_tokens": 1, "temperature": 0},
                {"frequency_penalty": 0.5, "temperature": 0.8, "bad_words": [" the"], "ignore_eos": True}, {"prompt_logprobs": 2},
                {"echo": True, "logprobs": 2}, {"temperature": 0, "ignore_eos": True}][i % 7]
        yield line(i, **{"prompt": prompt, "max_tokens": 10 + i, "seed": i, **more})


def batch(tmp, at, given, *flags, env=None):
    out = os.path.join(tmp, "out.jsonl")
    code, _, err, seconds = run("batch", "-q", "-i", "-", "-o", out, *split(*at), *flags, env=env, stdin="".join(json.dumps(x) + "\n" for x in given))
    got = {}
    for text in open(out) if os.path.exists(out) else ():
        v = json.loads(text)
        if not v["error"]:
            got[v["custom_id"]] = v["response"]["body"]["choices"]
    if os.path.exists(out):
        os.unlink(out)
    return code, got, err, seconds


def first_logprobs(choices):
    return [x for c in choices for x in ((c.get("logprobs") or {}).get("token_logprobs") or [])[:24] if x is not None]


def test_batches(tmp, splits):
    given = list(lines())
    _, want, err, _ = batch(tmp, (1, 1, 1), given)
    check(len(want) == len(given), f"one GPU: {len(want)} answers {err.strip()}")
    for at in splits:
        code, got, err, _ = batch(tmp, at, given)
        greedy = [k for k in want if int(k[1:]) % 7 in (1, 2, 6)]
        same = sum(got.get(k) and got[k][0]["text"][:24] == want[k][0]["text"][:24] for k in greedy)
        off = max([abs(a - b) for k in got for a, b in zip(first_logprobs(got[k]), first_logprobs(want[k]))] or [9])
        check(code == 0 and len(got) == len(given) and same >= 0.8 * len(greedy) and off < 0.3,
              f"batch, tp {at[0]} pp {at[1]} dp {at[2]}: {len(got)} answers, {same} of {len(greedy)} begin with equal text, log-probabilities within {off:.1e} {err.strip()}")
        short = [line(i, prompt=PROMPT, max_tokens=60 + i, n=4, temperature=1, seed=i, ignore_eos=True) for i in range(24)]
        code, got, err, _ = batch(tmp, at, short, "--kv-tokens", "1600", "--max-num-seqs", "32", "--max-model-len", "256")
        n = sum(len(v) for v in got.values())
        check(code == 0 and n == 96, f"short of pages, tp {at[0]} pp {at[1]} dp {at[2]}: {n} of 96 samples {err.strip()}")


def post(server, **body):
    text = json.dumps(body)
    return server.connect().send(f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(text)}\r\n\r\n{text}")


def test_server(at):
    """Clients that disconnect, while others stay connected."""
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 1, "seed": 5, "n": 3, "ignore_eos": True}
    with Server(*split(*at), "--max-num-seqs", "16", env={**ENV, "TOKA_DEVICE": "cuda"}) as s:
        n = 0
        for _ in range(3):
            streams = [post(s, **body, stream=True) for _ in range(6)]
            leaving = [post(s, prompt=f"{i} apples", max_tokens=800, ignore_eos=True, n=4, stream=True) for i in range(6)]
            for c in leaving:
                c.head()
                next(c.chunks())
                c.close()
            for c in streams:
                got, done = texts(c.answer().body)
                n += done and all(len(got[i]) > 0 for i in range(3))
        s.wait_metric("num_requests_running", 0)
        check(n == 18 and s.metric("kv_cache_usage_perc") == 0, f"server with clients that disconnect, tp {at[0]} pp {at[1]} dp {at[2]}: {n} of 18 answers")
        s.p.terminate()
        check(s.p.wait(30) == 0, "the server ends")


def test_faults(tmp, faults):
    given = [line(i, prompt=PROMPT, max_tokens=40, ignore_eos=True, n=4) for i in range(20)]
    for n, at, rank in faults:
        for kind in "FAULT", "STALL":
            env = {f"TOKA_DEBUG_{kind}": n, **({"TOKA_DEBUG_PATIENCE": str(WATCHDOG_S)} if kind == "STALL" else {})}
            words = rank + " has not moved for 3 s, last seen in"
            if kind == "FAULT":  # GPUs that access each other's memory fail together: the message names the rank, or says that it may be another
                behind = r"rank \d .*" if SHARED != "0" else rank  # all ranks of one context fail, each in whatever op it is in
                words = f"{behind}.*: unspecified launch failure|; it may be another rank's fault, GPUs [^:]* together(: {behind} is behind|[^:]*$)"
            for name, (code, _, err, seconds) in ("-p", run("-p", PROMPT, "-q", "-n", "40", "--ignore-eos", *split(*at), env=env)), \
                                                 ("batch", batch(tmp, at, given, "--max-num-seqs", "8", env=env)):
                check(code == 2 and err.count("\n") == 1 and re.search(words, err) and seconds < WATCHDOG_S + SHUTDOWN_S + 12,
                      f"{kind}={n} tp {at[0]} pp {at[1]} dp {at[2]}, {name}: exit {code} after {seconds:.1f} s: {err.strip()}")


def test_too_many():
    code, _, err, _ = run("-p", "x", "--data-parallel-size", "64", "--pipeline-parallel-size", "2")
    check(code == 2 and re.search(r"64 replicas of 2 stages of 1 tensor rank: 128 GPUs are needed, this process sees \d+", err), err.strip())


def test_no_peer():
    code, _, err, _ = run("-p", "x", "--tensor-parallel-size", "2")
    check(code == 2 and err.count("\n") == 1 and "(no peer access), which tensor ranks need" in err, err.strip())


def main():
    out = subprocess.run(["./toka", "devices"], env=ENV, capture_output=True, text=True).stdout
    n = 4 if SHARED != "0" else len(re.findall(r"^cuda", out, re.M))
    splits = [at for at in [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (4, 1, 1), (1, 4, 1), (1, 2, 2)] if at[0] * at[1] * at[2] <= n]
    parts = sys.argv[1:] or ["batches", "server", "faults"]
    faults = [("2@1", (2, 1, 1), r"rank 1 \(stage 0, tensor rank 1\)"), ("2@0", (2, 1, 1), r"rank 0 \(stage 0, tensor rank 0\)"),
              ("4@1", (1, 2, 1), r"rank 1 \(stage 1, tensor rank 0\)"), ("2@0", (1, 2, 1), r"rank 0 \(stage 0, tensor rank 0\)"),
              ("2@3", (2, 2, 1), r"rank 3 \(stage 1, tensor rank 1\)")]
    with tempfile.TemporaryDirectory() as tmp:
        test_too_many()
        if NO_PEER != "0" and n > 1:
            test_no_peer()
            splits = [at for at in splits if at[0] == 1]
        if "batches" in parts:
            test_batches(tmp, splits)
        for at in splits[:4] if "server" in parts else []:
            test_server(at)
        if "faults" in parts:
            test_faults(tmp, [f for f in faults if f[1] in splits])
    print(f"{passed} passed, {failed} failed, {7 - len(splits) if NO_PEER == "0" else 0} skipped")
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
