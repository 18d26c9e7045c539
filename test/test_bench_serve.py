"""Tests of toka bench serve with a fake server whose times are known. Run through test/run.sh."""
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOKA = os.environ.get("TOKA_BINARY", os.path.join(ROOT, "toka"))
ENV = {k: v for k, v in os.environ.items() if not k.startswith(("TOKA_", "OPENAI_"))}


class FakeServer:
    """A server that streams max_tokens tokens: the first after `first` seconds, the others with `gap` seconds between them. bytewise:
    it sends each byte alone; close_after: it closes a connection after this many answers; refuse(i): the status of request i, or None
    to answer it; tokenize: it has /tokenize; broken: it closes the connection after two tokens."""

    def __init__(self, first=0.0, gap=0.0, bytewise=False, close_after=0, refuse=lambda i: None, tokenize=True, broken=False,
                 host="127.0.0.1"):
        self.first, self.gap, self.bytewise, self.close_after, self.refuse = first, gap, bytewise, close_after, refuse
        self.tokenize, self.broken, self.not_ready = tokenize, broken, 0
        self.requests, self.times, self.headers = [], [], []
        self.running = self.max_running = self.connections = 0
        self.loop = asyncio.new_event_loop()
        started = threading.Event()

        def run():
            asyncio.set_event_loop(self.loop)
            server = self.loop.run_until_complete(asyncio.start_server(self.serve, host, 0, limit=1 << 24, backlog=2048))
            self.port = server.sockets[0].getsockname()[1]
            started.set()
            self.loop.run_forever()
            server.close()
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(self.loop), return_exceptions=True))
            self.loop.close()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        started.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()

    async def serve(self, reader, writer):
        self.connections += 1
        served = 0
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = re.search(r"(?i)content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                path = head.split()[1]
                if path.endswith("/v1/models"):
                    self.not_ready -= 1
                    if self.not_ready >= 0:
                        await self.answer(writer, 503, {"error": {"message": "loading"}})
                    else:
                        await self.answer(writer, 200, {"data": [{"id": "fake-model"}]})
                elif path.endswith("/tokenize"):  # a token a word, at most 800
                    n = len(json.loads(body)["prompt"].split())
                    await self.answer(writer, 200 if self.tokenize else 404, {"tokens": list(range(100, 100 + min(n, 800)))})
                else:
                    self.headers.append(head)
                    await self.stream(writer, json.loads(body), path)
                    served += 1
                    if self.close_after and served >= self.close_after:
                        break
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        writer.close()

    async def answer(self, writer, status, body):
        data = json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))
        await writer.drain()

    async def stream(self, writer, body, path):
        i = len(self.requests)
        self.requests.append(body), self.times.append(time.monotonic())
        status = self.refuse(i)
        if status:
            return await self.answer(writer, status, {"error": {"message": "too much"}})
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n")

        async def send(text):
            data = text.encode()
            chunk = b"%x\r\n%s\r\n" % (len(data), data)
            for piece in ([chunk[k:k + 1] for k in range(len(chunk))] if self.bytewise else [chunk]):
                writer.write(piece)
                await writer.drain()
                if self.bytewise:
                    await asyncio.sleep(0)

        n = body["max_tokens"]
        for k in range(n):
            await asyncio.sleep(self.gap if k else self.first)
            delta = {"content": "xä"} if k else {"reasoning": "xä", "reasoning_content": "xä"}
            choice = {"index": 0, "delta": delta} if "messages" in body else {"index": 0, "text": "xä"}
            await send("data: " + json.dumps({"choices": [choice]}) + "\n\n")
            if self.broken and k == 1:
                self.running -= 1
                return writer.close()
        prompt = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 7
        usage = {"prompt_tokens": prompt, "completion_tokens": n, "total_tokens": prompt + n}
        await send("data: " + json.dumps({"choices": [], "usage": usage}) + "\n\ndata: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        self.running -= 1
        await writer.drain()


def bench(fake, *args, status=0, env=ENV):
    r = subprocess.run([TOKA, "bench", "serve", "--port", str(fake.port), *map(str, args)], env=env, cwd=ROOT, capture_output=True,
                       timeout=100)
    assert r.returncode == status, r.stderr.decode()
    return r.stdout.decode(), r.stderr.decode()


def results(fake, *args, **more):
    return json.loads(bench(fake, "--json", *args, **more)[0])


BLOCKS = [("Time to First Token", "TTFT"), ("Time per Output Token (excl. 1st token)", "TPOT"), ("Inter-token Latency", "ITL"),
          ("End-to-end Latency", "E2EL")]


def test_output_has_the_lines_of_vllm():
    with FakeServer(first=0.001) as fake:
        out, _ = bench(fake, "--num-prompts", 20, "--random-input-len", 30, "--random-output-len", 4, "--max-concurrency", 3,
                       "--request-rate", 500, "--goodput", "ttft:5000 e2el:10000", "--metric-percentiles", "50,99,99.9")
    lines = out.splitlines()
    assert lines[0] == "{s:{c}^50}".format(s=" Serving Benchmark Result ", c="=") and lines[-1] == "=" * 50
    names = ["Successful requests:", "Failed requests:", "Maximum request concurrency:", "Request rate configured (RPS):",
             "Benchmark duration (s):", "Total input tokens:", "Total generated tokens:", "Request throughput (req/s):",
             "Request goodput (req/s):", "Output token throughput (tok/s):", "Peak output token throughput (tok/s):",
             "Peak concurrent requests:", "Total token throughput (tok/s):", "Output character throughput (char/s):"]
    for title, short in BLOCKS:
        names += ["{s:{c}^50}".format(s=title, c="-"), f"Mean {short} (ms):", f"Median {short} (ms):", f"P50 {short} (ms):",
                  f"P99 {short} (ms):", f"P99.9 {short} (ms):"]
    assert [line[:40].rstrip() if not line.startswith("-") else line for line in lines[1:-1]] == names
    for line in lines[1:-1]:
        if not line.startswith("-"):
            assert re.fullmatch(r".{40} \d+(\.\d\d)? *", line) and len(line) >= 51
    values = {line[:40].rstrip(): float(line[41:]) for line in lines[1:-1] if not line.startswith("-")}
    assert values["Successful requests:"] == 20 and values["Failed requests:"] == 0
    assert values["Total input tokens:"] == 600 and values["Total generated tokens:"] == 80
    assert values["Request goodput (req/s):"] == values["Request throughput (req/s):"]
    assert abs(values["Output character throughput (char/s):"] - 2 * values["Output token throughput (tok/s):"]) < 0.1  # "xä" a token


def test_times_match_the_server():
    for _ in range(5):  # tries: a loaded machine may be too slow
        with FakeServer(first=0.2, gap=0.05) as fake:
            v = results(fake, "--num-prompts", 8, "--random-input-len", 5, "--random-output-len", 5, "--save-detailed",
                        "--metric-percentiles", "0,99,100")
        assert (v["completed"], v["failed"], v["total_output_tokens"], v["max_concurrent_requests"]) == (8, 0, 40, 8)
        assert 200 <= v["mean_ttft_ms"] and 50 <= v["mean_tpot_ms"] and 400 <= v["median_e2el_ms"] and v["duration"] >= 0.4
        fast_enough = v["mean_ttft_ms"] < 300 and v["mean_tpot_ms"] < 75 and 48 <= v["median_itl_ms"] < 75 and v["median_e2el_ms"] < 560
        if fast_enough and v["max_output_tokens_per_s"] == 40:
            break
    assert fast_enough and v["max_output_tokens_per_s"] == 40
    assert v["request_goodput"] is None and v["request_rate"] == "inf"
    assert [len(v[k]) for k in ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "errors")] == [8] * 7
    ttfts = sorted(v["ttfts"])
    assert abs(v["p0_ttft_ms"] - 1e3 * ttfts[0]) < 1e-6 and abs(v["p100_ttft_ms"] - 1e3 * ttfts[-1]) < 1e-6
    assert abs(v["p99_ttft_ms"] - 1e3 * (ttfts[-2] + 0.93 * (ttfts[-1] - ttfts[-2]))) < 1e-3
    for ttft, itl, e2el in zip(v["ttfts"], v["itls"], v["latencies"]):
        assert len(itl) == 4 and abs(ttft + sum(itl) - e2el) < 1e-4
    assert abs(v["mean_tpot_ms"] - sum(1e3 * (e - t) / 4 for t, e in zip(v["ttfts"], v["latencies"])) / 8) < 1e-3
    assert abs(v["output_throughput"] * v["duration"] - 40) < 1e-6


