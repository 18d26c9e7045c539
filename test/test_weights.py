"""Tests of the whole program with model folders of other programs: tensors at any byte offset, names that share a tensor, defaults of
requests in generation_config.json, files that change while they are mapped. Run through test/run.sh."""
import glob
import json
import os
import shutil
import struct
import subprocess
import threading
import time

import pytest

from server import ROOT, TOKA, Server

ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}, "TOKA_DEVICE": "cpu"}
LINES = "".join(json.dumps({"custom_id": str(i), "prompt": list(range(3, 9 + i)), "max_tokens": 8, "ignore_eos": True, "logprobs": 3,
                            "temperature": i % 2}) + "\n" for i in range(6))


def copy_model(name, folder):
    shutil.copytree(os.path.join(ROOT, "test", name), folder, ignore=shutil.ignore_patterns("make", "golden*", "*.jsonl", "*.md"))
    return folder


def read_weights(path):
    data = path.read_bytes()
    n = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:8 + n]), data[8 + n:]


def write_weights(path, header, data, odd=0):
    """`odd`: the offset of the data is a multiple of 8 plus this number."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8 + odd)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def answers(model, tmp_path):
    """The sorted results of a batch of token ids: bytes that depend only on the weights."""
    out = tmp_path / f"{os.path.basename(model)}.out"
    r = subprocess.run([TOKA, "batch", "-q", "-m", str(model), "--served-model-name", "m", "-i", "-", "-o", str(out)], input=LINES,
                       env=ENV, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert r.returncode == 0 and not r.stderr, r.stderr
    return sorted(out.read_text().splitlines())


# ---- Tensors at any byte offset ----

@pytest.mark.parametrize("name", ["model", "fixtures/llama-odd", "fixtures/llama-bias", "fixtures/llama-linear-old", "fixtures/qwen3",
                                  "fixtures/qwen2-yarn-sharded", "fixtures/llama-llama3-sharded"])
def test_header_of_any_length(tmp_path, name):
    """Each shard gets a header of another length; one keeps its own."""
    want = answers(copy_model(name, tmp_path / "original"), tmp_path)
    for first in 1, 3, 6:
        model = copy_model(name, tmp_path / f"odd{first}")
        for i, path in enumerate(sorted(glob.glob(str(model / "*.safetensors")))):
            path = model / path
            write_weights(path, *read_weights(path), odd=(first + 5 * i) % 8)
        assert answers(model, tmp_path) == want


def test_unused_tensors_between_others(tmp_path):
    """Unused tensors of odd length may lie between the tensors of the model."""
    want = answers(copy_model("fixtures/qwen3", tmp_path / "as_it_was"), tmp_path)
    model = copy_model("fixtures/qwen3", tmp_path / "odd")
    header, data = read_weights(model / "model.safetensors")
    moved, out = {"mask": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}, b"\1\2\3"
    for i, (key, tensor) in enumerate(header.items()):
        if key != "__metadata__":
            part = data[slice(*tensor["data_offsets"])]
            moved[key] = {**tensor, "data_offsets": [len(out), len(out) + len(part)]}
            out += part
            moved[f"scale{i}"] = {"dtype": "BOOL", "shape": [1], "data_offsets": [len(out), len(out) + 1]}
            out += b"\1"
    write_weights(model / "model.safetensors", moved, out)
    assert answers(model, tmp_path) == want


# ---- Names that share a tensor ----

@pytest.mark.parametrize("metadata", [{}, {"format": "pt", "model.embed_tokens.weight": "lm_head.weight"}])
def test_tied_model_that_stores_only_its_head(tmp_path, metadata):
    want = answers(copy_model("fixtures/llama-tied", tmp_path / "as_it_was"), tmp_path)
    model = copy_model("fixtures/llama-tied", tmp_path / "head_only")
    header, data = read_weights(model / "model.safetensors")
    header["lm_head.weight"] = header.pop("model.embed_tokens.weight")
    write_weights(model / "model.safetensors", {**header, "__metadata__": metadata}, data)
    assert answers(model, tmp_path) == want


@pytest.mark.parametrize("tied", [True, False])
def test_names_in_the_metadata(tmp_path, tied):
    """save_model of safetensors stores shared matrices once and names them in the metadata: here two matrices of a layer, and the head,
    even if config.json does not call it tied."""
    whole = copy_model("fixtures/llama-tied", tmp_path / "whole")
    header, data = read_weights(whole / "model.safetensors")
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    part = data[slice(*header[gate]["data_offsets"])]
    a, b = header[up]["data_offsets"]
    write_weights(whole / "model.safetensors", header, data[:a] + part + data[b:])
    shared = copy_model("fixtures/llama-tied", tmp_path / "shared")
    stored = {key: dict(t) for key, t in header.items() if key not in (up, "__metadata__")}
    for t in stored.values():
        t["data_offsets"] = [at - (b - a) * (at >= b) for at in t["data_offsets"]]
    metadata = {"format": "pt", up: gate, "lm_head.weight": "model.embed_tokens.weight"}
    write_weights(shared / "model.safetensors", {"__metadata__": metadata, **stored}, data[:a] + data[b:])
    config = json.loads((shared / "config.json").read_text())
    assert config["tie_word_embeddings"]
    (shared / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    assert answers(shared, tmp_path) == answers(whole, tmp_path)


# ---- Defaults of requests in generation_config.json ----

PROBLEM = "Tom has 3 boxes with 4 apples each and buys 5 more apples."
CHAT = {"messages": [{"role": "user", "content": PROBLEM}]}


def with_defaults(tmp_path, **fields):
    model = copy_model("model", tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 1], "do_sample": False, **fields}))
    return str(model)


def toka(*args, status=0, stdin="", env=None):
    r = subprocess.run([TOKA, *args], input=stdin, env={**ENV, **(env or {})}, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert r.returncode == status, r.stderr
    return r


def prompt(model, *flags, **more):
    v = json.loads(toka("-m", model, "-p", PROBLEM, "--json", *flags, **more).stdout)
    return v["output_tokens"], v["samples"][0]["finish_reason"]


def batch(model, tmp_path, *bodies, flags=()):
    """For each body: the number of tokens and the finish reason of its answer, or its error message."""
    out = tmp_path / "out.jsonl"
    out.unlink(missing_ok=True)
    lines = "".join(json.dumps({"custom_id": str(i), **body}) + "\n" for i, body in enumerate(bodies))
    toka("batch", "-q", "-m", model, "-i", "-", "-o", str(out), *flags, stdin=lines)
    results = {v["custom_id"]: v for v in map(json.loads, out.read_text().splitlines())}
    return [summary(v["response"]["body"]) if (v := results[str(i)])["response"] else v["error"]["message"] for i in range(len(bodies))]


def summary(body):
    return body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]


def test_max_new_tokens(tmp_path):
    model = with_defaults(tmp_path, max_new_tokens=5)
    default = (5, "length")
    assert prompt(model) == prompt(model, "--raw") == default
    assert prompt(model, "-n", "3") == prompt(model, env={"TOKA_MAX_TOKENS": "3"}) == (3, "length")
    assert prompt(model, "-n", "0")[1] == "stop" and prompt(model, "-n", "9") == (9, "length")
    assert prompt(model, "--min-tokens", "7") == (7, "length")
    chat = toka("-m", model, "--chat", stdin=f"{PROBLEM}\n{PROBLEM}\n").stderr
    assert chat.count("generated 5 tokens") == 2
    bodies = [{"prompt": PROBLEM}, CHAT, {"prompt": PROBLEM, "max_tokens": 3}, {**CHAT, "max_completion_tokens": 9},
              {"prompt": PROBLEM, "min_tokens": 7}]
    want = [default, default, (3, "length"), (9, "length"), (7, "length")]
    assert batch(model, tmp_path, *bodies) == want
    assert batch(model, tmp_path, {"prompt": PROBLEM}, flags=("-n", "4")) == [(4, "length")]
    with Server("-m", model) as s:
        assert "repetition_penalty 1, max_tokens 5; --generation-config vllm" in s.log
        for body, expected in zip(bodies, want):
            route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            assert summary(s.post(route, body).json()) == expected
    with Server("-m", model, "--generation-config", "vllm") as s:
        assert "generation_config" not in s.log
        assert summary(s.post("/v1/completions", {"prompt": PROBLEM, "ignore_eos": True}).json()) == (16, "length")
        assert summary(s.post("/v1/chat/completions", {**CHAT, "temperature": 0}).json())[1] == "stop"


def test_min_new_tokens(tmp_path):
    model = with_defaults(tmp_path, min_new_tokens=60)
    assert prompt(model)[0] >= 60
    assert prompt(model, "--min-tokens", "0")[1] == "stop" and prompt(model, "--min-tokens", "0")[0] < 60
    assert prompt(model, "-n", "8") == (8, "length")
    long, short, eight = batch(model, tmp_path, CHAT, {**CHAT, "min_tokens": 0}, {**CHAT, "max_tokens": 8})
    assert long[0] >= 60 > short[0] and eight == (8, "length")
    with Server("-m", model) as s:
        assert "min_tokens 60" in s.log
        assert summary(s.post("/v1/chat/completions", CHAT).json())[0] >= 60
        assert summary(s.post("/v1/completions", {"prompt": PROBLEM}).json())[0] == 60  # more than the API's default of 16


def test_stop_strings_and_bad_words(tmp_path):
    plain = json.loads(toka("-p", PROBLEM, "--json").stdout)["samples"][0]
    words = plain["text"].split()
    stop, first = words[2], plain["tokens"][0]["id"]
    model = with_defaults(tmp_path, stop_strings=[stop], bad_words_ids=[[first], [3]])
    text = json.loads(toka("-m", model, "-p", PROBLEM, "--json").stdout)["samples"][0]
    assert text["tokens"][0]["id"] != first and stop not in text["text"]
    with Server("-m", model) as s:
        assert "1 stop strings, 1 bad words" in s.log

        def ask(**more):
            return s.post("/v1/chat/completions", {**CHAT, "return_token_ids": True, **more}).json()["choices"][0]

        a = ask()
        assert a["token_ids"][0] != first and stop not in a["message"]["content"]
        assert ask(stop=[], bad_words=[])["message"]["content"] == plain["text"]
        b = ask(bad_words=[])
        assert plain["text"].startswith(b["message"]["content"]) and stop not in b["message"]["content"] and b["token_ids"][0] == first


def test_fields_that_are_not_used(tmp_path):
    model = with_defaults(tmp_path, num_beams=4, max_length=30, no_repeat_ngram_size=2, suppress_tokens=[7], typical_p=1.0)
    line = "toka: generation_config.json: not used: max_length, num_beams, no_repeat_ngram_size, suppress_tokens\n"
    assert toka("-m", model, "-p", PROBLEM).stderr.startswith(line)
    assert toka("-m", model, "-p", PROBLEM, "-q").stderr == ""
    assert toka("-m", model, "--chat", stdin=f"{PROBLEM}\n{PROBLEM}\n").stderr.count(line) == 1
    assert line in toka("batch", "-m", model, "-i", "/dev/null", "-o", "/dev/null").stderr
    with Server("-m", model) as s:
        assert s.log.count(line) == 1
    with Server("-m", model, "--generation-config", "vllm") as s:
        assert line not in s.log


@pytest.mark.parametrize("fields, words", [
    ({"max_new_tokens": 0}, "max_new_tokens is 0, expected 1 or more"),
    ({"max_new_tokens": 5, "min_new_tokens": 9}, "min_new_tokens is 9, expected 0 to max_new_tokens"),
    ({"stop_strings": ["x" * 5000]}, "generation_config.json: stop[0]: 5000 bytes, expected 1 to 4096"),
    ({"bad_words_ids": [[4, None]]}, "bad_words_ids is an array, expected a list of lists of token ids"),
])
def test_invalid_defaults(tmp_path, fields, words):
    err = toka("-m", with_defaults(tmp_path, **fields), "-p", "x", status=1).stderr
    assert words in err and "generation_config.json: " in err and err.count("\n") == 1


# ---- Files that change while they are mapped ----

WARNING = "was written to while it is in use"


def linked_model(tmp_path):
    """A folder of symbolic links to files elsewhere, as in the hub's cache."""
    blobs, model = copy_model("model", tmp_path / "blobs"), tmp_path / "linked"
    model.mkdir()
    for path in blobs.iterdir():
        (model / path.name).symlink_to(path)
    return model


