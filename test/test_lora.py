"""Tests of adapters (LoRA): a model with an adapter against the model whose matrices numpy has added the adapter to, several adapters
in one step, adapters that come, change and go while requests run, and folders that are wrong. Run through test/run.sh."""
import itertools
import json
import os
import re
import subprocess
import threading
import time

import numpy as np
import pytest

import model_weights as mw
from server import ROOT, TOKA, Server

ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}, "TOKA_DEVICE": "cpu"}
IDS = [(7 * i * i + 11 * i) % 160 + 3 for i in range(70)]


def is_linear(name):
    """A matrix that an adapter may change."""
    module = name.removesuffix(".weight")
    return (name.endswith("_proj.weight") or ".in_proj_" in name) and ".layers." in name and "kv_b" not in name and \
        "expert" not in module


def write_adapter(folder, shapes, seed=1, r=4, alpha=16, dtype="F32", prefix="base_model.model.", edit=None, cut=0, **config):
    """A PEFT folder with random A and B for the matrices of `shapes`, and what it adds to each matrix, as float64. Its scale and ranks
    are PEFT's: rslora, and patterns by the end of a module's name. edit(tensors) changes the tensors."""
    os.makedirs(folder, exist_ok=True)
    settings = {"peft_type": "LORA", "r": r, "lora_alpha": alpha, "target_modules": "all-linear", "bias": "none", "use_dora": False,
                "modules_to_save": None, "lora_dropout": 0.1, "init_lora_weights": True, "task_type": "CAUSAL_LM", **config}
    tensors, deltas, random = {}, {}, np.random.default_rng(seed)
    for name, (rows, cols) in shapes.items():
        module = name.removesuffix(".weight")
        find = lambda field, other: next((v for k, v in settings.get(field, {}).items() if module == k.lstrip("^") or
                                          (k[0] != "^" and module.endswith("." + k))), other)
        rank, strength = find("rank_pattern", r), find("alpha_pattern", alpha)
        scale = strength / (np.sqrt(rank) if settings.get("use_rslora") else rank)
        a, b = random.normal(0, 0.5 / np.sqrt(cols), (rank, cols)), random.normal(0, 0.6 / max(scale, 0.1), (rows, rank))
        bits = [mw.to_bits(x.astype(np.float32), dtype) for x in (a, b)]
        tensors.update({f"{prefix}{module}.lora_{x}.weight": (dtype, y) for x, y in zip("AB", bits)})
        a, b = (mw.from_bits(x, dtype).astype(np.float64) for x in bits)
        deltas[name] = scale * b @ a
    if edit:
        edit(tensors)
    with open(f"{folder}/adapter_config.json", "w") as f:
        json.dump(settings, f)
    mw.write_safetensors(f"{folder}/adapter_model.safetensors", tensors)
    if cut:
        os.truncate(f"{folder}/adapter_model.safetensors", os.path.getsize(f"{folder}/adapter_model.safetensors") - cut)
    return deltas


def merge(folder, spec, deltas):
    """The model with what an adapter adds, its matrices as float32."""
    def edit(config, tensors):
        for name, delta in deltas.items():
            dtype, bits = tensors[name]
            tensors[name] = ("F32", mw.to_bits((mw.from_bits(bits, dtype) + delta).astype(np.float32), "F32"))
    mw.write(folder, spec, dense=True, edit=edit)


def shapes_of(spec):
    return {name: bits.shape for name, (_, bits) in mw.tensors_of(spec, dense=True).items() if is_linear(name)}


def body(**more):
    return {"prompt": IDS, "max_tokens": 12, "temperature": 0, "logprobs": 1, "prompt_logprobs": 0, "return_token_ids": True,
            "ignore_eos": True, **more}


