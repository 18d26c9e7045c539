"""Whole models against transformers: every architecture and weight format of test/models/ (test/make_models.py). Run through
test/run.sh. The weights are written at test time (test/model_weights.py), and test/model_driver.c shows the raw logits."""
import base64
import json
import os
import re
import subprocess

import numpy as np
import pytest

import model_weights as mw
from server import ROOT, TOKA

BUILD = os.path.join(ROOT, "test", ".build")
DRIVER = os.path.join(BUILD, "model_driver")
DEVICES = ["cpu", "plain"]
NAMES = sorted(x.removesuffix(".json") for x in os.listdir(mw.MODELS) if x.endswith(".json"))
MAX_ERROR = 1e-4                                         # relative L2 distance of logits

# What toka does not do yet, by device. Each must be refused with one sentence; when it is done, that test fails, and the row goes.
DENSE = {
    "cohere", "cohere2", "gemma2", "gemma2-defaults", "gemma2-types", "gemma3", "gemma3-image", "gemma3-image-defaults",
    "gemma3-image-names", "gemma3-types", "glm4", "granite", "llama-mlp-bias", "mistral3-image", "olmo2", "olmo3", "phi3",
    "phi3-longrope-long", "phi3-longrope-short", "phi3-partial", "smollm3", "smollm3-interval"}
FORMATS = {
    "awq-128", "awq-32", "awq-phi3", "ct-fp8-block", "ct-fp8-channel", "ct-fp8-gemma3-image", "ct-fp8-phi3", "ct-fp8-static",
    "fbgemm-fp8", "fp8-block", "fp8-block-edge", "fp8-block-phi3", "fp8-dynamic", "fp8-phi3", "fp8-static", "gptq-128", "gptq-32",
    "gptq-64-v2", "gptq-order", "gptq-phi3", "gptq-whole", "modelopt-fp8", "modelopt-fp8-file", "packed-128", "packed-32-zero",
    "packed-64", "packed-channel", "packed-channel-zero", "packed-order", "packed-phi3"}
MIXTURES = {
    "awq-mixtral", "deepseek2", "deepseek2-groups", "deepseek3", "deepseek3-plain", "fp8-block-deepseek3", "fp8-block-qwen3moe",
    "fp8-mixtral", "glm4moe", "glm4moe-groups", "gptoss", "gptoss-mxfp4", "gptq-qwen3moe", "mixtral", "olmoe", "olmoe-clip",
    "packed-qwen3moe", "qwen2moe", "qwen2moe-mixed", "qwen3moe", "qwen3moe-mixed", "qwen3moe-ties"}
NOT_YET = {"cpu": set(), "plain": set()}


@pytest.fixture(scope="session")
def driver():
    sources = [os.path.join(ROOT, x) for x in ("toka.c", "toka.h", "test/model_driver.c")]
    if not os.path.exists(DRIVER) or os.path.getmtime(DRIVER) < max(map(os.path.getmtime, sources)):
        os.makedirs(BUILD, exist_ok=True)
        subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-O1", "-o", DRIVER, sources[2], "-lm", "-lpthread"], check=True, cwd=ROOT)
    return DRIVER


def rows_of(case):
    return np.frombuffer(base64.b64decode(case["logits"]), "<f4").reshape(len(case["positions"]), -1)


def run(driver, folder, device, spec, cases):
    """(exit status, standard error, [(logits, greedy ids) ...])"""
    out = os.path.join(folder, "out")
    text = "".join(" ".join(map(str, [len(x["prompt"]), len(x["positions"]), len(x["greedy"]), *x["prompt"], *x["positions"]])) + "\n"
                   for x in cases)
    r = subprocess.run([driver, folder, device, str(spec.get("max_model_len", 0)), out], input=text, capture_output=True, text=True,
                       timeout=300)
    if r.returncode:
        return r.returncode, r.stderr, []
    data, results = open(out, "rb").read(), []
    for case in cases:
        want, n = rows_of(case), len(case["greedy"])
        results.append((np.frombuffer(data, "<f4", want.size).reshape(want.shape), np.frombuffer(data, "<i4", n, want.nbytes).tolist()))
        data = data[want.nbytes + 4 * n:]
    return 0, r.stderr, results


def assert_refused(status, message):
    """One line that says what is wrong, and exit status 1."""
    assert status == 1, f"exit status {status}: {message}"
    assert len(message.splitlines()) == 1 and 20 < len(message) < 400, message


def test_every_architecture_has_a_fixture():
    with open(os.path.join(ROOT, "toka.c")) as f:
        types = set(re.findall(r'^    \{\.name = .*\.model_type = "(\w+)"', f.read(), re.M))
    configs = [mw.load(name)["config"] for name in NAMES]
    assert len(types) > 20 and types <= {c.get("text_config", c)["model_type"] for c in configs}


