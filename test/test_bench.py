"""Tests of toka bench: its output, the length of each sample, and dummy weights, which need no file. Run through test/run.sh."""
import argparse
import csv
import json
import os
import random
import re
import signal
import subprocess
import time

import make_dataset
import model_weights
import pytest
from server import wait_handlers

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOKA = os.environ.get("TOKA_BINARY", os.path.join(ROOT, "toka"))
ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}, "TOKA_DEVICE": "cpu"}


def bench(*args, status=0, env={}):
    r = subprocess.run([TOKA, "bench", *args], env={**ENV, **env}, cwd=ROOT, capture_output=True, timeout=150)
    assert r.returncode == status, r.stderr.decode()
    return r.stdout.decode(), r.stderr.decode()


def dataset(tmp_path, lines):
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(tmp_path / "d.jsonl")


def ids(n, first=0):
    return [first] + [(i * 7) % 1000 for i in range(n - 1)]


def test_throughput_has_the_lines_of_vllm(tmp_path):
    d = dataset(tmp_path, [{"prompt_token_ids": ids(50), "output_lengths": [3, 1, 20] * 10},
                           {"prompt_token_ids": ids(33, 5), "output_lengths": [7]}, {"prompt": "Tom", "output_lengths": [2, 2]}])
    out, err = bench("throughput", "-m", "test/model", "--dataset", d, "--max-num-seqs", "8")
    lines = out.splitlines()
    assert re.fullmatch(r"Throughput: [\d.]+ requests/s, [\d.]+ total tokens/s, [\d.]+ output tokens/s", lines[0])
    assert re.match(r"toka: \S+ on .*, loaded in [\d.]+ s; KV cache \d+ tokens, 8\.0 sequences of \d+ tokens\n", err)
    assert re.search(r" tok/s, [1-9]\d* characters/s; ", err)
    _, err = bench("throughput", "-m", "test/model", "--dataset", d, "-v")
    assert err.count("KV cache ") == 1 and err.count("\ntoka: opened in ") == 1  # the start-up lines appear once
    n_prompt = int(re.fullmatch(r"Total num prompt tokens:  (\d+)", lines[1])[1])
    assert 83 < n_prompt < 90 and lines[2:] == ["Total num output tokens:  251"]
    out, _ = bench("throughput", "-m", "test/model", "--dataset", d, "--num-prompts", "2", "--json", "--temp", "0.6")
    v = json.loads(out)
    assert (v["num_requests"], v["num_samples"], v["total_prompt_tokens"], v["total_output_tokens"]) == (2, 31, 83, 247)
    assert 247 < v["total_output_characters"] < 247 * 8
    assert abs(v["output_characters_per_second"] * v["elapsed_time"] - v["total_output_characters"]) < 1
    assert v["total_num_tokens"] == 330 and v["elapsed_time"] > 0 and v["prefix_hit_share"] > 0.5
    assert abs(v["tokens_per_second"] * v["elapsed_time"] - 330) < 1 and abs(v["requests_per_second"] * v["elapsed_time"] - 2) < 0.01


