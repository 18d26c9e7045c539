"""Two servers behind vLLM's router, SGLang's router and nginx, started as `toka help machines` and test/deploy say. Prompts that begin
alike go to one server, and its prefix cache has the beginning. Then one server is killed while requests run, and no client notices.
Needs vllm_router, sglang_router and nginx; each that is missing is skipped. Prints a table."""
import concurrent.futures
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from server import ROOT, TOKA, Server  # noqa: E402

N, ROUNDS = 12, 4  # conversations, and requests of each
KEY = "k"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ask(url, path, body=None, **headers):
    head = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", **{k.replace("_", "-"): v for k, v in headers.items()}}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, head), timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as e:
        return e.code, e.read()


def conversation(i, turn, **more):
    """The body of request `turn` of conversation i, whose first 60 sentences are always the same."""
    text = f"Conversation {i * 7919}. " + " ".join(f"Tom {i} has {k * (i + 3)} apples." for k in range(60))
    return {"model": "tiny", "prompt": f"{text} Turn {turn}.", "max_tokens": 24, "ignore_eos": True, **more}


def at_once(url, bodies):
    """Asks all at once, each conversation in its session; returns (status, body) of each."""
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        jobs = [pool.submit(ask, url, "/v1/completions", body, X_Session_Id=name) for name, body in bodies]
        return [job.result() for job in jobs]


def ask_all(url, turn, **more):
    answers = at_once(url, [(f"s{i}", conversation(i, turn, **more)) for i in range(N)])
    assert all(status == 200 for status, _ in answers), answers
    return [json.loads(text) for _, text in answers]


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def check_affinity(url, servers):
    """Returns which share of later prompts the prefix caches had."""
    turns = [ask_all(url, turn) for turn in range(ROUNDS)]
    prompts = [a["usage"]["prompt_tokens"] for a in turns[0]]
    counted = [(s.metric("prefix_cache_hits_total"), s.metric("prompt_tokens_total")) for s in servers]
    assert all(asked > 0 for _, asked in counted), counted  # both servers have conversations
    assert sum(asked for _, asked in counted) == sum(a["usage"]["prompt_tokens"] for turn in turns for a in turn)
    assert sum(hits for hits, _ in counted) == sum(cached(a) for turn in turns for a in turn)
    late = [cached(a) for turn in turns[1:] for a in turn]
    all_late = sum(prompts) * (ROUNDS - 1)
    assert sum(late) >= 0.9 * all_late, (late, prompts)
    return sum(late) / all_late


def check_death(url, servers):
    """Kills the server that has more requests while both have some."""
    bodies = [(f"s{i}", conversation(i, 9, max_tokens=150)) for i in range(N)]
    with concurrent.futures.ThreadPoolExecutor(N) as pool:
        jobs = [pool.submit(ask, url, "/v1/completions", body, X_Session_Id=name) for name, body in bodies]
        end = time.time() + 30
        while not all(s.metric("num_requests_running") for s in servers):
            assert time.time() < end, "no request came to one of the servers"
        victim = max(servers, key=lambda s: s.metric("num_requests_running"))
        victim.p.kill()
        answers = [job.result() for job in jobs]
    assert all(status == 200 for status, _ in answers), [a for a in answers if a[0] != 200]
    rest = next(s for s in servers if s is not victim)
    before = rest.metric("prompt_tokens_total")
    after = ask_all(url, 10)
    assert rest.metric("prompt_tokens_total") - before == sum(a["usage"]["prompt_tokens"] for a in after)


def check_api(url):
    """Requests of each kind, from bodies that the router writes anew; with --strict a field that toka does not know is an error."""
    user = [{"role": "user", "content": "Tom has 12 apples."}]
    asks = {"/v1/chat/completions": {"model": "tiny", "messages": user, "max_tokens": 4}, "/v1/embeddings": {"model": "tiny", "input": "Tom"},
            "/v1/responses": {"model": "tiny", "input": "Tom", "max_output_tokens": 4},
            "/generate": {"text": "Tom", "sampling_params": {"max_new_tokens": 4}}}
    for path, body in asks.items():
        status, text = ask(url, path, body)
        assert status == 200, (path, status, text)
    status, text = ask(url, "/v1/completions", conversation(0, 0, stream=True))
    assert status == 200 and text.endswith(b"data: [DONE]\n\n") and text.count(b"data: ") > 20
    models = json.loads(ask(url, "/v1/models")[1])["data"]
    assert [m["id"] for m in models] == ["tiny"], models


