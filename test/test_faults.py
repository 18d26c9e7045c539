"""Tests of the whole program when something fails: the device fails or hangs, a file is truncated, the disk or the memory is full.
Run through test/run.sh."""
import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time

import openai
import pytest

from server import ROOT, TOKA, Server, texts

ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}, "TOKA_DEVICE": "cpu"}
PROMPT = "Tom has 12 apples. He buys 7 more apples. How many apples does Tom have now?"
FAULT = "CPU backend: a step failed, as TOKA_DEBUG_FAULT wants it"
ENDED = ("completed", "failed", "cancelled", "expired")


def toka(*args, env=None, **more):
    return subprocess.run([TOKA, *args], env={**ENV, **(env or {})}, cwd=ROOT, capture_output=True, text=True, timeout=120, **more)


def lines(n, **body):
    body = {"prompt": "Tom has", "max_tokens": 40, "temperature": 1, "ignore_eos": True, **body}
    return "".join(json.dumps({"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}) + "\n" for i in range(n))


def client(server):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.address[1]}/v1", api_key="none", max_retries=0)


def post(server, body):
    """A connection on which a request was sent; its answer is not yet read."""
    body = json.dumps(body)
    return server.connect().send(f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n{body}")


def start_batch(api, text, window="24h"):
    f = api.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return api.batches.create(input_file_id=f.id, endpoint="/v1/completions", completion_window=window)


def wait_until_ended(api, id):
    """Waits for the end of a batch; returns its object."""
    end = time.time() + 120
    while (b := api.batches.retrieve(id)).status not in ENDED:
        assert time.time() < end, b
        time.sleep(0.03)
    return b


# ---- The device fails ----

@pytest.mark.parametrize("step", [1, 3])
def test_prompt_on_a_device_that_fails(step):
    r = toka("-p", PROMPT, "-n", "20", "--ignore-eos", env={"TOKA_DEBUG_FAULT": str(step)})
    assert r.returncode == 2 and r.stderr == f"toka: {FAULT}\n"
    assert not r.stdout or r.stdout.endswith("\n")
    r = toka("-p", PROMPT, "--samples", "3", "--json", env={"TOKA_DEBUG_FAULT": str(step)})
    assert r.returncode == 2 and r.stderr == f"toka: {FAULT}\n" and not r.stdout
    assert toka("score", "-p", PROMPT, env={"TOKA_DEBUG_FAULT": "1"}).returncode == 2


@pytest.fixture(scope="module")
def without_fault(tmp_path_factory):
    """The sorted results of 100 lines on a device that works."""
    out = tmp_path_factory.mktemp("without_fault") / "out.jsonl"
    assert toka("batch", "-q", "-i", "-", "-o", str(out), input=lines(100)).returncode == 0
    return sorted(out.read_text().splitlines())


@pytest.mark.parametrize("step", [1, 2, 30, 100])
def test_batch_on_a_device_that_fails(tmp_path, without_fault, step):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines(100))
    command = ("batch", "-q", "--max-num-seqs", "16", "-i", str(source), "-o", str(out))
    r = toka(*command, env={"TOKA_DEBUG_FAULT": str(step)})
    n = len(out.read_text().splitlines())
    assert r.returncode == 2 and r.stderr == f"toka: {FAULT}; {n} lines are written, the same command goes on from there\n"
    assert n < 100 and (step < 100 or n)
    assert toka(*command).returncode == 0
    assert sorted(out.read_text().splitlines()) == without_fault


@pytest.mark.parametrize("split", ["tensor", "pipeline", "data"])
def test_batch_on_several_devices_that_fail(tmp_path, split):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines(60))
    command = ("batch", "-q", "--max-num-seqs", "16", f"--{split}-parallel-size", "2", "-i", str(source), "-o", str(out))
    r = toka(*command, env={"TOKA_DEBUG_FAULT": "60"})
    assert r.returncode == 2 and len(r.stderr.splitlines()) == 1
    assert re.search(r"rank [01] .*a step failed in embed, as TOKA_DEBUG_FAULT wants it; \d+ lines are written", r.stderr)
    assert toka(*command).returncode == 0
    ids = [json.loads(line)["custom_id"] for line in out.read_text().splitlines()]
    assert len(ids) == len(set(ids)) == 60


@pytest.mark.slow
def test_server_on_a_device_that_fails(tmp_path):
    """A step fails while the server has streams, other requests, queued requests and a batch. Each client gets an error, /health becomes
    503, the server ends by itself, and the next server continues the batch."""
    answers, health_codes = {}, []

    def ask(s, i):
        body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "n": 1 + i % 3, "stream": i % 2 == 0}
        with s.connect() as c:
            answers[i] = c.request("POST", "/v1/completions", body)
            assert c.closed()

    def watch(s):
        try:
            while True:
                health_codes.append(s.get("/health").status)
                time.sleep(0.02)
        except (OSError, EOFError):  # the server has ended
            health_codes.append(None)

    with Server("--max-num-seqs", "24", env={"TOKA_DEBUG_FAULT": "300"}, files=str(tmp_path)) as s:
        api = client(s)
        batch = start_batch(api, lines(200))
        threads = [threading.Thread(target=watch, args=(s,))] + [threading.Thread(target=ask, args=(s, i)) for i in range(30)]
        for t in threads:
            t.start()
        began = time.time()
        assert s.p.wait(60) == 2 and time.time() - began < 50
        for t in threads:
            t.join(10)
            assert not t.is_alive()
        assert s.read_log().endswith(f"toka: {FAULT}\n")
    assert sorted(answers) == list(range(30))
    for i, a in answers.items():
        if i % 2:
            assert a.status == 500 and "device failed" in a.error()["message"] and a.error()["type"] == "server_error"
        elif a.status != 200:  # a stream without its first token
            assert a.status == 500 and "device failed" in a.error()["message"] and a.headers["content-type"] == "application/json"
        else:
            events = a.body.decode().removesuffix("\n\n").split("\n\n")
            assert events[-1] == "data: [DONE]"
            error = json.loads(events[-2].removeprefix("data: "))["error"]
            assert "device failed" in error["message"] and error["type"] == "server_error"
            assert all("choices" in json.loads(e.removeprefix("data: ")) for e in events[:-2])
    assert {a.status for i, a in answers.items() if i % 2 == 0} == {200, 500}
    assert health_codes[0] == 200 and health_codes[-2:] == [503, None] and health_codes == sorted(health_codes, key=lambda h: h or 999)
    with Server(files=str(tmp_path)) as s:
        api = client(s)
        b = wait_until_ended(api, batch.id)
        assert b.status == "completed" and b.request_counts.completed == b.request_counts.total == 200
        ids = [json.loads(line)["custom_id"] for line in api.files.content(b.output_file_id).text.splitlines()]
        assert sorted(ids) == sorted(f"r{i}" for i in range(200))


