"""/v1/files and /v1/batches as a user of the openai client meets them: whole batches, faults, cancelling, running out of time, and
servers that are killed at any moment. Run through test/run.sh."""
import json
import os
import random
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


def lines(n, tokens=3, endpoint="/v1/completions", **body):
    return "".join(json.dumps({"custom_id": f"r{i}", "method": "POST", "url": endpoint,
                               "body": {"prompt": f"Tom has {i}", "max_tokens": tokens, "temperature": 1, **body}}) + "\n" for i in range(n))


def start(api, text, endpoint="/v1/completions", window="24h", **more):
    f = api.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return api.batches.create(input_file_id=f.id, endpoint=endpoint, completion_window=window, **more)


def wait(api, batch, until=("completed", "failed", "cancelled", "expired"), seconds=120):
    end = time.time() + seconds
    while batch.status not in until:
        assert time.time() < end, batch
        time.sleep(0.03)
        batch = api.batches.retrieve(batch.id)
    return batch


def results(api, file_id):
    return [json.loads(line) for line in api.files.content(file_id).text.splitlines()] if file_id else []


def counts(batch):
    return batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed


def test_files(tmp_path):
    with serve(tmp_path) as s:
        api = client(s)
        f = api.files.create(file=("dir/räksmörgås 1.jsonl", b"one\ntwo\n"), purpose="batch")
        assert (f.bytes, f.filename, f.purpose, f.status, f.object) == (8, "räksmörgås 1.jsonl", "batch", "processed", "file")
        assert api.files.retrieve(f.id) == f and api.files.content(f.id).read() == b"one\ntwo\n"
        more = [api.files.create(file=b"x", purpose="fine-tune") for _ in range(7)]
        assert [x.id for x in api.files.list(limit=3)] == [x.id for x in more[::-1]] + [f.id]  # the client asks page by page
        assert [x.id for x in api.files.list(order="asc", purpose="batch")] == [f.id]
        assert api.files.delete(f.id).deleted
        with pytest.raises(openai.NotFoundError):
            api.files.retrieve(f.id)
        with pytest.raises(openai.BadRequestError, match="purpose"):
            api.files.create(file=b"x", purpose="nonsense")
        big = random.Random(1).randbytes(20_000_000)  # any bytes, streamed through
        f = api.files.create(file=("big.bin", big), purpose="user_data")
        assert f.bytes == len(big) and api.files.content(f.id).read() == big
    assert not [n for n in os.listdir(tmp_path) if n.endswith(".part")]
    assert os.stat(tmp_path / f.id).st_mode & 0o077 == 0


def test_batch(tmp_path):
    bad = {"custom_id": "bad", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [], "temperature": "warm"}}
    chats = [{"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions",
              "body": {"model": "tiny", "messages": [{"role": "user", "content": PROBLEMS[i]}], "n": 3, "temperature": 1}} for i in range(30)]
    with serve(tmp_path, "--served-model-name", "tiny") as s:
        api = client(s)
        b = start(api, "\n\n".join(map(json.dumps, [*chats, bad])), "/v1/chat/completions", metadata={"purpose": "test"})
        assert (b.status, b.metadata, b.endpoint, b.completion_window, b.model) == ("validating", {"purpose": "test"}, "/v1/chat/completions", "24h", "tiny")
        b = wait(api, b)
        assert b.status == "completed" and counts(b) == (31, 30, 1)
        assert b.created_at <= b.in_progress_at <= b.finalizing_at <= b.completed_at and b.expires_at == b.created_at + 86400
        out, err = results(api, b.output_file_id), results(api, b.error_file_id)
        assert sorted(r["custom_id"] for r in out) == sorted(c["custom_id"] for c in chats)
        for r in out:
            body = r["response"]["body"]
            assert r["error"] is None and r["response"]["status_code"] == 200 and len(body["choices"]) == 3 and body["model"] == "tiny"
            seen = openai.types.chat.ChatCompletion.model_validate(body)
            assert seen.usage.completion_tokens > 0 and seen.choices[0].message.role == "assistant"
        assert [(r["custom_id"], r["response"]["status_code"]) for r in err] == [("bad", 400)] and err[0]["error"]["code"] == "invalid_request"
        assert err[0]["response"]["body"]["error"]["param"] in ("messages", "temperature")
        out_file = api.files.retrieve(b.output_file_id)
        assert out_file.purpose == "batch_output" and out_file.filename == f"{b.id}_output.jsonl"
        assert [x.id for x in api.batches.list(limit=1)] == [b.id]
        # the same lines give the same bytes, with or without a server
        inputs = tmp_path / "same.jsonl"
        inputs.write_text("".join(json.dumps(c) + "\n" for c in chats))
        assert os.system(f"{ROOT}/toka batch -q -i {inputs} -o {tmp_path}/same.out") == 0
        assert sorted(open(f"{tmp_path}/same.out")) == sorted(api.files.content(b.output_file_id).text.splitlines(True))


def test_batch_that_is_none(tmp_path):
    with serve(tmp_path) as s:
        api = client(s)
        b = wait(api, start(api, lines(3) + lines(1) + "{\n"))
        assert b.status == "failed" and [(x.code, x.line) for x in b.errors.data] == [("duplicate_custom_id", 4), ("invalid_json_line", 5)]
        assert b.output_file_id is None and b.failed_at
        b = wait(api, start(api, lines(3, endpoint="/v1/chat/completions")))
        assert b.status == "failed" and {x.code for x in b.errors.data} == {"invalid_url"}
        for wrong in ({"input_file_id": "file-1"}, {"endpoint": "/v1/embeddings"}, {"completion_window": "soon"}, {"metadata": {"a": "b" * 3000}}):
            with pytest.raises(openai.BadRequestError) as e:
                api.batches.create(**{"input_file_id": api.files.list().data[0].id, "endpoint": "/v1/completions", "completion_window": "24h", **wrong})
            assert e.value.param == next(iter(wrong))
        with pytest.raises(openai.ConflictError):
            api.batches.cancel(b.id)


