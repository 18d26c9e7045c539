"""Tests of toka serve at the level of the network: bytes, timeouts and signals. test_api.c and test_openai.py test the meaning of
request bodies. Run through test/run.sh."""
import json
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.parse

import pytest

from server import ROOT, TOKA, Raw, Server, texts

PROBLEM = "Tom has 12 apples. He buys 7 more apples. How many apples does Tom have now?"
LONG = {"prompt": PROBLEM, "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    with Server("--read-timeout", "30") as s:
        yield s


def small(max_tokens=4, **more):
    return {"prompt": PROBLEM, "max_tokens": max_tokens, "temperature": 0, **more}


def raw_post(body, extra="", version="1.1"):
    return f"POST /v1/completions HTTP/{version}\r\nHost: h\r\n{extra}Content-Length: {len(body)}\r\n\r\n{body}"


def peak_memory(s):
    """The peak resident memory of the server, in bytes."""
    with open(f"/proc/{s.p.pid}/status") as f:
        return int(re.search(r"VmHWM:\s*(\d+)", f.read())[1]) << 10


# ---- Routes ----

def test_health_version_page(server):
    assert server.get("/health").json() == {"status": "ok"}
    assert set(server.get("/version").json()) == {"version"}
    page = server.get("/")
    assert page.status == 200 and page.headers["content-type"].startswith("text/html") and b"<" in page.body
    assert server.get("/v1/models").json()["data"][0]["id"] == server.get("/v1/models/embedded").json()["id"] == "embedded"
    date = server.get("/health").headers["date"]
    assert abs(time.mktime(time.strptime(date, "%a, %d %b %Y %H:%M:%S GMT")) - time.timezone - time.time()) < 5


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/", "/v1/modelsx", "/../etc/passwd", "//health", "/%2e%2e/health",
                                  "/V1/MODELS"])
def test_unknown_route(server, path):
    a = server.get(path)
    assert a.status == 404 and a.error()["type"] == "not_found_error"


def test_paths_are_decoded(server):
    assert server.get("/v1/models/%65mbedded").status == 200
    assert server.get("/v1/models/org%2Fname").status == 404
    assert server.get("/v1/models/x%zz").status == server.get("/v1/models/x%00").status == 400
    assert server.get("http://anyhost/health?x=1").status == 200


def test_methods(server):
    a = server.get("/v1/completions")
    assert a.status == 405 and a.headers["allow"] == "POST, OPTIONS"
    assert server.post("/health", {}).headers["allow"] == "GET, HEAD, OPTIONS"
    with server.connect() as c:
        head = c.request("HEAD", "/v1/models")
        assert head.status == 200 and head.body == b"" and int(head.headers["content-length"]) > 10
        assert c.request("GET", "/v1/models").status == 200  # the same connection can still be used
        for method in ("PUT", "PATCH", "TRACE", "BREW"):
            assert c.request(method, "/health").status == 405
        a = c.request("OPTIONS", "/v1/completions", Origin="http://a.b")
        assert a.status == 204 and a.headers["allow"] == "POST, OPTIONS"
        assert not any(h.startswith("access-control") for h in a.headers)
        assert c.request("OPTIONS", "*").status == 204
        assert c.request("CONNECT", "/health").status == 405
    for target in ("M-SEARCH *", "NOTIFY *", "CONNECT a.b:443", "BREW x"):
        with server.connect() as c:
            a = c.send(f"{target} HTTP/1.1\r\nHost: h\r\n\r\n").answer()
            assert a.status == 501 and "method" in a.error()["message"] and c.closed()


def test_transfer_codings(server):
    for lines, status in ((["gzip, chunked"], 501), (["gzip", "chunked"], 501), (["gzip;q=1, chunked"], 501), (["identity"], 501),
                          (["br,deflate , Chunked"], 501),
                          (["chunked, gzip"], 400), (["chunked, chunked"], 400), (["chunked", "chunked"], 400), (["chunked", "gzip"], 400),
                          ([""], 400), (["gzip,"], 400), (["chunked,"], 400), ([",chunked"], 400), (["gzip,,chunked"], 400),
                          (["gzip, chunked, chunked"], 400)):
        with server.connect() as c:
            c.send("POST /v1/completions HTTP/1.1\r\nHost: h\r\n" + "".join(f"Transfer-Encoding: {x}\r\n" for x in lines) + "\r\n0\r\n\r\n")
            a = c.answer()
            assert a.status == status and ("only chunked is known" in a.error()["message"]) == (status == 501) and c.closed(), lines


def test_refused_head_requests_get_no_body(server):
    """A HEAD request that is refused for any reason: the answer has the same head as the answer to GET, and no body."""
    h = "Host: h\r\n"
    cases = [(status, text) for status, text in (
        (400, "/health HTTP/1.1\r\n\r\n"), (400, "/health HTTP/1.1\r\nHost: a b\r\n\r\n"), (400, f"/health HTTP/1.1\r\n{h}{h}\r\n"),
        (400, "/health HTTP/1.1\n"),
        (400, f"x HTTP/1.1\r\n{h}\r\n"), (400, f"* HTTP/1.1\r\n{h}\r\n"), (400, f"/%zz HTTP/1.1\r\n{h}\r\n"),
        (400, f" /health HTTP/1.1\r\n{h}\r\n"), (400, "/\r\n\r\n"),
        (400, f"/health HTTP/1.1\r\n{h}A : b\r\n\r\n"), (400, f"/health HTTP/1.1\r\n{h}Content-Length: x\r\n\r\n"),
        (403, "/health HTTP/1.1\r\nHost: evil.com\r\n\r\n"),
        (404, f"/nothing HTTP/1.1\r\n{h}\r\n"), (405, f"/v1/completions HTTP/1.1\r\n{h}\r\n"),
        (413, f"/health HTTP/1.1\r\n{h}Content-Length: 99999999\r\n\r\n"),
        (413, f"/health HTTP/1.1\r\n{h}Content-Length: 99999999999999999999\r\n\r\n"),
        (400, f"/health HTTP/1.1\r\n{h}Transfer-Encoding: chunked\r\n\r\nx\r\n"),
        (414, "/" + "a" * 9000), (414, f"/{'a' * 9000} HTTP/1.1\r\n{h}\r\n"),
        (415, f"/health HTTP/1.1\r\n{h}Content-Encoding: gzip\r\n\r\n"),
        (417, f"/health HTTP/1.1\r\n{h}Expect: x\r\n\r\n"), (431, f"/health HTTP/1.1\r\n{h}" + "A: b\r\n" * 101 + "\r\n"),
        (431, f"/health HTTP/1.1\r\n{h}A: " + "b" * 33000),
        (501, f"/health HTTP/1.1\r\n{h}Transfer-Encoding: gzip, chunked\r\n\r\n"), (505, f"/health HTTP/2.0\r\n{h}\r\n"))]
    for status, text in cases:
        answers = []
        for method in ("GET", "HEAD"):
            with server.connect() as c:
                a = c.send(f"{method} {text}").answer(method)
                c.s.shutdown(socket.SHUT_WR)
                assert a.status == status and c.closed(), (method, text[:99])
                answers.append(a)
        assert len(answers[0].body) > 0 == len(answers[1].body)
        for name in ("content-length", "content-type", "connection"):
            assert answers[0].headers.get(name) == answers[1].headers.get(name), text[:99]


def test_refused_head_with_a_key_or_too_late():
    with Server("--api-key", "k", "--read-timeout", "0.5") as s:
        for status, text in ((401, "/v1/models HTTP/1.1\r\nHost: h\r\n\r\n"), (408, "/health HTTP/1.1\r\nHos"), (408, "")):
            with s.connect() as c:
                a = c.send(f"HEAD {text}").answer("HEAD")
                c.s.shutdown(socket.SHUT_WR)
                assert a.status == status and int(a.headers["content-length"]) > 10 and c.closed(), text


