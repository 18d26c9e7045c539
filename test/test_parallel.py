"""Tests of the whole program with several ranks on the CPU: each split of a model over ranks gives the results of one rank, and ranks
that fail, stall or are interrupted end the program. Run through test/run.sh."""
import itertools
import json
import os
import re
import signal
import subprocess
import time

import pytest

from server import ROOT, TOKA, Server, texts, wait_handlers

ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}, "TOKA_DEVICE": "cpu"}
PROMPT = "Tom has 12 apples. He buys 7 more apples. How many apples does Tom have now?"
WATCHDOG, SHUTDOWN = 2, 5  # seconds: the watchdog's timeout (TOKA_DEBUG_PATIENCE), and the wait for hung ranks at the end
LOADED = 15  # extra seconds on a loaded machine; the sum is less than the watchdog's default of 30 s
# splits (tensor, pipeline, data)
SAME = [(1, 2, 1), (1, 3, 1), (1, 4, 1), (1, 1, 2), (1, 1, 3), (1, 2, 2), (1, 6, 1)]  # the same bytes as from one rank
NEAR = [(2, 1, 1), (4, 1, 1), (2, 2, 1), (4, 3, 1), (2, 1, 2), (2, 2, 2)]  # tensor ranks: partial sums round differently


def split_flags(tp, pp, dp):
    sizes = {"tensor": tp, "pipeline": pp, "data": dp}
    return [x for name, n in sizes.items() if n != 1 for x in (f"--{name}-parallel-size", str(n))]


def toka(*args, env=None, status=0, **more):
    r = subprocess.run([TOKA, *args], env={**ENV, **(env or {})}, cwd=ROOT, capture_output=True, text=True, timeout=150, **more)
    assert r.returncode == status, r
    return r


def assert_near(a, b, where=""):
    """Asserts that two JSON values are equal; floats, which are log-probabilities, may differ by less than 0.001."""
    if isinstance(a, dict) and isinstance(b, dict):
        assert list(a) == list(b), where
        for k in a:
            assert_near(a[k], b[k], f"{where}.{k}")
    elif isinstance(a, list) and isinstance(b, list):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            assert_near(x, y, f"{where}[{i}]")
    elif isinstance(a, float) and isinstance(b, float):
        assert abs(a - b) < 1e-3, (where, a, b)
    else:
        assert a == b, where


# ---- toka -p ----

RUNS = [[], ["--temp", "1", "--seed", "7", "--samples", "3", "-n", "20"],
        ["--json", "--logprobs", "3", "--temp", "1.5", "--seed", "3", "--samples", "2", "-n", "16", "--ignore-eos", "--repetition-penalty",
         "1.2"]]


def output(run, split):
    out = toka("-p", PROMPT, "-q", *run, *split_flags(*split)).stdout
    if "--json" not in run:
        return out
    v = json.loads(out)
    for name in [k for k, x in v.items() if isinstance(x, float)]:  # remove times
        del v[name]
    assert v["samples"][0]["tokens"]
    return v


@pytest.fixture(scope="module")
def one_rank():
    return [output(run, (1, 1, 1)) for run in RUNS]


@pytest.mark.parametrize("split", SAME + NEAR, ids=str)
def test_prompt(one_rank, split):
    for run, want in zip(RUNS, one_rank):
        got = output(run, split)
        if split[0] == 1:
            assert got == want
        else:
            assert_near(got, want)


# ---- toka batch ----

def line(i, **body):
    return {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}


def embedded_lines():
    """Prompts of different lengths with common beginnings: greedy and sampled, with stop strings, bad words, scores, log-probabilities,
    and some with prefill only."""
    for i in range(24):
        prompt = f"Tom has {i} boxes with {i % 5} apples each. " * (1 + i % 4) + PROMPT
        more = [{"n": 5, "temperature": 1.3, "stop": ["pp", " In"]}, {"logprobs": 5, "temperature": 1}, {"max_tokens": 1, "temperature": 0},
                {"frequency_penalty": 0.5, "temperature": 0.8, "bad_words": [" the"], "ignore_eos": True}, {"prompt_logprobs": 2},
                {"echo": True, "logprobs": 2}][i % 6]
        yield line(i, **{"prompt": prompt, "max_tokens": 10 + 3 * i, "seed": i, **more})


def fixture_lines(vocabulary):
    for i in range(16):
        yield line(i, prompt=[(7 * i + 3 * k) % vocabulary for k in range(1 + 11 * i % 60)], max_tokens=5 + i, n=1 + i % 3, seed=i,
                   temperature=i % 2, logprobs=5, return_token_ids=True, ignore_eos=i % 4 == 0)