@pytest.mark.parametrize("step", [1, 20])
def test_small_batch_of_a_server_whose_device_fails(tmp_path, step):
    """The engine already has all lines of the batch, so the batch thread cannot notice the failure when it submits a line."""
    with Server(env={"TOKA_DEBUG_FAULT": str(step)}, files=str(tmp_path)) as s:
        batch = start_batch(client(s), lines(5))
        assert s.p.wait(30) == 2
    with Server(files=str(tmp_path)) as s:
        b = wait_until_ended(client(s), batch.id)
        assert (b.status, b.request_counts.completed, b.request_counts.failed, b.request_counts.total) == ("completed", 5, 0, 5)
        ids = [json.loads(line)["custom_id"] for line in client(s).files.content(b.output_file_id).text.splitlines()]
        assert sorted(ids) == [f"r{i}" for i in range(5)]


# ---- A step never returns ----

@pytest.mark.slow
def test_engine_that_hangs(tmp_path):
    """/health becomes 503 after --step-timeout plus at most two ticks, and not earlier. What needs no engine still works. Two signals
    end the server."""
    with Server("--step-timeout", "2", "--max-queue", "3", env={"TOKA_DEBUG_STALL": "20"}, files=str(tmp_path)) as s:
        assert s.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 5}).status == 200
        began = time.time()
        held = post(s, {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True})
        assert held.head()[0] == 200
        while (a := s.get("/health")).status == 200:
            assert time.time() - began < 20  # 4.5 s on an idle machine
            time.sleep(0.02)
        assert time.time() - began > 1.5 and a.status == 503 and "no step for 2 s" in a.error()["message"]
        for path in ("/", "/version", "/metrics", "/v1/models", "/v1/files", "/v1/batches"):
            assert s.get(path).status == 200
        assert s.post("/tokenize", {"prompt": PROMPT}).json()["count"] > 5
        batch = start_batch(client(s), lines(3))  # the next server will run it
        waiting = [post(s, {"prompt": "x"}) for _ in range(3)]
        s.wait_metric("http_requests_waiting", 3)
        assert s.post("/v1/completions", {"prompt": "x"}).status == 429
        for c in waiting:
            c.close()
        s.wait_metric("http_requests_waiting", 0)
        s.p.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert s.p.poll() is None  # it waits until the running request has ended
        s.p.send_signal(signal.SIGTERM)
        assert s.p.wait(30) != 0
    with Server(files=str(tmp_path)) as s:
        assert wait_until_ended(client(s), batch.id).request_counts.completed == 3


