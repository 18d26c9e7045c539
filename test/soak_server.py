#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A soak of toka serve: 15 kinds of clients at once for an hour, while memory, descriptors and /health are watched.

    python3 test/soak_server.py                     one hour (set TMPDIR for the folder of files)
    python3 test/soak_server.py --minutes 5         the same in small; the bound on growth is then only printed
    python3 test/soak_server.py --kinds batches     only some kinds, to find the one that grows

The KV cache is small and used whole before memory is watched; the length predictor's table, 3 MB, is memory from the
first use of each place and full after a quarter of an hour: the first half is the warm-up.

Beside the loaded server runs an idle one, and one process times GET /health on both in turns. So the ratio of the two
says what the load does inside the server, not what the machine does to every process on it.

Prints a report in markdown (test/results/soak-server.md is one). Exit status 1 if an answer was wrong, if memory of the last half grew
faster than 1 MiB an hour beyond what is kept on purpose (KEPT), if the 99th percentile of /health was over 5 times the
idle server's, if a reply of /health took over a second, or if descriptors were left.
Needs ./toka and the standard library only.
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

# What the server keeps on purpose, in bytes for each: the record of a batch that has ended. OpenAI's API cannot delete one.
KEPT = {"batches": 1024}


class Wrong(Exception):
    """An answer that is not what the request must get."""


def expect(ok, what):
    if not ok:
        raise Wrong(str(what)[:500])