def results(tmp_path, model, lines, split, *flags):
    out = tmp_path / f"out-{'-'.join(map(str, split))}.jsonl"
    text = "".join(json.dumps(x) + "\n" for x in lines)
    toka("batch", "-q", *(["-m", model] if model else []), "-i", "-", "-o", str(out), *split_flags(*split), *flags, input=text)
    got = out.read_text().splitlines()
    out.unlink()
    assert len(got) == len(lines) and all('"error":null' in x for x in got)
    return sorted(got, key=lambda x: json.loads(x)["custom_id"])


def compare(tmp_path, model, lines, splits, *flags):
    want = results(tmp_path, model, lines, (1, 1, 1), *flags)
    for split in splits:
        got = results(tmp_path, model, lines, split, *flags)
        if split[0] == 1:
            assert got == want, split
        else:
            for a, b in zip(got, want):
                assert_near(json.loads(a), json.loads(b), split)


@pytest.mark.slow
def test_batch(tmp_path):
    compare(tmp_path, None, list(embedded_lines()), SAME + NEAR)


def test_batch_with_few_pages(tmp_path):
    """In each replica, samples are preempted and continue later."""
    lines = [line(i, prompt=PROMPT, max_tokens=60 + i, n=4, temperature=1, seed=i, ignore_eos=True) for i in range(12)]
    compare(tmp_path, None, lines, [(1, 3, 1), (1, 2, 2)], "--kv-tokens", "400", "--max-num-seqs", "16", "--max-model-len", "256",
            "--max-num-batched-tokens", "24")


@pytest.mark.parametrize("name", ["llama-bias", "llama-tied", "llama-odd", "mistral", "mistral-window", "qwen2", "qwen2-yarn-sharded",
                                  "qwen3"])
def test_batch_of_every_architecture(tmp_path, name):
    model = f"test/fixtures/{name}"
    with open(os.path.join(ROOT, model, "config.json")) as f:
        config = json.load(f)
    H, K, L = (config[f"num_{k}"] for k in ("attention_heads", "key_value_heads", "hidden_layers"))
    tps = [tp for tp in (2, 3, 7) if tp <= K or (tp % K == 0 and H // K % (tp // K) == 0)]
    splits = [(1, L, 1), (1, 2, 2)] + [(tp, 1, 1) for tp in tps] + [(tp, L, 2) for tp in tps[:1]]
    compare(tmp_path, model, list(fixture_lines(config["vocab_size"])), splits)


# ---- toka serve ----

def post(server, **body):
    text = json.dumps(body)
    return server.connect().send(f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(text)}\r\n\r\n{text}")


def assert_no_process(pid):
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
@pytest.mark.parametrize("split", [(2, 2, 1), (1, 1, 2), (1, 2, 2)], ids=str)
def test_server(split):
    """Several streams at once, clients that disconnect, metrics, and a graceful end in which each client gets its whole answer."""
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 1, "seed": 5, "n": 3, "ignore_eos": True}
    with Server() as s:
        want = [c["text"] for c in s.post("/v1/completions", body).json()["choices"]]
    with Server(*split_flags(*split), "--max-num-seqs", "16") as s:
        for _ in range(3):
            streams = [post(s, **body, stream=True) for _ in range(6)]
            disconnecting = [post(s, prompt=f"{i} apples", max_tokens=800, ignore_eos=True, n=4, stream=True) for i in range(6)]
            for c in disconnecting:
                assert c.head()[0] == 200
                next(c.chunks())
                c.close()
            for c in streams:
                got, done = texts(c.answer().body)
                assert done and [got[i] for i in range(3)] == want
        s.wait_metric("num_requests_running", 0)
        assert s.metric("num_requests_waiting") == 0 and s.metric("kv_cache_usage_perc") == 0
        assert 3 * 6 * 90 <= s.metric("generation_tokens_total") < 3 * 6 * 90 + 3 * 24 * 800
        assert s.get("/health").status == 200
        slow = [post(s, **{**body, "max_tokens": 300}, stream=True) for _ in range(4)]
        for c in slow:
            assert c.head()[0] == 200
        s.p.terminate()
        for c in slow:
            got, done = texts(b"".join(c.chunks()))
            assert done and all(got[i].startswith(want[i]) for i in range(3))
        assert s.p.wait(30) == 0
        assert_no_process(s.p.pid)


# ---- toka bench throughput ----

@pytest.mark.parametrize("split", [(1, 1, 2), (1, 2, 1), (2, 2, 2)], ids=str)
def test_bench_throughput(tmp_path, split):
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"prompt": PROMPT, "output_lengths": [1 + i, 30]}) + "\n" for i in range(20)))
    v = json.loads(toka("bench", "throughput", "--dataset", str(data), "--json", *split_flags(*split)).stdout)
    assert (v["num_requests"], v["num_samples"], v["total_output_tokens"]) == (20, 40, 20 * 30 + 210)
    assert v["tokens_per_second"] > 0


# ---- Impossible splits ----

