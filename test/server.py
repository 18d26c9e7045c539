"""Helpers for tests of toka serve: a server in a subprocess, and a client that can send any bytes."""
import json
import os
import re
import signal
import socket
import subprocess
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOKA = os.environ.get("TOKA_BINARY") or os.path.join(ROOT, "toka")


class Server:
    """./toka serve on a free port; `log` is the text that it has written to standard error so far."""

    def __init__(self, *flags, env=None, wait=True, prefix=(), uds=None, files="off"):
        clean = {k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}
        clean = {**clean, "TOKA_DEVICE": "cpu", "TOKA_ALLOWED_HOSTS": "h,test,anyhost"}
        where = ["--uds", uds] if uds else ["--port", "0"]
        files = ["--files-dir", files] if files else []
        self.p = subprocess.Popen([*prefix, TOKA, "serve", *where, *files, *flags], stderr=subprocess.PIPE, env={**clean, **(env or {})})
        os.set_blocking(self.p.stderr.fileno(), False)
        self.log, self.uds, self.address = "", uds, None
        self.wait_for(r"listening on (?:http://127\.0\.0\.1:(\d+)|unix:)")
        if not uds:
            self.address = ("127.0.0.1", int(re.search(r"127\.0\.0\.1:(\d+)", self.log)[1]))
        if wait:
            self.wait_for("ready\n")

    def read_log(self):
        self.log += (self.p.stderr.read() or b"").decode()
        return self.log

    def wait_for(self, pattern, seconds=60):
        end = time.time() + seconds
        while not re.search(pattern, self.read_log()):
            assert self.p.poll() is None and time.time() < end, f"waited for {pattern!r}, saw {self.log!r}"
            time.sleep(0.01)

    def connect(self, rcvbuf=None):
        return Raw(self.uds or self.address, rcvbuf)

    def get(self, path, **headers):
        with self.connect() as c:
            return c.request("GET", path, **headers)

    def post(self, path, body, **headers):
        with self.connect() as c:
            return c.request("POST", path, body, **headers)

    def metric(self, name, label=""):
        """The value of a metric; if it has several series, of the first whose labels contain `label`."""
        text = self.get("/metrics").body.decode()
        return float(re.search(rf"^toka:{name}{{[^}}]*{label}[^}}]*}} (\S+)$", text, re.M)[1])

    def wait_metric(self, name, want, seconds=60, label=""):
        """Wait until a metric is `want`. The value must be final: this process may sleep for seconds while the server runs on."""
        end = time.time() + seconds
        while (v := self.metric(name, label)) != want:
            assert time.time() < end, f"{name} is {v}, waited for {want}"
            time.sleep(0.02)

    def wait_n_samples(self, want):
        """Wait until the server has received `want` samples in total, not counting cancelled samples."""
        parts = [rf"{x}{{" for x in ("num_requests_running", "num_requests_waiting")]
        parts += [rf'request_success_total{{[^}}]*finished_reason="{x}"' for x in ("stop", "length")]
        end = time.time() + 60
        while True:
            text = self.get("/metrics").body.decode()
            n_samples = sum(float(re.search(rf"^toka:{x}[^}}]*}} (\S+)$", text, re.M)[1]) for x in parts)
            if n_samples == want:
                return
            assert time.time() < end, f"{n_samples} samples, waited for {want}"
            time.sleep(0.02)

    def n_fds(self):
        return len(os.listdir(f"/proc/{self.p.pid}/fd"))

    def wait_fds(self, most, seconds=60):
        """Wait until the server has at most `most` open descriptors. It accepts connections in order: when /health has answered,
        no earlier connection waits to be accepted."""
        self.get("/health")
        end = time.time() + seconds
        while (n := self.n_fds()) > most:
            assert time.time() < end, f"{n} descriptors are open, waited for {most}"
            time.sleep(0.05)

    def stop(self):
        """Stop the server gracefully; returns its exit status."""
        if self.p.poll() is None:
            self.p.terminate()
        status = self.p.wait(60)
        self.read_log()
        self.p.stderr.close()
        return status

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.p.poll() is None:
            self.p.kill()
            self.p.wait()
        if not self.p.stderr.closed:
            self.p.stderr.close()


