"""Tests of toka.py over libtoka.so: its structs, its results against the command line's, Ctrl-C. Run through test/run.sh."""
import inspect
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from hub import FakeHub, Repo, read_folder

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOKA = os.path.join(ROOT, "toka")
LIBRARY = os.path.join(ROOT, "libtoka.so")
PROBLEM = "Tom has 12 apples. He buys 7 more apples. How many apples does Tom have now?"
ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}, "TOKA_DEVICE": "cpu"}


def make_library():
    sources = [os.path.getmtime(os.path.join(ROOT, name)) for name in ("toka.c", "toka.h")]
    if not os.path.exists(LIBRARY) or os.path.getmtime(LIBRARY) < max(sources):
        subprocess.run(["./build.sh", "lib"], cwd=ROOT, check=True, env={**ENV, "NVCC": "", "CFLAGS": "-O1"}, capture_output=True)


@pytest.fixture(scope="module")
def py():
    make_library()
    import toka
    return toka


@pytest.fixture(scope="module")
def llm(py):
    with py.LLM(f"{ROOT}/test/model", device="cpu") as model:
        yield model


def command(*args, stdin=""):
    r = subprocess.run([TOKA, *args], input=stdin.encode(), capture_output=True, env=ENV, cwd=ROOT, timeout=60)
    assert r.returncode == 0, r.stderr
    return r.stdout.decode()


def test_structs_are_those_of_the_header(py, tmp_path):
    """A C compiler prints the size of each struct and the offset of each field."""
    structs = {"toka_err": py._Err, "toka_options": py._Options, "toka_info": py._Info, "toka_sampling": py._Sampling,
               "toka_request": py._Request, "toka_event": py._Event, "toka_grammar": py._Grammar}
    lines, want = [], []
    for name, kind in structs.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        want.append(f"{name} {py.C.sizeof(kind)}")
        for field, _ in kind._fields_:
            lines.append(f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));')
            want.append(f"{name}.{field} {getattr(kind, field).offset} {getattr(kind, field).size}")
    source = tmp_path / "layout.c"
    source.write_text('#include "toka.h"\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n' + "\n".join(lines) + "\nreturn 0;\n}\n")
    subprocess.run(["cc", "-I", ROOT, str(source), "-o", str(tmp_path / "layout")], check=True)
    got = subprocess.run([str(tmp_path / "layout")], capture_output=True, check=True).stdout.decode().splitlines()
    assert got == want


def test_results_are_those_of_the_command_line(py, llm):
    flags = ["--temp", "0.8", "--top-p", "0.9", "--seed", "7", "-n", "12", "--samples", "4", "--json", "--logprobs", "2"]
    want = json.loads(command("-m", "test/model", "--raw", "-p", "Tom has", *flags))["samples"]
    params = py.SamplingParams(n=4, temperature=0.8, top_p=0.9, seed=7, max_tokens=12, logprobs=2)
    answers = llm.generate(["Tom has", {"prompt_token_ids": llm.encode("Tom has")}, {"prompt": "Tom has"}], params)
    assert [len(a.outputs) for a in answers] == [4, 4, 4]
    for answer in answers:
        for sample, output in zip(want, answer.outputs):
            assert output.text == sample["text"] and output.finish_reason == sample["finish_reason"]
            assert output.token_ids.tolist() == [t["id"] for t in sample["tokens"]]
            np.testing.assert_allclose(output.logprobs, [t["logprob"] for t in sample["tokens"]], atol=1e-6)
            np.testing.assert_allclose(output.sampled_logprobs, [t["sampled_logprob"] for t in sample["tokens"]], atol=1e-6)
            assert output.top_ids.tolist() == [[x["id"] for x in t["top"]] for t in sample["tokens"]]
            assert output.token_ids.dtype == np.int32 and not output.token_ids.flags.owndata  # not a copy
    assert answers[0].prompt == "Tom has" and answers[0].prompt_token_ids.tolist() == llm.encode("Tom has").tolist()
    assert abs(answers[0].outputs[0].cumulative_logprob - sum(t["logprob"] for t in want[0]["tokens"])) < 1e-4


def test_chat_and_text(py, llm):
    want = command("-m", "test/model", "-q", "-p", PROBLEM)
    messages = [{"role": "user", "content": PROBLEM}]
    greedy = py.SamplingParams(temperature=0, max_tokens=None)
    one, = llm.chat(messages, greedy)
    assert one.outputs[0].text + "\n" == want and one.outputs[0].finish_reason == "stop"
    assert [a.outputs[0].text for a in llm.chat([messages, messages], [greedy, greedy])] == [one.outputs[0].text] * 2
    assert "".join(p.text for p in llm.chat_stream(messages, greedy)) == one.outputs[0].text
    assert llm.apply_chat_template(messages) == command("template", "test/model", stdin=json.dumps({"messages": messages, "add_generation_prompt": True}))
    text = "héllo 한국어 🙂"
    assert " ".join(map(str, llm.encode(text))) == command("tokenize", "test/model", stdin=text).strip()
    assert llm.decode(llm.encode(text), skip_special_tokens=True) == text
    scores = json.loads(command("score", "test/model", "--json", "-q", "-p", PROBLEM))["tokens"]
    np.testing.assert_allclose(llm.score(llm.encode(PROBLEM))[1:], [t["logprob"] for t in scores[1:]], atol=1e-5)
    assert llm.apply_chat_template(messages, tokenize=True).tolist() == one.prompt_token_ids.tolist()
    assert llm.chat(messages, greedy, chat_template=None, lora_request=None)[0].outputs[0].text == one.outputs[0].text
    # without parameters: those of generation_config.json
    default = llm.get_default_sampling_params()
    assert (default.temperature, default.top_p, default.max_tokens) == (0, 1, None) and llm.chat(messages, default)[0].outputs[0].text == one.outputs[0].text
    default, = llm.generate(PROBLEM)
    assert default.outputs[0].finish_reason in ("stop", "length")


