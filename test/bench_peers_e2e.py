#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs one dataset with toka and with other engines on the same GPU: output tokens per second and ratios.

    python3 test/make_dataset.py monkeys m.jsonl --samples 96
    python3 test/bench_peers_e2e.py m.jsonl [--model llama-3.2-1b] [--seconds 60] [--engines toka,vllm,toka-part,hf-cb,hf-static]
        [--vllm-args '{"max_num_seqs": 4096}'] [-- TOKA FLAGS]

A line of the dataset is {"prompt_token_ids": [...] or "prompt": "...", "output_lengths": [l1, l2, ...]}; a text prompt needs
--tokenizer FILE. All engines get the same ids, a model of models.txt with random bf16 weights, and sampling at --temp. Each sample has
a forced length: end-of-sequence tokens are ignored. The engines run one after the other, each in its own process.

    toka        toka bench throughput --dummy-weights: the whole dataset
    vllm        vLLM's offline API, prefix caching on, load_format dummy: the first samples of the file, as many as make
                --vllm-rate times --seconds output tokens
    toka-part   toka on the samples of hf-cb
    hf-cb       transformers' continuous batching with its defaults, except --hf-batch-tokens: --hf-samples samples, taken from the
                lines in turn. If they take more than twice --seconds, the run stops there; the tokens generated until then count,
                those of unfinished samples too, and the note says so
    hf-static   transformers' generate() on batches of up to --hf-batch samples with prompts of equal length (so no padding) and
                outputs of similar length; the largest batches first, until --seconds are over

