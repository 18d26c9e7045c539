"""toka as a client: -p, chat and ping with --base-url, against toka's own server and against one that misbehaves."""
import http.server
import json
import os
import re
import socket
import subprocess
import threading
import time
import urllib.request

import pytest

import model_weights
from server import Server

TOKA = os.path.join(os.path.dirname(__file__), "..", "toka")


def toka(*args, stdin="", **env):
    keep = {k: v for k, v in os.environ.items() if k not in ("TOKA_API_KEY", "OPENAI_API_KEY")}
    return subprocess.run([TOKA, *args], input=stdin, capture_output=True, text=True, timeout=120, env={**keep, **env})


@pytest.fixture(scope="module")
def server():
    with Server() as s:
        yield "http://127.0.0.1:%d" % s.address[1]


@pytest.fixture
def fake():
    """A server whose answers the test writes: fake.answer is (status, bytes of the body); fake.seen are the requests."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            fake.seen.append((self.path, dict(self.headers), json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.reply(*fake.answer)

        def do_GET(self):
            self.reply(200, b'{"data": [{"id": "first"}, {"id": "second"}]}')

        def reply(self, status, body):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    fake = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.seen, fake.url = [], "http://127.0.0.1:%d" % fake.server_address[1]
    threading.Thread(target=fake.serve_forever, daemon=True).start()
    yield fake
    fake.shutdown()
    fake.server_close()


def events(*parts):
    return b"".join(b"data: %s\r\n\r\n" % (p if isinstance(p, bytes) else json.dumps(p).encode()) for p in parts)


def delta(reason=None, **members):
    return {"choices": [{"index": 0, "delta": members, "finish_reason": reason}]}


PROMPT = "Tom has 3 boxes with 4 apples each. How many apples does he have?"


@pytest.mark.parametrize("raw", [[], ["--raw"]])
def test_answers_as_the_same_command_without_a_server(server, raw):
    here = toka("-p", PROMPT, "--temp", "0", "-n", "60", "--device", "cpu", *raw)
    there = toka("-p", PROMPT, "--temp", "0", "-n", "60", "--base-url", server, *raw)
    assert there.returncode == 0 and there.stdout == here.stdout and here.stdout.strip()
    count = [r.stderr.split(" tokens")[0].split()[-1] for r in (here, there)]
    assert count[0] == count[1] != "0"


def test_samples_json_and_constraints(server):
    args = ["-p", "Tom has 12 apples.", "--raw", "--seed", "5", "--temp", "1", "-n", "6", "--samples", "3", "--json"]
    here, there = (json.loads(toka(*args, *more).stdout) for more in (["--device", "cpu"], ["--base-url", server]))
    assert [s["text"] for s in there["samples"]] == [s["text"] for s in here["samples"]]
    assert [s["finish_reason"] for s in there["samples"]] == [s["finish_reason"] for s in here["samples"]]
    assert (there["prompt_tokens"], there["output_tokens"]) == (here["prompt_tokens"], here["output_tokens"])
    assert toka("-p", "Tom", "--raw", "--base-url", server, "--choice", "red", "--choice", "blue").stdout in ("red\n", "blue\n")
    assert toka("-p", "Tom", "--raw", "--base-url", server, "--regex", "[0-9]{4}").stdout.strip().isdigit()


def test_chat_sends_the_whole_history(server):
    lines = "Tom has 3 apples.\nAnd 4 more.\n"
    here = toka("chat", "--temp", "0", "--device", "cpu", "-q", stdin=lines)
    there = toka("chat", "--temp", "0", "--base-url", server, "-q", stdin=lines)
    assert there.returncode == 0 and there.stdout == here.stdout


def test_ping_takes_the_arguments_of_tokasaurus(server):
    port = server.rsplit(":", 1)[1]
    first = toka("ping", "--port", port, "prompt=tell me a joke", "max_tokens=7", "chat=True", "temperature=0")
    second = toka("ping", "--base-url", server, "-p", "tell me a joke", "-n", "7", "--chat", "--temp", "0")
    assert first.returncode == 0 and first.stdout == second.stdout and "generated 7 tokens" in first.stderr
    wrong = toka("ping", "--port", port, "promt=x")
    assert wrong.returncode == 1 and "promt=x: expected prompt=TEXT" in wrong.stderr and "did you mean prompt?" in wrong.stderr
    link = os.path.join(os.path.dirname(TOKA), "toka-ping")  # build.sh makes it
    by_link = subprocess.run([link, "prompt=tell me a joke", "max_tokens=7", "chat=T", f"port={port}"], capture_output=True, text=True)
    assert by_link.returncode == 0 and by_link.stdout == first.stdout
    as_written = subprocess.run("toka-ping prompt='tell me a joke' max_tokens=256 chat=True", shell=True, capture_output=True, text=True,
                                env={**os.environ, "PATH": f"{os.path.dirname(link)}:{os.environ['PATH']}", "TOKA_PORT": port})
    assert as_written.returncode == 0 and as_written.stdout.startswith(first.stdout.rstrip("\n")), as_written.stderr
    defaults = toka("ping", f"port={port}", "prompt=Tom has", "n=1")
    assert defaults.stdout == toka("-p", "Tom has", "--raw", "--base-url", server, "-n", "100", "--temp", "0").stdout


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder of a model with random weights that eight ranks can share: 8 layers, 8 heads."""
    width, ffn, words = 64, 64, 1024
    matrices = {"self_attn.q_proj": (width, width), "self_attn.k_proj": (width, width), "self_attn.v_proj": (width, width),
                "self_attn.o_proj": (width, width), "mlp.gate_proj": (ffn, width), "mlp.up_proj": (ffn, width), "mlp.down_proj": (width, ffn)}
    layers = [f"model.layers.{i}." for i in range(8)]
    tensors = [["BF16", [words, width], 0.0, 0.9, ["model.embed_tokens.weight"]],
               ["BF16", [width], 1.0, 0.1, [f"{at}{norm}_layernorm.weight" for at in layers for norm in ("input", "post_attention")] + ["model.norm.weight"]],
               *(["BF16", list(shape), 0.0, 0.2, [f"{at}{name}.weight" for at in layers]] for name, shape in matrices.items())]
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "num_attention_heads": 8, "num_key_value_heads": 8,
              "intermediate_size": ffn, "num_hidden_layers": 8, "vocab_size": words, "max_position_embeddings": 4096, "hidden_act": "silu",
              "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}
    folder = tmp_path_factory.mktemp("eight")
    model_weights.write_whole(folder, {"seed": 8, "config": config, "tensors": tensors})
    return str(folder)


