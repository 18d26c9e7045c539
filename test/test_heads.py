"""Draft heads: EAGLE-3 against numpy (test/heads.py), in the layouts that are published, and what is refused. Run through test/run.sh."""
import json
import os
import subprocess

import numpy as np
import pytest

import heads
from server import ROOT, TOKA, Server
from test_models import DEVICES, MAX_ERROR, driver  # noqa: F401

MODEL = os.path.join(ROOT, "test", "model")
HEAD = os.path.join(ROOT, "test", "model_head")
PROMPTS = [[0, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78], [0, 500], list(range(100, 150))]


def drafts(driver, folder, device, head, prompts, k):
    """[([k][V] logits, [k] ids) ...], or the message of a refusal."""
    text = "".join(" ".join(map(str, [len(p), 1, k, *p, 0])) + "\n" for p in prompts)
    r = subprocess.run([driver, MODEL, device, "0", folder / "out", head], input=text, capture_output=True, text=True, timeout=300)
    if r.returncode:
        assert r.returncode == 1 and r.stderr.count("\n") == 1, r.stderr
        return r.stderr
    data, size = open(folder / "out", "rb").read(), k * (1024 + 1) * 4
    assert len(data) == size * len(prompts)
    return [(np.frombuffer(data[i:i + size], "<f4", k * 1024).reshape(k, 1024), np.frombuffer(data[i:i + size], "<i4")[k * 1024:].tolist())
            for i in range(0, len(data), size)]


CASES = {"specforge": {}, "speculators": {"layout": "speculators"}, "all ids": {"draft_vocab": 1024, "layers": (0, 2, 4)},
         "by default": {"layout": "speculators", "norm_before_residual": None, "seed": 3},
         "residual": {"norm_before_residual": True, "seed": 2}, "no residual": {"layout": "speculators", "norm_before_residual": False}}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_drafts_are_those_of_numpy(driver, tmp_path, case, device):  # noqa: F811
    head = str(tmp_path / "head")
    heads.make(MODEL, head, **CASES[case])
    for prompt, (logits, ids) in zip(PROMPTS, drafts(driver, tmp_path, device, head, PROMPTS, 4)):
        wanted_ids, wanted = heads.draft(MODEL, head, prompt, 4)
        known = np.isfinite(wanted)
        assert (np.isfinite(logits) == known).all() and known[0].sum() == json.load(open(head + "/config.json"))["draft_vocab_size"]
        for i in range(4):
            error = np.linalg.norm(logits[i][known[i]] - wanted[i][known[i]]) / np.linalg.norm(wanted[i][known[i]])
            assert error <= MAX_ERROR, f"draft {i} behind {len(prompt)} tokens: {error}"
        assert ids == wanted_ids


def edit(folder, fields=None, tensors=None):
    """Changes fields of config.json, and tensors; None takes one away."""
    config, weights = json.load(open(folder + "/config.json")), heads.read_safetensors(folder + "/model.safetensors")
    for all_of, changes in (config, fields or {}), (weights, tensors or {}):
        for name, value in changes.items():
            all_of[name] = value(all_of[name]) if callable(value) else value
            if all_of[name] is None:
                del all_of[name]
    json.dump(config, open(folder + "/config.json", "w"))
    heads.write_safetensors(folder + "/model.safetensors", weights)


