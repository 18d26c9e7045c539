#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests adapters (LoRA) on a GPU from outside: the log-probabilities of the embedded model with adapters against the CPU's and against
those of the merged model, many adapters in one step, adapters that are replaced while requests run, and what a GPU refuses.

Run:  python3 test/gpu_lora.py [--device cuda]      on a machine with a GPU, from the repository root, after ./build.sh. Standard library
only. --device cpu tests this script.
"""
import argparse
import array
import functools
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

ENV = {k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}
MODEL = "test/model"
passed = failed = 0
device = "cuda"


def check(ok, what):
    global passed, failed
    passed, failed = passed + bool(ok), failed + (not ok)
    print(f"{'ok    ' if ok else 'FAILED'} {what}", flush=True)


# ---- Adapters ----

def shapes_of(config):
    """Rows and columns of the matrices of a dense model that adapters may change, by module."""
    E, F, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    D = config.get("head_dim") or E // heads
    q, kv = heads * D, config["num_key_value_heads"] * D
    sizes = {"self_attn.q_proj": (q, E), "self_attn.k_proj": (kv, E), "self_attn.v_proj": (kv, E), "self_attn.o_proj": (E, q),
             "mlp.gate_proj": (F, E), "mlp.up_proj": (F, E), "mlp.down_proj": (E, F)}
    return {f"model.layers.{i}.{name}": size for i in range(config["num_hidden_layers"]) for name, size in sizes.items()}


def bf16_bits(x):
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def from_bf16(bits):
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def write_safetensors(path, tensors):
    """tensors: (shape, "F32" or "BF16", bytes) by name."""
    header, at = {}, 0
    for name, (shape, dtype, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            f.write(data)


@functools.cache
def normal_bits(size):
    rng = random.Random(1)
    return array.array("H", (bf16_bits(rng.gauss(0, size)) for _ in range(65521)))


def write_adapter(folder, shapes, rank, seed, strength=0.2, alpha=16):
    """An adapter with random bf16 numbers, drawn from a block of 65,521 numbers. Returns (scale, A, B) of each module as lists of floats if
    the adapter is small."""
    os.makedirs(folder, exist_ok=True)
    rng = random.Random(seed)
    scale, tensors, numbers = alpha / rank, {}, {}
    def block(n, size):
        bits = normal_bits(size)
        begin = rng.randrange(len(bits))
        return ((bits[begin:] + bits[:begin]) * (n // len(bits) + 1))[:n]
    keeps = sum((n + k) * rank for n, k in shapes.values()) < 1e6
    for module, (n, k) in shapes.items():
        a, b = block(rank * k, 0.5 / k ** 0.5), block(n * rank, strength / scale)
        for x, shape, bits in (("A", (rank, k), a), ("B", (n, rank), b)):
            tensors[f"base_model.model.{module}.lora_{x}.weight"] = (shape, "BF16", bits.tobytes())
        if keeps:
            numbers[module] = scale, [from_bf16(x) for x in a], [from_bf16(x) for x in b]
    write_safetensors(f"{folder}/adapter_model.safetensors", tensors)
    with open(f"{folder}/adapter_config.json", "w") as f:
        json.dump({"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": "all-linear"}, f)
    return numbers


def merge(folder, numbers, shapes):
    """The embedded model with what an adapter adds, these matrices as float32."""
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("make", "*.safetensors"))
    raw = open(f"{MODEL}/model.safetensors", "rb").read()
    size = struct.unpack("<Q", raw[:8])[0]
    header, data, tensors = json.loads(raw[8:8 + size]), raw[8 + size:], {}
    for name, t in header.items():
        if name == "__metadata__":
            continue
        part = data[slice(*t["data_offsets"])]
        module = name.removesuffix(".weight")
        if module not in numbers:
            tensors[name] = t["shape"], t["dtype"], part
            continue
        (scale, a, b), (n, k) = numbers[module], shapes[module]
        rank, w = len(a) // k, array.array("H", part)
        columns = list(zip(*(a[r * k:(r + 1) * k] for r in range(rank))))
        out = array.array("f")
        for i in range(n):
            row = [scale * x for x in b[i * rank:(i + 1) * rank]]
            out.extend(from_bf16(w[i * k + j]) + sum(x * y for x, y in zip(row, column)) for j, column in enumerate(columns))
        tensors[name] = t["shape"], "F32", out.tobytes()
    write_safetensors(f"{folder}/model.safetensors", tensors)


# ---- Batches ----

def run(*args):
    p = subprocess.run(["./toka", *args], env=ENV, capture_output=True, text=True, timeout=500)
    return p.returncode, p.stdout, p.stderr


def batch(tmp, name, bodies, *flags):
    """The choice of each body."""
    source, out = f"{tmp}/{name}.in.jsonl", f"{tmp}/{name}-{time.monotonic_ns()}.jsonl"
    with open(source, "w") as f:
        f.writelines(json.dumps({"custom_id": str(i), **body}) + "\n" for i, body in enumerate(bodies))
    code, _, err = run("batch", "-i", source, "-o", out, "--served-model-name", "base", "-q", *flags)
    if code:
        print(err)
        return None
    lines = {x["custom_id"]: x for x in map(json.loads, open(out))}
    return [lines[str(i)]["response"]["body"]["choices"][0] for i in range(len(bodies))]


def body(model, seed, n_prompt=90, **more):
    rng = random.Random(seed)
    return {"model": model, "prompt": [rng.randrange(4, 1000) for _ in range(n_prompt)], "max_tokens": 1, "temperature": 0, "logprobs": 1,
            "prompt_logprobs": 0, "return_token_ids": True, "ignore_eos": True, **more}


def numbers_of(choice):
    return [next(iter(t.values()))["logprob"] for t in choice["prompt_logprobs"][1:]]


def distance(a, b):
    """Mean difference of the log-probabilities of prompts."""
    pairs = [(x, y) for i, j in zip(a, b) for x, y in zip(numbers_of(i), numbers_of(j))]
    return sum(abs(x - y) for x, y in pairs) / len(pairs)


def test_merged(tmp, shapes):
    """GPU with adapter, CPU with adapter, GPU with the merged model."""
    for rank, seed in ((1, 5), (4, 6)):
        folder = f"{tmp}/one{rank}"
        numbers = write_adapter(folder, shapes, rank, seed)
        merge(f"{tmp}/merged{rank}", numbers, shapes)
        modules = ["--lora-modules", f"a={folder}"]
        with_a, base = [body("a", i) for i in range(8)], [body("base", i) for i in range(8)]
        gpu, cpu = batch(tmp, "a", with_a, "--device", device, *modules), batch(tmp, "a", with_a, "--device", "cpu", *modules)
        merged = batch(tmp, "m", base, "--device", device, "-m", f"{tmp}/merged{rank}")
        gpu_base, cpu_base = batch(tmp, "b", base, "--device", device), batch(tmp, "b", base, "--device", "cpu")
        error, floor, effect = distance(gpu, cpu), distance(gpu_base, cpu_base), distance(cpu, cpu_base)
        check(effect > 0.1 and error < 3 * floor + 0.01, f"rank {rank}: {error:.4f} from the CPU (without adapter {floor:.4f}); the adapter changes {effect:.3f}")
        other = distance(gpu, merged)
        check(other < 4 * floor + 0.02, f"rank {rank}: {other:.4f} from the merged model")
        mixed = batch(tmp, "mixed", [x for pair in zip(with_a, base) for x in pair], "--device", device, *modules)
        check(distance(mixed[0::2], gpu) < 3 * floor + 0.01 and distance(mixed[1::2], gpu_base) < 3 * floor + 0.01,
              f"rank {rank}: rows with and without the adapter in one step: {distance(mixed[0::2], gpu):.4f}, {distance(mixed[1::2], gpu_base):.4f}")


def test_many(tmp, shapes):
    """Requests of 24 adapters and of none at once, in prefill and in decode, also in stages."""
    names, modules = ["base"], []
    for i in range(24):
        own = {m: s for j, (m, s) in enumerate(shapes.items()) if i % 3 != j % 4}
        write_adapter(f"{tmp}/l{i}", own, (1, 8, 16, 64)[i % 4], 100 + i)
        names.append(f"l{i}")
        modules.append(f"l{i}={tmp}/l{i}")
    bodies = [body(names[i % 25], i // 5, n_prompt=5 + 7 * (i % 11), max_tokens=24) for i in range(300)]
    flags = ["--lora-modules", *modules]
    cpu, gpu = batch(tmp, "many", bodies, "--device", "cpu", *flags), batch(tmp, "many", bodies, "--device", device, *flags)
    floor = distance(*(batch(tmp, "floor", [{**b, "model": "base"} for b in bodies], "--device", d) for d in ("cpu", device)))
    check(distance(cpu, gpu) < 3 * floor + 0.01, f"300 requests of 24 adapters: {distance(cpu, gpu):.4f} from the CPU, {floor:.4f} without adapters")
    # generated tokens up to the first that differs; it may differ where two are close
    errors, n_same, n_all = [], 0, 0
    for a, b in zip(cpu, gpu):
        for x, y, u, v in zip(a["token_ids"], b["token_ids"], a["logprobs"]["token_logprobs"], b["logprobs"]["token_logprobs"]):
            if x != y:
                break
            errors.append(abs(u - v))
            n_same += 1
        n_all += len(a["token_ids"])
    check(n_same > 0.8 * n_all and sum(errors) / max(1, len(errors)) < 3 * floor + 0.01,
          f"{n_same} of {n_all} generated tokens are before the first other one, {sum(errors) / max(1, len(errors)):.4f} from the CPU")
    small = batch(tmp, "many", bodies, "--device", device, *flags, "--max-num-seqs", "3", "--max-num-batched-tokens", "16")
    check(distance(small, gpu) < 3 * floor + 0.01, f"the same in steps of 16 rows: {distance(small, gpu):.4f}")
    again = [batch(tmp, "again", bodies[:8], "--device", device, *flags, "--max-num-seqs", "1") for _ in range(2)]
    check(again[0] == again[1], "eight requests, one after the other, and again: the same bytes")


def test_unused(tmp, shapes):
    """Adapters that no request names change nothing."""
    write_adapter(f"{tmp}/unused", shapes, 16, 77)
    bodies = [body("base", i, max_tokens=30) for i in range(8)]  # one after the other, so that equal steps come
    plain, loaded = (batch(tmp, "unused", bodies, "--device", device, "--max-num-seqs", "1", *flags) for flags in ([], ["--lora-modules", f"x={tmp}/unused"]))
    check(plain == loaded, "an adapter that nobody names changes no byte")


# ---- Server ----

def post(port, path, fields):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(fields).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as a:
        return a.read()


def test_replace(tmp, shapes):
    """An adapter is replaced while requests run with it: each answer is that of one of the adapters, and they end."""
    for i in range(2):
        write_adapter(f"{tmp}/r{i}", shapes, 8 << i, 200 + i)
    server = subprocess.Popen(["./toka", "serve", "--port", "0", "--device", device, "--served-model-name", "base", "--enable-lora"], env=ENV,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines, is_ready, end = [], False, time.time() + 120
    threading.Thread(target=lambda: lines.extend(iter(server.stderr.readline, "")), daemon=True).start()
    while not is_ready:
        if server.poll() is not None or time.time() > end:
            check(False, f"the server starts: {''.join(lines)[-300:]}")
            return
        time.sleep(0.05)
        port = next((int(m[1]) for line in list(lines) if (m := re.search(r"127\.0\.0\.1:(\d+)", line))), 0)
        try:
            is_ready = port and urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).status == 200
        except OSError:
            pass
    load = lambda i: post(port, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": f"{tmp}/r{i}", "load_inplace": True})
    ask = lambda: json.loads(post(port, "/v1/completions", body("x", 1, max_tokens=60)))["choices"][0]
    try:
        want = []
        for i in range(2):
            load(i)
            want.append(ask())
        check(distance(want[:1], want[1:]) > 0.1, "the two adapters differ")
        got, stop = [], []
        def keep_asking():
            while not stop:
                got.append(ask())
        threads = [threading.Thread(target=keep_asking) for _ in range(4)]
        for t in threads:
            t.start()
        n_loads = 0
        while n_loads < 100 or (len(got) < 12 and n_loads < 3000):
            load(n_loads % 2)
            n_loads += 1
        stop.append(True)
        for t in threads:
            t.join()
        far = [min(distance([x], [w]) for w in want) for x in got]
        check(len(got) >= 8 and max(far) < 0.03, f"{len(got)} answers while an adapter was replaced {n_loads} times: at most {max(far):.4f} from one of the two")
    finally:
        server.terminate()
        check(server.wait(60) == 0, "the server ends")


def test_refused():
    if device != "cuda":
        return
    for flags, words in ((["--quantization", "fp8"], "adapters (LoRA) of FP8 weights"),):
        code, _, err = run("batch", "-i", "/dev/null", "-o", "/dev/null", "--device", "cuda", "--enable-lora", *flags)
        check(code == 1 and words in err, f"refused: {err.strip()}")
    code, _, err = run("batch", "-i", "/dev/null", "-o", "/dev/null", "--device", "cuda", "--lora-modules", "a=/none")
    check(code == 1 and "--lora-modules a=/none" in err, f"a folder that is missing: {err.strip()}")


def main():
    global device
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    shapes = shapes_of(json.load(open(f"{MODEL}/config.json")))
    with tempfile.TemporaryDirectory() as tmp:
        test_merged(tmp, shapes)
        test_many(tmp, shapes)
        test_unused(tmp, shapes)
        test_replace(tmp, shapes)
        test_refused()
    print(f"{passed} passed, {failed} failed, 0 skipped")
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