def test_goodput_counts_requests_within_the_limits():
    with FakeServer(first=0.05, gap=0.01) as fake:
        args = ["--num-prompts", 10, "--random-input-len", 5, "--random-output-len", 3]
        assert results(fake, *args, "--goodput", "ttft:40")["request_goodput"] == 0
        assert results(fake, *args, "--goodput", "ttft:4000,tpot:0.001")["request_goodput"] == 0
        v = results(fake, *args, "--goodput", "ttft:4000 tpot:400")
        assert v["request_goodput"] == v["request_throughput"] > 0


def test_closed_loop_keeps_its_concurrency():
    with FakeServer(first=0.01, gap=0.001) as fake:
        v = results(fake, "--num-prompts", 60, "--random-input-len", 5, "--random-output-len", 3, "--max-concurrency", 7)
        assert fake.max_running == 7 and v["completed"] == 60 and v["max_concurrency"] == 7
        assert 7 < v["max_concurrent_requests"] <= 60  # all that ran in one second, as vLLM counts
        assert fake.connections <= 7 + 2  # connections are kept alive; two calls come before the run


def test_open_loop_keeps_its_rate():
    for _ in range(5):  # tries: a loaded machine may be too slow
        with FakeServer(first=0.3) as fake:
            v = results(fake, "--num-prompts", 200, "--request-rate", 200, "--random-input-len", 5, "--random-output-len", 1)
            span = fake.times[-1] - fake.times[0]
        assert v["completed"] == 200 and 0.85 < span  # test_benchclient.c tests the distribution of the gaps
        if span < 1.4 and v["max_concurrent_requests"] > 30:
            return
    assert False, (span, v["max_concurrent_requests"])


