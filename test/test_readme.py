"""The commands of the README and of the manual pages (toka help PAGE), run as written, with a fake hub (hub.py) and a new HOME.
Other tests run the README's sections Serve (test_openai.py), Python (test_python.py), Many GPUs (test_parallel.py, test_plan.py).
Run through test/run.sh."""
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from hub import FakeHub, Repo
from test_page import CHROMIUM, Browser

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOKA = os.path.join(ROOT, "toka")
MODEL = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
pytestmark = pytest.mark.skipif(not shutil.which("curl"), reason="no curl")


@pytest.fixture(scope="module")
def hub():
    server = FakeHub()
    files = {name: open(f"{ROOT}/test/model/{name}", "rb").read() for name in MODEL}
    for name in ("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B-Instruct"):
        server.repos[name] = Repo(files)
    yield server
    server.close()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def begin(hub, folder, command, port):
    """Starts a block in a folder that has what a clone has; `toka` is in the path. Servers use the port."""
    for name in ("toka", "README.md", "models.txt", "test"):
        if not os.path.lexists(folder / name):
            os.symlink(os.path.join(ROOT, name), folder / name)
    command = command.replace("10210", str(port)).replace("toka serve", f"toka serve --port {port}")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TOKA_", "HF_", "XDG_"))}
    env = {**clean, "HOME": str(folder / "home"), "HF_ENDPOINT": hub.url, "TOKA_DEVICE": "cpu", "PATH": f"{folder}:{clean['PATH']}"}
    return subprocess.Popen(["bash", "-ec", command], cwd=folder, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, start_new_session=True)


def run(hub, folder, command, stdin=""):
    p = begin(hub, folder, command, free_port())
    try:
        out, err = p.communicate(stdin, timeout=120)
    finally:
        if p.poll() is None:
            os.killpg(p.pid, signal.SIGKILL)
    return p.returncode, out, err


def readme():
    with open(os.path.join(ROOT, "README.md")) as f:
        return f.read()


def section(title):
    return re.search(rf"\n## {re.escape(title)}\n(.*?)\n(?:## |\[Tokasaurus\])", readme(), re.S)[1]


def block(title):
    text, = re.findall(r"```sh\n(.*?)```", section(title), re.S)
    return text


def test_form():
    """The order of sections, the length, one table of results, chapters of the table of techniques."""
    text = readme()
    assert re.findall(r"^## (.*)$", text, re.M) == ["Run", "Your model", "Chat", "Serve", "Batch", "Python", "GPU", "Many GPUs", "Numbers",
                                                    "Reading the code", "Vendoring"]
    lines = text.splitlines()
    assert len(lines) <= 300 and max(map(len, lines)) <= 100
    assert len(re.findall(r"^\| tok/s", text, re.M)) == 1 and len(re.search(r"\| tok/s.*?\n\n", text, re.S)[0].splitlines()) - 2 <= 20
    chapters = {}  # the text of each
    for name, mark in (("toka.c", ""), ("toka_kernels.cu", "cu ")):
        for part in re.split(r"^ \* MARK: ", open(os.path.join(ROOT, name)).read(), flags=re.M)[1:]:
            chapters[mark + part.split(".")[0]] = part
    rows = re.findall(r"^\| [^|]+ \| [^|]* \| ((?:cu )?\d[^|]*) \| (`[^|]*) \|$", section("Reading the code"), re.M)
    assert len(rows) >= 12
    for places, functions in rows:
        for function in re.findall(r"\w+", functions):
            assert any(re.search(rf"\b{function}(\(| {{)", chapters[place]) for place in places.split(", ")), (function, places)


def test_architectures_are_all_there():
    """README and news count the rows of the table mf_archs; the README's table names each."""
    with open(os.path.join(ROOT, "toka.c")) as f:
        source = f.read()
    names = re.findall(r'^    \{\.name = "(\w+)ForCausalLM"', source, re.M)
    assert len(names) > 20 and set(re.findall(r"(\d+) architectures", readme() + source)) == {str(len(names))}
    table = re.search(r"\n\| Models \|.*?\n\n", readme(), re.S)[0]
    assert not set(names) - set(re.findall(r"\w+", table))


