"""Tests of what trainers use: token ids in and out through SGLang's /generate, weights that change while requests run. Run through
test/run.sh."""
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import threading
import time

import numpy as np
import pytest

from server import ROOT, TOKA, Server
from test_lora import write_adapter

PROBLEM = "Tom has 12 apples. He buys 7 more apples. How many apples does Tom have now?"


@pytest.fixture(scope="module")
def server():
    with Server() as s:
        yield s


# ---- /generate ----

def generate(s, **body):
    a = s.post("/generate", body)
    assert a.status == 200, a.body
    return a.json()


def completion(s, **body):
    a = s.post("/v1/completions", {"prompt": PROBLEM, "return_token_ids": True, "logprobs": 2, **body})
    assert a.status == 200, a.body
    return a.json()


def test_generate_is_a_completion(server):
    """The requests of slime and AReaL: ids in, ids and log-probabilities out, equal to those of /v1/completions."""
    want = completion(server, max_tokens=30, temperature=0.7, top_p=0.9, seed=5)
    choice = want["choices"][0]
    ids, params = choice["prompt_token_ids"], {"max_new_tokens": 30, "temperature": 0.7, "top_p": 0.9, "sampling_seed": 5}
    slime = {"skip_special_tokens": False, "no_stop_trim": False, "spaces_between_special_tokens": False, "stop": None, "stop_token_ids": None}
    got = generate(server, input_ids=ids, sampling_params={**params, **slime}, return_logprob=True, top_logprobs_num=2, rid="r7")
    meta = got["meta_info"]
    assert got["text"] == choice["text"] and got["output_ids"] == choice["token_ids"]
    assert [[t[0], t[1]] for t in meta["output_token_logprobs"]] == [list(x) for x in zip(choice["logprobs"]["token_logprobs"], choice["token_ids"])]
    assert all(len(top) == 2 and top[0][0] >= top[1][0] for top in meta["output_top_logprobs"])
    assert meta["id"] == "r7" and meta["prompt_tokens"] == len(ids) and meta["completion_tokens"] == len(choice["token_ids"])
    assert meta["input_token_logprobs"] == [] and meta["output_token_logprobs"][0][2] is None and meta["cached_tokens"] >= 16
    plain = generate(server, text=PROBLEM, sampling_params=params)
    assert plain["text"] == got["text"] and "output_token_logprobs" not in plain["meta_info"]


def test_generate_finish_reasons(server):
    greedy = {"temperature": 0, "max_new_tokens": 4}
    end = lambda **more: generate(server, text=PROBLEM, sampling_params={**greedy, **more})["meta_info"]["finish_reason"]
    assert end() == {"type": "length", "length": 4}
    whole = generate(server, text=PROBLEM, sampling_params={"temperature": 0})  # at most 128 tokens
    stop = whole["meta_info"]["finish_reason"]
    assert stop["type"] == "stop" and stop["matched"] == whole["output_ids"][-1]
    word = whole["text"].split()[2]
    assert end(max_new_tokens=60, stop=[word]) == {"type": "stop", "matched": word}
    assert end(stop_token_ids=[whole["output_ids"][1]], max_new_tokens=9) == {"type": "stop", "matched": whole["output_ids"][1]}
    assert end(ignore_eos=True, max_new_tokens=150)["length"] == 150


def test_generate_lists(server):
    params = {"temperature": 1, "max_new_tokens": 5, "n": 2, "sampling_seed": 3}
    many = generate(server, text=[PROBLEM, "Tom"], sampling_params=params)
    assert [isinstance(x["text"], str) for x in many] == [True] * 4 and len({x["meta_info"]["id"] for x in many}) == 4
    assert [x["meta_info"]["prompt_tokens"] for x in many] == [25, 25, 3, 3]
    two = generate(server, text=PROBLEM, sampling_params=params)
    assert [x["output_ids"] for x in two] == [x["output_ids"] for x in many[:2]]
    one = generate(server, input_ids=[[5, 6, 7]], sampling_params={"max_new_tokens": 1})
    assert len(one) == 1 and isinstance(generate(server, input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 1}), dict)


def test_generate_scores_prompts(server):
    want = completion(server, max_tokens=1, prompt_logprobs=1)["choices"][0]
    ids = want["prompt_token_ids"]
    expected = [None] + [x[str(i)]["logprob"] for x, i in zip(want["prompt_logprobs"][1:], ids[1:])]
    for first in (0, 3):
        for n in (0, 1):
            meta = generate(server, input_ids=ids, sampling_params={"max_new_tokens": n}, return_logprob=True, logprob_start_len=first,
                            top_logprobs_num=1, return_text_in_logprobs=True)["meta_info"]
            tokens = meta["input_token_logprobs"]
            assert [t[1] for t in tokens] == ids[first:] and [t[0] for t in tokens] == pytest.approx(expected[first:], abs=1e-4)
            assert meta["completion_tokens"] == n and all(isinstance(t[2], str) for t in tokens)
            assert (meta["input_top_logprobs"][0] is None) == (first == 0) and len(meta["input_top_logprobs"]) == len(tokens)


def test_generate_streams(server):
    body = {"text": PROBLEM, "sampling_params": {"temperature": 1, "max_new_tokens": 12, "n": 2, "sampling_seed": 4}, "return_logprob": True}
    whole = generate(server, **body)
    a = server.post("/generate", {**body, "stream": True})
    events = [line[6:] for line in a.body.decode().split("\n\n") if line]
    assert a.headers["content-type"].startswith("text/event-stream") and events.pop() == "[DONE]"
    chunks = [json.loads(e) for e in events]
    for i in range(2):
        mine = [c for c in chunks if c["index"] == i]
        texts = [c["text"] for c in mine]
        assert all(b.startswith(a) for a, b in zip(texts, texts[1:])) and [len(c["output_ids"]) for c in mine] == list(range(1, len(mine) + 1))
        last = mine[-1]
        assert (last["text"], last["output_ids"]) == (whole[i]["text"], whole[i]["output_ids"])
        assert last["meta_info"]["output_token_logprobs"] == whole[i]["meta_info"]["output_token_logprobs"]
        assert all(c["meta_info"]["finish_reason"] is None for c in mine[:-1]) and last["meta_info"]["finish_reason"]


def test_generate_constraints(server):
    got = generate(server, text=PROBLEM, sampling_params={"max_new_tokens": 9, "regex": "[0-9]{3}"})
    assert len(got["text"]) == 3 and got["text"].isdigit() and got["meta_info"]["finish_reason"]["type"] == "stop"


@pytest.mark.parametrize("body, words, param", [
    ({}, "text: missing", "text"), ({"text": "a", "input_ids": [1]}, "input_ids: the request has text", "input_ids"),
    ({"input_ids": ["a"]}, "input_ids: expected", "input_ids"), ({"input_ids": [1 << 40]}, "input_ids[0]: 1099511627776 is no token id", "input_ids"),
    ({"input_ids": [99999999]}, "vocabulary", "input_ids"), ({"text": 7}, "text: expected a text", "text"), ({"input_ids": []}, "no tokens", "input_ids"),
    ({"text": "a", "sampling_params": [{}]}, "sampling_params: expected an object", "sampling_params"),
    ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens: -1", "max_new_tokens"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens: 0, expected 1 or more without logprob_start_len", "max_new_tokens"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 1 << 20}}, "after a prompt of", "max_new_tokens"),
    ({"text": "a", "sampling_params": {"min_new_tokens": 5, "max_new_tokens": 2}}, "min_new_tokens: 5, expected 0 to 2", "min_new_tokens"),
    ({"text": "a", "sampling_params": {"min_tokens": 5, "max_new_tokens": 2}}, "min_tokens: 5, expected 0 to 2", "min_tokens"),
    ({"text": "Tom has " * 9999, "sampling_params": {"max_new_tokens": 1}}, "the prompt has", "text"),
    ({"text": "a", "sampling_params": {"temperature": "hot"}}, "temperature: expected a number", "temperature"),
    ({"text": "a", "sampling_params": {"top_p": 2}}, "top_p: 2", "top_p"), ({"text": "a", "sampling_params": {"stop": 5}}, "stop: expected", "stop"),
    ({"text": "a", "sampling_params": {"structural_tag": "{}"}}, "structural_tag is not supported", "structural_tag"),
    ({"text": "a", "structural_tag": "{}"}, "structural_tag is not supported", "structural_tag"),
    ({"text": "a", "json_schema": "{}"}, "json_schema is not supported", "json_schema"),
    ({"text": "a", "sampling_params": {"guided_regex": "a"}}, "guided_regex is not supported", "guided_regex"),
    ({"text": "a", "sampling_params": {"response_format": {"type": "json_object"}}}, "response_format is not supported", "response_format"),
    ({"text": "a", "return_routed_experts": True}, "needs a mixture of experts", "return_routed_experts"),
    ({"text": "a", "stream": True, "return_logprob": True, "logprob_start_len": 0}, "with stream is not supported", "logprob_start_len"),
    ({"text": "a", "sampling_params": {"regex": "("}}, "regex: regex: ( without )", "regex"),
    ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "ebnf: the request has regex, too, expected one constraint", "ebnf")])