@pytest.mark.slow
def test_one_signal_ends_an_engine_that_hangs():
    """After a signal, the program gives up its device if a step does not end: after 10 s, or for a server --step-timeout. It then waits
    up to 5 s for the device's threads."""
    env = {**ENV, "TOKA_DEBUG_STALL": "3"}
    p = subprocess.Popen([TOKA, "-p", PROMPT, "-q", "-n", "40", "--ignore-eos"], env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE,
                         text=True)
    with Server("--step-timeout", "1", env={"TOKA_DEBUG_STALL": "3"}) as s:
        held = post(s, {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True})
        assert held.head()[0] == 200 and p.stdout.read(1)  # both have produced a token
        time.sleep(1)
        began = time.time()
        p.send_signal(signal.SIGINT), s.p.send_signal(signal.SIGTERM)
        assert s.p.wait(40) != 0 and time.time() - began > 1
        held.close()
    assert p.wait(40) == 130 and time.time() - began > 9
    assert p.stderr.read() == "toka: the device has not ended its step in 10 s since the program was asked to end\n"


@pytest.mark.slow
def test_idle_engine_does_not_hang():
    with Server("--step-timeout", "0.5") as s:
        for _ in range(15):
            assert s.get("/health").status == 200
            time.sleep(0.2)


# ---- Truncated files, full disks ----

def copy_model(folder):
    shutil.copytree(os.path.join(ROOT, "test/model"), folder, ignore=shutil.ignore_patterns("make", "*.jsonl", "*.md"))
    return str(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "generation_config.json", "tokenizer_config.json"])