@pytest.mark.parametrize("flags, words", [
    (["--tensor-parallel-size", "3"], "--tensor-parallel-size 3: the model has 4 heads and 2 kv heads"),
    (["--tensor-parallel-size", "8"], "--tensor-parallel-size 8: the model has 4 heads and 2 kv heads"),
    (["--pipeline-parallel-size", "7"], "--pipeline-parallel-size 7: the model has 6 layers"),
    *(([f"--{kind}-parallel-size", n], f"--{kind}-parallel-size: {n}, expected 1 to 64")
      for kind in ("tensor", "pipeline", "data") for n in ("0", "-1", "65")),
    (["--data-parallel-size", "two"], "--data-parallel-size: 'two' is not a whole number"),
])
def test_impossible_splits(flags, words):
    commands = ("-p", "x"), ("batch", "-i", "/dev/null", "-o", "/dev/null"), ("serve", "--port", "0", "--files-dir", "off")
    for command in commands:
        r = toka(*command, *flags, status=1)
        assert not r.stdout and r.stderr.count("\n") == 1 and r.stderr.startswith("toka: " + words)  # also serve: before it listens


# ---- Ranks that fail, ranks that stall ----

def fault_env(kind, n):
    return {f"TOKA_DEBUG_{kind}": n, **({"TOKA_DEBUG_PATIENCE": str(WATCHDOG)} if kind == "STALL" else {})}


def run_until_fault(command, env, text=None):
    """Runs a command that ends because of a rank's fault; returns its standard error and its duration in seconds."""
    t = time.time()
    r = toka(*command, env=env, status=2, input=text)
    assert len(r.stderr.splitlines()) == 1
    return r.stderr, time.time() - t


FAULTS = [("2@0", (2, 2, 1), r"rank 0 \(stage 0, tensor rank 0\): a step failed in embed"),
          ("1@3", (2, 2, 1), r"rank 3 \(stage 1, tensor rank 1\): a step failed in receive"),
          ("5@2", (1, 3, 1), r"rank 2 \(stage 2, tensor rank 0\): a step failed in receive"),
          ("3", (2, 2, 1), r"rank [01] \(stage 0, tensor rank [01]\): a step failed in embed"),
          ("2", (1, 1, 2), r"rank 0 \(stage 0, tensor rank 0\): a step failed in embed")]
STALLS = [("2@0", (2, 2, 1), r"rank 0 \(stage 0, tensor rank 0\) has not moved for 2 s, last seen in embed"),
          ("1@3", (2, 2, 1), r"rank 3 \(stage 1, tensor rank 1\) has not moved for 2 s, last seen in receive"),
          ("1@1", (1, 2, 1), r"rank 1 \(stage 1, tensor rank 0\) has not moved for 2 s, last seen in receive"),
          ("2", (1, 1, 2), r"replica [01]: CPU backend: rank 0 \(stage 0, tensor rank 0\) has not moved for 2 s, last seen in embed")]


def small_batch(tmp_path):
    text = "".join(json.dumps(line(i, prompt=PROMPT, max_tokens=40, ignore_eos=True, n=4)) + "\n" for i in range(20))
    return ("batch", "-q", "--max-num-seqs", "8", "-i", "-", "-o", str(tmp_path / "out.jsonl")), text


@pytest.mark.parametrize("n, split, words", FAULTS, ids=str)
def test_rank_that_fails(tmp_path, n, split, words):
    env, (batch, text) = fault_env("FAULT", n), small_batch(tmp_path)
    for command, given in (("-p", PROMPT, "-q", "--samples", "4", *split_flags(*split)), None), ((*batch, *split_flags(*split)), text):
        err, seconds = run_until_fault(command, env, given)
        assert re.search(words, err) and seconds < 30


@pytest.mark.slow
@pytest.mark.parametrize("n, split, words", STALLS, ids=str)
def test_rank_that_stalls(tmp_path, n, split, words):
    env, (batch, text) = fault_env("STALL", n), small_batch(tmp_path)
    for command, given in (("-p", PROMPT, "-q", *split_flags(*split)), None), ((*batch, *split_flags(*split)), text):
        err, seconds = run_until_fault(command, env, given)
        assert re.search(words, err) and WATCHDOG * 0.7 < seconds < WATCHDOG + SHUTDOWN + LOADED, (err, seconds)


@pytest.mark.slow
def test_stall_that_no_rank_waits_for():
    """The last stage stalls in the last step: no other rank waits for it, only the driver does."""
    err, seconds = run_until_fault(("-p", PROMPT, "-n", "1", *split_flags(1, 2, 1)), fault_env("STALL", "1@1"))
    assert "rank 1 (stage 1, tensor rank 0) has not moved for 2 s, last seen in receive" in err and seconds < WATCHDOG + SHUTDOWN + LOADED