def test_byte_order_marks(tmp_path):
    """A byte order mark before a body or at the start of a file is accepted: some editors and Windows tools write one."""
    bom = b"\xef\xbb\xbf"
    with Server(files=str(tmp_path)) as s:
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}
        bodies = {"/v1/completions": small(), "/v1/chat/completions": chat,
                  "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [5]}}
        for path, body in bodies.items():
            data = json.dumps(body).encode()
            plain, marked = s.post(path, data, Content_Type="application/json"), s.post(path, bom + data, Content_Type="application/json")
            assert plain.status == marked.status == 200, marked.body
            assert s.post(path, bom + bom + data).status == s.post(path, bom).status == s.post(path, b" " + bom + data).status == 400
        line = json.dumps({"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": small()}).encode()
        form = b"--b\r\nContent-Disposition: form-data; name=purpose\r\n\r\nbatch\r\n" \
               b"--b\r\nContent-Disposition: form-data; name=file; filename=x\r\n\r\n%s\r\n--b--" % (bom + line)
        file = s.post("/v1/files", form, Content_Type="multipart/form-data; boundary=b").json()["id"]
        assert s.get(f"/v1/files/{file}/content").body == bom + line
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = s.post("/v1/batches", bom + json.dumps(body).encode()).json()["id"]
        end = time.time() + 60
        while (b := s.get(f"/v1/batches/{batch}").json())["status"] != "completed":
            assert time.time() < end and b["status"] != "failed", b
            time.sleep(0.02)
        assert b["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


def status_with_host(s, host, method="GET", path="/v1/models", body=b""):
    """The status of a request with this Host header; None: HTTP/1.0 without Host."""
    lines = "" if host is None else f"Host: {host}\r\n"
    lines += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
    with s.connect() as c:
        a = c.send((f"{method} {path} HTTP/1.{int(host is not None)}\r\n{lines}\r\n").encode("latin1") + body).answer(method)
    if a.status == 403:
        assert a.error()["type"] == "authentication_error" and "--allowed-hosts" in a.error()["message"]
    return a.status


def test_hosts(tmp_path):
    """DNS rebinding: a web page whose host name resolves to this server must not read or run anything. Host must name this machine."""
    ours = ["localhost", "LocalHost", "localhost.", "a.localhost", "127.0.0.1", "127.0.0.1.", "127.1.2.3", "[::1]", "[0:0:0:0:0:0:0:1]",
            "[::1%25lo]", "[::ffff:127.0.0.1]", socket.gethostname()]
    others = ["evil.com", "EVIL.com", "evil.com.", "localhost.evil.com", "evillocalhost", "127.0.0.1.evil.com", "10.1.2.3", "0.0.0.0",
              "128.0.0.1", "[::2]", "[::]", "[fe80::1%25lo]", "[::ffff:10.0.0.1]", "2130706433", "127.1", "localhost%2eevil.com", "*",
              "local%68ost", "..", "localhost..", ""]
    hosts = [(h, 200) for h in ours] + [(h, 403) for h in others]
    evil = {"Origin": "http://evil.com", "Sec_Fetch_Site": "same-origin"}
    with Server(env={"TOKA_ALLOWED_HOSTS": ""}) as s:
        port = s.address[1]
        for host, status in hosts:
            for suffix in ("", f":{port}", ":1", ":") if host else ("",):
                assert status_with_host(s, host + suffix) == status, host + suffix
        assert status_with_host(s, None) == 200
        for path in ("/", "/health", "/metrics", "/v1/files", "/v1/batches", "/nothing", "*"):
            for method in ("GET", "HEAD", "DELETE", "OPTIONS"):
                if path != "*" or method == "OPTIONS":
                    with s.connect() as c:
                        assert c.request(method, path, Host=f"evil.com:{port}").status == 403, (method, path)
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/files", "/v1/batches"):
            a = s.post(path, small(), Host=f"evil.com:{port}", **{**evil, "Origin": f"http://evil.com:{port}"})
            assert a.status == 403 and "evil.com" in a.error()["message"]
        for forwarded in ("X-Forwarded-Host", "Forwarded", "X-Host", "X-Original-Host"):
            with s.connect() as c:
                assert c.request("GET", "/v1/models", Host="evil.com", **{forwarded: "localhost"}).status == 403
        # the host of an absolute target has precedence over Host
        assert status_with_host(s, "localhost", path="http://evil.com/v1/models") == 403
        assert status_with_host(s, "evil.com", path=f"http://127.0.0.1:{port}/v1/models") == 200
        assert status_with_host(s, "localhost", path="http://localhost@evil.com/v1/models") == 400
        assert status_with_host(s, "localhost\r\nHost: evil.com") == status_with_host(s, "evil.com\r\nHost: localhost") == 400
        for bad in ("a:b", "a:1:2", "[::1", "::1", "[::1]x", "[localhost]", "a@b", "a b", "[::1]:x"):
            assert status_with_host(s, bad) == 400, bad
        # a page of this server has the server's origin, a page of another port has not
        for origin, status in ((f"http://localhost:{port}", 200), (f"http://LOCALHOST:{port}", 200), ("http://localhost:1", 403),
                               ("http://evil.com", 403)):
            assert s.post("/v1/completions", small(), Host=f"localhost:{port}", Origin=origin).status == status
    allowed = "llm.example.org, *.sub.org,.both.org, 10.0.0.9,[fd00::9],fd00::8, named:8080"
    with Server("--allowed-hosts", allowed, env={"TOKA_ALLOWED_HOSTS": ""}) as s:
        for host in ("llm.example.org", "LLM.example.org.", "a.sub.org:1", "a.b.sub.org", "both.org", "a.both.org", "10.0.0.9:9",
                     "[fd00::9]:9", "[fd00:0::8]", "named:8080", "localhost"):
            assert status_with_host(s, host) == 200, host
        for host in ("example.org", "a.llm.example.org", "sub.org", "xsub.org", "xboth.org", "named", "named:80", "10.0.0.99",
                     "[fd00::7]", "evil.com"):
            assert status_with_host(s, host) == 403, host
    with Server("--allowed-hosts", "*") as s:
        assert status_with_host(s, "evil.com") == 200
    with Server("--api-key", "k", env={"TOKA_ALLOWED_HOSTS": ""}) as s:  # with keys, any host is allowed: a web page has no key
        assert status_with_host(s, "evil.com", path="/health") == 200 and status_with_host(s, "evil.com") == 401
        assert s.get("/v1/models", Host="evil.com", Authorization="Bearer k").status == 200
    with Server("--api-key", "k", "--allowed-hosts", "good.com") as s:
        assert status_with_host(s, "evil.com", path="/health") == 403 and status_with_host(s, "good.com", path="/health") == 200
    path = str(tmp_path / "s")
    with Server(uds=path, env={"TOKA_ALLOWED_HOSTS": ""}) as s:  # any host is allowed: a web page cannot reach a Unix socket
        assert s.get("/v1/models", Host="evil.com").status == 200
    with Server("--allowed-hosts", "good.com", uds=path) as s:
        assert s.get("/v1/models", Host="evil.com").status == 403 and s.get("/v1/models", Host="good.com").status == 200
    for wrong in ("http://a.b", "a b", "a/b", "a,*.*", "*a", "*.", ".", "a:b"):
        r = subprocess.run([TOKA, "serve", "--port", "0", "--allowed-hosts", wrong], capture_output=True, timeout=60)
        assert r.returncode == 1 and b"--allowed-hosts: '" in r.stderr, wrong


def own_address():
    """An address of this machine that is not a loopback address; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            return probe.getsockname()[0]
        except OSError:
            return None


def test_hosts_on_all_interfaces():
    """A server on 0.0.0.0 accepts as Host the address at which the connection arrived. Without a key it prints one warning."""
    def listen(*flags, **env):
        p = subprocess.Popen([TOKA, "serve", "--port", "0", "--files-dir", "off", *flags], stderr=subprocess.PIPE, text=True,
                             env={**os.environ, "TOKA_DEVICE": "cpu", **env})
        log = []
        while "ready" not in "".join(log[-1:]):
            log.append(p.stderr.readline())
            assert log[-1], log
        return p, "".join(log)

    def get(address, port, host):
        with Raw((address, port)) as c:
            return c.send(f"GET /version HTTP/1.1\r\nHost: {host}\r\n\r\n").answer().status

    p, log = listen("--host", "0.0.0.0")
    try:
        port, own = int(re.search(r"listening on http://0\.0\.0\.0:(\d+)", log)[1]), own_address()
        assert len(re.findall("warning", log)) == 1 and re.search(r"--host 0\.0\.0\.0 and no --api-key", log)
        assert get("127.0.0.1", port, f"0.0.0.0:{port}") == get("127.0.0.1", port, f"localhost:{port}") == 200
        assert get("127.0.0.1", port, "evil.com") == get("127.0.0.1", port, "10.255.255.254") == 403
        if own:
            assert get(own, port, f"{own}:{port}") == get(own, port, own) == get(own, port, "localhost") == 200
            assert get(own, port, "evil.com") == get("127.0.0.1", port, own) == 403
    finally:
        p.kill(), p.wait(), p.stderr.close()
    for flags in (["--host", "0.0.0.0", "--api-key", "k"], ["--host", "127.0.0.1"], ["--host", "localhost"]):
        p, log = listen(*flags)
        p.kill(), p.wait(), p.stderr.close()
        assert "warning" not in log, flags


def test_cors_only_for_allowed_origins():
    with Server("--allowed-origins", "http://a.b, http://c.d:8") as s:
        a = s.get("/v1/models", Origin="http://c.d:8")
        assert a.headers["access-control-allow-origin"] == "http://c.d:8" and a.headers["vary"] == "Origin"
        assert "access-control-allow-origin" not in s.get("/v1/models", Origin="http://c.d").headers
        with s.connect() as c:
            a = c.request("OPTIONS", "/v1/chat/completions", Origin="http://a.b", Access_Control_Request_Method="POST")
            assert a.headers["access-control-allow-methods"] == "POST, OPTIONS"
            assert "Authorization" in a.headers["access-control-allow-headers"]
            wanted = "authorization,content-type,x-stainless-os"  # sent by the openai client in a browser
            a = c.request("OPTIONS", "/v1/chat/completions", Origin="http://a.b", Access_Control_Request_Headers=wanted)
            assert a.headers["access-control-allow-headers"] == wanted
            for path in ("/v1/completions", "/v1/files", "/v1/batches"):  # a browser may send these requests without a preflight
                for origin, site, status in (("http://x.y", "cross-site", 403), ("http://x.y", "same-site", 403),
                                             ("http://test", "same-origin", 400),
                                             ("http://a.b", "cross-site", 400), (None, "none", 400), (None, None, 400),
                                             ("http://x.y", None, 403), ("null", None, 403), ("http://test", None, 400),
                                             ("http://a.b", None, 400)):
                    answer = s.post(path, {}, Origin=origin, Sec_Fetch_Site=site)
                    assert (answer.status if answer.status != 503 else 400) == status, (path, origin, site)
            a = c.request("OPTIONS", "/v1/chat/completions", Origin="http://x.y", Access_Control_Request_Headers=wanted)
            assert "access-control-allow-headers" not in a.headers
        assert s.post("/v1/completions", small(stream=True), Origin="http://a.b").headers["access-control-allow-origin"] == "http://a.b"


# ---- HTTP ----

def test_keep_alive_and_pipelining(server):
    with server.connect() as c:
        body = json.dumps(small())
        for i in range(40):
            c.send("GET /health HTTP/1.1\r\nHost: h\r\n\r\n" if i % 4 else raw_post(body))
        kinds = [set(c.answer().json()) for _ in range(40)]
        assert [("status" in k) for k in kinds] == [i % 4 > 0 for i in range(40)]


def test_pipelining_behind_long_answers(tmp_path):
    """A pipelined request waits until the answer before it, a file or a long text, has been sent."""
    with Server(files=str(tmp_path)) as s, s.connect() as c:
        data = b'{"custom_id":"x"}\n' * 3000
        form = b"--b\r\nContent-Disposition: form-data; name=purpose\r\n\r\nbatch\r\n" \
               b"--b\r\nContent-Disposition: form-data; name=file; filename=x\r\n\r\n%s\r\n--b--" % data
        file = s.post("/v1/files", form, Content_Type="multipart/form-data; boundary=b").json()["id"]
        c.send(f"GET /v1/files/{file}/content HTTP/1.1\r\nHost: h\r\n\r\n" * 3)
        assert [c.answer().body for _ in range(3)] == [data] * 3
        c.send(raw_post(json.dumps(small(16, n=100, logprobs=30, ignore_eos=True))) + "GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
        assert len(c.answer().body) > 256 << 10 and c.answer().json() == {"status": "ok"}


def test_half_closed_connections_get_their_answers(tmp_path):
    """The client shuts down its sending side: after an upload, and after pipelined downloads larger than the socket's buffer."""
    data = b'{"custom_id":"x"}\n' * 500_000
    form = b"--b\r\nContent-Disposition: form-data; name=purpose\r\n\r\nbatch\r\n" \
           b"--b\r\nContent-Disposition: form-data; name=file; filename=x\r\n\r\n%s\r\n--b--" % data
    with Server(files=str(tmp_path)) as s:
        with s.connect() as c:
            c.send("POST /v1/files HTTP/1.1\r\nHost: h\r\nContent-Type: multipart/form-data; boundary=b\r\n"
                   f"Content-Length: {len(form)}\r\n\r\n").send(form)
            c.s.shutdown(socket.SHUT_WR)
            file = c.answer().json()["id"]
            assert c.closed()
        with s.connect(rcvbuf=4096) as c:
            c.send(f"GET /v1/files/{file}/content HTTP/1.1\r\nHost: h\r\n\r\n" * 3)
            c.s.shutdown(socket.SHUT_WR)
            assert [c.answer().body == data for _ in range(3)] == [True] * 3 and c.closed()
        s.wait_metric("http_connections", 1)


def test_stream_then_next_request_on_the_same_connection(server):
    with server.connect() as c:
        want = c.request("POST", "/v1/completions", small(20)).json()["choices"][0]["text"]
        for _ in range(3):
            a = c.request("POST", "/v1/completions", small(20, stream=True))
            assert a.headers["content-type"].startswith("text/event-stream") and texts(a.body) == ({0: want}, True)


def test_http_1_0(server):
    with server.connect() as c:
        a = c.send("GET /health HTTP/1.0\r\n\r\n").answer()
        assert a.status == 200 and a.headers["connection"] == "close" and c.closed()
    with server.connect() as c:
        for _ in range(2):
            assert c.send("GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").answer().headers["connection"] == "keep-alive"
    with server.connect() as c:  # the end of a stream is the end of the connection
        a = c.send(raw_post(json.dumps(small(stream=True)), version="1.0")).answer()
        assert "transfer-encoding" not in a.headers and texts(a.body)[1] and c.closed()


def test_http_1_0_stream_with_empty_events():
    """Text that may be the beginning of a stop string is held back. Then an event has no text to send, and the server must not keep
    memory for it (the sanitizers check this)."""
    body = json.dumps({"prompt": "Tom", "max_tokens": 60, "allowed_token_ids": [5], "ignore_eos": True, "stop": '"' * 100 + "x",
                       "stream": True})
    with Server() as s:
        with s.connect() as c:
            c.send(f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n{body}")
            a = c.answer()
            assert a.status == 200 and texts(a.body) == ({0: '"' * 60}, True)
        assert s.stop() == 0


def test_constraints_streamed_or_not(server):
    """Bad words, stop strings after min_tokens, and samples for which no token is allowed, on both routes."""
    p = "Tom has 3 boxes with 4 apples each and buys 5 more apples."
    cases = [(None, {"max_tokens": 12}), (None, {"max_tokens": 12, "bad_words": ["apples"]}),
             (None, {"max_tokens": 12, "bad_words": ["How many"]}),
             ([" "], {"stop": ["How"]}), ([" How"], {"max_tokens": 1, "min_tokens": 1, "stop": ["How"]}),
             ([" How many"] * 3, {"n": 3, "min_tokens": 1, "stop": ["many"], "include_stop_str_in_output": True}),
             (["TT"] * 2, {"n": 2, "allowed_token_ids": [55], "bad_words": ["TTT"]})]
    for want, fields in cases:
        messages = [{"role": "user", "content": p}]
        for route, prompt in (("/v1/completions", {"prompt": p}), ("/v1/chat/completions", {"messages": messages})):
            body = {"temperature": 0, "max_tokens": 9, **prompt, **fields}
            choices = server.post(route, body).json()["choices"]
            answers = [c.get("text", c.get("message", {}).get("content")) for c in choices]
            assert texts(server.post(route, {**body, "stream": True}).body)[0] == dict(enumerate(answers))
            assert route.startswith("/v1/chat") or want is None or answers == want, (fields, answers)
            assert not any(word in text for text in answers for word in fields.get("bad_words", []))
            reasons = [(c["finish_reason"], c["stop_reason"]) for c in choices]
            assert "TTT" not in str(fields) or reasons == [("stop", "nothing is left to draw")] * 2
            a = server.post(route, {**body, "allowed_token_ids": [55], "bad_words": ["T"], "stream": True})
            assert a.status == 400 and a.error()["param"] == "allowed_token_ids" and "bad_words" in a.error()["message"]


def test_every_split_of_a_request(server):
    body = json.dumps(small(1))
    request = raw_post(body, "Content-Type: application/json\r\n")
    chunked = ("POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
               f"{10:x};x=y\r\n{body[:10]}\r\n{len(body) - 10:X}\r\n{body[10:]}\r\n0\r\nTrailer: v\r\n\r\n")
    with server.connect() as c:
        c.s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for text in (request, chunked):
            for cut in range(1, len(text), 3):
                c.send(text[:cut])
                time.sleep(0.0005)
                assert c.send(text[cut:]).answer().status == 200, cut
    with server.connect() as c:
        for byte in chunked:
            c.send(byte)
        assert c.answer().status == 200


def test_expect(server):
    with server.connect() as c:
        body = json.dumps(small())
        c.send(f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n")
        assert c.answer().status == 100
        assert c.send(body).answer().status == 200
        assert c.send(raw_post(body, "Expect: 100-continue\r\n")).answer().status in (100, 200)  # the body came with the head
    with server.connect() as c:  # refused before the body is sent
        c.send("POST /v1/completions HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 999999999\r\n\r\n")
        assert c.answer().status == 413 and c.closed()


@pytest.mark.skipif("TOKA_BINARY" in os.environ, reason="sanitizers use extra memory")
def test_memory_of_a_body_with_many_values():
    """While a body is parsed, each JSON value takes 16 bytes, and never 32. A body is refused if its values would take more memory
    than the longest allowed body."""
    n = 4_000_000
    body = b'{"prompt":"Tom","max_tokens":1,"unknown":[' + b"0," * n + b"0]}"
    with Server() as s:
        s.post("/v1/completions", {"prompt": "Tom", "max_tokens": 1})
        before = peak_memory(s)
        assert s.post("/v1/completions", body).status == 200
        assert peak_memory(s) - before < len(body) + 16 * n * 1.5 + (16 << 20)
    arguments = b",".join([b'{"function":{"name":"f","arguments":"{\\"x\\":[' + b"0," * 100_000 + b'0]}"}}'] * 24)
    head, end = b'{"max_tokens":1,"messages":[{"role":"user","content":"Tom"', b"}]}"
    many = {"/v1/completions": body, "/tokenize": body, "/v1/chat/completions": head + b',"x":[' + b"0," * n + b"0]" + end,
            "/v1/chat/completions#": head + b'},{"role":"assistant","content":"","tool_calls":[' + arguments + b"]" + end}
    limit = 16 << 20
    with Server("--max-body-bytes", str(limit)) as s:
        s.post("/v1/completions", {"prompt": "Tom", "max_tokens": 1})
        for path, body in many.items():
            before = peak_memory(s)
            a = s.post(path.strip("#"), body)
            assert a.status == 400 and re.match(r"JSON: more than \d+ values at byte \d+$", a.error()["message"])
            assert peak_memory(s) - before < 6 * limit
        assert s.post("/v1/completions", {"prompt": "Tom", "max_tokens": 1}).status == 200


def test_bodies_too_long():
    with Server("--max-body-bytes", "2000") as s:
        assert s.post("/v1/completions", small(1)).status == 200
        a = s.post("/v1/completions", {"prompt": "x" * 2000})
        assert a.status == 413 and "--max-body-bytes" in a.error()["message"]
        for n, status in ((100, 200), (600, 400)):  # a few ids can give a long text
            a = s.post("/detokenize", {"tokens": [0] * n})
            message = "tokens: their text has 10200 bytes, at most 2000 are given"
            assert a.status == status and (status == 200 or a.error()["message"] == message)
        for n, strs, status in ((300, False, 200), (100, True, 200), (300, True, 400)):  # the strings of the tokens can be long, too
            a = s.post("/tokenize", {"prompt": "7," * n, "return_token_strs": strs})
            message = "return_token_strs: the answer has more than 2000 bytes"
            assert a.status == status and (status == 200 or a.error()["message"] == message)
        with s.connect() as c:
            c.send("POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
            c.send("400\r\n" + "x" * 1024 + "\r\n3d1\r\n")
            assert c.answer().status == 413 and c.closed()
        for path, method, n, words in (("/v1/completions", "POST", 3000, "2000 bytes, the limit of --max-body-bytes"),
                                       ("/tokenize", "POST", 3000, "--max-body-bytes"),
                                       ("/v1/batches", "POST", 2 << 20, "1048576 bytes, the limit of /v1/batches"),
                                       ("/health", "GET", 2 << 20, "the limit of /health"),
                                       ("/v1/files/x", "DELETE", 2 << 20, "the limit of /v1/files"),
                                       ("/v1/files", "POST", 1 << 40, "--max-upload-bytes"),
                                       ("/v1/batches", "POST", 10**20, "more bytes than any request may have")):
            with s.connect() as c:  # the message names the limit that was exceeded
                c.send(f"{method} {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {n}\r\n\r\n")
                a = c.answer()
                message = a.error()["message"]
                assert a.status == 413 and words in message and message.count("--max") == words.count("--max"), (path, a.error())
        with s.connect() as c:
            c.send("POST /v1/batches HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n200000\r\n")
            assert c.answer().error()["message"].endswith("the limit of /v1/batches")
        with s.connect() as c:  # the client gets the answer although it has sent more than the server reads
            c.send("POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 3000000\r\n\r\n" + "x" * 3000000)
            assert c.answer().status == 413


def test_echo_of_one_token(server):
    """A prompt of one token, with echo: the answer has this token before the tokens of each sample, streamed or not."""
    body = {"prompt": [5], "max_tokens": 2, "n": 2, "temperature": 0, "logprobs": 1, "echo": True}
    for stream in (False, True):
        answer = server.post("/v1/completions", {**body, "stream": stream})
        assert answer.status == 200
        lines = answer.body.decode().split("\n\n") if stream else [answer.body.decode()]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
        choices = [x for c in chunks for x in c["choices"]]
        values = {i: [v for x in choices if x["index"] == i for v in x["logprobs"]["token_logprobs"]] for i in (0, 1)}
        assert values[0] == values[1] and len(values[0]) == 3 and values[0][0] is None and max(values[0][1:]) <= 0


def test_limit_of_answers_that_repeat_their_prompt(server):
    """The server holds a whole answer in memory: an answer of 80 GB would exhaust it."""
    prompt = [5 + i % 90 for i in range(900)]
    for fields in ({"prompt_logprobs": 20}, {"echo": True, "logprobs": 5},
                   {"return_token_ids": True, "prompt": prompt[:2] * 450, "echo": True, "logprobs": 5},
                   {"prompt_logprobs": 20, "return_packed": True}, {"echo": True, "logprobs": 20, "return_packed": True}):
        a = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "n": 65536, **fields})
        assert a.status == 400 and a.error()["param"] == "n" and "repeat their prompt" in a.error()["message"], fields
    a = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "n": 3, "prompt_logprobs": 20, "return_token_ids": True})
    assert a.status == 200 and all(c["prompt_token_ids"] == prompt and len(c["prompt_logprobs"]) == 900 for c in a.json()["choices"])


def test_limit_of_an_answer(server):
    """A request with legal fields could ask for an answer of 100 GB, which the server would hold in memory. A stream has no limit."""
    largest = {"prompt": "Tom", "n": 65536, "max_tokens": 900}
    a = server.post("/v1/completions", {**largest, "logprobs": 20})
    assert a.status == 400 and a.error()["param"] == "n"
    parts = ("n: 65536", "900 tokens (max_tokens)", "20 alternatives", "GB, expected at most 4.29 GB", "--max-answer-bytes")
    assert all(part in a.error()["message"] for part in parts), a.error()
    chat = {"messages": [{"role": "user", "content": "hi"}], "n": 65536, "logprobs": True, "top_logprobs": 20}
    assert server.post("/v1/chat/completions", chat).status == 400  # without max_tokens, the limit is the context length
    prompts = {"prompt": ["Tom"] * 65536, "max_tokens": 900, "return_packed": True, "logprobs": 20}
    assert server.post("/v1/completions", prompts).error()["param"] == "prompt"
    with server.connect() as c:
        c.send(raw_post(json.dumps({**largest, "logprobs": 20, "stream": True})))
        assert c.head()[0] == 200
    server.wait_metric("num_requests_running", 0)
    assert server.post("/v1/completions", {"prompt": "Tom", "n": 300, "max_tokens": 2, "logprobs": 20}).status == 200


def test_max_answer_bytes(tmp_path):
    """A flag or the environment sets the limit of an answer, for a server, its batches, and toka batch. If the answer of a batch line
    would be too large, only this line fails."""
    body = {"prompt": "Tom", "max_tokens": 100, "logprobs": 5}
    line = lambda i, n: json.dumps({"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {**body, "n": n}}) + "\n"
    text = "".join(line(i, 1000 if i == 3 else 1) for i in range(6))
    with Server("--max-answer-bytes", "1000000", files=str(tmp_path / "files")) as s:
        assert s.post("/v1/completions", body).status == 200
        assert s.post("/v1/completions", {**body, "n": 1000, "stream": True, "max_tokens": 2}).status == 200
        a = s.post("/v1/completions", {**body, "n": 1000})
        assert a.status == 400 and "at most 0.001 GB (--max-answer-bytes)" in a.error()["message"]
        form = b"--b\r\nContent-Disposition: form-data; name=purpose\r\n\r\nbatch\r\n" \
               b"--b\r\nContent-Disposition: form-data; name=file; filename=f\r\n\r\n"
        f = s.post("/v1/files", form + text.encode() + b"\r\n--b--\r\n", Content_Type="multipart/form-data; boundary=b").json()
        b = s.post("/v1/batches", {"input_file_id": f["id"], "endpoint": "/v1/completions", "completion_window": "24h"}).json()
        end = time.time() + 60
        while (b := s.get(f"/v1/batches/{b['id']}").json())["status"] != "completed":
            assert time.time() < end
            time.sleep(0.05)
        assert b["request_counts"] == {"total": 6, "completed": 5, "failed": 1}
        assert b'"r3"' in (e := s.get(f"/v1/files/{b['error_file_id']}/content").body) and b"--max-answer-bytes" in e
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text)
    env = {**{k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}, "TOKA_DEVICE": "cpu", "TOKA_MAX_ANSWER_BYTES": "1000000"}
    assert subprocess.run([TOKA, "batch", "-q", "-i", str(source), "-o", str(out)], env=env, cwd=ROOT, timeout=60).returncode == 0
    errors = [r for r in map(json.loads, out.read_text().splitlines()) if r["error"]]
    assert [r["custom_id"] for r in errors] == ["r3"] and "--max-answer-bytes" in errors[0]["error"]["message"]
    r = subprocess.run([TOKA, "batch", "-i", str(source), "-o", str(out), "--max-answer-bytes", "0"], env=env, cwd=ROOT, timeout=60,
                       capture_output=True, text=True)
    assert r.returncode == 1 and r.stderr.startswith("toka: --max-answer-bytes: 0, expected 1 or more")


@pytest.mark.parametrize("normalized", (False, True))
def test_offsets_if_the_text_omits_the_first_space(tmp_path, normalized):
    """SentencePiece tokenizers put a space before the first word, and decoding removes it. Decoding also removes the special token
    before the prompt, even if its "normalized" is true, as in the first files of Llama 2."""
    model = os.path.join(os.environ.get("TOKA_TEST_DATA", os.path.join(ROOT, "../shared/data")), "weights/stories260K")
    if not os.path.isdir(model):
        pytest.skip("no weights/stories260K")
    for name in os.listdir(model):
        os.symlink(os.path.abspath(os.path.join(model, name)), tmp_path / name)
    with open(os.path.join(model, "tokenizer.json")) as f:
        tokenizer = json.load(f)
    for token in tokenizer["added_tokens"]:
        token["normalized"] = normalized
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with Server("-m", str(tmp_path)) as s:
        for prompt, echo in (("Once upon a", True), ("", False), ("", True), ("Once upon a", False)):
            body = {"prompt": prompt, "max_tokens": 8, "echo": echo, "logprobs": 0, "temperature": 0}
            c = s.post("/v1/completions", body).json()["choices"][0]
            logprobs = c["logprobs"]
            assert len(logprobs["tokens"]) > 6 and logprobs["text_offset"] == sorted(logprobs["text_offset"])
            for i, (token, offset) in enumerate(zip(logprobs["tokens"], logprobs["text_offset"])):
                seen = token if offset or c["text"].startswith(" ") else token.lstrip().removeprefix("<s>").lstrip()
                assert c["text"][offset:].startswith(seen), (prompt, i, token, offset)
            events = s.post("/v1/completions", {**body, "stream": True}).body.decode().split("\n\n")
            choices = [json.loads(e.removeprefix("data: "))["choices"][0] for e in events if "{" in e]
            assert sum((x["logprobs"]["text_offset"] for x in choices if x["logprobs"]), []) == logprobs["text_offset"]


def test_offsets_of_special_tokens(server):
    """An offset is the place of the token in the text. A special token that the text omits has no width."""
    def check_offsets(text, logprobs, omitted):
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"]):
            assert token in omitted or text[offset:].startswith(token)
        assert len(logprobs["tokens"]) > 5 and set(omitted) <= set(logprobs["tokens"])

    bos, im = "<|begin_of_text|>", "<|im_start|>"
    fields = {"max_tokens": 40, "temperature": 5, "seed": 1, "ignore_eos": True, "allowed_token_ids": [0, 2, 4, 5, 6], "logprobs": 0}
    for prompt, echo, omitted in (("Tom has", "Tom has", {bos}), (f"{im}Tom has", f"{im}Tom has", {bos}),
                                  ([0, 55, 468, 0, 55], f"{bos}Tom{bos}T", set())):
        for keep in (False, True):
            body = {**fields, "prompt": prompt, "echo": True, "skip_special_tokens": not keep}
            c = server.post("/v1/completions", body).json()["choices"][0]
            n = c["logprobs"]["text_offset"].index(len(echo))
            assert c["text"].startswith(echo) and (bos in c["text"][len(echo):]) == keep
            head = {k: v[:n] for k, v in c["logprobs"].items()}
            head.update(tokens=head["tokens"] + [""] * 6, text_offset=head["text_offset"] + [len(echo)] * 6)
            check_offsets(echo, head, omitted)
            tail = {k: v[n:] for k, v in c["logprobs"].items()}
            check_offsets(c["text"], tail, set() if keep else {bos, im} & set(tail["tokens"]))
            events = server.post("/v1/completions", {**body, "stream": True}).body.decode().split("\n\n")
            choices = [json.loads(e.removeprefix("data: "))["choices"][0] for e in events if "{" in e]
            assert sum((x["logprobs"]["text_offset"] for x in choices if x["logprobs"]), []) == c["logprobs"]["text_offset"]


def test_content_types(server):
    assert server.post("/v1/completions", small(), Content_Type="text/plain").status == 415
    assert server.post("/v1/completions", small(), Content_Type="application/x-www-form-urlencoded").status == 415
    assert server.post("/v1/completions", small(), Content_Type="Application/JSON; charset=utf-8").status == 200
    assert server.post("/v1/completions", small(), Content_Type=None).status == 200
    assert server.post("/v1/completions", small(), Content_Encoding="gzip").status == 415


# ---- A thousand bad requests ----

def bad_requests(rnd):
    """Yields (bytes, allowed statuses): errors in the request line, the headers, the framing and the JSON."""
    h = "Host: h\r\n"
    good = json.dumps(small(1))

    def head(*lines, first="POST /v1/completions HTTP/1.1", body=good):
        return f"{first}\r\n" + "".join(f"{x}\r\n" for x in lines) + "\r\n" + body

    def framed(*lines):
        return head("Host: h", *lines)

    n = len(good)
    yield from [(x, {400}) for x in (
        "GET /health\r\n\r\n", "GET /health HTTP/1.1\n" + h + "\n", "get\r\n\r\n", "GET health HTTP/1.1\r\n" + h + "\r\n",
        "GET /health HTTP/1.1\r\n\r\n", "GET /health HTTP/1.1\r\n" + h + h + "\r\n", " GET /health HTTP/1.1\r\n" + h + "\r\n",
        "GET /health  HTTP/1.1\r\n" + h + "\r\n", "GET\t/health HTTP/1.1\r\n" + h + "\r\n", "GET /he alth HTTP/1.1\r\n" + h + "\r\n",
        "GET /health HTTP/1.1 \r\n" + h + "\r\n", "GET /health HTTP/1,1\r\n" + h + "\r\n", "GET /health HTTP/11\r\n" + h + "\r\n",
        "GET /health HTTP/1.1\r\n" + h + " folded: x\r\n\r\n", "GET /health HTTP/1.1\r\n" + h + "A: b\r\n\tfolded\r\n\r\n",
        "GET /health HTTP/1.1\r\n" + h + "No colon\r\n\r\n", "GET /health HTTP/1.1\r\n" + h + "A b: c\r\n\r\n",
        "GET /health HTTP/1.1\r\nHost : h\r\n\r\n", "GET /health HTTP/1.1\r\nHost: h/i\r\n\r\n",
        "GET /health HTTP/1.1\r\nHost: h i\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00", "\x00\x00\x00\x00", "SSH-2.0-x\r\n", '{"prompt": "x"}', "GET /#x HTTP/1.1\r\n" + h + "\r\n",
        "GET http:///x HTTP/1.1\r\n" + h + "\r\n", "G" * 40 + " / HTTP/1.1\r\n" + h + "\r\n")]
    yield from [(f"{x} HTTP/1.1\r\n{h}\r\n", {501}) for x in ("CONNECT h:1", "M-SEARCH *", "NOTIFY *", "BREW pot")]
    yield from [(x, {505}) for x in ("GET / HTTP/2.0\r\n" + h + "\r\n", "GET / HTTP/3.1\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                                     "GET / HTTP/0.9\r\n\r\n")]
    for c in list(range(0x20)) + [0x7F]:  # control characters in different places
        ch = chr(c)
        if ch not in "\r\n":
            yield f"GET /health{ch} HTTP/1.1\r\n{h}\r\n", {400}
            yield f"GET /health HTTP/1.1\r\n{h}A{ch}: b\r\n\r\n", {400}
            if ch != "\t":
                yield f"GET /health HTTP/1.1\r\n{h}A: b{ch}c\r\n\r\n", {400}
    for c in '"(),/:;<=>?@[\\]{}\x80\xff':
        if c != ":":
            yield f"GET /health HTTP/1.1\r\n{h}A{c}: b\r\n\r\n", {400}
        yield f"G{c}T /health HTTP/1.1\r\n{h}\r\n", {400}
    for n_headers in (101, 150, 1000):
        yield "GET /health HTTP/1.1\r\n" + h + "".join(f"a{i}: b\r\n" for i in range(n_headers)) + "\r\n", {431}
    for size in (33000, 50000, 100000):
        yield "GET /health HTTP/1.1\r\n" + h + "A: " + "x" * size + "\r\n\r\n", {431}
        yield "GET /" + "x" * size + " HTTP/1.1\r\n" + h + "\r\n", {414}
    # two lengths, or a length that cannot be trusted
    for v in ("-1", "+5", "0x10", "5 5", "5,5", "", "5;", "five", "1e3", "５", "5\x0b", "٣", "0b1", "--5", " ,5", "5,"):
        yield framed(f"Content-Length: {v}".encode().decode("latin1")), {400}
    for v in ("9" * 19, "9" * 40, "18446744073709551617"):
        yield framed(f"Content-Length: {v}"), {413}
    te = "Transfer-Encoding: chunked"
    for pair in ([f"Content-Length: {n}", te], [te, f"Content-Length: {n}"], ["Content-Length: 0", te], [te, te],
                 [f"Content-Length: {n}", f"Content-Length: {n}"],
                 [f"Content-Length: {n}", "content-length: 0"], ["Transfer-Encoding: chunked, chunked"],
                 ["Transfer-Encoding: chunked, identity"],
                 ["Transfer-Encoding : chunked"], [" Transfer-Encoding: chunked"], ["Transfer-Encoding: gzip, chunked, chunked"],
                 ["Transfer-Encoding:"],
                 ["Transfer-Encoding: chunked", "Transfer-Encoding: identity"], ["X: y\rTransfer-Encoding: chunked"],
                 ["Transfer-Encoding: \x00chunked"], ["Transfer-Encoding: chunked\x0b"], ["Transfer\x00-Encoding: chunked"]):
        for where in (framed(*pair), framed("A: b", *pair), framed(*pair, "A: b")):
            yield where, {400}
    for v in ("gzip", "xchunked", "chunked;q=1", "identity", "chunkedx", '"chunked"', "'chunked'", "chunk ed", "deflate", "gzip, chunked",
              "identity, chunked"):
        yield framed(f"Transfer-Encoding: {v}"), {501}
    yield head(te, first="POST /v1/completions HTTP/1.0"), {400}
    yield framed("Expect: 101-continue", f"Content-Length: {n}"), {417}
    for size in ("g", "-5", "+5", "0x5", " 5", "5 ", "5\t", "", ";a", "5;\x01", "5_", "5.0", "0" * 300, "５"):
        yield framed(te).replace(good, "") + size.encode().decode("latin1") + "\r\nhello\r\n0\r\n\r\n", {400}
    for size in ("fffffff1", "ffffffffffffffff", "7fffffffffffffff", "80000000000000000000", "4000001"):
        yield framed(te).replace(good, "") + size + "\r\nhello", {413}
    for tail in ("5\r\nhelloX", "5\r\nhello\n", "5\nhello", "5\r\nhello\r5", "1\r\n{\r\n0\r\nbad\r\n\r\n", "1\r\n{\r\n0\r\n a: b\r\n\r\n",
                 "1\r\n{\r\n0\r\na : b\r\n\r\n"):
        yield framed(te).replace(good, "") + tail, {400}
    yield framed(te).replace(good, "") + "0\r\n" + "a: b\r\n" * 200 + "\r\n", {431}
    yield framed(te).replace(good, "") + "".join("1;" + "e" * 200 + "\r\n \r\n" for _ in range(100)), {400}

    def body(text, status=400, path="/v1/completions"):
        data = text if isinstance(text, bytes) else text.encode()
        return f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data, {status}

    for text in ("", " ", "{", "}", "[]", "null", "1", '"x"', "{]", '{"prompt"}', '{"prompt":}', '{"prompt":"x"', '{"prompt":"x",}',
                 "{'prompt':'x'}", '{"prompt":"x"}}', '{"prompt":"x"} x', '{"prompt":"\\x"}', '{"prompt":"\\u12"}', '{"prompt":"a\nb"}',
                 '{"prompt":01}', '{"prompt":"x","n":+1}', '{"prompt":"x","n":.5}', '{"prompt":"x","temperature":1e999}',
                 '{"prompt":"x","temperature":NaN}', '{"prompt":"x"}\x00', "\ufeff{", "// x\n{}", "prompt=x",
                 "[" * 1000, '{"a":' * 1000, "[" * 100000, '{"prompt":' + "[" * 500 + "]" * 500 + "}"):
        yield body(text)
    not_utf8 = (b"\x80", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\xc3", b"\xf8\x88\x80\x80\x80")
    for bad in not_utf8:
        yield body(b'{"prompt":"' + bad + b'"}')
        yield body(b'{"prompt":"x","stop":"' + bad + b'x"}')
    for cut in rnd.sample(range(1, n), 40):  # truncated JSON, correctly framed
        yield body(good[:cut])
    wrong = {"prompt": [1.5, True, {}, [[]], [], ["x", 1], [1, "x"], [[1], 2], [-1], [1 << 40], [99999999], None],
             "max_tokens": ["5", 1.5, [], {}, True, -1, 1 << 40], "temperature": ["1", [], {}, True, -1],
             "top_p": ["1", 0, 1.5, -1, [], True],
             "top_k": ["1", 1.5, [], -2], "min_p": ["1", -0.1, 1.1, []], "n": ["1", 0, -1, 1.5, [], 1 << 40, True],
             "stream": ["true", 1, [], {}], "stop": [1, True, {}, [1], [["x"]], [""], ""], "seed": ["1", 1.5, [], 1 << 70],
             "logprobs": ["1", -1, 1000, [], True, 1.5], "echo": ["x", 1, []], "presence_penalty": ["1", [], True],
             "frequency_penalty": ["x", {}], "repetition_penalty": ["1", 0, -1, []], "min_tokens": ["1", -1, 1.5], "ignore_eos": ["x", 1],
             "stop_token_ids": ["x", ["x"], [1.5], 1, [-5]], "logit_bias": ["x", [], {"x": 1}, {"1": "x"}, {"-1": 1}, {"99999999": 1}],
             "allowed_token_ids": ["x", ["x"], [-1]], "priority": ["x", 1.5], "return_token_ids": ["x", 1],
             "include_stop_str_in_output": ["x", 1], "model": [1, [], True], "best_of": [3, "x"], "suffix": ["x"],
             "stream_options": ["x", 1], "prompt_logprobs": ["x", -2, 1.5], "bad_words": ["x", [1]], "guided_json": [5, [], {"type": "x"}, "{"], "guided_choice": ["a", [], [1]], "guided_regex": ["(", 1],
             "ebnf": ["a", {}], "structured_outputs": [[], {}, {"x": 1}, {"regex": 1}], "json_schema": ["", 1],
             "use_beam_search": [True],
             "prompt_embeds": ["x"], "response_format": [{"type": "structural_tag"}, {}, [], {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}], "truncate_prompt_tokens": [5]}
    for field, values in wrong.items():
        for v in values:
            yield body(json.dumps({**small(1), field: v}))
    chat = {"messages": ["x", 1, {}, [], [1], ["x"], [{}], [{"role": "user", "content": 1}], [{"role": 1, "content": "x"}],
                         [{"role": "user", "content": [{"type": "image_url"}]}]],
            "top_logprobs": ["1", -1, 1000], "logprobs": [1, "x"], "max_completion_tokens": ["x", 0, -1], "tools": ["x", 1, {}],
            "chat_template_kwargs": ["x", [], 1], "n": [0, "x"], "functions": [[{"name": "x"}]], "audio": [{"voice": "x"}]}
    for field, values in chat.items():
        for v in values:
            yield body(json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, field: v}), path="/v1/chat/completions")
    yield body(json.dumps({**small(1), "model": "another"}), 404)
    yield body(json.dumps({"prompt": "x " * 5000}))
    for path in ("/tokenize", "/detokenize"):
        for text in ("", "{", "[]", "{}", '{"prompt":1}', '{"tokens":"x"}', '{"tokens":[-1]}', '{"tokens":[1.5]}'):
            yield body(text, path=path)


def test_tokenizer_info(server):
    info = server.get("/tokenizer_info").json()
    config = json.load(open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "model/tokenizer_config.json")))
    assert info["chat_template"] == config["chat_template"].rstrip() and info["model_max_length"] > 0
    assert len(server.post("/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False}).json()["tokens"]) == 1


def test_a_thousand_bad_requests(server):
    """Each bad request gets its 4xx status (or 501, 505), and the next request, on a new connection, works. The rest of the thousand
    are good requests with bytes changed, removed or repeated: each must get an answer or a closed connection, and the server must
    still work after it."""
    rnd = random.Random(6)
    n, wrong = 0, []
    for data, want in bad_requests(rnd):
        with server.connect() as c:
            c.send(data)
            a = c.answer()
            if a.status not in want or not a.error()["message"]:
                wrong.append((data[:300], a.status, a.body[:200]))
        assert server.get("/health").status == 200
        n += 1
    assert not wrong, wrong[:20]
    good = raw_post(json.dumps(small(1)), "Content-Type: application/json\r\n").encode()
    while n < 1000:
        data = bytearray(good)
        for _ in range(rnd.randint(1, 4)):
            at = rnd.randrange(len(data))
            kind = rnd.randrange(3)
            if kind == 0:
                data[at] = rnd.randrange(256)
            elif kind == 1:
                del data[at:at + rnd.randint(1, 20)]
            else:
                data[at:at] = data[at:at + rnd.randint(1, 20)]
        with server.connect() as c:
            c.s.settimeout(20)
            c.send(bytes(data))
            c.s.shutdown(socket.SHUT_WR)
            try:
                assert c.answer().status in (200, 400, 404, 405, 413, 414, 415, 417, 431, 501, 505)
            except (EOFError, ConnectionResetError):
                pass  # the request was incomplete, and the server closed the connection
        assert server.get("/health").status == 200
        n += 1
    assert server.post("/v1/completions", small()).status == 200


def test_bad_request_does_not_disturb_other_requests(server):
    want = server.post("/v1/completions", small(30)).json()["choices"][0]["text"]
    got = []

    def ask():
        got.append(server.post("/v1/completions", small(30)).json()["choices"][0]["text"])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for t in threads:
        t.start()
    with server.connect() as c:
        for _ in range(50):
            assert c.request("POST", "/v1/completions", b"{").status == 400
            assert c.request("POST", "/v1/completions", {"prompt": "x", "n": 0}).status == 400
    for t in threads:
        t.join()
    assert got == [want] * 8


# ---- Time ----

def test_slow_clients_are_dropped_and_other_clients_served():
    with Server("--read-timeout", "1", "--keep-alive", "2") as s:
        slow = [s.connect() for _ in range(20)]
        start = time.time()
        bodies = [s.connect().send("POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\n{") for _ in range(20)]
        idle = s.connect()
        assert idle.request("GET", "/health").status == 200
        for i, byte in enumerate("GET /health HTTP/1.1\r\nX: y"):  # takes longer than --read-timeout
            for c in slow:
                try:
                    c.send(byte)
                except OSError:
                    pass
            assert s.get("/health").status == 200
            time.sleep(0.1)
        for c in slow + bodies:
            assert c.answer().status == 408 and c.closed()
        assert time.time() - start < 25  # the default of --read-timeout is 30
        assert idle.closed()  # --keep-alive is over
        for c in slow + bodies + [idle]:
            c.close()
        s.wait_metric("http_connections", 1)


def test_slow_reader_is_dropped():
    with Server("--write-timeout", "1", "--max-num-seqs", "64") as s:
        with s.connect(rcvbuf=4096) as c:
            body = json.dumps({**LONG, "n": 2000, "stream": True, "logprobs": 5})
            c.send(f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n{body}")
            assert c.head()[0] == 200
            end = time.time() + 60
            while not s.metric("request_success_total", 'finished_reason="abort"'):  # the client reads nothing: it is dropped
                assert time.time() < end
                time.sleep(0.02)
            s.wait_metric("num_requests_waiting", 0)
            s.wait_metric("num_requests_running", 0)
            assert s.metric("request_success_total", 'finished_reason="abort"') > 1000
            with pytest.raises((EOFError, ConnectionResetError)):
                for _ in c.chunks():
                    pass
        assert s.post("/v1/completions", small()).status == 200


@pytest.mark.slow
def test_slow_reader_that_reads_gets_everything():
    with Server("--write-timeout", "100") as s:
        body = {"prompt": PROBLEM, "max_tokens": 900, "ignore_eos": True, "temperature": 0, "n": 8, "logprobs": 32}
        want = {c["index"]: c["text"] for c in s.post("/v1/completions", body).json()["choices"]}
        with s.connect(rcvbuf=4096) as c:
            data = json.dumps({**body, "stream": True})
            c.send(f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(data)}\r\n\r\n{data}")
            assert c.head()[0] == 200
            s.wait_metric("generation_tokens_total", 2 * 8 * 900)  # the engine does not wait for a slow reader
            got = b"".join(c.chunks())
        assert texts(got) == (want, True) and len(got) > 6 << 20  # more than all buffers between server and client


@pytest.mark.slow
def test_slow_reader_takes_no_memory():
    """For a slow reader the server keeps short records of tokens, and makes text from a few of them at a time. The answer is complete,
    and each choice has its order."""
    body = {"messages": [{"role": "user", "content": PROBLEM}], "max_tokens": 320, "ignore_eos": True, "seed": 1, "logprobs": True,
            "top_logprobs": 20}
    n, got = 32, {}
    with Server("--write-timeout", "100") as s:
        want = s.post("/v1/chat/completions", {**body, "n": 3}).json()["choices"]
        with s.connect(rcvbuf=4096) as c:
            data = json.dumps({**body, "n": n, "stream": True})
            c.send(f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(data)}\r\n\r\n{data}")
            assert c.head()[0] == 200
            s.wait_metric("generation_tokens_total", (3 + n) * 320)
            before = peak_memory(s)
            stream = b"".join(c.chunks())
        grown = peak_memory(s) - before
    *events, end, nothing = stream.decode().split("\n\n")
    for event in events:
        for x in json.loads(event.removeprefix("data: "))["choices"]:
            if x["logprobs"]:
                got.setdefault(x["index"], []).extend(x["logprobs"]["content"])
    assert end == "data: [DONE]" and len(got) == n and all(len(v) == 320 for v in got.values())
    assert all(got[i] == want[i]["logprobs"]["content"] for i in range(3))
    assert len(stream) > 12 << 20 and grown < len(stream) / 4, (len(stream), grown)  # most of it is not in the sockets' buffers


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "3"])
def test_many_streams_at_once(threads):
    """Many calls at once for the workers: each stream, and each answer that is not streamed, equals the answer that the same request
    gets alone."""
    bodies = [{"prompt": f"Tom has {i} apples and buys {i % 7} more.", "max_tokens": 20 + i % 30, "ignore_eos": True, "temperature": 1,
               "seed": i, "n": 1 + (i % 16 == 0) * 3, "logprobs": 1} for i in range(160)]
    with Server("--server-threads", threads) as s:
        want = [{c["index"]: c["text"] for c in s.post("/v1/completions", b).json()["choices"]} for b in bodies]
        conns = [s.connect() for _ in bodies]
        for i, (b, c) in enumerate(zip(bodies, conns)):
            data = json.dumps({**b, "stream": i % 10 != 9})
            c.send(f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(data)}\r\n\r\n{data}")
        for i, c in enumerate(conns):
            if i % 10 != 9:
                assert c.head()[0] == 200
                assert texts(b"".join(c.chunks())) == (want[i], True), i
            else:
                answer = c.answer()
                assert answer.status == 200 and {x["index"]: x["text"] for x in answer.json()["choices"]} == want[i], i
            c.close()
        s.wait_metric("num_requests_running", 0)


def test_disconnect_cancels_running_queued_and_partly_finished_requests():
    with Server("--max-num-seqs", "4") as s:
        kv_free = s.metric("kv_cache_usage_perc")
        aborted = dict(name="request_success_total", label='finished_reason="abort"')
        running = [s.connect().send(raw_post(json.dumps({**LONG, "n": 1000, "stream": i == 0}))) for i in range(2)]
        s.wait_n_samples(2000)
        queued = [s.connect().send(raw_post(json.dumps(LONG))) for _ in range(3)]
        s.wait_n_samples(2003)
        for c in queued:
            c.close()
        s.wait_metric(**aborted, want=3)
        assert s.metric("num_requests_running") == 4
        for c in running:
            c.close()
        s.wait_metric("num_requests_waiting", 0)
        s.wait_metric("num_requests_running", 0)
        assert s.metric(**aborted) > 1500
        with s.connect() as c:
            c.send(raw_post(json.dumps({"prompt": PROBLEM, "max_tokens": 60, "ignore_eos": True, "n": 2000, "stream": True})))
            before = s.metric(**aborted)
            done = s.metric("request_success_total", 'finished_reason="length"')
            end = time.time() + 60
            while s.metric("request_success_total", 'finished_reason="length"') < done + 5:  # until some samples have finished
                assert time.time() < end
                time.sleep(0.02)
        s.wait_metric("num_requests_waiting", 0)
        s.wait_metric("num_requests_running", 0)
        assert s.metric("kv_cache_usage_perc") == kv_free == 0 and s.metric(**aborted) > before
        assert s.post("/v1/completions", small()).status == 200


# ---- Limits ----

def test_full_queue():
    with Server("--max-queue", "2", "--max-num-seqs", "1") as s:
        first = s.connect().send(raw_post(json.dumps({**LONG, "n": 1000, "stream": True})))
        assert first.head()[0] == 200  # it has its first token, so it does not wait in the queue
        waiting = [s.connect().send(raw_post(json.dumps(LONG))) for _ in range(2)]
        s.wait_metric("http_requests_waiting", 2)
        with s.connect() as c:
            a = c.request("POST", "/v1/completions", small())
            assert a.status == 429 and 1 <= int(a.headers["retry-after"]) <= 60 and a.error()["type"] == "rate_limit_error"
            assert c.request("GET", "/health").status == 200
            for w in waiting:
                w.close()
            s.wait_metric("http_requests_waiting", 0)
            first.close()
            assert c.request("POST", "/v1/completions", small()).status == 200
        assert s.metric("http_requests_rejected_total") == 1


@pytest.mark.skipif("TOKA_BINARY" in os.environ, reason="sanitizers use extra memory")
def test_queued_requests_take_little_memory():
    """A sample's memory is allocated when it starts: 60 queued requests of 65,536 samples take less than 1 MiB each."""
    with Server("--max-num-seqs", "4") as s:
        first = s.connect().send(raw_post(json.dumps({**LONG, "n": 1000, "stream": True})))
        assert first.head()[0] == 200
        before = peak_memory(s)
        waiting = [s.connect().send(raw_post(json.dumps({"prompt": "Tom has", "n": 65536, "max_tokens": 3}))) for _ in range(60)]
        s.wait_metric("http_requests_waiting", 60)
        s.wait_metric("num_requests_waiting", 60 * 65536 + 996)
        assert peak_memory(s) - before < 60 << 18
        for c in waiting + [first]:
            c.close()
        s.wait_metric("num_requests_waiting", 0)
        assert peak_memory(s) - before < 60 << 20


def test_no_descriptors_left():
    with Server(prefix=("bash", "-c", 'ulimit -n 150; exec "$0" "$@"')) as s:
        held = [s.connect() for _ in range(150 - 64)]
        s.wait_for("connections are open|$")
        with s.connect() as c:
            assert c.answer().status == 503 and c.closed()
        s.wait_for(r"ulimit -n\) allows")
        assert held[0].request("GET", "/health").status == 200
        for c in held:
            c.close()
        end = time.time() + 60
        while True:
            try:
                assert s.get("/health").status == 200
                break
            except (AssertionError, OSError):
                assert time.time() < end
                time.sleep(0.05)


def test_refused_connections_count_as_5xx_responses():
    with Server(prefix=("bash", "-c", 'ulimit -n 150; exec "$0" "$@"')) as s:
        held = [s.connect() for _ in range(150 - 64)]
        assert held[0].request("GET", "/health").status == 200
        for _ in range(3):
            with s.connect() as c:
                assert c.answer().status == 503
        for c in held[1:]:
            c.close()
        text = held[0].request("GET", "/metrics").body.decode()
        assert re.search(r'^toka:http_responses_total{.*code="5xx"} 3$', text, re.M)


def test_no_descriptor_leaks(server):
    server.get("/health")
    time.sleep(0.2)
    before = server.n_fds()
    for i in range(300):
        with server.connect() as c:
            if i % 3 == 0:
                c.request("GET", "/health")
            elif i % 3 == 1:
                c.send(raw_post(json.dumps(LONG)))
            else:
                c.send("GET /he")
    server.wait_fds(before)


# ---- Keys ----

def test_keys(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("\ufeff# first\r\nfrom-file-1\r\n\n  # from-comment\n \t\n  from-file-2\n#from-comment\nfrom#file-3\n",
                    encoding="utf-8", newline="")
    with Server("--api-key", "from-flag", "--api-key", "second", "--api-key-file", str(keys)) as s:
        for good in ("from-flag", "second", "from-file-1", "from-file-2", "from#file-3"):
            assert s.get("/v1/models", Authorization=f"Bearer {good}").status == 200
        for bad in ("Bearer wrong", "Bearer from-fla", "Bearer from-flagg", "from-flag", "Basic from-flag", "Bearer ",
                    "Bearer # from-comment", "Bearer #from-comment", "Bearer # first", None):
            for path in ("/v1/models", "/metrics", "/v1/files", "/v1/batches/x"):
                a = s.get(path, Authorization=bad)
                assert a.status == 401 and a.headers["www-authenticate"] == "Bearer" and a.error()["type"] == "authentication_error"
        assert s.post("/v1/completions", small()).status == 401
        assert s.post("/v1/completions", small(), Authorization="bearer second").status == 200
        for name in ("X-API-Key", "api-key"):  # of Anthropic's and of Azure's clients
            assert s.get("/v1/models", **{name: "second"}).status == 200
            assert s.get("/v1/models", **{name: "wrong"}).status == s.get("/v1/models", **{name: "Bearer second"}).status == 401
            assert s.get("/v1/models", Authorization="Bearer wrong", **{name: "second"}).status == 401
        assert s.get("/health").status == s.get("/ping").status == s.get("/version").status == s.get("/").status == 200
        assert s.stop() == 0
        assert not re.search("from-f|second|wrong", s.log)
    with Server(env={"TOKA_API_KEY": "from-env"}) as s:
        assert s.get("/v1/models").status == 401
        assert s.get("/v1/models", Authorization="Bearer from-env").status == 200
    with Server("--api-key", " spaced\n", env={"TOKA_API_KEY": ""}) as s:  # white space around a key is removed, as in a header
        assert s.get("/v1/models").status == 401
        assert s.get("/v1/models", Authorization="Bearer spaced").status == 200
    keys.write_text("\n \n# none\n")
    for flags, env, word in ((["--api-key-file", str(keys)], {}, b"no key"), (["--api-key", "\n"], {}, b"--api-key"),
                             ([], {"TOKA_API_KEY": ""}, b"TOKA_API_KEY is empty")):
        r = subprocess.run([TOKA, "serve", "--port", "0", *flags], env={**os.environ, **env}, capture_output=True, timeout=60)
        assert r.returncode == 1 and word in r.stderr


def test_error_code_of_an_unknown_model():
    with Server("--served-model-name", "tiny") as s:
        answers = [s.post(path, {"model": "nope", **more}) for path, more in (("/v1/completions", {"prompt": "a"}),
                                                                              ("/tokenize", {"prompt": "a"}),
                                                                              ("/detokenize", {"tokens": [5]}))]
        for a in [*answers, s.get("/v1/models/nope")]:
            assert a.status == 404 and a.error()["code"] == "model_not_found" and a.error()["param"] == "model"


# ---- Start and end ----

@pytest.mark.slow
def test_sigterm_lets_answers_finish():
    with Server("--max-num-seqs", "2") as s:
        want = s.post("/v1/completions", small(200, ignore_eos=True)).json()["choices"][0]["text"]
        ahead = s.connect().send(raw_post(json.dumps({**LONG, "n": 1000, "stream": True})))  # later requests wait until it ends
        assert ahead.head()[0] == 200
        idle = s.connect()
        assert idle.request("GET", "/health").status == 200
        streams = [s.connect().send(raw_post(json.dumps(small(200, ignore_eos=True, stream=True)))) for _ in range(6)]
        whole = s.connect().send(raw_post(json.dumps(small(200, ignore_eos=True))))
        s.wait_n_samples(1 + 1000 + 7)
        s.p.send_signal(signal.SIGTERM)
        assert idle.closed()
        with pytest.raises(OSError):  # new connections are refused
            for _ in range(100):
                s.connect().close()
                time.sleep(0.02)
        next(ahead.chunks())
        assert s.p.poll() is None
        ahead.close()
        for c in streams:
            assert texts(c.answer().body) == ({0: want}, True)
            assert c.closed()
        assert whole.answer().json()["choices"][0]["text"] == want
        assert s.p.wait(60) == 0


def test_second_sigterm_ends_at_once():
    with Server() as s:
        c = s.connect().send(raw_post(json.dumps({**LONG, "n": 4000, "stream": True})))
        assert c.head()[0] == 200
        s.p.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert s.p.poll() is None
        s.p.send_signal(signal.SIGTERM)
        assert s.p.wait(20) != 0


def test_ctrl_c_is_graceful_too():
    with Server() as s:
        s.p.send_signal(signal.SIGINT)
        assert s.p.wait(60) == 0


@pytest.mark.slow
def test_503_while_loading(tmp_path):
    model = os.path.join(ROOT, "test", "model")
    for name in os.listdir(model):
        if name != "tokenizer.json" and os.path.isfile(os.path.join(model, name)):
            os.symlink(os.path.join(model, name), tmp_path / name)
    with open(os.path.join(model, "tokenizer.json"), "rb") as f, open(tmp_path / "tokenizer.json", "wb") as g:
        g.write(f.read() + b" " * 500_000_000)  # it takes some time to read this white space
    for _ in range(5):  # tries: this process may sleep while the server finishes loading
        with Server("-m", str(tmp_path), wait=False) as s:
            a = s.get("/health")
            others = [s.post("/v1/completions", small()), s.get("/v1/models"), s.get("/metrics")]
            assert s.get("/version").status == s.get("/").status == 200
            early = "ready\n" not in s.read_log()
            s.wait_for("ready\n", 120)
            assert s.get("/health").status == 200 and s.post("/v1/completions", small()).status == 200
        if early:
            break
    assert early and [b.status for b in others] == [503] * 3
    assert a.status == 503 and a.error()["type"] == "unavailable_error" and int(a.headers["retry-after"]) >= 1
    os.remove(tmp_path / "tokenizer.json")


def test_failures_at_start(tmp_path, server):
    def run(*flags):
        r = subprocess.run([TOKA, "serve", *flags], capture_output=True, timeout=60)
        return r.returncode, r.stderr.decode()

    for flags, words in ((["-m", str(tmp_path)], "config.json: No such file"), (["--max-model-len", "9999"], "--max-model-len: 9999, expected 2 to 1024"),
                         (["-c", "1"], "-c: 1, expected 2 to 1024"), (["--pipeline-parallel-size", "7"], "--pipeline-parallel-size 7: the model has 6 layers"),
                         (["--max-model-len", "200", "--kv-tokens", "100"], "--max-model-len 200: --kv-tokens asks for 100 tokens"),
                         (["--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "--max-num-batched-tokens: 8, expected at least --max-num-seqs, 9")):
        code, log = run("--port", "0", *flags)
        assert code == 1 and words in log and log.count("\n") == 1, log  # before it listens
    code, log = run("--port", str(server.address[1]))
    assert code == 2 and "Address already in use; another port: --port N, any free one: --port 0" in log
    for flags, word in ((["--port", "70000"], "--port"), (["--generation-config", "x"], "auto or vllm"),
                        (["--max-queue", "-1"], "--max-queue"),
                        (["--max-queue", "0"], "--max-queue"), (["--served-model-name", ""], "--served-model-name"),
                        (["--read-timeout", "0"], "--read-timeout"), (["--step-timeout", "0"], "--step-timeout"),
                        (["--api-key", ""], "--api-key"), (["--host", "no.such.host.invalid"], "--host"),
                        (["--max-body-bytes", "0"], "--max-body-bytes"), (["--files-dir", ""], "--files-dir"),
                        (["--server-threads", "99"], "--server-threads")):
        code, log = run("--port", "0", *flags)
        assert code == 1 and word in log


def test_unix_socket(tmp_path):
    path = str(tmp_path / "s")
    with Server(uds=path) as s:
        assert s.get("/health").status == 200
        assert s.post("/v1/completions", small()).status == 200
        r = subprocess.run([TOKA, "serve", "--uds", path], capture_output=True, timeout=60)
        assert r.returncode == 1 and b"another server" in r.stderr
        s.p.kill()
        s.p.wait()
    assert os.path.exists(path)  # the killed server did not remove its socket
    with Server(uds=path) as s:
        assert s.get("/health").status == 200
        assert s.stop() == 0
    assert not os.path.exists(path)
    (tmp_path / "file").write_text("x")
    r = subprocess.run([TOKA, "serve", "--uds", str(tmp_path / "file")], capture_output=True, timeout=60)
    assert r.returncode == 2 and (tmp_path / "file").read_text() == "x"


def test_unix_socket_paths(tmp_path):
    for path in ("", str(tmp_path / ("x" * 108))):
        r = subprocess.run([TOKA, "serve", "--uds", path, "--files-dir", "off"], capture_output=True, timeout=60)
        assert r.returncode == 1 and b"%d bytes, expected 1 to 107" % len(path) in r.stderr


def test_generation_config():
    with Server() as s:
        assert "defaults from generation_config.json: temperature 0" in s.log
        answers = {s.post("/v1/completions", {"prompt": "A", "max_tokens": 40}).json()["choices"][0]["text"] for _ in range(5)}
        assert len(answers) == 1
    with Server("--generation-config", "vllm") as s:
        assert "generation_config" not in s.log
        answers = {s.post("/v1/completions", {"prompt": "A", "max_tokens": 40}).json()["choices"][0]["text"] for _ in range(5)}
        assert len(answers) > 1


def test_uploads_take_little_memory(tmp_path):
    """The server writes a file of 100 MB to disk piece by piece, with both kinds of framing. An incomplete upload is not kept."""
    line = json.dumps({"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "y" * 900}}) + "\n"
    data = (line * 1000).encode()
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n' \
           b'--b\r\nContent-Disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n'
    tail = b"\r\n--b--\r\n"
    n = 100_000_000 // len(data)
    with Server(files=str(tmp_path)) as s:
        before = peak_memory(s)
        for framing in (f"Content-Length: {len(head) + n * len(data) + len(tail)}\r\n", "Transfer-Encoding: chunked\r\n"):
            with s.connect() as c:
                c.send("POST /v1/files HTTP/1.1\r\nHost: h\r\nContent-Type: multipart/form-data; boundary=b\r\n" + framing + "\r\n")
                for piece in [head] + [data] * n + [tail]:
                    c.send(b"%x\r\n" % len(piece) + piece + b"\r\n" if "chunked" in framing else piece)
                a = c.send("0\r\n\r\n" if "chunked" in framing else "").answer()
                assert a.status == 200 and a.json()["bytes"] == n * len(data)
                got = c.request("GET", f"/v1/files/{a.json()['id']}/content")  # the download is equal
                assert len(got.body) == n * len(data) and got.body[-len(data):] == data
                assert c.request("DELETE", f"/v1/files/{a.json()['id']}").status == 200
        assert peak_memory(s) - before < 20 << 20
        # Each \r of this value may be the beginning of a boundary.
        purpose = head.replace(b"batch\r\n--b", b"\rx" * 20_000_000 + b"\r\n--b") + b"x" + tail
        assert s.post("/v1/files", purpose, Content_Type="multipart/form-data; boundary=b").error()["param"] == "purpose"
        assert peak_memory(s) - before < 20 << 20
        with s.connect() as c:
            c.send("POST /v1/files HTTP/1.1\r\nHost: h\r\nContent-Type: multipart/form-data; boundary=b\r\n"
                   "Content-Length: 50000000\r\n\r\n")
            c.send(head + data * 10)
        s.wait_metric("http_connections", 1)
        assert s.get("/v1/files").json()["data"] == []
        assert sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file()) < 10_000


def test_served_names():
    with Server("--served-model-name", "one", "--served-model-name", "org/two") as s:
        assert [m["id"] for m in s.get("/v1/models").json()["data"]] == ["one", "org/two"]
        assert s.get("/v1/models/org%2Ftwo").status == s.get("/v1/models/org/two").status == 200
        assert s.post("/v1/completions", small(model="org/two")).status == 200
        assert s.post("/v1/completions", small(model="embedded")).status == 404


@pytest.mark.parametrize("typed", ["./test/model", "test/model/", f"{ROOT}/test/model", None])
def test_a_folder_is_served_as_typed(tmp_path, typed):
    """As with vLLM, clients may call the model as the command did: toka serve FOLDER, then bench serve --model FOLDER."""
    if not typed:  # bytes that are no UTF-8
        typed = os.path.join(os.fsencode(tmp_path), b"mod\xffel")
        os.symlink(f"{ROOT}/test/model", typed)
    shown = os.fsencode(typed).decode(errors="replace")
    name = shown.rstrip("/").split("/")[-1]
    with Server(typed, prefix=["env", "-C", ROOT], env={"TOKA_MAX_NUM_SEQS": "16"}) as s:
        models = s.get("/v1/models").json()["data"]
        assert [(m["id"], m["root"]) for m in models] == [(shown, shown)]
        for model in ([shown, name] if name == "model" else [shown]):
            assert s.get("/v1/models/" + urllib.parse.quote(model)).json()["id"] == s.get("/v1/models/" + urllib.parse.quote(model, safe="")).json()["id"] == model
            assert s.post("/v1/completions", small(model=model)).json()["model"] == model
        assert s.post("/v1/completions", small()).json()["model"] == shown
        a = s.post("/v1/completions", small(model="model/test"))
        assert a.status == 404 and a.error()["message"] == f"model: 'model/test' is not served here, '{shown}' is"
        assert "model_name=\"" + shown in s.get("/metrics").body.decode()
        r = subprocess.run([TOKA, "bench", "serve", "--port", str(s.address[1]), "--model", typed if name == "model" else shown, "--num-prompts", "2",
                            "--random-input-len", "5", "--random-output-len", "3"], capture_output=True, cwd=ROOT)
        assert r.returncode == 0 and b"Successful requests:                     2" in r.stdout, r.stderr


def test_names_that_are_given_replace_the_own_ones():
    with Server("test/model", "--served-model-name", "a", "b", "--max-num-seqs", "4", prefix=["env", "-C", ROOT]) as s:  # as vLLM takes them
        assert [m["id"] for m in s.get("/v1/models").json()["data"]] == ["a", "b"]
    r = subprocess.run([TOKA, "serve", "--served-model-name", "a", "test/model", "b"], capture_output=True)
    assert r.returncode == 1 and b"b: a second model" in r.stderr
    with Server("-m", f"{ROOT}/test/model", "--served-model-name", "x") as s:
        assert [(m["id"], m["root"]) for m in s.get("/v1/models").json()["data"]] == [("x", f"{ROOT}/test/model")]
        for name in ("model", f"{ROOT}/test/model"):
            assert s.post("/v1/completions", small(model=name)).status == s.get(f"/v1/models/{name}").status == 404
    with Server() as s:
        assert [(m["id"], m["root"]) for m in s.get("/v1/models").json()["data"]] == [("embedded", "embedded")]


# ---- Metrics and log ----

def read_metrics(text):
    """Check the rules of the text format (version 0.0.4): HELP and TYPE come once, before the samples of their family, which stand
    together; no series appears twice; names of counters end in _total; a histogram has increasing bounds and counts, +Inf, _sum and
    _count. Returns {series: value}."""
    families, series, current = {}, {}, None
    assert text.endswith("\n")
    for line in text.splitlines():
        if m := re.fullmatch(r"# HELP ([a-zA-Z_:][\w:]*) (.+)", line):
            current = m[1]
            assert current not in families
            families[current] = None
        elif m := re.fullmatch(r"# TYPE ([a-zA-Z_:][\w:]*) (counter|gauge|histogram)", line):
            assert m[1] == current and families[current] is None
            families[current] = m[2]
            assert m[2] != "counter" or current.endswith("_total")
        else:
            m = re.fullmatch(r'([a-zA-Z_:][\w:]*)\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\[\\n"])*",?)+)\} (\S+)', line)
            assert m, line
            base = re.sub("_(bucket|sum|count)$", "", m[1]) if families[current] == "histogram" else m[1]
            assert base == current
            assert (m[1], m[2]) not in series
            series[m[1], m[2]] = float(m[3])
            assert families[current] != "counter" or float(m[3]) >= 0
    for name, kind in families.items():
        if kind == "histogram":
            bounds = [(re.search(r'le="([^"]+)"', labels)[1], v) for (n, labels), v in series.items() if n == name + "_bucket"]
            buckets = [(float(bound), v) for bound, v in bounds]
            assert buckets == sorted(buckets) and [v for _, v in buckets] == sorted(v for _, v in buckets)
            assert buckets[-1][0] == float("inf")
            assert [v for (n, _), v in series.items() if n == name + "_count"] == [buckets[-1][1]]
            assert len([1 for (n, _) in series if n == name + "_sum"]) == 1
    kinds = {s: re.search(r'(?:finished_reason|code|phase)="(\w+)"', s[1]) for s in series}
    return {s[0] + (m[1] if (m := kinds[s]) else ""): v for s, v in series.items() if not s[0].endswith("_bucket")}


def test_metrics():
    with Server("--served-model-name", 'a"b\\c') as s:
        before = read_metrics(s.get("/metrics").body.decode())
        assert s.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
        used = s.post("/v1/completions", small(10, n=3, ignore_eos=True, temperature=1)).json()["usage"]
        s.post("/v1/completions", small(10, stream=True))
        s.post("/v1/completions", b"{")
        s.wait_metric("num_requests_running", 0)
        after = read_metrics(s.get("/metrics").body.decode())
        grown = {k.removeprefix("toka:"): after[k] - before[k] for k in after if after[k] != before[k]}
        assert grown["generation_tokens_total"] >= used["completion_tokens"] == 30
        assert grown["request_success_totallength"] + grown.get("request_success_totalstop", 0) == 4
        assert grown["time_to_first_token_seconds_count"] == grown["e2e_request_latency_seconds_count"] == 2
        assert grown["request_params_n_sum"] == 4 and grown["request_prompt_tokens_sum"] == 2 * used["prompt_tokens"]
        assert grown["request_generation_tokens_sum"] == grown["generation_tokens_total"]
        assert grown["inter_token_latency_seconds_count"] == grown["generation_tokens_total"] - 4  # a first token has no such latency
        assert grown["prefix_cache_hits_total"] > 0 and grown["prefix_cache_queries_total"] >= grown["prefix_cache_hits_total"]
        assert grown["http_responses_total4xx"] == 1 and grown["http_responses_total2xx"] >= 3


@pytest.mark.slow
def test_status_line():
    with Server() as s:
        with s.connect() as c:
            c.send(raw_post(json.dumps({**LONG, "n": 2000, "stream": True})))
            s.wait_for(r"prefill \d+ tok/s, decode [1-9]\d* tok/s, running 256, waiting \d+, "
                       r"KV [\d.]+%, prefix hits [\d.]+%, shared [\d.]+%")
        assert s.stop() == 0
    with Server("-q") as s:
        s.post("/v1/completions", small(100))
        time.sleep(6)
        assert "decode" not in s.read_log()


def test_unknown_fields_are_logged_once_or_refused(server):
    for _ in range(3):
        assert server.post("/v1/completions", small(no_such_field=1, **{"\x1b[31mred": 2, "\x9b31mred": 3})).status == 200
    assert server.read_log().count("no_such_field") == 1 and not {"\x1b", "\x9b"} & set(server.log) and "??31mred" in server.log
    with Server("--strict") as s:
        a = s.post("/v1/completions", small(no_such_field=1))
        assert a.status == 400 and "no_such_field" in a.error()["message"]


def test_the_routes_of_hosting_services(server):
    """POST /invocations is what its body is for; GET /ping is the health."""
    for path, body in (("/v1/completions", {"prompt": "Tom", "max_tokens": 4, "temperature": 0}),
                       ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tom"}], "max_tokens": 4, "temperature": 0})):
        want, got = (server.post(p, body).json() for p in (path, "/invocations"))
        assert got["choices"] == want["choices"] and got["object"] == want["object"]
    vectors = [server.post(path, {"input": "Tom"}).json()["data"] for path in ("/v1/embeddings", "/invocations")]
    assert vectors[0] == vectors[1]
    assert server.post("/invocations", {"query": "a", "documents": ["b"]}).error()["message"].endswith("modules.json of sentence-transformers")
    wrong = server.post("/invocations", {"max_tokens": 4})
    assert wrong.status == 400 and "prompt" in wrong.json()["error"]["message"]
    assert server.get("/invocations").status == 405