def test_generate_refuses(server, body, words, param):
    """A 400 whose message and param name the field as it was sent."""
    a = server.post("/generate", body)
    assert a.status == 400 and words in a.error()["message"] and a.error()["param"] == param, a.body


def test_generate_names_the_model_as_sent():
    with Server("--served-model-name", "m") as s:
        for field in ("model", "lora_path"):
            a = s.post("/generate", {"text": "a", field: "other"})
            assert a.status == 404 and a.error()["param"] == field and a.error()["message"].startswith(field + ": 'other'"), a.body


# ---- Weights that change ----

def read_tensors(path):
    with open(path, "rb") as f:
        head = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()
    return head, data


def write_folder(folder, change=None, drop=None, cut=0, tokenizer=True, **config):
    """A copy of test/model; change(name, dtype, shape, bytes) gives other bytes, or other (shape, bytes)."""
    os.makedirs(folder, exist_ok=True)
    source = f"{ROOT}/test/model"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if tokenizer:
            shutil.copy(f"{source}/{name}", folder)
    with open(f"{source}/config.json") as f:
        settings = {**json.load(f), **config}
    with open(f"{folder}/config.json", "w") as f:
        json.dump(settings, f)
    head, data = read_tensors(f"{source}/model.safetensors")
    new, blob = {}, b""
    for name, t in head.items():
        if name in ("__metadata__", drop):
            continue
        piece, shape = data[slice(*t["data_offsets"])], t["shape"]
        changed = change(name, shape, piece) if change else piece
        shape, piece = changed if isinstance(changed, tuple) else (shape, changed)
        new[name] = {"dtype": t["dtype"], "shape": shape, "data_offsets": [len(blob), len(blob) + len(piece)]}
        blob += piece
    text = json.dumps(new).encode()
    with open(f"{folder}/model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + blob[:len(blob) - cut])
    return str(folder)


def turned(name, shape, piece):
    """Other weights: the rows of one matrix in reverse."""
    if not name.endswith("layers.0.mlp.down_proj.weight"):
        return piece
    n = len(piece) // shape[0]
    return b"".join(piece[i:i + n] for i in reversed(range(0, len(piece), n)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("weights")
    return [write_folder(base / "a"), write_folder(base / "b", turned, tokenizer=False)]


def update(s, folder, status=200, **more):
    a = s.post("/update_weights", {"weight_dir": folder, **more})
    assert a.status == status, a.body
    return a.json()


ASKS = [{"prompt": PROBLEM.replace("12", str(i)), "max_tokens": 24, "temperature": 0.8, "seed": i, "logprobs": 1} for i in range(4)]


def answers(s, n=4):
    out = []
    for ask in ASKS[:n]:
        choice = s.post("/v1/completions", ask).json()["choices"][0]
        out.append((choice["text"], choice["logprobs"]["token_logprobs"]))
    return out


@pytest.fixture(scope="module")
def alone(folders):
    """The answers of each folder alone."""
    out = []
    for folder in folders:
        with Server("-m", folder if os.path.exists(f"{folder}/tokenizer.json") else write_folder(folder + "2", turned)) as s:
            out.append(answers(s))
    assert out[0] != out[1]
    return out


@pytest.fixture(scope="module", params=[[], ["--device", "plain"], ["--tensor-parallel-size", "2"], ["--data-parallel-size", "2"], ["--pipeline-parallel-size", "2"]],
                ids=["cpu", "plain", "tensor", "data", "pipeline"])
def trained(request, folders):
    with Server("-m", folders[0], "--served-model-name", "m", *request.param) as s:
        s.exact, s.slow = "tensor" not in str(request.param) and "plain" not in str(request.param), "plain" in str(request.param)
        yield s


def same(got, want, exact):
    if exact:
        return got == want
    equal = [(g, w) for g, w in zip(got, want) if g[0] == w[0]]
    return all(g[1] == pytest.approx(w[1], abs=1e-3) for g, w in equal) and len(equal) >= len(got) * 3 // 4


def test_answers_are_those_of_each_folder(trained, folders, alone):
    """Also of prompts that the prefix cache has with the old weights; the version is in each answer."""
    first = trained.post("/v1/completions", ASKS[0]).json()["choices"][0]
    assert "weight_version" not in first and trained.get("/weight_info").json()["weight_version"] == "default"
    n = 1 if trained.slow else 4
    assert same(answers(trained, n), alone[0], trained.exact)
    for number, which in ((1, 1), (2, 0), (3, 1), (4, 1), (5, 0))[3 * trained.slow:]:
        number -= 3 * trained.slow
        got = update(trained, folders[which], weight_version=f"step-{number}")
        assert got["success"] and got["weight_version"] == f"step-{number}"
        assert same(answers(trained, n), alone[which], trained.exact), number
        choice = trained.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tom"}], "max_tokens": 3}).json()["choices"][0]
        assert choice["weight_version"] == f"step-{number}" and "weight_versions" not in choice
    assert trained.get("/get_weight_version").json()["weight_version"] == f"step-{number}"
    assert trained.post("/update_weight_version", {"new_version": "x"}).json()["weight_version"] == "x"
    assert generate(trained, text="Tom", sampling_params={"max_new_tokens": 1})["meta_info"]["weight_version"] == "x"
    update(trained, folders[0])
    assert trained.get("/weight_info").json()["weight_version"] == str(number + 1)


@pytest.fixture(scope="module")
def loaded_server(folders):
    with Server("-m", folders[0], "--max-num-seqs", "20", "--served-model-name", "m") as s:
        yield s


@pytest.fixture
def loaded(loaded_server):
    """The server; a test that fails while it is paused or sleeps does not leave it so."""
    yield loaded_server
    loaded_server.post("/wake_up", {})


def until(condition, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "waited too long"
        time.sleep(0.002)


class Load:
    """50 requests at once, more than run at once; their answers, in order."""

    def __init__(self, s, max_tokens=150, **more):
        self.answers = [None] * 50
        self.threads = [threading.Thread(target=self.ask, args=(s, i, {"max_tokens": max_tokens, "ignore_eos": True, **more})) for i in range(50)]
        before = s.metric("generation_tokens_total")
        for t in self.threads:
            t.start()
        until(lambda: s.metric("generation_tokens_total") >= before + 100)

    def ask(self, s, i, more):
        try:
            self.answers[i] = s.post("/v1/completions", {"prompt": f"Tom has {i} apples.", "temperature": 1, "seed": i, "return_token_ids": True, **more})
        except (OSError, EOFError):
            pass  # the server was killed

    def join(self):
        for t in self.threads:
            t.join(120)
        assert all(a is not None and a.status == 200 for a in self.answers), [a and a.body for a in self.answers]
        return [a.json()["choices"][0] for a in self.answers]


def pause(s, mode, **query):
    extra = "".join(f"&{k}={v}" for k, v in query.items())
    a = s.post(f"/pause?mode={mode}{extra}", {})
    assert a.status == 200 and a.json()["status"] == "paused" and s.get("/is_paused").json()["is_paused"], a.body
    return a.json()


def resume(s):
    a = s.post("/resume", {})
    assert a.status == 200 and a.json()["status"] == "resumed" and not s.get("/is_paused").json()["is_paused"]


def current(s):
    return s.get("/weight_info").json()["weight_version"]


def test_keep(loaded, folders):
    update(loaded, folders[0], weight_version="k0")
    load = Load(loaded)
    pause(loaded, "keep", clear_cache="false")
    tokens = loaded.metric("generation_tokens_total")
    time.sleep(0.3)
    assert loaded.metric("generation_tokens_total") == tokens and loaded.get("/health").status == 200
    update(loaded, folders[1], weight_version="k1")
    assert loaded.get("/is_paused").json()["num_paused_requests"] > 0
    resume(loaded)
    choices = load.join()
    assert all(len(c["token_ids"]) == 150 and c["finish_reason"] == "length" and c["weight_version"] == "k1" for c in choices)
    spans = [c["weight_versions"] for c in choices if "weight_versions" in c]  # of those that had begun
    assert spans and all([v for _, v in x] == ["k0", "k1"] and x[0][0] == 0 < x[1][0] < 150 for x in spans)
    assert any("weight_versions" not in c for c in choices)
    update(loaded, folders[0])


def test_update_without_a_pause(loaded, folders):
    load = Load(loaded)
    for i in range(10):
        update(loaded, folders[i % 2], weight_version=f"u{i}")
    choices = load.join()
    assert all(len(c["token_ids"]) == 150 for c in choices) and any(len(c.get("weight_versions", [])) > 2 for c in choices)
    update(loaded, folders[0])


def test_wait(loaded, folders):
    update(loaded, folders[0], weight_version="w0")
    load = Load(loaded)
    until(lambda: loaded.metric("num_requests_running") + loaded.metric("num_requests_waiting") == 50 or any(load.answers))
    later = []
    thread = threading.Thread(target=lambda: later.append(loaded.post("/v1/completions", {**ASKS[0], "max_tokens": 2}).json()["choices"][0]))
    paused = threading.Thread(target=lambda: pause(loaded, "wait"))
    paused.start()
    time.sleep(0.05)
    thread.start()
    paused.join(60)
    update(loaded, folders[1], weight_version="w1")
    assert pause(loaded, "wait")  # is paused already
    resume(loaded)
    choices = load.join()  # a request that came behind the pause is one of w1
    assert all(len(c["token_ids"]) == 150 and "weight_versions" not in c for c in choices)
    assert sum(c["weight_version"] == "w0" for c in choices) >= 20
    thread.join(60)
    assert later[0]["weight_version"] in ("w0", "w1") and later[0]["finish_reason"] == "length"
    update(loaded, folders[0])


def test_pauses_that_wait_leave_workers(folders):
    """More pauses wait than the server has threads: others are answered, and the engine goes on or pauses at once if asked to."""
    with Server("-m", folders[0], "--max-num-seqs", "4", "--server-threads", "2") as s:
        done, asked = [], {"prompt": "Tom", "max_tokens": 900, "ignore_eos": True, "n": 200}
        long = threading.Thread(target=lambda: done.append(s.post("/v1/completions", asked)))
        long.start()
        until(lambda: s.metric("num_requests_running"))
        for path in ("/resume", "/pause?mode=keep"):
            ends = []
            waiting = [threading.Thread(target=lambda: ends.append(s.post("/pause?mode=wait", {}))) for _ in range(8)]
            for t in waiting:
                t.start()
            until(lambda: s.metric("http_connections") >= 9)
            assert s.post("/tokenize", {"prompt": "Tom"}).status == 200 and not ends
            until(lambda: s.post(path, {}).status == 200 and not any(t.is_alive() for t in waiting))  # one may come after the first
            assert s.get("/is_paused").json()["is_paused"] == (path != "/resume") and not done
            assert {a.status for a in ends} <= {409, 200} and ends[0].status == 409 and "came meanwhile" in ends[0].error()["message"]
        s.post("/resume", {})
        assert s.post("/abort_request", {"abort_all": True}).json()["aborted"] == 1
        long.join(60)
        assert {c["finish_reason"] for c in done[0].json()["choices"]} <= {"abort", "length"} and s.stop() == 0


def test_abort(loaded, folders, alone):
    update(loaded, folders[0], weight_version="a0")
    load = Load(loaded, 800)
    pause(loaded, "abort")
    assert loaded.metric("num_requests_running") == 0
    update(loaded, folders[1])
    resume(loaded)
    choices = load.join()  # a request that came behind the pause is answered now
    cut = [c for c in choices if c["finish_reason"] == "abort"]
    assert len(cut) > 15 and all(len(c["token_ids"]) < 800 for c in cut) and any(c["token_ids"] for c in cut)
    assert answers(loaded) == alone[1]
    update(loaded, folders[0])


def test_sglang_names(loaded, folders, alone):
    """The calls of slime and AReaL: pause, flush, update from disk, continue; partial answers."""
    got = []
    body = {"text": "Tom", "rid": "r1", "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}, "return_logprob": True}
    thread = threading.Thread(target=lambda: got.append(generate(loaded, **body)))
    thread.start()
    loaded.wait_metric("num_requests_running", 1)
    assert loaded.post("/abort_request", {"rid": "no-such"}).json()["aborted"] == 0
    assert loaded.post("/abort_request", {"rid": "r1"}).json()["aborted"] == 1
    thread.join(60)
    assert got[0]["meta_info"]["finish_reason"]["type"] == "abort" and got[0]["meta_info"]["completion_tokens"] == len(got[0]["output_ids"]) < 900
    assert loaded.post("/pause_generation", {}).status == 200
    assert loaded.get("/flush_cache").status == loaded.post("/flush_cache", {}).status == 200
    a = loaded.post("/update_weights_from_disk", {"model_path": folders[1], "load_format": None, "weight_version": "5", "flush_cache": True})
    assert a.status == 200 and a.json()["success"] is True and a.json()["num_paused_requests"] == 0
    assert loaded.post("/continue_generation", {}).status == 200
    assert answers(loaded) == alone[1] and loaded.get("/get_weight_version").json()["weight_version"] == "5"
    for path in ("/init_weights_update_group", "/update_weights_from_tensor", "/init_communicator/", "/init_weight_transfer_engine"):
        a = loaded.post(path, {})
        assert a.status == 501 and "over NCCL" in a.error()["message"]
    assert loaded.post("/pause_generation", {"mode": "retract"}).status == 400 and loaded.post("/abort_requests", {}).status == 400
    assert loaded.get("/get_world_size/").json()["world_size"] == 1
    update(loaded, folders[0])


def test_vectors_are_not_cut(loaded):
    pause(loaded, "keep")
    got = []
    threads = [threading.Thread(target=lambda: got.append(loaded.post("/v1/embeddings", {"input": ["Tom", "Ann"]}).status)) for _ in range(2)]
    for t in threads:
        t.start()
    until(lambda: loaded.metric("num_requests_waiting") >= 4)
    assert loaded.post("/abort_request", {"abort_all": True}).json()["aborted"] == 2
    for t in threads:
        t.join(30)
    assert got == [503, 503]
    resume(loaded)


def test_stream_of_an_aborted_request(loaded):
    with loaded.connect() as c:
        body = json.dumps({"prompt": "Tom", "max_tokens": 900, "ignore_eos": True, "stream": True})
        c.send(f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n{body}")
        assert c.head()[0] == 200
        chunks = c.chunks()
        name = json.loads(next(chunks).decode().split("\n\n")[0].removeprefix("data: "))["id"]
        assert loaded.post("/abort_requests", {"request_ids": [name]}).json()["aborted"] == 1
        events = b"".join(chunks).decode().split("\n\n")
        assert events[-2] == "data: [DONE]" and json.loads(events[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"


# ---- Deltas: some of the tensors ----

DOWN = "model.layers.0.mlp.down_proj.weight"


def write_delta(path, names=(DOWN,), change=turned, dtype=None, cut=0):
    """A file with some tensors of test/model, changed; returns the SHA-256 of each."""
    head, data = read_tensors(f"{ROOT}/test/model/model.safetensors")
    new, blob, hashes = {}, b"", {}
    for name in names:
        t = head.get(name, head[DOWN])
        piece = change(DOWN if name not in head else name, t["shape"], data[slice(*t["data_offsets"])])
        shape, piece = piece if isinstance(piece, tuple) else (t["shape"], piece)
        new[name] = {"dtype": dtype or t["dtype"], "shape": shape, "data_offsets": [len(blob), len(blob) + len(piece)]}
        hashes[name], blob = hashlib.sha256(piece).hexdigest(), blob + piece
    text = json.dumps(new).encode()
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + blob[:len(blob) - cut])
    return hashes


def same_bytes(name, shape, piece):
    return piece


@pytest.mark.parametrize("as_file", [True, False])
def test_delta(trained, folders, alone, tmp_path, as_file):
    """One tensor makes the other folder's model; the version before, the hashes, and a chain of deltas whose files vanish."""
    n = 1 if trained.slow else 4
    update(trained, folders[0], weight_version="base")
    path = str(tmp_path / "d" / "model.safetensors")
    hashes = write_delta(path)
    where = path if as_file else os.path.dirname(path)
    a = trained.post("/update_weights", {"weight_dir": where, "load_format": "delta", "base_weight_version": "other"})
    assert a.status == 409 and "base_weight_version" in a.error()["message"] and current(trained) == "base"
    update(trained, where, load_format="delta", base_weight_version="base", sha256=hashes, weight_version="d1")
    assert same(answers(trained, n), alone[1], trained.exact) and current(trained) == "d1"
    for i in range(2):  # there and back
        shutil.rmtree(tmp_path / "d")
        write_delta(path, change=turned if i else same_bytes)
        update(trained, where, load_format="delta")
        assert same(answers(trained, n), alone[i], trained.exact)
    with open(f"/proc/{trained.p.pid}/maps") as f:
        maps = f.read()
    assert maps.count(path + "\n") >= 1 and maps.count("(deleted)") == 0  # replaced deltas are unmapped, the folder is not
    assert f"{folders[0]}/model.safetensors" in maps
    update(trained, folders[0])
    assert same(answers(trained, n), alone[0], trained.exact)


def test_delta_of_weights_that_are_quantized(folders, tmp_path):
    path = str(tmp_path / "d.safetensors")
    write_delta(path)
    with Server("-m", write_folder(tmp_path / "b", turned), "--quantization", "fp8") as s:
        want = answers(s, 2)
    with Server("-m", folders[0], "--quantization", "fp8") as s:
        assert answers(s, 2) != want
        update(s, path, load_format="delta")
        assert answers(s, 2) == want


def test_delta_of_the_embedding(folders, tmp_path):
    """The embedding is the LM head, too, if the model ties them: a delta changes both."""
    name = "model.embed_tokens.weight"
    half = lambda which, shape, piece: b"".join(struct.pack("<H", x ^ 0x8000) for x in struct.unpack(f"<{len(piece) // 2}H", piece)) if which == name else piece
    path = str(tmp_path / "d.safetensors")
    write_delta(path, [name], half)
    with Server("-m", write_folder(tmp_path / "b", half)) as s:
        want = answers(s, 2)
    with Server("-m", folders[0]) as s:
        assert answers(s, 2) != want
        update(s, path, load_format="delta")
        assert answers(s, 2) == want


def test_hostile_deltas(loaded, folders, alone, tmp_path):
    """Each is refused before anything changes."""
    update(loaded, folders[0], weight_version="h")
    wide = lambda name, shape, piece: ([shape[0] // 2, *shape[1:]], piece[:len(piece) // 2])
    path = lambda name: str(tmp_path / f"{name}.safetensors")
    good = write_delta(path("good"))
    write_delta(path("shape"), change=wide), write_delta(path("name"), [DOWN, "model.layers.99.x.weight"]), write_delta(path("cut"), cut=2)
    write_delta(path("dtype"), change=lambda name, shape, piece: piece + piece, dtype="F32"), write_delta(path("none"), [])
    (tmp_path / "empty").mkdir()
    cases = [("shape", {}, "expected ["), ("name", {}, "model.layers.99.x.weight: the open model has no such tensor"), ("cut", {}, "safetensors"),
             ("dtype", {}, "F32, expected BF16"), ("none", {}, "no tensors"), ("missing", {}, "No such file"),
             ("good", {"sha256": {DOWN: "0" * 64}}, "another SHA-256"), ("good", {"sha256": {}}, "no SHA-256 is given"),
             ("good", {"sha256": {**good, "x": "00"}}, "x has a SHA-256 but"), ("good", {"sha256": [1]}, "sha256: expected an object")]
    for name, more, words in cases:
        got = update(loaded, path(name), 400, load_format="delta", **more)
        assert words in got["message"] and current(loaded) == "h", (name, got)
    assert "there is no model.safetensors" in update(loaded, str(tmp_path / "empty"), 400, load_format="delta")["message"]
    assert "sha256" in update(loaded, folders[1], 400, sha256=good)["message"]
    assert answers(loaded) == alone[0]
    update(loaded, path("good"), load_format="delta")
    sleep(loaded, "?level=1"), wake(loaded)
    assert answers(loaded) == alone[1]
    update(loaded, folders[0])
    sleep(loaded, "?level=2")
    assert "missing in" in update(loaded, path("good"), 400, load_format="delta")["message"]
    wake(loaded)
    assert answers(loaded) == alone[0]


def test_deltas_that_are_dropped(loaded, folders, alone, tmp_path):
    """Weights that came as a delta are not read again: after level 2 it takes a delta with all tensors, or a folder."""
    names = [name for name in read_tensors(f"{folders[0]}/model.safetensors")[0] if name != "__metadata__"]
    part, whole = str(tmp_path / "part.safetensors"), str(tmp_path / "whole.safetensors")
    write_delta(part), write_delta(whole, names)
    update(loaded, folders[0])
    for _ in range(2):
        update(loaded, part, load_format="delta")
        sleep(loaded, "?level=2")
        assert not memory(loaded)[1]
        assert "came as a delta" in wake(loaded, status=500)["message"] and sleeping(loaded)
        assert "missing in" in update(loaded, part, 400, load_format="delta")["message"]
        wake(loaded, "?tags=weights")
        update(loaded, whole, load_format="delta", weight_version="w")
        wake(loaded, "?tags=kv_cache")
        assert answers(loaded) == alone[1] and current(loaded) == "w"
    update(loaded, folders[0])
    assert answers(loaded) == alone[0]


# ---- Checkpoints with quantized numbers take plain ones ----

E4M3 = np.array([(1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0 ** -6 for e in range(16) for m in range(8)][:127])


def to_e4m3(x):
    """The nearest e4m3 codes, ties to even; larger numbers become 448."""
    size = np.minimum(np.abs(x.astype(np.float64)), 448)
    above = np.searchsorted(E4M3, size)  # the first code that is not smaller
    below = np.maximum(above - 1, 0)
    left, right = size - E4M3[below], E4M3[above] - size
    codes = np.where((left < right) | ((left == right) & (below % 2 == 0)), below, above)
    return (codes | np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def rounded(x, dtype):
    """float32 numbers as they are in another type, and their bytes."""
    x = x.astype(np.float32)
    if dtype == "F32":
        return x, x.tobytes()
    if dtype == "F16":
        return x.astype(np.float16).astype(np.float32), x.astype(np.float16).tobytes()
    bits = x.view(np.uint32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return (bits << 16).astype(np.uint32).view(np.float32), bits.astype(np.uint16).tobytes()


WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False, "group_size": None}
FORMS = {  # name: (config, rows and columns of a block, type of the scales)
    "fp8-channel": ({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"], "config_groups": {"g": {
        "targets": ["Linear"], "weights": WEIGHTS, "input_activations": {**WEIGHTS, "strategy": "token", "dynamic": True}}}}, 1, 0, "BF16"),
    "fp8-block": ({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}, 128, 128, "F32"),
    "int4": ({"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], "config_groups": {"g": {
        "targets": ["Linear"], "weights": {**WEIGHTS, "num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}}}}, 1, 64, "F16"),
    "int4-zero": ({"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], "config_groups": {"g": {
        "targets": ["Linear"], "weights": {**WEIGHTS, "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}}}},
        1, 32, "BF16")}


def nibbles(codes):
    """Eight codes in each int32 of the last dimension, the first in the lowest bits."""
    words = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, 8)
    return (words << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint64).astype(np.uint32)


def quantized(name, shape, piece, form):
    """The tensors of a matrix in a format: its name, type, shape and bytes."""
    _, rows, cols, dtype = FORMS[form]
    N, K = shape
    cols = cols or K
    w = (np.frombuffer(piece, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(N, K)
    w = np.pad(w, ((0, -N % rows), (0, -K % cols))).reshape(-(-N // rows), rows, -(-K // cols), cols)  # the last blocks may be smaller
    top, low, high = np.abs(w).max((1, 3)), np.minimum(w.min((1, 3)), 0), np.maximum(w.max((1, 3)), 0)
    divisor = np.float32(448 if "fp8" in form else 15 if "zero" in form else 7.5)
    scale, scale_bytes = rounded(((high - low) if "zero" in form else top) / divisor, dtype)
    whole = lambda x: np.broadcast_to(x, w.shape).reshape(-1, w.shape[2] * cols)[:N, :K]
    quotient = whole(w / scale[:, None, :, None])
    module, scales = name.removesuffix(".weight"), list(scale.shape)
    if "fp8" in form:
        suffix = ".weight_scale_inv" if form == "fp8-block" else ".weight_scale"
        return [(name, "F8_E4M3", shape, to_e4m3(quotient).tobytes()), (module + suffix, dtype, scales, scale_bytes)]
    zero = np.minimum(np.rint(-low / scale), 15) if "zero" in form else np.full(scale.shape, 8, np.float32)
    codes = np.clip(np.rint(quotient) + whole(zero[:, None, :, None]), 0, 15)
    out = [(module + ".weight_packed", "I32", [N, K // 8], nibbles(codes).tobytes()), (module + ".weight_scale", dtype, scales, scale_bytes),
           (module + ".weight_shape", "I64", [2], np.array([N, K], np.int64).tobytes())]
    if "zero" in form:
        out.append((module + ".weight_zero_point", "I32", [N // 8, scales[1]], np.ascontiguousarray(nibbles(zero.T).T).tobytes()))
    return out


def write_quantized(folder, source, form):
    """A copy of a folder whose matrices of layers are quantized, by code that shares nothing with toka's."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{ROOT}/test/model/{name}", folder)
    with open(f"{source}/config.json") as f:
        config = {**json.load(f), "quantization_config": FORMS[form][0]}
    with open(f"{folder}/config.json", "w") as f:
        json.dump(config, f)
    head, data = read_tensors(f"{source}/model.safetensors")
    new, blob = {}, b""
    for name, t in head.items():
        if name == "__metadata__":
            continue
        piece = data[slice(*t["data_offsets"])]
        for own, dtype, shape, out in quantized(name, t["shape"], piece, form) if "_proj" in name else [(name, t["dtype"], t["shape"], piece)]:
            new[own] = {"dtype": dtype, "shape": shape, "data_offsets": [len(blob), len(blob) + len(out)]}
            blob += out
    text = json.dumps(new).encode()
    with open(f"{folder}/model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + blob)
    return str(folder)


@pytest.mark.parametrize("form", FORMS)
def test_plain_numbers_for_quantized_ones(folders, tmp_path, form):
    """A folder and a delta of bfloat16 get the format of the open model: answers are those of the quantized folder."""
    old, new = (write_quantized(tmp_path / name, folder, form) for name, folder in zip("ab", folders))
    path = str(tmp_path / "d.safetensors")
    with Server("-m", new) as s:
        want = answers(s, 2)
    with Server("-m", old) as s:
        before = answers(s, 2)
        assert before != want
        update(s, folders[1])
        assert answers(s, 2) == want
        update(s, old)
        assert answers(s, 2) == before
        write_delta(path, change=lambda *t: ([t[1][1], t[1][0]], t[2]))
        got = update(s, path, 400, load_format="delta")
        assert "expected [" in got["message"] and answers(s, 2) == before
        for change, then in ((turned, want), (same_bytes, before)):
            write_delta(path, change=change)
            update(s, path, load_format="delta")
            assert answers(s, 2) == then


# ---- Memory that is given back ----

def sleep(s, query="", status=200):
    a = s.post(f"/sleep{query}", {})
    assert a.status == status, a.body
    return a.json()


def wake(s, query="", status=200):
    a = s.post(f"/wake_up{query}", {})
    assert a.status == status, a.body
    return a.json()


def sleeping(s):
    return s.get("/is_sleeping").json()["is_sleeping"]


def memory(s):
    """Bytes of the process that are not of files, and whether it maps weights."""
    with open(f"/proc/{s.p.pid}/smaps_rollup") as f:
        anonymous = int(next(line for line in f if line.startswith("Anonymous:")).split()[1]) << 10
    with open(f"/proc/{s.p.pid}/maps") as f:
        return anonymous, "model.safetensors" in f.read()


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(loaded, folders, alone, level):
    """K and V go back to the system, with level 2 the weights, too; the answers after it are those before it."""
    update(loaded, folders[1], weight_version="s")
    Load(loaded, 300).join()
    before, mapped = memory(loaded)
    assert mapped and not sleeping(loaded)
    assert sleep(loaded, f"?level={level}")["status"] == "sleeping" and sleeping(loaded)
    after, mapped = memory(loaded)
    assert before - after > 20 << 20 and mapped == (level == 1), (before, after)
    a = loaded.post("/v1/completions", ASKS[0])
    assert a.status == 503 and "/wake_up" in a.error()["message"]
    assert loaded.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}).status == 503
    assert loaded.get("/health").status == loaded.get("/v1/models").status == 200 and loaded.post("/tokenize", {"prompt": "a"}).status == 200
    assert loaded.post("/resume", {}).status == 409 and sleeping(loaded)
    assert wake(loaded)["status"] == "awake" and not sleeping(loaded) and memory(loaded)[1]
    assert answers(loaded) == alone[1] and current(loaded) == "s"
    wake(loaded)
    update(loaded, folders[0])


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_sleep_ends_or_keeps_requests(loaded, folders, mode):
    wanted = {i: c["token_ids"] for i, c in enumerate(Load(loaded, 200).join())}
    load = Load(loaded, 200)
    sleep(loaded, f"?mode={mode}")
    assert loaded.metric("num_requests_running") == 0 and (mode != "keep" or loaded.get("/is_paused").json()["num_paused_requests"] > 0)
    wake(loaded)
    choices = load.join()
    cut = [c for c in choices if c["finish_reason"] == "abort"]
    assert (len(cut) > 15) == (mode == "abort") and all(len(c["token_ids"]) < 200 for c in cut)
    for i, c in enumerate(choices):
        assert c["token_ids"] == wanted[i][:len(c["token_ids"])]


def test_weights_come_while_it_sleeps(loaded, folders, alone, tmp_path):
    """As verl does: the parts wake one after the other, with new weights in between. The old files may vanish."""
    folder = write_folder(tmp_path / "old", turned)
    update(loaded, folder)
    sleep(loaded, "?level=2")
    shutil.rmtree(folder)
    got = wake(loaded, status=500)
    assert "no such folder" in got["message"] and sleeping(loaded)
    wake(loaded, "?tags=weights")
    assert loaded.post("/v1/completions", ASKS[0]).status == 503
    update(loaded, folders[1], weight_version="v9")
    assert loaded.post("/v1/completions", ASKS[0]).status == 503 and sleeping(loaded)
    wake(loaded, "?tags=kv_cache")
    assert answers(loaded) == alone[1] and current(loaded) == "v9"
    update(loaded, folders[0])


def test_files_that_change_while_it_sleeps(loaded, folders, alone, tmp_path):
    folder = write_folder(tmp_path / "a")
    update(loaded, folder)
    sleep(loaded, "?level=2")
    write_folder(folder, turned)
    assert "have changed" in wake(loaded, status=500)["message"] and sleeping(loaded)
    update(loaded, folder)
    wake(loaded)
    assert answers(loaded) == alone[1]
    update(loaded, folders[0])


@pytest.mark.parametrize("query, words", [("?level=3", "level: expected"), ("?level=", "level: expected"), ("?level=-1", "level: expected"),
                                          ("?mode=no", "mode: expected")])
def test_sleep_refuses(loaded, query, words):
    assert words in sleep(loaded, query, 400)["message"] and not sleeping(loaded)
    assert "tags: expected" in wake(loaded, "?tags=all", 400)["message"]
    assert loaded.post("/release_memory_occupation", {"tags": "kv_cache"}).status == 400


def test_sleep_level_0_pauses(loaded):
    sleep(loaded, "?level=0&mode=keep")
    assert sleeping(loaded) and memory(loaded)[1] and loaded.get("/is_paused").json()["is_paused"]
    wake(loaded, "?tags=scheduling")
    assert not sleeping(loaded)


@pytest.mark.parametrize("flags, level, words", [(["--device", "plain"], 1, "cannot give its memory back"), ([], 2, "embedded")])
def test_devices_that_cannot_sleep(flags, level, words):
    with Server(*flags) as s:
        assert words in sleep(s, f"?level={level}", 501)["message"]
        assert not sleeping(s) and s.post("/v1/completions", {"prompt": "Tom", "max_tokens": 2}).status == 200


@pytest.mark.parametrize("flags", [["--tensor-parallel-size", "2"], ["--data-parallel-size", "2", "--quantization", "fp8"],
                                   ["--num-speculative-tokens", "3", "--draft-model", f"{ROOT}/test/model"], ["--enable-sleep-mode", "--kv-cache-dtype", "fp8"]])
def test_sleep_of_other_engines(folders, flags):
    with Server("-m", folders[0], *flags) as s:
        want = answers(s)
        for query in ("?level=1", "?level=2"):
            sleep(s, query)
            wake(s)
            assert answers(s) == want, query


@pytest.mark.parametrize("flags", [["--tensor-parallel-size", "2"], ["--pipeline-parallel-size", "2"], ["--data-parallel-size", "2"]])
def test_ranks_get_new_weights_while_they_sleep(folders, alone, flags):
    """All ranks give their memory back in the middle of requests, take other weights and go on."""
    with Server("-m", folders[0], "--served-model-name", "m", *flags) as s:
        load = Load(s, 60)
        sleep(s, "?mode=keep&level=2")
        assert s.post("/v1/completions", ASKS[0]).status == 503 and not memory(s)[1]
        update(s, folders[1], weight_version="new")
        wake(s)
        choices = load.join()
        assert all(len(c["token_ids"]) == 60 for c in choices) and "new" in {c.get("weight_version") for c in choices} <= {None, "new"}
        assert same(answers(s), alone[1], "--tensor-parallel-size" not in flags) and current(s) == "new"


def test_stopped_while_it_sleeps(folders):
    """SIGTERM: requests that wait end with what they have."""
    with Server("-m", folders[0], "--served-model-name", "m") as s:
        load = Load(s, 800)
        sleep(s, "?mode=keep&level=2")
        assert s.stop() == 0
        assert {c["finish_reason"] for c in load.join()} <= {"abort", "length"}


def test_hostile_folders(loaded, folders, alone, tmp_path):
    """Each is refused before anything changes, in the middle of requests."""
    wide = lambda name, shape, piece: ([shape[0] // 2, *shape[1:]], piece[:len(piece) // 2]) if name.endswith("0.mlp.up_proj.weight") else piece
    other = write_folder(tmp_path / "tokenizer")
    with open(f"{other}/tokenizer.json") as f:
        tokenizer = json.load(f)
    with open(f"{other}/tokenizer.json", "w") as f:
        json.dump(tokenizer, f, indent=1)
    update(loaded, other)  # the same tokenizer in other bytes
    names = list(tokenizer["model"]["vocab"])
    tokenizer["model"]["vocab"] = {**tokenizer["model"]["vocab"], names[-1]: tokenizer["model"]["vocab"][names[-2]], names[-2]: tokenizer["model"]["vocab"][names[-1]]}
    with open(f"{other}/tokenizer.json", "w") as f:
        json.dump(tokenizer, f)
    L = json.load(open(f"{ROOT}/test/model/config.json"))["num_hidden_layers"]
    (tmp_path / "empty").mkdir()
    before, load = current(loaded), Load(loaded)
    cases = [(other, "tokenizer is not that"), (write_folder(tmp_path / "shape", wide), "up_proj"), (write_folder(tmp_path / "missing", drop="model.norm.weight"), "model.norm.weight"),
             (write_folder(tmp_path / "cut", cut=1000), "safetensors"), (write_folder(tmp_path / "layers", num_hidden_layers=L - 1), "layers, expected"),
             (str(tmp_path / "empty"), "config.json"), ("/no/such", "no such folder"), (f"{ROOT}/test/fixtures/qwen3", ""), (f"{ROOT}/test/model_moe", ""), (f"{ROOT}/toka.h", "not a folder")]
    for folder, words in cases:
        got = update(loaded, folder, 400)
        assert got["success"] is False and words in got["message"] and got["weight_version"] == before, (folder, got)
    assert update(loaded, "", 501) and loaded.post("/update_weights", {"update_info": {"names": []}}).status == 501
    assert loaded.post("/update_weights", b"{").status == 400 and loaded.post("/update_weights", {"model_path": folders[0], "load_format": "dummy"}).status == 400
    assert all(len(c["token_ids"]) == 150 for c in load.join()) and answers(loaded) == alone[0] and current(loaded) == before


def test_a_folder_may_vanish_after_its_update(loaded, folders, alone, tmp_path):
    for i in range(3):
        folder = write_folder(tmp_path / str(i), turned)
        update(loaded, folder)
        shutil.rmtree(folder)
        assert answers(loaded) == alone[1]
    maps = open(f"/proc/{loaded.p.pid}/maps").read()
    assert f"{tmp_path}/1/" not in maps and f"{tmp_path}/2/model.safetensors" in maps and f"{folders[0]}/model.safetensors" not in maps  # unmapped
    update(loaded, folders[0])


def test_killed_during_updates(folders, alone):
    with Server("-m", folders[0]) as s:
        load, killer = Load(s, 900), threading.Timer(0.3, s.p.kill)
        killer.start()
        with pytest.raises((OSError, EOFError)):
            while True:
                update(s, folders[1])
        for t in [*load.threads, killer]:
            t.join()
    with Server("-m", folders[0]) as s:
        assert answers(s) == alone[0]


def test_stopped_while_paused(folders):
    """SIGTERM: requests that are frozen end with what they have."""
    with Server("-m", folders[0], "--served-model-name", "m") as s:
        load = Load(s, 800)
        pause(s, "keep")
        assert s.stop() == 0
        assert {c["finish_reason"] for c in load.join()} <= {"abort", "length"}


def test_a_proxy_is_not_this_machine(loaded):
    assert loaded.get("/is_paused", X_Forwarded_For="10.0.0.7").status == 401
    assert loaded.post("/pause", {}, Via="1.1 nginx").status == 401 and not loaded.get("/is_paused").json()["is_paused"]


def test_admin_key(folders):
    with Server("-m", folders[0], "--admin-key", "secret", "--api-key", "user") as s:
        for path in ("/pause", "/update_weights", "/resume", "/abort_requests", "/flush_cache", "/update_weight_version", "/sleep", "/wake_up"):
            for headers in ({}, {"Authorization": "Bearer user"}, {"Authorization": "Bearer secre"}):
                assert s.post(path, {}, **headers).status == 401
        assert s.get("/is_paused").status == 401
        admin = {"Authorization": "Bearer secret"}
        assert s.post("/pause", {}, **admin).status == s.post("/resume", {}, **admin).status == 200
        assert s.post("/update_weights", {"weight_dir": folders[1]}, **admin).status == 200
        assert s.post("/v1/completions", {"prompt": "Tom", "max_tokens": 1}, **admin).status == 401
        assert s.post("/v1/completions", {"prompt": "Tom", "max_tokens": 1}, Authorization="Bearer user").status == 200


def test_weights_that_are_quantized_at_the_start(folders, tmp_path):
    """--quantization fp8: an update has bf16 weights, too, and is quantized by the same rule."""
    other = write_folder(tmp_path / "b", turned)
    with Server("-m", other, "--quantization", "fp8") as s:
        want = answers(s, 2)
    with Server("-m", folders[0], "--quantization", "fp8") as s:
        assert answers(s, 2) != want
        update(s, folders[1])
        assert answers(s, 2) == want


def test_a_short_prompt_takes_nothing_of_old_weights(folders):
    """Its K and V lie in a page that is not in the prefix tree. A running sequence that has the same prompt, computed with the old
    weights, does not lend it."""
    ask = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "logprobs": 1}
    short = lambda s: s.post("/v1/completions", ask).json()["choices"][0]["logprobs"]["token_logprobs"]
    with Server("-m", folders[0]) as s:
        old = short(s)
        update(s, folders[1])
        want = short(s)
        assert want != old
        update(s, folders[0])
        first = threading.Thread(target=lambda: s.post("/v1/completions", {**ask, "max_tokens": 900, "ignore_eos": True}))
        first.start()
        while not s.metric("num_requests_running"):
            time.sleep(0.001)
        update(s, folders[1])
        assert s.metric("num_requests_running") == 1 and short(s) == want
        first.join()


# ---- The calls of trainers, one after the other ----

def calls(s, *requests):
    """Sends (method, path, body) and returns the JSON of the answers, which all have status 200."""
    out = []
    for method, path, content in requests:
        a = s.get(path) if method == "GET" else s.post(path, content)
        assert a.status == 200, (path, a.body)
        out.append(a.json() if a.body[:1] == b"{" else a.body)
    return out


def test_replay_prime_rl(folders, alone):
    """Its orchestrator with the file system: chats with a salt per version, a pause that keeps, a folder, resume; a LoRA in place."""
    chat = {"messages": [{"role": "user", "content": PROBLEM}], "max_tokens": 8, "temperature": 1, "logprobs": True, "return_token_ids": True,
            "cache_salt": "0", "model": "m"}
    with Server("-m", folders[0], "--served-model-name", "m", "--enable-lora") as s:
        health, live, answer, *_ = calls(s, ("GET", "/health", None), ("GET", "/liveness", None), ("POST", "/v1/chat/completions", chat))
        choice = answer["choices"][0]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) and answer["prompt_token_ids"]
        calls(s, ("POST", "/pause?mode=keep&clear_cache=false", {}), ("POST", "/update_weights", {"weight_dir": folders[1]}),
              ("POST", "/resume", {}), ("POST", "/v1/chat/completions", {**chat, "cache_salt": "1"}))
        assert answers(s) == alone[1]
        a = s.post("/init_broadcaster", {"host": "h", "port": 1})
        assert a.status == 501 and "weight_broadcast.type \"filesystem\"" in a.error()["message"]
        assert "adapter_config.json" in s.post("/load_lora_adapter", {"lora_name": "r", "lora_path": "/none"}).json()["message"]


def test_replay_slime(folders, alone):
    """Its rollout and its update from disk, through SGLang's routes."""
    ask = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop": None,
                                                       "skip_special_tokens": False}, "return_logprob": True}
    with Server("-m", folders[0]) as s:
        _, answer, _ = calls(s, ("GET", "/health_generate", None), ("POST", "/generate", ask), ("GET", "/get_model_info", None))
        meta = answer["meta_info"]
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] and meta["finish_reason"]["type"] == "length"
        *_, version = calls(s, ("POST", "/abort_request", {"abort_all": True}), ("POST", "/pause_generation", {"mode": "abort"}), ("GET", "/flush_cache", None),
                            ("POST", "/update_weights_from_disk", {"model_path": folders[1], "weight_version": "7"}),
                            ("POST", "/continue_generation", {}), ("GET", "/get_weight_version", None))
        assert version["weight_version"] == "7" and answers(s) == alone[1]
        for path in ("/init_weights_update_group", "/update_weights_from_distributed", "/update_weights_from_tensor", "/pull_weights"):
            assert s.post(path, {}).status == 501, path
        _, state, *_ = calls(s, ("POST", "/release_memory_occupation", {}), ("GET", "/is_sleeping", None),  # --colocate
                             ("POST", "/resume_memory_occupation", {"tags": ["weights"]}), ("POST", "/update_weights_from_disk", {"model_path": folders[0]}),
                             ("POST", "/resume_memory_occupation", {"tags": ["cuda_graph"]}), ("POST", "/resume_memory_occupation", {"tags": ["kv_cache"]}))
        assert state["is_sleeping"] and answers(s) == alone[0]


def test_replay_areal(folders, alone):
    """Ids in, tokens named by their ids out, log-probabilities; pauses of its own, a folder."""
    ask = {"prompt": [5, 6, 7], "max_tokens": 6, "logprobs": 0, "return_tokens_as_token_ids": True, "stream": False}
    with Server("-m", folders[0]) as s:
        answer, *_ = calls(s, ("POST", "/v1/completions", ask), ("POST", "/areal_pause_generation", {}),
                           ("POST", "/update_weights_from_disk", {"model_path": folders[1], "abort_all_requests": True}),
                           ("POST", "/areal_continue_generation", {}))
        logprobs = answer["choices"][0]["logprobs"]
        assert all(x.startswith("token_id:") for x in logprobs["tokens"]) and len(logprobs["token_logprobs"]) == 6
        assert answers(s) == alone[1]


def test_replay_trl(server):
    """The client of TRL 1.16: ids and log-probabilities through vLLM's routes; weights over NCCL are one clear error on a CPU (else test_nccl.py)."""
    *_, info, size = calls(server, ("GET", "/health", None), ("GET", "/v1/models", None), ("GET", "/server_info?config_format=json", None),
                           ("GET", "/get_world_size", None))
    assert info["vllm_config"]["weight_transfer_config"] is None is info["vllm_config"]["lora_config"] and size["world_size"] == 1
    assert info["vllm_config"]["model_config"]["logprobs_mode"] == "raw_logprobs"  # it warns
    params = {"n": 2, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 5}
    flags = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    chat = {"model": "embedded", "messages": [{"role": "user", "content": "Tom"}], **params, **flags, "logprobs": True, "top_logprobs": 0, "tool_choice": "none",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]}
    ids, answer, scored, _ = calls(
        server, ("POST", "/v1/completions", {"model": "embedded", "prompt": [[5, 6, 7], [8, 9]], **params, **flags, "logprobs": 2}),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/completions", {"model": "embedded", "prompt": [[5, 6, 7, 8], [8, 9]], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 20}),
        ("POST", "/reset_prefix_cache", None))
    assert [c["prompt_token_ids"] for c in ids["choices"]] == [[5, 6, 7]] * 2 + [[8, 9]] * 2
    for choice in ids["choices"]:
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]] and len(logprobs["token_logprobs"]) == 5
        assert all(2 <= len(top) <= 3 and all(name.startswith("token_id:") for name in top) for top in logprobs["top_logprobs"])
    assert answer["prompt_token_ids"] and len(answer["choices"]) == 2
    for choice in answer["choices"]:
        assert [t["token"] for t in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
    top = scored["choices"][0]["prompt_logprobs"]
    assert top[0] is None and all(len(x) in (20, 21) and all(y["rank"] for y in x.values()) for x in top[1:]) and str(8) in top[3]
    update_info = {"names": ["model.norm.weight"], "dtype_names": ["bfloat16"], "shapes": [[256]], "packed": True}
    for path, body in (("/init_weight_transfer_engine", {"init_info": {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2}}),
                       ("/start_weight_update", {}), ("/update_weights", {"update_info": update_info}), ("/finish_weight_update", {})):
        a = server.post(path, body)
        assert a.status == 501 and a.error()["message"] == "weights over NCCL go from GPU to GPU: this server runs on the CPU", path


def test_replay_trl_lora(tmp_path):
    """Async GRPO of TRL 1.16 with an adapter: each version is loaded under a name of its own, in a pause that keeps requests."""
    shapes = {f"model.layers.{i}.self_attn.v_proj.weight": (128, 256) for i in range(6)}
    for version in (1, 2):
        write_adapter(tmp_path / f"policy-v{version}", shapes, seed=version)
    with Server("--enable-lora", "--max-loras", "3", "--max-lora-rank", "16", "--served-model-name", "m") as s:
        config = s.get("/server_info?config_format=json").json()["vllm_config"]
        assert config["lora_config"] == {"max_loras": 3, "max_lora_rank": 16} and config["parallel_config"] == {"data_parallel_size": 1}
        texts = []
        for version in (1, 2):
            name = f"policy-v{version}"
            calls(s, ("POST", "/pause?mode=keep", None),
                  ("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(tmp_path / name), "load_inplace": False}), ("POST", "/resume", None))
            answer, = calls(s, ("POST", "/v1/completions", {"model": name, "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "logprobs": 0}))
            texts.append(answer["choices"][0]["logprobs"]["token_logprobs"])
        calls(s, ("POST", "/v1/unload_lora_adapter", {"lora_name": "policy-v1"}))
        assert texts[0] != texts[1] and s.post("/v1/completions", {"model": "policy-v1", "prompt": "Tom"}).status == 404


def test_replay_older_trl(server):
    """The client of trl vllm-serve asks for health and the world's size, then wants NCCL: one clear error (else test_nccl.py), as on its
    routes for texts."""
    _, size = calls(server, ("GET", "/health/", None), ("GET", "/get_world_size/", None))
    assert size["world_size"] == 1
    a = server.post("/init_communicator/", {"host": "0.0.0.0", "port": 51216, "world_size": 2})
    assert a.status == 501 and a.error()["message"] == "weights over NCCL go from GPU to GPU: this server runs on the CPU"
    for path in ("/generate/", "/chat/", "/get_sequence_logprobs/"):
        a = server.post(path, {"prompts": ["Tom"]})
        assert a.status == 501 and a.error()["message"].startswith(f"{path} is not supported"), a.body
    calls(server, ("POST", "/reset_prefix_cache/", {}))


# ---- Gateways ----

def test_metrics_prefix():
    """The series that gateways scrape, by vLLM's names; only the names change, not a label that looks like one."""
    with Server("--metrics-prefix", "vllm:", "--served-model-name", "toka:x") as s:
        text = s.get("/metrics").body.decode()
    names = {line.split("{")[0] for line in text.splitlines() if line[0] != "#"}
    assert {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"} <= names
    assert all(n.startswith("vllm:") for n in names) and "# TYPE vllm:num_requests_running gauge" in text and 'model_name="toka:x"' in text
    assert "# HELP toka:" not in text and "# TYPE toka:" not in text
    assert re.search(r'^vllm:cache_config_info{engine="0",model_name="toka:x",block_size="16",num_gpu_blocks="[1-9][0-9]*"} 1$', text, re.M)
    assert "lora_requests_info" not in text


def test_what_routers_ask():
    """SGLang's router reads what a server serves and its load; without a key, from a proxy, too."""
    with Server("--served-model-name", "m", "--max-num-seqs", "7") as s:
        for path in ("/get_model_info", "/model_info", "/get_server_info", "/server_info"):
            info = s.get(path, Via="1.1 router").json()
            assert info["served_model_name"] == "m" and info["architectures"] == ["LlamaForCausalLM"] and info["model_type"] == "llama"
            assert info["is_generation"] is True and info["max_running_requests"] == 7 and info["max_total_tokens"] >= info["context_length"] == 1024
        idle = {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
        assert s.get("/get_load").json() == [idle]
        pause(s, "keep")
        thread = threading.Thread(target=s.post, args=("/v1/completions", {"prompt": PROBLEM, "n": 3, "max_tokens": 1}))
        thread.start()
        until(lambda: s.get("/get_load").json() == [{**idle, "num_reqs": 3, "num_waiting_reqs": 3}])
        resume(s)
        thread.join()
    with Server("--api-key", "k") as s:
        assert s.get("/server_info").status == s.get("/get_load").status == 401
        assert s.get("/server_info", Authorization="Bearer k").status == 200


def test_what_routers_add():
    """SGLang's and vLLM's routers write the fields of their own engines into each body; values that ask for something are refused."""
    added = {"no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True, "return_hidden_states": False}
    of_chats = {**added, "continue_final_message": False, "separate_reasoning": True, "stream_reasoning": True, "include_reasoning": True}
    of_responses = {"store": True, "stream": None, "temperature": 1.0, "top_p": 1.0, "priority": 0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    own = {"model": None, "return_text_in_logprobs": False, "stream": False, "log_metrics": True, "return_hidden_states": False, "background": False,
           "no_logs": False, "return_bytes": False, "return_entropy": False}
    chat = {"messages": [{"role": "user", "content": "Tom"}], "max_completion_tokens": 2, "logprobs": False}
    with Server("--strict") as s:
        for path, body in (("/v1/completions", {"prompt": "Tom", "max_tokens": 2, "echo": False, **added}), ("/v1/chat/completions", {**chat, **of_chats}),
                           ("/v1/responses", {"input": "Tom", **of_responses}), ("/generate", {"text": "Tom", "sampling_params": {"max_new_tokens": 2}, **own})):
            a = s.post(path, body)
            assert a.status == 200, a.body
        for path, body, field, value in (("/v1/completions", {"prompt": "Tom"}, "no_stop_trim", True), ("/v1/completions", {"prompt": "Tom"}, "return_hidden_states", True),
                                         ("/v1/chat/completions", chat, "separate_reasoning", False), ("/v1/chat/completions", chat, "stream_reasoning", False),
                                         ("/generate", {"text": "Tom"}, "background", True), ("/generate", {"text": "Tom"}, "return_entropy", True)):
            a = s.post(path, {**body, field: value})
            assert a.status == 400 and a.error()["message"] == f"{field} is not supported", a.body


@pytest.mark.parametrize("prefix", ["", "a b", "x{"])
def test_metrics_prefix_that_is_wrong(prefix):
    p = subprocess.run([TOKA, "serve", "--port", "0", "--metrics-prefix", prefix], capture_output=True, text=True, timeout=60)
    assert p.returncode == 1 and "--metrics-prefix: " in p.stderr


def test_logprobs_mode():
    """vLLM's flag: the mode that is there, and one sentence for another."""
    with Server("--logprobs-mode", "raw_logprobs") as s:
        choice = s.post("/v1/completions", {"prompt": "Tom has", "max_tokens": 2, "logprobs": 100}).json()["choices"][0]
        assert all(100 <= len(top) <= 101 for top in choice["logprobs"]["top_logprobs"])
        assert "101, expected 0 to 100" in s.post("/v1/completions", {"prompt": "Tom", "logprobs": 101}).error()["message"]
    p = subprocess.run([TOKA, "serve", "--port", "0", "--logprobs-mode", "processed_logprobs"], capture_output=True, text=True, timeout=60)
    assert p.returncode == 1 and "--logprobs-mode: 'processed_logprobs', expected raw_logprobs; processed ones" in p.stderr
