"""Tests of toka serve with the clients that users have: the openai client, curl, requests as lm-evaluation-harness sends them, a
Prometheus parser, and each example of the README's section on serving. Run through test/run.sh."""
import asyncio
import json
import math
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.request

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server import ROOT, TOKA, Server

PROBLEMS = [json.loads(line)["prompt"] for line in open(os.path.join(ROOT, "test/model/heldout.jsonl"))]
ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}, "TOKA_DEVICE": "cpu"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server("-m", "test/model", "--served-model-name", "tiny", files=str(tmp_path_factory.mktemp("files"))) as s:
        yield s


@pytest.fixture(scope="module")
def api(server):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.address[1]}/v1", api_key="none", max_retries=0)


@pytest.fixture
def async_api(server):
    return lambda: openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.address[1]}/v1", api_key="none", max_retries=0)


def user(text):
    return [{"role": "user", "content": text}]


# ---- The openai client ----

def test_models(api):
    assert [m.id for m in api.models.list()] == ["tiny"] and api.models.retrieve("tiny").owned_by
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("other")


def test_chat(api):
    a = api.chat.completions.create(model="tiny", messages=user(PROBLEMS[0]), n=3, temperature=1, seed=7, logprobs=True, top_logprobs=2)
    assert a.object == "chat.completion" and a.model == "tiny" and a.id.startswith("chatcmpl-") and abs(a.created - time.time()) < 60
    assert [c.index for c in a.choices] == [0, 1, 2]
    for c in a.choices:
        assert c.message.role == "assistant" and c.finish_reason == "stop"
        tokens = [t for t in c.logprobs.content if bytes(t.bytes).decode(errors="replace") in c.message.content]
        assert tokens and all(len(t.top_logprobs) == 2 and t.logprob <= 0 for t in tokens)
    assert a.usage.total_tokens == a.usage.prompt_tokens + a.usage.completion_tokens
    again = api.chat.completions.create(model="tiny", messages=user(PROBLEMS[0]), n=3, temperature=1, seed=7)
    assert [c.message.content for c in again.choices] == [c.message.content for c in a.choices]  # the same seed, the same text
    parts = [{"role": "user", "content": [{"type": "text", "text": PROBLEMS[0]}]}]
    one, two = (api.chat.completions.create(model="tiny", messages=m, temperature=0) for m in (user(PROBLEMS[0]), parts))
    assert one.choices[0].message == two.choices[0].message
    short = api.chat.completions.create(model="tiny", messages=user(PROBLEMS[0]), max_completion_tokens=3)
    assert short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 3


def test_streams_equal_the_answer(api):
    request = dict(model="tiny", messages=user(PROBLEMS[1]), temperature=1, seed=5, n=4, logprobs=True)
    whole = api.chat.completions.create(**request)
    text, ends, roles, usage, tokens = {}, {}, [], [], {}
    for chunk in api.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        assert chunk.object == "chat.completion.chunk" and chunk.model == "tiny"
        usage += [chunk.usage] if chunk.usage else []
        for c in chunk.choices:
            text[c.index] = text.get(c.index, "") + (c.delta.content or "")
            roles += [c.delta.role] if c.delta.role else []
            tokens[c.index] = tokens.get(c.index, 0) + (len(c.logprobs.content or []) if c.logprobs else 0)
            if c.finish_reason:
                assert c.index not in ends
                ends[c.index] = c.finish_reason
    assert text == {c.index: c.message.content for c in whole.choices} and ends == {c.index: c.finish_reason for c in whole.choices}
    assert tokens == {c.index: len(c.logprobs.content) for c in whole.choices}
    assert roles == ["assistant"] * 4 and len(usage) == 1 and usage[0].completion_tokens == whole.usage.completion_tokens
    request = dict(model="tiny", prompt=PROBLEMS[1], max_tokens=30, temperature=1, seed=5)
    whole = api.completions.create(**request).choices[0]
    chunks = [c.choices[0] for c in api.completions.create(**request, stream=True)]
    assert "".join(c.text for c in chunks) == whole.text and chunks[-1].finish_reason == whole.finish_reason
    with api.chat.completions.stream(model="tiny", messages=user(PROBLEMS[1]), temperature=0) as stream:
        final = stream.get_final_completion()
    assert "The answer is" in final.choices[0].message.content