def batch(folder, bodies, *flags):
    """The choices of a batch, in the order of the bodies."""
    source, out = f"{folder}/in.jsonl", f"{folder}/out-{time.monotonic_ns()}.jsonl"
    with open(source, "w") as f:
        f.writelines(json.dumps({"custom_id": str(i), **x}) + "\n" for i, x in enumerate(bodies))
    p = subprocess.run([TOKA, "batch", "-m", str(folder), "--served-model-name", "base", "-i", source, "-o", out, "-q", *flags], env=ENV,
                       cwd=ROOT, capture_output=True, text=True)
    assert p.returncode == 0, p.stderr
    with open(out) as f:
        lines = {x["custom_id"]: x for x in map(json.loads, f)}
    os.remove(out)
    assert all(x["error"] is None for x in lines.values()), [x["error"] for x in lines.values()]
    return [lines[str(i)]["response"]["body"]["choices"] for i in range(len(bodies))]


def numbers(choice):
    """All log-probabilities of a choice: of its prompt, then of its tokens."""
    prompt = [next(iter(t.values()))["logprob"] for t in choice["prompt_logprobs"][1:]]
    return np.array(prompt + choice["logprobs"]["token_logprobs"])


def compare(got, want, limit):
    assert got["token_ids"] == want["token_ids"]
    distance = np.abs(numbers(got) - numbers(want)).max()
    assert distance < limit, distance
    return distance


# ---- Equal to the merged model ----

KINDS = ["llama", "qwen2", "phi3", "llama-mlp-bias", "gemma2", "cohere", "olmo2", "glm4", "qwen3next", "qwen35", "deepseek2", "qwen3moe",
         "awq-32", "gptq-order", "fp8-block", "packed-phi3"]


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    """(the folder of a model, of an adapter, and the answer of the merged model)"""
    base = tmp_path_factory.mktemp(request.param)
    spec = mw.load(request.param)
    mw.write(base / "model", spec)
    deltas = write_adapter(base / "a", shapes_of(spec), dtype="BF16" if request.param == "llama" else "F32")
    merge(base / "merged", spec, deltas)
    return base / "model", base / "a", batch(base / "merged", [body()])[0][0]


@pytest.mark.parametrize("device", ["cpu", "plain"])
def test_adapter_is_the_merged_model(kind, device):
    folder, adapter, want = kind
    got, other = batch(folder, [body(model="a"), body(model="base")], "--device", device, "--lora-modules", f"a={adapter}")
    compare(got[0], want, 1e-4)
    assert np.abs(numbers(other[0]) - numbers(want)).max() > 0.05  # the adapter changes much


