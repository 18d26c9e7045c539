"""Tests of the command line: ./toka, its flags, exit status and messages. Run through test/run.sh."""
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import time

import pytest

from server import wait_handlers

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOKA = os.path.join(ROOT, "toka")
PROBLEM = "Tom has 12 apples. He buys 7 more apples. How many apples does Tom have now?"


def toka(*args, stdin="", env=None, timeout=120, cwd=ROOT):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}
    return subprocess.run([TOKA, *args], input=stdin.encode() if isinstance(stdin, str) else stdin, capture_output=True,
                          env={**clean, "TOKA_DEVICE": "cpu", **(env or {})}, timeout=timeout, cwd=cwd)


def last_number(text):
    return re.findall(r"-?\d+", text)[-1]


# ---- Drafts ----

@pytest.mark.parametrize("args, words", [
    (["--speculative-config", '{"method":"medusa","model":"x"}'], 'method "medusa", expected ngram, suffix, draft_model or eagle3'),
    (["--speculative-config", '{"method":"eagle3","model":"/nowhere"}'], "eagle3: /nowhere"),
    (["--speculative-config", '{"method":"eagle3"}'], "model is missing"),
    (["--draft-model", "/nowhere"], "--draft-model: /nowhere"), (["--draft-model", ""], "--draft-model is empty, expected the folder"),
    (["--draft-model", "x", "--speculative-config", '{"method":"draft_model","model":"y"}'], "--draft-model is x, but"),
    (["--speculative-config", '{"method":"draft_model"}'], "model is missing"),
    (["--speculative-config", '{"method":"ngram","num_speculative_tokens":3}', "--num-speculative-tokens", "4"], "--num-speculative-tokens is 4"),
    (["--num-speculative-tokens", "99"], "--num-speculative-tokens: 99, expected 0 to 16")])
def test_drafts_that_are_not_there(args, words):
    r = toka("-p", PROBLEM, *args)
    assert r.returncode == 1 and r.stdout == b"" and words in r.stderr.decode()


# ---- toka -p ----

def test_embedded_model_answers():
    r = toka("-p", PROBLEM)
    assert r.returncode == 0 and last_number(r.stdout.decode()) == "19"
    assert re.search(r"prompt \d+ tokens, generated \d+ tokens, [\d.]+ tok/s, first token after \d+ ms\n$", r.stderr.decode())
    assert re.search(r"generated 1 tokens, first token after \d+ ms\n$", toka("-p", PROBLEM, "-n", "1").stderr.decode())


def test_answers_from_another_folder(tmp_path):
    assert last_number(toka("-p", PROBLEM, cwd=tmp_path).stdout.decode()) == "19"


def test_prompt_from_stdin_and_file(tmp_path):
    want = toka("-p", PROBLEM).stdout
    (tmp_path / "p.txt").write_text(PROBLEM)
    assert toka(stdin=PROBLEM).stdout == want
    assert toka("-f", str(tmp_path / "p.txt")).stdout == want
    assert toka("-q", "-p", PROBLEM).stderr == b""


def test_embedded_model_equals_its_folder():
    assert toka("-m", "test/model", "-p", PROBLEM).stdout == toka("-p", PROBLEM).stdout


def test_json_object():
    r = toka("--json", "-p", PROBLEM, "--logprobs", "3", "--samples", "2")
    v = json.loads(r.stdout)
    assert len(v["samples"]) == 2 and v["output_tokens"] == sum(len(s["tokens"]) for s in v["samples"])
    for s in v["samples"]:
        assert s["finish_reason"] == "stop" and last_number(s["text"]) == "19"
        for t in s["tokens"]:
            assert len(t["top"]) == 3 and t["logprob"] <= 0
            best = [x["logprob"] for x in t["top"]]
            assert best == sorted(best, reverse=True)
            assert t["top"][0]["id"] == t["id"]  # greedy


def test_logprobs_without_json_go_to_stderr():
    r = toka("-p", PROBLEM, "--logprobs", "2")
    assert r.stdout == toka("-p", PROBLEM).stdout
    lines = r.stderr.decode().rsplit("\nprompt ", 1)[0].splitlines()
    assert len(lines) > 5 and all(json.loads(line)["logprob"] <= 0 for line in lines)


def test_samples_in_order():
    out = toka("-p", PROBLEM, "--samples", "5", "--temp", "1.5").stdout.decode()
    assert re.findall(r"^--- sample (\d)", out, re.M) == list("01234")


def test_seed_and_limits():
    sampled = ["-p", PROBLEM, "--temp", "3", "--seed"]
    a = toka(*sampled, "3").stdout
    assert a == toka(*sampled, "3", "-t", "1").stdout
    assert any(a != toka(*sampled, str(s)).stdout for s in range(4, 9))
    v = json.loads(toka("-p", PROBLEM, "-n", "3", "--json").stdout)
    assert v["output_tokens"] == 3 and v["samples"][0]["finish_reason"] == "length"


