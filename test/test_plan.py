"""Tests of toka plan: the table, the JSON object, refused arguments, and the README's example. Run through test/run.sh."""
import json
import os
import re
import subprocess

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOKA = os.environ.get("TOKA_BINARY", os.path.join(ROOT, "toka"))
ENV = {k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}


def plan(*args, status=0, cwd=ROOT):
    r = subprocess.run([TOKA, "plan", *args], env=ENV, cwd=cwd, capture_output=True, timeout=60)
    assert r.returncode == status, r.stderr.decode()
    return r.stdout.decode(), r.stderr.decode()


def test_readme():
    with open(os.path.join(ROOT, "README.md")) as f:
        command, output = re.search(r"```sh\n(./toka plan [^`]*)```\n\n```text\n(.*?)```", f.read(), re.S).groups()
    assert plan(*command.replace("\\\n", " ").split()[2:])[0] == output
    assert max(map(len, output.splitlines())) <= 100


def test_readme_share_of_the_measured_rate():
    with open(os.path.join(ROOT, "README.md")) as f:
        text = f.read()
    rate, share, flags = re.search(r"the ([\d,]+)\s+tok/s of the first lines are (\d+) % of what it says\s+for\s+`(.*?)`", text).groups()
    best = json.loads(plan(*flags.split(), "--json")[0])["recommended"]
    assert f"it samples {rate} tokens a second in the shape of Llama-3.2-1B" in " ".join(text.split()[:60])
    assert round(100 * int(rate.replace(",", "")) / best["workload"]["output_tokens_per_second"]) == int(share)


def test_table_equals_the_json_object():
    args = ["-m", "llama-3.1-8b", "--gpus", "4", "--gpu", "a100-40g", "--max-model-len", "8192", "--input-len", "1000", "--output-len",
            "500"]
    rows = [line.split() for line in plan(*args)[0].splitlines() if re.match(r" +\d+ +\d+ +\d+ ", line)]
    v = json.loads(plan(*args, "--json")[0])
    assert len(rows) == len(v["splits"]) == 6 and v["gpu"]["source"] == "datasheet"
    for row, s in zip(rows, v["splits"]):
        assert [int(x) for x in row[:3]] == [s["tensor_parallel_size"], s["pipeline_parallel_size"], s["data_parallel_size"]]
        assert row[3] == f"{s['weight_bytes'] / 1e9:.1f}" and row[5] == f"{s['kv_tokens']:,}"
        assert row[6] == f"{s['kv_tokens'] / 8192:.1f}" and row[7] == f"{s['workload']['running']:,}"
        assert s["workload"]["tokens_per_second"] == pytest.approx(3 * s["workload"]["output_tokens_per_second"])
        sequence_seconds = s["workload"]["output_tokens_per_second"] * s["workload"]["step_ms"]
        assert sequence_seconds == pytest.approx(1000 * s["workload"]["running"], rel=1e-5)
    best = max(v["splits"], key=lambda s: s["workload"]["output_tokens_per_second"])
    assert v["recommended"]["workload"]["output_tokens_per_second"] > best["workload"]["output_tokens_per_second"] / 1.03
    assert "--max-model-len 8192" in v["recommended"]["flags"] and "splits over the GPUs" in v["note"]


def test_experts_and_formats():
    v = json.loads(plan("-m", "gpt-oss-120b", "--gpu", "H100", "--gpus", "4", "--json")[0])
    assert v["formats"] == "MXFP4 and bf16" and v["weight_bytes"] == pytest.approx(65.2e9, rel=0.01)
    assert v["n_active_parameters"] == pytest.approx(5.7e9, rel=0.02)  # with the embedding
    assert [round(e["used"], 1) for e in v["experts"][:2]] == [4.0, 28.7]
    s = v["recommended"]
    a_gpu = s["tensor_parallel_size"] * s["pipeline_parallel_size"]
    assert v["experts"][-1]["bytes_per_gpu"] == pytest.approx(36 * 128 * 3 * 2880 * 2880 / 32 * 17 / a_gpu, rel=0.001)
    text = plan("-m", "gpt-oss-120b", "--gpu", "H100", "--gpus", "4")[0]
    assert "65.2 GB as MXFP4 and bf16" in text and re.search(r"4 of 128 experts a row: used in a layer +4\.0 +28\.7 ", text)
    assert "would be" not in text  # 4 ranks: an expert is cut between its blocks of 32 columns
    dense = plan("-m", "llama-3.1-8b")[0]
    assert "experts" not in dense and "for each token" not in dense and "16.1 GB as bf16" in dense