def wait_handlers(p):
    """Wait until process p has installed its handlers of SIGINT and SIGTERM."""
    end, both = time.time() + 60, 1 << signal.SIGINT - 1 | 1 << signal.SIGTERM - 1
    while True:
        with open(f"/proc/{p.pid}/status") as f:
            caught = re.search(r"SigCgt:\s*(\w+)", f.read())
        if caught and int(caught[1], 16) & both == both:
            return
        assert p.poll() is None and time.time() < end
        time.sleep(0.01)


class Answer:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    def json(self):
        return json.loads(self.body)

    def error(self):
        return self.json()["error"]


class Raw:
    """A connection that sends bytes unchanged and checks the form of each answer strictly."""

    def __init__(self, address, rcvbuf=None):
        self.s = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        if rcvbuf:
            self.s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        self.s.settimeout(60)
        self.s.connect(address)
        self.got = bytearray()

    def send(self, data):
        self.s.sendall(data.encode("latin1") if isinstance(data, str) else data)
        return self

    def fill(self):
        piece = self.s.recv(1 << 18)
        self.got += piece
        return bool(piece)

    def line(self):
        while b"\r\n" not in self.got:
            if not self.fill():
                raise EOFError(self.got)
        at = self.got.index(b"\r\n")
        line = self.got[:at].decode("latin1")
        del self.got[:at + 2]
        return line

    def exactly(self, n):
        while len(self.got) < n:
            if not self.fill():
                raise EOFError(self.got)
        piece = bytes(self.got[:n])
        del self.got[:n]
        return piece

    def head(self):
        version, status, _ = self.line().split(" ", 2)
        assert version == "HTTP/1.1"
        headers = {}
        while line := self.line():
            name, value = line.split(": ", 1)
            assert name.lower() not in headers
            headers[name.lower()] = value
        return int(status), headers

    def chunks(self):
        """Yields the chunks of a chunked body as they arrive."""
        while n := int(self.line(), 16):
            yield self.exactly(n)
            assert self.line() == ""
        assert self.line() == ""

    def answer(self, method="GET"):
        status, headers = self.head()
        if status == 100:
            return Answer(status, headers, b"")
        if method == "HEAD" or status == 204:
            body = b""
        elif headers.get("transfer-encoding") == "chunked":
            body = b"".join(self.chunks())
        elif "content-length" in headers:
            body = self.exactly(int(headers["content-length"]))
        else:
            while self.fill():
                pass
            body, self.got = bytes(self.got), bytearray()
        return Answer(status, headers, body)

    def request(self, method, path, body=None, **headers):
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = {"Host": "test", **({"Content-Length": str(len(data)), "Content-Type": "application/json"} if body is not None else {})}
        lines.update({k.replace("_", "-"): v for k, v in headers.items()})
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items() if v is not None) + "\r\n"
        self.send(head.encode("latin1") + data)
        return self.answer(method)

    def closed(self):
        """True if the server closes the connection and sends no more bytes."""
        try:
            return not self.got and not self.fill()
        except ConnectionResetError:
            return True

    def close(self):
        self.s.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def texts(stream):
    """The text of each choice of a streamed answer, and whether the stream ended with [DONE]."""
    out, done = {}, False
    for event in stream.decode().split("\n\n"):
        if event == "data: [DONE]":
            done = True
        elif event:
            for choice in json.loads(event.removeprefix("data: "))["choices"]:
                text = choice.get("text", choice.get("delta", {}).get("content", ""))
                out[choice["index"]] = out.get(choice["index"], "") + text
    return out, done