@pytest.mark.parametrize("flags", [["--tensor-parallel-size", "2"], ["--pipeline-parallel-size", "2"], ["--data-parallel-size", "2"],
                                   ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", "--max-num-batched-tokens", "24"]])
def test_adapter_on_ranks(tmp_path, flags):
    for name in ("awq-phi3", "awq-32", "qwen3next"):
        spec = mw.load(name)
        folder = tmp_path / name
        mw.write(folder, spec)
        write_adapter(tmp_path / "a", shapes_of(spec))
        write_adapter(tmp_path / "b", shapes_of(spec), seed=2, r=1)
        modules = ["--lora-modules", f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}"]
        bodies = [body(model=m) for m in ("a", "b", "base")]
        for got, want in zip(batch(folder, bodies, *modules, *flags), batch(folder, bodies, *modules)):
            compare(got[0], want[0], 1e-4)


@pytest.mark.parametrize("config", [{"use_rslora": True, "r": 5, "alpha": 3}, {"r": 1, "alpha": 0.5}, {"r": 33, "alpha": 64, "dtype": "F16"},
                                    {"rank_pattern": {"q_proj": 8, "^model.layers.0.mlp.up_proj": 2},
                                     "alpha_pattern": {"layers.1.self_attn.o_proj": 40, "down_proj": 2}},
                                    {"prefix": "base_model.model.model."}], ids=str)
def test_ranks_and_scales(tmp_path, config):
    config = dict(config)
    spec = mw.load("llama")
    strip = config.pop("prefix", None)
    mw.write(tmp_path / "m", spec)
    deltas = write_adapter(tmp_path / "a", shapes_of(spec), **config, **({"prefix": "base_model."} if strip else {}))
    merge(tmp_path / "merged", spec, deltas)
    want = batch(tmp_path / "merged", [body()])[0][0]
    for device in ("cpu", "plain"):
        got = batch(tmp_path / "m", [body(model="a")], "--device", device, "--lora-modules",
                    json.dumps({"name": "a", "path": str(tmp_path / "a"), "base_model_name": "base"}))[0][0]
        compare(got, want, 1e-4)


# ---- Several adapters at once ----

@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """(a model, six adapters of other ranks on other matrices, the flag that loads them)"""
    base = tmp_path_factory.mktemp("many")
    spec = mw.load("llama")
    mw.write(base / "m", spec)
    shapes = shapes_of(spec)
    for i in range(6):
        own = {k: v for j, (k, v) in enumerate(shapes.items()) if i == 0 or j % 3 != i % 3}
        write_adapter(base / f"l{i}", own, seed=10 + i, r=1 + 3 * i)
    return base, spec, ["--lora-modules", *(f"l{i}={base / f'l{i}'}" for i in range(6))]


def test_a_row_does_not_depend_on_others(many):
    """Requests of seven models, with shared beginnings, in one batch and each alone: equal to the last bit, whatever the step holds."""
    base, _, flags = many
    names = ["base", *(f"l{i}" for i in range(6))]
    bodies = [body(model=names[i % 7], prompt=IDS[:n], n=1 + i % 3, temperature=i % 2, seed=i, max_tokens=9)
              for i, n in enumerate([5, 16, 17, 33, 50, 70] * 7)]
    together = batch(base / "m", bodies, *flags)
    assert together == batch(base / "m", bodies, *flags, "--max-num-seqs", "3", "--max-num-batched-tokens", "16")
    assert together == batch(base / "m", bodies, *flags, "--threads", "1", "--no-enable-prefix-caching")
    for i in (0, 1, 8, 13, 27, 41):
        assert batch(base / "m", [bodies[i]], *flags)[0] == together[i]


def test_adapters_share_no_pages(many):
    base, _, flags = many
    with Server("-m", str(base / "m"), "--served-model-name", "base", *flags) as s:
        ask = lambda name: s.post("/v1/completions", {"model": name, "prompt": IDS, "max_tokens": 2, "temperature": 0}).json()
        hits = lambda name: ask(name)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert [hits(m) for m in ("base", "l0", "l1", "base", "l0", "l1")] == [0, 0, 0, 64, 64, 64]
        models = s.get("/v1/models").json()["data"]
        assert [m["id"] for m in models] == ["base", *(f"l{i}" for i in range(6))] and models[0]["parent"] is None
        assert models[2]["parent"] == "base" and models[2]["root"] == str(base / "l1")
        assert s.get("/v1/models/l3").json()["root"] == str(base / "l3") and s.get("/v1/models/none").status == 404
        a = s.post("/v1/completions", {"model": "other", "prompt": IDS})
        assert a.status == 404 and a.error()["code"] == "model_not_found"
        assert ask("l2")["model"] == "l2"
        info = lambda: re.search(r'^toka:lora_requests_info{.*,max_lora="64",waiting_lora_adapters="",running_lora_adapters="(.*)"} [1-9]',
                                 s.get("/metrics").body.decode(), re.M)[1]
        assert info() == ""
        long = threading.Thread(target=lambda: s.post("/v1/completions", {"model": "l1", "prompt": IDS, "max_tokens": 300, "ignore_eos": True}))
        long.start()
        while info() != "l1":
            assert long.is_alive()
        long.join()


def test_drafts_with_adapters(many):
    base, _, flags = many
    bodies = [body(model=m, prompt=IDS[:20] * 3, max_tokens=60, prompt_logprobs=None, n=2, temperature=0.7) for m in ("base", "l0", "l5")]
    plain = batch(base / "m", bodies, *flags)
    drafts = ["--speculative-config", '{"method":"suffix","num_speculative_tokens":4}']
    assert batch(base / "m", bodies, *flags, *drafts) == plain


# ---- Adapters that come and go ----

def load(s, name, path, status=200, **more):
    a = s.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more})
    assert a.status == status, a.body
    return a


