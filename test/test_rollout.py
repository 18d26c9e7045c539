"""Tests of what trainers use: token ids in and out through SGLang's /generate, weights that change while requests run. Run through
test/run.sh."""
import json
import os

import pytest

from server import ROOT, Server

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


@pytest.mark.parametrize("body, words", [
    ({}, "text: missing"), ({"text": "a", "input_ids": [1]}, "input_ids: the request has text"), ({"input_ids": ["a"]}, "input_ids: expected"),
    ({"input_ids": [1 << 40]}, "no token id"), ({"input_ids": [99999999]}, "vocabulary"), ({"text": 7}, "prompt: expected"), ({"input_ids": []}, "no tokens"),
    ({"text": "a", "sampling_params": [{}]}, "sampling_params: expected an object"),
    ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens: -1"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 1 << 20}}, "after a prompt of"),
    ({"text": "a", "sampling_params": {"temperature": "hot"}}, "temperature: expected a number"),
    ({"text": "a", "sampling_params": {"structural_tag": "{}"}}, "structural_tag is not supported"),
    ({"text": "a", "lora_path": "x"}, "lora_path is not supported"), ({"text": "a", "return_routed_experts": True}, "is not supported"),
    ({"text": "a", "stream": True, "return_logprob": True, "logprob_start_len": 0}, "with stream is not supported"),
    ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "expected one constraint")])
def test_generate_refuses(server, body, words):
    a = server.post("/generate", body)
    assert a.status == 400 and words in a.error()["message"], a.body