def test_truncated_model_file(tmp_path, name):
    model = copy_model(tmp_path / "model")
    size = os.path.getsize(os.path.join(model, name))
    commands = ("-p", "x", "-n", "1"), ("batch", "-q", "-i", "/dev/null", "-o", "/dev/null"), ("serve", "--port", "0")
    for left in (size - 2, size // 2, 8, 0):  # not size - 1: the last byte may be a line feed
        os.truncate(os.path.join(model, name), left)
        for command in commands if left == size // 2 else commands[:1]:
            r = toka(*command, "-m", model)
            messages = [line for line in r.stderr.splitlines() if "listening on" not in line]
            assert r.returncode == 1 and len(messages) == 1 and name in messages[0], (left, command, r)


def test_weights_truncated_while_used(tmp_path):
    """The weights are read from a mapped file. The server ends with one sentence and status 2. The batch continues when the file is
    whole again."""
    model, out = copy_model(tmp_path / "model"), tmp_path / "files"
    with Server("-m", model, "--max-num-seqs", "16", files=str(out)) as s:
        api = client(s)
        batch = start_batch(api, lines(300))
        while not api.batches.retrieve(batch.id).request_counts.completed:
            assert s.p.poll() is None
        os.truncate(os.path.join(model, "model.safetensors"), 5000)
        assert s.p.wait(20) == 2
        assert s.read_log().endswith("toka: a file of the model can no longer be read: it was cut short, or its disk failed\n")
    shutil.copy(os.path.join(ROOT, "test/model/model.safetensors"), model)
    with Server("-m", model, files=str(out)) as s:
        b = wait_until_ended(client(s), batch.id)
        assert b.status == "completed" and b.request_counts.completed == 300
        ids = [json.loads(line)["custom_id"] for line in client(s).files.content(b.output_file_id).text.splitlines()]
        assert len(ids) == len(set(ids)) == 300


@pytest.mark.slow
def test_input_truncated_while_read(tmp_path):
    """The second pass over the input finds fewer lines than the first pass counted: this is an error."""
    source, out, n = tmp_path / "in.jsonl", tmp_path / "out.jsonl", 400
    requests = [{"custom_id": f"{i:02000}", "prompt": "Tom", "max_tokens": 50 if i else 5, "ignore_eos": True} for i in range(n)]
    text = "".join(json.dumps(request) + "\n" for request in requests)
    source.write_text(text)  # larger than the read buffer
    command = [TOKA, "batch", "-q", "--max-num-seqs", "2", "-i", str(source), "-o", str(out)]
    p = subprocess.Popen(command, env=ENV, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not out.exists() or not out.stat().st_size:
        assert p.poll() is None
        time.sleep(0.005)
    os.truncate(source, text.index(f"{300:02000}") - len('{"custom_id": "'))
    err = p.communicate(timeout=100)[1]
    assert p.returncode == 2 and re.search(r"cut while it was read, from 400 lines to 3\d\d\n$", err) and len(err.splitlines()) == 1
    source.write_text(text)
    assert subprocess.run(command, env=ENV, cwd=ROOT, timeout=60).returncode == 0
    assert len({json.loads(line)["custom_id"] for line in open(out)}) == len(out.read_text().splitlines()) == n


def limit_file_size(n):
    """A command prefix that limits each file to n bytes. It simulates a full disk."""
    return ("bash", "-c", f'ulimit -f {n // 1024}; exec "$0" "$@"')


def test_full_disk_of_a_server(tmp_path):
    """If an upload does not fit, no file is left. If the results of a batch do not fit, the batch fails and keeps the results that it
    has. Everything else still works."""
    with Server(files=str(tmp_path), prefix=limit_file_size(128 << 10)) as s:
        api = client(s)
        with pytest.raises(openai.InternalServerError, match="File too large"):
            api.files.create(file=("in.jsonl", b"x" * 200_000), purpose="batch")
        assert sorted(os.listdir(tmp_path)) == ["lock"] and not list(api.files.list())
        b = wait_until_ended(api, start_batch(api, lines(500)).id)
        assert b.status == "failed" and "File too large" in b.errors.data[0].message
        done = [json.loads(line)["custom_id"] for line in api.files.content(b.output_file_id).text.splitlines()]
        assert len(done) == len(set(done)) == b.request_counts.completed > 100
        assert wait_until_ended(api, start_batch(api, lines(10)).id).status == "completed"
        assert s.get("/health").status == 200 and s.stop() == 0


FULL_DISK = r"""/* While the file $FULL_DISK exists, write() to a regular file writes half of the bytes; the next write() fails. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
ssize_t write(int fd, const void *p, size_t n) {
    static ssize_t (*real)(int, const void *, size_t);
    static _Thread_local int half;
    struct stat st;
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "write");
    if (fd < 3 || fstat(fd, &st) || !S_ISREG(st.st_mode) || access(getenv("FULL_DISK"), F_OK)) return real(fd, p, n);
    if ((half = !half) && n > 1) return real(fd, p, n / 2);
    return errno = getenv("DISK_ERROR") ? atoi(getenv("DISK_ERROR")) : ENOSPC, -1;
}
"""


class Disk:
    """A simulated disk that can become full. A process started with `env` uses it."""

    def __init__(self, folder):
        (folder / "disk.c").write_text(FULL_DISK)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "disk.so", folder / "disk.c", "-ldl"], check=True)
        self.flag = folder / "full"
        self.env = {"LD_PRELOAD": str(folder / "disk.so"), "FULL_DISK": str(self.flag)}

    def full(self):
        self.flag.touch()

    def free_space(self):
        self.flag.unlink()


def all_results(api, batch):
    """All results and errors of a batch. Asserts that no custom_id appears twice and that the counts are right."""
    got = [json.loads(line) for f in (batch.output_file_id, batch.error_file_id) if f for line in api.files.content(f).text.splitlines()]
    assert len({r["custom_id"] for r in got}) == len(got) == batch.request_counts.completed + batch.request_counts.failed
    return got


def start_and_fill_disk(s, api, disk, n, **more):
    """Starts a batch of n requests and makes the disk full; returns when the batch waits for free space."""
    b = start_batch(api, lines(n), **more)
    while not (now := api.batches.retrieve(b.id)).request_counts.completed:
        assert now.status in ("validating", "in_progress") and not now.request_counts.failed
        time.sleep(0.01)
    disk.full()
    s.wait_for("No space left on device; its batch waits for room")
    return b