def test_arguments_of_a_chat(py, tmp_path, capfd):
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }} {{ kind }}{{ add_generation_prompt }}")
    with py.LLM("test/model", chat_template=tmp_path / "own.jinja") as model:
        messages = [{"role": "user", "content": "Tom"}]
        assert model.apply_chat_template(messages, kind="a") == model.apply_chat_template(messages, chat_template_kwargs={"kind": "a"}) == "Tom aTrue"
        assert model.chat(messages, kind="b", add_generation_prompt=False)[0].prompt == "Tom bFalse"
        capfd.readouterr()
        model.chat([messages, messages], py.SamplingParams(n=2, max_tokens=2), use_tqdm=True)
        assert capfd.readouterr().err == "".join(f"\r{n} samples done" for n in range(1, 5)) + "\n"


def test_embed(py, llm):
    one, two, ids = llm.embed(["Tom has", PROBLEM, llm.encode("Tom has").tolist()])
    assert one.prompt == "Tom has" and one.outputs.embedding.shape == (256,) and one.outputs.embedding.dtype == np.float32
    assert abs(np.linalg.norm(two.outputs.embedding) - 1) < 1e-6 and np.array_equal(one.outputs.embedding, ids.outputs.embedding)
    short, = llm.embed("Tom has", dimensions=8)
    cut = one.outputs.embedding[:8]
    np.testing.assert_allclose(short.outputs.embedding, cut / np.linalg.norm(cut), atol=1e-6)
    with pytest.raises(ValueError, match="dimensions"):
        llm.embed(["Tom", "Ann"], dimensions=257)
    with pytest.raises(ValueError, match="no tokens"):
        llm.embed([[5], []])
    assert len(llm.generate("Tom has", py.SamplingParams(max_tokens=3))) == 1


def test_score_of_two_texts(py, llm):
    texts = ["Tom has", PROBLEM, "Ann"]
    vectors = [e.outputs.embedding for e in llm.embed(texts)]
    one = llm.score("Tom has", texts)
    assert [s.outputs.score for s in one] == pytest.approx([float(vectors[0] @ v) for v in vectors], abs=1e-5)
    assert abs(one[0].outputs.score - 1) < 1e-5 and len(one[1].prompt_token_ids) == len(llm.encode("Tom has")) + len(llm.encode(PROBLEM))
    assert [s.outputs.score for s in llm.score(texts, texts[::-1])][1] == pytest.approx(1, abs=1e-5)
    for a, b in ((texts[:2], texts), ("x", [])):
        with pytest.raises(ValueError, match="expected one or as many"):
            llm.score(a, b)