@pytest.mark.slow
@pytest.mark.parametrize("kind, n, split", [("FAULT", "30@2", (2, 2, 1)), ("STALL", "30@2", (2, 2, 1)), ("STALL", "20", (1, 1, 2))],
                         ids=str)
def test_server_with_a_rank_that_breaks(kind, n, split):
    with Server(*split_flags(*split), env=fault_env(kind, n)) as s:
        held = [post(s, prompt=PROMPT, max_tokens=900, ignore_eos=True, stream=i % 2 == 0) for i in range(6)]
        t = time.time()
        for i, c in enumerate(held):
            a = c.answer()
            assert b"device failed" in a.body and a.status in ((200, 500) if i % 2 == 0 else (500,))
        assert s.p.wait(WATCHDOG + SHUTDOWN + LOADED) == 2 and time.time() - t < WATCHDOG + SHUTDOWN + LOADED
        assert re.search(r"\ntoka: (replica \d: )?CPU backend: rank \d \(stage \d, tensor rank \d\)[^\n]* in (embed|receive)[^\n]*\n$",
                         s.read_log())
        assert_no_process(s.p.pid)


# ---- Signals ----

def started(*args, env=None):
    p = subprocess.Popen([TOKA, *args], env={**ENV, **(env or {})}, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return p


def ended(p, seconds):
    t = time.time()
    p.communicate(timeout=60)
    assert time.time() - t < seconds
    return p.returncode


@pytest.mark.parametrize("split", [(2, 2, 1), (1, 1, 3)], ids=str)
def test_interrupt(tmp_path, split):
    p = started("-p", PROMPT, "--ignore-eos", "-n", "900", "--samples", "4000", "--temp", "1", *split_flags(*split))
    wait_handlers(p)
    time.sleep(1)  # until it generates
    assert p.poll() is None
    p.send_signal(signal.SIGINT)
    assert ended(p, 20) == 130
    out = tmp_path / "out.jsonl"
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line(i, prompt=PROMPT, max_tokens=200 if i else 5, ignore_eos=True)) + "\n" for i in range(2000)))
    p = started("batch", "-q", "-i", str(source), "-o", str(out), *split_flags(*split))
    end = time.time() + 60
    while not (out.exists() and out.stat().st_size):
        assert time.time() < end and p.poll() is None
        time.sleep(0.02)
    p.send_signal(signal.SIGINT)
    assert ended(p, 20) == 130
    assert all(json.loads(x) for x in out.read_text().splitlines())


STALLED = list(itertools.product([(1, 1, 1), (2, 2, 1)], [(signal.SIGINT, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)]))


@pytest.mark.slow
@pytest.mark.parametrize("split, signals", STALLED, ids=str)
def test_second_signal_ends_at_once(tmp_path, split, signals):
    """The device's step never ends, and the watchdog's timeout has not passed. The first signal asks for a graceful end; the second
    signal ends the program at once."""
    env = {"TOKA_DEBUG_STALL": "2"}
    source = tmp_path / "in.jsonl"
    source.write_text(small_batch(tmp_path)[1])
    for command in ("-p", PROMPT), ("batch", "-q", "-i", str(source), "-o", str(tmp_path / "out.jsonl")):
        p = started(*command, *split_flags(*split), env=env)
        wait_handlers(p)
        time.sleep(1)
        p.send_signal(signals[0])
        time.sleep(0.3)
        assert p.poll() is None
        p.send_signal(signals[1])
        assert ended(p, 8) != 0  # after only the first signal: 10 s
    with Server(*split_flags(*split), env=env) as s:
        held = post(s, prompt=PROMPT, max_tokens=900, ignore_eos=True)
        time.sleep(1)  # until the step that stalls has begun
        for n in signals:
            assert s.p.poll() is None
            s.p.send_signal(n)
            time.sleep(0.3)
        assert s.p.wait(8) != 0
        held.close()


# ---- The README ----

def test_readme(tmp_path):
    with open(os.path.join(ROOT, "README.md")) as f:
        section = re.search(r"\n## Many GPUs\n(.*?)\n## ", f.read(), re.S)[1]
    examples = re.findall(r"```sh\n(.*?)```", section, re.S)
    assert examples
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line(i, prompt=PROMPT, max_tokens=8)) + "\n" for i in range(5)))
    (tmp_path / "toka").symlink_to(TOKA)
    commands = [x.split("  #")[0].strip() for text in examples for x in text.splitlines()]
    for command in commands:
        if " serve" in command:
            with Server(*command.split()[2:]) as s:
                assert s.post("/v1/completions", {"prompt": PROMPT}).status == 200 and s.stop() == 0
        else:
            r = subprocess.run(["bash", "-e", "-c", command], env=ENV, cwd=tmp_path, capture_output=True, text=True, timeout=100)
            assert r.returncode == 0, (command, r)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 5 and len(commands) >= 4