A time begins when the model is loaded and warm, and ends with the last token. The ratio compares with toka on the same samples if
this ran, else with toka on the whole file. An engine that is not installed is skipped with a message. If an engine fails, this is
reported, and the exit status is 1.
"""
import argparse
import datetime
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ENGINES = ["toka", "vllm", "toka-part", "hf-cb", "hf-static"]
DEVICE = "cuda"
PACKAGE = {"vllm": "vllm", "hf-cb": "transformers", "hf-static": "transformers"}


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("dataset")
    p.add_argument("--model", default="llama-3.2-1b", help="a name of models.txt")
    p.add_argument("--engines", default=",".join(ENGINES))
    p.add_argument("--seconds", type=float, default=60, help="for each peer")
    p.add_argument("--temp", type=float, default=0.6)
    p.add_argument("--vllm-rate", type=float, default=25000, help="expected output tokens per second of vLLM; sets its number of samples")
    p.add_argument("--vllm-args", type=json.loads, default={}, help="extra arguments of vllm.LLM, as a JSON object")
    p.add_argument("--hf-batch", type=int, default=256)
    p.add_argument("--hf-samples", type=int, default=96, help="for hf-cb and toka-part")
    p.add_argument("--hf-batch-tokens", type=int, help="tokens of a step of hf-cb; default: chosen by transformers")
    p.add_argument("--tokenizer", help="tokenizer.json for text prompts")
    p.add_argument("--json", action="store_true", help="one line of JSON per engine instead of the table")
    p.add_argument("--inside", help=argparse.SUPPRESS)
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    return p.parse_args(sys.argv[1:at]), sys.argv[at + 1:]


# ---- The dataset ----

def read_dataset(path, tokenizer):
    """[(ids, lengths)], one for each line."""
    rows, encode = [], None
    for line in open(path, encoding="utf-8"):
        row = json.loads(line)
        ids = row.get("prompt_token_ids")
        if ids is None:
            if encode is None:
                if not tokenizer:
                    sys.exit("bench_peers_e2e.py: the dataset has lines of text: --tokenizer FILE")
                from tokenizers import Tokenizer
                encode = Tokenizer.from_file(tokenizer).encode
            ids = encode(row["prompt"]).ids
        rows.append((ids, row["output_lengths"]))
    return rows


def samples(rows, n_out=float("inf")):
    """[(ids, length)] of the first samples of the file, until their lengths sum up to n_out."""
    out = []
    for ids, lengths in rows:
        for length in lengths:
            if n_out <= 0:
                return out
            out.append((ids, length))
            n_out -= length
    return out


def round_robin(rows, n):
    """[(ids, length)] of n samples: the first sample of each line, then the second of each line, ..."""
    n_rounds = max(len(lengths) for _, lengths in rows)
    return [(ids, lengths[k]) for k in range(n_rounds) for ids, lengths in rows if k < len(lengths)][:n]


def longest(work):
    return max(len(ids) + length for ids, length in work)


def config_of(name):
    """config.json of a model of models.txt, for transformers and vLLM."""
    for line in open(os.path.join(ROOT, "models.txt"), encoding="utf-8"):
        if line.startswith(f"{name} "):
            c = json.loads(line.split(maxsplit=3)[3])
            return {"model_type": c["architectures"][0].removesuffix("ForCausalLM").lower(), "hidden_act": "silu",
                    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, **c}
    sys.exit(f"bench_peers_e2e.py: {name}: not in models.txt")


def result(n_out, n_prompt, n, seconds, note):
    return {"samples": n, "prompt_tokens": n_prompt, "output_tokens": n_out, "seconds": seconds,
            "output_tokens_per_second": n_out / seconds, "note": note}


# ---- The engines: each function runs in its own process and returns a result ----

def run_toka_part(a, rows, flags):
    part = {}
    for ids, length in round_robin(rows, a.hf_samples):
        part.setdefault(tuple(ids), []).append(length)
    return run_toka(a, [(list(ids), lengths) for ids, lengths in part.items()], flags)


def run_toka(a, rows, flags):
    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "dataset.jsonl")
        with open(path, "w") as f:
            for ids, lengths in rows:
                f.write(json.dumps({"prompt_token_ids": ids, "output_lengths": lengths}) + "\n")
        p = subprocess.run([os.path.join(ROOT, "toka"), "bench", "throughput", "--json", "--dummy-weights", "-m", a.model, "--dataset",
                            path, "--temp", str(a.temp), *flags], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if p.returncode:
        sys.exit(f"toka ended with status {p.returncode}")
    v = json.loads(p.stdout)
    return result(v["total_output_tokens"], v["total_prompt_tokens"], v["num_samples"], v["elapsed_time"],
                  f"{100 * v['prefix_hit_share']:.1f} % of the prompts' tokens from the prefix tree, "
                  f"device idle {100 * v['idle_share']:.1f} %")


def run_vllm(a, rows):
    import vllm
    work = samples(rows, a.vllm_rate * a.seconds)
    with tempfile.TemporaryDirectory() as folder:
        json.dump(config_of(a.model), open(os.path.join(folder, "config.json"), "w"))
        llm = vllm.LLM(**{"model": folder, "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
                          "enable_prefix_caching": True, "max_model_len": longest(work) + 1, "gpu_memory_utilization": 0.9, **a.vllm_args})

        def go(part):
            params = [vllm.SamplingParams(temperature=a.temp, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in part]
            outs = llm.generate([{"prompt_token_ids": ids} for ids, _ in part], params, use_tqdm=False)
            return sum(len(o.outputs[0].token_ids) for o in outs)

        go([([7] * 40, 8)] * 8)  # warm-up with a prompt that the work does not contain
        begin = time.time()
        n_out = go(work)
        took = time.time() - begin
    if n_out != sum(n for _, n in work):
        sys.exit(f"vLLM made {n_out} tokens, expected {sum(n for _, n in work)}")
    return result(n_out, sum(len(ids) for ids, _ in work), len(work), took, f"vLLM {vllm.__version__}, prefix caching")


def hf_model(a):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as folder:
        json.dump(config_of(a.model), open(os.path.join(folder, "config.json"), "w"))
        config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config).eval()
    torch.set_default_dtype(torch.float32)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


def hf_sampling(a, **more):
    from transformers import GenerationConfig
    return GenerationConfig(do_sample=True, temperature=a.temp, top_k=0, top_p=1.0, pad_token_id=0, **more)


def hf_cb_go(manager, work, name, limit):
    """Runs the samples, for at most `limit` seconds: (finished outputs, seconds)."""
    begin, done = time.time(), []
    for i, (ids, n) in enumerate(work):
        manager.add_request(ids, request_id=f"{name}{i}", max_new_tokens=n, eos_token_id=-1)
    while len(done) < len(work) and time.time() - begin < limit and manager.is_running():
        one = manager.get_result(timeout=0.2)
        if one is not None and one.is_finished():
            done.append(one)
    took = time.time() - begin
    if any(o.error for o in done) or not (manager.is_running() or len(done) == len(work)):
        sys.exit("transformers: " + str(next((o.error for o in done if o.error), "the generation thread ended")))
    return done, took


def run_hf_cb(a, rows):
    import transformers
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints
    work = round_robin(rows, a.hf_samples)
    model = hf_model(a)
    hints = WorkloadHints(max_prompt_length=max(len(ids) for ids, _ in work), max_generated_length=max(n for _, n in work),
                          num_requests=len(work))
    sampling = hf_sampling(a, eos_token_id=-1, max_new_tokens=max(n for _, n in work))
    batching = ContinuousBatchingConfig(seed=0, max_batch_tokens=a.hf_batch_tokens)
    manager = model.init_continuous_batching(generation_config=sampling, continuous_batching_config=batching, workload_hints=hints)
    manager.warmup()
    manager.start()
    r = random.Random(0)
    # a warm-up with prompts that the work does not contain
    hf_cb_go(manager, [([r.randrange(3, 1000) for _ in ids], 8) for ids, _ in work[:16]], "warm", 60)
    done, took = hf_cb_go(manager, work, "", 2 * a.seconds)
    whole = len(done)
    manager.stop(block=True, timeout=30, hard_stop=True)  # puts the outputs of unfinished samples into the queue
    queue = manager.output_router.output_queue
    while not queue.empty():
        done.append(queue.get())
    manager.destroy()
    return result(sum(len(o.generated_tokens) for o in done), sum(len(o.prompt_ids) for o in done if o.generated_tokens), whole, took,
                  f"transformers {transformers.__version__}, {whole} of {len(work)} samples were done, "
                  f"attention {model.config._attn_implementation}")


def run_hf_static(a, rows):
    import torch
    import transformers
    by_length = {}
    for s in samples(rows):
        by_length.setdefault(len(s[0]), []).append(s)
    batches = []
    for same in by_length.values():
        same.sort(key=lambda s: s[1])
        batches += [same[i:i + a.hf_batch] for i in range(0, len(same), a.hf_batch)]
    batches.sort(key=len, reverse=True)  # large batches are the fastest
    model = hf_model(a)

    def go(batch, n):
        ids = torch.tensor([ids for ids, _ in batch], device=DEVICE)
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=hf_sampling(a, max_new_tokens=n)).cpu()
        if out.shape[1] != ids.shape[1] + n:
            sys.exit(f"transformers made {out.shape[1] - ids.shape[1]} tokens a sample, expected {n}")

    go(batches[0], 2)
    n_out = n_prompt = n = 0
    begin = time.time()
    for batch in batches:
        go(batch, max(length for _, length in batch))
        n, n_out, n_prompt = n + len(batch), n_out + sum(length for _, length in batch), n_prompt + sum(len(p) for p, _ in batch)
        if time.time() - begin > a.seconds:
            break
    return result(n_out, n_prompt, n, time.time() - begin,
                  f"transformers {transformers.__version__}, batches of {min(map(len, batches))} to {max(map(len, batches))}, "
                  f"attention {model.config._attn_implementation}")


# ---- All of them ----

def gpu_name():
    try:
        p = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], stdout=subprocess.PIPE, text=True)
        return p.stdout.strip().split("\n")[0] or "no GPU"
    except OSError:
        return "no GPU"


def inside(a, flags):
    rows = read_dataset(a.dataset, a.tokenizer)
    run = {"toka": lambda: run_toka(a, rows, flags), "toka-part": lambda: run_toka_part(a, rows, flags), "vllm": lambda: run_vllm(a, rows),
           "hf-cb": lambda: run_hf_cb(a, rows), "hf-static": lambda: run_hf_static(a, rows)}[a.inside]
    print("\nRESULT " + json.dumps(run()), flush=True)


def main():
    a, flags = arguments()
    if a.inside:
        return inside(a, flags)
    found, failed = {}, []
    if not a.json:
        print(f"{datetime.date.today()}, {gpu_name()}, {a.model}, {os.path.basename(a.dataset)}")
        print(f"{'engine':10} {'samples':>8} {'prompt tok':>11} {'output tok':>11} {'s':>7} {'output tok/s':>13} {'toka is':>9}")
    for engine in a.engines.split(","):
        if engine in PACKAGE and importlib.util.find_spec(PACKAGE[engine]) is None:
            print(f"{engine:10} skipped: {PACKAGE[engine]} is not installed", file=sys.stderr if a.json else sys.stdout, flush=True)
            continue
        p = subprocess.run([sys.executable, os.path.abspath(__file__), "--inside", engine, *sys.argv[1:]], stdout=subprocess.PIPE,
                           text=True)
        line = next((line for line in p.stdout.splitlines() if line.startswith("RESULT ")), None)
        if line is None:
            failed.append(engine)
            print(f"{engine:10} failed with status {p.returncode}: {(p.stdout.strip().splitlines() or [''])[-1]}", flush=True)
            continue
        r = found[engine] = json.loads(line[7:])
        ours = found.get("toka-part" if engine == "hf-cb" and "toka-part" in found else "toka")
        ratio = ours["output_tokens_per_second"] / r["output_tokens_per_second"] if ours else float("nan")
        if a.json:
            print(json.dumps({"engine": engine, "gpu": gpu_name(), "model": a.model, **r, "toka_over_this": ratio}), flush=True)
        else:
            print(f"{engine:10} {r['samples']:8,} {r['prompt_tokens']:11,} {r['output_tokens']:11,} {r['seconds']:7.1f} "
                  f"{r['output_tokens_per_second']:13,.0f} {ratio:8.2f}x  {r['note']}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