def errors(got, want):
    return np.linalg.norm(got.astype(np.float64) - want, axis=1) / np.linalg.norm(want, axis=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_model(driver, tmp_path, name, device):
    """Logits and greedy ids are those of transformers."""
    spec = mw.load(name)
    mw.write(tmp_path, spec)
    status, message, results = run(driver, tmp_path, device, spec, spec["cases"])
    if name in NOT_YET[device]:
        return assert_refused(status, message)
    assert status == 0, message
    for case, (logits, greedy) in zip(spec["cases"], results):
        n = len(case["prompt"])
        worst = errors(logits, rows_of(case))
        assert (worst <= MAX_ERROR).all(), f"prompt of {n}: errors {worst} at {case['positions']}"
        assert greedy == case["greedy"], f"prompt of {n}"


# ---- Steps and ranks ----

ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}, "TOKA_DEVICE": "cpu", "TOKA_DEBUG_DRAFTS": "1"}
FAST = {"mistral", "gemma2", "gptoss-mxfp4", "deepseek3", "qwen3moe", "fp8-block-edge", "packed-32-zero", "qwen3next", "qwen35-tied"}  # in fast runs
SAME = {"chunks": ["--max-num-batched-tokens", "16"], "few pages": ["--kv-tokens", "256"], "alone": ["--max-num-seqs", "1"],
        "pipeline": ["--pipeline-parallel-size", "2"], "data": ["--data-parallel-size", "2"],
        "drafts": ["--speculative-config", '{"method":"ngram","prompt_lookup_min":1}']}

# Models with states: from zeros on; preempted, with snapshots of other sequences
STATES = {"no snapshots": ["--no-enable-prefix-caching"], "preempted": ["--kv-tokens", "128"]}


def requests_of(spec):
    """Each prompt greedily and with random samples, as lines of a batch."""
    return "".join(json.dumps({"custom_id": f"{i} {temperature}", "prompt": case["prompt"], "max_tokens": 14, "ignore_eos": True,
                               "logprobs": 2, "temperature": temperature, "seed": i, "n": 1 + temperature}) + "\n"
                   for i, case in enumerate(spec["cases"]) for temperature in (0, 1))


def batch(folder, spec, name, flags):
    """The result lines, sorted."""
    out = folder / f"{name}.out"
    limit = ["--max-model-len", str(spec["max_model_len"])] if "max_model_len" in spec else []
    r = subprocess.run([TOKA, "batch", "-q", "-m", str(folder), "--served-model-name", "m", "-i", "-", "-o", str(out), *limit, *flags],
                       input=requests_of(spec), env=ENV, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert r.returncode == 0, f"{name}: {r.stderr}"
    return sorted(out.read_text().splitlines())


def assert_near(a, b, where=""):
    """Equal but for floats, which are log-probabilities."""
    if isinstance(a, dict) and isinstance(b, dict):
        a, b = list(a.items()), list(b.items())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b)):
            assert_near(x, y, f"{where}[{i}]")
    elif isinstance(a, float) and isinstance(b, float):
        assert abs(a - b) <= 1e-5 * max(1, abs(b)), (where, a, b)
    else:
        assert a == b, where


# What so many tensor ranks cannot divide is refused in one sentence: 7 ranks, 5 blocks of 32 columns, and fewer key heads of a linear mixer.
NOT_DIVIDED = {"gptoss-mxfp4", "qwen35", "qwen35moe", "qwen35moe-experts"}


def tensor_ranks(spec):
    """The fewest tensor ranks that divide the heads."""
    heads = spec["config"].get("text_config", spec["config"]).get("num_attention_heads", 8)  # Gemma's default
    return next(n for n in range(2, heads + 1) if heads % n == 0)


@pytest.mark.parametrize("name", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in NAMES])
def test_steps_and_ranks(tmp_path, name):
    """A batch gives the same bytes however it is cut into steps, stages and replicas, and nearly the same from tensor ranks."""
    if name in NOT_YET["cpu"]:
        pytest.skip("not yet")
    spec = mw.load(name)
    mw.write(tmp_path, spec)
    want = batch(tmp_path, spec, "whole", [])
    same = SAME | STATES if name.startswith(("qwen3next", "qwen35")) else SAME
    for case in same:
        assert batch(tmp_path, spec, case, same[case]) == want, case
    flags = ["--tensor-parallel-size", str(tensor_ranks(spec))]
    if name in NOT_DIVIDED:
        with pytest.raises(AssertionError, match="tensor.parallel.size .*, expected"):
            batch(tmp_path, spec, "tensor", flags)
        return
    near = batch(tmp_path, spec, "tensor", flags)
    assert_near([json.loads(x) for x in near], [json.loads(x) for x in want])