REFUSED = [
    ({"architectures": ["LlamaForCausalLM"]}, {}, 'architectures[0] is "LlamaForCausalLM", expected a head of EAGLE-3'),
    ({"model_type": "qwen3"}, {}, 'model_type is "qwen3", expected "llama"'),
    ({"fc_norm": True}, {}, "fc_norm is true, expected none"), ({"norm_output": True}, {}, "norm_output is true, expected none"),
    ({"num_hidden_layers": 2}, {}, "num_hidden_layers is 2, expected 1"), ({"target_hidden_size": 512}, {}, "target_hidden_size is 512, but the model has 256"),
    ({"vocab_size": 2048}, {}, "vocab_size is 2048, but the model has 1024"), ({"draft_vocab_size": 2000}, {}, "draft_vocab_size is 2000, expected 1 to 1024"),
    ({"eagle_config": None}, {}, "eagle_aux_hidden_state_layer_ids is missing, expected three rising numbers of the model's 6 layers"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}, {}, "expected three rising numbers"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 0, 4]}}, {}, "expected three rising numbers"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state is false, expected true"),
    ({}, {"fc.weight": None}, "fc.weight: missing in"), ({}, {"midlayer.hidden_norm.weight": None}, "layers.0.input_layernorm.weight: missing in"),
    ({}, {"midlayer.self_attn.q_proj.weight": lambda w: w[:, :256]}, "midlayer.self_attn.q_proj.weight: [256,256], expected [256,512]"),
    ({}, {"d2t": None}, "d2t: missing in"), ({}, {"d2t": lambda w: w + 600}, "d2t: element "), ({}, {"d2t": lambda w: w[::-1].copy()}, "d2t: element "),
    ({}, {"d2t": lambda w: w[1:].copy()}, "d2t: [511], expected [512]"), ({}, {"t2d": lambda w: ~w}, "d2t: element 0 is"),
    ({"draft_vocab_size": 600}, {}, "lm_head.weight: [512,256], expected [600,256]"), ({"hidden_size": 512, "num_attention_heads": 8}, {}, "expected [")]


@pytest.mark.parametrize("fields, tensors, words", REFUSED)
def test_what_is_refused(driver, tmp_path, fields, tensors, words):  # noqa: F811
    head = str(tmp_path / "head")
    heads.make(MODEL, head)
    edit(head, fields, tensors)
    message = drafts(driver, tmp_path, "cpu", head, PROMPTS[:1], 1)
    assert isinstance(message, str) and words in message, message


def test_an_embedding_of_its_own(driver, tmp_path):  # noqa: F811
    head = str(tmp_path / "head")
    heads.make(MODEL, head)
    without = heads.draft(MODEL, head, PROMPTS[0], 2)[1]
    rng = np.random.default_rng(3)
    edit(head, {}, {"embed_tokens.weight": heads.bf16(rng.standard_normal((1024, 256)))})
    wanted = heads.draft(MODEL, head, PROMPTS[0], 2)[1]
    known = np.isfinite(wanted[0])
    assert np.linalg.norm(without[:, known] - wanted[:, known]) > 1
    for device in DEVICES:
        [(logits, _)] = drafts(driver, tmp_path, device, head, PROMPTS[:1], 2)
        assert np.linalg.norm(logits[:, known] - wanted[:, known]) <= MAX_ERROR * np.linalg.norm(wanted[:, known])


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_ranks_are_refused(flag):
    spec = json.dumps({"method": "eagle3", "model": HEAD})
    r = subprocess.run([TOKA, "-m", MODEL, "-p", "x", "--device", "cpu", "--speculative-config", spec, flag, "2"], capture_output=True, text=True)
    assert r.returncode == 1 and r.stderr == "toka: eagle3: a head works with one rank a replica, not with tensor or pipeline parallel ranks\n"


def test_plan_refuses():
    r = subprocess.run([TOKA, "plan", "-m", "llama-3.1-8b", "--speculative-config", '{"method":"eagle3","model":"x"}'], capture_output=True, text=True)
    assert r.returncode == 1 and "plans do not know what a head of eagle3 costs" in r.stderr


# ---- In the engine ----

def ids_of(prompt):
    from tokenizers import Tokenizer
    return [0] + Tokenizer.from_file(MODEL + "/tokenizer.json").encode(prompt, add_special_tokens=False).ids