def overwrite(path, start=100_000):
    """Changes bytes inside the file; its length stays."""
    with open(path, "r+b") as f:
        f.seek(start)
        part = f.read(50_000)
        f.seek(start)
        f.write(part[::-1])


@pytest.mark.slow
def test_server_whose_weights_change(tmp_path):
    linked, plain = linked_model(tmp_path), copy_model("model", tmp_path / "plain")
    body = {"prompt": "Tom", "max_tokens": 4}
    with Server("-m", str(linked)) as a, Server("-m", str(plain)) as b:
        want = a.post("/v1/completions", body).json()["choices"]
        shutil.copy(plain / "model.safetensors", tmp_path / "new")
        os.replace(tmp_path / "new", plain / "model.safetensors")
        overwrite(plain / "model.safetensors")  # the server has mapped the file that was replaced
        overwrite(tmp_path / "blobs" / "model.safetensors")
        end = time.time() + 20
        while WARNING not in a.read_log():
            assert time.time() < end
            time.sleep(0.1)
        os.unlink(plain / "model.safetensors")
        time.sleep(6)
        assert a.read_log().count(WARNING) == 1 and "linked/model.safetensors was written" in a.read_log()
        assert WARNING not in b.read_log() and b.post("/v1/completions", body).json()["choices"] == want
        assert a.post("/v1/completions", body).status == 200


