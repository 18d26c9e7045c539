#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A soak of toka serve: 15 kinds of clients run at once for an hour; the script measures memory, descriptors and /health.

    python3 test/soak_server.py                     one hour (TMPDIR names the folder of the server's files)
    python3 test/soak_server.py --minutes 5         a short run; the growth of memory is printed, but not checked
    python3 test/soak_server.py --kinds batches     only some kinds, to find the kind for which memory grows

The KV cache becomes resident memory only when it is used. It is small, and all of its pages are used before the measurement: the
first half of the run is a warm-up.

An idle server runs at the same time, and one process measures GET /health on both in turns. So the ratio of the two shows the
effect of the load inside the server, and not of other programs on the machine.

Prints a report in markdown (example: test/results/soak-server.md). The exit status is 1 if an answer was wrong, if memory grew
by more than 1 MiB per hour in the last half (not counting KEPT), if the 99th percentile of /health was more than 5 times that of
the idle server, if a reply of /health took more than a second, or if descriptors stayed open.
Needs only ./toka and the standard library.
"""
import argparse
import collections
import datetime
import json
import multiprocessing
import os
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

from server import Server

PROBLEM = "Tom has 12 apples. He buys 7 more apples. How many apples does Tom have now?"
CHAT = [{"role": "user", "content": PROBLEM}]

# Bytes that the server keeps on purpose: one record for each ended batch. OpenAI's API has no call to delete a batch.
KEPT = {"batches": 1024}


class WrongAnswer(Exception):
    """The server gave a wrong answer."""


def expect(ok, what):
    if not ok:
        raise WrongAnswer(str(what)[:500])


class Client:
    """A client of the loaded server, used by one thread. It keeps a connection and opens a new one if it was closed. `alone`: the
    texts of the 40 prompts, each requested alone."""

    def __init__(self, server, seed, alone):
        self.server, self.random, self.alone = server, random.Random(seed), alone
        self.conn = None

    def host(self):
        return "%s:%d" % self.server.address

    def ask(self, method, path, body=None, **headers):
        """Sends one request on the kept connection; returns its answer."""
        self.conn = self.conn or self.server.connect()
        answer = self.conn.request(method, path, body, Host=self.host(), **headers)
        if answer.headers.get("connection") == "close":
            self.disconnect()
        return answer

    def ask_json(self, method, path, body=None, **headers):
        """Sends a request that must succeed; returns the JSON of its answer."""
        answer = self.ask(method, path, body, **headers)
        expect(answer.status == 200, (path, answer.status, answer.body))
        return answer.json()

    def start_request(self, body, path="/v1/completions", **connect):
        """Opens a new connection and sends a request on it; does not read the answer."""
        data = json.dumps(body).encode()
        c = self.server.connect(**connect)
        c.send(f"POST {path} HTTP/1.1\r\nHost: {self.host()}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return c

    def disconnect(self):
        if self.conn:
            self.conn.close()
        self.conn = None


def reset(conn):
    """Closes a connection with RST, as when a client crashes."""
    conn.s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    conn.close()


def read_stream(conn):
    """The whole text of a streamed answer, and whether the stream ended with [DONE]."""
    status, headers = conn.head()
    expect(status == 200 and headers.get("transfer-encoding") == "chunked", (status, headers))
    out, done = "", False
    for event in b"".join(conn.chunks()).decode().split("\n\n"):
        if event == "data: [DONE]":
            done = True
        elif event.startswith("data: {"):
            for choice in json.loads(event[6:])["choices"]:
                out += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return out, done


# ---- The 15 kinds of clients. Each function is one round of one client; it raises WrongAnswer if an answer is wrong ----


def completion(c):
    """One of 40 prompts: the text must equal the text of the same request alone."""
    i = c.random.randrange(40)
    text = c.ask_json("POST", "/v1/completions", numbered(i))["choices"][0]["text"]
    expect(text == c.alone[i], (i, text, c.alone[i]))


def samples(c):
    """Many samples of one prompt, with log-probabilities."""
    n = c.random.randint(2, 24)
    body = {"prompt": PROBLEM, "n": n, "max_tokens": 8, "temperature": 1, "logprobs": 3, "seed": c.random.randrange(1000)}
    choices = c.ask_json("POST", "/v1/completions", body)["choices"]
    expect(len(choices) == n and all(len(x["logprobs"]["tokens"]) <= 8 for x in choices), len(choices))


def stream(c):
    i = c.random.randrange(40)
    with c.start_request({**numbered(i), "stream": True}) as conn:
        text, done = read_stream(conn)
    expect(done and text == c.alone[i], (i, text, c.alone[i]))


def chat(c):
    body = {"messages": CHAT, "max_tokens": 24, "stop": ["\n\n", "zebra"], "logit_bias": {"65": -5}, "frequency_penalty": 0.2}
    message = c.ask_json("POST", "/v1/chat/completions", body)["choices"][0]["message"]
    expect(message["role"] == "assistant" and message["content"], message)


def chat_stream(c):
    body = {"messages": CHAT, "max_tokens": 24, "stream": True, "temperature": 0.8, "top_p": 0.9, "stream_options": {"include_usage": True}}
    with c.start_request(body, "/v1/chat/completions") as conn:
        expect(read_stream(conn)[1], "no [DONE]")


def long_prompt(c):
    words = " ".join(str(c.random.randrange(1000)) for _ in range(200))
    a = c.ask_json("POST", "/v1/completions", {"prompt": words, "max_tokens": 2, "prompt_logprobs": 1, "echo": True})
    expect(a["usage"]["completion_tokens"] <= 2, a["usage"])


def disconnect_in_stream(c):
    """A client that closes its connection in the middle of its stream."""
    conn = c.start_request({"prompt": PROBLEM, "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 4})
    conn.fill()
    reset(conn) if c.random.random() < 0.5 else conn.close()


def disconnect_waiting(c):
    """A client that closes its connection before its answer comes."""
    conn = c.start_request({"prompt": PROBLEM, "max_tokens": 400, "ignore_eos": True, "n": 8})
    time.sleep(c.random.random() * 0.05)
    reset(conn) if c.random.random() < 0.5 else conn.close()


def half_request(c):
    """A client that sends an incomplete head or body and then closes its connection."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {c.host()}\r\nContent-Length: 100000\r\n\r\n{{\"prompt\": \"" + "x" * 5000
    with c.server.connect() as conn:
        conn.send(head[:c.random.randrange(len(head))])
        time.sleep(c.random.random() * 0.2)


def slow_reader(c):
    """A client that reads its stream in small pieces and closes its connection before the end."""
    with c.start_request({"prompt": PROBLEM, "max_tokens": 300, "ignore_eos": True, "stream": True, "logprobs": 5}, rcvbuf=2048) as conn:
        for _ in range(20):
            conn.s.recv(512)
            time.sleep(0.05)


def bad_requests(c):
    """A request that must be refused with its own status."""
    status, method, path, body = c.random.choice([
        (400, "POST", "/v1/completions", b'{"prompt": "x'), (400, "POST", "/v1/completions", {"prompt": 7.5}),
        (400, "POST", "/v1/completions", {"prompt": "x", "temperature": "warm"}), (400, "POST", "/v1/completions", b"\xff\xfe"),
        (400, "POST", "/v1/chat/completions", {"messages": []}), (404, "POST", "/v1/completions", {"prompt": "x", "model": "other"}),
        (404, "GET", "/v1/nothing", None), (405, "GET", "/v1/completions", None), (404, "GET", "/v1/files/file-0", None),
        (404, "GET", "/v1/batches/batch_0", None), (400, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 10 ** 6}),
        (400, "POST", "/v1/completions", {"prompt": "x" * 100000})])
    answer = c.ask(method, path, body)
    expect(answer.status == status and answer.error()["message"], (method, path, body, answer.status, answer.body))