def test_parameters(py, llm):
    P = py.SamplingParams
    whole = llm.generate("Tom has", P(temperature=0, max_tokens=30))[0].outputs[0]
    stop = whole.text[8:12]
    cut = llm.generate("Tom has", P(temperature=0, max_tokens=30, stop=["§", stop]))[0].outputs[0]
    assert cut.text == whole.text[:whole.text.index(stop)] and (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    kept = llm.generate("Tom has", P(temperature=0, max_tokens=30, stop=stop, include_stop_str_in_output=True))[0].outputs[0]
    assert kept.text == cut.text + stop
    last = int(whole.token_ids[4])
    ended = llm.generate("Tom has", P(temperature=0, max_tokens=30, stop_token_ids=[last]))[0].outputs[0]
    assert ended.stop_reason == last and len(ended.token_ids) <= 5
    none = llm.generate("Tom has", P(temperature=0, max_tokens=9, allowed_token_ids=[55], structured_outputs={"regex": "TTx"}))[0].outputs[0]
    assert (none.text, none.finish_reason, none.stop_reason) == ("TT", "length", "nothing is left to draw")
    assert set(llm.generate("Tom has", P(max_tokens=9, allowed_token_ids=[400, 401]))[0].outputs[0].token_ids.tolist()) <= {400, 401}
    assert set(llm.generate("Tom has", P(max_tokens=9, logit_bias={402: 100}))[0].outputs[0].token_ids.tolist()) == {402}
    word = whole.text.split()[0]
    assert word not in llm.generate("Tom has", P(temperature=0, max_tokens=20, bad_words=[word]))[0].outputs[0].text
    answer, = llm.generate("Tom has", P(max_tokens=1, prompt_logprobs=True))
    np.testing.assert_allclose(answer.prompt_logprobs, llm.score(llm.encode("Tom has")), atol=1e-5)
    assert answer.prompt_top_ids is None
    for k in (0, 3):
        top, = llm.generate("Tom has", P(max_tokens=1, prompt_logprobs=k))
        np.testing.assert_array_equal(top.prompt_logprobs, answer.prompt_logprobs)
    assert top.prompt_top_ids.shape == top.prompt_top_logprobs.shape == (len(top.prompt_token_ids), 3)
    assert (top.prompt_top_ids[0] == -1).all() and np.isnan(top.prompt_top_logprobs[0]).all()
    best, = llm.generate({"prompt_token_ids": top.prompt_token_ids[:-1]}, P(max_tokens=1, logprobs=3))
    np.testing.assert_array_equal(top.prompt_top_ids[-1], best.outputs[0].top_ids[0])
    np.testing.assert_allclose(top.prompt_top_logprobs[-1], best.outputs[0].top_logprobs[0], atol=1e-5)
    for name, value in itertools.product(("logprobs", "prompt_logprobs"), (-1, 101, "x", 1.5)):
        with pytest.raises(ValueError, match=f"^{name}: {value!r}, expected 0 to 100$"):
            P(**{name: value})
    with open(f"{ROOT}/toka.h") as header:
        assert f"#define TOKA_MAX_LOGPROBS {py._MAX_LOGPROBS} " in header.read()
    same = [llm.generate("Tom has", P(max_tokens=9, temperature=2))[0].outputs[0].text for _ in range(6)]
    assert len(set(same)) > 1  # a new seed each time
    assert llm.info["vocab_size"] == 1024 and llm.info["has_chat_template"] == 1


def test_structured_outputs(py, llm):
    """Each kind gives what it says, also with n samples, a stream, and beside requests without it."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
              "required": ["n", "b"], "additionalProperties": False}
    make = lambda seed=5, **kind: py.SamplingParams(n=3, temperature=2, seed=seed, max_tokens=200, structured_outputs=py.StructuredOutputsParams(**kind))
    kinds = [{"json": schema}, {"json": json.dumps(schema), "disable_any_whitespace": True}, {"regex": "[0-9]{4}-[0-9]{2}"}, {"choice": ["yes", "no \u00e9"]},
             {"grammar": 'root ::= "a"+ "b"'}]
    answers = llm.generate(["Tom has"] * 6, [make(**kind) for kind in kinds] + [py.SamplingParams(max_tokens=5)])
    texts = [[o.text for o in a.outputs] for a in answers]
    for text in texts[0] + texts[1]:
        value = json.loads(text)
        assert set(value) == {"n", "b"} and 0 <= value["n"] <= 99 and isinstance(value["b"], bool)
    assert not any(" " in text or "\n" in text for text in texts[1])
    assert all(re.fullmatch("[0-9]{4}-[0-9]{2}", t) for t in texts[2]) and set(texts[3]) <= {"yes", "no \u00e9"}
    assert all(re.fullmatch("a+b?", t) for t in texts[4])
    assert "".join(p.text for p in llm.stream("x", py.SamplingParams(structured_outputs={"choice": ["only this"]}))) == "only this"
    assert json.loads(llm.generate("x", py.SamplingParams(temperature=0, max_tokens=None, logit_bias={llm.encode("}", False)[-1]: 50},
                                                          structured_outputs={"json_object": True}))[0].outputs[0].text) is not None


def test_seed_of_the_model_and_no_text(py):
    """Requests without a seed get theirs from that of the model; without one they are random."""
    def texts(**arguments):
        with py.LLM(f"{ROOT}/test/model", device="cpu", dtype="float", max_model_len=64, trust_remote_code=True, tokenizer_mode="auto", enable_chunked_prefill=True,
                    disable_log_stats=True, **arguments) as llm:
            return [llm.generate("Tom has", py.SamplingParams(temperature=2, max_tokens=9))[0].outputs[0].text for _ in range(3)]
    one = texts(seed=1)
    assert one == texts(seed=1) != texts(seed=2) and len(set(one)) > 1 and texts() != texts(seed=None)
    with py.LLM(f"{ROOT}/test/model", device="cpu") as llm:
        params = dict(temperature=0, max_tokens=9, best_of=1)
        text, none = (llm.generate("Tom has", py.SamplingParams(**params, detokenize=d))[0].outputs[0] for d in (True, False))
        assert text.text and none.text == "" and none.token_ids.tolist() == text.token_ids.tolist()


def test_wrong_arguments(py, llm):
    """toka.py refuses them itself, by name."""
    P = py.SamplingParams
    for call, kind, text in ((lambda: py.LLM(max_model_len="x"), ValueError, "max_model_len: 'x', expected a whole number"),
                             (lambda: py.LLM(max_num_seqs=2**31), ValueError, "max_num_seqs: 2147483648, expected"), (lambda: py.LLM(5), ValueError, "model: 5, expected a text"),
                             (lambda: py.LLM(gpu_memory_utilization="0.9"), ValueError, "gpu_memory_utilization: '0.9', expected a number"),
                             *((lambda name=name: py.LLM(**{name: 0}), ValueError, f"{name}: 0, expected 1 to 64")
                               for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")),
                             (lambda: py.LLM(enforce_eager=2), ValueError, "enforce_eager: 2, expected True or False"), (lambda: py.LLM(seed="x"), ValueError, "seed: 'x'"),
                             (lambda: py.LLM(tokenizer="x"), ValueError, "tokenizer: 'x', expected None or the model"),
                             (lambda: py.LLM(load_format="dummy"), ValueError, "load_format: 'dummy', expected 'auto' or 'safetensors': weights are"),
                             *((lambda name=name, call=call: call([{"role": "user", "content": "x"}], **{name: "x"}), ValueError, f"{name}: it is not done here, expected None")
                               for name in ("chat_template", "continue_final_message", "return_tensors") for call in (llm.chat, llm.chat_stream, llm.apply_chat_template)),
                             (lambda: py.LLM(trust_remote_code="x"), ValueError, "no code of a model is ever run"), (lambda: py.LLM(cpu_offload_gb=4), ValueError, "expected 0: weights stay"),
                             (lambda: P(n=2, best_of=4), ValueError, "best_of: 4, expected n or None"), (lambda: P(detokenize=False, stop="x"), ValueError, "detokenize: False, but stop"),
                             (lambda: llm.generate("x", P(temperature="hot")), ValueError, "temperature: 'hot', expected a number"),
                             (lambda: llm.generate("x", P(max_tokens=1.5)), ValueError, "max_tokens: 1.5, expected a whole number"),
                             (lambda: llm.generate("x", P(structured_outputs={})), ValueError, "nothing given, expected one of json, regex"),
                             (lambda: llm.generate("x", P(structured_outputs={"regex": "a", "choice": ["b"]})), ValueError, "regex and choice given"),
                             (lambda: llm.generate("x", P(structured_outputs={"choice": "ab"})), ValueError, "expected a list of texts"),
                             (lambda: P(temprature=1), TypeError, "SamplingParams() has no argument 'temprature'; did you mean temperature?"),
                             (lambda: py.LLM(tensor_paralel_size=1), TypeError, "LLM() has no argument 'tensor_paralel_size'; did you mean tensor_parallel_size?"),
                             (lambda: P(zzz=1), TypeError, "it has allowed_token_ids, bad_words"), (lambda: llm.generate(5), TypeError, "prompts: 5, expected a text"),
                             (lambda: llm.generate({"promt": "x"}), ValueError, "a prompt with 'promt', expected 'prompt' or"),
                             (lambda: llm.generate("x", {"temperature": 1}), TypeError, "sampling_params: {'temperature': 1}, expected SamplingParams"),
                             (lambda: py.LLM(swap_space="x"), ValueError, "swap_space: 'x', expected a number of 0 or more: preempted"),
                             (lambda: P(structured_outputs={"structural_tag": "x"}), TypeError, "structural_tag"),
                             (lambda: P(structured_outputs={"regx": "x"}), TypeError, "StructuredOutputsParams() has no argument 'regx'; did you mean regex?"),
                             (lambda: py.StructuredOutputsParams(grammer="x"), TypeError, "did you mean grammar?"),
                             *((lambda given=given, call=call: call(given), ValueError, text) for call in (llm.chat, llm.chat_stream, llm.apply_chat_template)
                               for given, text in (
                                 ("hi", "messages: 'hi', expected a list, as [{'role': 'user', 'content': 'Hello'}]"), ([], "messages: [], expected a list"),
                                 (["hi"], "messages: ['hi'], expected a list, as"), ({"role": "user", "content": "hi"}, "messages: {'role': 'user', 'content': 'hi'}, expected"),
                                 ([{"rol": "user", "content": "hi"}], "messages[0] has no 'role', but 'rol'; did you mean role?"),
                                 ([{"role": "user", "content": "hi"}, {"role": "user", "contents": "x"}], "messages[1] has no 'content', but 'contents'; did you mean content?"),
                                 ([{"role": "user"}], "messages[0] has no 'content': {'role': 'user'}"), ([{"role": "user", "content": 5}], "messages[0]: content: 5, expected a text or"),
                                 ([{"role": 5, "content": "x"}], "messages[0]: role: 5, expected a text"),
                                 ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "expected a text or a list of text parts"))),
                             (lambda: P(max_tokens=0), ValueError, "max_tokens: 0, expected 1 or more"), (lambda: llm.generate("x", P(allowed_token_ids=[])), ValueError, "allowed_token_ids: no ids"),
                             *((lambda given=given: llm.generate("x", P(**given)), ValueError, text) for given, text in (
                                 ({"stop": 5}, "stop: 5, expected a text or a list of texts"), ({"stop": ["a", 5]}, "stop: ['a', 5], expected"),
                                 ({"bad_words": [3]}, "bad_words: [3], expected a text or"), ({"seed": "a"}, "seed: 'a', expected a whole number"),
                                 ({"seed": 1.5}, "seed: 1.5, expected"), ({"stop_token_ids": ["a"]}, "stop_token_ids: ['a'], expected a list of token ids"),
                                 ({"allowed_token_ids": 7}, "allowed_token_ids: 7, expected"), ({"logit_bias": {"a": 1}}, "logit_bias: {'a': 1}, expected {token id"),
                                 ({"logit_bias": [3]}, "logit_bias: [3], expected"), ({"logit_bias": {2**40: 1}}, "logit_bias: [1099511627776], expected"))),
                             (lambda: llm.generate(["x", 5]), ValueError, "prompts: 5, expected a list of token ids"), (lambda: llm.generate([None]), ValueError, "prompts: None, expected"),
                             (lambda: llm.generate([[5, "a"]]), ValueError, "prompts: [5, 'a'], expected"), (lambda: llm.generate([[5, 2**31]]), ValueError, "prompts: [5, 2147483648]"),
                             (lambda: llm.generate([[5, [6]]]), ValueError, "prompts: [5, [6]], expected"), (lambda: llm.encode(5), TypeError, "text: 5, expected a text"),
                             (lambda: llm.decode("abc"), ValueError, "token_ids: 'abc', expected a list of token ids"), (lambda: llm.score("abc"), ValueError, "data_1: 'abc', expected")):
        with pytest.raises(kind, match=re.escape(text)) as error:
            call()
        assert not isinstance(error.value, py.TokaError)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Tom has"}, {"type": "text", "text": "3 apples."}]}]
    assert llm.apply_chat_template(parts) == llm.apply_chat_template([{"role": "user", "content": "Tom has\n3 apples."}])
    assert llm.generate("Tom has", P(max_tokens=2))[0].finished


def test_errors(py, llm, tmp_path):
    for call, kind, text in ((lambda: llm.generate("x", py.SamplingParams(structured_outputs={"regex": "("})), ValueError, "( without )"),
                             (lambda: py.LLM("/none"), ValueError, "/none: no such folder"), (lambda: py.LLM(str(tmp_path)), ValueError, "config.json"),
                             (lambda: py.LLM(device="tpu"), ValueError, "tpu"), (lambda: py.LLM(max_len=3), TypeError, "max_model_len"),
                             *((lambda given=given: py.SamplingParams(**given), ValueError, text) for given, text in (  # before a model sees it, as vLLM
                                 ({"temperature": -1}, "temperature: -1, expected"), ({"n": 10**9}, "n is 1000000000, expected 1 to"), ({"n": 0}, "n is 0, expected 1 to"),
                                 ({"top_p": 0}, "top_p: 0, expected"), ({"top_k": -2}, "top_k: -2, expected"), ({"min_tokens": 20}, "min_tokens: 20, expected 0 to 16"),
                                 ({"presence_penalty": 3}, "presence_penalty: 3, expected"),
                                 ({"stop_token_ids": [-1]}, "stop_token_ids"), ({"logit_bias": {3: 1000}}, "logit_bias: 1000, expected"))),
                             (lambda: llm.generate(["x", "y " * 3000]), ValueError, "at most"), (lambda: llm.decode([5000]), ValueError, "5000"),
                             (lambda: llm.generate(["x"], [py.SamplingParams()] * 2), ValueError, "1 prompts, but 2")):
        with pytest.raises(kind, match=re.escape(text)) as error:
            call()
        assert kind is TypeError or "prompts" in text or isinstance(error.value, py.TokaError) and error.value.code < 0
    assert llm.generate("Tom has", py.SamplingParams(max_tokens=2))[0].finished  # it goes on


def test_arguments_of_the_command_line(py, tmp_path, monkeypatch):
    """download_dir and swap_space are taken; an error names the argument, not the flag."""
    monkeypatch.setenv("HF_HUB_CACHE", "/none")
    repo = tmp_path / "models--tiny--apples"
    (repo / "snapshots").mkdir(parents=True), (repo / "refs").mkdir()
    (repo / "refs/main").write_text("c0ffee")
    os.symlink(f"{ROOT}/test/model", repo / "snapshots/c0ffee")
    with py.LLM("tiny/apples", tokenizer="tiny/apples", download_dir=tmp_path, swap_space=4, device="cpu", task="generate",
                speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as model:
        assert model.info["model_name"] == "tiny/apples"
    assert os.environ["HF_HUB_CACHE"] == "/none"
    with pytest.raises(ValueError, match="not in the hub cache /none"):
        py.LLM("tiny/apples")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"[^-]\bmodels_file\b") as error:
        py.LLM("lama-3.1-8b")
    assert "--" not in str(error.value)


def test_the_advice_works_as_printed(py, tmp_path):
    """A model of the hub that is not here, or only without its weights: the command that the message names gets it."""
    pytest.importorskip("huggingface_hub")
    files = read_folder(f"{ROOT}/test/model")
    hub, cache = FakeHub(), tmp_path / "a cache"
    hub.repos["tiny/apples"] = Repo({name: files[name] for name in ("config.json", "tokenizer.json", "tokenizer_config.json")})
    hub.repos["tiny/apples"].commit(files, "v2")
    env = {**ENV, "HF_ENDPOINT": hub.url, "PATH": f"{os.path.dirname(sys.executable)}:{ENV['PATH']}"}
    try:
        for text in ("tiny/apples@v2 is not in the hub cache", "there is no model.safetensors"):
            with pytest.raises(ValueError, match=text) as error:
                py.LLM("tiny/apples", revision="v2", download_dir=cache, device="cpu")
            command = re.search("with: (hf download .*)$", str(error.value))[1]
            subprocess.run(command, shell=True, check=True, env=env, cwd="/", capture_output=True)
            py.LLM("tiny/apples", revision="v2", download_dir=cache, device="cpu").close()
            for path in cache.glob("*/snapshots/*/model.safetensors"):
                path.unlink()
    finally:
        hub.close()


def test_a_closed_model(py):
    with py.LLM(f"{ROOT}/test/model", device="cpu") as model:
        tokenizer = model.get_tokenizer()
    messages = [{"role": "user", "content": "x"}]
    for call in (lambda: model.generate("x"), lambda: model.generate([]), lambda: next(model.stream("x")), lambda: model.stream([400]).send(None), lambda: model.embed([[400]]),
                 lambda: model.chat(messages), lambda: model.score([400]), lambda: tokenizer.encode("x"), lambda: tokenizer.decode([400]),
                 lambda: tokenizer.apply_chat_template(messages)):
        with pytest.raises(ValueError, match="this LLM is closed"):
            call()
    model.close()  # a second time


LONG = dict(max_tokens=900, ignore_eos=True, seed=1)


def is_mapped(path):
    with open("/proc/self/maps") as f:
        return path in f.read()


def test_close_ends_a_stream(py, tmp_path):
    """Also one that nobody reads, and several; the tokens that are there come before the exception. Nothing stays behind."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).write_bytes(open(f"{ROOT}/test/model/{name}", "rb").read())
    n_threads, want = threading.active_count(), None
    for _ in range(3):
        model = py.LLM(folder, device="cpu")
        want = want or [p.token_id for p in model.stream("Tom has", py.SamplingParams(**LONG))]
        assert is_mapped(f"{folder}/model.safetensors")
        stream, other, unread = (model.stream("Tom has", py.SamplingParams(n=20, **LONG)) for _ in range(3))
        got = [next(x) for x in (other, unread, stream)][2:]
        model.close()
        assert not is_mapped(str(folder)) and threading.active_count() == n_threads
        with pytest.raises(ValueError, match="this LLM is closed"):
            for piece in stream:
                got.append(piece)
        first = [piece.token_id for piece in got if piece.index == 0]
        assert first == want[:len(first)] and len(got) < 20 * len(want) and list(stream) == []
        other.close()
        del unread
    # one that has ended is whole
    with py.LLM(folder, device="cpu") as model:
        short = model.stream("Tom has", py.SamplingParams(**{**LONG, "max_tokens": 3}))
        next(short)
        end = time.time() + 30
        while threading.active_count() > n_threads and time.time() < end:
            time.sleep(0.05)
    assert [p.token_id for p in short] == want[1:3]


def test_close_ends_calls_of_other_threads(py):
    """generate(), embed(), score(), and a thread that waits for the next token of a stream raise ValueError."""
    model, errors, begun = py.LLM(f"{ROOT}/test/model", device="cpu"), {}, threading.Barrier(5)

    def catch(name, call):
        begun.wait()
        try:
            call()
        except Exception as error:
            errors[name] = (type(error), str(error))

    calls = {"generate": lambda: model.generate(["Tom has"] * 50, py.SamplingParams(n=50, **LONG)),
             "embed": lambda: model.embed(["Tom has " * 200] * 2000),
             "stream": lambda: list(model.stream("Tom has", py.SamplingParams(**LONG))),
             "score": lambda: errors.update(score=model.score(model.encode("Tom has " * 250)).shape[0] > 500)}
    threads = [threading.Thread(target=catch, args=item) for item in calls.items()]
    for thread in threads:
        thread.start()
    begun.wait()
    time.sleep(0.5)
    model.close()
    for thread in threads:
        thread.join(20)
    closed = (ValueError, "this LLM is closed")
    assert errors.pop("score") in (True, closed)  # closed: it had not begun
    assert errors == {"generate": closed, "embed": closed, "stream": closed}


ALARM = "signal.setitimer(signal.ITIMER_REAL, 0.6)\n"


@pytest.mark.parametrize("code, printed", [
    (ALARM + "model.generate(['Tom has'] * 500, LONG)", "closed\n"), (ALARM + "while True: model.generate(['Tom has'] * 50000, LONG)", "closed\n"),
    (ALARM + "list(model.stream('Tom has', LONG))", "closed\n"),
    (ALARM + "while True: model.score(model.encode('Tom has ' * 250))", "closed\n"),
    ("stream = model.stream('Tom has', LONG); next(stream); stop()", "closed\n"),
    ("stream = model.stream('Tom has', LONG); next(stream); sys.exit()", ""),  # the stream is alive when Python ends
    ("threading.Thread(target=model.generate, args=(['Tom has'] * 500, LONG), daemon=True).start(); sys.stderr = open(os.devnull, 'w')", "")])
def test_close_in_a_signal_handler_and_at_the_end(py, code, printed):
    program = f"""
import os, signal, sys, threading, time
from toka import LLM, SamplingParams
model, LONG = LLM(device="cpu"), SamplingParams(**{LONG}, n=20)
def stop(*_):
    model.close()
    print("closed", flush=True)
    sys.exit()
signal.signal(signal.SIGALRM, stop)
model.generate("x", SamplingParams(max_tokens=1))
{code}
"""
    r = subprocess.run([sys.executable, "-c", program], env={**ENV, "PYTHONPATH": f"{ROOT}/test"}, capture_output=True, text=True, timeout=30)
    assert (r.returncode, r.stdout, r.stderr) == (0, printed, "")


def test_interrupts_at_any_moment(py):
    """Ctrl-C while requests are submitted, run and end: it leaves no lock taken, no thread inside, and no request behind."""
    model, short = py.LLM(f"{ROOT}/test/model", device="cpu"), py.SamplingParams(max_tokens=2, n=2)
    calls = [lambda: model.generate(["Tom has"] * 5000, short), lambda: list(model.stream("Tom has", short)), lambda: model.generate("Tom has", short),
             lambda: model.score([400] * 40)]
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for i in range(90):
            with pytest.raises(KeyboardInterrupt):
                while True:  # Python drops an exception that a handler raises inside of a finalizer: then once more
                    signal.setitimer(signal.ITIMER_REAL, 0.001 + i * 0.0003)
                    end = time.monotonic() + 1
                    while time.monotonic() < end:
                        calls[i % len(calls)]()
            assert (model._running, len(model.generate("Tom has", short)), threading.get_ident() in model._users) == ({}, 1, False)
    finally:
        signal.signal(signal.SIGALRM, before)
    model.close()


def test_an_interrupted_score_does_not_go_on_to_its_end(py, monkeypatch):
    """The signal comes with the fifth token; each token takes 5 ms."""
    n_tokens, add = 0, py._Sample.add

    def slow_add(*args):
        nonlocal n_tokens
        n_tokens += 1
        if n_tokens == 5:
            os.kill(os.getpid(), signal.SIGALRM)
        time.sleep(0.005)
        add(*args)

    monkeypatch.setattr(py._Sample, "add", slow_add)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with py.LLM(f"{ROOT}/test/model", device="cpu", max_num_batched_tokens=16, max_num_seqs=8) as model:
            with pytest.raises(KeyboardInterrupt):
                model.score([400] * 1000)
            assert not model._running and 5 <= n_tokens < 900
            end = time.monotonic() + 10
            while model._users and time.monotonic() < end:  # the thread that was interrupted may leave a little later
                time.sleep(0.01)
            assert not model._users
    finally:
        signal.signal(signal.SIGALRM, before)


def test_without_numpy():
    program = "import sys; sys.modules['numpy'] = None; import toka"
    r = subprocess.run([sys.executable, "-c", program], env={**ENV, "PYTHONPATH": f"{ROOT}/test"}, capture_output=True, text=True, timeout=30)
    assert r.returncode and r.stderr.splitlines()[-1] == "ImportError: toka.py needs numpy: pip install numpy"


def test_a_forked_process(py):
    """It has no threads of the model: a call says so, and neither process hangs at its end."""
    program = """
import os, sys
from toka import LLM
model = LLM(device="cpu")
model.generate("x")
pid = os.fork()
if not pid:
    try:
        model.generate("x")
    except RuntimeError as error:
        print(error, flush=True)
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), len(model.generate("x")))
"""
    r = subprocess.run([sys.executable, "-c", program], env={**ENV, "PYTHONPATH": f"{ROOT}/test"}, capture_output=True, text=True, timeout=30)
    assert (r.returncode, r.stderr) == (0, "") and re.fullmatch("this LLM was made before a fork, .*\n3 1\n", r.stdout)


def test_streams_and_threads(py, llm):
    params = py.SamplingParams(n=2, seed=3, max_tokens=20)
    want = [o.text for o in llm.generate("Tom has", params)[0].outputs]
    texts = ["", ""]
    for piece in llm.stream("Tom has", params):
        texts[piece.index] += piece.text
    assert texts == want
    for piece in llm.stream("Tom has", py.SamplingParams(max_tokens=900, ignore_eos=True)):
        break  # leaving the loop ends the request
    results = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: [o.text for o in llm.generate("Tom has", params)[0].outputs]}))
               for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert results == {i: want for i in range(4)}