def test_what_the_start_refuses_is_left_out():
    for model, missing in (("deepseek-v2-lite", "multi-head latent attention (MLA)"), ("mixtral-8x7b", "experts"), ("olmo-2-7b", "norms behind attention and MLP")):
        args = ["-m", model, "--gpus", "4", "--gpu", "H200"]
        text, v = plan(*args)[0], json.loads(plan(*args, "--json")[0])
        lines = [f"tensor parallel size {size}: the GPU does not have {missing} over several tensor ranks" for size in (2, 4)]
        if model != "olmo-2-7b":
            lines.append("expert parallel: toka has no expert ranks; a GPU has all experts of its layers")
        assert v["not_possible"] == lines and all(f"not possible: {line}\n" in text for line in lines)
        assert {(s["tensor_parallel_size"], s["pipeline_parallel_size"]) for s in v["splits"]} == {(1, 1), (1, 2), (1, 4)}
        assert "--tensor-parallel-size" not in v["recommended"]["flags"]
    for model, needed in (("mixtral-8x7b", "experts need"), ("deepseek-v2-lite", "multi-head latent attention (MLA) needs")):
        said = plan("-m", model, "--gpu", "A100-80G", "--gpus", "4")[0]
        assert f"does not run this model on A100-80G: {needed} a GPU of compute capability 9.0\n" in said


def test_states_take_half_of_the_memory():
    args = ["-m", "qwen3.5-9b", "--gpu", "H100", "--gpus", "2"]
    text, v = plan(*args)[0], json.loads(plan(*args, "--json")[0])
    assert "8,448 tokens a step; states take at most half of its memory\n" in text
    assert all(s["fits"] and 100 < s["max_num_seqs"] < 8192 for s in v["splits"]) and len(v["splits"]) == 3
    refused = plan(*args, "--max-num-seqs", "8192", status=1)[1]
    assert re.search(r"GB of weights, \d+ GB for the states of --max-num-seqs 8192 sequences and a sequence of 865 tokens do not fit on 2 x H100", refused)
    rows = {r["name"]: r for r in json.loads(plan("-m", "qwen3.5-9b", "--batch-size", "16", "--max-model-len", "4096", "--json")[0])["memory"]}
    assert rows["states"]["bytes"] == 16 * 2 * 24 * (32 * 128 * 128 + 3 * 8192) * 4 and rows["K and V"]["bytes"] == 16 * 4096 * 8 * 4 * 512 * 2
    assert "4096 tokens * 8 layers" in rows["K and V"]["formula"]


