#!/usr/bin/env python3
"""Load tests of toka serve with the embedded model, over loopback. Prints measurements; exits with 1 if a limit is missed.

    test/load.py streams    10,000 streams at once: each must equal the same request alone; p99 of /health must be at most 50 ms
    test/load.py memory     200,000 small requests: resident memory must not grow, and no descriptor may stay open
    test/load.py cpu        the server's own CPU time per token at n = 1,024 without streaming: at most 10 us
    test/load.py            all three; --streams, --requests and --n change the sizes
"""
import argparse
import http.client
import json
import multiprocessing
import os
import random
import re
import resource
import select
import socket
import sys
import time

from server import Server, texts

PROBLEM = "Tom has 12 apples. He buys 7 more apples. How many apples does Tom have now?"


def request(body):
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data


def body_of(data):
    """The body of an answer if it is complete, else None."""
    head, sep, rest = data.partition(b"\r\n\r\n")
    if not sep:
        return None
    assert head.startswith(b"HTTP/1.1 200"), head
    if b"Transfer-Encoding: chunked" not in head:
        n = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
        return rest if len(rest) == n else None
    if not rest.endswith(b"\r\n0\r\n\r\n"):
        return None
    out = []
    while True:
        size, rest = rest.split(b"\r\n", 1)
        if int(size, 16) == 0:
            return b"".join(out)
        out.append(rest[:int(size, 16)])
        rest = rest[int(size, 16) + 2:]


class Connections:
    """Many connections, used by one thread. Connection i sends the requests that `feed(i)` returns, until it returns None; each answer
    is passed to `on_answer(i, body)`."""

    def __init__(self, address, n, feed, on_answer):
        self.epoll, self.conns = select.epoll(), {}
        self.feed, self.on_answer, self.left = feed, on_answer, n
        for i in range(n):
            s = socket.socket()
            s.connect(address)
            s.setblocking(False)
            self.conns[s.fileno()] = [s, i, bytearray()]
            self.epoll.register(s.fileno(), select.EPOLLIN)

    def start(self):
        for fd in list(self.conns):
            self.next(fd)

    def next(self, fd):
        s, i, got = self.conns[fd]
        body = self.feed(i)
        got.clear()
        if body is None:
            self.epoll.unregister(fd)
            s.close()
            del self.conns[fd]
            self.left -= 1
        else:
            assert s.send(body) == len(body)

    def run(self, each_second=lambda: None):
        last = time.time()
        while self.left:
            for fd, _ in self.epoll.poll(0.2):
                s, i, got = self.conns[fd]
                piece = s.recv(1 << 16)
                assert piece, f"connection {i} was closed"
                got += piece
                if (got.endswith(b"0\r\n\r\n") or got.endswith(b"}")) and (body := body_of(bytes(got))) is not None:
                    self.on_answer(i, body)
                    self.next(fd)
            if time.time() - last > 1:
                last = time.time()
                each_second()


def probe_health(address, stop, out):
    """Measures GET /health, 50 times per second; runs in its own process."""
    times, c = [], http.client.HTTPConnection(*address)
    c.connect()
    while not stop.is_set():
        start = time.perf_counter()
        c.request("GET", "/health")
        assert c.getresponse().read() == b'{"status":"ok"}'
        times.append(time.perf_counter() - start)
        time.sleep(0.02)
    out.put(times)


def health_times(address, during):
    """Calls during(); returns its result and the sorted times of /health during the call."""
    stop, out = multiprocessing.Event(), multiprocessing.Queue()
    probe = multiprocessing.Process(target=probe_health, args=(address, stop, out))
    probe.start()
    result = during()
    stop.set()
    times = sorted(out.get())
    probe.join()
    return result, times


def streams(n):
    """Runs n streams at once: (seconds, tokens, maximum of connections, /health times before the load and under load)."""
    rnd = random.Random(1)
    bodies = [{"prompt": f"{PROBLEM} {i}", "max_tokens": rnd.randint(2, 12), "seed": i, "temperature": 1, "stream": True,
               "stream_options": {"include_usage": False}} for i in range(40)]
    with Server("--kv-tokens", "200000") as s:
        alone = [texts(s.post("/v1/completions", b).body) for b in bodies]
        assert all(done for _, done in alone)
        fds, before, sent = s.n_fds(), s.metric("generation_tokens_total"), set()
        _, idle = health_times(s.address, lambda: time.sleep(3))
        peak = 0

        def feed(i):
            if i in sent:
                return None
            sent.add(i)
            return request(bodies[i % 40])

        def on_answer(i, body):
            assert texts(body) == alone[i % 40], (i, texts(body), alone[i % 40])

        def watch():
            nonlocal peak
            peak = max(peak, s.metric("http_connections"))

        def load():
            connections = Connections(s.address, n, feed, on_answer)
            start = time.time()
            watch()
            connections.start()
            connections.run(watch)
            return time.time() - start

        seconds, times = health_times(s.address, load)
        tokens = s.metric("generation_tokens_total") - before
        s.wait_fds(fds)
        assert s.stop() == 0
    return seconds, tokens, peak, idle, times