def test_states_take_no_drafts(tmp_path):
    mw.write(tmp_path, mw.load("qwen3next"))
    r = subprocess.run([TOKA, "batch", "-m", str(tmp_path), "-i", "-", "-o", str(tmp_path / "out"), "--num-speculative-tokens", "4"], env=ENV,
                       cwd=ROOT, text=True, input=json.dumps({"custom_id": "a", "prompt": [5], "max_tokens": 9}), capture_output=True, timeout=60)
    assert r.returncode == 0 and "toka: layers with a state take no drafts: no speculative decoding\n" in r.stderr


def test_parts_that_are_not_used(tmp_path):
    """A line at the start names what the files have and toka does not use."""
    for name, lines in (("qwen35", ["images are not supported: only the language model is loaded",
                                    "the layers that predict more than one token (mtp) are not used"]), ("qwen3next-types", [])):
        mw.write(tmp_path / name, mw.load(name))
        r = subprocess.run([TOKA, "batch", "-m", str(tmp_path / name), "-i", "-", "-o", str(tmp_path / "out")], env=ENV, cwd=ROOT, text=True,
                           input=json.dumps({"custom_id": name, "prompt": [5], "max_tokens": 1}), capture_output=True, timeout=60)
        assert r.returncode == 0 and [x for x in r.stderr.splitlines() if "not used" in x or "images" in x] == ["toka: " + x for x in lines]


@pytest.mark.parametrize("edit", mw.EDITS)
def test_hostile(driver, tmp_path, edit):
    """A checkpoint that is wrong in one place is refused, by a sentence that names this place."""
    base, change, word = mw.EDITS[edit]
    spec = mw.load(base)
    mw.write(tmp_path, spec, edit=change)
    device = "cpu" if base in NOT_YET["plain"] else "plain"
    status, message, _ = run(driver, tmp_path, device, spec, [])
    assert_refused(status, message)
    message = message.replace(str(tmp_path), "")         # the path has the name of the edit
    assert base in NOT_YET[device] or word in message, message


def assert_same_as_dense(driver, folder, spec, device):
    """The quantized checkpoint has the logits of the same numbers without quantization."""
    V = spec["config"]["vocab_size"]
    case = {"prompt": [5, 9, 33, 40, 7], "positions": [0, 4], "greedy": [], "logits": base64.b64encode(bytes(2 * V * 4)).decode()}
    rows = {}
    for dense in (False, True):
        mw.write(folder / str(dense), spec, dense=dense)
        status, message, results = run(driver, folder / str(dense), device, spec, [case])
        assert status == 0, message
        rows[dense] = results[0][0]
    assert (errors(rows[False], rows[True]) <= MAX_ERROR).all() and np.ptp(rows[True]) > 1


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_end_within_a_word(driver, tmp_path, device):
    """Zero points of compressed-tensors share a word by rows. Their number need not be a multiple of 8: packers fill the last word."""
    spec = mw.load("packed-channel-zero")
    E, H, D, F = 256, 4, 36, 99
    spec["config"].update(head_dim=D, num_key_value_heads=1, intermediate_size=F)
    shapes = {"q_proj": [H * D, E], "k_proj": [D, E], "v_proj": [D, E], "o_proj": [E, H * D], "gate_proj": [F, E], "up_proj": [F, E],
              "down_proj": [E, F], "q_norm": [D], "k_norm": [D]}
    spec["tensors"] = [[dtype, shapes.get(name.split(".")[-2], shape), centre, width, [name]]
                       for dtype, shape, centre, width, names in spec["tensors"] for name in names]
    assert_same_as_dense(driver, tmp_path, spec, device)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["gptq-128", "awq-128", "packed-channel-zero", "fp8-block"])
def test_quantized_head(driver, tmp_path, name, tied):
    """A quantized LM head counts, also in a model that says it is tied. The reference: the same numbers without quantization."""
    spec = mw.load(name)
    config, (dtype, _, centre, width, _) = spec["config"], next(x for x in spec["tensors"] if x[0] == "quant")
    config["vocab_size"], config["tie_word_embeddings"] = 264, tied      # 8 rows share a word
    next(x for x in spec["tensors"] if "model.embed_tokens.weight" in x[4])[1][0] = 264
    spec["tensors"].append([dtype, [264, config["hidden_size"]], centre, width, ["lm_head.weight"]])
    config[mw.QUANT].get("ignore", []).clear()
    assert_same_as_dense(driver, tmp_path, spec, "plain")


@pytest.mark.parametrize("edit", mw.NO_CHANGES)
def test_edit_that_changes_nothing(driver, tmp_path, edit):
    """A field that transformers does not read changes no logits."""
    base, change = mw.NO_CHANGES[edit]
    spec = mw.load(base)
    mw.write(tmp_path, spec, edit=change)
    status, message, results = run(driver, tmp_path, "plain", spec, spec["cases"][-1:])
    assert status == 0, message
    worst = errors(results[0][0], rows_of(spec["cases"][-1])).max()
    assert worst <= MAX_ERROR and results[0][1] == spec["cases"][-1]["greedy"], worst
