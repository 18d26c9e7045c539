"""Tests of toka -hf, --download, pull, list and rm against a hub on loopback (hub.py), and of the cache against huggingface_hub,
which must read it as its own. Run through test/run.sh."""
import fcntl
import glob
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest

from hub import FakeHub, Repo, read_folder
from server import Server

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOKA = os.environ.get("TOKA_BINARY") or os.path.join(ROOT, "toka")
PROBLEM = "Tom has 12 apples. He buys 7 more apples. How many apples does Tom have now?"
USED = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
ID = "tiny/apples"
LONG = "tiny/apples-and-pears-and-plums-in-a-rather-long-name-of-a-model"

try:
    import huggingface_hub
except ImportError:
    huggingface_hub = None
needs_package = pytest.mark.skipif(not huggingface_hub, reason="no huggingface_hub")
pytestmark = pytest.mark.skipif(not shutil.which("curl"), reason="no curl")


def model_files():
    files = {name: open(f"{ROOT}/test/model/{name}", "rb").read() for name in USED}
    # what toka does not need
    return {**files, "README.md": b"# Apples", "pytorch_model.bin": b"x" * 1000, "original/consolidated.00.pth": b"y" * 1000,
            "consolidated.safetensors": b"z" * 1000, ".gitattributes": b"*.bin lfs"}


@pytest.fixture(scope="module")
def server():
    hub = FakeHub()
    hub.repos[ID] = Repo(model_files())
    hub.repos[LONG] = Repo(model_files())
    hub.repos["tiny/gated"] = Repo(model_files(), gated=True)
    hub.repos["tiny/refused"] = Repo(model_files(), gated="refused")
    hub.repos["tiny/private"] = Repo(model_files(), private=True)
    sharded = read_folder(f"{ROOT}/test/fixtures/llama-llama3-sharded")
    hub.repos["tiny/sharded"] = Repo({**sharded, "model-00009-of-00003.safetensors": b"not in the index"})
    yield hub
    hub.close()


@pytest.fixture
def hub(server, tmp_path):
    server.reset()
    server.home = str(tmp_path / "home")
    server.cache = os.path.join(server.home, ".cache/huggingface/hub")
    return server


