#!/usr/bin/env python3
"""Runs the schemas of MaskBench through llguidance or xgrammar, and prints the table that `toka grammar --maskbench` prints: what is
refused and decided wrongly, CPU times of compilation and of each mask. One thread; run all on one core, one after the other:

    zstd -dc ../shared/data/suites/maskbench/maskbench.jsonl.zst | awk 'NR % 8 == 1' > mb8.jsonl
    taskset -c 1 ./toka grammar -m ../shared/data/tokenizers/llama-3.1 --maskbench mb8.jsonl
    taskset -c 1 test/maskbench.py mb8.jsonl ../shared/data/tokenizers/llama-3.1/tokenizer.json xgrammar --results x.jsonl --minutes 50

It needs the packages llguidance, or xgrammar and tokenizers. Each text is read in the order of its members, as json.dumps writes it. A
time of compilation has that of the first mask in it, as toka's has. A process does the work. If a schema takes more CPU time than its
limit or ends the process, that is counted, and another process goes on. A compilation that was stopped counts as the limit. With
--results the same command goes on where it was stopped. The order is random, but always the same, so a part of it is a sample."""
import argparse
import json
import os
import random
import resource
import signal
import tempfile
import time

now = time.thread_time


class LLGuidance:
    def __init__(self, tokenizer):
        import llguidance.numpy
        self.lib = llguidance
        with open(tokenizer) as f:
            self.tokenizer = llguidance.LLTokenizer(f.read())
        self.mask = llguidance.numpy.allocate_token_bitmask(1, self.tokenizer.vocab_size)

    def compile(self, schema):
        m = self.lib.LLMatcher(self.tokenizer, self.lib.LLMatcher.grammar_from_json_schema(schema))
        if m.is_error():
            raise ValueError(m.get_error())
        return m

    def encode(self, text):
        return self.tokenizer.tokenize_str(text)

    def fill(self, m):
        self.lib.numpy.fill_next_token_bitmask(m, self.mask, 0)

    def take(self, m, token):
        return m.consume_token(token)

    def is_complete(self, m):
        return m.is_accepting()