def test_what_the_commands_make_is_ignored():
    """git status of a clone stays empty after the README's commands."""
    if not os.path.exists(os.path.join(ROOT, ".git")):
        pytest.skip("not a clone")
    blocks = "".join(re.findall(r"```sh\n(.*?)```", readme(), re.S))
    made = {"toka", "toka-ping", "libtoka.so", "toka.o", *re.findall(r"(?:> | -o |make_dataset.py \w+ )([\w.]+)", blocks)}
    made |= {os.path.basename(path) for path in re.findall(r"cp (\S+) \.(?:\s|$)", blocks)}
    assert {"toka.py", "in.jsonl", "out.jsonl", "m.jsonl", "example"} <= made
    shown = subprocess.run(["git", "-C", ROOT, "check-ignore", "--no-index", *made], capture_output=True, text=True).stdout.split()
    assert set(shown) == made


def test_first_page(hub, tmp_path):
    first, = re.findall(r"```sh\n(.*?)```", readme().split("\n## ")[0], re.S)
    build, chat = first.replace("\\\n", "").splitlines()
    build, ask = build.split(" && ", 1)
    assert build == "./build.sh"  # which makes the program that all tests run
    status, out, err = run(hub, tmp_path, ask)
    printed = re.search(r"\n\n((?:    .*\n)+)", readme())[1]
    assert status == 0 and out == "".join(line[4:] + "\n" for line in printed.splitlines()[:2])
    assert re.match(r"prompt 34 tokens, generated 33 tokens, ", err)
    status, out, err = run(hub, tmp_path, chat, "Tom has 12 apples and buys 7 more. How many apples does he have?\n")
    assert status == 0 and "19" in out and "ready after" in err


@pytest.mark.slow
def test_two_screens(hub, tmp_path):
    """What the first 120 lines of the README say leads to a chat with a model of the hub, to a loop in Python and to the page."""
    python = pytest.importorskip("test_python")  # needs numpy
    screens = "\n".join(readme().splitlines()[:120])
    blocks = [(kind, text.replace("\\\n", "")) for kind, text in re.findall(r"```(sh|python)\n(.*?)```", screens, re.S)]
    build, chat = blocks[0][1].splitlines()
    assert build.startswith("./build.sh && ./toka -p ") and chat.startswith("./toka chat -hf ")
    status, out, err = run(hub, tmp_path, chat, "Tom has 12 apples and buys 7 more. How many apples does he have?\n")
    assert status == 0 and "19" in out and "ready after" in err
    loop = next(text for kind, text in blocks if kind == "python")
    make, copy = re.search(r"^from toka import LLM  # after (.*)$", loop, re.M)[1].split(" && ")
    assert make == "./build.sh lib"
    python.make_library()
    os.symlink(python.LIBRARY, tmp_path / "libtoka.so")
    status, out, err = run(hub, tmp_path, f"{copy}\n{shlex.quote(sys.executable)} -c {shlex.quote(loop)}")
    assert status == 0 and out.count("The answer is 19.") == 2, (out, err)
    serve, = [text for _, text in blocks if "toka serve" in text]
    page, = re.findall(r"(http://127\.0\.0\.1:10210/) is\sa chat", screens)
    port = free_port()
    server, browser = begin(hub, tmp_path, serve, port), None
    try:
        while (line := server.stderr.readline()) != "toka: ready\n":
            assert line
        if CHROMIUM:
            browser = Browser(tmp_path / "profile")
            browser.call("Page.navigate", url=page.replace("10210", str(port)))
            browser.wait("document.getElementById('state')?.textContent == 'ready'")
            browser.js("document.forms[0].requestSubmit()")
            browser.wait("document.querySelector('.assistant')?.textContent.includes('The answer is 12.')")
    finally:
        if browser:
            browser.close()
        os.killpg(server.pid, signal.SIGTERM)
        server.communicate()