def test_requests_that_are_sent():
    env = {**ENV, "OPENAI_API_KEY": "sk-secret"}
    with FakeServer() as fake:
        bench(fake, "--num-prompts", 30, "--random-input-len", 100, "--random-output-len", 50, "--random-range-ratio", 0.5,
              "--random-prefix-len", 20, "--ignore-eos", "--temp", 0.5, "--extra-body", ' {"top_p": 0.9, "x": [1]} ', "--seed", 3, env=env)
        one = fake.requests[0]
        assert {k: one[k] for k in ("model", "temperature", "stream", "stream_options", "ignore_eos", "top_p", "x")} == {
            "model": "fake-model", "temperature": 0.5, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
            "top_p": 0.9, "x": [1]}
        assert all(r["prompt"][:20] == one["prompt"][:20] and 70 <= len(r["prompt"]) <= 170 for r in fake.requests)
        assert all(25 <= r["max_tokens"] <= 75 for r in fake.requests) and len({len(r["prompt"]) for r in fake.requests}) > 5
        assert len({tuple(r["prompt"][20:30]) for r in fake.requests}) == 30 and all(100 <= t < 900 for t in one["prompt"])
        assert all("Authorization: Bearer sk-secret\r\n" in h for h in fake.headers)
        before = sorted(map(str, fake.requests))
        fake.requests.clear()
        bench(fake, "--num-prompts", 30, "--random-input-len", 100, "--random-output-len", 50, "--random-range-ratio", 0.5,
              "--random-prefix-len", 20, "--ignore-eos", "--temp", 0.5, "--extra-body", '{"top_p":0.9,"x":[1]}', "--seed", 3)
        assert sorted(map(str, fake.requests)) == before  # the same seed, the same requests
        fake.requests.clear(), fake.headers.clear()
        bench(fake, "--num-prompts", 1, "--random-input-len", 4, env={**env, "TOKA_API_KEY": "k1"})
        assert fake.headers and all("Authorization: Bearer k1\r\n" in h for h in fake.headers)
        fake.requests.clear()
        out, _ = bench(fake, "--endpoint", "/v1/chat/completions", "--model", "other", "--num-prompts", 3, "--random-input-len", 4)
        assert [len(r["messages"][0]["content"].split()) for r in fake.requests] == [4] * 3 and fake.requests[0]["model"] == "other"
        assert "Total input tokens:                      21" in out  # the number that the server reports
        fake.requests.clear()
        bench(fake, "another", "--num-prompts", 1, "--random-input-len", 4)
        assert {r["model"] for r in fake.requests} == {"another"}
        v = results(fake, "--endpoint", "/v1/chat/completions", "--num-prompts", 3, "--random-input-len", 4)
        assert v["total_output_characters"] == 2 * v["total_output_tokens"] > 6  # reasoning, too, under either of its names
        assert v["output_characters_per_second"] == pytest.approx(v["total_output_characters"] / v["duration"], rel=1e-6)


