#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rejection sampling with a verifier: rounds of samples until each problem has WANT right answers or the rounds are over. Only
problems that still miss some are asked again. The right ones become chats for training.

    reject.py MODEL problems.jsonl out.jsonl [WANT] [ROUNDS]     a line: {"question": "...", "answer": "17"}
"""
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from toka import LLM, SamplingParams


def is_right(text, answer):  # the verifier: any function of a text
    numbers = re.findall(r"-?\d+", text)
    return bool(numbers) and numbers[-1] == str(answer)


def main(model, path, out, want=4, rounds=4):
    problems = [json.loads(line) for line in open(path)]
    llm = LLM(model)
    found = [[] for _ in problems]
    for number in range(int(rounds)):
        missing = [i for i in range(len(problems)) if len(found[i]) < int(want)]
        if not missing:
            break
        chats = [[{"role": "user", "content": problems[i]["question"]}] for i in missing]
        params = SamplingParams(n=2 * int(want), temperature=0.8, max_tokens=256, seed=number)
        for i, answer in zip(missing, llm.chat(chats, params)):
            for sample in answer.outputs:
                if is_right(sample.text, problems[i]["answer"]) and sample.text not in found[i]:
                    found[i].append(sample.text)
        print(f"round {number}: {len(missing)} problems, {sum(len(f) >= int(want) for f in found)} have enough")
    with open(out, "w") as file:
        for problem, texts in zip(problems, found):
            for text in texts[:int(want)]:
                messages = [{"role": "user", "content": problem["question"]}, {"role": "assistant", "content": text}]
                file.write(json.dumps({"messages": messages}) + "\n")


if not 4 <= len(sys.argv) <= 6:
    sys.exit(__doc__)
main(*sys.argv[1:])