def test_killed_at_any_moment(tmp_path):
    """10,000 requests; the server is killed three times on the way. Every request is answered once, as without that."""
    n, rng = 10_000, random.Random(5)
    text = lines(n, 2)
    with serve(tmp_path / "calm") as s:
        api = client(s)
        b = wait(api, start(api, text), seconds=300)
        assert counts(b) == (n, n, 0)
        calm = sorted(api.files.content(b.output_file_id).text.splitlines())
    seen = 0
    for kill in range(4):
        with serve(tmp_path / "killed") as s:
            api = client(s)
            b = start(api, text) if not kill else api.batches.list().data[0]
            if kill == 3:
                break
            goal = seen + n // 4 + rng.randrange(n // 20)
            while b.request_counts.completed < goal:
                assert b.status in ("validating", "in_progress") and s.p.poll() is None
                time.sleep(0.01)
                b = api.batches.retrieve(b.id)
            s.p.send_signal(signal.SIGKILL)
            s.p.wait()
            assert seen < b.request_counts.completed < n
            seen = b.request_counts.completed
    with serve(tmp_path / "killed") as s:
        api = client(s)
        b = wait(api, api.batches.retrieve(b.id), seconds=300)
        assert b.status == "completed" and counts(b) == (n, n, 0) and b.error_file_id is None
        assert sorted(api.files.content(b.output_file_id).text.splitlines()) == calm


def test_killed_often(tmp_path):
    """Killed after times that fall into every step of a batch, until it is done all the same."""
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
        assert counts(batch) == (n, n, 0) and sorted(r["custom_id"] for r in results(api, batch.output_file_id)) == sorted(f"r{i}" for i in range(n))
        assert len(list(api.files.list())) == 2 and len(os.listdir(tmp_path)) == 6  # two files, a batch, the lock


def test_ended_gracefully(tmp_path):
    with serve(tmp_path) as s:
        api = client(s)
        b = start(api, lines(3000))
        while not b.request_counts.completed:
            b = api.batches.retrieve(b.id)
        began = time.time()
        assert s.stop() == 0 and time.time() - began < 10  # it does not wait for the batch
    with serve(tmp_path) as s:
        api = client(s)
        b = wait(api, api.batches.retrieve(b.id))
        assert counts(b) == (3000, 3000, 0) and len({r["custom_id"] for r in results(api, b.output_file_id)}) == 3000


def test_cancel(tmp_path):
    with serve(tmp_path) as s:
        api = client(s)
        first, second = start(api, lines(10_000, 30)), start(api, lines(10))
        while not first.request_counts.completed:
            first = api.batches.retrieve(first.id)
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


def test_out_of_time(tmp_path):
    n = 10_000
    with serve(tmp_path) as s:
        api = client(s)
        b = wait(api, start(api, lines(n, 8, ignore_eos=True), window="4s"))
        assert b.status == "expired" and b.expired_at >= b.expires_at == b.created_at + 4
        out, err = results(api, b.output_file_id), results(api, b.error_file_id)
        assert len(out) + len(err) == n == len({r["custom_id"] for r in out + err}) and counts(b) == (n, len(out), len(err))
        assert out and err and {(r["response"], r["error"]["code"]) for r in err} == {(None, "batch_expired")}


def test_another_model(tmp_path):
    with serve(tmp_path, "--served-model-name", "one") as s:
        api = client(s)
        b = start(api, lines(1500, 20))
        while not b.request_counts.completed:
            b = api.batches.retrieve(b.id)
        s.p.kill()
    with serve(tmp_path, "--served-model-name", "two") as s:  # it is not this model's
        api = client(s)
        done = wait(api, start(api, lines(5)))
        assert done.status == "completed" and done.model == "two" and api.batches.retrieve(b.id).status == "in_progress"
    with serve(tmp_path, "--served-model-name", "one") as s:
        assert counts(wait(client(s), b)) == (1500, 1500, 0)


def test_clients_that_wait_go_first(tmp_path):
    with serve(tmp_path) as s:
        api = client(s)
        b = start(api, lines(5000, 60))
        while not b.request_counts.completed:
            b = api.batches.retrieve(b.id)
        times = []
        for i in range(5):
            began = time.time()
            api.completions.create(model="embedded", prompt="Tom", max_tokens=1)
            times.append(time.time() - began)
        b = api.batches.retrieve(b.id)
        assert b.status == "in_progress" and b.request_counts.completed < 5000
        assert sorted(times)[2] < 5
        api.batches.cancel(b.id)


def test_folders(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    env = {"HOME": str(home), "XDG_DATA_HOME": ""}
    with Server(files=None, env=env) as s:  # the default folder: made when it is needed, for this user alone
        folder = home / ".local/share/toka/files"
        assert not folder.exists()
        f = client(s).files.create(file=b"x", purpose="batch")
        assert folder.stat().st_mode & 0o777 == 0o700
        with Server(files=None, env=env) as second:  # serves, but has no files
            with pytest.raises(openai.APIStatusError, match="in use") as e:
                client(second).files.list()
            assert e.value.status_code == 503 and client(second).models.list().data
    with Server(files=None, env=env) as s:
        assert client(s).files.retrieve(f.id).id == f.id
    with Server(files="off") as s:
        with pytest.raises(openai.APIStatusError, match="keeps no files"):
            client(s).files.list()
    with pytest.raises(AssertionError):  # one that was asked for must be there
        Server(files="/proc/none")
