"""Tests of /v1/files and /v1/batches with the openai client: whole batches, faulty ones, cancelled and expired ones, and servers that
are killed at random moments. Run through test/run.sh."""
import json
import os
import random
import resource
import shutil
import signal
import time

import openai
import pytest

from server import ROOT, Server

PROBLEMS = [json.loads(line)["prompt"] for line in open(os.path.join(ROOT, "test/model/heldout.jsonl"))]


def serve(folder, *flags, **more):
    return Server(*flags, files=str(folder), **more)


def client(server, **more):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.address[1]}/v1", api_key="none", max_retries=0, **more)


def lines(n, tokens=3, endpoint="/v1/completions", name="r", **body):
    body = {"max_tokens": tokens, "temperature": 1, **body}
    return "".join(json.dumps({"custom_id": f"{name}{i}", "method": "POST", "url": endpoint,
                               "body": {"prompt": f"Tom has {i}", **body}}) + "\n" for i in range(n))


def endless(n=10_000):
    """n requests: 20 are answered soon, and the rest takes longer than the test."""
    return lines(20, 1) + lines(n - 20, 500, name="long", ignore_eos=True)


def start(api, text, endpoint="/v1/completions", window="24h", **more):
    f = api.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return api.batches.create(input_file_id=f.id, endpoint=endpoint, completion_window=window, **more)


def wait(api, batch, until=lambda b: b.status in ("completed", "failed", "cancelled", "expired")):
    """Waits for a state of a batch; returns its object. There is no limit of the total time, so slow machines pass, but a batch without
    progress for two minutes fails the test."""
    last_progress, last = time.time(), None
    while not until(batch):
        if last != (last := (batch.status, batch.request_counts)):
            last_progress = time.time()
        assert time.time() < last_progress + 120, batch
        time.sleep(0.03)
        batch = api.batches.retrieve(batch.id)
    return batch


def wait_for_first_result(api, batch):
    return wait(api, batch, lambda b: b.request_counts.completed)


def results(api, file_id):
    return [json.loads(line) for line in api.files.content(file_id).text.splitlines()] if file_id else []


def counts(batch):
    return batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed


def test_embeddings_batch(tmp_path):
    """A batch of embeddings, which gives the vectors of /v1/embeddings."""
    with serve(tmp_path) as s:
        api = client(s)
        text = "".join(json.dumps({"custom_id": f"r{i}", "method": "POST", "url": "/v1/embeddings",
                                   "body": {"input": [f"Tom has {i}", "x"] if i < 9 else "", "dimensions": 4}}) + "\n" for i in range(10))
        b = wait(api, start(api, text, endpoint="/v1/embeddings"))
        assert b.status == "completed" and counts(b) == (10, 9, 1) and b.endpoint == "/v1/embeddings"
        for line in results(api, b.output_file_id):
            body = line["response"]["body"]
            want = api.embeddings.create(model="embedded", input=[f"Tom has {line['custom_id'][1:]}", "x"], dimensions=4, encoding_format="float")
            for got, vector in zip(body["data"], want.data):
                assert max(abs(a - b) for a, b in zip(got["embedding"], vector.embedding)) < 1e-6
        error, = results(api, b.error_file_id)
        assert error["response"]["status_code"] == 400 and error["response"]["body"]["error"]["param"] == "input"