def tokens(c):
    text = "".join(chr(c.random.choice((c.random.randrange(32, 127), c.random.randrange(0x3B1, 0x3C9), 0x1F600))) for _ in range(300))
    found = c.ask_json("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    expect(c.ask_json("POST", "/detokenize", {"tokens": found})["prompt"] == text, text)


def pipelined(c):
    """Twenty requests sent without waiting, on one connection."""
    with c.server.connect() as conn:
        conn.send(f"GET /v1/models HTTP/1.1\r\nHost: {c.host()}\r\n\r\n" * 10 + f"GET /metrics HTTP/1.1\r\nHost: {c.host()}\r\n\r\n" * 10)
        for _ in range(20):
            expect(conn.answer().status == 200, "pipelined")


def files(c):
    """Uploads half a megabyte, reads it back and deletes it."""
    data = c.random.randbytes(500_000)
    made = upload(c, data, "user_data")
    expect(c.ask("GET", f"/v1/files/{made['id']}/content").body == data, "the content of a file differs")
    expect(c.ask_json("GET", "/v1/files")["object"] == "list", "list")
    expect(c.ask_json("DELETE", f"/v1/files/{made['id']}")["deleted"], made)


def batches(c):
    """A batch of 40 lines; one of three batches is cancelled. Deletes all files of the batch."""
    lines = "".join(json.dumps({"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions",
                                "body": {"prompt": f"Tom has {i}", "max_tokens": 4, "temperature": 1}}) + "\n" for i in range(40))
    made = upload(c, lines.encode(), "batch")
    batch = c.ask_json("POST", "/v1/batches", {"input_file_id": made["id"], "endpoint": "/v1/completions", "completion_window": "24h"})
    cancelled = c.random.random() < 1 / 3
    if cancelled:  # the batch may have ended before
        answer = c.ask("POST", f"/v1/batches/{batch['id']}/cancel")
        expect(answer.status == 200 or "cannot be cancelled" in answer.error()["message"], (answer.status, answer.body))
    while batch["status"] not in ("completed", "cancelled"):
        expect(batch["status"] in ("validating", "in_progress", "finalizing", "cancelling"), batch)
        time.sleep(0.2)
        batch = c.ask_json("GET", f"/v1/batches/{batch['id']}")
    counts = batch["request_counts"]
    expect(cancelled or counts == {"total": 40, "completed": 40, "failed": 0}, batch)
    for name in ("input_file_id", "output_file_id", "error_file_id"):
        if batch[name]:
            c.ask_json("DELETE", f"/v1/files/{batch[name]}")
    return "batches"


KINDS = {  # kind: (number of clients, mean pause in seconds between two rounds of a client)
    completion: (2, 0.05), samples: (1, 0.1), stream: (2, 0.05), chat: (1, 0.1), chat_stream: (1, 0.1), long_prompt: (1, 0.5),
    disconnect_in_stream: (1, 0.3), disconnect_waiting: (1, 0.3), half_request: (1, 0.1), slow_reader: (1, 0.5), bad_requests: (1, 0.05),
    tokens: (1, 0.1), pipelined: (1, 0.2), files: (1, 0.3), batches: (1, 0.5)}


def numbered(i):
    return {"prompt": f"{PROBLEM} {i}", "max_tokens": 3 + i % 10, "seed": i, "temperature": 1}


def upload(c, data, purpose):
    mark = "soak-boundary-7d1f"
    form = (f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n--{mark}\r\n'
            'Content-Disposition: form-data; name="file"; filename="soak"\r\n\r\n').encode() + data + f"\r\n--{mark}--\r\n".encode()
    return c.ask_json("POST", "/v1/files", form, Content_Type=f"multipart/form-data; boundary={mark}")


# ---- The load and the measurements ----


class Load:
    """Runs each client in a thread; counts the rounds and collects errors."""

    def __init__(self, server, kinds, alone):
        self.server, self.alone = server, alone
        self.stop, self.lock = threading.Event(), threading.Lock()
        self.rounds, self.kept, self.wrong = collections.Counter(), collections.Counter(), []
        self.threads = [threading.Thread(target=self.run, args=(kind, 100 * k + i), daemon=True)
                        for k, kind in enumerate(kinds) for i in range(KINDS[kind][0])]
        for t in self.threads:
            t.start()

    def run(self, kind, seed):
        c = Client(self.server, seed, self.alone)
        while not self.stop.is_set():
            kept = None
            try:
                kept = kind(c)
            except Exception as e:
                c.disconnect()
                with self.lock:
                    self.wrong.append(f"{kind.__name__}: {type(e).__name__}: {e}")
                    print(self.wrong[-1], file=sys.stderr, flush=True)
            with self.lock:
                self.rounds[kind.__name__] += 1
                if kept:
                    self.kept[kept] += 1
            self.stop.wait(KINDS[kind][1] * 2 * c.random.random())
        c.disconnect()

    def end(self):
        self.stop.set()
        for t in self.threads:
            t.join(120)


def probe_health(addresses, stop, out):
    """Measures GET /health on each server in turns, 20 times per second each, on connections that stay open."""
    times, conns = [[] for _ in addresses], [socket.create_connection(a) for a in addresses]
    request = [b"GET /health HTTP/1.1\r\nHost: %s:%d\r\n\r\n" % (a[0].encode(), a[1]) for a in addresses]
    while not stop.is_set():
        for i, conn in enumerate(conns):
            start = time.perf_counter()
            conn.sendall(request[i])
            got = conn.recv(65536)
            while not got.endswith(b"}"):
                got += conn.recv(65536)
            times[i].append(time.perf_counter() - start)
            assert got.startswith(b"HTTP/1.1 200"), got
            time.sleep(0.025)
    out.put(times)


def memory_kb(pid):
    """Anonymous resident memory: the heap and the stacks, without mapped files."""
    with open(f"/proc/{pid}/status") as f:
        return int(re.search(r"RssAnon:\s+(\d+)", f.read())[1])


def slope(points):
    """The slope of the least-squares line."""
    n, sx, sy = len(points), sum(x for x, _ in points), sum(y for _, y in points)
    denominator = n * sum(x * x for x, _ in points) - sx * sx
    return (n * sum(x * y for x, y in points) - sx * sy) / denominator if denominator else 0.0


def quantile(times, share):
    return sorted(times)[int(share * (len(times) - 1))]


def soak(a, folder):
    """Runs the load. Returns points of (seconds, KB, bytes kept on purpose), the load, the times of /health, and the numbers of
    descriptors before and after."""
    kinds = [k for k in KINDS if not a.kinds or k.__name__ in a.kinds.split(",")]
    with Server("--kv-tokens", "8192", files=folder) as s, Server("--kv-tokens", "1024", "-t", "1") as idle:
        host = "%s:%d" % s.address
        for i in range(12):  # a page of the KV cache becomes resident memory at its first use: use all pages
            s.post("/v1/completions", {"prompt": [5 + i] * 900, "max_tokens": 1}, Host=host)
        alone = [s.post("/v1/completions", numbered(i), Host=host).json()["choices"][0]["text"] for i in range(40)]
        fds, stop, out = s.n_fds(), multiprocessing.Event(), multiprocessing.Queue()
        probe = multiprocessing.Process(target=probe_health, args=((s.address, idle.address), stop, out))
        probe.start()
        load, points, start = Load(s, kinds, alone), [], time.time()
        while time.time() - start < 60 * a.minutes:
            time.sleep(5)
            s.read_log(), idle.read_log()  # if the log is not read, its pipe becomes full and the server blocks
            s.log = idle.log = ""
            kept = sum(KEPT[name] * n for name, n in load.kept.items())
            points.append((time.time() - start, memory_kb(s.p.pid), kept))
            if len(points) % 60 == 0:
                print(f"{points[-1][0] / 60:.0f} min: {points[-1][1]} KB, {sum(load.rounds.values())} rounds, "
                      f"{len(load.wrong)} wrong", file=sys.stderr, flush=True)
        load.end()
        stop.set()
        times = out.get()
        probe.join()
        s.wait_fds(fds + 1)
        after = s.n_fds()
        expect(s.stop() == 0 and idle.stop() == 0, "the exit status of a server is not 0")
    return points, load, times, (fds, after)


def commit():
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=os.path.dirname(__file__) or ".")
    return found.stdout.strip() or "unknown"