def answer(s, name, **more):
    a = s.post("/v1/completions", body(model=name, **more))
    assert a.status == 200, a.body
    return a.json()["choices"][0]


def test_load_replace_unload(many):
    base, _, _ = many
    with Server("-m", str(base / "m"), "--served-model-name", "base", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "10") as s:
        a = load(s, "x", base / "l1")
        assert a.body == b"Success: LoRA adapter 'x' added successfully." and a.headers["content-type"].startswith("text/plain")
        first = answer(s, "x")
        assert load(s, "x", base / "l2", 400).error()["message"] == "adapter x is loaded already; load_inplace replaces it"
        assert answer(s, "x")["logprobs"] == first["logprobs"]
        load(s, "x", base / "l2", load_inplace=True)
        second = answer(s, "x")
        assert second["logprobs"] != first["logprobs"]
        load(s, "y", base / "l1")
        assert answer(s, "y")["logprobs"] == first["logprobs"]
        assert "as many as may be (--max-loras)" in load(s, "z", base / "l1", 400).error()["message"]
        assert "its rank is not a whole number up to --max-lora-rank" in load(s, "y", base / "l4", 400, load_inplace=True).error()["message"]
        assert answer(s, "y")["logprobs"] == first["logprobs"]
        load(s, "base", base / "l1", 400)
        # the route of prime-rl replaces
        assert s.post("/load_lora_adapter", {"lora_name": "y", "lora_path": str(base / "l2")}).json()["success"]
        assert answer(s, "y")["logprobs"] == second["logprobs"]
        a = s.post("/v1/unload_lora_adapter", {"lora_name": "x"})
        assert a.status == 200 and a.body == b"Success: LoRA adapter 'x' removed successfully."
        assert s.post("/v1/unload_lora_adapter", {"lora_name": "x"}).status == 404
        assert s.post("/v1/completions", body(model="x")).status == 404
        assert [m["id"] for m in s.get("/v1/models").json()["data"]] == ["base", "y"]
        load(s, "x", base / "l1")
        assert answer(s, "x")["logprobs"] == first["logprobs"]
        for bad in ({}, {"lora_name": "x"}, {"lora_path": "x"}):
            assert s.post("/v1/load_lora_adapter", bad).status == 400
        generated = s.post("/generate", {"input_ids": IDS, "lora_path": "x", "sampling_params": {"max_new_tokens": 12, "temperature": 0,
                                                                                                 "ignore_eos": True}}).json()
        assert generated["output_ids"] == first["token_ids"]


def test_requests_keep_their_adapter(many):
    """Long answers begin; then their adapter is replaced many times and unloaded. They end as if nothing had happened, and the places
    of old adapters are used again."""
    base, _, _ = many
    long = {"max_tokens": 400, "prompt_logprobs": None, "temperature": 1, "seed": 5}
    with Server("-m", str(base / "m"), "--served-model-name", "base", "--enable-lora") as s:
        load(s, "x", base / "l3")
        want = answer(s, "x", **long)
        got = []
        threads = [threading.Thread(target=lambda: got.append(answer(s, "x", **long))) for _ in range(4)]
        for t in threads:
            t.start()
        while not s.metric("num_requests_running"):
            time.sleep(0.001)
        for i in range(300):
            load(s, "x", base / f"l{i % 2}", load_inplace=True)
        assert s.post("/v1/unload_lora_adapter", {"lora_name": "x"}).status == 200
        for t in threads:
            t.join()
        same = sum(x["token_ids"] == want["token_ids"] and x["logprobs"] == want["logprobs"] for x in got)
        assert same >= 1 and len(got) == 4  # a thread may have begun after the first replacement
        load(s, "x", base / "l3")
        assert answer(s, "x", **long) == want


