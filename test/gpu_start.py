#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the program from its start to the first token, for a model in the shape of Llama-3.2-1B (2.5 GB of random weights in bf16).

    python3 test/gpu_start.py [--folder DIR] [--runs 3] [--device cuda] [--layers 16] [--program ./toka]

Makes a folder in Hugging Face's layout (config, tokenizer with 128,256 tokens, one safetensors file) in --folder (default: /tmp) and
removes it afterwards. Runs `toka -v -p ... -n 1`, first with the file evicted from the page cache (if the system allows it), then from
the page cache. Prints the seconds until the first byte of text, the seconds of each phase as the program reports them, and the rate at
which weights were uploaded. For comparison it prints the rate at which 8 threads read the same file into a buffer and, with torch, the
rate of a copy from pinned memory to the GPU. Passes if the median from the page cache is at most 4 s. Standard library only, except for
that copy.
"""
import argparse
import concurrent.futures
import json
import os
import random
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGET_S = 4
E, F, H, K, D, V = 2048, 8192, 32, 8, 64, 128256


def byte_letters():
    """The letters that a byte-level tokenizer uses for the 256 bytes."""
    plain = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b]
    rest = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(rest)}}


def tokenizer():
    """A byte-level BPE tokenizer of V tokens in the form of Llama 3's: 256 bytes, all pairs, and some triples."""
    one = list(byte_letters().values())
    pairs = [(a, b) for a in one for b in one]
    triples = [(a + b, c) for a, b in pairs for c in one[:1 + (V - 256 - 65536) // 65536]][:V - 256 - 65536]
    merges = pairs + triples
    vocabulary = {t: i for i, t in enumerate(one + [a + b for a, b in merges])}
    split = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}, level]},
            "post_processor": None, "decoder": level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": False, "byte_fallback": False, "ignore_merges": True, "vocab": vocabulary,
                      "merges": [f"{a} {b}" for a, b in merges]}}


def tensors(layers):
    yield "model.embed_tokens.weight", [V, E]
    for i in range(layers):
        at = f"model.layers.{i}."
        yield at + "input_layernorm.weight", [E]
        yield at + "self_attn.q_proj.weight", [H * D, E]
        yield at + "self_attn.k_proj.weight", [K * D, E]
        yield at + "self_attn.v_proj.weight", [K * D, E]
        yield at + "self_attn.o_proj.weight", [E, H * D]
        yield at + "post_attention_layernorm.weight", [E]
        yield at + "mlp.gate_proj.weight", [F, E]
        yield at + "mlp.up_proj.weight", [F, E]
        yield at + "mlp.down_proj.weight", [E, F]
    yield "model.norm.weight", [E]


def make(folder, layers):
    """Writes the model. Returns the size of its weights in bytes."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": E, "intermediate_size": F, "num_attention_heads": H,
              "num_key_value_heads": K, "head_dim": D, "num_hidden_layers": layers, "vocab_size": V, "tie_word_embeddings": True,
              "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "hidden_act": "silu",
              "attention_bias": False, "mlp_bias": False, "bos_token_id": 0, "eos_token_id": 1,
              "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                               "original_max_position_embeddings": 8192}}
    json.dump(config, open(os.path.join(folder, "config.json"), "w"))
    json.dump(tokenizer(), open(os.path.join(folder, "tokenizer.json"), "w"), ensure_ascii=False)
    header, at = {}, 0
    for name, shape in tensors(layers):
        n = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    r, n = random.Random(1), 16 << 20
    block = bytearray(2 * n)  # bf16 values of 0.008 to 0.03 with either sign
    block[0::2] = r.randbytes(n)
    block[1::2] = r.randbytes(n).translate(bytes(0x3c + 0x80 * (i & 1) for i in range(256)))
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for i in range(0, at, len(block)):
            f.write(block[:min(len(block), at - i)])
        f.flush()
        os.fsync(f.fileno())
    return at


def evict(path):
    """Asks the system to evict the file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def read_rate(path, threads=8, piece=8 << 20):
    """GB/s of reading the file in pieces into buffers that are reused."""
    fd, size = os.open(path, os.O_RDONLY), os.path.getsize(path)

    def part(k):
        buffer = bytearray(piece)
        for at in range(k * piece, size, threads * piece):
            os.preadv(fd, [buffer], at)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(part, range(threads)))  # warm-up: maps the buffers' pages
        begin = time.time()
        list(pool.map(part, range(threads)))
        took = time.time() - begin
    os.close(fd)
    return size / took / 1e9