def test_outputs_are_those_of_the_dataset(tmp_path):
    """output_token_ids replace the draws. Drafts are right where they equal the text: those from it as often as asked for, those of n-grams
    in a text that repeats, and so there are fewer steps."""
    text = [[(i * 37 + i // 9 + j) % 1000 for i in range(120)] for j in range(3)]
    lines = [{"prompt_token_ids": ids(20), "output_token_ids": text}]
    env = {"TOKA_DEBUG_DRAFTS": "1"}
    found = {}
    for rate in (None, 0, 0.7, 1):
        config = [] if rate is None else ["--speculative-config", json.dumps({"method": "synthetic", "synthetic_acceptance_rate": rate, "num_speculative_tokens": 4})]
        out, _ = bench("throughput", "-m", "test/model", "--dataset", dataset(tmp_path, lines), "--device", "cpu", "--json", *config, env=env)
        v = found[rate] = json.loads(out)
        assert v["total_output_tokens"] == 360
    assert found[None]["draft_tokens"] == 0 and found[0]["draft_tokens_accepted"] == 0 and found[0]["draft_tokens"] > 1000
    assert found[None]["draft_s"] == 0 < found[1]["draft_s"] < found[1]["elapsed_time"]
    assert found[1]["draft_tokens_accepted"] == found[1]["draft_tokens"] and found[1]["steps"] < 30 < 118 < found[None]["steps"]
    # of four drafts at 0.7, on average 0.7 + 0.49 + 0.343 + 0.2401 = 1.77 count
    assert 0.36 < found[0.7]["draft_tokens_accepted"] / found[0.7]["draft_tokens"] < 0.53
    lines = [{"prompt_token_ids": ids(20), "output_token_ids": [[5, 6, 7, 8, 9] * 20], "output_lengths": [100]}]
    out, _ = bench("throughput", "-m", "test/model", "--dataset", dataset(tmp_path, lines), "--device", "cpu", "--json", "--num-speculative-tokens", "8", env=env)
    v = json.loads(out)
    assert v["draft_tokens_accepted"] > 80 and v["steps"] < 25 and v["total_output_tokens"] == 100
    for bad, words in (({"output_token_ids": 5, "output_lengths": [2]}, "output_token_ids: expected a list of ids for each sample"),
                       ({"output_token_ids": [[1, 2]], "output_lengths": [3]}, "expected whole numbers, those of output_token_ids"),
                       ({"output_token_ids": [[1], 2]}, "output_token_ids: expected lists of ids"),
                       ({"output_token_ids": [[1, 99999]]}, "output_ids: 99999, expected 0 to 1023")):
        _, err = bench("throughput", "-m", "test/model", "--dataset", dataset(tmp_path, [{"prompt_token_ids": ids(20)} | bad]), "--device", "cpu", status=1)
        assert words in err


def test_lines_that_wait(tmp_path):
    """A line with "after" is submitted when that line has ended, so its prompt finds what it shares; one with arrival_s not before then."""
    answer = [(i * 37 + 5) % 1000 for i in range(60)]
    lines = [{"prompt_token_ids": ids(20), "output_token_ids": [answer, answer]}, {"prompt_token_ids": ids(7), "output_lengths": [3]},
             {"prompt_token_ids": ids(20) + answer + [9] * 10, "output_lengths": [5], "after": 1}]
    run = lambda lines, **k: bench("throughput", "-m", "test/model", "--dataset", dataset(tmp_path, lines), "--device", "cpu", "--json", **k)
    v = json.loads(run(lines)[0])
    assert v["total_output_tokens"] == 128 and v["steps"] >= 65 and v["prefix_hit_share"] > 0.5  # 64 of 117, or more
    v = json.loads(run([{k: line[k] for k in line if k != "after"} for line in lines])[0])
    assert v["total_output_tokens"] == 128 and v["steps"] < 63 and v["prefix_hit_share"] < 0.3
    lines[1]["arrival_s"], lines[2]["arrival_s"] = 0.25, 0.5
    v = json.loads(run(lines)[0])
    assert v["total_output_tokens"] == 128 and v["elapsed_time"] > 0.5 and v["prefix_hit_share"] > 0.5
    for bad, words in (({"after": 2}, "line 2: after: expected the number of an earlier line"), ({"after": 0}, "line 2: after: expected"),
                       ({"after": "1"}, "line 2: after: expected"), ({"arrival_s": -1}, "line 2: arrival_s: expected a number of seconds"),
                       ({"arrival_s": 0.2}, "line 2: arrival_s: expected")):
        _, err = run([{"arrival_s": 0.3, **lines[0]}, {"prompt_token_ids": ids(7), "output_lengths": [3]} | bad], status=1)
        assert words in err, err
    with open(dataset(tmp_path, lines[:1]), "a") as f:  # blank lines count
        f.write("\n" + json.dumps(lines[2] | {"after": 2}) + "\n")
    _, err = bench("throughput", "-m", "test/model", "--dataset", f.name, "--device", "cpu", status=1)
    assert "line 3: after: expected the number of an earlier line" in err


def test_agent_dataset(tmp_path):
    """Prompts that go on begin with the prompt and the answer of the line that they wait for; equal hashes have equal ids."""
    trace = os.path.join(make_dataset.DATA, "traces", "mooncake_conversation.jsonl")
    if not os.path.exists(trace):
        pytest.skip("no public test data")
    args = argparse.Namespace(requests=138, plain=False)
    lines = list(make_dataset.agent(args, random.Random(0)))
    waiting = [(line, lines[line["after"] - 1]) for line in lines if "after" in line]
    assert len(lines) == 138 and len(waiting) == 3
    for line, before in waiting:
        text = before["prompt_token_ids"] + before["output_token_ids"][0]
        assert line["prompt_token_ids"][: len(text)] == text and line["arrival_s"] >= before["arrival_s"]
    first = lines[0]["prompt_token_ids"]
    assert all(line["prompt_token_ids"][:512] == first[:512] for line in lines if len(line["prompt_token_ids"]) >= 512)
    args.requests = 9
    assert list(make_dataset.agent(args, random.Random(0))) == list(make_dataset.agent(args, random.Random(0)))
    args.plain = True
    assert all(set(line) == {"prompt_token_ids", "output_lengths"} for line in make_dataset.agent(args, random.Random(0)))


def test_outputs_match_a_schema(tmp_path):
    """Samples end early if their text is complete; masks of places where a row was before are kept."""
    lines = [{"prompt_token_ids": ids(9), "output_lengths": [40] * 8, "json_schema": {"enum": ["Tom has 3"]}},
             {"prompt_token_ids": ids(9), "output_lengths": [40] * 8, "json_schema": {"type": "array", "minItems": 1000, "items": {"type": "integer"}}},
             {"prompt_token_ids": ids(9), "output_lengths": [40] * 8}]
    out, err = bench("throughput", "-m", "test/model", "--dataset", dataset(tmp_path, lines), "--device", "cpu", "--json")
    v = json.loads(out)
    assert 640 < v["total_output_tokens"] < 900 and v["masks"] == v["total_output_tokens"] - 320
    assert 0 < v["masks_made"] < v["masks"] / 2 and v["steps"] < 85
    assert re.search(rf"  {v['masks']} masks of constraints, [\d.]+ % of them kept, [\d.]+ us each\n", err)
    fixed = dataset(tmp_path, [{"prompt_token_ids": ids(9), "output_lengths": [40] * 8, "json_schema": {"enum": ["Tom h\u00e4s 3"]}}])
    out, _ = bench("throughput", "-m", "test/model", "--dataset", fixed, "--device", "cpu", "--json")
    assert json.loads(out)["total_output_characters"] == 8 * len('"Tom h\u00e4s 3"')  # characters, not bytes
    lines[2]["json_schema"] = {"not": {"items": {}}}
    _, err = bench("throughput", "-m", "test/model", "--dataset", dataset(tmp_path, lines), status=1)
    assert "line 3: JSON schema: /not" in err


def test_the_start_says_what_states_take(tmp_path):
    model = tmp_path / "states"
    model_weights.write(model, model_weights.load("qwen35"))
    d = dataset(tmp_path, [{"prompt_token_ids": ids(30), "output_lengths": [5] * 3}])
    run = ("throughput", "-m", str(model), "--dataset", d, "--max-num-batched-tokens", "64", "--device", "cpu")
    # 3 layers: 6 matrices of 20 x 12, keys, changes and decays of 16 tokens, and 3 inputs of 152 elements, float32; a snapshot for each
    # sequence
    size = 3 * (6 * (20 * 12 + 16 * (20 + 12 + 1)) + 3 * 152) * 4 / 1e6
    _, err = bench(*run, "--max-num-seqs", "4")
    assert f"; 3 of 4 layers have states, {size:.1f} MB a sequence: for 4 sequences and 4 snapshots\n" in err
    _, err = bench(*run, "--max-num-seqs", "4", "--no-enable-prefix-caching")
    assert "for 4 sequences and 0 snapshots\n" in err


def test_the_start_says_what_windows_keep(tmp_path):
    model = tmp_path / "windows"
    model.mkdir()
    for f in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (model / f).symlink_to(os.path.abspath("test/model/" + f))
    config = json.load(open("test/model/config.json"))
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 100,
               "layer_types": ["full_attention", "sliding_attention"] * 3}
    (model / "config.json").write_text(json.dumps(config))
    d = dataset(tmp_path, [{"prompt_token_ids": ids(300), "output_lengths": [30] * 3}])
    run = ("throughput", "-m", str(model), "--dataset", d, "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--device", "cpu")
    # 4 sequences of 8 pages and one more, and 64 rows, in pages of 16 tokens; all of 1,024 tokens fit in the other layers
    out, err = bench(*run)
    assert "KV cache 4096 tokens, 4.0 sequences of 1024 tokens; 3 of 6 layers read the last 100 tokens of a sequence and keep 640 tokens\n" in err
    # fewer pages than all windowed pages: 2/5 of them, which sequences of 4 windows use as well as the others
    _, err = bench(*run, "--kv-tokens", "640")
    assert "KV cache 640 tokens" in err and "read the last 100 tokens of a sequence and keep 256 tokens\n" in err
    # too few for a sequence and a step: one pool serves all layers
    _, err = bench(*run, "--kv-tokens", "500")
    assert "KV cache 512 tokens" in err and "read the last 100 tokens of a sequence and keep all, too\n" in err
    _, err = bench(*run, "--kv-tokens", "641")
    assert "KV cache 656 tokens" in err and "keep 640 tokens\n" in err


def test_timeline(tmp_path):
    d, path = dataset(tmp_path, [{"prompt_token_ids": ids(50), "output_lengths": [30] * 6}]), tmp_path / "steps.csv"
    out, _ = bench("throughput", "-m", "test/model", "--dataset", d, "--timeline", str(path), "--json")
    rows = list(csv.DictReader(open(path)))
    assert [int(r["step"]) for r in rows] == list(range(1, json.loads(out)["steps"] + 1))
    assert sum(int(r["outputs"]) for r in rows) >= 180 and rows[0]["replica"] == "0"
    # some samples start a step later, with a copy of the first sample's page, so the last steps have fewer samples
    assert rows[-1]["rows"] == rows[-1]["outputs"] and max(int(r["outputs"]) for r in rows) == 6
    times = [float(r[k]) for r in rows for k in ("begin_us", "end_us")]
    assert times == sorted(times) and all(float(r["plan_us"]) > 0 and float(r["launch_us"]) > 0 and float(r["commit_us"]) > 0 for r in rows)
    _, err = bench("throughput", "-m", "test/model", "--dataset", d, "--timeline", "/no/such/file", status=1)
    assert "--timeline" in err
    before = open(d).read()
    _, err = bench("throughput", "-m", "test/model", "--dataset", d, "--timeline", d, status=1)
    assert "is the dataset" in err and open(d).read() == before


def test_prefix_caching_can_be_off(tmp_path):
    d = dataset(tmp_path, [{"prompt_token_ids": ids(50), "output_lengths": [5] * 6}])
    hits = [json.loads(bench("throughput", "-m", "test/model", "--dataset", d, "--json", *more)[0])["prefix_hit_share"]
            for more in ([], ["--no-enable-prefix-caching"])]
    assert hits[0] > 0.7 and hits[1] == 0


def test_dummy_weights(tmp_path):
    models = tmp_path / "models.txt"
    models.write_text('tiny nobody/tiny - {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, '
                      '"num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 500, "max_position_embeddings": 512}\n')
    d = dataset(tmp_path, [{"prompt_token_ids": [1, 2, 3], "output_lengths": [300, 4]}])
    args = ["throughput", "-m", "tiny", "--models-file", str(models), "--dummy-weights", "--dataset"]
    out, _ = bench(*args, d)
    assert "output tokens:  304" in out
    out, _ = bench(*args, d, "--quantization", "fp8")
    assert "output tokens:  304" in out
    _, err = bench(*args, dataset(tmp_path, [{"prompt": "text", "output_lengths": [4]}]), status=1)
    assert "tokenizer" in err
    _, err = bench("throughput", "-m", "nothing", "--dummy-weights", "--dataset", d, status=1)
    assert "models.txt" in err
    # a constraint needs a tokenizer
    models.write_text(models.read_text().replace('"vocab_size": 500', '"vocab_size": 1024'))
    d = dataset(tmp_path, [{"prompt_token_ids": [1, 2, 3], "output_lengths": [99] * 4, "json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 99}}])
    _, err = bench(*args, d, status=1)
    assert "tokenizer" in err
    v = json.loads(bench(*args, d, "--tokenizer", "test/model", "--json", env={"TOKA_DEBUG_NO_MASKS": "1"})[0])
    assert v["total_output_tokens"] == 396 and v["masks"] >= 396 and v["masks_made"] > 380
    v = json.loads(bench(*args, d, "--tokenizer", "test/model", "--json")[0])
    assert v["masks"] >= 396 and v["masks_made"] < 330
    _, err = bench(*args, d, "--tokenizer", str(tmp_path), status=1)
    assert f"{tmp_path}/tokenizer.json: No such file" in err
    _, err = bench("throughput", "-m", "test/model", "--dataset", d, "--tokenizer", "test/model", status=1)
    assert "--tokenizer is for --dummy-weights" in err


CONFIG = {"num_hidden_layers": 3, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
          "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 512}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MLA = {"head_dim": None, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 16,
       "moe_intermediate_size": 128, "n_shared_experts": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 1}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
          "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "shared_expert_intermediate_size": 256}
FAMILIES = [  # architecture, other fields of config.json
    ("Phi3ForCausalLM", {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}),
    ("Gemma2ForCausalLM", {"quantization_config": FP8}), ("Gemma3ForCausalLM", {}), ("Olmo2ForCausalLM", {}), ("Olmo3ForCausalLM", {}),
    ("SmolLM3ForCausalLM", {}), ("GraniteForCausalLM", {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64}}),
    ("Glm4ForCausalLM", {}), ("CohereForCausalLM", {}), ("Cohere2ForCausalLM", {}),
    ("Glm4MoeForCausalLM", {**MLA, "head_dim": 32}), ("DeepseekV2ForCausalLM", {**MLA, "q_lora_rank": None}),
    ("DeepseekV3ForCausalLM", {**MLA, "q_lora_rank": 128, "n_group": 4, "topk_group": 2, "quantization_config": FP8}),
    ("MixtralForCausalLM", {"num_local_experts": 8}), ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 256}),
    ("Qwen3MoeForCausalLM", {"quantization_config": FP8}), ("OlmoeForCausalLM", {}),
    ("Qwen3NextForCausalLM", {**LINEAR, "quantization_config": FP8}), ("Qwen3_5ForCausalLM", LINEAR), ("Qwen3_5MoeForCausalLM", LINEAR),
    ("GptOssForCausalLM", {"num_local_experts": 32, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}})]


def test_dummy_weights_of_every_family(tmp_path):
    """Each architecture runs without a file; some in a format in which they are published."""
    models = tmp_path / "models.txt"
    models.write_text("".join(f"m{i} a/m{i} - {json.dumps({'architectures': [arch], **CONFIG, **more})}\n"
                              for i, (arch, more) in enumerate(FAMILIES)))
    d = dataset(tmp_path, [{"prompt_token_ids": ids(40), "output_lengths": [20] * 3}])
    for i, (arch, _) in enumerate(FAMILIES):
        v = json.loads(bench("throughput", "-m", f"m{i}", "--models-file", str(models), "--dummy-weights", "--device", "cpu", "--dataset", d,
                             "--json")[0])
        assert v["total_output_tokens"] == 60, arch
    with open(os.path.join(ROOT, "toka.c")) as f:  # no architecture of the table is left out
        names = set(re.findall(r'\.name = "(\w+ForCausalLM)"', f.read()))
    assert names - {arch for arch, _ in FAMILIES} <= {"LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM", "Qwen2ForCausalLM",
                                                      "Qwen3ForCausalLM"}


def test_dummy_weights_quantized(tmp_path):
    """--quantization makes them FP8. AWQ's order is packed again on the CPU, and the start says how much memory that takes; int4 by rows
    is read as it is."""
    layer = 256 * 256 * 2 + 2 * 128 * 256 + 3 * 512 * 256  # numbers: 4 bits; for each 128 a scale of 16 bits and a zero point of 4
    awq, rows = ({"quantization_config": q} for q in (
        {"quant_method": "awq", "bits": 4, "group_size": 128},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], "config_groups": {"a": {
            "targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 128}}}}))
    models = tmp_path / "models.txt"
    models.write_text("".join(f"m{i} a/m{i} - {json.dumps({'architectures': ['LlamaForCausalLM'], **CONFIG, **more})}\n"
                              for i, more in enumerate(({}, awq, rows))))
    d = dataset(tmp_path, [{"prompt_token_ids": ids(40), "output_lengths": [5]}])
    args = ["--models-file", str(models), "--dummy-weights", "--dataset", d, "--json"]
    err = bench("throughput", "-m", "m1", *args)[1]
    assert float(re.search(r"weights packed again beside the files: ([\d.]+) MB", err)[1]) == pytest.approx(
        3e-6 * layer * (1 / 2 + 2 / 128 + 0.5 / 128), abs=0.06)
    for model, more in (("m0", []), ("m0", ["--quantization", "fp8"]), ("m2", [])):
        out, err = bench("throughput", "-m", model, *args, *more)
        assert json.loads(out)["total_output_tokens"] == 5 and "packed again" not in err


def test_refused(tmp_path):
    for line in ({"prompt_token_ids": [1]}, {"output_lengths": [1]}, {"prompt_token_ids": [1], "output_lengths": [0]},
                 {"prompt_token_ids": [1], "output_lengths": [2000]}, {"prompt_token_ids": [], "output_lengths": [1]},
                 {"prompt_token_ids": [5000], "output_lengths": [1]}, [1]):
        _, err = bench("throughput", "--dataset", dataset(tmp_path, [line]), status=1)
        assert len(err.strip().splitlines()) == 1
    for args in ([], ["throughput"], ["nothing"], ["throughput", "--dataset", "/no/such"]):
        bench(*args, status=1)


def test_invalid_lengths(tmp_path):
    for length in (1023, 2 ** 31, 2 ** 63 - 3, 2 ** 63 - 1):
        _, err = bench("throughput", "--dataset", dataset(tmp_path, [{"prompt_token_ids": [1, 2], "output_lengths": [1, length]}]),
                       status=1)
        assert f"line 1: a prompt of 2 tokens and an output of {length}, expected" in err
    for length in (1.5, "a", None, [3], 1e300):
        _, err = bench("throughput", "--dataset", dataset(tmp_path, [{"prompt_token_ids": [1, 2], "output_lengths": [1, length]}]),
                       status=1)
        assert "line 1: output_lengths: expected whole numbers" in err


def test_interrupted_while_reading(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    p = subprocess.Popen([TOKA, "bench", "throughput", "--dataset", str(tmp_path / "fifo")], env=ENV, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE)
    with open(tmp_path / "fifo", "w") as f:
        f.write('{"prompt')  # the line has no end
        f.flush()
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=60)
    assert p.returncode == 130 and out + err == b""


def test_interrupted(tmp_path):
    """After the signal, queued requests are not started: they would take minutes."""
    d = dataset(tmp_path, [{"prompt_token_ids": ids(480, i), "output_lengths": [20]} for i in range(2000)])
    p = subprocess.Popen([TOKA, "bench", "throughput", "--dataset", d, "--max-num-seqs", "1024", "--max-num-batched-tokens", "1024",
                          "--threads", "1"],
                         env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_handlers(p)
    time.sleep(2)
    p.send_signal(signal.SIGINT)
    p.communicate(timeout=45)
    assert p.returncode == 130


def test_plan_interrupted():
    """No results are printed for a case that was interrupted."""
    p = subprocess.Popen([TOKA, "bench", "plan"], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_handlers(p)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=60)
    assert err == b"" and p.returncode == 130 and set(re.findall(rb"\n  (\d+) steps", out)) <= {b"1000"}


@pytest.mark.slow
def test_plan():
    out, _ = bench("plan", "--json")
    v = json.loads(out)
    assert 0 < v["ms_per_step"] and v["mean_running"] > 7500
    assert len(v["cases"]) == 3