def test_completions(api):
    ids = api.completions.create(model="tiny", prompt=PROBLEMS[0], max_tokens=1, extra_body={"return_token_ids": True})
    ids = ids.choices[0].model_extra["prompt_token_ids"]
    ask = dict(model="tiny", max_tokens=20, temperature=0)
    one = api.completions.create(prompt=PROBLEMS[0], **ask).choices[0].text
    assert api.completions.create(prompt=ids, **ask).choices[0].text == one
    assert [c.text for c in api.completions.create(prompt=[PROBLEMS[0]] * 2, **ask).choices] == [one, one]
    many = api.completions.create(prompt=[ids, ids], n=2, **ask)
    assert [(c.index, c.text) for c in many.choices] == [(i, one) for i in range(4)]
    stopped = api.completions.create(prompt=PROBLEMS[0], stop=one[8:12], **ask).choices[0]
    assert one.startswith(stopped.text) and stopped.finish_reason == "stop" and one[8:12] not in stopped.text
    first = api.completions.create(prompt=PROBLEMS[0], logit_bias={"5": 100}, extra_body={"return_token_ids": True}, **ask)
    assert set(first.choices[0].model_extra["token_ids"]) == {5}
    top = api.completions.create(prompt=PROBLEMS[0], logprobs=3, **ask).choices[0].logprobs
    assert len(top.tokens) == len(top.token_logprobs) == len(top.top_logprobs) == len(top.text_offset)
    extra = api.completions.create(prompt=PROBLEMS[0], extra_body={"top_k": 1, "min_p": 0.1}, model="tiny", max_tokens=20, temperature=5)
    assert extra.choices[0].text == one
    big = api.completions.create(model="tiny", prompt="Tom", n=500, max_tokens=2, temperature=2)
    assert [c.index for c in big.choices] == list(range(500)) and big.usage.completion_tokens <= 1000


def test_errors(api, server):
    for fields, param in (({"temperature": -1}, "temperature"), ({"max_tokens": 0}, "max_tokens"), ({"n": 0}, "n"),
                          ({"suffix": "x"}, "suffix"), ({"top_p": 2}, "top_p"), ({"logprobs": 1000}, "logprobs")):
        with pytest.raises(openai.BadRequestError) as e:
            api.completions.create(**{"model": "tiny", "prompt": "x", **fields})
        assert e.value.param == param and param in e.value.message and e.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        api.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError):
        api.chat.completions.create(model="tiny", messages=[])
    with pytest.raises(openai.BadRequestError):
        api.completions.create(model="tiny", prompt=[10**6])
    assert api.completions.create(model="tiny", prompt="x", max_tokens=1).choices