class Client:
    """What one thread of the generator uses: a connection to the server under load, opened anew when it is closed."""

    def __init__(self, server, seed, alone):
        self.server, self.random, self.alone = server, random.Random(seed), alone
        self.conn = None

    def host(self):
        return "%s:%d" % self.server.address

    def ask(self, method, path, body=None, **headers):
        """One request on the kept connection."""
        self.conn = self.conn or self.server.connect()
        answer = self.conn.request(method, path, body, Host=self.host(), **headers)
        if answer.headers.get("connection") == "close":
            self.drop()
        return answer

    def good(self, method, path, body=None, **headers):
        answer = self.ask(method, path, body, **headers)
        expect(answer.status == 200, (path, answer.status, answer.body))
        return answer.json()

    def begin(self, body, path="/v1/completions", **connect):
        """A connection of its own on which a request was sent and no answer was read."""
        data = json.dumps(body).encode()
        c = self.server.connect(**connect)
        c.send(f"POST {path} HTTP/1.1\r\nHost: {self.host()}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return c

    def drop(self):
        if self.conn:
            self.conn.close()
        self.conn = None


def reset(conn):
    """Ends a connection with RST, as a client that crashed."""
    conn.s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    conn.close()


def read_stream(conn):
    """The pieces of text of a streamed answer, joined, and whether [DONE] came."""
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


# ---- The 15 kinds. Each function is one round of one client; it raises Wrong where an answer is not right ----


def completion(c):
    """A prompt of 40: each must get the text that it gets alone."""
    i = c.random.randrange(40)
    text = c.good("POST", "/v1/completions", numbered(i))["choices"][0]["text"]
    expect(text == c.alone[i], (i, text, c.alone[i]))


def samples(c):
    """Many samples of one prompt, with log-probabilities."""
    n = c.random.randint(2, 24)
    body = {"prompt": PROBLEM, "n": n, "max_tokens": 8, "temperature": 1, "logprobs": 3, "seed": c.random.randrange(1000)}
    choices = c.good("POST", "/v1/completions", body)["choices"]
    expect(len(choices) == n and all(len(x["logprobs"]["tokens"]) <= 8 for x in choices), len(choices))


def stream(c):
    i = c.random.randrange(40)
    with c.begin({**numbered(i), "stream": True}) as conn:
        text, done = read_stream(conn)
    expect(done and text == c.alone[i], (i, text, c.alone[i]))


def chat(c):
    body = {"messages": CHAT, "max_tokens": 24, "stop": ["\n\n", "zebra"], "logit_bias": {"65": -5}, "frequency_penalty": 0.2}
    message = c.good("POST", "/v1/chat/completions", body)["choices"][0]["message"]
    expect(message["role"] == "assistant" and message["content"], message)


def chat_stream(c):
    body = {"messages": CHAT, "max_tokens": 24, "stream": True, "temperature": 0.8, "top_p": 0.9, "stream_options": {"include_usage": True}}
    with c.begin(body, "/v1/chat/completions") as conn:
        expect(read_stream(conn)[1], "no [DONE]")


def long_prompt(c):
    words = " ".join(str(c.random.randrange(1000)) for _ in range(200))
    a = c.good("POST", "/v1/completions", {"prompt": words, "max_tokens": 2, "prompt_logprobs": 1, "echo": True})
    expect(a["usage"]["completion_tokens"] <= 2, a["usage"])


def leaves_stream(c):
    """A client that goes away in the middle of its stream."""
    conn = c.begin({"prompt": PROBLEM, "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 4})
    conn.fill()
    reset(conn) if c.random.random() < 0.5 else conn.close()


def leaves_waiting(c):
    """A client that goes away before its answer comes."""
    conn = c.begin({"prompt": PROBLEM, "max_tokens": 400, "ignore_eos": True, "n": 8})
    time.sleep(c.random.random() * 0.05)
    reset(conn) if c.random.random() < 0.5 else conn.close()


def half_request(c):
    """A head or a body that never ends, given up by its client."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {c.host()}\r\nContent-Length: 100000\r\n\r\n{{\"prompt\": \"" + "x" * 5000
    with c.server.connect() as conn:
        conn.send(head[:c.random.randrange(len(head))])
        time.sleep(c.random.random() * 0.2)


def slow_reader(c):
    """A client that takes its stream in small pieces, and some of it never."""
    with c.begin({"prompt": PROBLEM, "max_tokens": 300, "ignore_eos": True, "stream": True, "logprobs": 5}, rcvbuf=2048) as conn:
        for _ in range(20):
            conn.s.recv(512)
            time.sleep(0.05)


def mistakes(c):
    """Requests that must be refused, each with its own status."""
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
    found = c.good("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    expect(c.good("POST", "/detokenize", {"tokens": found})["prompt"] == text, text)


def pipelined(c):
    """Twenty requests sent at once on one connection."""
    with c.server.connect() as conn:
        conn.send(f"GET /v1/models HTTP/1.1\r\nHost: {c.host()}\r\n\r\n" * 10 + f"GET /metrics HTTP/1.1\r\nHost: {c.host()}\r\n\r\n" * 10)
        for _ in range(20):
            expect(conn.answer().status == 200, "pipelined")


def files(c):
    """Uploads of half a megabyte, read back and deleted."""
    data = c.random.randbytes(500_000)
    made = upload(c, data, "user_data")
    expect(c.ask("GET", f"/v1/files/{made['id']}/content").body == data, "a file came back otherwise")
    expect(c.good("GET", "/v1/files")["object"] == "list", "list")
    expect(c.good("DELETE", f"/v1/files/{made['id']}")["deleted"], made)


def batches(c):
    """A batch of 40 lines; of three, one is cancelled. All its files are deleted."""
    lines = "".join(json.dumps({"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions",
                                "body": {"prompt": f"Tom has {i}", "max_tokens": 4, "temperature": 1}}) + "\n" for i in range(40))
    made = upload(c, lines.encode(), "batch")
    batch = c.good("POST", "/v1/batches", {"input_file_id": made["id"], "endpoint": "/v1/completions", "completion_window": "24h"})
    cancelled = c.random.random() < 1 / 3
    if cancelled:  # it may have ended before
        answer = c.ask("POST", f"/v1/batches/{batch['id']}/cancel")
        expect(answer.status == 200 or "cannot be cancelled" in answer.error()["message"], (answer.status, answer.body))
    while batch["status"] not in ("completed", "cancelled"):
        expect(batch["status"] in ("validating", "in_progress", "finalizing", "cancelling"), batch)
        time.sleep(0.2)
        batch = c.good("GET", f"/v1/batches/{batch['id']}")
    counts = batch["request_counts"]
    expect(cancelled or counts == {"total": 40, "completed": 40, "failed": 0}, batch)
    for name in ("input_file_id", "output_file_id", "error_file_id"):
        if batch[name]:
            c.good("DELETE", f"/v1/files/{batch[name]}")
    return "batches"


KINDS = {  # clients of each kind, and the seconds that each rests between two rounds
    completion: (2, 0.05), samples: (1, 0.1), stream: (2, 0.05), chat: (1, 0.1), chat_stream: (1, 0.1), long_prompt: (1, 0.5),
    leaves_stream: (1, 0.3), leaves_waiting: (1, 0.3), half_request: (1, 0.1), slow_reader: (1, 0.5), mistakes: (1, 0.05),
    tokens: (1, 0.1), pipelined: (1, 0.2), files: (1, 0.3), batches: (1, 0.5)}


def numbered(i):
    return {"prompt": f"{PROBLEM} {i}", "max_tokens": 3 + i % 10, "seed": i, "temperature": 1}


def upload(c, data, purpose):
    mark = "soak-boundary-7d1f"
    form = (f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n--{mark}\r\n'
            'Content-Disposition: form-data; name="file"; filename="soak"\r\n\r\n').encode() + data + f"\r\n--{mark}--\r\n".encode()
    return c.good("POST", "/v1/files", form, Content_Type=f"multipart/form-data; boundary={mark}")


# ---- The load, and what is watched ----


class Load:
    """The generator: a thread for each client, counts of rounds, and the first wrong answers."""

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
                c.drop()
                with self.lock:
                    self.wrong.append(f"{kind.__name__}: {type(e).__name__}: {e}")
                    print(self.wrong[-1], file=sys.stderr, flush=True)
            with self.lock:
                self.rounds[kind.__name__] += 1
                if kept:
                    self.kept[kept] += 1
            self.stop.wait(KINDS[kind][1] * 2 * c.random.random())
        c.drop()

    def end(self):
        self.stop.set()
        for t in self.threads:
            t.join(120)


def probe_health(addresses, stop, out):
    """Times GET /health on each server in turns, 20 a second each, on connections that are kept."""
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
    """Anonymous resident memory: the heap and the stacks, without files that are mapped."""
    with open(f"/proc/{pid}/status") as f:
        return int(re.search(r"RssAnon:\s+(\d+)", f.read())[1])


def slope(points):
    """Least squares: y for each unit of x."""
    n, sx, sy = len(points), sum(x for x, _ in points), sum(y for _, y in points)
    below = n * sum(x * x for x, _ in points) - sx * sx
    return (n * sum(x * y for x, y in points) - sx * sy) / below if below else 0.0


def quantile(times, share):
    return sorted(times)[int(share * (len(times) - 1))]


def soak(a, folder):
    """Runs the load: (points of (seconds, KB, bytes kept on purpose), load, times of /health, descriptors before and after)."""
    kinds = [k for k in KINDS if not a.kinds or k.__name__ in a.kinds.split(",")]
    with Server("--kv-tokens", "8192", files=folder) as s, Server("--kv-tokens", "1024", "-t", "1") as idle:
        host = "%s:%d" % s.address
        for i in range(12):  # the KV cache is memory from the first use of each page: use them all
            s.post("/v1/completions", {"prompt": [5 + i] * 900, "max_tokens": 1}, Host=host)
        alone = [s.post("/v1/completions", numbered(i), Host=host).json()["choices"][0]["text"] for i in range(40)]
        fds, stop, out = s.n_fds(), multiprocessing.Event(), multiprocessing.Queue()
        probe = multiprocessing.Process(target=probe_health, args=((s.address, idle.address), stop, out))
        probe.start()
        load, points, start = Load(s, kinds, alone), [], time.time()
        while time.time() - start < 60 * a.minutes:
            time.sleep(5)
            s.read_log(), idle.read_log()  # a server whose log nobody reads stops when the pipe is full
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
        expect(s.stop() == 0 and idle.stop() == 0, "the server did not end well")
    return points, load, times, (fds, after)


def commit():
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=os.path.dirname(__file__) or ".")
    return found.stdout.strip() or "unknown"


def report(a, points, load, times, fds):
    """Prints the report; true if every bound holds."""
    half = points[len(points) // 2:]
    grew = 3600 * slope([(t, kb) for t, kb, _ in half]) / 1024
    kept = 3600 * slope([(t, b) for t, _, b in half]) / 1048576
    p99 = [1e3 * quantile(t, 0.99) for t in times]
    print(f"""# A soak of the server

{datetime.date.today()}, {commit()}. `{' '.join(['python3', 'test/soak_server.py', *sys.argv[1:]])}`; embedded model, {os.cpu_count()} cores.

{sum(load.rounds.values()):,} rounds of clients: {', '.join(f'{name} {n:,}' for name, n in sorted(load.rounds.items()))}; {len(load.wrong)} wrong.

| minutes | anonymous resident KB |
|---|---|""")
    for i in range(11):
        t, kb, _ = points[i * (len(points) - 1) // 10]
        print(f"| {t / 60:.1f} | {kb:,} |")
    print(f"""
Growth in the last half: {grew:.2f} MiB an hour, of which {kept:.2f} are kept on purpose ({', '.join(f'{n:,} {name} in all, {KEPT[name]} bytes each' for name, n in load.kept.items()) or 'nothing'}).
Descriptors before {fds[0]}, after {fds[1]}.

| GET /health | replies | median ms | p99 ms | most ms |
|---|---|---|---|---|""")
    for name, t in zip(("loaded server", "idle server beside it"), times):
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
    p.add_argument("--kinds", default="", help="names with commas: " + ", ".join(k.__name__ for k in KINDS))
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(not report(a, *soak(a, folder)))


if __name__ == "__main__":
    main()