@pytest.mark.slow
def test_a_batch_waits_for_a_full_disk(tmp_path):
    """While the disk is full, the results stay in memory and other requests are served; a request that needs the disk is refused and
    leaves no file. When there is space the batch continues, even if the server was killed in between."""
    disk, folder = Disk(tmp_path), tmp_path / "files"
    with Server(files=str(folder), env=disk.env) as s:
        api = client(s)
        b = start_and_fill_disk(s, api, disk, 400)
        assert api.batches.retrieve(b.id).status == "in_progress"
        assert s.post("/v1/completions", {"prompt": "Tom", "max_tokens": 1}).status == 200
        before = sorted(os.listdir(folder))
        with pytest.raises(openai.InternalServerError, match="No space left"):
            api.files.create(file=("in.jsonl", b"x" * 2000), purpose="batch")
        with pytest.raises(openai.InternalServerError, match="No space left"):
            api.batches.create(input_file_id=b.input_file_id, endpoint="/v1/completions", completion_window="24h")
        assert sorted(os.listdir(folder)) == before
        disk.free_space()
        b = wait_until_ended(api, b.id)
        assert b.status == "completed" and len(all_results(api, b)) == 400
        assert s.log.count("No space left") == 1
        b = start_and_fill_disk(s, api, disk, 400)
        s.p.kill()
        s.p.wait()
    disk.free_space()
    with Server(files=str(folder), env=disk.env) as s:
        api = client(s)
        b = wait_until_ended(api, b.id)
        assert b.status == "completed" and len(all_results(api, b)) == 400
        start_and_fill_disk(s, api, disk, 400)
        assert s.stop() == 0  # the server does not wait for space before it ends


@pytest.mark.parametrize("error, status", [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EFBIG, 507), (errno.EROFS, 507),
                                           (errno.EACCES, 507), (errno.EIO, 500)])
def test_errors_do_not_show_paths(tmp_path, error, status):
    """An error of the disk has its HTTP status and the system's message, but no path of the server; so has the object of a failed
    batch."""
    disk, folder = Disk(tmp_path), tmp_path / "files"
    with Server(files=str(folder), env={**disk.env, "DISK_ERROR": str(error)}) as s:
        api = client(s)
        f = api.files.create(file=("in.jsonl", lines(40).encode()), purpose="batch")
        b = api.batches.create(input_file_id=f.id, endpoint="/v1/completions", completion_window="24h")
        new = {"input_file_id": f.id, "endpoint": "/v1/completions", "completion_window": "24h"}
        form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n' + b"x" * 5000 + b"\r\n--b--\r\n"
        disk.full()
        for a in (s.post("/v1/batches", new), s.post("/v1/files", form, Content_Type="multipart/form-data; boundary=b")):
            assert a.status == status and os.strerror(error) in a.error()["message"] and str(tmp_path) not in a.body.decode()
        if error in (errno.EROFS, errno.EACCES, errno.EIO, errno.EFBIG):  # after another error the batch waits
            ended = wait_until_ended(api, b.id)
            assert str(tmp_path) not in ended.to_json()
            assert ended.status == "completed" or os.strerror(error) in ended.errors.data[0].message
        disk.free_space()


@pytest.mark.slow
def test_the_end_of_a_batch_waits_for_a_full_disk(tmp_path):
    """A batch that is cancelled or out of time changes its status only when its end is written to disk."""
    disk, folder = Disk(tmp_path), tmp_path / "files"
    with Server(files=str(folder), env=disk.env) as s:
        api = client(s)
        b = start_and_fill_disk(s, api, disk, 4000)
        assert api.batches.cancel(b.id).status == "cancelling"
        time.sleep(2.5)
        assert api.batches.retrieve(b.id).status == "cancelling"
        disk.free_space()
        b = wait_until_ended(api, b.id)
        assert b.status == "cancelled" and 0 < len(all_results(api, b)) < 4000
        assert s.read_log().count("No space left") <= 3
        s.log = ""
        b = start_and_fill_disk(s, api, disk, 1000, window="9s")
        time.sleep(max(0, b.expires_at + 2 - time.time()))
        assert api.batches.retrieve(b.id).status == "in_progress"
        disk.free_space()
        b = wait_until_ended(api, b.id)
        assert b.status == "expired" and len(all_results(api, b)) == 1000
    with Server(files=str(folder), env=disk.env) as s:
        assert client(s).batches.retrieve(b.id).status == "expired"


