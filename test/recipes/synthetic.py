#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Synthetic data with a filter: many continuations of some beginnings; what ended by itself, is likely enough and is not there
twice is written.

    synthetic.py MODEL beginnings.txt out.jsonl [N]
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from toka import LLM, SamplingParams

MIN_MEAN_LOGPROB = -1.5  # a text whose tokens are less likely than this on average is noise


def is_good(sample):
    return sample.finish_reason == "stop" and len(sample.token_ids) > 3 and sample.logprobs.mean() > MIN_MEAN_LOGPROB


def main(model, path, out, n=8):
    beginnings = [line.rstrip("\n") for line in open(path) if line.strip()]
    llm = LLM(model)
    answers = llm.generate(beginnings, SamplingParams(n=int(n), temperature=1, max_tokens=200, seed=0))
    seen, n_samples = set(), 0
    with open(out, "w") as file:
        for beginning, answer in zip(beginnings, answers):
            for sample in answer.outputs:
                n_samples += 1
                text = beginning + sample.text
                if is_good(sample) and text not in seen:
                    seen.add(text)
                    file.write(json.dumps({"text": text, "mean_logprob": round(float(sample.logprobs.mean()), 4)}) + "\n")
    print(f"{len(seen)} of {n_samples} texts are kept")


if not 4 <= len(sys.argv) <= 5:
    sys.exit(__doc__)
main(*sys.argv[1:])