def test_stop_string():
    whole = toka("-p", PROBLEM).stdout.decode()
    stop = whole[len(whole) // 2:][:4]
    assert toka("-p", PROBLEM, "--stop", stop).stdout.decode() == whole[:whole.index(stop)] + "\n"


def test_chat_keeps_history():
    r = toka("--chat", stdin=f"{PROBLEM}\n{PROBLEM.replace('12', '20')}\n")
    lines = [x for x in r.stdout.decode().splitlines() if x]
    assert r.returncode == 0 and len(lines) >= 2
    first, second = re.findall(r"prompt (\d+) tokens", r.stderr.decode())
    assert int(second) > 1.5 * int(first)
    dos = toka("--chat", stdin=f"{PROBLEM}\r\n\r\n{PROBLEM.replace('12', '20')}\r\n")
    assert dos.stdout == r.stdout and re.findall(r"prompt (\d+) tokens", dos.stderr.decode()) == [first, second]


def test_chat_continues_after_a_turn_that_does_not_fit():
    r = toka("--chat", "-q", stdin=f"{PROBLEM}\n{'Tom ' * 3000}\n{PROBLEM.replace('12', '20')}\n")
    want = toka("--chat", "-q", stdin=f"{PROBLEM}\n{PROBLEM.replace('12', '20')}\n")
    assert r.returncode == 0 and r.stdout == want.stdout and b"at most" in r.stderr and b"left out" in r.stderr
    r = toka("--chat", "-q", stdin=f"{'Tom ' * 3000}\n{PROBLEM}\n")
    assert r.returncode == 0 and r.stdout == toka("--chat", "-q", stdin=f"{PROBLEM}\n").stdout
    assert toka("--chat", "-q", stdin="Tom " * 3000).returncode == 1


def test_logprobs_of_samples():
    r = toka("-q", "--raw", "-p", "Tom", "-n", "4", "--samples", "3", "--temp", "1", "--logprobs", "1")
    samples = r.stderr.decode().split("--- sample ")[1:]
    assert r.returncode == 0 and [s.splitlines()[0] for s in samples] == ["0", "1", "2"]
    assert all(json.loads(line)["logprob"] <= 0 for s in samples for line in s.splitlines()[1:])


def test_raw_completes_text():
    r = toka("--raw", "-n", "5", "-p", "Tom has 12 apples.", "--json")
    assert json.loads(r.stdout)["output_tokens"] <= 5


def test_names_that_users_know():
    want = toka("-q", "-p", PROBLEM, "--temp", "2", "--seed", "1", "-n", "9", "--max-model-len", "200").stdout
    for names in (["--temperature", "--seed", "--n-predict", "-c"], ["--temperature", "--seed", "--max_new_tokens", "--ctx-size"],
                  ["--temp", "--seed", "--max_tokens", "--context_length"]):
        values = [x for pair in zip(names, ["2", "1", "9", "200"]) for x in pair]
        assert toka("-q", "-p", PROBLEM, *values).stdout == want, names
    assert toka("-q", "-p", PROBLEM, "--temperature=2", "--seed=1", "-n", "9", "-c", "200").stdout == want
    assert toka("-V").stdout == toka("version").stdout == toka("--version").stdout
    gpu = toka("-p", "x", "--device", "gpu") # means cuda
    assert gpu.returncode == 0 or (b"--device gpu: " in gpu.stderr and b"cuda:" not in gpu.stderr)
    for args in (["--c", "200"], ["-temperature", "1"], ["-tp", "1"], ["---temp", "1"]):
        assert toka("-p", "x", *args).returncode == 1, args
    assert toka("-p", "x", "--tp", "0").returncode == 1
    assert toka("-q", "-p", PROBLEM, "--tp", "1", "--pp", "1", "--dp", "1").returncode == 0
    want = toka("-q", "-p", PROBLEM).stdout  # vLLM's names of types
    for dtype in ("auto", "float", "float32"):
        assert toka("-q", "-p", PROBLEM, "--dtype", dtype).stdout == want
    bf16, bfloat16 = (toka("-q", "-p", PROBLEM, "--dtype", dtype, "--device", "cpu") for dtype in ("bf16", "bfloat16"))
    assert bf16.stdout == bfloat16.stdout and bf16.stderr.replace(b"bf16", b"bfloat16") == bfloat16.stderr and b"expected" not in bf16.stderr
    for dtype in ("half", "float16"):
        assert f"--dtype {dtype}: toka computes in float32 or bfloat16; models whose weights" in toka("-p", "x", "--dtype", dtype).stderr.decode()
    for name in ("--tp-size", "--pp-size", "--dp_size"):  # SGLang's
        assert f"{name}: 0, expected 1 to 64" in toka("-p", "x", name, "0").stderr.decode()


def test_a_model_in_place_of_a_command(tmp_path):
    """toka MODEL is toka run MODEL, if the word is a folder, OWNER/NAME or a name of models.txt."""
    want = toka("-q", "-p", PROBLEM)
    model = os.path.join(ROOT, "test/model")
    for args in ([model, "-p", PROBLEM], [model, PROBLEM]):
        assert (r := toka(*args, "-q")).returncode == 0 and r.stdout == want.stdout, args
    os.symlink(model, tmp_path / "mine")
    assert toka("mine", "-q", "-p", PROBLEM, cwd=tmp_path).stdout == want.stdout
    assert "toka pull Some/Model" in toka("Some/Model", "-p", "x").stderr.decode()
    assert "--revision v1" in toka("Some/Model@v1", "-p", "x").stderr.decode()
    assert "Qwen3-0.6B is not in the hub cache" in toka("qwen3-0.6b", "-p", "x").stderr.decode()
    with open(os.path.join(ROOT, "models.txt")) as known, open(tmp_path / "own.txt", "w") as own:
        own.write(known.read().replace("qwen3-0.6b ", "my-name-06b ", 1))
    assert "Qwen3-0.6B is not in the hub cache" in toka("my-name-06b", "-p", "x", "--models-file=own.txt", cwd=tmp_path).stderr.decode()
    for word, message in (("qwen3-06b", "qwen3-06b: no such command or model; see toka --help; did you mean toka qwen3-0.6b?"),
                          ("./none", "./none: no such command or model"), ("srve", "did you mean toka serve?")):
        r = toka(word, "-p", "x")
        assert r.returncode == 1 and message in r.stderr.decode() and r.stderr.count(b"\n") == 1, r.stderr


def test_flags_of_other_engines():
    """What toka always does, or has no need of, is accepted with a line that says so."""
    r = toka("-q", "-p", PROBLEM, "--swap-space", "16", "--disable-log-requests", "--enable_prefix_caching", "--block-size=32", "--trust-remote-code")
    assert r.returncode == 0 and r.stdout == toka("-q", "-p", PROBLEM).stdout
    assert re.findall(r"^toka: (--[a-z-]+): \w", r.stderr.decode(), re.M) == ["--swap-space", "--disable-log-requests", "--enable-prefix-caching",
                                                                              "--block-size", "--trust-remote-code"]
    assert b"unknown flag" in toka("list", "--swap-space", "1").stderr
    for args, words in ((["--swap-space", "abc"], "--swap-space: 'abc' is not a number"), (["--swap_space=-1"], "--swap_space: -1, expected"),
                        (["--swap-space"], "--swap-space needs a value"), (["--disable-log-requests=false"], "--disable-log-requests takes no value"),
                        (["--block-size", "1.5"], "--block-size: 1.5, expected a whole number"), (["--block-size="], "'' is not a number"),
                        (["--distributed-executor-backend", ""], "the value is empty")):
        r = toka("-p", "x", *args)
        assert r.returncode == 1 and words in r.stderr.decode() and r.stderr.count(b"\n") == 1, (args, r.stderr)
    share = toka("-q", "-p", PROBLEM, "--mem-fraction-static", "0.5", "--device", "cpu")
    assert share.returncode == 0 and share.stderr == b"toka: --mem-fraction-static: no effect on a CPU; --kv-tokens sets the size of its KV cache\n"
    assert b"unknown flag" in toka("-p", "x", "--swap-spaces", "1").stderr
    r = toka("-q", "-p", PROBLEM, "--load-format", "auto", "--disable-log-stats", "--task=generate")
    assert r.returncode == 0 and r.stderr.count(b"\n") == 3
    r = toka("-p", "x", "--load-format", "dummy")
    assert r.returncode == 1 and r.stderr == b"toka: --load-format: 'dummy', expected auto or safetensors: weights are safetensors\n"


def test_config_file(tmp_path):
    config = tmp_path / "config.json"

    def run(values, *args, **env):
        config.write_text(values if isinstance(values, str) else json.dumps(values))
        return toka("-q", "--config", str(config), *args, env=env)
    want = toka("-q", "-p", PROBLEM, "--temp", "2", "--seed", "3", "-n", "9", "--raw", "--stop", "§", "--stop", "$").stdout
    values = {"prompt": PROBLEM, "temperature": 2, "seed": 3, "max_tokens": "9", "raw": True, "chat": False, "stop": ["§", "$"]}
    assert run(values).stdout == want
    assert toka(f"--config={config}", "-q").stdout == want
    short = {"p": PROBLEM, "n": 9}
    assert run({**{k: v for k, v in values.items() if k not in ("prompt", "max_tokens")}, **short}).stdout == want
    assert run({**values, "seed": 4}, "--seed", "3").stdout == want  # the command line goes first
    assert run({**values, "seed": 3}, TOKA_SEED="5").stdout == want  # then the file, then the environment
    assert run(values, TOKA_SEED="x").stdout == want
    assert run({"prompt": "no"}, "-p", PROBLEM).stdout == toka("-q", "-p", PROBLEM).stdout
    assert run({f"--{k}": v for k, v in values.items()}).stdout == want  # names as they are typed
    assert run({"-p": PROBLEM, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}).stdout == toka("-q", "-p", PROBLEM).stdout
    for text, message in (("[]", "not a JSON object"), ("{", "JSON"), ("port: 80\n", 'not a JSON object, as {"port": 8000}'),
                          ({"speculative_config": {"method": "none"}}, "config.json: speculative_config"), ({"speculative_config": []}, "expected an object, a text or"), ({"tmep": 1}, "config.json: tmep: unknown flag; did you mean temp?"),
                          ({"port": 1}, "config.json: port is not for this command"), ({"raw": 1}, "config.json: raw: expected true or false"),
                          ({"temp": [1]}, "config.json: temp: expected a text or a number"), ({"temp": "hot"}, "config.json: temp: 'hot' is not a number"), ({"top_p": 7}, "config.json: top_p: 7, expected"),
                          ({"config": "x"}, "config.json: config: such a file cannot name another one"), ({"": 1}, "unknown flag"), ({"seed": 1.5}, "not a whole number"),
                          ({"max_tokens": 2.5}, f"toka: {config}: max_tokens: '2.5' is not a whole number\n"), ({"-m": "/no"}, f"{config}: -m /no: no such folder"),
                          ({"max-model-len": 1}, f"{config}: max-model-len: 1, expected")):
        r = run(text, "-p", "x")
        assert r.returncode == 1 and message in r.stderr.decode() and r.stderr.count(b"\n") == 1, r.stderr
    assert run('{"prompt": "Tom has", "n": 1e1}').stdout == toka("-q", "-p", "Tom has", "-n", "10").stdout  # 1e1 is the number 10
    assert b"/none: No such file" in toka("--config", "/none", "-p", "x").stderr


def test_completion(tmp_path):
    script = toka("completion", "bash").stdout.decode()

    def complete(*words):
        code = script + f"COMP_WORDS=({' '.join(repr(w) for w in words)}); COMP_CWORD={len(words) - 1}; _toka; echo ${{COMPREPLY[@]}}"
        r = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
        assert r.returncode == 0 and not r.stderr, r.stderr
        return r.stdout.split()
    assert complete("toka", "se") == ["serve"] and complete("toka", "serve", "--ap") == ["--api-key", "--api-key-file"]
    assert complete("toka", "bench", "") == ["throughput", "serve", "plan", "ops"] and complete("toka", "bench", "th") == ["throughput"]
    assert complete("toka", "bench", "serve", "--good") == ["--goodput"] and complete("toka", "--samp") == ["--samples"]
    assert complete("toka", "list", "--api") == [] and complete("toka", "-p", "x", "--temp") == ["--temp"]
    assert {"bench", "pull", "chat", "help"} <= set(complete("toka", ""))
    assert complete("toka", "completion", "") == ["bash", "zsh", "fish"] and complete("toka", "completion", "f") == ["fish"]
    pages = re.findall(r"\w+", re.search(r"^Manual pages: toka help (.*(?:\n  .*)*)", toka("--help-all").stdout.decode(), re.M)[1])
    topics = complete("toka", "help", "")
    assert set(pages) | {"serve", "bench"} <= set(topics) and len(topics) == len(set(topics)) and complete("toka", "help", "cons") == ["constraints"]
    for words in (["serve", "-m"], ["serve", "--model-path"], ["-m"], ["-p", "x", "-c"], ["batch", "-i"], ["serve", "--model", "="]):
        assert complete("toka", *words, "") == [], words  # so bash completes files
    assert "--raw" in complete("toka", "-p", "x", "--raw", "") and "--port" in complete("toka", "serve", "-m", "x", "")
    flags = set(re.findall(r"^  (?:-\w+, |    )--([a-z-]+)", toka("serve", "--help-all").stdout.decode(), re.M))
    assert {f"--{f}" for f in flags} == set(complete("toka", "serve", "--"))
    zsh = toka("completion", "zsh").stdout.decode()
    assert zsh.startswith("#compdef toka\n") and script.split("\ncomplete ")[0] in zsh
    fish = toka("completion", "fish").stdout.decode()
    assert "complete -c toka -n '__fish_seen_subcommand_from serve; and not __fish_seen_subcommand_from bench' -l port -r -d " in fish
    if shutil.which("fish"):
        for words, want in (("toka --samp", ["--samples"]), ("toka -p x --samp", ["--samples"]), ("toka bench serve --num-", ["--num-prompts", "--num-warmups"]),
                            ("toka serve --ap", ["--api-key", "--api-key-file"]), ("toka bench thr", ["throughput"]), ("toka pul", ["pull"])):
            r = subprocess.run(["fish", "-c", f"{fish}\ncomplete -C '{words}'"], capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path)})
            assert [line.split("\t")[0] for line in r.stdout.splitlines()] == want and not r.stderr, (words, r)
    assert "from completion' -f -a 'bash zsh fish'" in fish and re.search(r"from help' -f -a '.* constraints.*'", fish)
    assert all(line.count("'") - line.count("\\'") in (0, 2, 4) for line in fish.splitlines())
    assert toka("completion").returncode == toka("completion", "ksh").returncode == 1


