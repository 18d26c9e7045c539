"""Tests of the program toka batch: formats, error records, resuming after kill -9, equal bytes for all settings, bounded memory. Run
through test/run.sh."""
import json
import os
import random
import re
import resource
import signal
import subprocess
import time

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOKA = os.environ.get("TOKA_BINARY", os.path.join(ROOT, "toka"))
ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}, "TOKA_DEVICE": "cpu"}
PROBLEMS = [json.loads(line) for line in open(os.path.join(ROOT, "test/model/heldout.jsonl"))]
SMALL = ["--max-model-len", "256", "--max-num-seqs", "32"]


def write_lines(path, lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def read_results(path):
    return {v["custom_id"]: v for v in map(json.loads, open(path))}


def start(*args, env=ENV, **more):
    return subprocess.Popen([TOKA, "batch", "-m", "test/model", *args], env=env, cwd=ROOT, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, **more)


def batch(*args, stdin=None, status=0, **more):
    p = start(*args, stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL, **more)
    out, err = p.communicate(stdin, timeout=150)
    assert p.returncode == status, err.decode()
    return out.decode(), err.decode()


def run(tmp_path, lines, *args):
    """Runs a new batch; returns its results by custom_id, and its standard error as "stderr"."""
    out = tmp_path / f"out{random.random()}.jsonl"
    _, err = batch("-i", write_lines(tmp_path / "in.jsonl", lines), "-o", str(out), *SMALL, *args)
    results = read_results(out)
    assert len(results) == len(open(out).readlines())
    results["stderr"] = err
    return results


def completion(custom_id, prompt, **body):
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, **body}}


def chat(custom_id, text, **body):
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": text}], **body}}


def body(result):
    assert result["error"] is None and result["response"]["status_code"] == 200
    return result["response"]["body"]


def texts(result):
    return [c["text"] if "text" in c else c["message"]["content"] for c in body(result)["choices"]]


def is_right(text, answer):
    return re.findall(r"The answer is (-?\d+)", text)[-1:] == [str(answer)]


def mixed_lines(n, **more):
    """Lines of all kinds, long and short, at several temperatures, some of them invalid."""
    lines = []
    for i in range(n):
        p = PROBLEMS[i % len(PROBLEMS)]["prompt"]
        if i % 9 == 8:
            lines.append(chat(f"bad-{i}", p, temperature="warm"))
        elif i % 3 == 0:
            lines.append(chat(f"chat-{i}", p, n=1 + i % 5, temperature=1.5, **more))
        elif i % 3 == 1:
            lines.append(completion(f"text-{i}", p, n=2, temperature=2, max_tokens=24, logprobs=2, **more))
        else:
            lines.append({"prompt": p, "max_tokens": 40, "temperature": 3, **more})
    return lines


# ---- Formats ----

def test_completion_and_chat(tmp_path):
    p = PROBLEMS[0]
    r = run(tmp_path, [completion("a", p["prompt"], max_tokens=100, n=2, model="mine \x90"), chat("b", p["prompt"]),
                       {"prompt": p["prompt"], "id": 7}, {"messages": [{"role": "user", "content": p["prompt"]}]}])
    assert sorted(k for k in r if k != "stderr") == ["7", "a", "b", "line-4"]
    a, b = body(r["a"]), body(r["b"])
    assert re.fullmatch("batch_req_[0-9a-f]{32}", r["a"]["id"]) and r["a"]["response"]["request_id"].startswith("req_")
    assert a["object"] == "text_completion" and a["model"] == "model" and a["created"] == 0 and a["id"].startswith("cmpl-")
    assert b["object"] == "chat.completion" and b["model"] == "model" and b["id"].startswith("chatcmpl-")
    assert [c["index"] for c in a["choices"]] == [0, 1] and a["choices"][0]["finish_reason"] == "stop"
    assert b["choices"][0]["message"]["role"] == "assistant" and b["choices"][0]["logprobs"] is None
    for name in ("a", "b", "7", "line-4"):
        assert all(is_right(t, p["answer"]) for t in texts(r[name]))
        u = body(r[name])["usage"]
        assert u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] > u["prompt_tokens"] > 20
    assert r["a"]["response"]["body"]["choices"][0]["text"] == texts(r["7"])[0]
    assert 'line 1: "model" is "mine ??"; this and all other lines run on model\n' in r["stderr"]
    assert texts(r["b"]) == texts(r["line-4"])


def test_api_default_of_16_tokens(tmp_path):
    p = PROBLEMS[0]["prompt"]
    r = run(tmp_path, [completion("a", p), completion("b", p, max_tokens=5), chat("c", p, max_completion_tokens=6)])
    counts = [body(r[k])["usage"]["completion_tokens"] for k in "abc"]
    assert counts == [16, 5, 6] and body(r["a"])["choices"][0]["finish_reason"] == "length"
    r = run(tmp_path, [completion("a", p)], "--max-tokens", "9")
    assert body(r["a"])["usage"]["completion_tokens"] == 9