def test_rate():
    args = ["-m", "llama-3.1-8b", "--request-rate", "100", "--goodput", "ttft:500", "itl:50", "--gpu-price", "3.0"]
    text, v = plan(*args)[0], json.loads(plan(*args, "--json")[0])
    best = v["recommended"]
    assert best["tensor_parallel_size"] * best["pipeline_parallel_size"] * best["data_parallel_size"] == v["gpus"] > 1
    assert best["holds"] and best["capacity_requests_per_second"] > 100 and best["ttft_ms"] < best["ttft_p99_ms"] < 500
    assert best["itl_p99_ms"] < 50 and 99 <= best["goodput_requests_per_second"] <= 100
    assert v["cost_per_day"] == pytest.approx(72 * v["gpus"])
    assert v["cost_per_million_output_tokens"] == pytest.approx(v["cost_per_day"] / (86400 * 100 * 150) * 1e6)
    assert v["cost_per_million_tokens"] == pytest.approx(v["cost_per_day"] / (86400 * 100 * 865) * 1e6)
    assert "100 requests a second, 8,640,000 a day, TTFT at most 500 ms, ITL at most 50 ms" in text
    assert f"fewest: {v['gpus']} x H100: {best['flags']}" in text and f"{v['cost_per_day']:.2f} a day" in text
    assert "Poisson arrivals" in text and "toka help plan" in text
    # one GPU less does not hold it; a day's number is the same rate; limits may stand in one word
    out, err = plan(*args, "--gpus", str(v["gpus"] - 1), status=1)
    assert out == "" and f"100 requests a second, TTFT at most 500 ms, ITL at most 50 ms are too many for {v['gpus'] - 1} x H100, " in err
    assert err.startswith("toka: --request-rate: 100 requests")
    day = ["-m", "llama-3.1-8b", "--requests-per-day", "8.64e6", "--goodput", "ttft:500,itl:50", "--gpu-price", "3", "--json"]
    assert json.loads(plan(*day)[0]) == v
    # the goodput's words end where other words begin
    words = ["--request-rate", "100", "--goodput", "ttft:500", "itl:50", "llama-3.1-8b", "--gpu-price", "3", "--json"]
    assert json.loads(plan(*words)[0]) == v
    loose = json.loads(plan("-m", "llama-3.1-8b", "--request-rate", "1", "--json")[0])
    assert loose["gpus"] == 1 and loose["cost_per_day"] is None


def test_batch_memory():
    args = ["-m", "llama-3.1-405b", "--batch-size", "4", "--max-model-len"]
    text = plan(*args, "8192")[0]
    assert re.search(r"^weights +811\.70 +755\.95  405853388800 parameters as bf16$", text, re.M)
    assert re.search(r"^K and V +16\.91 +15\.75  4 sequences \* 8192 tokens \* 126 layers \* 8 kv heads \* \(128 \+ 128\) \* 2 bytes$", text, re.M)
    assert re.search(r"^K and V +270\.58 +252\.00  ", plan(*args, "131072")[0], re.M)
    v = json.loads(plan(*args, "8192", "--json")[0])
    assert [r["name"] for r in v["memory"]] == ["weights", "K and V", "activations", "in- and output", "tables, driver"]
    assert v["least_gpus"] == 12 and "at least 12 x H100 hold 32768 tokens" in text
    for row in v["memory"][1:3]:  # the formulas give the numbers
        letters = {"E": 16384, "H": 128, "K": 8, "D": 128, "F": 53248}
        formula = re.sub(r"(?<=[\d)A-Z]) (?=[A-Z(])", " * ", re.sub(r"\b(sequences|tokens|layers|kv heads|bytes|rows)\b", "", row["formula"]).strip())
        formula = re.sub(r" +", " ", formula).replace("* *", "*")
        assert eval(formula, letters) == row["bytes"], formula
    windows = plan("-m", "gemma-3-27b-it", "--gpu", "H200", "--batch-size", "16", "--max-model-len", "32768")[0]
    assert re.search(r"^K and V +42\.95 +40\.00  16 sequences \* 32768 tokens \* 10 layers \* ", windows, re.M)
    assert re.search(r"^K and V, windows +11\.45 +10\.66  \(16 sequences \* 18 \+ 8448 / 64\) pages \* 64 tokens \* 52 layers \* ", windows, re.M)
    assert "at least 1 x H200 hold 524288 tokens of K and V, with --max-num-seqs 16\n" in windows
    fp8 = plan("-m", "llama-3.1-8b", "--kv-cache-dtype", "fp8", "--batch-size", "4", "--max-model-len", "8192")[0]
    assert re.search(r"^K and V +2\.16 +2\.02  4 sequences \* 8192 tokens \* 66048 bytes in 32 layers$", fp8, re.M)
    assert "do not hold them" in plan("-m", "llama-3.1-405b", "--gpu", "L4", "--batch-size", "64", "--max-model-len", "131072")[0]