class XGrammar:
    def __init__(self, tokenizer):
        import numpy
        import tokenizers
        import xgrammar
        self.lib, self.tokenizer = xgrammar, tokenizers.Tokenizer.from_file(tokenizer)
        names = [name for name, _ in sorted(self.tokenizer.get_vocab().items(), key=lambda x: x[1])]
        self.end = names.index("<|end_of_text|>")
        info = xgrammar.TokenizerInfo(names, xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[self.end])
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.mask = numpy.full((1, (len(names) + 31) // 32), -1, numpy.int32)

    def compile(self, schema):
        return self.lib.GrammarMatcher(self.compiler.compile_json_schema(schema, any_whitespace=True, strict_mode=False))

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def fill(self, m):
        m.fill_next_token_bitmask(self.mask, 0)

    def take(self, m, token):
        return m.accept_token(token)

    def is_complete(self, m):
        self.fill(m)
        return allows(self, self.end)


def allows(peer, token):
    return bool(int(peer.mask[0, token // 32]) >> token % 32 & 1)


def accepts(peer, m, text, times):
    m.reset()
    for token in peer.encode(text):
        t0 = now()
        peer.fill(m)
        times.append(now() - t0)
        if not allows(peer, token) or not peer.take(m, token):
            return False
    return peer.is_complete(m)


def judge(peer, row):
    """Yields what is found out about a schema: how its compilation ends, then how its texts are decided."""
    t0 = now()
    try:
        m = peer.compile(json.dumps(row["schema"]))
        peer.fill(m)
    except (ValueError, RuntimeError):
        yield {"refused": True}
        return
    yield {"compile": now() - t0}
    masks = []
    got = [(accepts(peer, m, json.dumps(t["data"], ensure_ascii=False), masks), t["valid"]) for t in row["tests"]]
    yield {"masks": masks, "accepts": any(a and not v for a, v in got), "refuses": any(v and not a for a, v in got)}


def work(peer, rows, path, options):
    """The process that does the work. SIGPROF, which nothing handles, ends it when a schema has used up its CPU time."""
    resource.setrlimit(resource.RLIMIT_AS, (options.gigabytes << 30,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    end = time.monotonic() + 60 * options.minutes
    with open(path, "a") as out:
        for i, row in rows:
            if time.monotonic() > end:
                break
            signal.setitimer(signal.ITIMER_PROF, options.seconds)
            for found in judge(peer, row):
                out.write(json.dumps({"schema": i, **found}) + "\n")
                out.flush()
            signal.setitimer(signal.ITIMER_PROF, 0)


def read_results(path):
    results = {}
    with open(path) as f:
        for line in f:
            found = json.loads(line)
            results.setdefault(found["schema"], {}).update(found)
    return results


def is_done(result):
    return result is not None and bool(result.keys() & {"refused", "masks", "died"})


def run(peer, rows, path, options):
    """Runs processes until every schema is done, or the time is over."""
    start = time.monotonic()
    while True:
        results = read_results(path)
        left = [(i, row) for i, row in rows if not is_done(results.get(i))]
        options.minutes -= (time.monotonic() - start) / 60
        start = time.monotonic()
        if not left or options.minutes <= 0:
            return results
        pid = os.fork()
        if not pid:
            try:
                work(peer, left, path, options)
            except MemoryError:
                os.kill(os.getpid(), signal.SIGABRT)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status):
            results = read_results(path)
            first = next(i for i, _ in left if not is_done(results.get(i)))
            died = "time" if os.WTERMSIG(status) == signal.SIGPROF else signal.Signals(os.WTERMSIG(status)).name
            with open(path, "a") as f:
                f.write(json.dumps({"schema": first, "died": died}) + "\n")


def print_times(name, times):
    us = sorted(1e6 * t for t in times)
    at = ", ".join(f"p{p:g} {us[min(len(us) - 1, int(len(us) * p / 100))]:.1f}" for p in (50, 95, 99, 99.9))
    print(f"{name}, us: n {len(us)}, mean {sum(us) / len(us):.1f}, {at}, max {us[-1]:.1f}")


def print_table(name, results, n_rows, options):
    done = [r for r in results.values() if is_done(r)]
    died = [r for r in done if "died" in r]
    timed = [r for r in died if r["died"] == "time"]
    unfinished = sum("compile" not in r for r in timed)
    print(f"{name}: schemas {len(done)} of {n_rows}: refused {sum('refused' in r for r in done)}; with a wrong acceptance "
          f"{sum(r.get('accepts', False) for r in done)}, with a wrong rejection {sum(r.get('refuses', False) for r in done)}")
    print(f"stopped after {options.seconds:g} s of CPU time: {unfinished} in compilation, "
          f"{len(timed) - unfinished} in texts; died otherwise: {len(died) - len(timed)} {sorted({r['died'] for r in died} - {'time'})}")
    print_times("compile", [r["compile"] for r in done if "compile" in r] + [options.seconds] * unfinished)
    print_times("mask", [t for r in done for t in r.get("masks", [])])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("tokenizer")
    parser.add_argument("peer", choices=["llguidance", "xgrammar"])
    parser.add_argument("--results", help="a file that keeps what is done")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this time; 0: print the table of --results")
    parser.add_argument("--seconds", type=float, default=10, help="CPU time of a schema and its texts")
    parser.add_argument("--gigabytes", type=int, default=12, help="address space")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with open(options.file) as f:
        rows = list(enumerate(map(json.loads, f)))
    random.Random(1).shuffle(rows)
    path = options.results or tempfile.mkstemp()[1]
    open(path, "a").close()
    peer = {"llguidance": LLGuidance, "xgrammar": XGrammar}[options.peer](options.tokenizer)
    print_table(options.peer, run(peer, rows, path, options), len(rows), options)


if __name__ == "__main__":
    main()