def test_server_without_tokenize():
    with FakeServer(tokenize=False) as fake:
        v = results(fake, "--num-prompts", 3, "--random-input-len", 9, "--random-output-len", 2)
        assert all(len(r["prompt"].split()) == 9 for r in fake.requests) and v["total_input_tokens"] == 21
        fake.requests.clear()
        bench(fake, "--num-prompts", 4, "--random-input-len", 5, "--random-prefix-len", 7, "--random-output-len", 2)
        words = [r["prompt"].split() for r in fake.requests]
        assert [len(w) for w in words] == [12] * 4
        assert len({tuple(w[:7]) for w in words}) == 1 and len({tuple(w[7:]) for w in words}) == 4


def test_dataset(tmp_path):
    d = tmp_path / "d.jsonl"
    d.write_text('{"prompt_token_ids": [1, 2, 3], "output_lengths": [4, 2]}\n\n{"prompt": "hello"}\n{"prompt": "x", "output_tokens": 9}\n')
    with FakeServer() as fake:
        bench(fake, "--dataset", d, "--random-output-len", 6)
        sent = sorted((str(r["prompt"]), r["max_tokens"]) for r in fake.requests)
        assert sent == [("[1, 2, 3]", 2), ("[1, 2, 3]", 4), ("hello", 6), ("x", 9)]
        fake.requests.clear()
        bench(fake, "--dataset", d, "--num-prompts", 1)
        assert len(fake.requests) == 2
        d.write_text('{"prompt": 5}\n')
        assert "line 1" in bench(fake, "--dataset", d, status=1)[1]
        fake.requests.clear()
        for line in ('"output_lengths": [3, 0]', '"output_lengths": ["3"]', '"output_lengths": []', '"output_lengths": 3',
                     '"output_lengths": [1.5]', '"output_lengths": [9999999999]', '"output_tokens": -1', '"output_tokens": "9"'):
            d.write_text('{"prompt": "x"}\n{"prompt": "x", %s}\n' % line)
            assert "line 2: expected output_lengths" in bench(fake, "--dataset", d, status=1)[1]
        assert "--random-output-len: 0, expected 1" in bench(fake, "--dataset", d, "--random-output-len", 0, status=1)[1] and not fake.requests


