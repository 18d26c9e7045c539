"""Models with windowed pages and with states through batch, kills, ranks and serve, with limits so small that sequences are preempted
and prefixes go: always the same answers."""
import json
import os
import random
import re
import subprocess
import threading
import time

import pytest

import model_weights as mw
from server import ROOT, TOKA, Server

pytestmark = pytest.mark.slow

ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}, "TOKA_DEVICE": "cpu"}
KINDS = {"gptoss": "windows", "qwen3next": "states"}
TINY = ["--kv-tokens", "352", "--max-num-seqs", "4", "--max-num-batched-tokens", "24", "--max-model-len", "320"]
N_VOCAB = 180                                            # ids below this are in all vocabularies
SAMPLES = 1000                                           # of one prompt


def request(i):
    """Prompts that share beginnings of any length, also to page borders (16 tokens) and one token beside them."""
    r = random.Random(i)
    doc = [7 * (i % 3) + k % 90 + 3 for k in range(100)]
    n = r.choice([1, 15, 16, 17, 31, 32, 33, 48, 49, 100])
    own = [r.randrange(3, N_VOCAB) for _ in range(r.choice([0, 0, 1, 5, 16]))]
    return {"prompt": doc[:n] + own, "max_tokens": r.choice([1, 3, 20, 150]), "n": r.choice([1, 1, 2, 5]), "temperature": r.choice([0, 1]),
            "seed": i, "logprobs": 1, "ignore_eos": True, "return_token_ids": True}


def lines(n_samples):
    """The batch: 40 requests, and n_samples of one prompt."""
    many = {**request(0), "prompt": request(5)["prompt"][:1] * 20, "n": n_samples, "max_tokens": 2, "temperature": 1}
    return "".join(json.dumps({"custom_id": str(i), **body}) + "\n" for i, body in enumerate([*map(request, range(40)), many]))


def batch(folder, out, flags, *, kill_at=None, report=None):
    """Runs the batch. With kill_at it is killed when its output has so many lines."""
    args = [TOKA, "batch", "-m", str(folder), "--served-model-name", "m", "-i", str(folder / "in.jsonl"), "-o", str(out), *flags]
    p = subprocess.Popen(args + (["--report", str(report)] if report else []), env=ENV, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    end = time.time() + 120
    while kill_at is not None and p.poll() is None and time.time() < end:
        if out.exists() and out.read_bytes().count(b"\n") >= kill_at:
            p.kill()
        time.sleep(0.001)
    err = p.communicate(timeout=120)[1]
    assert p.returncode in ((0, -9) if kill_at is not None else (0,)), err
    return p.returncode, err


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    """(kind, folder, result lines with room for everything and without the prefix cache)"""
    folder = tmp_path_factory.mktemp(request.param)
    mw.write(folder, mw.load(request.param))
    (folder / "in.jsonl").write_text(lines(SAMPLES))
    batch(folder, folder / "out", ["--no-enable-prefix-caching", "--max-model-len", "320"])
    return KINDS[request.param], folder, sorted((folder / "out").read_text().splitlines())


def test_batch_report(kind, tmp_path):
    """Tiny limits give the same bytes; the report counts what the model has."""
    name, folder, want = kind
    _, err = batch(folder, tmp_path / "out", TINY, report=tmp_path / "report")
    assert sorted((tmp_path / "out").read_text().splitlines()) == want
    report = json.loads((tmp_path / "report").read_text())
    assert report["preemptions"] > 0 and report["prompt_tokens_shared"] > 0
    if name == "windows":
        assert 0 < report["windowed_pages_peak"] <= report["windowed_pages"] < report["kv_pages"] * 2 and report["states"] == 0
        assert f"  {report['windowed_pages']} pages of layers with a window, at most {report['windowed_pages_peak']} of them held\n" in err
    else:
        assert report["states"] == report["states_peak"] == report["snapshots"] == 4 and report["windowed_pages"] == 0
        assert 0 < report["snapshots_used"] <= 4 and report["snapshot_hits"] >= 900
        assert f"  4 states, at most 4 of them used; 4 snapshots, {report['snapshots_used']} of them kept; " in err


def test_killed_on_ranks(kind, tmp_path):
    """kill -9 again and again, on one rank, on replicas and on stages: nothing is lost, done twice or changed."""
    _, folder, want = kind
    out, kills = tmp_path / "out", 0
    ranks = [[], ["--data-parallel-size", "2"], ["--pipeline-parallel-size", "2"]]
    while kills < 6:
        at = out.read_bytes().count(b"\n") if out.exists() else 0
        status, _ = batch(folder, out, TINY + ranks[kills % 3], kill_at=at + 5)
        if status == 0:
            break
        kills += 1
    assert kills >= 3
    batch(folder, out, TINY)
    assert sorted(out.read_text().splitlines()) == want


def test_served(kind):
    """Concurrent clients get the batch's answers, while others hang up in the middle of a prompt. Then nothing is held, and /metrics
    counts the kind."""
    name, folder, want = kind
    want = {r["custom_id"]: [c["token_ids"] for c in r["response"]["body"]["choices"]] for r in map(json.loads, want)}
    wrong = []
    with Server("-m", str(folder), *TINY) as server:
        def client(first):
            for i in range(first, 40, 4):
                with server.connect() as c:              # hangs up
                    data = json.dumps({**request(i + 1), "stream": True}).encode()
                    c.send(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
                    time.sleep(random.random() / 50)
                got = [c["token_ids"] for c in server.post("/v1/completions", request(i)).json()["choices"]]
                if got != want[str(i)]:
                    wrong.append(i)
        clients = [threading.Thread(target=client, args=[i]) for i in range(4)]
        for t in clients:
            t.start()
        for t in clients:
            t.join()
        assert not wrong
        server.wait_metric("num_requests_running", 0)
        server.wait_metric("num_requests_waiting", 0)
        server.wait_metric("kv_cache_usage_perc", 0)
        text = server.get("/metrics").body.decode()
        assert server.metric("num_preemptions_total") > 0
        assert ("windowed_cache_usage_perc" in text) == (name == "windows") and ("state_snapshots" in text) == (name == "states")
        if name == "windows":
            server.wait_metric("windowed_cache_usage_perc", 0)
        else:
            server.wait_metric("state_cache_usage_perc", 0)
            assert 0 < server.metric("state_snapshots") <= 4 and server.metric("state_snapshot_hits_total") > 0
        assert server.stop() == 0
        assert not re.search("error|assert", server.log)


def test_one_sequence(kind, tmp_path):
    """One sequence at a time; with states: one state with one snapshot."""
    name, folder, want = kind
    _, err = batch(folder, tmp_path / "out", [*TINY, "--max-num-seqs", "1"])
    assert name == "windows" or "  1 states, at most 1 of them used; 1 snapshots, 1 of them kept; " in err
    assert sorted((tmp_path / "out").read_text().splitlines()) == want
