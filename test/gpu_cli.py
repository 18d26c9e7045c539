#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests the program on a GPU from outside: the devices that it reports, the accuracy of the embedded model compared with the CPU, the small
trained models, and the errors when the GPU has too little memory or fails.

Run:  python3 test/gpu_cli.py        on a machine with a GPU, from the repository root, after ./build.sh. Standard library only.
"""
import json
import math
import os
import re
import subprocess
import sys
import tempfile

DATA = os.environ.get("TOKA_TEST_DATA", "../shared/data")
ENV = {k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}
passed = failed = skipped = 0


def check(ok, what):
    global passed, failed
    passed, failed = passed + bool(ok), failed + (not ok)
    print(f"{'ok    ' if ok else 'FAILED'} {what}", flush=True)


def run(*args, env=None, stdin=None):
    p = subprocess.run(["./toka", *args], env={**ENV, **(env or {})}, input=stdin, capture_output=True, text=True, timeout=300)
    return p.returncode, p.stdout, p.stderr


def answer(text):
    m = re.findall(r"-?\d+", text)
    return int(m[-1]) if m else None


def batch(device, problems, n, temp, tmp, *flags):
    """Runs a batch. Returns the number of right answers of all samples, and the texts."""
    source, out = os.path.join(tmp, "in.jsonl"), os.path.join(tmp, f"out-{device}-{n}-{'-'.join(flags)}.jsonl")
    with open(source, "w") as f:
        for i, p in enumerate(problems):
            f.write(json.dumps({"custom_id": str(i), "messages": [{"role": "user", "content": p["prompt"]}], "n": n, "temperature": temp,
                                "seed": 1000 * n + i}) + "\n")  # with equal seeds the samples would use the same random numbers
    code, _, err = run("batch", "--device", device, "-i", source, "-o", out, *flags)
    if code:
        print(err)
        return None, None
    right, texts = 0, {}
    for line in open(out):
        r = json.loads(line)
        body = r.get("response", r).get("body", r.get("response", r))
        for c in body["choices"]:
            texts[r["custom_id"], c["index"]] = c["message"]["content"]
            right += answer(c["message"]["content"]) == problems[int(r["custom_id"])]["answer"]
    return right, texts


def test_devices():
    code, out, _ = run("devices")
    check(code == 0 and re.search(r"^cuda\S*  .*compute capability", out, re.M) and re.search(r"^cpu  ", out, re.M), "toka devices: " + out.split("\n")[0])
    code, out, _ = run("--version")
    check(code == 0 and "cuda" in out and "none found" not in out, "toka --version: " + out.strip())


def test_accuracy(tmp):
    made = subprocess.run([sys.executable, "test/model/make/problems.py", "--seed", "99", "--n", "1000", "--jsonl"], check=True,
                          capture_output=True, text=True).stdout.splitlines()
    problems = [json.loads(line) for line in made]
    cpu, cpu_texts = batch("cpu", problems, 1, 0, tmp)
    gpu, gpu_texts = batch("cuda", problems, 1, 0, tmp)
    same = sum(cpu_texts[k] == gpu_texts[k] for k in cpu_texts)
    check(gpu >= cpu - 3, f"greedy: {gpu} of 1000 right on the GPU, {cpu} on the CPU, {same} texts equal")
    # at temperature 2 the model makes errors, so a wrong distribution is noticed: at most 4 standard errors from the CPU's share
    few = problems[:200]
    cpu, cpu_texts = batch("cpu", few, 16, 2.0, tmp)
    gpu, gpu_texts = batch("cuda", few, 16, 2.0, tmp)
    few_pages, _ = batch("cuda", few, 16, 2.0, tmp, "--kv-tokens", "8192")
    spread = 4 * math.sqrt(2 * 3200 * 0.68 * 0.32)
    check(abs(gpu - cpu) < spread, f"temperature 2: {gpu} of 3200 right on the GPU, {cpu} on the CPU")
    check(abs(few_pages - cpu) < spread, f"the same with few KV pages: {few_pages}")
    # the draws are the same, so texts differ only where the rounding of the logits changes a draw; texts of different samples are also equal
    # now and then
    same = sum(cpu_texts[k] == gpu_texts[k] for k in cpu_texts)
    other = sum(cpu_texts[i, (k + 1) % 16] == gpu_texts[i, k] for i, k in cpu_texts)
    check(same > other + 320, f"temperature 2: {same} of 3200 texts are those of the CPU, {other} those of another sample of the CPU")


def test_weights(tmp):
    """Trained weights in float32 with golden greedy ids. With bf16, greedy decoding may differ where two logits are close. So each golden
    id is
    scored after the ids before it: up to rounding, it must have the largest logit on the GPU."""
    global skipped
    for name in ["stories260K", "babyllama-tok105"]:
        folder = os.path.join(DATA, "weights", name)
        if not os.path.isdir(folder):
            skipped += 1
            print(f"skipped: {folder} does not exist")
            continue
        golden = json.load(open(os.path.join(folder, "golden.json")))
        golden = golden if isinstance(golden, list) else golden.get("cases", [golden])
        source, out = os.path.join(tmp, "golden.jsonl"), os.path.join(tmp, f"golden-{name}.jsonl")
        with open(source, "w") as f:
            for i, g in enumerate(golden):
                body = {"prompt": g["prompt_ids"] + g["greedy_ids"], "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
                f.write(json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}) + "\n")
        code, _, err = run("batch", "-m", folder, "--device", "cuda", "-i", source, "-o", out)
        check(code == 0, f"{name}: scores {err.strip() if code else ''}")
        for line in open(out) if code == 0 else ():
            r = json.loads(line)
            g, body = golden[int(r["custom_id"])], r["response"]["body"]
            lp = body["choices"][0]["logprobs"] if "choices" in body else {"token_logprobs": [], "top_logprobs": []}
            gaps = [max(top.values()) - own for own, top in list(zip(lp["token_logprobs"], lp["top_logprobs"]))[len(g["prompt_ids"]):-1]]
            n_best = sum(x == 0 for x in gaps)
            max_gap = max(gaps, default=math.inf)
            check(len(gaps) == len(g["greedy_ids"]) and max_gap < 0.1 and n_best >= 0.9 * len(gaps),
                  f"{name} case {r['custom_id']}: {n_best} of {len(gaps)} ids are the best, the others at most {max_gap:.1e} below")


def test_faults(tmp):
    code, out, err = run("-p", "x", "--device", "cuda", "--kv-tokens", "200000000000")
    check(code in (1, 2) and err.count("\n") == 1 and "Traceback" not in err, f"no memory for the KV cache: exit {code}: {err.strip()}")
    for step in (1, 3):
        code, out, err = run("-p", "Tom has 12 apples.", "--device", "cuda", env={"TOKA_DEBUG_FAULT": str(step)})
        check(code == 2 and "GPU" in err and err.strip().count("\n") == 0, f"a kernel fails in step {step}: exit {code}: {err.strip()}")
    source, out = os.path.join(tmp, "fault.jsonl"), os.path.join(tmp, "fault-out.jsonl")
    open(source, "w").write("".join(json.dumps({"custom_id": str(i), "prompt": "Tom has", "max_tokens": 40}) + "\n" for i in range(300)))
    code, _, err = run("batch", "--device", "cuda", "--max-num-seqs", "64", "-i", source, "-o", out, "--quiet",
                       env={"TOKA_DEBUG_FAULT": "30"})
    n = sum(1 for _ in open(out)) if os.path.exists(out) else 0
    check(code == 2 and "GPU" in err, f"a kernel fails inside a batch: exit {code}, {n} lines written: {err.strip()}")
    code, _, err = run("batch", "--device", "cuda", "-i", source, "-o", out, "--quiet")
    ids = [json.loads(line)["custom_id"] for line in open(out)]
    check(code == 0 and sorted(ids, key=int) == [str(i) for i in range(300)], f"the same command completes the batch: {len(ids)} lines {err.strip()}")


def test_wide(tmp):
    """A vocabulary of real size: graphs with more rows than one chunk of logits holds. Samples of few prompts at both head sizes, in steps
    of
    all sizes because the samples end one by one; also with top-p."""
    dataset = os.path.join(tmp, "wide.jsonl")
    with open(dataset, "w") as f:
        for i in range(2):
            f.write(json.dumps({"prompt_token_ids": list(range(100 + i, 600)), "output_lengths": [3 + j % 61 for j in range(500)]}) + "\n")
    for model, flags in (("qwen2.5-0.5b", []), ("qwen2.5-0.5b", ["--top-p", "0.9"]), ("qwen3-0.6b", [])):
        code, _, err = run("bench", "throughput", "--device", "cuda", "--dummy-weights", "-m", model, "--dataset", dataset, "--temp", "0.6",
                           "--max-num-seqs", "1024", "--max-model-len", "1024", "--kv-tokens", "50000", *flags)
        graphs = re.search(r"([0-9.]+) % of the steps were graphs", err)
        check(code == 0 and graphs and float(graphs[1]) > 0, f"{' '.join([model, *flags])}, 1,000 samples at once: exit {code}, "
              f"{graphs[0] if graphs else err.strip()[-200:]}")


def main():
    with tempfile.TemporaryDirectory() as tmp:
        test_devices()
        test_faults(tmp)
        test_weights(tmp)
        test_wide(tmp)
        test_accuracy(tmp)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