def test_requests_race_with_unloading(many):
    """An adapter that is unloaded between the parsing of a request and its submission: the model is not found, as before the parsing."""
    base, _, _ = many
    with Server("-m", str(base / "m"), "--served-model-name", "base", "--enable-lora") as s:
        found, stop = set(), []
        def ask():
            while not stop:
                found.add(s.post("/v1/completions", body(model="x", max_tokens=1)).status)
        threads = [threading.Thread(target=ask) for _ in range(6)]
        for t in threads:
            t.start()
        for _ in range(300):
            load(s, "x", base / "l1")
            s.post("/v1/unload_lora_adapter", {"lora_name": "x"})
        stop.append(True)
        for t in threads:
            t.join()
        assert found == {200, 404}


def test_killed_while_adapters_load(many):
    """Each answer is that of the old or of the new adapter, until the server is killed; a new start has what its flags say."""
    base, _, _ = many
    flags = ["-m", str(base / "m"), "--served-model-name", "base", "--lora-modules", f"x={base / 'l1'}"]
    got = []
    with Server(*flags) as s:
        wanted = [answer(s, "x")["logprobs"]]
        load(s, "x", base / "l2", load_inplace=True)
        wanted.append(answer(s, "x")["logprobs"])

        def replace():
            for i in itertools.count():
                load(s, "x", base / f"l{1 + i % 2}", load_inplace=True)

        def read():
            while True:
                got.append(answer(s, "x")["logprobs"])

        def until_killed(do):
            with pytest.raises((OSError, EOFError)):
                do()

        threads = [threading.Thread(target=until_killed, args=(do,)) for do in (replace, read, read)]
        for t in threads:
            t.start()
        end = time.time() + 60
        while len(got) < 20 and time.time() < end:
            time.sleep(0.01)
        s.p.kill()
        for t in threads:
            t.join()
    assert len(got) >= 20 and wanted[0] != wanted[1] and all(x in wanted for x in got) and all(x in got for x in wanted)
    with Server(*flags) as s:
        assert answer(s, "x")["logprobs"] == wanted[0]


def test_adapters_and_new_weights(many):
    """The base changes below a loaded adapter: the answers are those of the new base with the adapter, and no old page is read."""
    base, spec, _ = many
    deltas = write_adapter(base / "one", shapes_of(spec), seed=33)
    other = {**spec, "seed": spec["seed"] + 1}
    mw.write(base / "m2", other)
    merge(base / "merged2", other, deltas)
    want = batch(base / "merged2", [body()])[0][0]
    with Server("-m", str(base / "m"), "--served-model-name", "base", "--lora-modules", f"x={base / 'one'}") as s:
        assert answer(s, "x")["token_ids"] != want["token_ids"]
        assert s.post("/update_weights", {"weight_dir": str(base / "m2")}).status == 200
        compare(answer(s, "x"), want, 1e-4)


def test_admin_key_and_off(many):
    base, _, flags = many
    with Server("-m", str(base / "m"), "--enable-lora", "--admin-key", "secret") as s:
        assert s.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(base / "l1")}).status == 401
        a = s.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(base / "l1")}, Authorization="Bearer secret")
        assert a.status == 200
    with Server("-m", str(base / "m")) as s:
        assert "--enable-lora" in load(s, "x", base / "l1", 400).error()["message"]