def test_logprobs_and_token_ids(tmp_path):
    p = PROBLEMS[1]["prompt"]
    r = run(tmp_path, [completion("a", p, max_tokens=8, logprobs=3, return_token_ids=True), completion("b", p, logprobs=0),
                       chat("c", p, max_tokens=8, logprobs=True, top_logprobs=2, return_token_ids=True)])
    a = body(r["a"])["choices"][0]
    lp = a["logprobs"]
    assert [len(lp[k]) for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [8] * 4
    assert "".join(lp["tokens"]) == a["text"] and len(a["token_ids"]) == 8
    assert len(a["prompt_token_ids"]) == body(r["a"])["usage"]["prompt_tokens"]
    for token, value, top, offset in zip(lp["tokens"], lp["token_logprobs"], lp["top_logprobs"], lp["text_offset"]):
        assert top[token] == value == max(top.values()) <= 0 and len(top) == 3
        assert a["text"][offset:].startswith(token)
    assert all(len(top) == 1 for top in body(r["b"])["choices"][0]["logprobs"]["top_logprobs"])
    c = body(r["c"])
    content = c["choices"][0]["logprobs"]["content"]
    assert "".join(t["token"] for t in content) == c["choices"][0]["message"]["content"]
    assert all(bytes(t["bytes"]).decode() == t["token"] and len(t["top_logprobs"]) == 2 for t in content)
    assert all(t["top_logprobs"][0]["logprob"] == t["logprob"] for t in content)
    again = run(tmp_path, [completion("x", c["prompt_token_ids"], max_tokens=8, return_token_ids=True)])
    assert body(again["x"])["choices"][0]["token_ids"] == c["choices"][0]["token_ids"]


def test_several_prompts_echo_and_scores(tmp_path):
    p = [PROBLEMS[i]["prompt"] for i in range(3)]
    sampled = dict(temperature=1, seed=4, max_tokens=12, n=2, return_token_ids=True)
    r = run(tmp_path, [completion("all", p, **sampled)] + [completion(str(i), p[i], **sampled) for i in range(3)] +
            [completion("echo", p[0], echo=True, logprobs=2, temperature=0, max_tokens=4),
             completion("score", p[0], echo=True, logprobs=2, temperature=0, max_tokens=0, n=2),
             completion("prompt_logprobs", p[0], prompt_logprobs=1, max_tokens=1)])
    choices = body(r["all"])["choices"]
    assert [c["index"] for c in choices] == list(range(6))
    for i, c in enumerate(choices):
        assert c["token_ids"] == body(r[str(i // 2)])["choices"][i % 2]["token_ids"]
    assert body(r["all"])["usage"]["prompt_tokens"] == sum(body(r[str(i)])["usage"]["prompt_tokens"] for i in range(3))
    echo, score = body(r["echo"]), body(r["score"])
    lp, n = echo["choices"][0]["logprobs"], echo["usage"]["prompt_tokens"]
    assert echo["choices"][0]["text"].startswith(p[0]) and [len(v) for v in lp.values()] == [n + 4] * 4
    assert lp["token_logprobs"][0] is None and lp["top_logprobs"][0] is None and all(x <= 0 for x in lp["token_logprobs"][1:])
    assert score["usage"]["completion_tokens"] == 0 and [c["text"] for c in score["choices"]] == [p[0]] * 2
    assert score["choices"][1]["logprobs"]["token_logprobs"] == lp["token_logprobs"][:n]
    positions = body(r["prompt_logprobs"])["choices"][0]["prompt_logprobs"]
    assert positions[0] is None and len(positions) == n and all(1 <= len(v) <= 2 for v in positions[1:])
    assert [list(v.values())[0]["logprob"] for v in positions[1:]] == lp["token_logprobs"][1:n]


def test_sampling_fields(tmp_path):
    p = PROBLEMS[2]["prompt"]
    greedy = dict(temperature=0, max_tokens=60)
    lines = [completion("plain", p, **greedy), completion("stop", p, stop=["answer"], **greedy),
             completion("kept", p, stop="answer", include_stop_str_in_output=True, **greedy),
             completion("long", p, ignore_eos=True, **greedy), completion("least", p, min_tokens=55, **greedy),
             completion("ids", p, return_token_ids=True, **greedy)]
    r = run(tmp_path, lines)
    plain = texts(r["plain"])[0]
    assert texts(r["stop"])[0] == plain.split("answer")[0]
    assert texts(r["kept"])[0] == plain.split("answer")[0] + "answer"
    assert body(r["long"])["usage"]["completion_tokens"] == 60 and body(r["least"])["usage"]["completion_tokens"] >= 55
    first, second = body(r["ids"])["choices"][0]["token_ids"][:2]
    kept = {"include_stop_str_in_output": True, **greedy}
    r = run(tmp_path, [completion("end", p, stop_token_ids=[second], return_token_ids=True, **greedy),
                       completion("shown", p, stop_token_ids=[second], return_token_ids=True, **kept),
                       completion("special", p, **kept), completion("all", p, skip_special_tokens=False, **kept),
                       completion("bias", p, logit_bias={str(first): -100}, return_token_ids=True, **greedy),
                       completion("only", p, allowed_token_ids=[second], return_token_ids=True, temperature=1, max_tokens=5)])
    assert body(r["end"])["choices"][0]["token_ids"] == body(r["shown"])["choices"][0]["token_ids"] == [first, second]
    assert texts(r["end"])[0] != texts(r["shown"])[0] == plain[:len(texts(r["shown"])[0])]  # "shown" has the text of `second`
    assert texts(r["special"])[0] == plain and texts(r["all"])[0].startswith(plain + "<")  # an end token like </s>
    assert body(r["bias"])["choices"][0]["token_ids"][0] != first
    assert body(r["only"])["choices"][0]["token_ids"] == [second] * 5


def test_bad_words_stop_strings_and_ranks(tmp_path):
    p = "Tom has 3 boxes with 4 apples each and buys 5 more apples."
    greedy = dict(temperature=0, max_tokens=12)
    plain = texts(run(tmp_path, [completion("plain", p, **greedy)])["plain"])[0]
    words = re.findall(r"[A-Za-z]+", plain)
    bad = words + [" " + w for w in words] + [f"{a} {b}" for a, b in zip(words, words[1:]) if f"{a} {b}" in plain]
    lines = [completion(w, p, bad_words=[w], **greedy) for w in bad]
    sampled = dict(temperature=2, max_tokens=60, n=4, ignore_eos=True)
    lines += [completion("long" + w, p, bad_words=[w, "never"], seed=i, **sampled) for i, w in enumerate(bad)]
    lines += [completion("least%d" % n, p, stop=["How"], min_tokens=n, **greedy) for n in range(3)]
    lines += [completion("begun", p, stop=["w many"], min_tokens=1, n=3, **greedy),
              completion("none", p, allowed_token_ids=[55], bad_words=["T"]),
              completion("two", p, allowed_token_ids=[55], bad_words=["TTT"], **greedy),
              completion("ranks", p, prompt_logprobs=0, max_tokens=1), completion("tops", p, prompt_logprobs=32, max_tokens=1)]
    r = run(tmp_path, lines)
    for w in bad:
        for text in texts(r[w]) + texts(r["long" + w]):
            assert not re.search(r"\b" + w.strip() + r"\b", text), (w, text)
    assert texts(r["least0"]) == [" "] and texts(r["least1"]) == texts(r["least2"]) == [plain]
    assert texts(r["begun"]) == [plain[:plain.index("w many")]] * 3
    assert "nothing is left to draw" in r["none"]["error"]["message"]
    two = body(r["two"])
    assert texts(r["two"]) == ["TT"] and two["usage"]["completion_tokens"] == 2 and two["choices"][0]["finish_reason"] == "stop"
    ranks, tops = (body(r[k])["choices"][0]["prompt_logprobs"][1:] for k in ("ranks", "tops"))
    assert len(ranks) == len(tops) > 10 and any(list(x.values())[0]["rank"] > 32 for x in ranks)
    for rank, top in zip(ranks, tops):
        (key, value), = rank.items()
        assert top[key] == value and [x["rank"] for x in top.values()][1:] == [k for k in range(1, 33) if k != value["rank"]]


def test_messages(tmp_path):
    p = PROBLEMS[3]["prompt"]
    parts = [{"type": "text", "text": p}]
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": p}, {"role": "assistant", "content": "Hm."},
               {"role": "user", "content": PROBLEMS[4]["prompt"]}]
    r = run(tmp_path, [chat("a", p), {"custom_id": "b", "messages": [{"role": "user", "content": parts}]},
                       {"custom_id": "c", "messages": history, "chat_template_kwargs": {"enable_thinking": False}}])
    assert texts(r["a"]) == texts(r["b"]) and is_right(texts(r["c"])[0], PROBLEMS[4]["answer"])


# ---- Seeds ----

def test_lines_do_not_share_random_numbers(tmp_path):
    p, sampled = PROBLEMS[0]["prompt"], dict(temperature=3, max_tokens=20)
    lines = [completion(f"q{i}", p, n=2, **sampled) for i in range(4)] + [completion(f"s{i}", p, seed=5, **sampled) for i in range(2)]
    a, b, c = run(tmp_path, lines), run(tmp_path, lines), run(tmp_path, lines, "--seed", "1")
    assert len({t for i in range(4) for t in texts(a[f"q{i}"])}) == 8
    assert texts(a["s0"]) == texts(a["s1"]) == texts(c["s0"])
    assert all(a[k] == b[k] for k in a if k != "stderr")
    assert all(texts(a[f"q{i}"]) != texts(c[f"q{i}"]) for i in range(4))


# ---- Bad lines ----

# (name, line, code of its error)
BAD = [("not json", "{\"prompt\": ", "invalid_json"), ("not an object", "[1,2]", "invalid_request"),
       ("url", dict(completion("x", "a"), url="/v1/images"), "unsupported"),
       ("method", dict(completion("x", "a"), method="GET"), "invalid_request"),
       ("no body", {"custom_id": "x", "url": "/v1/completions"}, "invalid_request"),
       ("no prompt", completion("x", None), "invalid_request"),
       ("no messages", {"custom_id": "x", "url": "/v1/chat/completions", "body": {}}, "invalid_request"),
       ("role", {"messages": [{"content": "a"}]}, "invalid_request"), ("empty ids", completion("x", []), "invalid_request"),
       ("id too large", completion("x", [1, 99999]), "invalid_request"),
       ("ids that are no integers", completion("x", [1, 2.5]), "invalid_request"),
       ("mixed prompts", completion("x", ["a", [1]] + [2]), "invalid_request"), ("too long", completion("x", [5] * 300), "invalid_request"),
       ("top_p", completion("x", "a", top_p=2), "invalid_request"), ("n", completion("x", "a", n=0), "invalid_request"),
       ("temperature", completion("x", "a", temperature="0"), "invalid_request"),
       ("stop", completion("x", "a", stop=[1]), "invalid_request"), ("logprobs", completion("x", "a", logprobs=1000), "invalid_request"),
       ("max_tokens", completion("x", "a", max_tokens=0), "invalid_request"),
       ("max_tokens over the context", completion("x", "a", max_tokens=10**6), "invalid_request"),
       ("logit_bias", completion("x", "a", logit_bias={"x": 1}), "invalid_request"),
       ("stream", completion("x", "a", stream=True), "unsupported"), ("echo", chat("x", "a", echo=True), "unsupported"),
       ("suffix", completion("x", "a", suffix="b"), "unsupported"), ("best_of", completion("x", "a", best_of=3), "unsupported"),
       ("response_format", chat("x", "a", response_format={"type": "structural_tag"}), "unsupported"),
       ("tool_choice", chat("x", "a", tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="required"), "unsupported"),
       ("image", {"custom_id": "x", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "unsupported")]


def test_bad_lines_become_error_records(tmp_path):
    lines = []
    for i, (_, line, _) in enumerate(BAD):
        lines += [dict(line, custom_id=f"x{i}") if isinstance(line, dict) else line, completion(f"good{i}", "Tom", max_tokens=2)]
    r = run(tmp_path, lines)
    for i, (name, line, code) in enumerate(BAD):
        v = r.get(f"x{i}") or r[f"line-{2 * i + 1}"]
        assert v["response"] is None and v["error"]["code"] == code and v["error"]["message"], name
        if code == "unsupported" and name != "image":
            assert name in v["error"]["message"]
        assert body(r[f"good{i}"])["usage"]["completion_tokens"] == 2


def test_error_records_of_earlier_runs_are_reported(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"custom_id": "x", "promt": "a"}, completion("y", "Tom", max_tokens=2)])
    out = tmp_path / "out.jsonl"
    _, err = batch("-i", source, "-o", str(out), *SMALL)
    assert "2 lines" in err and "1 of them errors" in err and "stay" not in err
    assert f'toka batch: the first line with an error, "x": prompt: missing; its record is in {out}\n' in err
    _, err = batch("-i", source, "-o", str(out), *SMALL)
    assert "0 lines" in err and "2 were done before; of earlier runs 1 error records stay" in err and "first line" not in err
    write_lines(tmp_path / "in.jsonl", [{"custom_id": f"{i}", "prompt": i} for i in range(3)])
    assert batch("-i", source, "-o", f"{out}.3", "-q", *SMALL)[1].count("the first line with an error") == 1


def test_harmless_and_unknown_fields(tmp_path):
    harmless = dict(stream=False, echo=False, suffix=None, best_of=1, user="u", metadata={"a": "b"}, length_penalty=1.0, max_tokens=2)
    r = run(tmp_path, [completion("a", "Tom", **harmless), completion("b", "Tom", colour="red", max_tokens=2),
                       completion("c", "Tom", colour="blue", max_tokens=2),
                       chat("d", "Tom", response_format={"type": "text"}, tool_choice="auto", max_tokens=2)])
    assert all(body(r[k]) for k in "abcd")
    assert re.findall(r'line (\d+): unknown field "(\w+)"', r["stderr"]) == [("2", "colour")]
    r = run(tmp_path, [completion("a", "Tom", logprob_token_ids=[1]), chat("b", "Tom", web_search_options={}), chat("c", "Tom", functions=[])])
    assert r["a"]["error"]["code"] == r["b"]["error"]["code"] == "unsupported" and body(r["c"]) and '"model" is' not in r["stderr"]


def test_results_of_another_model_stay(tmp_path):
    source, out = write_lines(tmp_path / "in.jsonl", [completion("a", "Tom", max_tokens=2)]), tmp_path / "out.jsonl"
    batch("-i", source, "-o", str(out), *SMALL)
    before = out.read_text()
    write_lines(tmp_path / "in.jsonl", [completion(name, "Tom", max_tokens=2, model="model") for name in "ab"])
    _, err = batch("-i", source, "-o", str(out), *SMALL)
    assert "has results" not in err and '"model" is' not in err and out.read_text().startswith(before)
    out.write_text(before.replace('"model":"model"', '"model":"other"'))
    _, err = batch("-i", source, "-o", str(out), *SMALL)
    assert f'{out} has results of the model "other", which stay; the rest runs on model\n' in err and len(read_results(out)) == 2
    write_lines(tmp_path / "in.jsonl", [completion(name, "Tom", max_tokens=2, model="mine") for name in "xy"])
    _, err = batch("-i", source, "-o", str(tmp_path / "named.jsonl"), "--served-model-name", "mine", *SMALL)
    assert "model" not in err and {body(r)["model"] for r in read_results(tmp_path / "named.jsonl").values()} == {"mine"}


def test_odd_lines_and_ids(tmp_path):
    odd = 'q "\\ \u00e9\u4e2d\U0001f600 \u0001 \0 end'
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + json.dumps(completion(odd, "Tom", max_tokens=2)).encode() + b"\r\n\n  \n" +
                       json.dumps({"prompt": "Tom", "max_tokens": 2}).encode() + b"\nnot json \xff\n" +
                       json.dumps({"prompt": "Tom", "max_tokens": 2}).encode())
    batch("-i", str(source), "-o", str(tmp_path / "out.jsonl"), *SMALL)
    assert sorted(read_results(tmp_path / "out.jsonl")) == sorted([odd, "line-4", "line-5", "line-6"])


def test_a_line_with_too_many_values(tmp_path):
    """Parsing this line would take many times its size in memory. It becomes an error record, as a line that is too long; the other
    lines run."""
    long = '{"custom_id":"long","prompt":"Tom","max_tokens":2,"user":"' + "x" * (64 << 20) + '"}'
    many = '{"custom_id":"many","prompt":"Tom","max_tokens":2,"x":[' + "0," * (9 << 19) + "0]}"
    r = run(tmp_path, [many, long, completion("a", "Tom", max_tokens=2)])
    assert body(r["a"]) and re.match(r"JSON: more than 4194304 values at byte \d+$", r["line-1"]["error"]["message"])
    assert [r[k]["error"]["code"] for k in ("line-1", "line-2")] == ["invalid_json"] * 2
    assert "longer than" in r["line-2"]["error"]["message"]


# ---- Errors before the first line runs ----

def test_duplicates_name_both_lines(tmp_path):
    lines = [completion("a", "x"), completion("b", "x"), "", completion("a", "y")]
    out = tmp_path / "out.jsonl"
    _, err = batch("-i", write_lines(tmp_path / "in.jsonl", lines), "-o", str(out), status=1)
    assert "lines 1 and 4" in err and "'a'" in err and out.read_text() == ""
    _, err = batch("-i", write_lines(tmp_path / "in.jsonl", [completion("line-2", "x"), {"prompt": "y"}]), "-o", str(out), status=1)
    assert "lines 1 and 2" in err


def test_files_that_are_refused(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [completion("a", "x")])
    precious = tmp_path / "precious.txt"
    precious.write_text("my thesis\n")
    for args in (["-i", source], ["-o", source], ["-i", source, "-o", source], ["-i", "/no/such", "-o", str(tmp_path / "o")],
                 ["-q", "-i", str(tmp_path), "-o", str(tmp_path / "o")],
                 ["-i", source, "-o", "/no/such/out"], ["-i", source, "-o", str(precious)], ["-i", source, "-o", "o", "-p", "x"]):
        _, err = batch(*args, status=1)
        assert len(err.strip().splitlines()) == 1
    assert precious.read_text() == "my thesis\n"
    for text in ('{"my": "thesis"}\n', '{"my": "thesis"}', '{"id":"batch_7"}\n'):  # one line that begins like a result
        precious.write_text(text)
        _, err = batch("-i", source, "-o", str(precious), status=1)
        assert "not a result file" in err and precious.read_text() == text
    for text in ('{"my": "thesis"}\n\n', "\n\nmy thesis\n", "\0\nmy thesis", 'mine\n{"id":"batch_req_'):
        precious.write_text(text)
        _, err = batch("-i", source, "-o", str(precious), status=1)
        assert "not a result file" in err and precious.read_text() == text
    for end in ("more\n", ""):
        text = '{"custom_id":"a","response":{},"error":null}\nmy thesis\n' + end
        precious.write_text(text)
        _, err = batch("-i", source, "-o", str(precious))
        assert "no result, the first is line 2; they stay there" in err and precious.read_text() == text


def test_a_result_longer_than_any_request(tmp_path):
    """The result of a line with thousands of samples: the next run must recognize it in the middle of the file and at its end."""
    source, out = write_lines(tmp_path / "in.jsonl", [completion(k, "x", max_tokens=2) for k in "abc"]), tmp_path / "out.jsonl"
    for n, k in enumerate("ab"):
        with open(out, "a") as f:
            f.write(json.dumps({"custom_id": k, "response": {"body": "x" * (65 << 20)}, "error": None}) + "\n")
        before = out.stat().st_size
        if n == 0:
            shorter = write_lines(tmp_path / "shorter.jsonl", [completion("a", "x", max_tokens=2)])
            _, err = batch("-i", shorter, "-o", str(out), *SMALL)
            assert "cut off" not in err and out.stat().st_size == before
    _, err = batch("-i", source, "-o", str(out), *SMALL)
    assert "2 were done before" in err and [json.loads(line)["custom_id"] for line in open(out)] == ["a", "b", "c"]


def test_a_result_too_long_to_be_parsed(tmp_path):
    """Of the longest results, the next run reads only the beginning. It must not lose any of their bytes."""
    ids, out = ["quoted \"\\", "é\\\\", "last"], tmp_path / "out.jsonl"
    source = write_lines(tmp_path / "in.jsonl", [completion(k, "x", max_tokens=2) for k in [*ids[:2], "new"]])
    tail = b'"},"error":null}\n'
    for k in ids:
        with open(out, "ab") as f:
            f.write(f'{{"id":"batch_req_{"0" * 32}","custom_id":{json.dumps(k)},"response":{{"body":"'.encode())
            f.write(b"x" * (251 << 20 if k != "last" else 9) + tail)
        if k == ids[1]:
            before = out.stat().st_size
            done = write_lines(tmp_path / "done.jsonl", [completion(k, "x") for k in ids[:2]])
            _, err = batch("-i", done, "-o", str(out), *SMALL)
            assert "2 were done before" in err and out.stat().st_size == before
    before = out.stat().st_size
    _, err = batch("-i", source, "-o", str(out), *SMALL)
    assert "2 were done before" in err and "cut off" not in err
    with open(out, "rb") as f:
        f.seek(before - len(tail))
        assert f.read(len(tail)) == tail and json.loads(f.read())["custom_id"] == "new"
    out.unlink()  # it has half a gigabyte


@pytest.mark.parametrize("out, fault", [("/dev/full", ""), ("out.jsonl", "3")])
def test_a_failure_does_not_wait_for_more_input(tmp_path, out, fault):
    """The program that writes to the pipe may wait for results, so it may never close the pipe."""
    p = subprocess.Popen([TOKA, "batch", "-q", "-m", "test/model", "-i", "-", "-o", str(tmp_path / out)], cwd=ROOT, stdin=subprocess.PIPE,
                         stderr=subprocess.PIPE, env={**ENV, **({"TOKA_DEBUG_FAULT": fault} if fault else {})})
    try:
        for i in range(20):
            p.stdin.write((json.dumps(completion(f"a{i}", "x", max_tokens=9)) + "\n").encode())
        p.stdin.flush()
        assert p.wait(60) == 2 and p.stderr.read()
    finally:
        p.kill()


@pytest.mark.slow
def test_one_writer_at_a_time(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [completion(f"a{i}", "x", max_tokens=200, ignore_eos=True) for i in range(500)])
    first = start("-i", source, "-o", str(tmp_path / "out.jsonl"), *SMALL)
    deadline = time.time() + 90
    while not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").stat().st_size:
        assert time.time() < deadline
        time.sleep(0.02)
    _, err = batch("-i", source, "-o", str(tmp_path / "out.jsonl"), status=1)
    first.kill()
    first.communicate()
    assert "another toka batch" in err


def test_a_report_has_characters_beside_tokens(tmp_path):
    """Tokenizers differ; characters do not."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"messages": [{"role": "user", "content": "Tom has 3 apples."}], "max_tokens": 9, "n": 2}
    source.write_text("".join(json.dumps({"custom_id": str(i), **body}) + "\n" for i, body in enumerate(
        ({"prompt": "Tom has", "max_tokens": 30, "n": 3}, chat, {"prompt": "Tom", "max_tokens": 5, "stop": "a"}, {"prompt": 5.5}))))
    report, err = batch("-i", str(source), "-o", str(out), "--report", "-")
    v, n = json.loads(report), 0
    for line in map(json.loads, open(out)):
        for choice in ((line.get("response") or {}).get("body") or {}).get("choices", []):
            n += len(choice["text"] if "text" in choice else choice["message"]["content"])
    assert v["output_characters"] == n > 100 and v["output_characters_per_second"] == pytest.approx(n / v["elapsed_time"], rel=1e-4)
    assert re.search(r" tok/s, \d+ characters/s; ", err)


def test_a_report_that_cannot_be_written(tmp_path):
    """The run ends before the first line is computed."""
    source, out = write_lines(tmp_path / "in.jsonl", [completion("a", "Tom", max_tokens=2)]), tmp_path / "out.jsonl"
    for report in (tmp_path, tmp_path / "none" / "report.json"):
        _, err = batch("-i", source, "-o", str(out), "--report", str(report), status=1)
        assert str(report) in err and out.read_text() == ""
    batch("-i", source, "-o", str(out), "--report", "/dev/null")
    got, _ = batch("-i", source, "-o", str(out), "--report", "-")
    assert json.loads(got)["steps"] >= 0 and not os.path.exists("-")
    _, err = batch("-i", source, "-o", "-", "--report", "-", status=1)
    assert "standard output is" in err


def test_a_report_with_the_name_of_another_file(tmp_path):
    source, out = write_lines(tmp_path / "in.jsonl", [completion("a", "Tom", max_tokens=1)]), tmp_path / "out.jsonl"
    for report in (source, out, out):  # `out` does not exist the first time
        _, err = batch("-i", source, "-o", str(out), "--report", str(report), status=1)
        assert "is the report and" in err
        batch("-i", source, "-o", str(out))
        assert list(read_results(out)) == ["a"] and "Tom" in open(source).read()


@pytest.mark.parametrize("flags, words", [(["--temp", "-1"], "--temp: -1"), (["--max-tokens", "-5"], "--max-tokens: -5"),
                                          (["--min-tokens", "9", "-n", "5"], "--min-tokens: 9"), (["--stop", ""], "--stop[0]"),
                                          (["--now", "soon"], "now")])
def test_flags_that_are_invalid_for_all_lines(tmp_path, flags, words):
    source = write_lines(tmp_path / "in.jsonl", [completion("a", "Tom")])
    _, err = batch("-i", source, "-o", str(tmp_path / "out.jsonl"), *flags, status=1)
    assert words in err and not (tmp_path / "out.jsonl").exists()


# ---- Standard input and output ----

def test_pipes(tmp_path):
    lines = "".join(json.dumps(completion(f"a{i}", PROBLEMS[i]["prompt"], max_tokens=50)) + "\n" for i in range(5))
    out, err = batch("-i", "-", "-o", "-", *SMALL, stdin=lines.encode())
    assert sorted(json.loads(line)["custom_id"] for line in out.splitlines()) == [f"a{i}" for i in range(5)]
    assert "cannot be read twice" in err
    _, err = batch("-i", "-", "-o", str(tmp_path / "o.jsonl"), *SMALL, stdin=(lines + lines.splitlines()[2] + "\n").encode(), status=1)
    assert "lines 3 and 6" in err and len(read_results(tmp_path / "o.jsonl")) == 5
    _, err = batch("-i", "-", "-o", str(tmp_path / "o.jsonl"), *SMALL, stdin=lines.encode())
    assert "0 lines" in err and len((tmp_path / "o.jsonl").read_text().splitlines()) == 5


@pytest.mark.slow
def test_named_pipes(tmp_path):
    fifo, out = str(tmp_path / "fifo"), tmp_path / "out.jsonl"
    os.mkfifo(fifo)
    source = write_lines(tmp_path / "in.jsonl", [completion(f"a{i}", "Tom", n=50, max_tokens=50, ignore_eos=True) for i in range(40)])
    with start("-i", source, "-o", fifo, *SMALL) as p:  # a reader that reads to the end
        assert len([json.loads(line) for line in open(fifo)]) == 40
        p.communicate()
        assert p.returncode == 0
    with start("-q", "-i", source, "-o", fifo, *SMALL) as p:  # a reader that closes the pipe
        with open(fifo) as f:
            f.readline()
        assert b"Broken pipe" in p.stderr.read() and p.wait() == 2
    with start("-q", "-i", source, "-o", fifo, *SMALL) as p, open(fifo) as f:  # a reader that stops to read
        f.read(1)
        p.send_signal(signal.SIGINT)
        assert p.stderr.read() == b"" and p.wait() == 130
    with start("-q", "-i", fifo, "-o", str(out), *SMALL) as p, open(fifo, "w") as f:  # Ctrl-C in the middle of a line
        f.write(json.dumps({"prompt": "Tom", "max_tokens": 1}) + '\n{"prompt":')
        f.flush()
        while not out.exists() or not out.stat().st_size:
            assert p.poll() is None
            time.sleep(0.01)
        p.send_signal(signal.SIGINT)
        assert p.wait() == 130
    assert list(read_results(out)) == ["line-1"]


def test_closed_standard_error(tmp_path):
    """If standard error is closed, no other file may get its descriptor, or the progress would be written into this file."""
    source, out = write_lines(tmp_path / "in.jsonl", [completion("a", "Tom", max_tokens=1)]), tmp_path / "out.jsonl"
    subprocess.run([TOKA, "batch", "-m", "test/model", "-i", "-", "-o", str(out)], env=ENV, cwd=ROOT, stdin=open(source),
                   preexec_fn=lambda: os.close(2), check=True)
    assert len(out.read_text().splitlines()) == 1 and list(read_results(out)) == ["a"]


# ---- The same bytes for all settings ----

@pytest.mark.slow
def test_same_bytes_for_all_settings(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", mixed_lines(60))
    want = None
    for i, args in enumerate((["--max-num-seqs", "128", "-t", "2"], ["--max-num-seqs", "3", "-t", "1"],
                              ["--max-num-seqs", "128", "--kv-tokens", "600", "-t", "2"],
                              ["--max-num-seqs", "40", "--max-num-batched-tokens", "41", "--kv-tokens", "1500"],
                              ["--max-num-seqs", "40", "--speculative-config", '{"method":"suffix","num_speculative_tokens":5}'])):
        out, report = tmp_path / f"out{i}.jsonl", tmp_path / "report.json"
        batch("-i", source, "-o", str(out), "--max-model-len", "256", "--report", str(report), *args, env=ENV | {"TOKA_DEBUG_DRAFTS": "1"})
        lines = sorted(out.read_text().splitlines())
        want = want or lines
        assert lines == want, args
        counts = json.loads(report.read_text())
        assert counts["lines"] == 60 and (counts["draft_tokens"] >= counts["draft_tokens_accepted"] > 0) == ("--speculative-config" in args) == (counts["draft_s"] > 0)


@pytest.mark.slow
def test_same_bytes_when_samples_are_preempted(tmp_path):
    lines = [completion(f"a{i}", PROBLEMS[i]["prompt"], n=6, temperature=2.5, max_tokens=150, logprobs=1) for i in range(16)]
    lines += [chat(f"b{i}", PROBLEMS[i]["prompt"], n=2, temperature=1, max_tokens=150) for i in range(8)]
    source, results, preemptions = write_lines(tmp_path / "in.jsonl", lines), [], []
    for i, args in enumerate((["--kv-tokens", "20000"], ["--kv-tokens", "320"], ["--kv-tokens", "480", "-t", "1"])):
        out, report = tmp_path / f"out{i}.jsonl", tmp_path / "report.json"
        _, err = batch("-i", source, "-o", str(out), "--max-model-len", "256", "--max-num-seqs", "40", "--report", str(report), *args)
        results.append(sorted(out.read_text().splitlines()))
        preemptions.append(json.loads(report.read_text())["preemptions"])
        assert f"{preemptions[-1]} preemptions" in err
    assert preemptions[0] == 0 and min(preemptions[1:]) >= 5, preemptions
    assert results[1] == results[0] and results[2] == results[0]


def test_sizes_larger_than_memory(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [completion("a", "Tom", max_tokens=1)])
    for args, status, words in ((["--kv-tokens", "400000000000"], 2, "memory"),
                                (["--kv-tokens", "9000000000", "--max-num-seqs", "65536"], 2, "memory"),
                                (["--kv-tokens", "99999999999999999999"], 1, "kv-tokens"),
                                (["--max-num-seqs", "2000000000"], 1, "--max-num-seqs: "), (["--max-num-seqs", "65537"], 1, "--max-num-seqs: "),
                                (["--max-num-batched-tokens", "65537"], 1, "--max-num-batched-tokens: ")):
        began = time.monotonic()
        _, err = batch("-i", source, "-o", str(tmp_path / "out.jsonl"), *args, status=status)
        assert words in err and len(err.strip().splitlines()) == 1, err
        assert time.monotonic() - began < 10, args  # the size is refused before tables of this size are filled


@pytest.mark.slow
def test_many_samples_of_one_prompt(tmp_path):
    p = PROBLEMS[5]
    r = run(tmp_path, [completion("a", p["prompt"], n=1024, temperature=0, max_tokens=60)], "--max-num-seqs", "256")
    assert len(texts(r["a"])) == 1024 and len(set(texts(r["a"]))) == 1 and is_right(texts(r["a"])[0], p["answer"])
    share = float(re.search(r"([\d.]+) % from the prefix tree", r["stderr"])[1])
    assert share > 50


@pytest.mark.slow
def test_accuracy_of_16_samples(tmp_path):
    problems = PROBLEMS[100:160]
    r = run(tmp_path, [chat(str(i), p["prompt"], n=16, temperature=0.6) for i, p in enumerate(problems)], "--max-num-seqs", "256")
    right = sum(is_right(t, p["answer"]) for i, p in enumerate(problems) for t in texts(r[str(i)]))
    assert right >= 0.99 * 16 * len(problems)


# ---- Killed ----

KILL_LINES = 150


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kill")
    source = write_lines(folder / "in.jsonl", mixed_lines(KILL_LINES))
    t0 = time.time()
    batch("-i", source, "-o", str(folder / "whole.jsonl"), *SMALL)
    return source, sorted((folder / "whole.jsonl").read_text().splitlines()), time.time() - t0


@pytest.mark.slow
def test_killed_at_50_moments(uninterrupted, tmp_path):
    source, want, seconds = uninterrupted
    rng = random.Random(1)
    out, kills, torn, moved = tmp_path / "out.jsonl", 0, 0, 0
    while kills < 50:
        before = out.stat().st_size if out.exists() else 0
        p = start("-i", source, "-o", str(out), *SMALL)
        time.sleep(rng.uniform(0, min(seconds, 0.8)))
        p.kill()
        p.communicate()
        if p.returncode == 0:  # it ended before the kill: start again
            assert sorted(out.read_text().splitlines()) == want
            out.unlink()
            continue
        kills += 1
        if out.exists() and rng.random() < 0.5:  # as after a power failure, the last bytes are missing
            data = out.read_bytes()
            out.write_bytes(data[:len(data) - rng.randrange(min(len(data), 300) + 1)])
            torn += 1
        moved += out.exists() and out.stat().st_size != before
    _, err = batch("-i", source, "-o", str(out), *SMALL)
    assert sorted(out.read_text().splitlines()) == want
    assert torn > 10 and moved > 10


def test_incomplete_last_lines_are_removed(uninterrupted, tmp_path):
    source, want, _ = uninterrupted
    whole = "\n".join(want[:3]) + "\n"
    for mark, tail in (("", want[3][:-2]), ("", want[3][:1]), ("", want[3][:-1]), ("", want[3][:40] + "\n"), ("", "\0\0\0"), ("", "{"),
                       ("\ufeff", "{")):  # some editors write a byte order mark
        out = tmp_path / "out.jsonl"
        out.write_text(mark + whole + tail)
        first = write_lines(tmp_path / "in.jsonl", [completion("new", "Tom", max_tokens=1)])
        _, err = batch("-i", first, "-o", str(out))
        lines = out.read_text().removeprefix(mark).splitlines()
        assert lines[:3] == want[:3] and len(lines) == 4 and json.loads(lines[3])["custom_id"] == "new" and "torn" in err
    out.write_text(want[3][:50])
    batch("-i", first, "-o", str(out))
    assert list(read_results(out)) == ["new"]


# ---- Damaged output files ----

def half(line):
    return line[:len(line) // 2]


# (function that damages the 6 lines of an output file, how many results are lost, how many damaged lines are reported); each line
# ends with a line feed
DAMAGE = {
    "none": (lambda v: v, 0, 0), "blank": (lambda v: [v[0], "\n", *v[2:]], 1, 1),
    "one more empty line": (lambda v: [*v[:3], "\n", *v[3:]], 0, 1),
    "empty lines at the end": (lambda v: [*v, "\n", "\n"], 0, 1), "spaces": (lambda v: [v[0], "  \t\n", *v[1:]], 0, 1),
    "half": (lambda v: [*v[:2], half(v[2]) + "\n", *v[3:]], 1, 1), "first": (lambda v: [half(v[0]) + "\n", *v[1:]], 1, 1),
    "two lines": (lambda v: [v[0], v[1][9:], v[2], half(v[3]) + "\n", *v[4:]], 2, 2),
    "joined": (lambda v: [*v[:2], v[2][:-1] + v[3], *v[4:]], 2, 1),
    "NULs": (lambda v: [*v[:2], "\0" * len(v[2]) + "\n", *v[3:]], 1, 1), "NULs at the end": (lambda v: [*v[:5], "\0" * len(v[5])], 1, 0),
    "NULs in a line": (lambda v: [*v[:4], v[4][:20] + "\0" * 99 + v[4][119:], v[5]], 1, 1),
    "NULs before a line": (lambda v: [*v[:4], "\0" * 99 + v[4], v[5]], 1, 1),
    "a bit": (lambda v: [v[0], v[1].replace('"response"', '"rdsponse"', 1), *v[2:]], 1, 1),
    "a byte": (lambda v: [v[0], v[1].replace("{", "[", 1), *v[2:]], 1, 1),
    "byte order mark": (lambda v: ["\ufeff" + v[0], *v[1:]], 0, 0), "CRLF": (lambda v: [line[:-1] + "\r\n" for line in v], 0, 0),
    "CRLF and blank": (lambda v: [line[:-1] + "\r\n" for line in v] + ["\r\n", v[0]], 0, 1),
    "no last line feed": (lambda v: [*v[:5], v[5][:-1]], 0, 0),
    "twice": (lambda v: [*v, v[2], v[3]], 0, 0), "a line of another program": (lambda v: ['{"event":"begin"}\n', *v, "done.\n"], 0, 2),
    "torn and damaged": (lambda v: [v[0], half(v[1]) + "\n", *v[2:5], half(v[5])], 2, 1),
    "a long one": (lambda v: [v[0], "x" * (9 << 20) + "\n", *v[2:]], 1, 1),
    "no answer": (lambda v: ['{"custom_id":"q0","response":null,"error":null}\n', *v[1:]], 1, 1),
    "an array": (lambda v: [v[0], "[1,2]\n", "null\n", "7\n", *v[3:]], 2, 3),
    "no JSON text": (lambda v: [v[0], v[1].replace("Tom", "T\udcffm"), *v[2:]], None, None),
}


@pytest.fixture(scope="module")
def six_results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("six_results")
    lines = [completion(f"q{i}", f"Tom has {i}", max_tokens=3, echo=True) for i in range(5)] + [{"promt": "x"}]
    source = write_lines(folder / "in.jsonl", lines)
    batch("-i", source, "-o", str(folder / "out.jsonl"), *SMALL)
    return source, open(folder / "out.jsonl").read().splitlines(keepends=True)


def is_result(line):
    return "response" in line and "error" in line and (line["error"] or line["response"]) is not None


def parsed(path):
    """The results among the lines, a list for each custom_id."""
    found = {}
    for line in path.read_bytes().split(b"\n"):
        try:
            v = json.loads(line.decode("utf-8-sig"))
            found.setdefault(v["custom_id"], []).append(json.dumps(v) if is_result(v) else None)
        except (ValueError, KeyError, TypeError):
            continue
    return {k: [x for x in v if x] for k, v in found.items() if any(v)}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_output_continues(six_results, tmp_path, name):
    """Whole results stay unchanged, lost results are computed again, and the number of damaged lines is reported."""
    source, lines = six_results
    change, lost, n_damaged = DAMAGE[name]
    out = tmp_path / "out.jsonl"
    damaged = "".join(change(list(lines))).encode("utf-8", "surrogateescape")
    out.write_bytes(damaged)
    report = tmp_path / "report.json"
    _, err = batch("-i", source, "-o", str(out), "--report", str(report), *SMALL)
    whole = {json.loads(line)["custom_id"]: json.dumps(json.loads(line)) for line in lines}
    again = parsed(out)
    assert set(again) == set(whole) and all(set(v) == {whole[k]} for k, v in again.items())
    keep = damaged[:damaged.rindex(b"\n") + 1]
    assert out.read_bytes().startswith(keep.rstrip(b"\r\n")) and out.read_bytes().endswith(b"\n")
    if lost is None:
        return
    assert all(len(v) == 1 for v in again.values()) == (name not in ("twice", "CRLF and blank"))
    assert f"toka batch: {lost} lines in" in err and json.loads(report.read_text())["damaged"] == n_damaged
    assert (f"{n_damaged} line{'s are' if n_damaged > 1 else ' is'} damaged or no result" in err) == (n_damaged > 0), err
    assert ("results have the custom_id of an earlier one" in err) == (name == "twice")
    _, err = batch("-i", source, "-o", str(out), *SMALL)
    assert "toka batch: 0 lines in" in err


def test_an_output_without_a_whole_line(six_results, tmp_path):
    source, lines = six_results
    for text in ("\0" * 5000, "\0" * 50 + "\n", "\n\n\r\n", half(lines[0]) + "\n" + half(lines[1]) + "\n", half(lines[0]),
                 "\0\0" + half(lines[0]) + "\n"):
        out = tmp_path / "out.jsonl"
        out.write_text(text)
        batch("-i", source, "-o", str(out), *SMALL)
        assert len(parsed(out)) == 6


# ---- Lines that have changed since they were answered ----

def fnv(text):
    """The 128-bit FNV-1a hash, which the id of a result contains."""
    h = 0x6C62272E07BB014262B821756295C58D
    for byte in text.encode():
        h = (h ^ byte) * (1 << 88 | 0x13B) % (1 << 128)
    return h


def changed(err):
    """How many lines have changed, and the first of them, as the program reported; None if it reported nothing."""
    found = re.search(r"in\S*: (\d+) lines? ha(?:s|ve) changed since the answers in \S+ were written, the first is line (\d+);", err)
    return (int(found[1]), int(found[2])) if found else None


def test_changed_lines_are_reported(tmp_path):
    """If a line has changed but kept its custom_id, its result answers the old line: the next run reports this."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    first = [completion("a", "Tom", max_tokens=2, temperature=1), completion("b", "Eve", max_tokens=2),
             chat("c", "Tom \u00e9", max_tokens=2), {"prompt": "Tom", "max_tokens": 2}, "no json", {"id": "e", "promt": "x"}]

    def again(lines, *args, **more):
        return batch("-i", write_lines(source, lines), "-o", str(out), *SMALL, *args, **more)[1]

    assert changed(again(first)) is None
    before = out.read_text()
    assert changed(again(first)) is None
    same = ['{ "body":{"temperature":1.0, "max_tokens":2e0,\t"prompt":"\\u0054om"}, "url":"/v1/completions",'
            '"method":"POST","custom_id":"a"}\r',
            json.dumps(first[1], indent=1).replace("\n", " "), json.dumps(first[2], ensure_ascii=False, sort_keys=True), *first[3:4],
            "no json  \r", first[5]]
    assert changed(again(same)) is None
    for at, line in ((1, completion("b", "Ann", max_tokens=2)), (0, completion("a", "Tom", max_tokens=2, temperature=0.5)),
                     (2, chat("c", "Tom e", max_tokens=2)),
                     (3, {"prompt": "Tim", "max_tokens": 2}), (4, {"prompt": "Tim", "max_tokens": 2}),
                     (5, {"id": "e", "prompt": "x", "max_tokens": 2})):
        assert changed(again([*first[:at], line, *first[at + 1:]], "-q")) == (1, at + 1), line
    assert changed(again([completion("a", "x"), completion("b", "y"), *first[2:]])) == (2, 1)
    moved = again([completion("new", "Tom", max_tokens=2), *first])  # the custom_id of a line without one is its number
    assert changed(moved) == (1, 5) and len(read_results(out)) == 8 and out.read_text().startswith(before)
    text = "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in [first[1], completion("a", "z"), *first[2:]])
    report = tmp_path / "report.json"
    _, err = batch("-i", "-", "-o", str(out), "--report", str(report), *SMALL, stdin=text.encode())
    assert "standard input: 1 line has changed" in err and json.loads(report.read_text())["changed"] == 1


