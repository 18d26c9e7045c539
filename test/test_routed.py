"""The experts that the router chose for each token (--enable-return-routed-experts), as trainers replay them. In the model of these
tests attention adds nothing, so numpy computes the experts of every layer from the token alone. Run through test/run.sh."""
import base64
import io
import json
import subprocess
import threading

import numpy as np
import pytest

import model_sisters
from server import TOKA, Server
from test_python import make_library

mw = model_sisters.mw
PROMPT = "Tom has 12 apples. He buys 7 more apples. How many apples does Tom have now?"
N_LAYERS, TOP_K = 6, 2


def without_attention(config, tensors):
    for name, (dtype, bits) in tensors.items():
        if name.endswith("o_proj.weight"):
            tensors[name] = (dtype, np.zeros_like(bits))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("routed")
    model_sisters.write("moe-fp8", str(path), True, without_attention)
    return str(path)


@pytest.fixture(scope="module")
def expected(folder):
    """[vocabulary][layers][2]: the experts of each token, and [vocabulary][layers]: how clear the choice is."""
    _, tensors = model_sisters.read_folder(folder)
    w = {name: mw.from_bits(bits, dtype).astype(np.float64) for name, (dtype, bits) in tensors.items()}
    x = w["model.embed_tokens.weight"].copy()
    chosen, margin = np.zeros((len(x), N_LAYERS, TOP_K), int), np.zeros((len(x), N_LAYERS))
    for i in range(N_LAYERS):
        moe, layer = f"model.layers.{i}.block_sparse_moe.", f"model.layers.{i}."
        h = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * w[layer + "post_attention_layernorm.weight"]
        logits = h @ w[moe + "gate.weight"].T
        order = np.argsort(-logits, axis=1)
        ordered = np.take_along_axis(logits, order, 1)
        chosen[:, i], margin[:, i] = np.sort(order[:, :TOP_K], 1), ordered[:, TOP_K - 1] - ordered[:, TOP_K]
        share = np.exp(ordered[:, :TOP_K] - ordered[:, :1])
        share /= share.sum(1, keepdims=True)
        for k in range(TOP_K):
            for e in range(logits.shape[1]):
                t = order[:, k] == e
                gate, up = h[t] @ w[f"{moe}experts.{e}.w1.weight"].T, h[t] @ w[f"{moe}experts.{e}.w3.weight"].T
                x[t] += share[t, k:k + 1] * ((gate / (1 + np.exp(-gate)) * up) @ w[f"{moe}experts.{e}.w2.weight"].T)
    return chosen, margin


def check(expected, ids, experts):
    """The last token was never an input."""
    chosen, margin = expected
    assert experts.shape == (len(ids) - 1, N_LAYERS, TOP_K)
    clear = (margin[ids[:-1]] > 1e-4).cumprod(1).astype(bool)  # behind an unclear layer the token may be another one
    assert clear.mean() > 0.95 and (experts[clear] == chosen[ids[:-1]][clear]).all()


def from_npy(text):
    return np.load(io.BytesIO(base64.b64decode(text)))


def from_int32(text):
    return np.frombuffer(base64.b64decode(text), np.int32).reshape(-1, N_LAYERS, TOP_K)


def completion(server, **body):
    a = server.post("/v1/completions", {"prompt": PROMPT, "return_token_ids": True, "temperature": 1, "seed": 3, "ignore_eos": True, **body})
    assert a.status == 200, a.body
    return a.json()["choices"]


def rows(folder, *flags, **body):
    with Server("-m", folder, "--enable-return-routed-experts", *flags) as s:
        choices = completion(s, **body)
        assert s.metric("num_preemptions_total") or "--kv-tokens" not in flags
        return [(c["prompt_token_ids"] + c["token_ids"], from_npy(c["routed_experts"])) for c in choices]


@pytest.fixture(scope="module")
def server(folder):
    with Server("-m", folder, "--enable-return-routed-experts") as s:
        yield s


def test_completions_as_vllm(server, expected):
    for _ in range(2):  # the second time the prompt is in the prefix cache
        for c in completion(server, n=3, max_tokens=20):
            experts = from_npy(c["routed_experts"])
            assert experts.dtype == np.int16
            check(expected, c["prompt_token_ids"] + c["token_ids"], experts)
    assert "routed_experts" not in completion(server, max_tokens=2, return_routed_experts=False)[0]


def test_generate_as_sglang(server, expected):
    """slime and miles: int32, all layers, one row less than tokens; on demand, and from a token on."""
    body = {"text": PROMPT, "return_routed_experts": True, "sampling_params": {"max_new_tokens": 9, "temperature": 1, "sampling_seed": 4, "n": 2}}
    prompt = completion(server, max_tokens=1)[0]["prompt_token_ids"]
    for got in server.post("/generate", body).json():
        check(expected, prompt + got["output_ids"], from_int32(got["meta_info"]["routed_experts"]))
    whole = server.post("/generate", body).json()[0]
    tail = server.post("/generate", {**body, "routed_experts_start_len": 5}).json()[0]
    assert (from_int32(tail["meta_info"]["routed_experts"]) == from_int32(whole["meta_info"]["routed_experts"])[5:]).all()
    assert "routed_experts" not in server.post("/generate", {**body, "return_routed_experts": False}).json()[0]["meta_info"]
    last = json.loads(server.post("/generate", {**body, "stream": True}).body.decode().split("\n\n")[-3][6:])
    check(expected, prompt + last["output_ids"], from_int32(last["meta_info"]["routed_experts"]))