def test_chats_responses_messages(tmp_path):
    """Each API chooses an adapter by the model's name."""
    shapes = {f"model.layers.{i}.{m}.weight": size for i in range(6)
              for m, size in {"mlp.up_proj": (448, 256), "self_attn.v_proj": (128, 256), "self_attn.o_proj": (256, 256)}.items()}
    write_adapter(tmp_path / "a", shapes, r=8)
    with Server("--served-model-name", "base", "--lora-modules", f"a={tmp_path / 'a'}") as s:
        text = "Tom has 12 apples. He buys 7 more apples. How many apples does Tom have now?"
        asks = {"/v1/chat/completions": {"messages": [{"role": "user", "content": text}], "max_tokens": 20, "temperature": 0},
                "/v1/responses": {"input": text, "max_output_tokens": 20, "temperature": 0},
                "/v1/messages": {"messages": [{"role": "user", "content": text}], "max_tokens": 20, "temperature": 0}}
        for path, ask in asks.items():
            answers = [s.post(path, {**ask, "model": m}).json() for m in ("base", "a")]
            assert [x["model"] for x in answers] == ["base", "a"]
            texts = [re.findall(r'"(?:content|text)": "([^"]+)"', json.dumps(x))[0] for x in answers]
            assert "12" in texts[0] and texts[0] != texts[1], path


# ---- Folders that are wrong ----

def without(end):
    return lambda tensors: [tensors.pop(k) for k in list(tensors) if k.endswith(end)]


def put(name, shape, fill=0.0, dtype="F32"):
    def edit(tensors):
        tensors[name] = (dtype, mw.to_bits(np.full(shape, fill, np.float32), dtype))
    return edit