def test_results_without_a_hash_of_the_line(tmp_path):
    """Results of an old toka or of another server have no hash of their line: the run reports no change."""
    source, out = write_lines(tmp_path / "in.jsonl", [completion(k, "Tom", max_tokens=2) for k in "abcd"]), tmp_path / "out.jsonl"
    ids = [f"batch_req_{fnv('a'):032x}", "batch_req_67cbe1", f"batch_req_{'0' * 32}", None]
    write_lines(out, [{"id": i, "custom_id": k, "response": {"body": {}}, "error": None} for i, k in zip(ids, "abcd")])
    _, err = batch("-i", source, "-o", str(out), *SMALL)
    assert "changed" not in err and "4 were done before" in err


# ---- Interrupted, out of space ----

@pytest.mark.slow
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(uninterrupted, tmp_path, sig):
    source, want, seconds = uninterrupted
    out = tmp_path / "out.jsonl"
    p = start("-i", source, "-o", str(out), *SMALL)
    while not out.exists() or not out.stat().st_size:
        time.sleep(0.01)
    p.send_signal(sig)
    p.communicate(timeout=20)
    assert p.returncode == 130
    kept = out.read_text()
    assert 0 < len(kept.splitlines()) < len(want) and kept.endswith("\n")
    batch("-i", source, "-o", str(out), *SMALL)
    assert sorted(out.read_text().splitlines()) == want and out.read_text().startswith(kept)