def test_max_tokens_and_context_length(api):
    """A max_tokens that does not fit into the context is refused, not reduced. Without max_tokens, the rest of the context is used."""
    ids = [5] * 500
    max_len = {m.id: m for m in api.models.list().data}["tiny"].max_model_len
    for more in ({"max_tokens": max_len - 499}, {"max_tokens": 10**9}):
        with pytest.raises(openai.BadRequestError, match=f"expected at most {max_len - 500} ") as e:
            api.completions.create(model="tiny", prompt=ids, **more)
        assert (e.value.param, e.value.code) == ("max_tokens", "context_length_exceeded")
    for name in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(openai.BadRequestError) as e:
            api.chat.completions.create(model="tiny", messages=user("x"), **{name: max_len})
        assert (e.value.param, e.value.code) == (name, "context_length_exceeded")
    answer = api.completions.create(model="tiny", prompt=ids, max_tokens=max_len - 500, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == max_len - 500 and answer.choices[0].finish_reason == "length"
    answer = api.completions.create(model="tiny", prompt=[5] * (max_len - 3), extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 3 and answer.choices[0].finish_reason == "length"


def test_async(async_api):
    async def run():
        async with async_api() as api:
            chats = [api.chat.completions.create(model="tiny", messages=user(p), temperature=0) for p in PROBLEMS[:40]]
            answers = await asyncio.gather(*chats)
            text = ""
            async for chunk in await api.completions.create(model="tiny", prompt=PROBLEMS[0], max_tokens=20, stream=True):
                text += chunk.choices[0].text
            line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": user(PROBLEMS[0])}}
            f = await api.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
            batch = await api.batches.create(input_file_id=f.id, endpoint="/v1/chat/completions", completion_window="24h")
            while batch.status not in ("completed", "failed"):
                await asyncio.sleep(0.05)
                batch = await api.batches.retrieve(batch.id)
            result = json.loads((await api.files.content(batch.output_file_id)).text)
            assert [b.id async for b in api.batches.list()] == [batch.id] and f.id in [x.id async for x in api.files.list(purpose="batch")]
            return answers, text, result
    answers, text, result = asyncio.run(run())
    right = sum("The answer is" in a.choices[0].message.content for a in answers)
    assert right == 40 and len(text) > 10
    assert result["response"]["body"]["choices"][0]["message"]["content"] == answers[0].choices[0].message.content


def test_closing_a_stream_cancels_it(api, server):
    stream = api.completions.create(model="tiny", prompt=PROBLEMS[0], max_tokens=900, n=2000, temperature=2, stream=True,
                                    extra_body={"ignore_eos": True})
    next(iter(stream))
    server.wait_metric("num_requests_running", 256)  # /metrics shows the state after the last complete step
    before = server.metric("request_success_total", 'finished_reason="abort"')
    stream.close()
    server.wait_metric("num_requests_running", 0)
    assert server.metric("request_success_total", 'finished_reason="abort"') > before + 256


def test_keys():
    with Server("--api-key", "one", "--api-key", "two", files="off") as s:
        base = f"http://127.0.0.1:{s.address[1]}/v1"
        for key in ("one", "two"):
            assert openai.OpenAI(base_url=base, api_key=key).models.list().data
        for key in ("three", "onetwo", "on"):
            with pytest.raises(openai.AuthenticationError):
                openai.OpenAI(base_url=base, api_key=key, max_retries=0).models.list()


# ---- lm-evaluation-harness, local-completions ----

def score(text):
    out = subprocess.run([TOKA, "score", "-m", "test/model", "--json", "-q", "-p", text], env=ENV, cwd=ROOT, capture_output=True,
                         check=True).stdout
    tokens = json.loads(out)["tokens"]
    return [t["id"] for t in tokens], [t["logprob"] for t in tokens]


def test_harness_loglikelihood(server):
    """The harness sends lists of token ids, echo, max_tokens 1 and logprobs 1. From the answer it reads the log-probability of a
    continuation, and whether greedy decoding would give this continuation."""
    scores = [score(p) for p in PROBLEMS[:6]]
    for tokens in (1, 0):
        body = {"model": "tiny", "prompt": [ids for ids, _ in scores], "temperature": 0, "max_tokens": tokens, "logprobs": 1, "seed": 1234,
                "echo": True}
        answer = server.post("/v1/completions", body)
        assert answer.status == 200, answer.body
        for choice, (ids, expected) in zip(sorted(answer.json()["choices"], key=lambda c: c["index"]), scores):
            lp = choice["logprobs"]
            assert len(lp["token_logprobs"]) == len(ids) + tokens and lp["token_logprobs"][0] is None
            assert lp["token_logprobs"][1:len(ids)] == pytest.approx(expected[1:], abs=1e-4)
            ctxlen, end = len(ids) // 2, len(ids)
            assert sum(lp["token_logprobs"][ctxlen:end]) == pytest.approx(sum(expected[ctxlen:]), abs=1e-3)
            for value, top in zip(lp["token_logprobs"][ctxlen:end], lp["top_logprobs"][ctxlen:end]):
                assert value <= max(top.values()) + 1e-6 and len(top) in (1, 2)
            if tokens:  # the sampled token is the greedy one
                assert lp["token_logprobs"][-1] == max(lp["top_logprobs"][-1].values())


def test_harness_generation(server):
    ids, _ = score(PROBLEMS[0])
    body = {"prompt": [ids, ids], "model": "tiny", "max_tokens": 256, "temperature": 0, "stop": ["The answer", "<|endoftext|>", "Q:"],
            "seed": 1234}
    choices = server.post("/v1/completions", body).json()["choices"]
    assert [c["index"] for c in choices] == [0, 1]
    assert choices[0]["text"] == choices[1]["text"] != "" and "The answer" not in choices[0]["text"]
    text = server.post("/v1/completions", {**body, "prompt": [PROBLEMS[0]]}).json()["choices"][0]["text"]
    assert text == choices[0]["text"]


# ---- Prometheus ----

def check_metrics(text):
    """Check promtool's rules for the text: names, types, help, units, histograms, no series twice."""
    families = list(text_string_to_metric_families(text))
    assert len({f.name for f in families}) == len(families) > 12 and text.endswith("\n")
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    helps = dict(re.findall(r"^# HELP (\S+) (.+)$", text, re.M))
    assert set(types) == set(helps)
    seen = set()
    for name, kind in types.items():
        assert re.fullmatch(r"toka:[a-z][a-z0-9_]*", name) and kind in ("counter", "gauge", "histogram")
        assert (kind == "counter") == name.endswith("_total") and not name.endswith(("_count", "_sum", "_bucket"))
        assert "milliseconds" not in name and "_ms" not in name
    for f in families:
        assert f.samples and f.documentation
        for s in f.samples:
            key = (s.name, tuple(sorted(s.labels.items())))
            assert key not in seen and not math.isnan(s.value) and s.labels["model_name"] == "tiny"
            seen.add(key)
        if f.type == "histogram":
            groups = {}
            for s in f.samples:
                labels = tuple(sorted((k, v) for k, v in s.labels.items() if k != "le"))
                groups.setdefault(labels, []).append(s)
            for group in groups.values():
                buckets = [(float(s.labels["le"]), s.value) for s in group if s.name.endswith("_bucket")]
                count = next(s.value for s in group if s.name.endswith("_count"))
                assert buckets == sorted(buckets) and buckets[-1] == (math.inf, count)
                assert all(a[1] <= b[1] for a, b in zip(buckets, buckets[1:]))
    return {s.name: s.value for f in families for s in f.samples if not s.name.endswith("_bucket")}


def test_metrics(api, server):
    idle = ("num_requests_running", "num_requests_waiting")
    for name in idle:  # the engine updates the number of running requests after a step, and counters before it sends the tokens
        server.wait_metric(name, 0)
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    before = check_metrics(answer.body.decode())
    a = api.completions.create(model="tiny", prompt=PROBLEMS[3], n=5, max_tokens=9, temperature=1, extra_body={"ignore_eos": True})
    after = check_metrics(server.get("/metrics").body.decode())
    grown = {k.removeprefix("toka:"): after[k] - before.get(k, 0) for k in after}
    assert grown["generation_tokens_total"] == 45 == a.usage.completion_tokens and grown["time_to_first_token_seconds_count"] >= 1
    assert grown["e2e_request_latency_seconds_count"] == 1
    core = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total",
            "num_preemptions_total", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
            "spec_decode_num_accepted_tokens_total", "prompt_tokens_total", "generation_tokens_total", "request_success_total",
            "time_to_first_token_seconds_sum", "inter_token_latency_seconds_sum", "e2e_request_latency_seconds_sum"]
    assert not [name for name in core if "toka:" + name not in after]


# ---- The README ----

def examples():
    text = open(os.path.join(ROOT, "README.md")).read()
    section = re.search(r"\n## Serve\n(.*?)\n## ", text, re.S)[1]
    return re.findall(r"```(\w+)\n(.*?)```", section, re.S)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_example(command, port, folder):
    env = {**ENV, "XDG_DATA_HOME": str(folder)}
    if "--port" not in command:
        command = command.rstrip() + f" --port {port}"
    p = subprocess.Popen(["bash", "-c", "exec " + command if not re.match(r"[A-Z_]+=", command) else command], cwd=ROOT, env=env,
                         stderr=subprocess.DEVNULL, start_new_session=True)
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
            return p
        except OSError:
            assert p.poll() is None
            time.sleep(0.1)
    raise AssertionError("the server does not answer")


def run_example(kind, text, folder):
    command = ["bash", "-e", "-o", "pipefail", "-c", text] if kind == "sh" else [sys.executable, "-c", text]
    r = subprocess.run(command, cwd=ROOT if "./toka" in text else folder, env=ENV, capture_output=True, timeout=200, text=True)
    assert r.returncode == 0 and r.stdout, (text, r.stderr)
    return r.stdout


@pytest.mark.slow
def test_readme(tmp_path):
    port, server, outputs = free_port(), None, []
    for kind, text in examples():
        text = text.replace("10210", str(port)).replace("./toka bench serve", f"./toka bench serve --port {port}")
        if " serve " in text and "bench" not in text:
            if server:
                server.terminate(), server.wait()
            server = start_example(text, port, tmp_path)
        elif kind in ("sh", "python"):
            outputs.append(run_example(kind, text, tmp_path))
    server.terminate(), server.wait()
    curl, python, batches, bench, keys = outputs
    assert "The answer is 19." in curl and "data: [DONE]" in curl and '"tokens"' in curl and '"embedding"' in curl and '"token_logprobs"' in curl
    assert "12" in python and len(python) > 100 and re.search(r"^\d+ apples as JSON$", python, re.M)
    assert batches.startswith("completed") and len(set(re.findall(r"^apples-\d+", batches, re.M))) == 100
    assert bench.count("Serving Benchmark Result") == 2 and bench.count("Failed requests:                         0") == 2
    assert "toka:generation_tokens_total" in bench and '"object"' in keys


def check_proxy(url):
    """A proxy must pass on keys and uploads unchanged, and streams without delay."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    api = openai.OpenAI(base_url=url + "/v1", api_key="k", http_client=openai.DefaultHttpxClient(verify=context))
    for _ in range(100):
        try:
            assert api.models.list().data
            break
        except openai.APIConnectionError:
            time.sleep(0.1)
    times = []
    for chunk in api.completions.create(model="embedded", prompt="Tom", max_tokens=300, stream=True, extra_body={"ignore_eos": True}):
        times.append(time.time())
    assert len(times) > 100 and times[-1] - times[0] > 0.01  # one by one, not all at the end
    data = os.urandom(3_000_000)
    assert api.files.content(api.files.create(file=data, purpose="user_data").id).read() == data


def test_caddy(tmp_path):
    if not shutil.which("caddy"):
        pytest.skip("no caddy")
    config = open(os.path.join(ROOT, "test/deploy/Caddyfile")).read()
    port, own = free_port(), {name: str(tmp_path) for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME")}
    with Server("--api-key", "k", files=str(tmp_path / "files")) as s:
        config = config.replace("llm.example.org", f"localhost:{port}").replace("10210", str(s.address[1]))
        # With these options, caddy changes nothing outside this folder.
        options = "{\nskip_install_trust\nadmin off\nauto_https disable_redirects\n}\n"
        (tmp_path / "Caddyfile").write_text(options + config)
        p = subprocess.Popen(["caddy", "run", "--config", tmp_path / "Caddyfile"], env={**ENV, **own}, stderr=subprocess.DEVNULL)
        try:
            check_proxy(f"https://localhost:{port}")
        finally:
            p.terminate()
            p.wait()


def test_nginx(tmp_path):
    nginx = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if not nginx or not shutil.which("openssl"):
        pytest.skip("no nginx or openssl")
    config = open(os.path.join(ROOT, "test/deploy/nginx.conf")).read().split("\n", 1)[1]  # without its comment
    port = free_port()
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=llm.example.org", "-keyout",
                    tmp_path / "k", "-out", tmp_path / "c"], check=True, capture_output=True)
    with Server("--api-key", "k", files=str(tmp_path / "files")) as s:
        config = config.replace("443 ssl", f"127.0.0.1:{port} ssl").replace("/etc/ssl/llm.example.org.pem", str(tmp_path / "c"))
        config = config.replace("/etc/ssl/llm.example.org.key", str(tmp_path / "k")).replace("10210", str(s.address[1]))
        head = f"pid {tmp_path}/pid; error_log {tmp_path}/log; daemon off; user root; events {{}}"
        (tmp_path / "nginx.conf").write_text(f"{head} http {{ access_log off; {config} }}")
        p = subprocess.Popen([nginx, "-c", tmp_path / "nginx.conf", "-p", tmp_path], stderr=subprocess.DEVNULL)
        try:
            check_proxy(f"https://localhost:{port}")
        finally:
            p.terminate()
            p.wait()