def test_your_model(hub, tmp_path):
    status, out, err = run(hub, tmp_path, block("Your model"))
    assert status == 0, err
    assert "meta-llama/Llama-3.2-1B-Instruct " in out and "Qwen/Qwen3-0.6B: deleted, 7.1 MB" in out


@pytest.mark.parametrize("title", ["Run", "Chat"])
def test_prompts(hub, tmp_path, title):
    (tmp_path / "text.txt").write_text("Tom has 3 apples.")
    (tmp_path / "messages.json").write_text('{"messages": [{"role": "user", "content": "Tom has 3 apples."}]}')
    for line in block(title).splitlines():
        status, out, err = run(hub, tmp_path, line.replace("MODEL", "test/model"), "Tom has 3 apples.\n")
        assert status == 0 and out, (line, err)


def test_batch(hub, tmp_path):
    status, _, err = run(hub, tmp_path, block("Batch").replace("seq 100", "seq 4"))
    assert status == 0, err
    lines = [json.loads(line)["response"]["body"]["choices"] for line in open(tmp_path / "out.jsonl")]
    assert len(lines) == 4 and all(len(choices) == 16 for choices in lines)


def test_gpu(hub, tmp_path):
    status, out, err = run(hub, tmp_path, block("GPU"))
    assert status == 0 and "cpu" in out and "gpt-oss-20b: " in out, err


def test_numbers(hub, tmp_path):
    """Without a GPU the first command says so in a sentence; the third runs a smaller model."""
    ops, make, bench = block("Numbers").splitlines()
    status, out, err = run(hub, tmp_path, ops)
    assert (status == 0 and "TFLOP/s" in out) or (status in (1, 2) and err.count("\n") == 1 and "GPU" in err)
    if os.path.isdir(os.path.join(os.environ.get("TOKA_TEST_DATA", "/none"), "datasets")) and shutil.which("python3"):
        status, _, err = run(hub, tmp_path, make.split("#")[0] + " --problems 1 --samples 1")
        if "No module named 'tokenizers'" not in err:
            assert status == 0, err
    (tmp_path / "m.jsonl").write_text('{"prompt_token_ids": [5, 6, 7], "output_lengths": [3, 2]}\n')
    status, out, err = run(hub, tmp_path, bench.replace("llama-3.2-1b", "smollm2-135m"))
    assert status == 0 and "total tokens/s" in out, err


def test_reading(hub, tmp_path):
    for name in ("toka.c", "toka_kernels.cu"):
        os.symlink(os.path.join(ROOT, name), tmp_path / name)
    status, out, err = run(hub, tmp_path, block("Reading the code"))
    assert status == 0 and "MARK: 19. Scheduler [pure]" in out and "sched_plan(" in out, err


def test_vendoring(hub, tmp_path):
    for name in ("toka.c", "toka.h"):
        os.symlink(os.path.join(ROOT, name), tmp_path / name)
    status, out, err = run(hub, tmp_path, block("Vendoring").replace("-O3", "-O0"))
    assert status == 0 and out, err


PAGES = re.findall(r"[a-z]+", re.search(r"\nManual pages: toka help(.*(?:\n  .*)*)\n", subprocess.run([TOKA, "help"], capture_output=True, text=True).stdout)[1])