def test_drafts_of_requests_are_those_of_numpy(tmp_path):
    """Each draft that the engine verifies is the one that numpy makes: of prompts that come alone, that share pages, and of one that was
    seen before, whose K, V and states come from the prefix cache. So K and V of the head are right after accepted drafts and wrong ones."""
    k, first = 3, "Tom has 5 apples and buys 4 more. How many apples does Tom have now?"
    prompts = [first, first, "Ann has 12 pens. She gives 3 pens to each of her 2 friends. How many pens are left?"]
    with open(tmp_path / "in.jsonl", "w") as f:
        for i, prompt in enumerate(prompts):
            f.write(json.dumps({"custom_id": str(i), "prompt": ids_of(prompt), "max_tokens": 24, "temperature": 0, "return_token_ids": True}) + "\n")
    spec = json.dumps({"method": "eagle3", "model": HEAD, "num_speculative_tokens": k})
    r = subprocess.run([TOKA, "batch", "-m", MODEL, "-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--device", "cpu", "--max-num-seqs", "1",
                        "--speculative-config", spec, "--report", tmp_path / "report.json"], capture_output=True, text=True,
                       env={**os.environ, "TOKA_DEBUG_DRAFTS": "1"})
    assert r.returncode == 0, r.stderr
    outputs = {x["custom_id"]: x["response"]["body"]["choices"][0]["token_ids"] for x in map(json.loads, open(tmp_path / "out.jsonl"))}
    counts = json.load(open(tmp_path / "report.json"))
    n_drafts = n_tokens = n_right = 0
    for i, prompt in enumerate(prompts):
        output, known = outputs[str(i)], ids_of(prompt)
        n = 1  # tokens of the output that are there; the next is computed with drafts behind it
        while n < len(output):
            most = min(k, 24 - n - 1)
            guesses = heads.draft(MODEL, HEAD, known + output[:n], most)[0] if most else []
            right = 0
            while right < len(guesses) and n + right < len(output) and guesses[right] == output[n + right]:
                right += 1
            n_drafts, n_tokens, n_right = n_drafts + (most > 0), n_tokens + most, n_right + right
            n += right + 1
    assert (counts["drafts"], counts["draft_tokens"], counts["draft_tokens_accepted"]) == (n_drafts, n_tokens, n_right)
    assert n_right > 10 and n_tokens - n_right > 10


def test_sleep_and_new_weights(tmp_path):
    """After memory was given back, and after other weights came and went, the head reads what the model computes and embeds then."""
    ask = {"prompt": "Tom has 12 apples. He buys 7 more apples. How many apples does he have now?", "max_tokens": 30, "temperature": 0}
    other = tmp_path / "other"
    os.makedirs(other)
    for name in os.listdir(MODEL):
        if name != "model.safetensors" and os.path.isfile(os.path.join(MODEL, name)):
            os.symlink(os.path.join(MODEL, name), other / name)
    weights = heads.read_safetensors(MODEL + "/model.safetensors")
    weights["model.embed_tokens.weight"] = heads.bf16(weights["model.embed_tokens.weight"][::-1])
    heads.write_safetensors(other / "model.safetensors", {k: np.ascontiguousarray(v) for k, v in weights.items()})
    spec = json.dumps({"method": "eagle3", "model": HEAD, "num_speculative_tokens": 3})
    counts = ["spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"]
    found = []
    with Server("--enable-sleep-mode", "--speculative-config", spec, env={"TOKA_DEBUG_DRAFTS": "1"}) as s:
        for orders in [], [("/sleep?level=1", ""), ("/wake_up", "")], [("/update_weights", {"weight_dir": str(other)})], \
                [("/sleep?level=2", ""), ("/wake_up", ""), ("/update_weights", {"weight_dir": MODEL})]:
            for path, body in orders:
                assert s.post(path, body).status == 200, path
            before = [s.metric(name) for name in counts]
            text = s.post("/v1/completions", ask).json()["choices"][0]["text"]
            found.append((text, *(s.metric(name) - n for name, n in zip(counts, before))))
    assert found[0] == found[1] == found[3] != found[2] and found[0][2] > 3, found