def environment(hub, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TOKA_", "HF_", "HUGGING", "XDG_", "TRANSFORMERS"))}
    return {**clean, "TOKA_DEVICE": "cpu", "HOME": hub.home, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", **env}


def toka(hub, *args, timeout=60, **env):
    env = {k: v for k, v in environment(hub, **env).items() if v is not None}
    return subprocess.run([TOKA, *args], capture_output=True, stdin=subprocess.DEVNULL, env=env, timeout=timeout, cwd=ROOT)


def python(hub, code, **env):
    r = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment(hub, **env), timeout=120)
    assert r.returncode == 0, r.stderr.decode()
    return r.stdout.decode()


def tree(cache, name=ID):
    """{path: link target or bytes} of a model in the cache, without what only one of the two programs writes: lists of files."""
    base, found = os.path.join(cache, "models--" + name.replace("/", "--")), {}
    for folder, _, names in os.walk(base):
        for file in names:
            path = os.path.join(folder, file)
            key = os.path.relpath(path, base)
            if not key.startswith("trees/"):
                found[key] = os.readlink(path) if os.path.islink(path) else open(path, "rb").read()
    return found


def fails(r, status, *texts):
    message = r.stderr.decode()
    assert r.returncode == status, message
    assert len(message.splitlines()) == 1 and message.startswith("toka: "), message
    for text in texts:
        assert text in message, message


# ---- Downloads ----

def test_downloads_once_and_answers(hub):
    r = toka(hub, "-hf", ID, "-p", PROBLEM)
    assert r.returncode == 0 and r.stdout.decode().rstrip().endswith("19."), r.stderr
    assert re.match(r"tiny/apples: 5 files, 7\.\d MB, ready after [\d.]+ s\n", r.stderr.decode())
    n = len(hub.requests)
    for args in (["-hf", ID], ["-m", ID], ["--hf-repo", ID], ["--hf-repo=" + ID, "--revision", "main"], ["-m", ID + "@main"]):
        again = toka(hub, *args, "-q", "-p", PROBLEM)
        assert again.stdout == r.stdout and again.stderr == b"", args
    assert toka(hub, "-q", "-p", PROBLEM, TOKA_HF_REPO=ID).stdout == r.stdout
    assert len(hub.requests) == n  # a model that is here needs no request


def test_only_the_files_that_are_needed(hub):
    assert toka(hub, "pull", ID).returncode == 0
    paths = [k for k in tree(hub.cache) if k.startswith("snapshots/")]
    assert sorted(os.path.basename(p) for p in paths) == sorted(USED)
    r = toka(hub, "pull", "tiny/sharded")
    assert r.returncode == 0, r.stderr
    names = {os.path.basename(k) for k in tree(hub.cache, "tiny/sharded") if k.startswith("snapshots/")}
    assert "model.safetensors.index.json" in names and "model-00009-of-00003.safetensors" not in names
    assert len([n for n in names if n.endswith(".safetensors")]) == 3


def test_all_small_files_that_are_read(hub):
    """What the loader reads from a folder comes with a download, also of an embedding model: its pooling and its prompts."""
    source = open(f"{ROOT}/toka.c").read()
    read = set(re.findall(r'mf_map_file\(\w+, "([^"]+)"', source))
    assert "modules.json" in read and "tokenizer.json" in read
    small = {name: b"{}" for name in read - set(USED)}
    hub.repos["tiny/vectors"] = Repo({**model_files(), **small, "additional_chat_templates/rag.jinja": b"x", "1_Pooling/config.json": json.dumps(
        {"word_embedding_dimension": 256, "pooling_mode_mean_tokens": True}).encode(), "onnx/config.json": b"{}", "hf_quant_config.json": b"{}",
        "chat_template.jinja": b"x", "config_sentence_transformers.json": b'{"prompts": {"query": "find: "}}', "modules.json": json.dumps(
        [{"idx": i, "name": str(i), "path": path, "type": "sentence_transformers.models." + kind}
         for i, (path, kind) in enumerate((("", "Transformer"), ("1_Pooling", "Pooling")))]).encode()})
    assert toka(hub, "pull", "tiny/vectors").returncode == 0
    names = {k.split("/", 2)[2] for k in tree(hub.cache, "tiny/vectors") if k.startswith("snapshots/")}
    assert names == read | set(USED) | {"additional_chat_templates/rag.jinja", "1_Pooling/config.json"}
    hub.repos["tiny/mean"] = Repo({k: v for k, v in hub.repos["tiny/vectors"].commits[hub.repos["tiny/vectors"].find("main")].items()
                                   if k not in ("hf_quant_config.json", "chat_template.json", "chat_template.jinja", *small) or "modules" in k or "sentence" in k})
    r = toka(hub, "embed", "-hf", "tiny/mean", "-p", PROBLEM, "--prompt-name", "query")
    assert r.returncode == 0, r.stderr
    mean, last = (json.loads(toka(hub, "embed", "-m", m, "-p", PROBLEM).stdout) for m in ("tiny/mean", "test/model"))
    assert mean != last  # the mean of all tokens; without these files the last token's vector


def test_pull_prints_the_folder(hub):
    r = toka(hub, "pull", ID, "tiny/sharded", "-q")
    folders = r.stdout.decode().splitlines()
    assert r.returncode == 0 and r.stderr == b"" and len(folders) == 2
    assert read_folder(folders[0])["config.json"] == model_files()["config.json"]
    fails(toka(hub, "pull"), 1, "expected: toka pull OWNER/NAME")


def test_tokenizing_needs_no_weights(hub):
    r = subprocess.run([TOKA, "tokenize", "-hf", ID], input=b"Tom has", capture_output=True, env=environment(hub), cwd=ROOT)
    assert r.returncode == 0 and r.stdout.split()
    assert not any("safetensors" in path for _, _, path, _, _ in hub.requests)
    assert toka(hub, "-q", "-hf", ID, "-p", PROBLEM).stdout.decode().rstrip().endswith("19.")  # then they are downloaded


@needs_package
def test_the_cache_is_that_of_huggingface_hub(hub, tmp_path):
    assert toka(hub, "pull", ID).returncode == 0
    other = str(tmp_path / "other")
    python(hub, f"import huggingface_hub as h; h.snapshot_download('{ID}', allow_patterns={USED})", HF_HUB_CACHE=other)
    assert tree(hub.cache) == tree(other) and len(tree(other)) == 11
    # and it reads the cache as its own
    code = f"""
import huggingface_hub as h, json
folder = h.snapshot_download('{ID}', local_files_only=True)
file = h.hf_hub_download('{ID}', 'config.json', local_files_only=True)
info = h.scan_cache_dir()
repo, = info.repos
print(json.dumps([folder, file, repo.repo_id, repo.nb_files, repo.size_on_disk, len(info.warnings), [list(r.refs) for r in repo.revisions]]))
"""
    folder, file, name, n_files, size, n_warnings, refs = json.loads(python(hub, code, HF_HUB_OFFLINE="1"))
    assert folder.startswith(hub.cache) and file == folder + "/config.json"
    assert (name, n_files, n_warnings, refs) == (ID, 5, 0, [["main"]])
    assert size == sum(len(model_files()[n]) for n in USED)


@needs_package
def test_reads_what_huggingface_hub_downloaded(hub):
    python(hub, f"import huggingface_hub as h; h.snapshot_download('{ID}')")
    hub.requests.clear()
    r = toka(hub, "-q", "-hf", ID, "-p", PROBLEM)
    assert r.stdout.decode().rstrip().endswith("19.") and not hub.requests
    # its commands see no difference after a pull
    before = tree(hub.cache)
    assert toka(hub, "pull", ID).returncode == 0 and tree(hub.cache) == before


def test_names_of_models_txt(hub, tmp_path):
    (tmp_path / "models.txt").write_text(f'apples {ID} - {{"model_type": "llama"}}\n')
    flags = ["--models-file", str(tmp_path / "models.txt")]
    assert toka(hub, "-q", "-hf", "apples", *flags, "-p", PROBLEM).stdout.decode().rstrip().endswith("19.")
    assert toka(hub, "rm", "Apples", *flags).returncode == 0
    fails(toka(hub, "-m", "apples", *flags, "-p", "x"), 1, "tiny/apples is not in the hub cache", "toka pull tiny/apples")
    assert toka(hub, "pull", "apples", *flags).returncode == 0
    assert toka(hub, "-q", "-m", "apples", *flags, "-p", PROBLEM).stdout.decode().rstrip().endswith("19.")
    fails(toka(hub, "pull", "aples", *flags), 1, "did you mean apples?")


def test_revisions(hub):
    repo, files = Repo(model_files()), model_files()
    hub.repos["tiny/moves"] = repo
    first = repo.refs["main"]
    assert toka(hub, "-q", "-hf", "tiny/moves", "-p", "x").returncode == 0
    files["generation_config.json"] += b"\n"
    second = repo.commit(files)
    repo.refs["v2"] = second
    hub.requests.clear()
    assert toka(hub, "-q", "-hf", "tiny/moves", "-p", "x").returncode == 0
    assert not hub.requests  # nothing is replaced unless the user wants it
    r = toka(hub, "pull", "tiny/moves")
    assert r.stdout.decode().strip().endswith(second)
    assert [path for cdn, _, path, _, _ in hub.requests if "resolve" in path] == [f"/tiny/moves/resolve/{second}/generation_config.json"]
    for revision, commit in (("v2", second), (first, first), (second, second)):
        r = toka(hub, "pull", "tiny/moves", "--revision", revision)
        assert r.stdout.decode().strip().endswith(commit), r.stderr
        assert toka(hub, "-q", "-hf", "tiny/moves", "--revision", revision, "-p", PROBLEM).returncode == 0
        assert toka(hub, "-q", "-m", f"tiny/moves@{revision}", "-p", PROBLEM).returncode == 0
    refs = {k: v.decode() for k, v in tree(hub.cache, "tiny/moves").items() if k.startswith("refs/")}
    assert refs == {"refs/main": second, "refs/v2": second}
    fails(toka(hub, "-hf", "tiny/moves", "--revision", "v3", "-p", "x"), 1, "-hf tiny/moves has no --revision v3\n")
    fails(toka(hub, "-m", "tiny/moves", "--revision", "v3", "--download", "-p", "x"), 1, "-m tiny/moves has no --revision v3\n")
    fails(toka(hub, "pull", "tiny/moves", "--revision", "v3"), 1, "tiny/moves has no --revision v3\n")
    fails(toka(hub, "pull", "tiny/moves@v3"), 1, "tiny/moves has no revision v3\n")
    fails(toka(hub, "-m", "tiny/moves", "--revision", "v3", "-p", "x"), 1, f"-m tiny/moves --revision v3 is not in the hub cache {hub.cache}; add --download, or run: toka pull tiny/moves --revision v3\n")
    fails(toka(hub, "pull", "tiny/moves@../../x"), 1, "no name of a revision")
    fails(toka(hub, "-m", "test/model", "--revision", "v2", "-p", "x"), 1, "a folder, not a model of the hub")


# ---- Interruptions ----

def bytes_in_cache(hub):
    n = 0
    for blob in glob.glob(f"{hub.cache}/*/blobs/*"):
        try:
            n += os.path.getsize(blob)
        except FileNotFoundError:
            pass  # the download has just given the file its last name
    return n


def start_and_hold(hub, n_bytes, *args):
    """Starts toka, and waits until the hub has sent n_bytes and holds the rest back, and the cache has all but the end of them."""
    hub.hold_after = n_bytes
    p = subprocess.Popen([TOKA, *args], env=environment(hub, HF_TOKEN="hf_right"), stdin=subprocess.DEVNULL,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    end = time.time() + 30
    while bytes_in_cache(hub) < n_bytes - 200_000:
        assert time.time() < end and p.poll() is None  # what the hub sent may still be in the buffers of the connection
        time.sleep(0.01)
    return p


def finish_resumed(hub, n_at_least):
    """The rest is requested with a Range, and the cache has what a download at once makes."""
    hub.hold_after = None
    time.sleep(0.1)
    hub.requests.clear()
    r = toka(hub, "pull", ID)
    assert r.returncode == 0, r.stderr
    ranges = [int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) for cdn, _, _, _, wanted in hub.requests if cdn and wanted]
    assert ranges and max(ranges) >= n_at_least
    files = {k: v for k, v in tree(hub.cache).items() if k.startswith("blobs/")}
    assert sorted(files.values()) == sorted(model_files()[n] for n in USED)
    assert toka(hub, "-q", "-m", ID, "-p", PROBLEM).stdout.decode().rstrip().endswith("19.")


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_continues_after_a_kill(hub, sig):
    p = start_and_hold(hub, 3_000_000, "pull", ID)
    p.send_signal(sig)
    out, err = p.communicate(timeout=20)
    assert p.returncode == (-9 if sig == signal.SIGKILL else 130) and out == b""
    if sig != signal.SIGKILL:
        assert err == b"toka: interrupted; the same command continues the download\n"
    left = tree(hub.cache)
    assert any(k.endswith(".incomplete") for k in left) and not any(k.startswith(("refs/", "snapshots/")) for k in left)
    fails(toka(hub, "-m", ID, "-p", "x"), 1, "is not in the hub cache")
    finish_resumed(hub, 1_000_000)


def test_no_curl_is_left_behind(hub):
    p = start_and_hold(hub, 3_000_000, "pull", ID)
    p.kill()
    p.wait()
    hub.hold_after = None
    end = time.time() + 20
    while any(hub.url.split(":")[-1] in line for line in curls()) and time.time() < end:
        time.sleep(0.1)
    assert not any(str(hub.cdn.server_port) in line for line in curls())


def curls():
    lines = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            lines.append(open(f"/proc/{pid}/cmdline").read())
        except OSError:
            pass
    return [line for line in lines if line.startswith("curl")]


def test_continues_after_lost_connections(hub):
    hub.cut_after, hub.cuts_left = {"model.safetensors": 1_000_000}, 4
    r = toka(hub, "pull", ID)
    assert r.returncode == 0, r.stderr
    assert [w for cdn, _, _, _, w in hub.requests if cdn and w] == [f"bytes={n}000000-" for n in (1, 2, 3, 4)]
    assert toka(hub, "-q", "-m", ID, "-p", PROBLEM).returncode == 0


def test_a_hub_that_sends_whole_files_only(hub):
    hub.cut_after, hub.cuts_left, hub.no_ranges = {"model.safetensors": 3_000_000}, 1, True
    assert toka(hub, "pull", ID).returncode == 0
    assert toka(hub, "-q", "-m", ID, "-p", PROBLEM).stdout.decode().rstrip().endswith("19.")


@pytest.mark.slow
def test_gives_up_when_nothing_comes(hub):
    hub.cut_after, hub.no_ranges = {"model.safetensors": 1}, True
    t0 = time.time()
    r = toka(hub, "pull", ID, timeout=120)
    assert r.returncode == 2 and time.time() - t0 < 60 and b"\ntoka: " in b"\n" + r.stderr


@pytest.mark.parametrize("path", ["model.safetensors", "config.json"])
def test_wrong_bytes_are_deleted(hub, path):
    hub.corrupt = {path}
    r = toka(hub, "-hf", ID, "-p", "x")
    fails(r, 1, path + ": the bytes received have the hash", "they were deleted")
    left = tree(hub.cache)
    data = model_files()[path]
    assert not any(k.startswith(("snapshots/", "refs/")) for k in left)
    assert not any(isinstance(v, bytes) and len(v) == len(data) for k, v in left.items()), left.keys()
    hub.corrupt = set()
    assert toka(hub, "-q", "-hf", ID, "-p", PROBLEM).stdout.decode().rstrip().endswith("19.")


def test_wrong_bytes_of_an_earlier_download(hub):
    toka(hub, "pull", ID)
    folder = f"{hub.cache}/models--tiny--apples/blobs"
    data = model_files()["model.safetensors"]
    blob, = [k for k, v in read_folder(folder).items() if v == data]
    for text in (b"\0" * 1000, data + b"x", data[:-1] + b"x", data):
        os.remove(f"{folder}/{blob}")
        open(f"{folder}/{blob}.incomplete", "wb").write(text)
        r = toka(hub, "pull", ID)
        assert r.returncode == 0 and read_folder(folder)[blob] == data, r.stderr
        assert not os.path.exists(f"{folder}/{blob}.incomplete")


def test_several_files_at_once(hub):
    """No file is sent before the others were asked for: four small files, then the three files of the weights."""
    name = "tiny/three"
    hub.repos[name] = Repo({**hub.repos["tiny/sharded"].commits[hub.repos["tiny/sharded"].refs["main"]], **{n: model_files()[n] for n in USED[1:4]}})
    small, weights = threading.Barrier(4, timeout=10), threading.Barrier(3, timeout=10)
    hub.together = {**{n: small for n in USED[:4]}, **{f"model-0000{i}-of-00003.safetensors": weights for i in (1, 2, 3)}}
    r = toka(hub, "pull", name, timeout=120)
    assert r.returncode == 0, r.stderr
    assert not small.broken and not weights.broken


def test_two_at_once_load_each_file_once(hub):
    env = environment(hub)
    both = [subprocess.Popen([TOKA, "pull", ID, "-q"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    results = [p.communicate(timeout=60) for p in both]
    assert [p.returncode for p in both] == [0, 0] and results[0] == results[1]
    loaded = [path for _, _, path, _, _ in hub.requests if "resolve" in path]
    assert len(loaded) == len(set(loaded)) == len(USED)


# ---- The token ----

def test_the_token_goes_to_the_hub_only(hub):
    p = start_and_hold(hub, 3_000_000, "pull", ID)
    lines = curls()
    assert lines and not any("hf_right" in line or "127.0.0.1" in line for line in lines)  # other users see no token and no URL
    hub.hold_after = None
    p.communicate(timeout=30)
    assert p.returncode == 0
    assert {token for cdn, _, _, token, _ in hub.requests if not cdn} == {"Bearer hf_right"}
    assert {token for cdn, _, _, token, _ in hub.requests if cdn} == {None}


def test_where_the_token_comes_from(hub, tmp_path):
    os.makedirs(f"{hub.home}/.cache/huggingface")
    path = f"{hub.home}/.cache/huggingface/token"
    open(path, "w").write("hf_right\n")
    (tmp_path / "token").write_text("hf_other")
    hub.tokens.append("hf_other")
    for env, want in (({}, "hf_right"), ({"HF_TOKEN": "hf_other"}, "hf_other"), ({"HF_TOKEN": " hf_other\r\n"}, "hf_other"), ({"HF_TOKEN_PATH": str(tmp_path / "token")}, "hf_other"),
                      ({"HF_TOKEN": " \n", "HUGGING_FACE_HUB_TOKEN": "\thf_other"}, "hf_other"), ({"HF_TOKEN": "", "HF_TOKEN_PATH": "/none"}, None)):
        hub.requests.clear()
        toka(hub, "pull", ID, **env)
        assert hub.requests[0][3] == (want and "Bearer " + want), env
    hub.requests.clear()
    open(path, "w").write("hf_right\nhf_other\n")
    for env, name in (({"HF_TOKEN": "hf_right\r\nX: y"}, "HF_TOKEN"), ({"HF_TOKEN": "hf right"}, "HF_TOKEN"),
                      ({"HUGGING_FACE_HUB_TOKEN": "a\tb"}, "HUGGING_FACE_HUB_TOKEN"), ({}, path)):
        r = toka(hub, "pull", ID, **env)
        fails(r, 1, f"{name}: a blank or a line end is inside; expected one token")
        assert b"X: y" not in r.stderr and not hub.requests


def test_gated_private_and_missing(hub):
    for env in ({}, {"HF_TOKEN": "hf_right"}):
        r = toka(hub, "-hf", "tiny/refused", "-p", "x", **env)
        fails(r, 1, "tiny/refused is gated: accept its terms at " + hub.url + "/tiny/refused", "HF_TOKEN" if not env else "no access yet")
        fails(toka(hub, "-hf", "tiny/none", "-p", "x", **env), 1, "tiny/none is not on " + hub.url + ", or it is private")
    fails(toka(hub, "-hf", "tiny/gated", "-p", "x"), 1, "is gated", "set HF_TOKEN")
    for args in (["-p", "x", "-hf"], ["-p", "x", "--download", "-m"], ["pull"]):  # almost an id of models.txt, and two letters more
        fails(toka(hub, *args, "Qwen/Qwen3-06B"), 1, "Qwen/Qwen3-06B is not on ", "did you mean Qwen/Qwen3-0.6B?")
        assert b"did you mean" not in toka(hub, *args, "Qwen/Qwen3-0.6B").stderr + toka(hub, *args, "Qwen/Qwen3-0.6B-New").stderr
    assert toka(hub, "-q", "-hf", "tiny/gated", "-p", "x", HF_TOKEN="hf_right").returncode == 0
    fails(toka(hub, "-hf", "tiny/private", "-p", "x"), 1, "or it is private", "HF_TOKEN")
    assert toka(hub, "-q", "-hf", "tiny/private", "-p", "x", HF_TOKEN="hf_right").returncode == 0
    fails(toka(hub, "-hf", ID, "-p", "x", HF_TOKEN="hf_wrong"), 1, "does not accept the token", "HF_TOKEN")


def test_redirects_on_the_hub_keep_the_token(hub):
    assert toka(hub, "pull", ID, HF_ENDPOINT=hub.url + "/moved", HF_TOKEN="hf_right").returncode == 0
    moved = [path for _, _, path, _, _ in hub.requests if path.startswith("/moved/")]
    assert len(moved) == 1 + len(USED)
    assert {token for cdn, _, _, token, _ in hub.requests if not cdn} == {"Bearer hf_right"}
    assert {token for cdn, _, _, token, _ in hub.requests if cdn} == {None}


# ---- No hub, no disk, no curl ----

def test_offline(hub):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        fails(toka(hub, "-hf", ID, "-p", "x", **{name: "1"}), 1, "tiny/apples is not in the hub cache, and HF_HUB_OFFLINE")
    fails(toka(hub, "pull", ID, HF_HUB_OFFLINE="true"), 1, "HF_HUB_OFFLINE")
    for args in (["-m", ID, "-p", "x"], ["chat", ID]):
        fails(toka(hub, *args, HF_HUB_OFFLINE="1"), 1, f"tiny/apples is not in the hub cache {hub.cache}, and HF_HUB_OFFLINE forbids to download it\n")
    assert not hub.requests and not os.path.exists(hub.cache)
    pulled = toka(hub, "pull", ID, HF_HUB_OFFLINE="0")
    assert pulled.returncode == 0
    hub.requests.clear()
    r = toka(hub, "pull", ID, HF_HUB_OFFLINE="1")
    assert r.returncode == 0 and r.stdout == pulled.stdout and b"it is in the hub cache; HF_HUB_OFFLINE" in r.stderr and not hub.requests
    fails(toka(hub, "pull", ID, "--revision", "other", HF_HUB_OFFLINE="1"), 1, "is not in the hub cache, and HF_HUB_OFFLINE")
    assert toka(hub, "-q", "-hf", ID, "-p", PROBLEM, HF_HUB_OFFLINE="1").returncode == 0


def test_no_hub(hub):
    t0 = time.time()
    fails(toka(hub, "-hf", ID, "-p", "x", HF_ENDPOINT="http://127.0.0.1:9"), 2, "http://127.0.0.1:9: curl: (7)")
    assert time.time() - t0 < 10
    fails(toka(hub, "-hf", ID, "-p", "x", HF_ENDPOINT="ftp://x"), 1, "HF_ENDPOINT: 'ftp://x', expected https://HOST")
    assert toka(hub, "pull", ID, HF_ENDPOINT=hub.url + "//").returncode == 0


def test_no_curl(hub, tmp_path):
    fails(toka(hub, "-hf", ID, "--revision", "main", "-p", "x", PATH=str(tmp_path)), 2, "cannot start curl",
          "hf download tiny/apples --revision main")


def test_a_busy_hub(hub):
    hub.busy_left = 2
    assert toka(hub, "pull", ID).returncode == 0
    hub.busy_left = 100
    busy = f"{hub.url}: too many requests (status 429): try again in some minutes"
    fails(toka(hub, "pull", ID), 2, busy + "; it allows more if HF_TOKEN is a token of yours\n")


def test_too_large_for_the_disk(hub):
    hub.claimed_size = {"model.safetensors": 10**17}
    r = toka(hub, "-hf", ID, "-p", "x")
    fails(r, 2, "tiny/apples does not fit into " + hub.cache, "100000 TB are needed, ", " are free\n")
    assert not any(cdn and "model" in path or "safetensors" in path for cdn, _, path, _, _ in hub.requests)


def test_a_full_disk(hub, tmp_path):
    """RLIMIT_FSIZE stands for the disk that fills during a download."""
    r = subprocess.run(["bash", "-c", f"ulimit -f 2000; exec {TOKA} pull {ID}"], capture_output=True, env=environment(hub), timeout=60)
    fails(r, 2, "model.safetensors: File too large")
    finish_resumed(hub, 1_000_000)


def test_a_cache_that_cannot_be_written(hub, tmp_path):
    (tmp_path / "file").write_text("")
    fails(toka(hub, "pull", ID, HF_HUB_CACHE=str(tmp_path / "file")), 2, str(tmp_path / "file"), "Not a directory")


def test_hostile_lists(hub):
    hub.extra_names = ["../../../../evil", "/tmp/evil", "a//b", "x\n", "additional_chat_templates/../../evil.jinja"]
    assert toka(hub, "pull", ID).returncode == 0
    assert not any("evil" in k for k in tree(hub.cache)) and not os.path.exists(f"{hub.home}/evil")
    # weights outside the folder, named by the index
    files = model_files()
    index = {"weight_map": {"a": "../../config.json"}}
    files.pop("model.safetensors")
    hub.repos["tiny/hostile"] = Repo({**files, "model.safetensors.index.json": json.dumps(index).encode()})
    hub.extra_names = []
    r = toka(hub, "pull", "tiny/hostile")
    assert r.returncode == 1 and b"model.safetensors.index.json" in r.stderr
    hub.repos["tiny/gap"] = Repo({**files, "model.safetensors.index.json": b'{"weight_map": {"a": "model-1.safetensors"}}'})
    fails(toka(hub, "pull", "tiny/gap"), 1, "names model-1.safetensors, which tiny/gap does not have")


def test_models_that_toka_does_not_run(hub):
    files = model_files()
    for name, change, text in (("tiny/other", {"config.json": b'{"model_type": "other", "architectures": ["Other"]}'}, "config.json"),
                               ("tiny/bare", {"config.json": None, "pytorch_model.bin": None}, "there is no config.json\n"),
                               ("tiny/gguf", {"config.json": None, "pytorch_model.bin": None, "apples-Q4_K_M.gguf": b"GGUF"},
                                "there is no config.json, and toka does not read its apples-Q4_K_M.gguf; expected a model as safetensors\n"),
                               ("tiny/torch", {"model.safetensors": None}, "has no model.safetensors; toka does not read its pytorch_model.bin")):
        hub.repos[name] = Repo({k: v for k, v in {**files, **change}.items() if v is not None})
        fails(toka(hub, "pull", name), 1, name, text)
    assert not any("safetensors" in path for _, _, path, _, _ in hub.requests)  # found out before the weights
    fails(toka(hub, "pull", "tiny/refused"), 1, "is gated")
    assert b" part " not in toka(hub, "list").stdout and not glob.glob(hub.cache + "/models--*")  # no pull could complete them
    fails(toka(hub, "-hf", ID + ":Q4_K_M", "-p", "x"), 1, "the tag :Q4_K_M", "safetensors")
    fails(toka(hub, "-hf", "../x", "-p", "x"), 1, "not a hub id, which is OWNER/NAME")
    for args in (["pull"], ["-p", "x", "-hf"], ["-p", "x", "-m"]):
        fails(toka(hub, *args, "https://huggingface.co/tiny/apples"), 1, "https://huggingface.co/tiny/apples: an address, expected OWNER/NAME; did you mean tiny/apples?")
    fails(toka(hub, "pull", "https://huggingface.co"), 1, "an address, expected OWNER/NAME")
    fails(toka(hub, "-hf", ID, "-m", ID, "-p", "x"), 1, "-hf and -m exclude each other")


# ---- -m with --download, or with a question on a terminal ----

def test_model_flag_asks_first(hub):
    fails(toka(hub, "-m", ID, "-p", "x"), 1, f"tiny/apples is not in the hub cache {hub.cache}; add --download, or run: toka pull tiny/apples")
    for typed, shown, command in (("LLAMA-3.2-1b", "LLAMA-3.2-1b: meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"), (ID + "@v1", ID + "@v1", ID + " --revision v1")):
        fails(toka(hub, "-m", typed, "-p", "x"), 1, f"-m {shown} is not in the hub cache {hub.cache}; add --download, or run: toka pull {command}\n")
    assert not hub.requests
    for args in (["-m", "test/modle", "--download", "-p", "x"], ["model=test/modle"]):  # almost a folder
        fails(toka(hub, *args), 1, "test/modle is not on ", "did you mean test/model?")
    r = toka(hub, "-m", ID, "--download", "-q", "-p", PROBLEM)
    assert r.stdout.decode().rstrip().endswith("19.")
    assert toka(hub, "-q", "-m", ID, "-p", PROBLEM).stdout == r.stdout


def on_terminal(hub, answer, *args, **env):
    pid, fd = pty.fork()
    if not pid:
        os.execve(TOKA, [TOKA, *args], environment(hub, **env))
    text, asked, end = b"", False, time.time() + 60
    while time.time() < end:
        if select.select([fd], [], [], 0.1)[0]:
            try:
                chunk = os.read(fd, 4096)
            except OSError:
                break
            if not chunk:
                break
            text += chunk
        if not asked and b"[y/N] " in text:
            asked = True
            os.write(fd, answer)
    os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text.decode()


def test_a_terminal_is_asked(hub):
    status, text = on_terminal(hub, b"\n", "-m", ID, "-p", PROBLEM)
    assert status == 1 and "was not downloaded" in text
    assert f"tiny/apples is not in the hub cache. Download 7.0 MB to {hub.cache}? [y/N] " in text
    assert not os.path.exists(hub.cache)
    status, text = on_terminal(hub, b"y\n", "-m", ID, "-p", PROBLEM)
    assert status == 0 and "19." in text
    assert not os.path.exists(hub.cache + "/evil")


@pytest.mark.parametrize("columns, model, shown", [
    (80, ID, r"^tiny/apples \[=+ +\] +\d+ % of 7\.\d MB, [\d.]+ [KM]?B\w*/s, \d+ s left$"),
    (80, LONG, r"^tiny/app\S*\.\.\S*-model \[=+ +\] +\d+ % of 7\.\d MB, "),
    (40, ID, r"^\[=+ +\] +\d+ %, [\d.]+ [KM]?B\w*/s, \d+ s left"), (140, LONG, LONG + r" \[=+ +\] +\d+ % of ")])
def test_progress_on_a_terminal(hub, columns, model, shown):
    pyte = pytest.importorskip("pyte")
    hub.hold_after = 4_000_000
    pid, fd = pty.fork()
    if not pid:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.execve(TOKA, [TOKA, "pull", model], environment(hub))
    text, end = b"", time.time() + 30
    while not re.search(rb"\d\d %.* left", text) and time.time() < end:  # the small files, which come before, may be shown, too
        text += os.read(fd, 4096)
    hub.hold_after = None
    try:
        while True:
            text += os.read(fd, 4096)
    except OSError:
        pass
    os.close(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    screen = pyte.Screen(columns, 24)
    stream, rows = pyte.ByteStream(screen), []
    for piece in text.split(b"\r\x1b[K")[1:-1]:  # each is one row, which the next one replaces
        stream.feed(b"\r\x1b[K" + piece)
        rows.append(screen.display[screen.cursor.y].rstrip())
        assert screen.cursor.y == 0 and rows[-1] == piece.decode().rstrip() and len(rows[-1]) < columns
    assert any(re.search(shown, row) for row in rows), rows


def test_no_progress_without_escape_sequences(hub, tmp_path):
    for kind in ("xterm", "dumb"):
        hub.sent, hub.hold_after = 0, 4_000_000
        timer = threading.Timer(1, hub.reset)
        timer.start()
        status, text = on_terminal(hub, b"", "pull", ID, "--download-dir", str(tmp_path / kind), TERM=kind)
        timer.join()
        assert status == 0 and "5 files" in text and ("\x1b" in text) == (kind == "xterm"), text


# ---- list and rm ----

def test_list_and_rm(hub):
    assert toka(hub, "pull", ID, "tiny/sharded").returncode == 0
    os.makedirs(hub.cache + "/models--tiny--broken/blobs")
    os.makedirs(hub.cache + "/datasets--a--b/blobs")
    os.makedirs(hub.cache + "/models--tiny--part/blobs")  # as a download that was stopped leaves it
    os.makedirs(hub.cache + "/models--tiny--broken/snapshots")
    rows = toka(hub, "list").stdout.decode().splitlines()
    assert rows[0].split() == ["model", "size", "here", "format", "this", "machine"]
    here = [r.split() for r in rows if " yes " in r or " part " in r]
    assert [r[0] for r in here] == [ID, "tiny/broken", "tiny/part", "tiny/sharded"]
    assert here[0][1:] == ["7.1", "MB", "yes", "bf16", "fits"] and here[1][5:8] == ["does", "not", "run:"]
    assert here[2][1:] == "0 bytes part - to complete it: toka pull tiny/part".split()
    assert re.search(r"^- +tiny/part +to complete it: toka pull tiny/part$", toka(hub, "models").stdout.decode(), re.M)
    os.rmdir(hub.cache + "/models--tiny--part/blobs"), os.rmdir(hub.cache + "/models--tiny--part")
    known = {r.split()[0]: r.split() for r in rows if " no " in r}
    assert "qwen3-0.6b" in known and len(known) > 30
    assert known["llama-3.1-8b-instruct-fp8"][1:7] == ["9.1", "GB", "no", "FP8", "and", "bf16"]
    # toka models: models.txt, then what else is in the cache
    lines = toka(hub, "models").stdout.decode().splitlines()
    mine = [r for r in lines if r.startswith("- ")]
    assert [r.split()[1] for r in mine] == [ID, "tiny/broken", "tiny/sharded"] and len(lines) == len(known) + 4
    assert mine[0].endswith("in the hub cache") and " bf16 " in mine[0] and " own " in mine[0] and "does not run: " in mine[1]
    r = toka(hub, "rm", ID, "tiny/broken")
    assert r.returncode == 0 and r.stdout == b"tiny/apples: deleted, 7.1 MB\ntiny/broken: deleted, 0 bytes\n"
    assert sorted(os.listdir(hub.cache)) == [".locks", "datasets--a--b", "models--tiny--sharded"]
    assert os.listdir(hub.cache + "/.locks") == ["models--tiny--sharded"]
    fails(toka(hub, "rm", ID), 1, "tiny/apples is not in the hub cache")
    fails(toka(hub, "rm", "tiny/shraded"), 1, "did you mean tiny/sharded?")
    assert b"did you mean" not in toka(hub, "rm", "Qwen/Qwen3-06B").stderr  # Qwen3-0.6B is not here either
    fails(toka(hub, "rm"), 1, "expected: toka rm OWNER/NAME")
    fails(toka(hub, "rm", "../x/y"), 1, "not a hub id")


def test_download_dir(hub, tmp_path):
    flags = ["--download-dir", str(tmp_path / "models")]
    assert toka(hub, "-hf", ID, "-q", "-p", PROBLEM, *flags).stdout.decode().rstrip().endswith("19.")
    assert not os.path.exists(hub.cache) and len(tree(str(tmp_path / "models"))) == 11
    assert toka(hub, "-m", ID, "-q", "-p", PROBLEM, TOKA_DOWNLOAD_DIR=flags[1]).returncode == 0
    assert b"- " in toka(hub, "models", *flags).stdout and ID.encode() in toka(hub, "models", *flags).stdout
    assert b" yes " in toka(hub, "list", *flags).stdout and toka(hub, "rm", ID, *flags).returncode == 0


def advised(r, status=1):
    """The command that a message ends with, as `sh` runs it."""
    fails(r, status)
    return re.search(r"(?:run|with|complete it): ((?:toka|hf) .*)$", r.stderr.decode())[1]


def follow(hub, command, **env):
    """Runs such a command. `toka` and `hf` are in the path."""
    path = f"{os.path.dirname(TOKA)}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    r = subprocess.run(["sh", "-c", command], capture_output=True, env=environment(hub, PATH=path, **env), timeout=120)
    assert r.returncode == 0, (command, r.stderr)


@pytest.mark.parametrize("name", ["other", "it's a new $(folder)"])
def test_the_advice_works_as_printed(hub, tmp_path, name):
    """With a cache that a flag names, also if the cache has the model without its weights."""
    other = ["--download-dir", str(tmp_path / name)]
    answers = ["-q", "-m", ID, "-p", PROBLEM, *other]
    follow(hub, advised(toka(hub, *answers)))
    want = toka(hub, *answers).stdout
    assert want.rstrip().endswith(b"19.") and not os.path.exists(hub.cache)
    shutil.rmtree(other[1])
    r = subprocess.run([TOKA, "tokenize", "-hf", ID, *other], input=b"Tom has", capture_output=True, env=environment(hub), cwd=ROOT)
    assert r.returncode == 0  # takes no weights
    r = toka(hub, *answers)
    fails(r, 1, f"{ID} is in the hub cache {other[1]} without its weights; add --download, or run: toka pull ")
    row = next(line for line in toka(hub, "list", *other).stdout.decode().splitlines() if line.startswith(ID))
    assert " part " in row and row.endswith("to complete it: " + advised(r))
    follow(hub, advised(r))
    assert toka(hub, *answers).stdout == want
    shutil.rmtree(other[1])
    # without curl: huggingface_hub
    command = advised(toka(hub, "pull", ID, *other, PATH=str(tmp_path)), 2)
    assert command.startswith(f"hf download {ID} --revision main --cache-dir ")
    if huggingface_hub:
        follow(hub, command)
        assert toka(hub, *answers).stdout == want


def test_list_without_a_cache(hub):
    r = toka(hub, "list")
    assert r.returncode == 0 and b" yes " not in r.stdout and b"qwen3-0.6b" in r.stdout


@pytest.mark.parametrize("flags, name, alias", [(["-hf", ID], ID, ID), (["-m", ID], ID, ID), ([ID + "@main"], ID + "@main", ID + "@main"),
                                               (["-hf", "apple"], "apple", ID), (["APPLE"], "APPLE", "apple")])
def test_a_model_is_served_as_typed(hub, tmp_path, flags, name, alias):
    assert toka(hub, "pull", ID).returncode == 0
    (tmp_path / "known.txt").write_text(f"apple {ID} - " + json.dumps(json.load(open(f"{ROOT}/test/model/config.json"))))
    with Server(*flags, env={"HOME": hub.home, "HF_ENDPOINT": hub.url, "TOKA_MODELS_FILE": str(tmp_path / "known.txt"), "TOKA_MAX_NUM_SEQS": "8"}) as s:
        assert [m["id"] for m in s.get("/v1/models").json()["data"]] == [name]
        for model in (name, alias):
            assert s.post("/v1/completions", {"model": model, "prompt": "Tom", "max_tokens": 1}).json()["model"] == model
        assert s.post("/v1/completions", {"model": "tiny", "prompt": "Tom"}).status == 404


# ---- The examples of --help ----

def examples():
    """[(command, its examples as lines of a shell)]"""
    found = []
    for command in ("run", "chat", "ping", "serve", "batch", "tokenize", "template", "score", "grammar", "embed", "plan", "bench throughput",
                    "bench serve", "pull", "rm"):
        text = subprocess.run([TOKA, *command.split(), "--help"], capture_output=True, check=True).stdout.decode()
        lines = re.sub(r"\|\n +", "| ", text.split("\nExamples\n")[1].split("\n\n")[0]).splitlines()
        assert len(lines) >= 3, command
        found.append((command, lines))
    return found


@pytest.mark.slow
def test_the_examples_of_help_run(hub, tmp_path):
    """Each example runs as printed, in a folder with the files that it names; only the loads of bench serve are made small."""
    known = {line.split()[0]: line.split()[1] for line in open(f"{ROOT}/models.txt") if line[0] not in "#\n"}
    found = examples()
    all_text = "\n".join(line for _, lines in found for line in lines)
    config = {**json.load(open(f"{ROOT}/test/model/config.json")), "max_position_embeddings": 4096}
    files = {**model_files(), "config.json": json.dumps(config).encode(), "config_sentence_transformers.json": b'{"prompts": {"query": "find: "}}'}
    for hub_id in {*re.findall(r"\b[A-Z]\w+/[\w.-]+", all_text), *(known[name] for name in known if re.search(rf"\b{re.escape(name)}\b(?![.-]\w)", all_text))}:
        hub.repos[hub_id] = Repo(files)
    (tmp_path / "tiny.txt").write_text("".join(f"{name} {known[name]} - {json.dumps(config)}\n" for name in ("llama-3.1-8b", "llama-3.2-1b", "qwen3-8b")))
    for name, text in (("question.txt", PROBLEM), ("text.txt", PROBLEM), ("texts.txt", "Tom\nAnn\n"), ("chat.json", '{"messages": [{"role": "user", "content": "Tom"}]}'),
                       ("own.jinja", "{{ messages[0].content }}"), ("schema.json", '{"type": "object"}'), ("answer.json", "{}"),
                       ("questions.jsonl", '{"custom_id": "1", "prompt": "Tom", "max_tokens": 3}\n'),
                       ("lengths.jsonl", '{"prompt_token_ids": [5, 6, 7], "output_lengths": [3, 4]}\n')):
        (tmp_path / name).write_text(text)
    os.mkdir(tmp_path / "bin")
    os.symlink(TOKA, tmp_path / "bin/toka")
    env = environment(hub, PATH=f"{tmp_path}/bin:{os.environ['PATH']}", TOKA_MAX_TOKENS="8", TOKA_MAX_NUM_SEQS="8")
    for model in (*known, "Qwen/Qwen3-Embedding-0.6B"):  # the examples name models that are here
        if known.get(model, model) in hub.repos:
            assert toka(hub, "pull", known.get(model, model)).returncode == 0
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env["TOKA_PORT"] = port

    def run(line, **more):
        line = line.replace("--port 8000", f"--port {port}").replace(":8000", f":{port}")
        if line.startswith("toka bench serve"):
            line += " --num-prompts 3 --request-rate inf --random-input-len 20 --random-output-len 4"
        if "--dummy-weights" in line:
            more["TOKA_MODELS_FILE"] = str(tmp_path / "tiny.txt")
        return subprocess.Popen(["bash", "-c", line], cwd=tmp_path, env={**env, **more}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    for line in (line for command, lines in found if command == "serve" for line in lines if "curl" not in line):
        server = run("exec " + line.strip())
        try:
            while subprocess.run(["curl", "-sf", f"127.0.0.1:{port}/health"], capture_output=True).returncode:
                assert server.poll() is None, server.stderr.read().decode()
                time.sleep(0.1)
            for command, lines in found:
                for line in lines:
                    if (command in ("ping", "bench serve") or "curl" in line or "--base-url" in line) and "llama" in server.args[2]:
                        p = run(line.strip().replace("curl ", "curl -sf "))
                        out, err = p.communicate(timeout=120)
                        assert p.returncode == 0 and (out or command == "chat"), (line, err.decode())
        finally:
            server.terminate()
            assert server.wait(60) == 0, server.stderr.read().decode()
    for command, lines in found:
        for line in lines:
            if command not in ("serve", "ping", "bench serve") and "--base-url" not in line:
                p = run(line.strip())
                out, err = p.communicate(b"" if command == "chat" else None, timeout=120)
                assert p.returncode == 0, (line, err.decode())