def test_chat_that_stops(server, expected):
    """A stop string in a chat with a parser ends the sample in the server, not in the engine."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "return_token_ids": True, "max_tokens": 40, "temperature": 0, "stop": ["a"]}
    for more in ({}, {"stream": True}):
        a = server.post("/v1/chat/completions", {**body, **more})
        assert a.status == 200, a.body
        if more:
            chunks = [json.loads(x[6:]) for x in a.body.decode().split("\n\n") if x and "[DONE]" not in x]
            prompt = next(c["prompt_token_ids"] for c in chunks if c.get("prompt_token_ids"))
            choices = [c["choices"][0] for c in chunks if c["choices"]]
            ids = sum((c.get("token_ids") or [] for c in choices), [])
            experts = [c["routed_experts"] for c in choices if "routed_experts" in c]
        else:
            choice = a.json()["choices"][0]
            prompt, ids, experts = a.json()["prompt_token_ids"], choice["token_ids"], [choice["routed_experts"]]
        assert len(experts) == 1
        check(expected, prompt + ids, from_npy(experts[0]))


def test_an_aborted_sample_has_those_of_its_tokens(server, expected):
    """Partial rollouts: pause?mode=abort ends them, and trainers keep what is there."""
    got = []
    body = {"text": PROMPT, "return_routed_experts": True, "sampling_params": {"max_new_tokens": 900, "ignore_eos": True, "n": 4}}
    thread = threading.Thread(target=lambda: got.extend(server.post("/generate", body).json()))
    prompt = completion(server, max_tokens=1)[0]["prompt_token_ids"]
    thread.start()
    while server.metric("generation_tokens_total") < 60:
        pass
    assert server.post("/pause?mode=abort", {}).status == 200
    thread.join()
    assert server.post("/resume", {}).status == 200
    assert len(got) == 4 and {g["meta_info"]["finish_reason"]["type"] for g in got} == {"abort"}
    for g in got:
        check(expected, prompt + g["output_ids"], from_int32(g["meta_info"]["routed_experts"]))


@pytest.mark.parametrize("flags", [
    (), ("--device", "plain"), ("--pipeline-parallel-size", "2"), ("--tensor-parallel-size", "2"), ("--data-parallel-size", "2"),
    ("--max-num-batched-tokens", "7", "--max-num-seqs", "7"), ("--no-enable-prefix-caching",), ("--num-speculative-tokens", "3"),
    ("--kv-tokens", "304", "--max-model-len", "160", "--max-num-seqs", "8")], ids=lambda f: f[0].strip("-") if f else "cpu")
def test_the_same_in_every_split(folder, expected, flags):
    """The last one has memory for about two of six sequences, so some are preempted."""
    for ids, experts in rows(folder, *flags, n=6, max_tokens=60):
        check(expected, ids, experts)


def test_python(folder, expected):
    make_library()
    from toka import LLM, SamplingParams
    with LLM(folder, device="cpu", enable_return_routed_experts=True) as llm:
        for r in llm.generate([PROMPT, "Tom has"], SamplingParams(n=2, max_tokens=12, ignore_eos=True)):
            for sample in r.outputs:
                check(expected, np.concatenate((r.prompt_token_ids, sample.token_ids)), sample.routed_experts)
    with LLM(folder, device="cpu") as llm:
        assert llm.generate("Tom", SamplingParams(max_tokens=1))[0].outputs[0].routed_experts is None


def test_refusals(folder, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"custom_id": "1", "prompt": "Tom", "max_tokens": 2}\n')
    r = subprocess.run([TOKA, "batch", "-i", "in.jsonl", "-o", "out.jsonl", "--enable-return-routed-experts", "--device", "cpu"], cwd=tmp_path,
                       capture_output=True, text=True)
    assert r.returncode == 1 and "enable-return-routed-experts: this model has no experts" in r.stderr
    with Server("-m", folder) as s:
        a = s.post("/generate", {"text": "a", "return_routed_experts": True})
        assert a.status == 400 and "--enable-return-routed-experts" in a.json()["error"]["message"]


def test_batch(folder, expected, tmp_path):
    line = {"custom_id": "1", "prompt": PROMPT, "max_tokens": 9, "ignore_eos": True, "return_token_ids": True}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    subprocess.run([TOKA, "batch", "-m", folder, "-i", "in.jsonl", "-o", "out.jsonl", "--enable-return-routed-experts"], cwd=tmp_path, check=True)
    choice = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]["choices"][0]
    check(expected, choice["prompt_token_ids"] + choice["token_ids"], from_npy(choice["routed_experts"]))
