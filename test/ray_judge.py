"""test/recipes/ray_map.py under Ray: two local workers map a file of prompts. One worker is killed, then everything; the same
command continues, and the results are those of one engine. Needs ray."""
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "test"))
N, SIZE = 60, 6


def start(folder):
    command = [sys.executable, f"{ROOT}/test/recipes/ray_map.py", f"{ROOT}/test/model", f"{folder}/in.jsonl", f"{folder}/out", "2", str(SIZE)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def read(folder):
    names = sorted(n for n in os.listdir(folder) if n.endswith(".jsonl"))
    return [json.loads(line) for name in names for line in open(f"{folder}/{name}")]


def wait_for(p, word):
    seen = []
    while line := p.stdout.readline():
        seen.append(line)
        if word in line:
            return
    raise SystemExit("".join(seen[-30:]))


def kill_group(p):
    if p.poll() is None:
        os.killpg(p.pid, signal.SIGKILL)
    p.wait()


def main():
    os.environ["TOKA_DEVICE"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/in.jsonl", "w") as f:
            f.writelines(json.dumps({"prompt": f"Tom has {i} apples. He buys"}) + "\n" for i in range(N))
        p = start(folder)
        try:
            wait_for(p, "block")  # "N blocks are left"
            wait_for(p, "is done")
            victims = {row["pid"] for row in read(f"{folder}/out")}
            os.kill(victims.pop(), signal.SIGKILL)  # one worker
            wait_for(p, "is done")
            wait_for(p, "is done")
        finally:
            kill_group(p)  # and then the whole run
        done = len(read(f"{folder}/out"))
        time.sleep(1)
        p = start(folder)
        try:
            text = p.communicate(timeout=300)[0]
        finally:
            kill_group(p)
        rows = read(f"{folder}/out")
        assert p.returncode == 0 and f"{(N - done) // SIZE} blocks are left" in text, text[-3000:]
        from toka import LLM, SamplingParams
        params = [SamplingParams(temperature=1, max_tokens=64, seed=i) for i in range(N)]
        with LLM(f"{ROOT}/test/model") as llm:
            texts = [a.outputs[0].text for a in llm.generate([row["prompt"] for row in rows], params)]
        assert SIZE * 3 <= done < N and len(rows) == N and [row["text"] for row in rows] == texts
        pids = len({row["pid"] for row in rows})
        assert pids >= 3, rows
        print(f"{N} prompts, {pids} workers in two runs, one of them killed: the texts of one engine")


main()