@pytest.mark.parametrize("page", PAGES)
def test_manual_pages(hub, tmp_path, page):
    status, text, _ = run(hub, tmp_path, f"toka help {page}")
    commands = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    assert status == 0 and commands and all(len(line) <= 82 for line in text.splitlines())
    status, out, err = run(hub, tmp_path, "\n".join(commands))
    assert status == 0 and out, err
    if page == "rollouts":
        assert out.splitlines() == ["0 8 default", "1 8 step-0", "2 8 step-1"]
    if page == "machines":
        assert out.splitlines() == ["20"]
    if page in ("tools", "embeddings"):
        assert len(commands) <= 11  # what it is for in some ten lines
        answers = []
        while out.strip():
            answer, n = json.JSONDecoder().raw_decode(out.lstrip())
            answers, out = [*answers, answer], out.lstrip()[n:]
    if page == "embeddings":
        vector, route, scores, ranks = answers
        assert len(vector) == 4 == len(route["data"][0]["embedding"]) and route["object"] == "list"
        pairs = [(d["index"], d["score"]) for d in scores["data"]]
        assert all(0 < score < 1 for _, score in pairs) and pairs[0][0] == 0
        assert [(r["index"], r["relevance_score"]) for r in ranks["results"]] == sorted(pairs, key=lambda p: -p[1])
        assert len(json.loads((tmp_path / "vectors.jsonl").read_text())["response"]["body"]["data"]) == 2
    if page == "tools":  # answers of a chat, of /v1/messages and of /v1/responses
        choice, block = answers[0]["choices"][0], answers[1]["content"][0]
        for arguments in (json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]), block["input"]):
            assert list(arguments) == ["to"] and arguments["to"] in ("apples", "pens")
        assert choice["finish_reason"] == "stop" and answers[1]["stop_reason"] == "tool_use" and answers[2]["output"][0]["type"] == "message"


def test_the_pages_are_found(hub, tmp_path):
    for command, page in (("pull", "hub"), ("models", "formats"), ("batch", "batches"), ("serve", "serving"), ("plan", "plan"), ("score", "numbers"),
                          ("grammar", "constraints"), ("embed", "embeddings")):
        assert f"\nManual page: toka help {page}\n" in run(hub, tmp_path, f"toka {command} --help")[1]
    assert "did you mean toka help serving?" in run(hub, tmp_path, "toka help servin")[2]
    text = readme()
    assert set(re.findall(r"`toka help ([a-z]+)`", text)) == set(PAGES)


# ---- test/deploy ----

DEPLOY = os.path.join(ROOT, "test/deploy")


def test_deploy_files_are_short():
    for name in ("Dockerfile", "toka.service", "batch.slurm", "shards.slurm"):
        assert len(open(f"{DEPLOY}/{name}").read().splitlines()) <= 10, name


def test_slurm_script(hub, tmp_path):
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", f"{DEPLOY}/batch.slurm"], check=True)
    (tmp_path / "in.jsonl").write_text('{"custom_id": "1", "prompt": "Tom has", "max_tokens": 3}\n')
    for _ in range(2):  # the second run has nothing left to do
        status, _, err = run(hub, tmp_path, "bash test/deploy/batch.slurm Qwen/Qwen3-0.6B in.jsonl out.jsonl")
        assert status == 0, err
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1


SBATCH = """#!/bin/bash
# As Slurm's: runs a script for each task of --array, on the command line or in an #SBATCH line.
array=
case ${1-} in --array=*) array=${1#*=} && shift ;; esac
script=$1
[[ $array ]] || array=$(sed -n 's/^#SBATCH --array=//p' "$script")
! sed -n 's/^#SBATCH //p' "$script" | grep -vE '^--[a-z-]+(=[^ ]+)?$' || exit 1
for i in $(tr , ' ' <<<"$array"); do
    for task in $(seq "${i%-*}" "${i#*-}"); do SLURM_ARRAY_TASK_ID=$task bash "$@" || exit; done
done
"""


def test_slurm_array(hub, tmp_path):
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", f"{DEPLOY}/shards.slurm"], check=True)
    (tmp_path / "sbatch").write_text(SBATCH)
    (tmp_path / "sbatch").chmod(0o755)
    lines = [json.dumps({"custom_id": f"{i}", "prompt": "Tom has", "max_tokens": 3}) + "\n" for i in range(9)]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    first = re.search(r"^# (sbatch .*?): ", open(f"{DEPLOY}/shards.slurm").read(), re.M)[1]
    command = first.replace("0-7", "0-2").replace("MODEL", "Qwen/Qwen3-0.6B").removesuffix(" 8") + " 3"
    for array in ("0-2", "1"):  # the second run has nothing left to do
        status, _, err = run(hub, tmp_path, command.replace("0-2", array))
        assert status == 0, err
    status, out, err = run(hub, tmp_path, "cat out.*.jsonl")
    assert sorted(json.loads(line)["custom_id"] for line in out.splitlines()) == [f"{i}" for i in range(9)]
    assert all(os.path.getsize(tmp_path / f"out.{i}.jsonl") for i in range(3))