@pytest.mark.parametrize("command, said", [
    ("toka model=MODEL pp_size=8 kv_cache_num_tokens='(4 * 1024)' use_hydragen=T max_seqs_per_forward=7",
     ["use_hydragen=T: shared prefixes are always found", "KV cache 4096 tokens"]),
    ("toka model=MODEL pp_size=8 kv_cache_num_tokens=8192", ["KV cache 8192 tokens"]),
    ("toka serve MODEL --tensor-parallel-size 8 --max-model-len 4096 --swap-space 16 --disable-log-requests --gpu-memory-utilization 0.8"
     " --download-dir HERE --enable-prefix-caching",
     ["--swap-space: ", "--disable-log-requests: ", "--enable-prefix-caching: ", "sequences of 4096 tokens"]),
    ("toka serve MODEL --host 0.0.0.0 --port 8080", ["http://0.0.0.0:8080"]),  # a container, as clouds start it
    ("toka serve --tp 8 --model MODEL", ["sequences of 4096 tokens"]),
    ("toka serve --model-path MODEL --tp 8 --mem-fraction-static 0.8 --context-length 512 --host 127.0.0.1", ["sequences of 512 tokens"])])
def test_serves_as_other_engines_are_told_to(tmp_path, model, command, said):
    """The commands of Tokasaurus, vLLM and SGLang, with eight ranks. Their answer is that of one rank."""
    port = 8080 if "8080" in command else free_port()
    with socket.socket() as s:
        if s.connect_ex(("127.0.0.1", port)) == 0:
            pytest.skip(f"another program listens on port {port}")
    env = {**os.environ, "PATH": f"{os.path.dirname(TOKA)}:{os.environ['PATH']}", "TOKA_DEVICE": "cpu", "TOKA_FILES_DIR": "off", "TOKA_PORT": str(port)}
    p = subprocess.Popen(["sh", "-c", "exec " + command.replace("MODEL", model).replace("HERE", str(tmp_path))], stderr=subprocess.PIPE, text=True, env=env)
    try:
        head = ""
        while "toka: ready" not in head:
            head += (line := p.stderr.readline())
            assert line, head
        assert not [x for x in said if x not in head], head
        if "8080" not in command:
            assert " on 8 x CPU, " in head, head
        answer = toka("ping", f"port={port}", "max_tokens=3", "prompt=Tom has")
        assert answer.stdout == toka("-m", model, "--raw", "-p", "Tom has", "-n", "3", "--temp", "0", "--device", "cpu").stdout != ""
        assert "generated 3 tokens" in answer.stderr
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=30) as health:
            assert health.status == 200
    finally:
        p.terminate()
        p.communicate()


