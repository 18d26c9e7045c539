#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A scan over a code base: asks one question about each file and writes a line of JSON for each. All files share the beginning of
the prompt, so it is computed once. Files that are too long are cut at the end.

    scan.py MODEL FOLDER PATTERN out.jsonl "Does this file open a network connection? Answer yes or no, then say where."
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from toka import LLM, SamplingParams

MAX_TOKENS = 100  # of an answer


def prompt_of(llm, question, text):
    """The ids of a chat about this text, as much of it as fits."""
    room = llm.info["max_model_len"] - MAX_TOKENS - 1
    while True:
        chat = [{"role": "user", "content": f"{question}\n\n{text}"}]
        ids = llm.encode(llm.apply_chat_template(chat), add_special_tokens=False)
        if len(ids) <= room:
            return {"prompt_token_ids": ids}
        text = text[:int(len(text) * room / len(ids)) - 10]


def main(model, folder, pattern, out, question):
    files = sorted(p for p in Path(folder).rglob(pattern) if p.is_file())
    llm = LLM(model)
    prompts = [prompt_of(llm, question, path.read_text(errors="replace")) for path in files]
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    with open(out, "w") as file:
        for path, answer in zip(files, answers):
            sample = answer.outputs[0]
            file.write(json.dumps({"file": str(path), "answer": sample.text.strip(), "prompt_tokens": len(answer.prompt_token_ids),
                                   "logprob": round(sample.cumulative_logprob, 3)}) + "\n")
    print(f"{len(files)} files")


main(*sys.argv[1:])