def report(a, points, load, times, fds):
    """Prints the report; returns true if all limits hold."""
    half = points[len(points) // 2:]
    grew = 3600 * slope([(t, kb) for t, kb, _ in half]) / 1024
    kept = 3600 * slope([(t, b) for t, _, b in half]) / 1048576
    p99 = [1e3 * quantile(t, 0.99) for t in times]
    kept_list = ', '.join(f'{n:,} {name} in all, {KEPT[name]} bytes each' for name, n in load.kept.items())
    rounds = ', '.join(f'{name} {n:,}' for name, n in sorted(load.rounds.items()))
    command = ' '.join(['python3', 'test/soak_server.py', *sys.argv[1:]])
    print(f"""# A soak of the server

{datetime.date.today()}, {commit()}. `{command}`; embedded model, {os.cpu_count()} cores.

{sum(load.rounds.values()):,} rounds of clients: {rounds}; {len(load.wrong)} wrong.

| minutes | anonymous resident KB |
|---|---|""")
    for i in range(11):
        t, kb, _ = points[i * (len(points) - 1) // 10]
        print(f"| {t / 60:.1f} | {kb:,} |")
    print(f"""
Growth in the last half: {grew:.2f} MiB an hour, of which {kept:.2f} are kept on purpose ({kept_list or 'nothing'}).
Descriptors before {fds[0]}, after {fds[1]}.

| GET /health | replies | median ms | p99 ms | maximum ms |
|---|---|---|---|---|""")
    for name, t in zip(("loaded server", "idle server"), times):
        print(f"| {name} | {len(t):,} | {1e3 * quantile(t, 0.5):.2f} | {1e3 * quantile(t, 0.99):.2f} | {1e3 * max(t):.1f} |")
    for line in load.wrong[:20]:
        print(f"    {line}")
    checks = {"answers": not load.wrong, "growth": grew - kept < 1 or a.minutes < 60, "p99 of /health": p99[0] <= 5 * p99[1],
              "longest reply": max(times[0]) <= 1, "descriptors": fds[1] <= fds[0] + 1}
    print("\n" + ", ".join(f"{name}: {'ok' if ok else 'MISSED'}" for name, ok in checks.items()))
    return all(checks.values())


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--minutes", type=float, default=60)
    p.add_argument("--kinds", default="", help="names, separated by commas: " + ", ".join(k.__name__ for k in KINDS))
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(not report(a, *soak(a, folder)))


if __name__ == "__main__":
    main()