def test_systemd_unit(tmp_path):
    text = open(f"{DEPLOY}/toka.service").read()
    command = re.search(r"^ExecStart=/usr/local/bin/toka (.*)$", text, re.M)[1].split()
    assert subprocess.run([TOKA, *command, "--help"], capture_output=True).returncode == 0  # it has these flags
    if shutil.which("systemd-analyze"):
        (tmp_path / "toka.service").write_text(text.replace("/usr/local/bin/toka", TOKA))
        r = subprocess.run(["systemd-analyze", "verify", str(tmp_path / "toka.service")], capture_output=True, text=True)
        assert r.returncode == 0 and "toka.service" not in r.stderr, r.stderr


def test_dockerfile():
    lines = open(f"{DEPLOY}/Dockerfile").read().splitlines()
    words = {line.split()[0] for line in lines if line and not line.startswith("#")}
    assert words == {"FROM", "COPY", "RUN", "ENV", "ENTRYPOINT", "CMD"}
    of = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[1:]}
    given = re.search(r"docker run .* toka (.*)$", lines[0])[1].split()
    env = {**os.environ, **dict(pair.split("=", 1) for pair in of["ENV"].split())}
    # clouds run `IMAGE serve` and ask for /ping and /invocations on 8080
    assert json.loads(of["ENTRYPOINT"]) == ["toka"] and json.loads(of["CMD"]) == ["serve"] == given[:1] and "-p 10210:8080 " in lines[0]
    assert env["TOKA_PORT"] == "8080"
    assert subprocess.run([TOKA, *given, "--help"], env=env, capture_output=True).returncode == 0
    with subprocess.Popen([TOKA, "serve"], env={**env, "TOKA_PORT": "0", "TOKA_DEVICE": "cpu"}, stderr=subprocess.PIPE, text=True) as server:
        text = ""
        while "http://" not in text:
            text += server.stderr.readline() or pytest.fail(text)
        server.terminate()
    assert re.search(r"http://0\.0\.0\.0:\d+", text), text


@pytest.mark.slow
def test_release(tmp_path):
    """Two runs make the same bytes. The program in them needs no library and no file."""
    if not os.path.isdir(os.path.join(ROOT, ".git")) and not os.path.isfile(os.path.join(ROOT, ".git")):
        pytest.skip("not a clone")
    hashes = set()
    for name in ("a", "b"):
        r = subprocess.run([f"{ROOT}/test/release.sh", str(tmp_path / name)], env={**os.environ, "CFLAGS": "-O0"}, capture_output=True, text=True)
        assert r.returncode == 0, r.stderr
        hashes.add(r.stdout)
    assert len(hashes) == 1
    archive, = (tmp_path / "a").iterdir()
    subprocess.run(["tar", "-xzf", str(archive)], check=True, cwd=tmp_path)
    folder, = tmp_path.glob("toka-*")
    assert {"toka", "toka.c", "toka.h", "toka_kernels.cu", "README.md", "models.txt", "LICENSE"} <= set(os.listdir(folder))
    empty = tmp_path / "empty"
    empty.mkdir()
    r = subprocess.run([str(folder / "toka-ping"), "--help"], env={}, capture_output=True, text=True)
    assert r.returncode == 0 and "a prompt for a running server" in r.stdout
    r = subprocess.run([str(folder / "toka"), "-q", "-p", "Tom has 12 apples.", "-n", "5"], cwd=empty, env={}, capture_output=True)
    assert r.returncode == 0 and r.stdout, r.stderr
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert f"(commit {commit}, " in subprocess.run([str(folder / "toka"), "--version"], env={}, capture_output=True, text=True).stdout
    assert b"NEEDED" not in subprocess.run(["readelf", "-d", str(folder / "toka")], capture_output=True).stdout