@pytest.mark.skipif(not shutil.which("zsh"), reason="no zsh is installed")
@pytest.mark.parametrize("zshrc", ['eval "$(toka completion zsh)"', "fpath=(~ $fpath); autoload -Uz compinit && compinit"])
def test_completion_in_zsh(tmp_path, zshrc):
    """On a terminal, by eval and as a file of fpath. Tab completes the line, appends it to the file `lines`, and empties it."""
    (tmp_path / ".zshrc").write_text(zshrc + "\ntab() { zle expand-or-complete; print -r -- $BUFFER >>lines; BUFFER= }; zle -N tab; bindkey '^I' tab\n")
    (tmp_path / "_toka").write_bytes(toka("completion", "zsh").stdout)
    (tmp_path / "my folder").mkdir()
    (tmp_path / "lines").touch()
    cases = {"pul": "pull ", "./toka ser": "./toka serve ", "serve --ap": "serve --api-key", "bench serve --num-": "bench serve --num-", "-p x --samp": "-p x --samples ",
             "list --api": "list --api", "help cons": "help constraints ", "completion f": "completion fish ", "-m my": "-m my\\ folder/",
             "serve --model=my": "serve --model=my\\ folder/"}
    want = [new if new.startswith("./") else f"toka {new}" for new in cases.values()]
    lines = lambda: (tmp_path / "lines").read_text().splitlines()
    env = {**os.environ, "HOME": str(tmp_path), "ZDOTDIR": str(tmp_path), "TERM": "xterm", "PATH": f"{ROOT}:{os.environ['PATH']}"}
    pid, fd = pty.fork()
    if not pid:
        os.chdir(tmp_path)
        os.execvpe("zsh", ["zsh", "-i"], env)
    end, screen = time.time() + 60, b""
    for i, text in enumerate(cases):
        while len(lines()) < i or b"\x1b[?2004h" not in screen:  # the shell reads a line
            assert time.time() < end, screen.decode()
            screen += os.read(fd, 65536) if select.select([fd], [], [], 0.02)[0] else b""
        os.write(fd, f"{text}\t".encode() if text.startswith("./") else f"toka {text}\t".encode())
    while len(lines()) < len(cases) and time.time() < end:
        screen += os.read(fd, 65536) if select.select([fd], [], [], 0.02)[0] else b""
    os.close(fd)
    os.waitpid(pid, 0)
    assert lines() == want, screen.decode()


def test_run_a_model():
    want = toka("-q", "-m", "test/model", "-p", PROBLEM).stdout
    assert toka("run", "test/model", PROBLEM, "-q").stdout == want
    assert toka("run", "-q", "test/model", "-p", PROBLEM).stdout == want
    assert toka("run", "test/model", "-q", stdin=PROBLEM).stdout == want
    assert toka("run", "-q", "-p", PROBLEM).stdout == want
    for args, text in ((["run", "a", "b", "c"], "c: one argument too many"), (["run", "a", "b", "-p", "c"], "b: a second prompt"),
                       (["run", "/none", "x"], "/none: no such folder")):
        r = toka(*args)
        assert r.returncode == 1 and text in r.stderr.decode(), r.stderr


# ---- tokenize, template, score, models ----

def test_a_model_without_its_flag():
    want = toka("tokenize", "-m", "test/model", stdin="Tom has").stdout
    for args in (["test/model"], ["test/model", "--no-special"], ["--no-special", "test/model"]):
        assert toka("tokenize", *args, stdin="Tom has").stdout == (want if len(args) == 1 else toka("tokenize", "--no-special", stdin="Tom has").stdout)
    assert toka("tokenize", "test/model", stdin="Tom has", env={"TOKA_MODEL": "/none", "TOKA_HF_REPO": "no/ne"}).stdout == want
    assert toka("score", "test/model", "-q", "-p", "Tom has").returncode == 0
    for args, text in ((["tokenize", "a", "b"], "b: a second model"), (["tokenize", "a", "-m", "b"], "a: a second model, beside that of -m\n"),
                       (["score", "a", "-hf", "b/c"], "a: a second model"), (["-p", "x", "y"], "y: unknown argument"),
                       (["models", "y"], "y: unknown argument"), (["README.md", "-p", "x"], "README.md: a file; a model is a folder"),
                       (["batch", "README.md", "x"], "README.md: a file; a model is a folder"), (["run", "README.md"], "README.md: a file"),
                       (["run", "Tom has"], "Tom has: no such model; a prompt comes after -p, or after the model"),
                       (["chat", "Tom has"], "Tom has: no such model; a prompt comes after -p\n")):
        r = toka(*args)
        assert r.returncode == 1 and text in r.stderr.decode(), r.stderr


@pytest.mark.parametrize("text", ["Hello world", "", "a\n\n  b\t", "héllo 한국어 🙂‍🙂", "x" * 5000, "<|im_start|>"])
def test_tokenize_round_trip(text):
    r = toka("tokenize", stdin=text)
    assert r.returncode == 0
    assert toka("tokenize", "--decode", "--no-special", stdin=toka("tokenize", "--no-special", stdin=text).stdout).returncode == 0
    if not text.startswith("<|"):
        assert toka("tokenize", "--decode", "--no-special", stdin=r.stdout).stdout.decode() == text