def bus_rate():
    """GB/s of copies from pinned memory to the GPU; None if torch is not installed."""
    code = """
import time, torch
a = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
b = torch.empty(256 << 20, dtype=torch.uint8, device='cuda')
for k in range(9):
    if k == 1: torch.cuda.synchronize(); t = time.time()
    b.copy_(a, non_blocking=True)
torch.cuda.synchronize()
print('RATE', 8 * (256 << 20) / (time.time() - t) / 1e9)"""
    p = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    found = re.search(r"RATE ([\d.]+)", p.stdout)
    return float(found[1]) if found else None


def start(a, folder):
    """Runs the program. Returns the seconds to the first byte of text and to the end, the exit status and the standard error."""
    begin = time.time()
    p = subprocess.Popen([a.program, "-v", "-m", folder, "--device", a.device, "--raw", "-p", "Why is the sky blue?", "-n", "1", "--temp", "0",
                          "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    p.stdout.read(1)
    first = time.time() - begin
    err = p.communicate()[1].decode(errors="replace")
    return first, time.time() - begin, p.returncode, err


def show(what, run, size):
    first, all_s, _, err = run
    line = next((x for x in err.splitlines() if "opened in " in x), "")
    load = re.search(r"loading weights ([\d.]+)", line)
    rate = f", weights at {size / 1e9 / max(float(load[1]), 0.01):.1f} GB/s" if load else ""
    print(f"       {what}: first token after {first:.2f} s, ended after {all_s:.2f} s{rate}\n       {line}", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--folder", default=tempfile.gettempdir(), help="the folder in which the model is made")
    p.add_argument("--runs", type=int, default=3)
    p.add_argument("--device", default="cuda")
    p.add_argument("--layers", type=int, default=16)
    p.add_argument("--program", action="append", help="default: ./toka; several times: they take turns")
    a = p.parse_args()
    programs = a.program or ["./toka"]
    folder = tempfile.mkdtemp(prefix="toka-start-", dir=a.folder)
    failed = 0
    try:
        begin = time.time()
        size = make(folder, a.layers)
        weights = os.path.join(folder, "model.safetensors")
        print(f"       {size / 1e9:.2f} GB of weights made in {time.time() - begin:.1f} s", flush=True)
        a.program = programs[0]
        evict(weights)
        show("not in the page cache", start(a, folder), size)
        print(f"       8 threads read that file at {read_rate(weights):.1f} GB/s" +
              (f", pinned memory goes to the GPU at {rate:.1f} GB/s" if a.device == "cuda" and (rate := bus_rate()) else ""), flush=True)
        for a.program in programs:
            runs = [start(a, folder) for _ in range(a.runs)]
            for run in runs:
                show(f"{a.program} from the page cache", run, size)
            median = statistics.median(r[0] for r in runs)
            bad = [r for r in runs if r[2]]
            ok = not bad and median <= TARGET_S
            failed += not ok
            print(f"{'ok    ' if ok else 'FAILED'} {a.program}: start to first token {median:.2f} s, at most {TARGET_S} "
                  f"{bad[0][3].strip() if bad else ''}", flush=True)
    finally:
        shutil.rmtree(folder)
    print(f"{len(programs) - failed} passed, {failed} failed, 0 skipped")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