def test_files(tmp_path):
    with serve(tmp_path) as s:
        api = client(s)
        f = api.files.create(file=("dir/räksmörgås 1.jsonl", b"one\ntwo\n"), purpose="batch")
        assert (f.bytes, f.filename, f.purpose, f.status, f.object) == (8, "räksmörgås 1.jsonl", "batch", "processed", "file")
        assert api.files.retrieve(f.id) == f and api.files.content(f.id).read() == b"one\ntwo\n"
        more = [api.files.create(file=b"x", purpose="fine-tune") for _ in range(7)]
        assert [x.id for x in api.files.list(limit=3)] == [x.id for x in more[::-1]] + [f.id]  # the client requests page after page
        assert [x.id for x in api.files.list(order="asc", purpose="batch")] == [f.id]
        assert api.files.delete(f.id).deleted
        with pytest.raises(openai.NotFoundError):
            api.files.retrieve(f.id)
        with pytest.raises(openai.BadRequestError, match="purpose"):
            api.files.create(file=b"x", purpose="nonsense")
        big = random.Random(1).randbytes(20_000_000)  # a file may contain any bytes
        f = api.files.create(file=("big.bin", big), purpose="user_data")
        assert f.bytes == len(big) and api.files.content(f.id).read() == big
    assert not [n for n in os.listdir(tmp_path) if n.endswith(".part")]
    assert os.stat(tmp_path / f.id).st_mode & 0o077 == 0


def test_batch(tmp_path):
    bad = {"custom_id": "bad", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [], "temperature": "warm"}}
    streams = {**bad, "custom_id": "streams", "body": {"messages": [{"role": "user", "content": "Tom"}], "stream": True}}
    body = {"model": "tiny", "n": 3, "temperature": 1}
    chats = [{"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions",
              "body": {**body, "messages": [{"role": "user", "content": PROBLEMS[i]}]}} for i in range(30)]
    with serve(tmp_path, "--served-model-name", "tiny") as s:
        api = client(s)
        b = start(api, "\n\n".join(map(json.dumps, [*chats, bad, streams])), "/v1/chat/completions", metadata={"purpose": "test"})
        assert (b.status, b.metadata, b.endpoint) == ("validating", {"purpose": "test"}, "/v1/chat/completions")
        assert (b.completion_window, b.model) == ("24h", "tiny")
        b = wait(api, b)
        assert b.status == "completed" and counts(b) == (32, 30, 2)
        assert b.created_at <= b.in_progress_at <= b.finalizing_at <= b.completed_at and b.expires_at == b.created_at + 86400
        out, err = results(api, b.output_file_id), results(api, b.error_file_id)
        assert sorted(r["custom_id"] for r in out) == sorted(c["custom_id"] for c in chats)
        for r in out:
            body = r["response"]["body"]
            assert r["error"] is None and r["response"]["status_code"] == 200 and len(body["choices"]) == 3 and body["model"] == "tiny"
            seen = openai.types.chat.ChatCompletion.model_validate(body)
            assert seen.usage.completion_tokens > 0 and seen.choices[0].message.role == "assistant"
        assert [(r["custom_id"], r["response"]["status_code"], r["error"]["code"]) for r in sorted(err, key=lambda r: r["custom_id"])] == \
            [("bad", 400, "invalid_request"), ("streams", 400, "unsupported")]
        assert {r["response"]["body"]["error"]["param"] for r in err} in ({"messages", "stream"}, {"temperature", "stream"})
        out_file = api.files.retrieve(b.output_file_id)
        assert out_file.purpose == "batch_output" and out_file.filename == f"{b.id}_output.jsonl"
        assert [x.id for x in api.batches.list(limit=1)] == [b.id]
        # toka batch gives the same bytes for the same lines
        inputs = tmp_path / "same.jsonl"
        inputs.write_text("".join(json.dumps(c) + "\n" for c in chats))
        assert os.system(f"{ROOT}/toka batch -q --served-model-name tiny -i {inputs} -o {tmp_path}/same.out") == 0
        assert sorted(open(f"{tmp_path}/same.out")) == sorted(api.files.content(b.output_file_id).text.splitlines(True))