def test_graceful_end_after_weights_changed(tmp_path):
    model = copy_model("model", tmp_path / "m")
    with Server("-m", str(model)) as s:
        overwrite(model / "model.safetensors")
        assert s.stop() == 0 and WARNING in s.log


def start_batch(model, tmp_path, n):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests = [{"custom_id": str(i), "prompt": "Tom", "max_tokens": 200, "ignore_eos": True} for i in range(n)]
    source.write_text("".join(json.dumps(request) + "\n" for request in requests))
    p = subprocess.Popen([TOKA, "batch", "-q", "--max-num-seqs", "2", "-m", str(model), "-i", str(source), "-o", str(out)], env=ENV,
                         cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not out.exists() or not out.stat().st_size:
        assert p.poll() is None
        time.sleep(0.005)
    return p


@pytest.mark.slow
def test_batch_whose_weights_are_overwritten(tmp_path):
    model = copy_model("model", tmp_path / "model")
    for n in 2000, 20:  # the second batch ends before the first periodic check of the file
        p = start_batch(model, tmp_path, n)
        overwrite(model / "model.safetensors")
        err = p.communicate(timeout=60)[1]
        assert p.returncode == 2 and err.count("\n") == 1
        assert "model.safetensors: it was written to while it was in use; " in err and "lines are written" in err
        n_lines = len((tmp_path / "out.jsonl").read_text().splitlines())
        assert 0 < n_lines < 2000
        (tmp_path / "out.jsonl").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_batch_whose_weights_are_replaced_or_deleted(tmp_path, how):
    model = copy_model("model", tmp_path / "model")
    p = start_batch(model, tmp_path, 40)
    if how == "replaced":
        (tmp_path / "new").write_bytes(b"other weights")
        os.replace(tmp_path / "new", model / "model.safetensors")
    else:
        shutil.rmtree(model)
    assert p.communicate(timeout=60)[1] == "" and p.returncode == 0


def test_chat_whose_weights_are_overwritten(tmp_path):
    model = copy_model("model", tmp_path / "model")
    p = subprocess.Popen([TOKA, "-q", "-m", str(model), "--chat", "-n", "3"], env=ENV, cwd=ROOT, stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    p.stdin.write("Tom\n"), p.stdin.flush()
    assert p.stdout.readline()
    overwrite(model / "model.safetensors")
    err = p.communicate("Tom\nTom\n", timeout=60)[1]
    assert p.returncode == 0 and err.count(WARNING) == err.count("\n") == 1


def test_weights_written_while_read(tmp_path):
    """For example by a download that has not ended."""
    model = copy_model("model", tmp_path / "model")
    done = threading.Event()

    def write():
        while not done.is_set():
            os.utime(model / "model.safetensors", ns=(time.time_ns(),) * 2)  # without times it is the clock of the last tick, some ms

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(20):  # on a busy machine, the thread may not run while a small model is read
            r = subprocess.run([TOKA, "-m", str(model), "-p", "x"], env=ENV, cwd=ROOT, capture_output=True, text=True, timeout=120)
            if r.returncode:
                break
    finally:
        done.set(), thread.join()
    assert r.returncode == 1 and r.stderr == f"toka: -m {model}: {model}/model.safetensors: it was written to while it was read\n"