def test_datasets_by_their_names(tmp_path):
    """The command that users of vLLM type."""
    words = lambda n, word: " ".join([word] * n)
    talks = [{"conversations": [{"from": "human", "value": words(n, "q")}, {"from": "gpt", "value": words(n + 1, "a")}, {"value": "x"}]}
             for n in (5, 6, 7)]
    wrong = [{"conversations": [{"value": words(3, "q")}, {"value": words(9, "a")}]}, {"conversations": []}, {"id": 1},
             {"conversations": [{"value": words(9, "q")}, {"value": "a"}]}, {"conversations": [{"value": words(9, "q")}]}]
    d = tmp_path / "d"
    with FakeServer() as fake:
        args = ["--backend", "vllm", "--endpoint", "/v1/completions", "--model", "m", "--max-concurrency", 10, "--request-rate", "inf",
                "--random-input-len", 20, "--random-output-len", 3]
        out, err = bench(fake, "--dataset-name", "random", "--num-prompts", 20, *args)
        assert "Successful requests:                     20" in out and "toka: --backend: " in err
        assert {len(r["prompt"]) for r in fake.requests} == {20}

        fake.requests.clear()
        d.write_text(json.dumps(wrong + talks))
        bench(fake, "--dataset-name", "sharegpt", "--dataset-path", d, "--num-prompts", 7, *args)  # three that fit, in turn
        sent = sorted((len(r["prompt"].split()), r["max_tokens"]) for r in fake.requests)
        assert len(sent) == 7 and set(sent) == {(5, 6), (6, 7), (7, 8)}
        fake.requests.clear()
        bench(fake, "--dataset-name", "sharegpt", "--dataset-path", d, "--num-prompts", 2, *args)
        assert len({r["prompt"] for r in fake.requests}) == 2

        fake.requests.clear()
        d.write_text("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\r\n5,ChatGPT,8,9,17,API log\r\n"
                     "45,GPT-4,30,4,34,Conversation log\r\n46,GPT-4,31,0,31,x\r\n47,GPT-4,12,3,15,x")
        bench(fake, "--dataset-name", "burstgpt", "--dataset-path", d, "--num-prompts", 2, *args)
        assert sorted((len(r["prompt"]), r["max_tokens"]) for r in fake.requests) == [(12, 3), (30, 4)]

        fake.requests.clear()
        d.write_text("\n".join(f"{words(9, 'w')} {i}" for i in range(60)))
        bench(fake, "--dataset-name", "sonnet", "--dataset-path", d, "--num-prompts", 3, *args)
        prompts = [r["prompt"].splitlines() for r in fake.requests]
        assert [len(p) for p in prompts] == [56] * 3 and all(p[:21] == prompts[0][:21] for p in prompts) and prompts[0] != prompts[1]
        assert all(r["max_tokens"] == 150 for r in fake.requests)

        fake.requests.clear()
        for name, text, message in (("sharegpt", "{}", "expected a JSON array"), ("sharegpt", "[", "JSON"), ("sharegpt", "[1]", "no request for"),
                                    ("burstgpt", "a,b\n", 'no column "Model"'), ("burstgpt", "", "no column"), ("sonnet", "", "/tokenize"),
                                    ("sonet", "x", "did you mean sonnet?"), ("random", "x", "random has no file")):
            d.write_text(text)
            assert message in bench(fake, "--dataset-name", name, "--dataset-path", d, *args, status=1)[1], (name, text)
        assert "sharegpt needs its file: --dataset-path FILE" in bench(fake, "--dataset-name", "sharegpt", *args, status=1)[1]
        fake.tokenize = False
        d.write_text(json.dumps(talks))
        assert "has no /tokenize" in bench(fake, "--dataset-name", "sharegpt", "--dataset-path", d, *args, status=1)[1] and not fake.requests


def test_bytes_arrive_one_by_one():
    with FakeServer(bytewise=True) as fake:
        v = results(fake, "--num-prompts", 5, "--random-input-len", 5, "--random-output-len", 4)
        assert (v["completed"], v["total_output_tokens"]) == (5, 20)


def test_server_that_closes_connections():
    with FakeServer(close_after=2) as fake:
        v = results(fake, "--num-prompts", 41, "--random-input-len", 5, "--random-output-len", 2, "--max-concurrency", 4)
        assert v["completed"] == 41 and v["failed"] == 0 and len(fake.requests) == 41


def test_failures_are_counted_and_reported():
    with FakeServer(refuse=lambda i: 429 if i % 4 == 3 else None) as fake:
        out, err = bench(fake, "--num-prompts", 20, "--random-input-len", 5, "--random-output-len", 2)
        assert "Failed requests:                         5 " in out and "Successful requests:                     15" in out
        assert err.count("HTTP status 429") == 5 and "too much" in err
    with FakeServer(broken=True) as fake:
        _, err = bench(fake, "--num-prompts", 3, "--random-input-len", 5, "--random-output-len", 5, status=2)
        assert "closed the connection" in err and "all 3 requests failed" in err