def test_interrupted_while_waiting_for_input():
    p = start("-i", "-", "-o", "-", *SMALL, stdin=subprocess.PIPE)
    p.stderr.readline()
    p.send_signal(signal.SIGINT)
    assert p.wait(timeout=20) == 130
    p.communicate()


@pytest.mark.slow
def test_disk_full(uninterrupted, tmp_path):
    source, want, _ = uninterrupted
    out = tmp_path / "out.jsonl"
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
    _, err = batch("-q", "-i", source, "-o", str(out), *SMALL, status=2, preexec_fn=limit)
    first, last = err.splitlines()
    assert "the first line with an error" in first and "File too large" in last and "goes on" in last
    kept = out.read_text()
    assert 0 < len(kept) <= 20000 and kept.endswith("\n")
    batch("-i", source, "-o", str(out), *SMALL)
    assert sorted(out.read_text().splitlines()) == want
    _, err = batch("-q", "-i", source, "-o", "/dev/full", *SMALL, status=2)
    assert "No space left" in err


def test_closed_pipe(uninterrupted):
    p = start("-q", "-i", uninterrupted[0], "-o", "-", *SMALL)
    p.stdout.readline()
    p.stdout.close()
    err = p.stderr.read().decode()
    assert p.wait(timeout=60) == 2 and "Broken pipe" in err
    p.stderr.close()