def rss_kb(pid):
    with open(f"/proc/{pid}/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmRSS"))


def memory(n, at_once=200):
    """Runs n small requests of many kinds: (resident KB after each tenth of them, descriptors that stayed open)."""
    rnd = random.Random(2)
    bodies = [request(b) for b in (
        [{"prompt": PROBLEM, "max_tokens": 1, "seed": i} for i in range(20)] + [{"prompt": PROBLEM, "max_tokens": 2, "stream": True}] * 5 +
        [{"prompt": [PROBLEM, "x"], "max_tokens": 1, "logprobs": 2}] * 2 +
        [{"prompt": PROBLEM, "max_tokens": 1, "n": 3, "stop": ["a", "e"]}] * 2)]
    with Server("--kv-tokens", "20000") as s:
        s.get("/health")
        fds, done, sizes = s.n_fds(), 0, []

        def feed(i):
            return rnd.choice(bodies) if done + at_once <= n else None

        def on_answer(i, body):
            nonlocal done
            done += 1
            if done % (n // 10) == 0:
                sizes.append(rss_kb(s.p.pid))

        connections = Connections(s.address, at_once, feed, on_answer)
        connections.start()
        connections.run()
        time.sleep(0.5)
        left = s.n_fds() - fds
        assert s.stop() == 0
    return sizes, left


def server_cpu(s):
    """CPU seconds of the event loop and the workers, and the seconds of the engine's commits, which include its events."""
    total = 0
    for tid in os.listdir(f"/proc/{s.p.pid}/task"):
        with open(f"/proc/{s.p.pid}/task/{tid}/comm") as f, open(f"/proc/{s.p.pid}/task/{tid}/schedstat") as g:
            if int(tid) == s.p.pid or f.read().strip() == "toka-worker":
                total += int(g.read().split()[0]) / 1e9
    text = s.get("/metrics").body.decode()
    return total, float(re.search(r'engine_seconds_total.*phase="commit"} (\S+)', text)[1])


def cpu(n, tokens=128):
    """Runs one request of n samples, not streamed: (CPU seconds of event loop and workers, seconds of commits, tokens)."""
    with Server("--max-num-seqs", "1024", "--kv-tokens", "262144") as s:
        body = {"prompt": PROBLEM, "n": n, "max_tokens": tokens, "ignore_eos": True, "temperature": 1, "top_p": 0.9}
        s.post("/v1/completions", {**body, "n": 2})
        before = server_cpu(s)
        a = s.post("/v1/completions", body).json()
        after = server_cpu(s)
        assert len(a["choices"]) == n and a["usage"]["completion_tokens"] == n * tokens
        return after[0] - before[0], after[1] - before[1], n * tokens


def main():
    p = argparse.ArgumentParser()
    p.add_argument("what", nargs="?", default="all", choices=["all", "streams", "memory", "cpu"])
    p.add_argument("--streams", type=int, default=10000)
    p.add_argument("--requests", type=int, default=200000)
    p.add_argument("--n", type=int, default=1024)
    a = p.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ok = True
    if a.what in ("all", "streams"):
        seconds, tokens, peak, idle, times = streams(a.streams)
        p99, idle99 = (x[int(0.99 * (len(x) - 1))] for x in (times, idle))
        print(f"streams: {a.streams} at once (maximum of connections: {peak:.0f}), all equal to single requests, {seconds:.1f} s, "
              f"{tokens / seconds:.0f} tok/s; /health {len(times)} times: median {1e3 * times[len(times) // 2]:.1f} ms, "
              f"p99 {1e3 * p99:.1f} ms, maximum {1e3 * times[-1]:.1f} ms; before the load p99 {1e3 * idle99:.1f} ms", flush=True)
        ok &= p99 <= 0.05 and peak >= a.streams
    if a.what in ("all", "memory"):
        sizes, left = memory(a.requests)
        print(f"memory: {a.requests} requests, resident KB after each tenth: {sizes}; descriptors that stayed open: {left}", flush=True)
        ok &= sizes[-1] <= 1.02 * sizes[0] + 1024 and left <= 0
    if a.what in ("all", "cpu"):
        used, commits, tokens = cpu(a.n)
        print(f"cpu: n = {a.n}, {tokens} tokens: {1e6 * used / tokens:.2f} us of event loop and workers per token, "
              f"{1e6 * commits / tokens:.2f} us of the engine's commits, which include its events", flush=True)
        ok &= (used + commits) / tokens <= 10e-6
    sys.exit(not ok)


if __name__ == "__main__":
    main()