def test_a_model_without_a_template(tmp_path):
    for f in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"):
        if os.path.exists(f"{ROOT}/test/model/{f}"):
            shutil.copy(f"{ROOT}/test/model/{f}", tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    plain = toka("-m", str(tmp_path), "-n", "5", "-p", PROBLEM)
    raw = toka("-m", str(tmp_path), "-n", "5", "-p", PROBLEM, "--raw")
    assert plain.returncode == raw.returncode == 0 and plain.stdout == raw.stdout
    assert b"has no chat template" in plain.stderr and b"template" not in raw.stderr
    p = subprocess.Popen([TOKA, "-m", str(tmp_path), "--chat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert p.wait(60) == 1 and b"has no chat template" in p.stderr.read()  # it does not wait for input
    p.stdin.close(), p.stdout.close(), p.stderr.close()


def test_template_through_a_pipe():
    r = subprocess.run(["bash", "-c", f"{TOKA} template --chat-template <(echo '[{{{{ messages[0].content }}}}]')"], capture_output=True,
                       input=b'{"messages":[{"role":"user","content":"hi"}]}', timeout=60)
    assert r.stdout.strip() == b"[hi]", r.stderr
    r = toka("template", "--chat-template", "/", stdin="{}")
    assert r.returncode == 1 and r.stderr == b"toka: --chat-template: / is a directory, expected a file\n"


def test_tokenize_refuses_words():
    for r in (toka("tokenize", "--decode", stdin="1 2 x"), toka("tokenize", "--decode", "-p", "1 2 x")):
        assert r.returncode == 1 and r.stderr == b"toka: --decode: not a token id at byte 4\n"


def test_template_file_needs_no_model(tmp_path):
    f = tmp_path / "t.jinja"
    f.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{{ strftime_now('%d %b %Y') }}")
    r = toka("template", "--chat-template", str(f), "--now", "2025-07-04 12:34:56",
             stdin='{"messages":[{"role":"user","content":"hi"}]}')
    assert r.stdout == b"[user] hi04 Jul 2025"
    r = toka("template", "--chat-template", str(f), "--now", "2025-02-30 12:34:56", stdin='{"messages":[]}')
    assert r.returncode == 1 and b"YYYY-MM-DD" in r.stderr
    f.write_text("line one\n{% frobnicate %}")
    r = toka("template", "--chat-template", str(f), stdin="{}")
    assert r.returncode == 1 and b"line 2" in r.stderr and b"frobnicate" in r.stderr


DATA = os.environ.get("TOKA_TEST_DATA") or os.path.join(ROOT, "../shared/data")


@pytest.mark.skipif(not os.path.exists(DATA + "/templates/goldens.jsonl"), reason="no public test data")
def test_template_goldens():
    with open(DATA + "/templates/contexts.json") as f:
        contexts = json.load(f)
    with open(DATA + "/templates/goldens.jsonl") as f:
        rows = [json.loads(line) for line in f]
    assert len(rows) > 400
    for row in rows[::7]:
        context = {"bos_token": row["bos_token"], "eos_token": row["eos_token"], **contexts[row["context"]]}
        r = toka("template", "--chat-template", f"{DATA}/templates/{row['template']}", "--now", "2025-07-04 12:34:56",
                 stdin=json.dumps(context))
        if "error" in row:
            assert r.returncode == 1 and r.stderr, row
        else:
            assert r.returncode == 0 and r.stdout.decode() == row["output"], (row["template"], row["context"], r.stderr)


def test_template_of_the_embedded_model():
    r = toka("template", stdin='{"messages":[{"role":"user","content":"hi"}],"add_generation_prompt":true}')
    assert r.returncode == 0 and b"hi" in r.stdout
    with_bom = toka("template", stdin='\ufeff{"messages":[{"role":"user","content":"hi"}],"add_generation_prompt":true}')
    assert with_bom.returncode == 0 and with_bom.stdout == r.stdout


def test_score():
    r = toka("score", "--json", "-p", "Tom has 12 apples.")
    v = json.loads(r.stdout)
    scores = [t["logprob"] for t in v["tokens"][1:]]
    assert v["tokens"][0]["logprob"] is None and all(x <= 0 for x in scores)
    assert abs(sum(scores) - v["logprob"]) < 1e-3
    assert len(toka("score", "-p", "Tom has 12 apples.").stdout.decode().splitlines()) == len(v["tokens"])


def test_models():
    r = toka("models")
    assert r.returncode == 0 and len(r.stdout.decode().splitlines()) > 20 and b"Llama-3.1-8B" in r.stdout


def test_without_models_txt(tmp_path):
    """If the program was copied without models.txt, the error names the missing file and does not call the model's name wrong."""
    shutil.copy(TOKA, alone := tmp_path / "toka")
    for args in (["models"], ["-m", "llama-3.2-1b", "-p", "x"],
                 ["bench", "throughput", "--dummy-weights", "-m", "llama-3.2-1b", "--dataset", TOKA]):
        r = subprocess.run([alone, *args], capture_output=True, cwd=tmp_path)
        assert r.returncode == 1 and b"no models.txt here or next to the program" in r.stderr, (args, r.stderr)


# ---- flags, environment, errors ----

def test_help_is_short():
    """--help fits on one screen: it has examples and names --help-all."""
    r = toka("--help")
    text = r.stdout.decode()
    assert r.returncode == 0 and 15 < text.count("\n") <= 20 and max(map(len, text.splitlines())) <= 80 and "Examples\n  toka -p" in text and "toka --help-all" in text
    for command in ("serve", "batch", "bench serve", "bench throughput", "score", "plan", "tokenize", "template", "run", "chat", "ping", "grammar", "embed", "pull", "rm"):
        words = command.split()
        short, every = (toka(*words, flag).stdout.decode() for flag in ("--help", "--help-all"))
        assert short.count("\n") < 24 and 2 < len(re.findall("^  toka |^  (?:echo|curl) ", short.split("\nExamples\n")[1].split("\n\n")[0], re.M)) < 5, command
        assert f"toka {command} --help-all" in short or set(re.findall("--[a-z-]+", every)) <= set(re.findall("--[a-z-]+", short)), command
        assert toka(*words, "-h").stdout.decode() == short
        if command != "plan":  # a manual page has this name
            assert toka("help", *words).stdout.decode() == short
    bench = toka("bench", "--help").stdout.decode()
    kinds = re.findall(r"^  toka bench (\w+)  ", bench.split("\nExamples\n")[0], re.M)
    assert kinds == ["throughput", "serve", "plan", "ops"] and "  toka bench serve --port" in bench.split("\nExamples\n")[1] and "toka chat" not in bench
    assert all(toka(*words).stdout.decode() == bench for words in (["bench", "--help-all"], ["bench", "-h"], ["help", "bench"], ["help", "bench", "--help-all"]))
    known = open(os.path.join(ROOT, "models.txt")).read()
    for name in re.findall(r"-m ([a-z0-9.-]+)", text):
        assert f"\n{name} " in known, name


def test_help_names_every_flag():
    r = toka("--help-all")
    with open(os.path.join(ROOT, "toka.c")) as f:
        table = f.read().split("cli_flags[] = {")[1].split("\n};")[0]
    flags = re.findall(r'^    \{"([a-z-]+)", "', table, re.M)
    assert r.returncode == 0 and len(flags) > 25
    for f in flags:
        assert f"--{f}" in r.stdout.decode()
    with open(os.path.join(ROOT, "toka.c")) as f:
        assert set(re.findall(r"up to (\d+) times", r.stdout.decode())) == set(re.findall(r"\bCLI_MAX_LIST = (\d+)", f.read()))


def test_help_names_every_variable():
    """The block Environment has the variables that the source reads, but those for tests and of flags."""
    read = set()
    for name in ("toka.c", "toka_kernels.cu"):
        for function in re.split(r"^}", open(os.path.join(ROOT, name)).read(), flags=re.M):
            if re.search(r"\bgetenv\(|\bmf_put_env_path\(", function):
                read |= set(re.findall(r'"([A-Z]{2,}(?:_[A-Z]+)*)"', function))
    block = toka("--help-all").stdout.decode().split("\nEnvironment\n")[1].split("\nEvery flag")[0]
    listed = re.findall(r"^  ([A-Z_]+)  ", block, re.M)
    assert {"HF_TOKEN", "NO_COLOR", "XDG_STATE_HOME"} <= set(listed) and len(listed) == len(set(listed)) == block.count("\n") + 1
    assert set(listed) == {name for name in read if not name.startswith("TOKA_DEBUG_")} - {"TOKA_MODELS_FILE"}
    assert "\nEnvironment\n" not in toka("serve", "--help-all").stdout.decode()


def test_help_of_a_command():
    """The help of a command lists exactly the flags that the command accepts."""
    with open(os.path.join(ROOT, "toka.c")) as f:
        table = f.read().split("cli_flags[] = {")[1].split("\n};")[0]
    flags = re.findall(r'^    \{"([a-z-]+)", "[a-z]?", "([^"]*)"', table, re.M)
    for words in (["serve"], ["batch"], ["tokenize"], ["plan"], ["bench", "serve"], ["bench", "throughput"], ["models"]):
        r = toka(*words, "--help-all")
        text = r.stdout.decode()
        assert r.returncode == 0 and text.split("\nExamples\n")[0].count("  toka ") == 1
        assert f"  toka {' '.join(words)}" in text and "\n\n\n" not in text
        listed = re.findall(r"^  (?:-[a-z], |    )--([a-z-]+)", text, re.M)
        assert 1 < len(listed) < len(flags) and "help" in listed
        for name, arg in flags:
            accepted = b"not for this command" not in toka(*words, f"--{name}", *(["1"] if arg else []), "--help-all").stderr
            if (words, name) != (["bench", "serve"], "tokenizer"):  # a flag of vLLM there, without effect
                assert accepted == (name in listed), (words, name)
        # nothing about other commands, but that of the summary and the example
        others = {"bench serve", "bench throughput", "serve", "batch", "plan", "tokenize", "score", "grammar", "embed", "ping", "chat"} - {" ".join(words)}
        about = re.findall(r"(?:[ (])(%s)(?:[:,)]|$)" % "|".join(others), text.split("\nExamples\n")[-1].split("\n\n", 1)[-1], re.M | re.I)
        assert not about and "toka batch" not in text.split("\n\n", 2)[-1].replace("toka batch -m", ""), (words, about)
        for name in re.findall(r"--([a-z-]+)", text.split("\n0 is the default of")[-1].split(".\n")[0] if "\n0 is" in text else ""):
            assert name in listed, (words, name)
    every = toka("--help-all").stdout.decode()
    assert "; serve: port to listen on; 0 is any free one" in every and "; ping, bench serve: the server's name for its model" in every
    assert "listen on; 0 is any free one" in toka("serve", "--help").stdout.decode() and "free one" not in toka("bench", "serve", "--help").stdout.decode()
    page = toka("help", "plan").stdout.decode()
    assert "--gpu-price" in toka(*re.search(r"- All flags: toka (.*)\.$", page, re.M)[1].split()).stdout.decode()
    assert toka("help").stdout == toka("--help").stdout
    ping = subprocess.run([os.path.join(ROOT, "toka-ping"), "--help"], capture_output=True).stdout
    assert toka("ping", "--help").stdout == ping != b"" and toka("test/model", "--help").stdout == toka("run", "--help").stdout != toka("--help").stdout


def test_devices():
    devices = toka("devices")
    assert devices.returncode == 0 and re.search(rb"^cpu  .*kernels, \d+ cores?, ", devices.stdout, re.M)
    assert re.search(rb"^plain  .*one thread", devices.stdout, re.M)
    plain, cpu = (toka("-p", PROBLEM, "--device", x) for x in ("plain", "cpu"))
    assert plain.returncode == 0 and plain.stdout and plain.stdout == cpu.stdout
    for flag in ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"):
        r = toka("-p", PROBLEM, "--device", "plain", flag, "2")
        assert r.returncode == 1 and b"plain backend: it has one rank" in r.stderr and r.stderr.count(b"\n") == 1
    with_cuda, has_gpu = b"cuda" in toka("--version").stdout, re.search(rb"^cuda\S*  .*compute capability", devices.stdout, re.M)
    assert with_cuda == (b"cuda" in devices.stdout)
    if has_gpu:
        pytest.skip("there is a GPU")
    r = toka("-p", PROBLEM, "--device", "cuda")
    assert r.stdout == b"" and r.stderr.count(b"\n") == 1
    assert r.returncode == (2 if with_cuda else 1) and (b"device cuda: " in r.stderr)
    r = toka("-p", PROBLEM, env={"TOKA_DEVICE": "auto"})
    assert r.returncode == 0 and (b"toka: no GPU (" in r.stderr) == with_cuda
    r = toka("bench", "ops")
    assert r.returncode == (2 if with_cuda else 1) and r.stderr.count(b"\n") == 1
    assert toka("-p", PROBLEM, "--device", "tpu").returncode == 1


def test_dtype():
    """float32 is the default. bfloat16 is another arithmetic with nearly the same log-probabilities, or is refused."""
    def score(*flags):
        r = toka("score", "--json", "-p", PROBLEM, *flags)
        return r, r.stdout and [t["logprob"] for t in json.loads(r.stdout)["tokens"][1:]]
    want, found = score()[1], score("--dtype", "float32")[1]
    assert want == found == score("--dtype", "auto")[1]
    r, found = score("--dtype", "bfloat16", "-v")
    if "avx512_bf16" not in open("/proc/cpuinfo").read():
        assert r.returncode == 2 and b"AVX512_BF16" in r.stderr and r.stdout == b""
        return
    differences = [abs(a - b) for a, b in zip(want, found)]
    assert b"AVX512_BF16" in r.stderr and 0 < max(differences) < 0.2 and sum(differences) / len(differences) < 0.03
    assert last_number(toka("-p", PROBLEM, "--dtype", "bfloat16").stdout.decode()) == "19"


def test_kv_cache_dtype():
    """FP8 K and V change log-probabilities a little; layers that are skipped do not."""
    def score(*flags):
        r = toka("score", "--json", "-v", "-p", PROBLEM, *flags)
        return r.stderr.decode(), [t["logprob"] for t in json.loads(r.stdout)["tokens"][1:]]
    text, want = score("--kv-cache-dtype", "auto")
    all_fp8, found = score("--kv-cache-dtype", "fp8")
    assert "FP8" not in text and "tokens in FP8" in all_fp8 and want == score()[1]
    assert 0 < max(abs(a - b) for a, b in zip(want, found)) < 0.2
    assert found == score("--kv-cache-dtype", "fp8_e4m3")[1] == score("--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "sliding_window")[1]
    some, mixed = score("--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "0,2,5")
    assert "FP8 in 3 of 6 layers" in some and want != mixed != found
    assert want == score("--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "0,1,2,3,4,5")[1]


def test_version():
    r = toka("--version")
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short=8", "HEAD"], capture_output=True).stdout.decode().strip()
    pattern = r"toka \d+\.\d+\.\d+ \((commit [0-9a-f]{8}, )?(gcc|clang|.* Clang) \d[^;]*; device: .*cpu, plain.*\)\n"
    assert r.returncode == 0 and re.fullmatch(pattern, r.stdout.decode(), re.I), r.stdout
    if commit and os.path.isdir(os.path.join(ROOT, ".git")):  # the program may be older than the last commit, but has one
        assert b"commit " in r.stdout
    if b"device: cuda" in r.stdout:
        assert re.search(rb", CUDA \d+\.\d+ for \d\d", r.stdout)


def test_environment():
    assert json.loads(toka("--json", "-p", PROBLEM, env={"TOKA_MAX_TOKENS": "2"}).stdout)["output_tokens"] == 2
    r = toka("-p", "x", env={"TOKA_TOP_K": "many"})
    assert r.returncode == 1 and b"TOKA_TOP_K" in r.stderr


def test_command_line_overrides_environment():
    want = toka("-p", PROBLEM).stdout
    assert toka("-p", PROBLEM, env={"TOKA_FILE": "/does/not/exist", "TOKA_DATASET": "x"}).stdout == want
    assert toka("-f", "-", stdin=PROBLEM, env={"TOKA_PROMPT": "hi"}).stdout == want
    assert toka("-p", PROBLEM, "--stop", "never seen", env={"TOKA_STOP": "a"}).stdout == want
    assert toka("-p", PROBLEM, "--raw", env={"TOKA_SYSTEM": "x"}).stdout == toka("-p", PROBLEM, "--raw").stdout
    for value in "many", "tcp://10.0.0.1:10210":  # if a flag is given, its variable may have any value
        assert toka("-p", PROBLEM, "--seed", "3", env={"TOKA_SEED": value}).stdout == want
    r = toka("-p", PROBLEM, "--seed", "3", env={"TOKA_SEED": "x", "TOKA_TOP_K": "many"})
    assert r.returncode == 1 and b"TOKA_TOP_K" in r.stderr
    chat = toka("--chat", "-q", stdin=PROBLEM + "\n")
    env = {"TOKA_FILE": "/does/not/exist", "TOKA_SAMPLES": "4"}
    assert toka("--chat", "-q", stdin=PROBLEM + "\n", env=env).stdout == chat.stdout != b""
    assert toka("--chat", "--samples", "4").returncode == 1
    for command, env in (("bench serve", {"TOKA_BASE_URL": "http://127.0.0.1:9"}), ("serve", {"TOKA_UDS": "/does/not/exist/socket"})):
        r = toka(*command.split(), "--host", "no.such.host.invalid", env=env)
        assert r.returncode and b"no.such.host.invalid" in r.stderr, command
    for flag in ("--port", "1"), ("--host", "127.0.0.1"):  # a conflict on the command line is an error
        r = toka("serve", "--uds", "/does/not/exist/socket", *flag)
        assert r.returncode == 1 and r.stderr == b"toka: --uds goes without %s\n" % flag[0].encode(), r.stderr
    assert toka("--help", env={"TOKA_THREADS": "abc"}).returncode == 0
    assert len({toka(*c, "--help").stdout for c in ([], ["bench"], ["serve"])}) == 3
    assert toka("bench").returncode == 1


def interrupt_half_way(args, is_whole, is_cut):
    """Runs toka with one thread and steps of one token. The first run is not interrupted: it measures the time, and is_whole(out) must
    hold. The next runs get a SIGINT after half of this time, then earlier and earlier, until is_cut(out, err) holds."""
    def start():
        p = subprocess.Popen([TOKA, *args, "--max-num-seqs", "1", "--max-num-batched-tokens", "1", "--threads", "1"],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_handlers(p)
        return p, time.time()
    p, since = start()
    assert is_whole(p.communicate(timeout=60)[0]) and p.returncode == 0
    wait, late = (time.time() - since) / 2, 0  # `since`: the model is not yet open
    while True:
        p, _ = start()
        time.sleep(wait)
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=60)
        if p.returncode == 130 and is_cut(out, err):
            return
        if p.returncode:
            late += 1  # the signal may come while the program prints, but only a few times
        wait /= 2
        assert late < 4 and wait > 1e-6, (p.returncode, out, err)


def test_ctrl_c_while_scoring(tmp_path):
    text = tmp_path / "long.txt"
    text.write_text("Tom has 12 apples. " * 80)
    interrupt_half_way(["score", "-f", str(text)], len, lambda out, err: out == b"")


def test_ctrl_c_in_a_long_prompt():
    """A prompt interrupted before its first token ends like one interrupted later."""
    def sample(out):
        return json.loads(out)["samples"][0]

    def is_cut(out, err):
        if not out or sample(out)["tokens"]:
            return False
        assert sample(out)["finish_reason"] == "cancelled"
        assert re.search(rb"prompt \d+ tokens, generated 0 tokens, .*ended after \d+ ms\n$", err)
        return True

    interrupt_half_way(["--raw", "--json", "--ignore-eos", "-n", "1", "-p", "Tom has 12 apples. " * 80],
                       lambda out: len(sample(out)["tokens"]) == 1, is_cut)


def test_ctrl_c_while_waiting_for_input():
    p = subprocess.Popen([TOKA], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_handlers(p)
    time.sleep(0.2)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=60)
    assert p.returncode == 130 and out == b"" and err == b""


def test_tokenize_needs_no_weights(tmp_path):
    for f in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        with open(f"{ROOT}/test/model/{f}", "rb") as src:
            (tmp_path / f).write_bytes(src.read())
    assert toka("tokenize", "-m", str(tmp_path), stdin="hi").stdout == toka("tokenize", stdin="hi").stdout
    (tmp_path / "chat_template.jinja").write_text("{% frobnicate %}")
    assert toka("tokenize", "-m", str(tmp_path), stdin="hi").returncode == 0
    r = toka("template", "-m", str(tmp_path), stdin='{"messages":[]}')
    assert r.returncode == 1 and b"frobnicate" in r.stderr


def test_templates_by_name(tmp_path):
    """toka chooses the template default, or tool_use if there are tools; --chat-template NAME selects another one. If there is no
    default, the error lists the names."""
    named = [{"name": n, "template": n + " {{ messages[0].content }}"} for n in ("tool_use", "rag", "default")]
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": named}))
    chat, tools = '{"messages":[{"role":"user","content":"hi"}]}', '{"messages":[{"role":"user","content":"hi"}],"tools":[]}'
    for args, stdin, want in (([], chat, b"default hi"), ([], tools, b"tool_use hi"), (["--chat-template", "rag"], chat, b"rag hi"),
                              (["--chat-template", "rag"], tools, b"rag hi"), (["--chat-template", "default"], tools, b"default hi")):
        assert toka("template", "-m", str(tmp_path), *args, stdin=stdin).stdout == want
        if not args:  # the same templates from a file, without a model and with another model
            assert toka("template", "--chat-template", str(config), stdin=stdin).stdout == want
            assert toka("template", "-m", "test/model", "--chat-template", str(config), stdin=stdin).stdout == want
    r = toka("template", "-m", str(tmp_path), "--chat-template", "nope", stdin=chat)
    assert r.returncode == 1 and b"nope: No such file" in r.stderr
    config.write_text(json.dumps({"chat_template": named[:2]}))
    assert toka("template", "-m", str(tmp_path), stdin=tools).stdout == b"tool_use hi"
    for args in (["-m", str(tmp_path)], ["--chat-template", str(config)]):
        r = toka("template", *args, stdin=chat)
        assert r.returncode == 1 and b"none of its templates is named default" in r.stderr and b"tool_use, rag" in r.stderr


@pytest.mark.parametrize("config", [None, '{"architectures":["FalconForCausalLM"],"model_type":"falcon"}', "{", ""])
def test_text_needs_no_config(tmp_path, config):
    """Tokenizer and template work in a folder without config.json, and with the config.json of a model that toka cannot run."""
    for f in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{ROOT}/test/model/{f}", tmp_path)
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    chat = '{"messages":[{"role":"user","content":"hi"}]}'
    for args, stdin in ((["tokenize"], "hi <|im_end|>"), (["tokenize", "--decode"], "75 76 3"), (["template"], chat)):
        got, want = toka(*args, "-m", str(tmp_path), stdin=stdin), toka(*args, stdin=stdin)
        assert got.returncode == want.returncode == 0 and got.stdout == want.stdout != b""
    r = toka("-m", str(tmp_path), "-p", "a")
    assert r.returncode == 1 and b"config.json" in r.stderr
    assert toka("plan", "-m", str(tmp_path)).returncode == 1
    os.remove(tmp_path / "tokenizer.json")
    r = toka("tokenize", "-m", str(tmp_path), stdin="hi")
    assert r.returncode == 1 and b"there is no tokenizer.json" in r.stderr
    assert toka("template", "-m", str(tmp_path), stdin=chat).stdout == toka("template", stdin=chat).stdout


@pytest.mark.parametrize("args, words", [
    (["--nonsense"], "--nonsense"), (["bogus"], "bogus"), (["-n"], "needs a value"), (["-n", "x", "-p", "a"], "whole number"),
    (["-n", "9999999999", "-p", "a"], "-n: 9999999999 is too high"),
    (["--seed", "-" + "9" * 30, "-p", "a"], "is too low"), (["--models-file", "x", "models"], "a command comes before its flags"),
    (["--temp", "hot", "-p", "a"], "not a number"), (["--temp", "-1", "-p", "a"], "--temp: -1, expected 0 or more"), (["--top-p", "2", "-p", "a"], "--top-p: 2"),
    (["-m", "/does/not/exist", "-p", "a"], "/does/not/exist"), (["-f", "/does/not/exist"], "/does/not/exist"),
    (["-p", "a", "-f", "README.md"], "exclude"), (["--device", "tpu", "-p", "a"], "tpu"), (["--dtype", "half", "-p", "a"], "--dtype half: toka computes"),
    (["--kv-cache-dtype", "fp8_e5m2", "-p", "a"], "fp8_e5m2 is not supported"), (["--kv-cache-dtype", "int8", "-p", "a"], "--kv-cache-dtype: "),
    (["--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "0,6", "-p", "a"], "\"6\""),
    (["--kv-cache-dtype-skip-layers", "0", "-p", "a"], "--kv-cache-dtype-skip-layers"), (["-p", "a", "--samples", "0"], "--samples"),
    (["tokenize", "--json"], "--json"), (["score", "--temp", "1", "-p", "a"], "--temp"), (["--decode", "-p", "a"], "--decode"),
    (["--chat", "--raw"], "--raw"), (["--top-k", "-2", "-p", "a"], "--top-k: -2"), (["--logprobs", "-5", "-p", "a"], "logprobs"),
    (["--logprobs", "-1", "-p", "a"], "logprobs"),
    (["--logprobs", "101", "-p", "a"], "--logprobs: 101, expected"), (["-f", "/"], "directory"), (["--max-model-len", "100000", "-p", "a"], "1024"),
    (["--max-num-batched-tokens", "8", "--max-num-seqs", "9", "-p", "a"], "--max-num-batched-tokens: 8"), (["bench"], "toka bench: expected throughput"), (["bench", "srve"], "toka bench srve: expected throughput, serve, plan or ops; did you mean toka bench serve?\n"),
    (["--stop", "", "-p", "a"], "--stop[0]: 0 bytes"),
    # the flag as it was typed, and the nearest right thing
    (["-p", "a", "-n", "-3"], "-n: -3, expected 0 or more"), (["-p", "a", "--max_tokens", "x"], "--max_tokens: 'x' is not a whole number"),
    (["-p", "a", "-f", "README.md"], "-p and -f exclude each other"), (["-p", "a", "--file", "/dev/null"], "-p and --file exclude each other"),
    (["-m", "a", "-hf", "b/c", "-p", "a"], "-hf and -m exclude each other"), (["serve", "-m", "a", "b"], "b: a second model, beside that of -m\n"),
    (["-m", "Qwen/Qwen3-06B", "-p", "a"], "or run: toka pull Qwen/Qwen3-06B; did you mean Qwen/Qwen3-0.6B?"),
    (["-m", "Qwen/Other", "-p", "a"], "or run: toka pull Qwen/Other\n"), (["ping", "n=abc"], "toka: n: 'abc' is not a whole number"),
    (["-p", "a", "--tp", "9"], "--tp 9: the model has 4 heads"), (["-p", "a", "--tp=0"], "--tp: 0, expected 1 to 64"),
    (["-p", "a", "-t", "-1"], "-t: -1, expected 0 to 1024"), (["-p", "a", "-c", "1"], "-c: 1, expected"),
    (["-p", "a", "--temperature=hot"], "--temperature: 'hot' is not a number"), (["devices", "--tp", "2"], "--tp is not for this command, but for toka run, toka chat, toka score and others; see toka devices --help-all\n"),
    (["-p", "a", "--raw=1"], "--raw takes no value"), (["-p", "a", "--quantization", "awq"], "the format of a model's files is found without it"),
    (["-p", "a", "--regex", "("], "--regex: ( without )"), (["-p", "a", "--json-schema", "/no"], "--json-schema /no: No such file"),
    (["-p", "a", "--config", "/no"], "--config /no: No such file"), (["serve", "--api-key-file", "/no"], "--api-key-file /no: No such file"),
    (["-p", "a", "--chat-template", "no"], "--chat-template no: No such file or directory, and embedded has no template of this name"),
    (["serve", "--tool-call-parser", "herms"], "--tool-call-parser herms: no such name; did you mean hermes?"),
    (["serve", "--reasoning-parser", "x"], "--reasoning-parser x: expected auto, none or one of openai_gptoss "),
    (["tell me a joke"], "tell me a joke: no such command or model; a prompt comes after -p"), (["list", "x"], "x: unknown argument; this command takes none"),
    (["help", "nope"], "nope: no such command, and no page of the manual; see toka --help; the pages are hub, formats, "), (["-p", "a", "--tempp", "1"], "did you mean --temp?"),
    (["batch", "--ouput", "x"], "--ouput: unknown flag; did you mean --output-file?"), (["serve", "--sreved-model", "x"], "did you mean --served-model-name?"), (["servee"], "did you mean toka serve?"), (["serve", "--swap-spce", "4"], "--swap-spce: unknown flag; did you mean --swap-space?\n"), (["help", "servign"], "see toka --help; did you mean toka help serving?\n"), (["-m", "test/fixtures/qwen2", "-p", "a"], "tokenizer"),
    (["-m", "no-such", "-p", "a"], "-m no-such: no such folder"), (["-m", "test", "-p", "a"], "-m test: test/config.json: No such file"),
    (["-p", "a", "-hf", "a/b/c"], "-hf a/b/c: not a hub id, which is OWNER/NAME"), (["--hf", "a/b:Q4", "-p", "a"], "--hf a/b:Q4: the tag :Q4 names"),
    (["-m", "a/b:Q4", "-p", "a"], "-m a/b:Q4: the tag :Q4 names a file of another format (GGUF)"),
    (["run", "llama3.2:1b", "hi"], "llama3.2:1b: not a hub id, which is OWNER/NAME, and no name of models.txt; did you mean llama-3.2-1b?"),
    (["batch", "-i", "README.md", "-o", "/none/x"], "-o /none/x: No such file"), (["batch", "-i", "toka.h", "-o", "toka.h"], "-i toka.h is the input and"),
    (["bench", "throughput", "--dataset", "README.md"], "--dataset README.md: line 1: JSON"),
    (["-p", "a", "--json-schema", "README.md"], "--json-schema: JSON: value expected"), (["-p", "a b c", "-c", "5"], "tokens; at most 4 fit (-c 5)"),
    (["template", "-p", "{"], "toka: -p: JSON: text ends"), (["serve", "--read-timeout", "0"], "--read-timeout: 0, expected more than 0\n"),
    (["serve", "--keep-alive", "-1"], "--keep-alive: -1, expected more than 0\n"), (["completion", "bsh"], "bsh: expected toka completion bash, zsh"),
    (["plan", "--tp", "8"], "--tp is not for this command, but for toka run, "), (["-p", "a", "--port", "80"], "--port is not for this command, but for toka ping, toka serve, toka bench serve; see toka --help-all\n"), (["bench", "serve", "--zz"], "see toka bench serve --help-all"),
    (["list", "x"], "see toka list --help\n"), (["qwen3-0.6b", "-p", "a"], "or run: toka pull Qwen/Qwen3-0.6B\n"),
    (["-p", "a", "--dtype", "fp16"], "--dtype fp16: toka computes in"), (["formts"], "did you mean toka help formats?"),
    (["-p", "a", "--kv-tokens", "99999999999999"], "--kv-tokens: CPU backend: no memory"), (["serve", "--admin-key", ""], "--admin-key: it is empty"),
    (["pull", "a/b", "--revision", "c d"], "--revision c d is no name of a revision"),
    (["pull", "a/b@"], "toka: a/b@: the revision is empty"), (["-m", "", "-p", "x"], "-m: the value is empty"), (["model="], "model: the value is empty"),
    (["serve", ""], "the name of the model is empty"), (["chat", "--temp", "-1"], "--temp: -1, expected 0 or more"),
    (["news"], "did you mean toka help news?"), (["--config", "README.md"], "--config README.md: not a JSON object"),
])
def test_wrong_arguments_give_one_sentence(args, words):
    r = toka(*args)
    assert r.returncode in (1, 2) and r.stdout == b""
    assert words in r.stderr.decode() and r.stderr.decode().count("\n") == 1 and r.stderr.startswith(b"toka: ")


READS = ["-f {}", "score -f {}", "tokenize -f {}", "template -f {}", "-p x --chat-template {}", "template --chat-template {} -p {{}}",
         "bench throughput --dataset {}", "bench serve --dataset {}", "serve --api-key-file {}", "serve --chat-template {}",
         "batch -i {} -o out.jsonl", "batch -i {} -o -"]
WRITES = ["models --models-file {}", "-p x --models-file {}", "batch -i in.jsonl -o {}", "batch -i in.jsonl -o out.jsonl --report {}",
          "bench throughput --dataset in.jsonl --timeline {}"]


def test_a_directory_in_place_of_a_file(tmp_path):
    """The error is one sentence, and the program ends before it does any work. An error about a missing file names the file."""
    (tmp_path / "in.jsonl").write_text('{"prompt":"Tom","max_tokens":1}\n')
    (tmp_path / "folder").mkdir()
    for command in READS + WRITES:
        r = toka(*command.format("folder").split(), cwd=tmp_path)
        message = rb"toka: (--?[a-z-]+:? )?folder is a directory, expected a file\n"
        assert r.returncode == 1 and re.fullmatch(message, r.stderr), (command, r.stderr)
    for command in READS:
        if "bench serve" not in command:  # it waits for a server before it opens the file
            r = toka(*command.format("none").split(), cwd=tmp_path)
            assert r.returncode == 1 and re.search(rb"^toka: (--?[a-z-]+ )?none: No such file or directory", r.stderr, re.M), (command, r.stderr)
    assert all(not os.path.getsize(tmp_path / name) for name in os.listdir(tmp_path) if name == "out.jsonl")
    r = toka("batch", "-o", "out.jsonl", cwd=tmp_path, env={"TOKA_INPUT_FILE": "folder"})
    assert r.returncode == 1 and b"TOKA_INPUT_FILE: folder is a directory" in r.stderr
    os.mkfifo(tmp_path / "pipe")
    subprocess.Popen(["sh", "-c", "echo Tom has > pipe"], cwd=tmp_path)
    assert toka("tokenize", "-f", "pipe", cwd=tmp_path).stdout == toka("tokenize", stdin="Tom has\n").stdout


def test_exit_status_of_wrong_arguments():
    assert toka("-f", "/does/not/exist").returncode == 1
    assert toka("--nonsense").returncode == 1


def test_full_disk_is_reported():
    with open("/dev/full", "wb") as full:
        r = subprocess.run([TOKA, "-p", PROBLEM], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert r.returncode == 2 and b"standard output" in r.stderr


@pytest.mark.parametrize("args", [["--ignore-eos", "-n", "900"], ["--json", "-n", "5"], ["-n", "5", "--samples", "3"],
                                  ["--chat", "-n", "5"], ["-n", "5", "--logprobs", "1"]])
def test_closed_standard_output(args):
    """If the reader of standard output has closed the pipe, the exit status is 0 and there is no message."""
    raw = [] if "--chat" in args else ["--raw"]
    reader, writer = os.pipe()
    if "--ignore-eos" not in args:  # a short output could be written before the reader closes: it closes before the start
        os.close(reader)
    p = subprocess.Popen([TOKA, *raw, *args, "-p", "Tom"], stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    if "--ignore-eos" in args:
        os.read(reader, 1)
        os.close(reader)
    err = p.stderr.read()
    assert p.wait(60) == 0 and err == b""


PRINTS = ["--help", "--help-all", "help serve", "serve --help", "batch --help-all", "--version", "models", "devices", "tokenize -p hi",
          "tokenize --decode -p 3", "score -p Tom", "score --json -p Tom", "plan -m llama-3.1-8b", "plan -m llama-3.1-8b --json"]


@pytest.mark.parametrize("command", PRINTS)
def test_closed_pipe_and_full_disk(command):
    """A closed pipe is not an error. A full disk is an error, with a message of one sentence."""
    env = {**os.environ, "TOKA_DEVICE": "cpu"}
    read_end, write_end = os.pipe()
    os.close(read_end)
    r = subprocess.run([TOKA, *command.split()], stdin=subprocess.DEVNULL, stdout=write_end, stderr=subprocess.PIPE, env=env, timeout=60)
    os.close(write_end)
    assert (r.returncode, r.stderr) == (0, b"")
    with open("/dev/full", "wb") as full:
        r = subprocess.run([TOKA, *command.split()], stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, env=env, timeout=60)
    assert r.returncode == 2 and r.stderr == b"toka: standard output: No space left on device\n"


@pytest.mark.parametrize("args, suggestion", [
    ("--promt x", "--prompt"), ("--Prompt x", "--prompt"), ("-prompt x", "--prompt"), ("--max_tokenz 3", "--max-tokens"),
    ("--max-token=3", "--max-tokens"), ("--tmep 1", "--temp"), ("--temprature 1", "--temperature"), ("--modell x", "--model"), ("-tp 3", "--tp"), ("--contextlength 3", "--context-length"),
    ("serve --prot 1", "--port"), ("--apikey x", "--api-key"), ("list --maxconcurrency 3", "--max-concurrency"), ("batch --inputfile x", "--input-file"), ("plan --gpuss 2", "--gpus"), ("--hepl", "--help"),
    ("serv", "toka serve"), ("tokenise", "toka tokenize"), ("bacth", "toka batch"), ("model", "toka models"), ("hlep", "toka help"),
    ("sevre", "toka serve"), ("bnech", "toka bench"), ("bench serv", "toka bench serve"), ("bench thruput", "toka bench throughput"),
    ("plam", "toka plan"), ("btach", "toka batch"), ("help serv", "toka help serve"), ("help plam", "toka help plan"), ("help formts", "toka help formats"),
    ("ls", "toka list"), ("help ls", "toka help list"), ("run-batch -i a -o b", "toka batch"), ("complete", "toka run"),
    ("help bench sreve", "toka help bench serve"), ("-m test/modle -p x", "test/model"), ("--device cpuu -p x", "cpu"), ("--device plian -p x", "plain"), ("serve --device aut", "auto"),
    ("-m llama-3.2-1 -p x", "llama-3.2-1b"), ("tokenize -m qwen3_8b", "qwen3-8b"), ("plan -m smolm2-135m", "smollm2-135m"),
    ("bench throughput --dummy-weights --dataset README.md -m Lama-3.1-8b", "llama-3.1-8b"),
])
def test_suggestions_for_misspelled_names(args, suggestion):
    r = toka(*args.split())
    assert r.returncode == 1 and r.stderr.endswith(f"; did you mean {suggestion}?\n".encode()) and r.stderr.count(b"\n") == 1, r.stderr


@pytest.mark.parametrize("args", ["--nonsense", "--x", "-x", "--", "frobnicate", "bench", "bench frobnicate", "--device rocm -p x",
                                  "--device CUDA2000000000000000000000000000000000000000000000000000000000000000000000 -p x", "-m zzz -p x",
                                  "serve --samples 2", "--stop-token-ids 3", "--" + "prompt" * 40, "tokenize --input-file x"])
def test_no_suggestion_without_a_similar_name(args):
    r = toka(*args.split())
    assert r.returncode == 1 and b"did you mean" not in r.stderr and r.stderr.count(b"\n") == 1, r.stderr


def test_a_device_of_another_build():
    has_cuda = b"has auto, cuda" in toka("--device", "x", "-p", "x").stderr
    for name, near in (("cudaa", b"cuda"), ("cud", b"cuda"), ("gpuu", b"gpu")):
        assert (b"did you mean " + near + b"?" in toka("--device", name, "-p", "x").stderr) == has_cuda


def test_ctrl_c_ends_cleanly():
    p = subprocess.Popen([TOKA, "--raw", "--ignore-eos", "--samples", "4000", "--json", "-p", "Tom"], stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE)
    wait_handlers(p)
    time.sleep(1.5)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=60)
    assert p.returncode == 130 and b"prompt" in err
    assert json.loads(out)["samples"][0]["finish_reason"] in ("cancelled", "length", "stop")