# ---- Memory ----

def peak_mb(args):
    p = start(*args)
    p.stdout.read(), p.stderr.read()
    _, status, usage = os.wait4(p.pid, 0)
    p.returncode = os.waitstatus_to_exitcode(status)
    assert p.returncode == 0
    return usage.ru_maxrss / 1024


def test_memory_is_bounded(tmp_path):
    """Of 200,000 lines, 1,000 run and the rest become error records. A line of the input takes 24 bytes of memory and little more."""
    few, many = tmp_path / "few.jsonl", tmp_path / "many.jsonl"
    good = [json.dumps(completion(f"q{i}", "Tom", max_tokens=1)) + "\n" for i in range(1000)]
    bad = [json.dumps({"custom_id": f"long-custom-id-number-{i}", "url": "/v1/none", "body": {"prompt": "x" * 300}}) + "\n"
           for i in range(199000)]
    few.write_text("".join(good))
    many.write_text("".join(bad[:100000] + good + bad[100000:]))
    small = peak_mb(["-i", str(few), "-o", str(tmp_path / "few.out"), *SMALL])
    large = peak_mb(["-i", str(many), "-o", str(tmp_path / "many.out"), *SMALL])
    assert sum(1 for _ in open(tmp_path / "many.out")) == 200000
    assert large - small < 60