def test_what_tokasaurus_arguments_mean_nothing():
    for args, message in ((["model=x", "pp_sise=2"], "pp_sise=2: no argument of toka model=M ...; did you mean pp_size?"),
                          (["modle=x"], "modle=x: no argument of toka model=M ...; did you mean model?"),
                          (["kv_cache_num_tokens=(5 * x)"], "kv_cache_num_tokens=(5 * x): expected a whole number, or a product"),
                          (["kv_cache_num_tokens=(9999999999 * 9999999999)"], "expected a whole number, or a product"),
                          (["model=x", "use_hydragen=maybe"], "use_hydragen: 'maybe', expected True or False"),
                          (["model=x", "page_size=big"], "page_size=big: expected a whole number"), (["ping", "chat=maybe"], "chat: 'maybe', expected"),
                          (["model=x", "stats_report_seconds="], "stats_report_seconds: '' is not a number"),
                          (["model=x", "7"], "7: expected NAME=VALUE after toka model=M"),
                          (["model=x", "tp_size=0"], "toka: tp_size: 0, expected"), (["model=x", "pp_size=99"], "toka: pp_size: 99, expected"),
                          (["model=x", "--pp", "99"], "toka: --pp: 99, expected")):
        r = toka(*args)
        assert r.returncode == 1 and message in r.stderr and r.stderr.count("\n") == 1, (args, r.stderr)


def test_the_key_and_the_model_are_sent(fake):
    fake.answer = 200, events(delta(content="hi"), delta("stop"), b"[DONE]")
    assert toka("-p", "x", "--base-url", fake.url, OPENAI_API_KEY="k1").stdout == "hi\n"
    assert toka("-p", "x", "--base-url", fake.url + "/deep/v2/", "-m", "mine", TOKA_API_KEY="k2", OPENAI_API_KEY="k1").returncode == 0
    (path1, head1, body1), (path2, head2, body2) = fake.seen
    assert (path1, head1["Authorization"], body1["model"]) == ("/v1/chat/completions", "Bearer k1", "first")
    assert (path2, head2["Authorization"], body2["model"]) == ("/deep/v2/chat/completions", "Bearer k2", "mine")
    assert body1["messages"] == [{"role": "user", "content": "x"}] and "temperature" not in body1 and "max_tokens" not in body1


def test_a_prompt_of_any_bytes_arrives(fake):
    """Quotes, backslashes and line ends stay; 300 KB are more than a pipe or a line of curl's settings holds."""
    fake.answer = 200, events(delta("stop", content="ok"))
    text = 'a "quote" \\ and \\n\nline\ttab é ' + "x" * 300_000
    assert toka("--base-url", fake.url, stdin=text).stdout == "ok\n"
    assert fake.seen[0][2]["messages"][0]["content"] == text


def test_reasoning_stands_between_its_tags(fake):
    fake.answer = 200, events(delta(role="assistant"), delta(reasoning="It is "), delta(reasoning_content="simple."), delta(content="Four"),
                              delta("stop"), {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}, b"[DONE]")
    answer = toka("-p", "2 + 2", "--base-url", fake.url)
    assert answer.stdout == "<think>\nIt is simple.</think>\n\nFour\n" and "prompt 3 tokens, generated 4 tokens" in answer.stderr


def test_a_tool_call_stands_between_its_tags(fake):
    call = lambda **function: delta(tool_calls=[{"index": 0, "function": function}])
    fake.answer = 200, events(delta(content="Look:\n"), call(name="get", arguments=""), call(arguments='{"a"'), call(arguments=": 1}"),
                              call(name="now", arguments="{}"), delta("tool_calls"), b"[DONE]")
    answer = toka("-p", "x", "-q", "--base-url", fake.url)
    assert answer.stdout == 'Look:\n<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>\n' \
                            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n\n'


def test_the_speed_of_a_burst(fake):
    """All tokens come at once: the rate is that of the whole request. Without the server's counts there is none."""
    words, usage = [delta(content="a ")] * 500, {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 500}}
    fake.answer = 200, events(delta(role="assistant"), *words, delta("stop"), usage, b"[DONE]")
    begin = time.monotonic()
    said = toka("-p", "x", "--base-url", fake.url).stderr
    seconds = time.monotonic() - begin
    rate, first = re.fullmatch(r"prompt 3 tokens, generated 500 tokens, ([\d.]+) tok/s of the whole request, first token after (\d+) ms\n", said).groups()
    assert 500 / seconds < float(rate) < 500 / max(0.9e-3 * int(first), 1e-3)
    fake.answer = 200, events(delta(content="a"), delta("stop"), {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}, b"[DONE]")
    assert re.fullmatch(r"prompt 3 tokens, generated 1 tokens, first token after \d+ ms\n", toka("-p", "x", "--base-url", fake.url).stderr)
    for said, answer in (("first token", [delta(content="a"), delta("stop")]), ("ended", [delta("stop")])):
        fake.answer = 200, events(*answer, b"[DONE]")
        assert re.fullmatch(rf"the server gave no token counts, {said} after \d+ ms\n", toka("-p", "x", "--base-url", fake.url).stderr)