def test_support_is_said():
    said = plan("-m", "command-r7b-12-2024", "--gpus", "2")[0]
    assert "if the GPU half, which this build is without, has its formats and layers" in said or "runs this model on the CPU only" in said


def test_models_lists_formats():
    rows = subprocess.run([TOKA, "models"], env=ENV, cwd=ROOT, capture_output=True, timeout=60).stdout.decode().splitlines()
    row = {r.split()[0]: r for r in rows}
    assert rows[0].split()[:5] == ["name", "hub", "id", "weights", "GB"]
    assert re.search(r" 671\.03 B +67\d\.\d\d  FP8 and bf16 +70272 ", row["deepseek-v3"])
    assert re.search(r" 6\.74 B +13\.48  bf16 +524288 ", row["llama-2-7b"])


def test_a_folder_needs_no_weights(tmp_path):
    with open(f"{ROOT}/test/model/config.json") as f:
        config = json.load(f)
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = ["--json", "--input-len", "100", "--output-len", "50"]
    v, embedded = (json.loads(plan(*args, *more)[0]) for more in (["-m", str(tmp_path)], []))
    assert v["n_parameters"] == embedded["n_parameters"] and v["splits"] == embedded["splits"]
    assert plan("-m", str(tmp_path / "none"), status=1)[1].startswith("toka: ")


def test_models_file(tmp_path):
    (tmp_path / "m.txt").write_text('tiny nobody/tiny - {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, '
                                    '"num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 500, "max_position_embeddings": 512}\n')
    args = ["--models-file", str(tmp_path / "m.txt"), "--json", "--gpus", "8", "--input-len", "10", "--output-len", "10"]
    v, by_id = (json.loads(plan("-m", m, *args)[0]) for m in ("tiny", "nobody/tiny"))
    assert v == by_id and len(v["not_possible"]) == 3  # tp 8; pp 4 and pp 8 with 2 layers
    splits = {(s["tensor_parallel_size"], s["pipeline_parallel_size"]) for s in v["splits"]}
    assert splits == {(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)}


def test_error_names_the_number_of_gpus_needed():
    out, err = plan("-m", "llama-3.1-70b", "--gpu", "H100", status=1)
    assert out == "" and err.count("\n") == 1
    least = int(re.search(r"at least (\d+) are needed", err)[1])
    plan("-m", "llama-3.1-70b", "--gpu", "H100", "--gpus", str(least))
    assert 1 < least < 5
    prime = ["--gpu", "L4", "--gpus", "61", "--gpu-memory-utilization", "0.5"]  # a prime number larger than the number of layers
    assert re.search(r"61 x L4, however they are split; on \d of them they do", plan("-m", "llama-3.1-8b", *prime, status=1)[1])
    small = ["-m", "llama-3.1-70b", "--gpu", "L4", "--gpu-memory-utilization", "0.05"]
    assert "nor do they on any number of them up to 64" in plan(*small, status=1)[1]


def test_default_lengths():
    for args, lengths in (([], (715, 150)), (["--input-len", "900"], (900, 124)), (["--output-len", "1000"], (24, 1000)),
                          (["--max-model-len", "100"], (50, 50))):
        v = json.loads(plan("-m", "test/model", "--json", *args)[0])  # the model's limit is 1,024 tokens
        assert (v["input_len"], v["output_len"]) == lengths, args


