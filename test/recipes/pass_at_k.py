#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""pass@k over n samples: the share of problems that at least one of k samples solves (Chen et al. 2021, arXiv 2107.03374).

    pass_at_k.py MODEL problems.jsonl [N]     a line: {"question": "...", "answer": "17"}
"""
import json
import math
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from toka import LLM, SamplingParams


def is_right(text, answer):
    numbers = re.findall(r"-?\d[\d,]*", text)
    return bool(numbers) and numbers[-1].replace(",", "") == str(answer)


def pass_at_k(n, n_right, k):
    """The chance that k of the n samples, drawn without replacement, contain a right one."""
    return 1 - math.comb(n - n_right, k) / math.comb(n, k)


def main(model, path, n=16):
    problems = [json.loads(line) for line in open(path)]
    llm = LLM(model)
    chats = [[{"role": "user", "content": p["question"]}] for p in problems]
    begin = time.time()
    answers = llm.chat(chats, SamplingParams(n=int(n), temperature=0.8, max_tokens=256, seed=0))
    seconds = time.time() - begin
    right = [sum(is_right(s.text, p["answer"]) for s in a.outputs) for a, p in zip(answers, problems)]
    k = 1
    while k <= int(n):
        print(f"pass@{k} {sum(pass_at_k(int(n), r, k) for r in right) / len(right):.3f}")
        k *= 2
    n_tokens = sum(len(s.token_ids) for a in answers for s in a.outputs)
    n_chars = sum(len(s.text) for a in answers for s in a.outputs)  # tokenizers differ, characters do not
    print(f"{n_tokens / seconds:.0f} tokens/s, {n_chars / seconds:.0f} characters/s")


if not 3 <= len(sys.argv) <= 4:
    sys.exit(__doc__)
main(*sys.argv[1:])