def test_ctrl_c(py):
    code = """
import signal
import time
from toka import LLM, SamplingParams
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests with it ignored
llm = LLM(device="cpu")
llm.generate("x", SamplingParams(max_tokens=1))
print("ready", flush=True)
begin = time.time()
try:
    llm.generate(["Tom has"] * 500, SamplingParams(n=200, max_tokens=1000, ignore_eos=True, seed=1))
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(llm.generate("Tom has", SamplingParams(max_tokens=4))[0].outputs[0].finish_reason)
"""
    p = subprocess.Popen([sys.executable, "-c", code], env={**ENV, "PYTHONPATH": f"{ROOT}/test"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert p.stdout.readline() == b"ready\n"
    time.sleep(1)
    p.send_signal(signal.SIGINT)
    try:
        out, err = p.communicate(timeout=60)
    finally:
        p.kill()
    assert (out, err) == (b"interrupted\nlength\n", b"")


def test_two_files_are_all_that_is_needed(py, tmp_path):
    for path in (LIBRARY, f"{ROOT}/test/toka.py"):
        os.symlink(path, tmp_path / os.path.basename(path))
    (tmp_path / "main.py").write_text(inspect.cleandoc("""
        from toka import LLM, SamplingParams
        print(LLM(device="cpu").generate("Tom has", SamplingParams(temperature=0, max_tokens=5))[0].outputs[0].text)"""))
    r = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, env=ENV, capture_output=True)
    assert r.returncode == 0 and r.stdout, r.stderr
    (tmp_path / "libtoka.so").unlink()
    (tmp_path / "toka.py").unlink()
    os.makedirs(tmp_path / "a/b")
    (tmp_path / "a/b/toka.py").write_text(open(f"{ROOT}/test/toka.py").read())
    r = subprocess.run([sys.executable, "-c", "import toka"], cwd=tmp_path / "a/b", env=ENV, capture_output=True, text=True)
    assert r.returncode and "make it with: ./build.sh lib" in r.stderr


def test_readme(py, tmp_path):
    with open(os.path.join(ROOT, "README.md")) as f:
        section = re.search(r"\n## Python\n(.*?)\n## ", f.read(), re.S)[1]
    code, = re.findall(r"```python\n(.*?)```", section, re.S)
    shell, = re.findall(r"```sh\n(.*?)```", section, re.S)
    build, copy = shell.split("#")[0].split(" && ")
    assert build == "./build.sh lib"  # which made LIBRARY
    for path in (LIBRARY, f"{ROOT}/test"):
        os.symlink(path, tmp_path / os.path.basename(path))
    subprocess.run(copy, shell=True, check=True, cwd=tmp_path)
    r = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert r.returncode == 0 and len(re.findall(r"^[0-3] ", r.stdout, re.M)) == 8, r.stderr


# ---- test/recipes ----

def recipe(name, *args):
    path = f"{ROOT}/test/recipes/{name}"
    assert len(open(path).read().splitlines()) <= 60
    r = subprocess.run([sys.executable, path, *map(str, args)], env=ENV, capture_output=True, text=True, timeout=120)
    assert r.returncode == 0, r.stderr
    return r.stdout


@pytest.mark.parametrize("name", ["pass_at_k.py", "reject.py", "scan.py", "synthetic.py"])
def test_recipes_say_their_arguments(py, name):
    for args in ([], ["--help"], ["x"] * 9):
        r = subprocess.run([sys.executable, f"{ROOT}/test/recipes/{name}", *args], env=ENV, capture_output=True, text=True)
        assert r.returncode == 1 and f"    {name} MODEL " in r.stderr and "Traceback" not in r.stderr, r.stderr


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"question": PROBLEM.replace("12", str(i)), "answer": str(i + 7)}) + "\n" for i in range(10, 16)))
    return path


