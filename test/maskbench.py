#!/usr/bin/env python3
"""Runs the schemas of MaskBench through llguidance or xgrammar, and prints the table that `toka grammar --maskbench` prints: what is
refused and decided wrongly, CPU times of compilation and of each mask. One thread; run all on one core, one after the other:

    zstd -dc ../shared/data/suites/maskbench/maskbench.jsonl.zst > mb.jsonl
    taskset -c 1 ./toka grammar -m ../shared/data/tokenizers/llama-3.1 --maskbench mb.jsonl
    taskset -c 1 test/maskbench.py mb.jsonl ../shared/data/tokenizers/llama-3.1/tokenizer.json llguidance
    taskset -c 1 test/maskbench.py mb.jsonl ../shared/data/tokenizers/llama-3.1/tokenizer.json xgrammar 8

It needs the packages llguidance, or xgrammar and tokenizers. The last number: every 8th schema. Each text is read in the order of its
members, and as json.dumps writes it. A time of compilation has that of the first mask in it, as toka's has."""
import json
import sys
import time

path, tokenizer, peer = sys.argv[1:4]
step = int(sys.argv[4]) if len(sys.argv) > 4 else 1
now = time.thread_time
if peer == "llguidance":
    import llguidance.numpy
    from llguidance import LLMatcher, LLTokenizer
    tok = LLTokenizer(open(tokenizer).read())
    encode, mask, fill = tok.tokenize_str, llguidance.numpy.allocate_token_bitmask(1, tok.vocab_size), llguidance.numpy.fill_next_token_bitmask
else:
    import tokenizers
    import xgrammar
    tok = tokenizers.Tokenizer.from_file(tokenizer)
    names = [name for name, _ in sorted(tok.get_vocab().items(), key=lambda x: x[1])]
    END = names.index("<|end_of_text|>")
    info = xgrammar.TokenizerInfo(names, xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[END])
    compiler, mask = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False), xgrammar.allocate_token_bitmask(1, len(names))

    def encode(text):
        return tok.encode(text, add_special_tokens=False).ids

    def fill(m, mask, i):
        m.fill_next_token_bitmask(mask, i)


def compiled(schema):
    if peer == "xgrammar":
        return xgrammar.GrammarMatcher(compiler.compile_json_schema(schema, any_whitespace=True, strict_mode=False))
    m = LLMatcher(tok, LLMatcher.grammar_from_json_schema(schema))
    if m.is_error():
        raise ValueError(m.get_error())
    return m


def allows(token):
    return int(mask[0, token // 32]) >> token % 32 & 1


def accepts(m, text, times):
    m.reset()
    for token in encode(text):
        t0 = now()
        fill(m, mask, 0)
        times.append(now() - t0)
        if not allows(token) or not (m.consume_token(token) if peer == "llguidance" else m.accept_token(token)):
            return False
    if peer == "llguidance":
        return m.is_accepting()
    fill(m, mask, 0)
    return bool(allows(END))


def table(name, times):
    us = sorted(1e6 * t for t in times)
    at = ", ".join(f"p{p:g} {us[min(len(us) - 1, int(len(us) * p / 100))]:.1f}" for p in (50, 95, 99, 99.9))
    print(f"{name}, us: n {len(us)}, mean {sum(us) / len(us):.1f}, {at}, max {us[-1]:.1f}")


compiles, masks = [], []
n_schemas = n_refused = n_accepts = n_refuses = 0
for i, line in enumerate(open(path)):
    if i % step:
        continue
    row, t0 = json.loads(line), now()
    n_schemas += 1
    try:
        matcher = compiled(json.dumps(row["schema"]))
        fill(matcher, mask, 0)
    except (ValueError, RuntimeError):
        n_refused += 1
        continue
    compiles.append(now() - t0)
    got = [(accepts(matcher, json.dumps(t["data"], ensure_ascii=False), masks), t["valid"]) for t in row["tests"]]
    n_accepts += any(a and not v for a, v in got)
    n_refuses += any(v and not a for a, v in got)
print(f"{peer}: schemas {n_schemas}: refused {n_refused}; with a wrong acceptance {n_accepts}, with a wrong rejection {n_refuses}")
table("compile", compiles)
table("mask", masks)