def test_waits_for_the_server():
    with FakeServer() as fake:
        fake.not_ready = 3
        out, err = bench(fake, "--num-prompts", 2, "--random-input-len", 5, "--random-output-len", 2, "--num-warmups", 3)
        assert f"waiting for the server: 127.0.0.1:{fake.port}/v1/models: HTTP status 503" in err and "loading" in err and len(fake.requests) == 5
        assert "Successful requests:                     2 " in out
        bench(fake, "--base-url", f"http://localhost:{fake.port}/prefix/", "--num-prompts", 1, "--random-input-len", 5)
    started = time.monotonic()
    r = subprocess.run([TOKA, "bench", "serve", "--port", "1", "--ready-check-timeout-sec", "0"], env=ENV, capture_output=True)
    assert r.returncode == 2 and b"refused" in r.stderr and time.monotonic() - started < 60


def test_an_address_in_brackets():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6")
    with FakeServer(host="::1") as fake:
        out, _ = bench(fake, "--base-url", f"http://[::1]:{fake.port}/x", "--num-prompts", 2, "--random-input-len", 5,
                       "--random-output-len", 2)
        assert "Successful requests:                     2 " in out
        assert fake.headers and all(f"host: [::1]:{fake.port}" in str(h).lower() for h in fake.headers)


def test_warm_ups_ignore_the_request_rate():
    with FakeServer() as fake:
        p = subprocess.Popen([TOKA, "bench", "serve", "--port", str(fake.port), "--num-prompts", "1", "--random-input-len", "5",
                              "--request-rate", "0.0001", "--num-warmups", "2"], env=ENV, stderr=subprocess.PIPE)
        end = time.monotonic() + 60
        while len(fake.requests) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        p.send_signal(signal.SIGINT)
        p.communicate()
        assert p.returncode == 130 and len(fake.requests) == 2


def test_prefix_needs_random_prompts(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "Tom", "output_lengths": [2]}\n')
    with FakeServer() as fake:
        r = subprocess.run([TOKA, "bench", "serve", "--port", str(fake.port), "--dataset", str(tmp_path / "d.jsonl"), "--random-prefix-len",
                            "5"],
                           env=ENV, cwd=ROOT, capture_output=True)
        assert r.returncode == 1 and b"--random-prefix-len" in r.stderr and not fake.requests


@pytest.mark.parametrize("args", [["--save-detailed"], ["--request-rate", "0"], ["--request-rate", "fast"], ["--burstiness", "0"],
                                  ["--goodput", "ttft"], ["--goodput", "itl:3"], ["--goodput", "ttft:x"], ["--goodput", "ttft:"],
                                  ["--percentile-metrics", "ttft,speed"],
                                  ["--metric-percentiles", "101"], ["--base-url", "https://x"], ["--base-url", "http://:1"],
                                  ["--base-url", "http://[::1"], ["--base-url", "http://[]:1"],
                                  ["--base-url", "http://x:99999"], ["--port", "0"], ["--extra-body", "[1]"], ["--endpoint", "v1"],
                                  ["--random-range-ratio", "1"], ["--random-input-len", "0"], ["--max-concurrency", "-1"],
                                  ["--dataset", "/nowhere"], ["--base-url", "http://127.0.0.1:4294977506"],
                                  ["--random-input-len", "2147483647"], ["--num-prompts", "2147483647"],
                                  ["--num-prompts", "1", "--random-input-len", "1", "--num-warmups", "2147483647"]])
def test_refused(args):
    with FakeServer() as fake:
        r = subprocess.run([TOKA, "bench", "serve", "--port", str(fake.port), *args], env=ENV, cwd=ROOT, capture_output=True)
        flag = [word for word in args if word.startswith("--")][-1]
        assert r.returncode == 1 and len(r.stderr.decode().strip().splitlines()) == 1 and r.stderr.startswith(b"toka: --") and flag in r.stderr.decode()