def check_loads(url):
    loads = json.loads(ask(url, "/get_loads")[1])["workers"]
    assert [w["load"] for w in loads] == [0, 0], loads


def command_of(program, urls, port):
    """The command of the manual page, with other addresses."""
    page = subprocess.run([TOKA, "help", "machines"], capture_output=True, text=True, check=True).stdout.replace("\\\n", " ")
    command, = re.findall(rf"^  \$ ({program} .*)$", page, re.M)
    for name, url in zip(("http://a:10210", "http://b:10210"), urls):
        assert name in command
        command = command.replace(name, url)
    words = shlex.split(command.replace("8000", str(port)).replace("0.0.0.0", "127.0.0.1"))
    return [os.path.join(os.path.dirname(sys.executable), words[0]), *words[1:], "--api-key", KEY, "--prometheus-port", str(free_port())]


def nginx_command(folder, urls, port):
    with open(f"{ROOT}/test/deploy/nginx-servers.conf") as f:
        config = f.read().replace("listen 8000", f"listen 127.0.0.1:{port}")
    for name, url in zip(("10.0.0.1:10210", "10.0.0.2:10210"), urls):
        assert name in config
        config = config.replace(name, url.removeprefix("http://"))
    own = "".join(f"{kind}_temp_path {folder}/{kind}; " for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    with open(f"{folder}/nginx.conf", "w") as f:
        f.write(f"pid {folder}/pid; error_log {folder}/error; daemon off; user root; events {{}} http {{ access_log off; {own}{config} }}")
    return [nginx(), "-e", f"{folder}/error", "-c", f"{folder}/nginx.conf", "-p", folder]


def nginx():
    return shutil.which("nginx") or shutil.which("/usr/sbin/nginx")


def has_servers(url, program):
    """Does the router know that both servers answer?"""
    try:
        if program == "nginx":
            return ask(url, "/health")[0] == 200
        return [w["is_healthy"] for w in json.loads(ask(url, "/workers")[1])["workers"]] == [True, True]
    except OSError:
        return False


def judge(program):
    flags = ["--served-model-name", "tiny", "--strict", "--api-key", KEY]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with Server(*flags) as a, Server(*flags) as b, tempfile.TemporaryDirectory() as folder:
        servers = [a, b]
        for s in servers:
            s.metric = lambda name, s=s: float(re.search(rf"^toka:{name}{{[^}}]*}} (\S+)$", s.get("/metrics", Authorization=f"Bearer {KEY}")
                                                         .body.decode(), re.M)[1])
        urls = [f"http://127.0.0.1:{s.address[1]}" for s in servers]
        command = nginx_command(folder, urls, port) if program == "nginx" else command_of(program, urls, port)
        with open(f"{folder}/log", "w") as log:
            p = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            end = time.time() + 60
            while not has_servers(url, program):
                if p.poll() is not None or time.time() > end:
                    with open(f"{folder}/log") as log:
                        raise SystemExit(f"{program} does not start: {log.read()[-3000:]}")
                time.sleep(0.2)
            if program == "sglang-router":  # vLLM's wants a form of /get_load that no engine has
                check_loads(url)
            share = check_affinity(url, servers)
            check_api(url)
            check_death(url, servers)
        finally:
            if p.poll() is None:
                os.killpg(p.pid, signal.SIGTERM)
            p.wait()
    return f"prefix caches had {share:.0%} of the later prompts; one server was killed, {N} of {N} requests answered"


def version_of(program):
    """The version, or None if the program is not there."""
    if program == "nginx":
        return nginx() and subprocess.run([nginx(), "-v"], capture_output=True, text=True).stderr.strip().split("/")[-1]
    package = program.replace("-", "_")
    return importlib.metadata.version(program) if importlib.util.find_spec(package) else None


def main():
    rows = []
    for program in ("vllm-router", "sglang-router", "nginx"):
        version = version_of(program)
        rows.append(f"| {program} | {version or '-'} | {judge(program) if version else 'not there'} |")
    print("| router | version | two servers |\n|---|---|---|")
    print("\n".join(rows))
    print(f"{sum('not there' not in row for row in rows)} routers, affinity and a killed server")


main()
