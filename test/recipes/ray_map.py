#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A file of prompts over the machines of a Ray cluster: each worker has a model, and blocks of lines go to the workers that are
free. A worker that dies is started again and gets its block again. Each block becomes a file when it is done, so the same command
continues after any stop. pip install ray

    ray_map.py MODEL in.jsonl OUT_FOLDER [WORKERS] [LINES_A_BLOCK]     a line: {"prompt": "..."}; then: cat OUT_FOLDER/*.jsonl
"""
import json
import os
import sys
from pathlib import Path

try:
    import ray
except ModuleNotFoundError:
    sys.exit("ray_map.py: it needs ray: pip install ray")

HERE = str(Path(__file__).resolve().parent.parent)  # toka.py; libtoka.so is there or above


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Worker:
    def __init__(self, model, threads):
        sys.path.insert(0, HERE)
        import toka
        self.params = toka.SamplingParams
        self.llm = toka.LLM(model, num_threads=threads)

    def run(self, first, lines):  # the seed of a line is its number: results depend neither on the worker nor on the block
        params = [self.params(temperature=1, max_tokens=64, seed=first + i) for i in range(len(lines))]
        answers = self.llm.generate([line["prompt"] for line in lines], params)
        return [{**line, "pid": os.getpid(), "text": a.outputs[0].text} for line, a in zip(lines, answers)]


def main(model, path, folder, workers=2, size=256):
    lines, size, out = [json.loads(line) for line in open(path)], int(size), Path(folder)
    out.mkdir(exist_ok=True)
    ray.init(log_to_driver=False)
    cluster = ray.cluster_resources()
    cpus, gpus = int(cluster["CPU"]) // int(workers), int(cluster.get("GPU", 0)) // int(workers)
    threads = min(1024, max(1, cpus))
    pool = ray.util.ActorPool([Worker.options(num_cpus=cpus, num_gpus=gpus).remote(model, threads) for _ in range(int(workers))])
    left = [first for first in range(0, len(lines), size) if not (out / f"{first:09}.jsonl").exists()]
    print(f"{len(left)} blocks are left", flush=True)
    for first in left:
        pool.submit(lambda worker, first: worker.run.remote(first, lines[first:first + size]), first)
    for first in left:
        rows = pool.get_next()
        part = out / f"{first:09}.part"
        part.write_text("".join(json.dumps(row) + "\n" for row in rows))
        part.rename(part.with_suffix(".jsonl"))  # a block's file is there as a whole, or not at all
        print(f"block {first} is done", flush=True)


main(*sys.argv[1:])