@pytest.mark.parametrize("answer, message, status", [
    ((404, b'{"error": {"message": "no such model"}}'), "status 404: no such model", 1),
    ((503, b"<html>busy"), "status 503", 2),
    ((200, events(delta(content="half"), {"error": {"message": "the device failed"}})), "the device failed", 2),
    ((200, events(delta(content="half"))), "the answer ended early", 2),
    ((200, b"data: {no json\n\n"), "", 1),
    ((200, b""), "the answer ended early", 2)])
def test_failures_are_one_sentence(fake, answer, message, status):
    fake.answer = answer
    r = toka("-p", "x", "-q", "--base-url", fake.url)
    assert r.returncode == status and message in r.stderr and len(r.stderr.strip().split("\n")) == 1, (r.returncode, r.stderr)


def test_bad_addresses_and_flags(fake):
    for url in ("ftp://host", "host:80", "http://", "http://a b"):
        r = toka("-p", "x", "--base-url", url)
        assert r.returncode == 1 and "expected http://HOST" in r.stderr, url
        assert ("did you mean http://host:80?" in r.stderr) == (url == "host:80")
    for args in (("ping", "port=1"), ("chat", "-p", "x", "--base-url", "http://127.0.0.1:1"), ("-p", "x", "--base-url", "http://127.0.0.1:1")):
        r = toka(*args)
        assert (r.returncode, r.stderr) == (2, "toka: http://127.0.0.1:1/v1: no server answers there; toka serve starts one, "
                                               "--base-url URL names another\n")
    for args, port in ((("ping", "port=99999"), 99999), (("-p", "x", "--base-url", "http://127.0.0.1:0"), 0), (("chat", "--base-url", "http://[::1]:65536/v1"), 65536)):
        r = toka(*args)
        assert (r.returncode, r.stderr) == (1, f"toka: --base-url: port {port}, expected 1 to 65535\n".replace("--base-url: port 9", "port: 9"))
    for args, text in ((("--host", "http://foo"), "--host: 'http://foo', expected a host's name or address, without http://"), (("host=foo:80",), "host: 'foo:80', expected a host's name or address, without a port"),
                      (("host=",), "host: '', expected"), (("--system", "x"), "--system needs --chat or chat=True"), (("--raw", "--chat"), "--raw goes without --chat"),
                      (("--host", "::1", "--port", "1"), "http://[::1]:1/v1: no server answers there")):
        r = toka("ping", *args)
        assert r.stderr.startswith("toka: " + text) and r.returncode == 1 + (args[1:2] == ("::1",)), r.stderr
    r = toka("ping", "host=no.host.invalid")
    assert (r.returncode, r.stderr) == (2, "toka: http://no.host.invalid:10210/v1: no host has this name\n")
    r = toka("-p", "x", "--base-url", fake.url, "--max-num-seqs", "3")
    assert r.returncode == 1 and "--max-num-seqs goes without --base-url" in r.stderr
    fake.answer = 401, b'{"error": {"message": "no key"}}'
    assert "status 401: no key; the key that is sent is TOKA_API_KEY, else OPENAI_API_KEY" in toka("-p", "x", "-m", "m", "--base-url", fake.url).stderr
    fake.seen.clear()
    r = toka("-p", "x", "--base-url", fake.url, PATH="/nowhere")
    assert r.returncode == 2 and "cannot start curl" in r.stderr and "hf download" not in r.stderr
    assert fake.seen == []


def test_ctrl_c_ends_the_answer_and_the_connection():
    with Server() as s:
        url = "http://127.0.0.1:%d" % s.address[1]
        p = subprocess.Popen([TOKA, "-p", "Tom", "--raw", "--ignore-eos", "-n", "900", "--temp", "2", "--samples", "40", "--base-url", url],
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        s.wait_metric("num_requests_running", 40)
        p.send_signal(2)
        assert p.wait(30) == 130
        s.wait_metric("num_requests_running", 0)