def test_fp8_before_hopper():
    """Before compute capability 9.0 FP8 weights become bf16, and there are no FP8 K and V."""
    model = ["-m", "llama-3.1-8b-instruct-fp8"]
    bytes_on = {gpu: json.loads(plan(*model, "--gpu", gpu, "--json")[0])["weight_bytes"] for gpu in ("H100", "A100-80G", "L4")}
    bf16 = json.loads(plan("-m", "llama-3.1-8b-instruct", "--gpu", "A100-80G", "--json")[0])
    assert bytes_on["A100-80G"] == bytes_on["L4"] == bf16["weight_bytes"] > 1.7 * bytes_on["H100"]
    text = plan(*model, "--gpu", "A100-80G")[0]
    assert "16.1 GB as FP8 and bf16 (A100-80G: FP8 becomes bf16, as before compute capability 9.0)" in text
    assert "becomes" not in plan(*model)[0] + plan("-m", "llama-3.1-8b", "--gpu", "L4")[0]
    for gpu, has in (("A100-80G", "8.0"), ("l4", "8.9")):
        refused = plan("-m", "llama-3.1-8b", "--gpu", gpu, "--kv-cache-dtype", "fp8", status=1)[1]
        assert "--kv-cache-dtype fp8: on a GPU it needs compute capability 9.0; " in refused and refused.endswith(f" has {has}\n")


def test_fp8_kv():
    def token_bytes(*flags):
        return json.loads(plan("-m", "llama-3.1-8b", "--json", *flags)[0])["splits"][0]["kv_bytes_per_token"]
    fp8 = ["--kv-cache-dtype", "fp8"]
    assert token_bytes() == 32 * 8 * 128 * 4 and token_bytes(*fp8) == 32 * 8 * (128 + 1) * 2
    assert token_bytes(*fp8, "--kv-cache-dtype-skip-layers", "0,31") == 2 * 8 * 128 * 4 + 30 * 8 * 129 * 2


def test_more_gpus_than_a_host_has():
    """toka runs on one host: the last line says how many servers of which size more GPUs are."""
    last = [plan("-m", model, "--gpus", gpus)[0].splitlines()[-1]
            for model, gpus in (("llama-3.1-8b", "29"), ("llama-3.1-8b", "8"), ("llama-3.1-405b", "16"), ("llama-3.1-405b", "47"))]
    assert "of one host; four H200" in last[1] and "balancer" not in last[1]
    assert "with 8 GPUs a host these are 4 servers behind a load balancer, each with --data-parallel-size 8 or less" in last[0]
    assert "needs one with 16 GPUs, and most have 8 at most" in last[2] and "needs one with 47 GPUs" in last[3]
    text = plan("-m", "llama-3.1-8b", "--samples", "1000", "--request-rate", "8")[0]
    assert "fewest: 29 x H100" in text and "these are 4 servers" in text