@pytest.mark.slow
def test_full_disk_of_a_batch_run(tmp_path):
    """toka batch does not wait for space: it ends with a message and status 2. The same command continues when there is space."""
    disk, source = Disk(tmp_path), tmp_path / "in.jsonl"
    source.write_text(lines(200))
    command = ("batch", "-q", "--max-num-seqs", "4", "-i", str(source), "-o")
    assert toka(*command, str(tmp_path / "whole.jsonl")).returncode == 0
    out, kept = tmp_path / "out.jsonl", -1
    for _ in range(3):
        p = subprocess.Popen([TOKA, *command, str(out)], env={**ENV, **disk.env}, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        while p.poll() is None and (not out.exists() or out.stat().st_size <= max(kept, 0)):
            time.sleep(0.005)
        disk.full()
        err = p.communicate(timeout=60)[1]
        disk.free_space()
        kept = out.stat().st_size
        n = out.read_text().count("\n")
        assert p.returncode == 2
        assert err == f"toka: -o {out}: No space left on device; {n} lines are written, the same command goes on from there\n"
        assert 0 < n < 200 and out.read_text().endswith("\n")
    assert toka(*command, str(out)).returncode == 0
    assert sorted(open(out)) == sorted(open(tmp_path / "whole.jsonl"))


# ---- Memory ----

def status(s, name):
    """A value of /proc/PID/status, in bytes."""
    with open(f"/proc/{s.p.pid}/status") as f:
        return int(re.search(rf"{name}:\s*(\d+)", f.read())[1]) << 10


def server_with_little_memory(megabytes, *flags, **more):
    """A server that may map only this much memory more than it has mapped when it is ready."""
    flags = ("--max-num-seqs", "16", "--kv-tokens", "20000", "--threads", "2", "--server-threads", "2", *flags)
    prefix = lambda kilobytes: ("bash", "-c", f'ulimit -v {kilobytes}; exec "$0" "$@"')
    with Server(*flags, **more, prefix=prefix(100 << 20)) as s:
        limit = (status(s, "VmSize") >> 10) + megabytes * 1024
    return Server(*flags, **more, prefix=prefix(limit))


def ask(s, data, path="/v1/completions", seconds=60):
    """The status of the answer; None if there is no answer in time. Checks the header and message of a 503."""
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    with s.connect() as c:
        c.s.settimeout(seconds)
        try:
            c.send(f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        except OSError:  # the server refused the request before all of it was sent
            pass
        try:
            a = c.answer()
        except (OSError, EOFError):
            return None
        assert a.status != 503 or (a.headers["retry-after"] and "memory" in a.error()["message"])
        return a.status


def send_and_wait(s, data, seconds, rcvbuf=4096):
    """Sends data, which may be an incomplete request, and then neither sends nor reads."""
    with s.connect(rcvbuf=rcvbuf) as c:
        try:
            c.send(data)
        except OSError:
            pass
        time.sleep(seconds)


@pytest.mark.slow
@pytest.mark.skipif("TOKA_BINARY" in os.environ, reason="sanitizers map extra memory")
@pytest.mark.parametrize("megabytes", [60, 300])
def test_clients_cannot_take_all_memory(tmp_path, megabytes):
    """Clients send large requests and do not read answers. The server refuses requests if memory is short, serves other clients and
    does not end."""
    values, text = b'{"prompt":[' + b"5," * 4_000_000 + b"5]}", b'{"prompt":"' + b"a 7," * 8_000_000 + b'"}'
    bias = b'{"prompt":"Tom","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(400_000)) + b'}}'
    stops = b'{"prompt":"Tom","stop":[' + b'"a",' * 2_000_000 + b'"a"]}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {60 << 20}\r\n\r\n".encode()
    stream = json.dumps({"prompt": PROMPT, "max_tokens": 300, "n": 16, "ignore_eos": True, "stream": True, "logprobs": 20})
    stream = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(stream)}\r\n\r\n{stream}".encode()
    chat = {"messages": [{"role": "user", "content": "hello " * 1_000_000}] * 4}
    statuses, health_codes = [], []
    with server_with_little_memory(megabytes, files=str(tmp_path)) as s:
        jobs = [(ask, d, p) for d, p in ((values, "/v1/completions"), (text, "/v1/completions"), (text, "/tokenize"),
                                         (bias, "/v1/completions"), (stops, "/v1/completions"),
                                         (chat, "/v1/chat/completions")) for _ in range(3)]
        jobs += [(ask, {"prompt": "Tom", "n": 65536, "max_tokens": 3, "logprobs": 20}, "/v1/completions", 5)] * 20
        jobs += [(send_and_wait, head + b"x" * (30 << 20), 6)] * 6 + [(send_and_wait, stream, 6)] * 16
        jobs += [(send_and_wait, stream + b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n" * 2000, 6)] * 16
        threads = [threading.Thread(target=lambda f=f, d=d, m=m: statuses.append(f(s, d, *m)), daemon=True) for f, d, *m in jobs]
        for t in threads:
            t.start()
        while any(t.is_alive() for t in threads):
            health_codes.append(s.get("/health").status)
            assert s.p.poll() is None
            time.sleep(0.05)
        assert set(statuses) <= {None, 200, 400, 503} and 503 in statuses and set(health_codes) == {200}
        s.wait_metric("num_requests_running", 0)
        s.wait_metric("num_requests_waiting", 0)
        s.wait_metric("http_connections", 1)
        assert ask(s, {"prompt": "Tom", "max_tokens": 3}) == 200
        assert s.stop() == 0 and "out of memory" not in s.log


@pytest.mark.slow
@pytest.mark.skipif("TOKA_BINARY" in os.environ, reason="sanitizers map extra memory")
def test_an_answer_larger_than_memory():
    """The request ends with a 503 before its answer is complete."""
    large = {"prompt": "Tom", "n": 65536, "max_tokens": 2, "logprobs": 32, "ignore_eos": True}
    with server_with_little_memory(60) as s:
        assert ask(s, large, seconds=120) == 503
        assert s.metric("generation_tokens_total") < 100_000
        s.wait_metric("num_requests_running", 0)
        assert ask(s, {"prompt": "Tom", "max_tokens": 3}) == 200


@pytest.mark.slow
@pytest.mark.skipif("TOKA_BINARY" in os.environ, reason="sanitizers map extra memory")
def test_limit_of_all_incoming_bodies():
    """All incoming bodies share one limit of memory. A body that does not fit is refused while it arrives; a small body always fits."""
    got = []

    def send_half_a_body(s):
        with s.connect() as c:
            try:
                c.send(f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {60 << 20}\r\n\r\n".encode() + b"x" * (30 << 20))
            except OSError:
                pass
            try:
                c.s.settimeout(5)
                a = c.answer()
                got.append((a.status, a.headers.get("retry-after")))
            except (OSError, EOFError):
                got.append(None)

    with server_with_little_memory(300) as s:
        threads = [threading.Thread(target=send_half_a_body, args=(s,)) for _ in range(10)]
        for t in threads:
            t.start()
        time.sleep(2)
        assert ask(s, {"prompt": "Tom", "max_tokens": 3}) == 200 and status(s, "VmRSS") < 220 << 20
        for t in threads:
            t.join()
        assert len(got) == 10 and (503, "1") in got


@pytest.mark.slow
@pytest.mark.skipif("TOKA_BINARY" in os.environ, reason="sanitizers map extra memory")
def test_a_batch_with_little_memory(tmp_path):
    """If a line does not fit into memory, this line gets an error and the batch continues."""
    body = {"prompt": "7 " * 12_000_000}
    text = lines(20) + json.dumps({"custom_id": "large", "method": "POST", "url": "/v1/completions", "body": body}) + "\n"
    with server_with_little_memory(100, files=str(tmp_path)) as s:
        api = client(s)
        b = wait_until_ended(api, start_batch(api, text).id)
        assert b.status == "completed" and (b.request_counts.completed, b.request_counts.failed) == (20, 1)
        error = json.loads(api.files.content(b.error_file_id).text)
        assert error["custom_id"] == "large" and "no memory to read a line of" in json.dumps(error)


# ---- Half-closed connections ----

@pytest.mark.slow
def test_half_closed_connections(tmp_path):
    """A client that shuts down its sending side gets its whole answer, even if its request waits in the queue or behind another answer."""
    body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    path = str(tmp_path / "s")
    for where in ({}, {"uds": path}):
        with Server("--max-num-seqs", "1", **where) as s:
            want = s.post("/v1/completions", body).json()["choices"][0]["text"]
            with s.connect() as c:
                c.send("GET /health HTTP/1.1\r\nHost: h\r\n\r\nGET /version HTTP/1.1\r\nHost: h\r\n\r\n")
                c.s.shutdown(socket.SHUT_WR)
                assert c.answer().status == 200 and "version" in c.answer().json() and c.closed()
            first = post(s, {**body, "max_tokens": 900, "n": 8, "stream": True})
            assert first.head()[0] == 200
            plain, stream, pipelined, http_1_0 = [post(s, {**body, "stream": i == 1}) for i in range(3)] + [s.connect()]
            text = json.dumps(body)
            pipelined.send(f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(text)}\r\n\r\n{text}"
                           "GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
            http_1_0.send(f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(text)}\r\n\r\n{text}")
            clients = [first, plain, stream, pipelined, http_1_0]
            for c in clients:
                c.s.shutdown(socket.SHUT_WR)
            time.sleep(1.5)  # until the server has sent more than one byte of the waiting answers
            assert texts(b"".join(first.chunks()))[1] and first.closed()
            assert plain.answer().json()["choices"][0]["text"] == want and plain.closed()
            assert texts(stream.answer().body) == ({0: want}, True) and stream.closed()
            assert [pipelined.answer().json()["choices"][0]["text"] for _ in range(2)] == [want] * 2
            assert pipelined.answer().json() == {"status": "ok"} and pipelined.closed()
            assert http_1_0.answer().json()["choices"][0]["text"] == want and http_1_0.closed()
            deadline = time.time() + 10  # the last step in flight gives its pages back a moment after the answer
            while s.metric("kv_cache_usage_perc") and time.time() < deadline:
                time.sleep(0.05)
            assert s.metric("kv_cache_usage_perc") == 0 and s.metric("request_success_total", 'finished_reason="abort"') == 0


def test_half_closed_after_many_pipelined_requests():
    """The client shuts down its sending side while the server has not yet read all of its pipelined requests."""
    with Server() as s, s.connect() as c:
        first, n = json.dumps({"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True}), 4000
        c.send(f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(first)}\r\n\r\n{first}")
        c.send("GET /health HTTP/1.1\r\nHost: h\r\n\r\n" * n)
        c.s.shutdown(socket.SHUT_WR)
        assert c.answer().status == 200 and all(c.answer().json() == {"status": "ok"} for _ in range(n)) and c.closed()


@pytest.mark.parametrize("uds", [False, True])
def test_clients_that_left_are_noticed(tmp_path, uds):
    """The server notices a closed connection at once. If a client first shuts down its sending side and closes later, the server notices
    within seconds. It cancels the requests in both cases."""
    body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "n": 2000}
    with Server("--max-num-seqs", "4", **({"uds": str(tmp_path / "s")} if uds else {})) as s:
        for stream in (False, True):
            for shut_down_first in (False, True):
                running = post(s, {**body, "stream": stream})
                s.wait_metric("http_connections", 2)
                waiting = post(s, {**body, "n": 1, "stream": stream})
                s.wait_metric("http_connections", 3)
                for c in (waiting, running):
                    if shut_down_first:
                        c.s.shutdown(socket.SHUT_WR)
                        time.sleep(0.3)
                        assert s.metric("http_connections") == (3 if c is waiting else 2)
                    c.close()
                    s.wait_metric("http_connections", 2 if c is waiting else 1, seconds=20)
                s.wait_metric("num_requests_waiting", 0)
                s.wait_metric("num_requests_running", 0)
        assert s.metric("kv_cache_usage_perc") == 0 and s.post("/v1/completions", {"prompt": "Tom", "max_tokens": 3}).status == 200


# ---- SIGHUP: the terminal was closed ----

@pytest.mark.slow
def test_sighup_acts_as_sigterm(tmp_path):
    """Several SIGHUPs count as one signal. If SIGHUP was ignored from the start, as under nohup, it stays ignored."""
    (tmp_path / "in.jsonl").write_text(lines(3000))
    command = [TOKA, "batch", "-i", "in.jsonl", "-o", "out.jsonl", "--report", "report.json"]
    p = subprocess.Popen(command, env=ENV, cwd=tmp_path, stderr=subprocess.PIPE)
    end = time.time() + 60
    while not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").stat().st_size:
        assert time.time() < end and p.poll() is None
        time.sleep(0.01)
    for _ in range(3):
        p.send_signal(signal.SIGHUP)
    assert p.wait(60) == 130
    report = json.loads((tmp_path / "report.json").read_text())
    assert 0 < len(open(tmp_path / "out.jsonl").readlines()) < 3000 and report
    with Server() as s:
        want = s.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True}).json()["choices"][0]["text"]
        held = post(s, {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "stream": True})
        assert held.head()[0] == 200
        for _ in range(3):
            s.p.send_signal(signal.SIGHUP)
            time.sleep(0.05)
        assert texts(b"".join(held.chunks())) == ({0: want}, True)
        assert s.p.wait(60) == 0
    with Server(prefix=["nohup"]) as s:
        s.p.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert s.get("/health").status == 200 and s.stop() == 0


# ---- Unreadable key files ----

def test_unreadable_key_files(tmp_path):
    for path, word in ((tmp_path / "none", "No such file"), (tmp_path, "is a directory")):
        r = toka("serve", "--port", "0", "--api-key-file", str(path))
        assert r.returncode == 1 and str(path) in r.stderr and word in r.stderr and len(r.stderr.splitlines()) == 1