Q = "base_model.model.model.layers.1.self_attn.q_proj."
WRONG = {
    "dora": ({"use_dora": True}, "use_dora is true, expected none"),
    "bias": ({"bias": "all"}, "bias is \"all\", expected none"),
    "saved": ({"modules_to_save": ["lm_head"]}, "modules_to_save is an array, expected none"),
    "experts": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters is an array, expected none"),
    "replication": ({"layer_replication": [[0, 1]]}, "layer_replication is an array, expected none"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices is an array, expected none"),
    "fan": ({"fan_in_fan_out": True}, "fan_in_fan_out is true, expected none"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "expected a start that leaves W as it is"),
    "type": ({"peft_type": "IA3"}, 'peft_type is "IA3", expected "LORA"'),
    "targets": ({"target_modules": None}, "target_modules is missing, expected names of modules"),
    "rank": ({"rank_pattern": {"q_.*": 4}}, 'rank_pattern is "q_.*", expected a module\'s name'),
    "r": ({"r": 4.5}, "its rank is not a whole number"),
    "alpha": ({"lora_alpha": "big"}, "lora_alpha"),
    "no B": ({"edit": without("1.mlp.up_proj.lora_B.weight")}, "layer 1 has only one of lora_A and lora_B"),
    "no A": ({"edit": without("0.mlp.up_proj.lora_A.weight")}, "layer 0 has only one of lora_A and lora_B"),
    "empty": ({"edit": lambda t: t.clear()}, "has no tensors"),
    "shape": ({"edit": put(Q + "lora_A.weight", (4, 7))}, "[4,7], expected [4,"),
    "rank of A": ({"edit": put(Q + "lora_A.weight", (5, 72))}, "expected [4,"),
    "unknown": ({"edit": put("base_model.model.model.layers.1.self_attn.z_proj.lora_A.weight", (4, 8))}, "no such matrix"),
    "layer": ({"edit": put("base_model.model.model.layers.99.self_attn.q_proj.lora_A.weight", (4, 8))}, "no such matrix"),
    "embedding": ({"edit": put("base_model.model.model.embed_tokens.lora_embedding_A", (4, 8))}, "adapters of the embedding are not supported"),
    "lm_head": ({"edit": put("base_model.model.lm_head.lora_A.weight", (4, 8))}, "adapters of the LM head are not supported"),
    "magnitude": ({"edit": put(Q + "lora_magnitude_vector", (8,))}, "DoRA is not supported"),
    "bias tensor": ({"edit": put(Q + "lora_B.bias", (168,))}, "lora_bias is not supported"),
    "norm": ({"edit": put("base_model.model.model.layers.1.input_layernorm.lora_A.weight", (4, 8))}, "no such matrix"),
    "twice": ({"edit": put("base_model.model.layers.1.self_attn.q_proj.lora_A.weight", (4, 84))}, "two such tensors"),
    "nan": ({"edit": put(Q + "lora_B.weight", (168, 4), np.nan)}, "a number is infinite or NaN"),
    "cut": ({"cut": 100}, "the file"),
    "nearly all cut": ({"cut": 10 ** 9}, ""),
}


@pytest.fixture(scope="module")
def lora_server(many):
    base, spec, _ = many
    with Server("-m", str(base / "m"), "--served-model-name", "base", "--enable-lora") as s:
        yield s, base, spec


@pytest.mark.parametrize("name", WRONG)
def test_wrong_folders(lora_server, tmp_path, name):
    s, _, spec = lora_server
    changes, message = WRONG[name]
    changes = dict(changes)
    cut = changes.pop("cut", 0)
    folder = str(tmp_path / "a")
    r = changes.pop("r", 4)
    alpha = changes.pop("lora_alpha", 16)
    write_adapter(folder, shapes_of(spec), **changes)
    with open(f"{folder}/adapter_config.json") as f:
        settings = json.load(f)
    with open(f"{folder}/adapter_config.json", "w") as f:
        json.dump({**settings, "r": r, "lora_alpha": alpha}, f)
    if cut:
        path = f"{folder}/adapter_model.safetensors"
        os.truncate(path, max(0, os.path.getsize(path) - cut))
    error = load(s, "x", folder, 400).error()["message"]
    assert message in error and "\n" not in error and folder in error, error
    assert s.post("/v1/completions", body(model="x")).status == 404


@pytest.mark.parametrize("model, module, words", [
    ("qwen3moe", "mlp.experts.3.up_proj", "adapters of experts are not supported"), ("qwen3moe", "mlp.gate", "no such matrix"),
    ("qwen3next", "linear_attn.conv1d", "adapters of convolutions are not supported"),
    ("deepseek2", "self_attn.kv_b_proj", "adapters of kv_b_proj are not supported")])
def test_wrong_modules(tmp_path, model, module, words):
    """Matrices that other models have, of which toka adds nothing."""
    spec = mw.load(model)
    mw.write(tmp_path / "m", spec)
    name = next(n for n in mw.tensors_of(spec, dense=True) if n.endswith(f".{module}.weight"))
    write_adapter(tmp_path / "a", shapes_of(spec), edit=put(f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight", (4, 8)))
    p = subprocess.run([TOKA, "batch", "-m", str(tmp_path / "m"), "-i", "/dev/null", "-o", str(tmp_path / "out"), "--lora-modules", f"a={tmp_path / 'a'}"],
                       env=ENV, capture_output=True, text=True, timeout=60)
    assert p.returncode == 1 and words in p.stderr and module in p.stderr, p.stderr


def test_missing_files(lora_server, tmp_path):
    s, base, spec = lora_server
    for missing in ("adapter_config.json", "adapter_model.safetensors"):
        folder = tmp_path / missing
        write_adapter(folder, shapes_of(spec))
        os.remove(folder / missing)
        assert f"{missing}: No such file" in load(s, "x", folder, 400).error()["message"]
    assert s.post("/v1/completions", body(model="base")).status == 200


@pytest.mark.parametrize("flags, message", [
    (["--lora-modules", "a"], "--lora-modules: 'a', expected NAME=FOLDER"), (["--lora-modules", '{"name": "a"}'], "expected NAME=FOLDER"),
    (["--lora-modules", "a=/nowhere"], "--lora-modules a=/nowhere: /nowhere/adapter_config.json: No such file"), (["--max-loras", "65"], "--max-loras: 65, expected 0 to 64"),
    (["--max-lora-rank", "513"], "--max-lora-rank: 513, expected 0 to 512")])
def test_wrong_flags(flags, message):
    p = subprocess.run([TOKA, "serve", "--port", "0", "--files-dir", "off", *flags], env=ENV, capture_output=True, text=True, timeout=60)
    assert p.returncode == 1 and message in p.stderr, p.stderr