def test_invalid_batches(tmp_path):
    with serve(tmp_path) as s:
        api = client(s)
        b = wait(api, start(api, lines(3) + lines(1) + "{\n"))
        assert b.status == "failed" and [(x.code, x.line) for x in b.errors.data] == [("duplicate_custom_id", 4), ("invalid_json_line", 5)]
        assert b.output_file_id is None and b.failed_at
        b = wait(api, start(api, lines(3, endpoint="/v1/chat/completions")))
        assert b.status == "failed" and {x.code for x in b.errors.data} == {"invalid_url"}
        for wrong in ({"input_file_id": "file-1"}, {"endpoint": "/v1/images"}, {"completion_window": "soon"},
                      {"metadata": {"a": "b" * 3000}}):
            with pytest.raises(openai.BadRequestError) as e:
                fields = {"input_file_id": api.files.list().data[0].id, "endpoint": "/v1/completions", "completion_window": "24h"}
                api.batches.create(**{**fields, **wrong})
            assert e.value.param == next(iter(wrong))
        with pytest.raises(openai.ConflictError):
            api.batches.cancel(b.id)


def test_unknown_fields_are_logged_once_or_refused(tmp_path):
    text, known = lines(1).encode(), {"endpoint": "/v1/completions", "completion_window": "24h"}
    with serve(tmp_path / "a") as s:
        for _ in range(2):
            f = client(s).files.create(file=text, purpose="batch", extra_body={"colour": "red"})
            client(s).batches.create(input_file_id=f.id, metadata={"a": "b"}, extra_body={"size": 1}, **known)
        assert s.read_log().count('"colour"') == 1 and s.log.count('"size"') == 1 and "metadata" not in s.log
        expires = {"anchor": "created_at", "seconds": 3600}
        with pytest.raises(openai.BadRequestError, match="expires_after is not supported"):
            client(s).files.create(file=text, purpose="batch", expires_after=expires)
        with pytest.raises(openai.BadRequestError, match="output_expires_after is not supported"):
            client(s).batches.create(input_file_id=f.id, output_expires_after=expires, **known)
    with serve(tmp_path / "b", "--strict") as s:
        with pytest.raises(openai.BadRequestError, match="colour: a field of this name is not known"):
            client(s).files.create(file=text, purpose="batch", extra_body={"colour": "red"})
        assert not list(client(s).files.list())
        f = client(s).files.create(file=text, purpose="batch")
        with pytest.raises(openai.BadRequestError, match="size: a field of this name is not known"):
            client(s).batches.create(input_file_id=f.id, extra_body={"size": 1}, **known)
        assert wait(client(s), client(s).batches.create(input_file_id=f.id, metadata={"a": "b"}, **known)).status == "completed"


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path):
    """10,000 requests; the server is killed three times in between. Each request is answered once, with the same bytes as without a
    kill."""
    n, rng = 10_000, random.Random(5)
    text = lines(n, 2)
    with serve(tmp_path / "undisturbed") as s:
        api = client(s)
        b = wait(api, start(api, text))
        assert counts(b) == (n, n, 0)
        want = sorted(api.files.content(b.output_file_id).text.splitlines())
    n_done = kills = runs = 0
    while kills < 3:
        with serve(tmp_path / f"killed{runs}") as s:
            api = client(s)
            b = api.batches.retrieve(b.id) if kills else start(api, text)
            goal = min(n, n_done + n // 4 + rng.randrange(n // 20))  # at most n: this process may sleep while the server runs on
            b = wait(api, b, lambda b: b.request_counts.completed >= goal)
            s.p.send_signal(signal.SIGKILL)
            s.p.wait()
        n_done, kills = b.request_counts.completed, kills + 1
        if n_done >= n * 0.95:  # this process slept while the server did all lines: try again in another folder
            n_done, kills, runs = 0, 0, runs + 1
    with serve(tmp_path / f"killed{runs}") as s:
        api = client(s)
        b = wait(api, api.batches.retrieve(b.id))
        assert b.status == "completed" and counts(b) == (n, n, 0) and b.error_file_id is None
        assert sorted(api.files.content(b.output_file_id).text.splitlines()) == want


def test_killed_often(tmp_path):
    """The server is killed 12 times after random times, so in different phases of a batch; then the batch must complete."""
    n, rng, batch, kills = 400, random.Random(11), None, 0
    while True:
        with serve(tmp_path) as s:
            api = client(s)
            batch = api.batches.retrieve(batch.id) if batch else start(api, lines(n, 2))
            if batch.status == "completed":
                break
            if kills < 12:
                time.sleep(rng.random() ** 2 * 0.4)
                s.p.kill()
                s.p.wait()
                kills += 1
            else:
                wait(api, batch)
    with serve(tmp_path) as s:
        api = client(s)
        assert counts(batch) == (n, n, 0)
        assert sorted(r["custom_id"] for r in results(api, batch.output_file_id)) == sorted(f"r{i}" for i in range(n))
        assert len(list(api.files.list())) == 2 and len(os.listdir(tmp_path)) == 6  # two files with records, one batch, the lock


@pytest.mark.slow
def test_graceful_end_during_a_batch(tmp_path):
    with serve(tmp_path) as s:
        api = client(s)
        b, long = start(api, lines(3000)), start(api, endless())
        wait_for_first_result(api, b)
        assert s.stop() == 0
    with serve(tmp_path) as s:
        api = client(s)
        b = wait(api, api.batches.retrieve(b.id))
        assert counts(b) == (3000, 3000, 0) and len({r["custom_id"] for r in results(api, b.output_file_id)}) == 3000
        assert api.batches.cancel(long.id).status in ("cancelling", "cancelled")  # the server did not complete it before it ended


def test_graceful_end_during_validation(tmp_path):
    """If the server ends while it validates the input, a line of which it has read only a part is not an error."""
    n = 60_000
    with serve(tmp_path) as s:
        f = client(s).files.create(file=("in.jsonl", lines(n).encode()), purpose="batch")
    for _ in range(4):
        with serve(tmp_path) as s:
            b = client(s).batches.create(input_file_id=f.id, endpoint="/v1/completions", completion_window="24h")
            assert s.stop() == 0
    with serve(tmp_path) as s:
        api = client(s)
        for b in api.batches.list():
            assert b.status in ("validating", "in_progress") and b.errors is None
            api.batches.cancel(b.id)


def test_cancel(tmp_path):
    with serve(tmp_path) as s:
        api = client(s)
        first, second = start(api, endless()), start(api, lines(10))
        first = wait_for_first_result(api, first)
        assert api.batches.retrieve(second.id).status == "validating"  # one at a time
        third = api.batches.cancel(start(api, lines(5)).id)
        assert third.status == "cancelled" and third.cancelling_at and third.cancelled_at and third.output_file_id is None
        with pytest.raises(openai.ConflictError):
            api.files.delete(first.input_file_id)
        assert api.batches.cancel(first.id).status == "cancelling"
        first = wait(api, first)
        done = results(api, first.output_file_id)
        assert first.status == "cancelled" and 0 < len(done) == first.request_counts.completed < 10_000
        assert wait(api, second).status == "completed"
        assert s.metric("num_requests_running") == 0 and s.metric("kv_cache_usage_perc") == 0
        assert api.files.delete(first.input_file_id).deleted


@pytest.mark.slow
def test_expired_batch(tmp_path):
    n, out, seconds = 10_000, [], 2
    with serve(tmp_path) as s:
        api = client(s)
        while not out and seconds < 1000:  # on a slow machine the first answer takes longer
            seconds *= 2
            b = wait(api, start(api, endless(n), window=f"{seconds}s"))
            assert b.status == "expired" and b.expired_at >= b.expires_at == b.created_at + seconds
            out, err = results(api, b.output_file_id), results(api, b.error_file_id)
        assert len(out) + len(err) == n == len({r["custom_id"] for r in out + err}) and counts(b) == (n, len(out), len(err))
        assert out and err and {(r["response"], r["error"]["code"]) for r in err} == {(None, "batch_expired")}


def interrupted_batch(folder, text, n_answered=1, n_failed=0, flags=("--served-model-name", "one")):
    """A batch of a server with model "one" that was killed before the batch ended. It has at least this many results and errors."""
    with serve(folder, *flags, env={"TOKA_DEBUG_STALL": "40"}) as s:
        api = client(s)
        b = wait(api, start(api, text), lambda b: b.request_counts.completed >= n_answered and b.request_counts.failed >= n_failed)
        s.p.kill()
    return b


@pytest.mark.slow
def test_another_model(tmp_path):
    b = interrupted_batch(tmp_path, lines(1500, 20))
    with serve(tmp_path, "--served-model-name", "two") as s:  # the batch waits: it is for another model
        api = client(s)
        done = wait(api, start(api, lines(5)))
        assert done.status == "completed" and done.model == "two" and api.batches.retrieve(b.id).status == "in_progress"
        assert s.read_log().count("its model one is not served here") == 1
    with serve(tmp_path, "--served-model-name", "two", "--served-model-name", "one") as s:  # the second name is enough
        assert counts(wait(client(s), b)) == (1500, 1500, 0)


@pytest.mark.slow
def test_the_same_model_by_another_path(tmp_path):
    b = interrupted_batch(tmp_path, lines(300, 20), flags=(f"{ROOT}/test/model",))
    assert b.model == "model"
    with serve(tmp_path, os.path.relpath(f"{ROOT}/test/model") + "/") as s:
        assert counts(wait(client(s), b)) == (300, 300, 0)


def damaged(lines):
    """The lines with NULs, half a line, an empty line, a line of another program, a line twice, and half of the last line."""
    half = len(lines[5]) // 2
    return b"\n".join([b"\0" * 300, lines[5][:half], b"", b'{"event":"rotated"}', lines[1], *lines[1:5], *lines[6:-1], lines[-1][:half]])


@pytest.mark.slow
def test_damaged_files_of_a_batch(tmp_path):
    """A server that continues a batch removes damaged lines from both files, reports their number, and computes these lines again."""
    n = 1200
    text = lines(n, 20).splitlines()
    for i in range(0, n, 4):
        text[i] = text[i].replace('"temperature": 1', '"temperature": "warm"')
    b = interrupted_batch(tmp_path, "\n".join(text), n_answered=24, n_failed=24)
    with open(tmp_path / f"{b.id}.json") as f:
        record = json.load(f)["toka"]
    for kind in "output", "errors":
        path = tmp_path / record[kind]
        old = path.read_bytes()
        before = old[:old.rindex(b"\n")].split(b"\n")
        assert len(before) > 8
        path.write_bytes(damaged(before))
    for attempt in range(2):
        with serve(tmp_path, "--served-model-name", "one") as s:
            api = client(s)
            b = wait(api, b)
            assert b.status == "completed" and b.errors is None and counts(b) == (n, n - n // 4, n // 4)
            assert b.request_counts.damaged == 8
            out, err = results(api, b.output_file_id), results(api, b.error_file_id)
            assert sorted(r["custom_id"] for r in out + err) == sorted(f"r{i}" for i in range(n)) and len(err) == n // 4
            log = s.read_log()
            assert log.count("4 lines are damaged or no result, the first is line 1; they were removed") == 2 * (attempt == 0), log
            assert log.count("1 result has the custom_id of an earlier one; they were removed") == 2 * (attempt == 0)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]


def test_cancelled_by_another_model(tmp_path):
    """Results that the killed server wrote are counted, even if the record of the batch was not updated."""
    b = interrupted_batch(tmp_path, endless())
    for name in "two", "one":  # a server of another model, and one of the same model before it continues
        shutil.copytree(tmp_path, folder := str(tmp_path) + name)
        with serve(folder, "--served-model-name", name) as s:
            api = client(s)
            assert api.batches.retrieve(b.id).request_counts.completed >= b.request_counts.completed
            api.batches.cancel(b.id)
            b2 = wait(api, b, lambda b: b.status == "cancelled")
            done = results(api, b2.output_file_id)
            assert counts(b2) == (10_000, len(done), 0) and len(done) >= b.request_counts.completed
        with serve(folder, "--served-model-name", name) as s:
            assert counts(client(s).batches.retrieve(b.id)) == counts(b2)


def test_batch_expires_under_another_model(tmp_path):
    """If no server of its model is started again, the batch still expires, and its remaining lines become errors."""
    b = interrupted_batch(tmp_path, endless())
    record = tmp_path / f"{b.id}.json"
    record.write_text(record.read_text().replace(str(b.expires_at), str(int(time.time()) + 2)))
    with serve(tmp_path, "--served-model-name", "two") as s:
        api = client(s)
        b = wait(api, api.batches.retrieve(b.id))
        out, err = results(api, b.output_file_id), results(api, b.error_file_id)
        assert b.status == "expired" and counts(b) == (10_000, len(out), len(err)) and out and len(out) + len(err) == 10_000
        assert {r["error"]["code"] for r in err} == {"batch_expired"}


def test_no_descriptors(tmp_path):
    """If a batch cannot open its files, it tries again later."""
    with serve(tmp_path) as s:
        api = client(s)
        f = api.files.create(file=("in.jsonl", lines(30).encode()), purpose="batch")
        with s.connect() as c:
            new = {"input_file_id": f.id, "endpoint": "/v1/completions", "completion_window": "24h"}
            c.request("GET", "/v1/batches")
            limits = resource.prlimit(s.p.pid, resource.RLIMIT_NOFILE)
            used = {int(n) for n in os.listdir(f"/proc/{s.p.pid}/fd")}
            one_left = min(n for n in range(4096) if n not in used) + 1
            resource.prlimit(s.p.pid, resource.RLIMIT_NOFILE, (one_left, limits[1]))
            b = c.request("POST", "/v1/batches", new).json()  # one descriptor is enough to write records and to validate the input
            s.wait_for("Too many open files")
            assert c.request("GET", f"/v1/batches/{b['id']}").json()["status"] == "in_progress"
            resource.prlimit(s.p.pid, resource.RLIMIT_NOFILE, limits)
        assert counts(wait(api, api.batches.retrieve(b["id"]))) == (30, 30, 0)


@pytest.mark.slow
@pytest.mark.parametrize("priority", [0, -100_000, 2**31 - 1])
def test_requests_of_clients_go_before_batches(tmp_path, priority):
    """This holds for any `priority` in the lines of the batch."""
    with serve(tmp_path) as s:
        api = client(s)
        # Lengths differ, so the batch's requests end one by one.
        text = "".join(lines(100, 1 + 37 * i % 80, name=f"r{i}-", ignore_eos=True, priority=priority) for i in range(40))
        b = wait_for_first_result(api, start(api, text))
        for i in range(15):  # a request in the queue behind the batch would wait for a thousand of its lines
            api.completions.create(model="embedded", prompt="Tom", max_tokens=1)
        b = api.batches.retrieve(b.id)
        assert b.status == "in_progress" and b.request_counts.completed < 4000
        api.batches.cancel(b.id)


@pytest.mark.slow
def test_folders(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    env = {"HOME": str(home), "XDG_DATA_HOME": ""}
    with Server(files=None, env=env) as s:  # the default folder: created at the first use, with access only for this user
        folder = home / ".local/share/toka/files"
        assert not folder.exists()
        f = client(s).files.create(file=b"x", purpose="batch")
        assert folder.stat().st_mode & 0o777 == 0o700
        with Server(files=None, env=env) as second:  # it answers requests, but has no files
            with pytest.raises(openai.APIStatusError, match="in use") as e:
                client(second).files.list()
            second.wait_for(r"this server keeps no files: \S+ is in use by another server")
            assert e.value.status_code == 503 and client(second).models.list().data
    with Server(files=None, env=env) as s:
        assert client(s).files.retrieve(f.id).id == f.id
    with Server(files="off") as s:
        with pytest.raises(openai.APIStatusError, match="keeps no files"):
            client(s).files.list()
    with pytest.raises(AssertionError):  # a folder named by a flag must exist or be creatable, else the server does not start
        Server(files="/proc/none")