@pytest.mark.parametrize("args, words", [
    (["--gpu", "H300"], "expected B200, H200, H100, A100-80G"), (["-m", "no-such-model"], "no-such-model: no such folder"),
    (["--gpus", "0"], "--gpus: 0"), (["--gpus", "65"], "--gpus: 65, expected 1 to 64"), (["--max-model-len", "200000"], "131072"),
    (["--input-len", "-1"], "--input-len: -1"), (["--output-len", "200000"], "longest sequence"), (["--samples", "0"], "--samples"),
    (["--gpu-memory-utilization", "2"], "--gpu-memory-utilization"), (["--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "at least"),
    (["--request-rate", "0"], "--request-rate: 0, expected more than 0"), (["--request-rate", "x"], "'x' is not a number"), (["--request-rate", "inf"], "--request-rate: inf"),
    (["--requests-per-day", "-5"], "--requests-per-day: -5"), (["--request-rate", "1", "--requests-per-day", "9"], "expected one of them"),
    (["--gpu-price", "0"], "--gpu-price: 0, expected more"), (["--goodput", "ttft:500"], "--goodput needs --request-rate"), (["--gpu-price", "3"], "--gpu-price needs --request-rate"),
    (["--request-rate", "1", "--goodput", "ttft:0"], "--goodput: 'ttft:0', expected ttft, itl, tpot or e2el"),
    (["--request-rate", "1", "--batch-size", "2"], "--batch-size"), (["--batch-size", "-2"], "--batch-size: -2"),
    (["--request-rate", "1", "--goodput", "ttft:1", "itl:50"], "--goodput: ttft:1: a request that is alone takes "),
    (["--requests-per-day", "1e6", "--goodput", "itl:0.1"], "--goodput: itl:0.1: a request that is alone takes "),
    (["--request-rate", "1", "--goodput", "e2el:20"], "--goodput: e2el:20: a request that is alone takes "),
    (["--input-len", "0"], "--input-len: 0, expected 1 or more"), (["--output-len", "0"], "--output-len: 0, expected 1 or more"),
    (["--request-rate", "8", "--input-len", "1000000"], "--input-len: 1000000, expected at most 131071: the longest sequence has 131072 tokens"),
    (["--output-len", "200000"], "toka: --output-len: 200000, expected at most 131071: "), (["--input-len", "131000", "--output-len", "73"], "--input-len 131000 and --output-len 73: expected at most 131072 in all"),
    (["--request-rate", "8", "--gpus", "2", "--samples", "9000"], "--samples: 9000, expected at most 8192: so many sequences run at once on a replica of 2 x H100"),
    (["--request-rate", "1", "--gpus", "1", "--samples", "8000", "--output-len", "4000"], "--samples: 8000, expected at most "),
    (["-m", "Qwen/Qwen3-06B"], "; did you mean Qwen/Qwen3-0.6B?"), (["-m", "qwen3-06b"], "; did you mean qwen3-0.6b?"),
    (["-m", "llama-3.1-405b", "--gpu", "L4", "--request-rate", "1"], "--request-rate: 1 requests a second are too many for 64 x L4, which compute at most 0."),
    (["--request-rate", "1e5"], "--request-rate: 100000 requests a second are too many for 64 x H100, which compute at most "),
    (["--requests_per_day=1e10"], "--requests_per_day: 115741 requests a second are too many for 64 x H100, which compute at most "),
    (["--request-rate", "30", "--goodput", "ttft:30", "--gpus", "1", "-m", "llama-3.1-8b"], "30 ms are too many for 1 x H100, where "),
    (["--batch-size", "0"], "--batch-size: 0, expected 1 or more"),
    (["--request-rate", "1", "--gpu", "L4", "-m", "llama-3.1-405b", "--gpus", "2"], "do not fit on 2 x L4"),
    (["--kv-tokens", "5"], "not for this command"), (["--kv-cache-dtype", "fp4"], "--kv-cache-dtype"), (["--max-num-seqs", "-1"], "--max-num-seqs"),
])
def test_refused(args, words):
    model = [] if "-m" in args else ["-m", "llama-3.2-1b"]
    out, err = plan(*model, *args, status=1)
    assert out == "" and words in err and err.count("\n") == 1


def test_help_lists_every_gpu():
    text = subprocess.run([TOKA, "--help-all"], env=ENV, capture_output=True, timeout=60).stdout.decode()
    names = re.split(", | or ", re.search(r"expected (.*)", plan("--gpu", "x", status=1)[1])[1])
    assert len(names) > 7
    for name in names:
        assert re.search(rf"--gpu NAME .*{name}", text)
        assert json.loads(plan("-m", "smollm2-135m", "--gpu", name, "--json")[0])["gpu"]["name"] == name
    assert "toka plan" in text and "toka bench plan" in text


def test_plan_check(tmp_path):
    """Runs test/plan_check.py on start-up lines like those of a real run."""
    s = next(s for s in json.loads(plan("-m", "llama-3.1-8b", "--gpus", "2", "--gpu", "H200", "--json")[0])["splits"]
             if s["tensor_parallel_size"] == 2)
    script, log = os.path.join(ROOT, "test", "plan_check.py"), tmp_path / "log"
    for kv, weights, rest, status in ((1, 1, 0.8, 0), (0.9, 1, 0.8, 1), (1, 1.02, 0.8, 1), (1, 1, 1.1, 1)):
        log.write_text("toka: llama-3.1-8b on 2 x NVIDIA H200, 150 GB, loaded in 3.1 s; "
                       f"KV cache {int(s['kv_tokens'] * kv)} tokens, 1.0 sequences of 1 tokens; GB on a GPU: "
                       f"weights {s['weight_bytes'] * weights / 1e9:.3f}, KV 1.000, all else {s['scratch_bytes'] * rest / 1e9:.3f}\n")
        r = subprocess.run(["python3", script, f"llama-3.1-8b:tp=2,pp=1:{log}"], env={**ENV, "TOKA_BINARY": TOKA}, cwd=ROOT,
                           capture_output=True)
        assert r.returncode == status, r.stdout.decode() + r.stderr.decode()


# ---- Drafts ----

def planned(*args):
    return json.loads(plan(*args, "--json")[0])


def drafts(*args):
    v = planned("-m", "llama-3.1-8b", "--gpu", "H200", "--input-len", "128", *args)
    return v, {row["sequences"]: row for row in v["drafts"]}


def test_speed_up_by_drafts():
    """As long as reading the weights takes longer than the rows' arithmetic, drafts cost nothing; beyond it they cost their rows."""
    ngram = ["--speculative-config", '{"method":"ngram"}']
    v, rows = drafts(*ngram, "--acceptance", "0.7")
    for k, up in rows[1]["speed_up"].items():
        assert abs(up - sum(0.7 ** i for i in range(int(k) + 1))) < 0.02
    assert rows[1]["best"] == 16 and rows[1024]["best"] == 0 and rows[64]["best"] in (2, 3)
    # 1,024 sequences: twice the rows take twice as long, but K and V are read once
    assert 1.7 / 2 < rows[1024]["speed_up"]["1"] < 1.7 / 2 * 1.2
    assert abs(drafts(*ngram, "--acceptance", "1")[1][1]["speed_up"]["4"] - 5) < 0.05
    assert v["recommended"]["weight_bytes"] == planned("-m", "llama-3.1-8b", "--gpu", "H200")["recommended"]["weight_bytes"]
    assert planned("-m", "llama-3.1-8b")["drafts"] == []


def test_a_draft_model_that_is_not_there():
    r = subprocess.run([TOKA, "plan", "-m", "llama-3.1-8b", "--draft-model", "/nowhere"], capture_output=True, text=True)
    assert r.returncode == 1 and r.stderr.startswith("toka: --draft-model: /nowhere") and r.stderr.count("\n") == 1, r.stderr


def test_draft_model_counts_in_time_and_memory():
    v, rows = drafts("--draft-model", "llama-3.2-1b", "--gpus", "2")
    alone, _ = drafts("--gpus", "2")
    small = planned("-m", "llama-3.2-1b", "--gpu", "H200", "--input-len", "128")["recommended"]
    for split in v["splits"]:
        same = [s for s in alone["splits"] if s["tensor_parallel_size"] == split["tensor_parallel_size"] and s["pipeline_parallel_size"] == 1][0]
        assert split["pipeline_parallel_size"] == 1
        assert abs(split["weight_bytes"] / (same["weight_bytes"] + small["weight_bytes"]) - 1) < 1e-3  # beside rank 0, not the largest
        assert split["kv_bytes_per_token"] == same["kv_bytes_per_token"] + small["kv_bytes_per_token"]
    assert any("a draft model has no stages beside it" in text for text in v["not_possible"])
    v, rows = drafts("--draft-model", "llama-3.2-1b")
    # one sequence: the times are those of reading the weights, without the embedding, which is not read where it is not tied
    whole, part = 2 * (8.03e9 - 128256 * 4096), small["weight_bytes"]
    assert abs(rows[1]["speed_up"]["3"] - (1 + 0.7 + 0.49 + 0.343) / (1 + 3 * part / whole)) < 0.05


@pytest.mark.parametrize("args, words", [
    (["--acceptance", "0.5"], "--acceptance: of which drafts?"), (["--draft-model", "qwen3-0.6b"], "its vocabulary has 151936 ids"),
    (["--num-speculative-tokens", "4", "--acceptance", "1.5"], "--acceptance: 1.5, expected more than 0 and at most 1"),
    (["--num-speculative-tokens", "4", "--request-rate", "3"], "not beside a rate of requests")])
def test_plan_refuses_drafts(args, words):
    assert words in plan("-m", "llama-3.1-8b", *args, status=1)[1]