def test_recipe_pass_at_k(py, problems):
    lines = recipe("pass_at_k.py", f"{ROOT}/test/model", problems, 8).splitlines()
    rates = [float(line.split()[1]) for line in lines[:4]]
    assert [line.split()[0] for line in lines[:4]] == ["pass@1", "pass@2", "pass@4", "pass@8"]
    assert rates == sorted(rates) and rates[3] > 0.8 and re.fullmatch(r"\d+ tokens/s, \d+ characters/s", lines[4])


def test_recipe_synthetic(py, tmp_path):
    (tmp_path / "in.txt").write_text("Tom has 3 boxes.\n\nAnn buys 5 apples.\n")
    n_kept, n_all = re.match(r"(\d+) of (\d+) texts are kept", recipe("synthetic.py", f"{ROOT}/test/model", tmp_path / "in.txt", tmp_path / "out.jsonl", 12)).groups()
    rows = [json.loads(line) for line in open(tmp_path / "out.jsonl")]
    assert n_all == "24" and 0 < int(n_kept) == len(rows) == len({r["text"] for r in rows}) and all(r["mean_logprob"] > -1.5 for r in rows)


def test_recipe_reject(py, problems, tmp_path):
    out = recipe("reject.py", f"{ROOT}/test/model", problems, tmp_path / "out.jsonl", 2)
    rows = [json.loads(line)["messages"] for line in open(tmp_path / "out.jsonl")]
    assert out.startswith("round 0: 6 problems, ") and len(rows) >= 6
    for user, assistant in rows:
        tom = int(re.search(r"Tom has (\d+)", user["content"])[1])
        assert re.findall(r"-?\d+", assistant["content"])[-1] == str(tom + 7)


def test_recipe_scan(py, tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"Tom has {i} apples. " * (1 if i else 400))
    assert recipe("scan.py", f"{ROOT}/test/model", tmp_path, "*.txt", tmp_path / "out.jsonl", "How many apples does Tom have?") == "3 files\n"
    rows = [json.loads(line) for line in open(tmp_path / "out.jsonl")]
    assert all(set(r["answer"]) == {"answer", "where"} and r["answer"]["answer"] in ("yes", "no", "unclear") for r in rows)
    (tmp_path / "schema.json").write_text(json.dumps({"type": "object", "properties": {"apples": {"type": "integer", "minimum": 0, "maximum": 999}},
                                                      "required": ["apples"], "additionalProperties": False}))
    recipe("scan.py", f"{ROOT}/test/model", tmp_path, "*.txt", tmp_path / "two.jsonl", "How many?", tmp_path / "schema.json")
    assert all(0 <= json.loads(line)["answer"]["apples"] < 1000 for line in open(tmp_path / "two.jsonl"))
    assert [os.path.basename(r["file"]) for r in rows] == ["0.txt", "1.txt", "2.txt"] and all(r["answer"] for r in rows)
    assert rows[0]["prompt_tokens"] > 600 > rows[1]["prompt_tokens"]