# ---- Shards ----

def shard_of(custom_id, n):
    """As run_is_in_shard: FNV-1a of 128 bits, folded by splitmix64's last steps."""
    def mix(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31
    key = 0x6C62272E07BB014262B821756295C58D
    for byte in custom_id.encode():
        key = (key ^ byte) * (2**88 + 0x13B) % 2**128
    return mix(key >> 64 ^ mix(key % 2**64)) % n


def test_shards_are_parts_of_the_whole(tmp_path):
    lines = [*mixed_lines(27), "", "not JSON", completion("é\"\\", "Tom", max_tokens=2)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    want = run(tmp_path, lines)
    del want["stderr"]
    parts = []
    for i in range(3):
        out, report = tmp_path / f"out.{i}", tmp_path / "report.json"
        given = source
        if i == 2:  # a run of one shard continues, also behind a pipe
            half = parts[0].splitlines(keepends=True)
            out.write_text("".join(half[:1]) + half[1][:50])
            given = "-"
        _, err = batch("-i", given, "-o", str(out), *SMALL, "--shard", f"{i % 2}/2", "--report", str(report),
                       **({"stdin": open(source, "rb").read()} if i == 2 else {}))
        parts.append(out.read_text())
        assert i < 2 or "1 were done before" in err
        assert {shard_of(name, 2) for name in read_results(out)} == {i % 2}
        assert json.loads(report.read_text())["lines"] == len(read_results(out)) - (i == 2)
    assert sorted(parts[2].splitlines()) == sorted(parts[0].splitlines())
    (tmp_path / "all").write_text(parts[0] + parts[1])  # cat
    assert read_results(tmp_path / "all") == want and 9 < len(parts[0].splitlines()) < 20
    _, err = batch("-i", source, "-o", str(tmp_path / "all"), *SMALL)  # the whole run has nothing left to do
    assert "0 lines in" in err and f"{len(want)} were done before" in err


def test_killed_shards(tmp_path):
    """Two shards run at once; each is killed several times and goes on. Together they are the whole run."""
    source, lines = write_lines(tmp_path / "in.jsonl", mixed_lines(24)), []
    batch("-i", source, "-o", str(tmp_path / "whole"), *SMALL)
    want = sorted((tmp_path / "whole").read_text().splitlines())
    outs = [tmp_path / f"out.{i}" for i in range(2)]
    for n in range(1, 4):
        running = [start("-i", source, "-o", str(out), *SMALL, "--shard", f"{i}/2") for i, out in enumerate(outs)]
        for out, p in zip(outs, running):  # when it has n lines, or has ended
            while p.poll() is None and (not out.exists() or out.read_text().count("\n") < n):
                time.sleep(0.002)
            p.kill()
            p.communicate()
    for i, out in enumerate(outs):
        batch("-i", source, "-o", str(out), *SMALL, "--shard", f"{i}/2")
        lines.append(out.read_text().splitlines())
    assert sorted(lines[0] + lines[1]) == want and all(len(x) > 3 for x in lines)


def test_a_shard_without_lines_and_bad_shards(tmp_path):
    source, out = write_lines(tmp_path / "in.jsonl", [completion("a", "x", max_tokens=1)]), tmp_path / "out.jsonl"
    mine = shard_of("a", 1000)
    _, err = batch("-i", source, "-o", str(out), *SMALL, "--shard", f"{999 - mine}/1000")
    assert "0 lines in" in err and out.read_text() == ""
    batch("-i", source, "-o", str(out), *SMALL, "--shard", f"{mine}/1000")
    assert list(read_results(out)) == ["a"]
    for bad in ("", "1", "1/1", "2/1", "-1/2", "0/0", "0/2x", "x/2", " 0/2", "0/ 2", "0/-2", "0/99999999999", "1/2/3"):
        _, err = batch("-i", source, "-o", str(out), "--shard", bad, status=1)
        assert re.search(r"--shard .*: expected I/N", err), bad
    two = write_lines(tmp_path / "two.jsonl", [completion("a", "x"), completion("a", "x")])
    _, err = batch("-i", two, "-o", str(tmp_path / "new"), "--shard", f"{mine}/1000", status=1)
    assert "lines 1 and 2 have the same custom_id" in err
