#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A scan over a code base: asks one question about each file and writes a line of JSON for each. The answer is JSON, too, valid for
SCHEMA or for that of a file. All files share the beginning of the prompt, so it is computed once. Files that are too long are cut.

    scan.py MODEL FOLDER PATTERN out.jsonl "Does this file open a network connection, and where?" [schema.json]
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from toka import LLM, SamplingParams, StructuredOutputsParams

MAX_TOKENS = 200  # of an answer
SCHEMA = {"type": "object", "properties": {"answer": {"enum": ["yes", "no", "unclear"]}, "where": {"type": "string", "maxLength": 100}},
          "required": ["answer", "where"], "additionalProperties": False}


def prompt_of(llm, question, text):
    """The ids of a chat about this text, as much of it as fits."""
    room = llm.info["max_model_len"] - MAX_TOKENS - 1
    while True:
        chat = [{"role": "user", "content": f"{question}\n\n{text}"}]
        ids = llm.encode(llm.apply_chat_template(chat), add_special_tokens=False)
        if len(ids) <= room:
            return {"prompt_token_ids": ids}
        text = text[:int(len(text) * room / len(ids)) - 10]


def answer_of(sample):
    """The answer as JSON; null if it was cut at MAX_TOKENS."""
    return json.loads(sample.text) if sample.finish_reason == "stop" else None


def main(model, folder, pattern, out, question, schema_file=None):
    schema = json.loads(Path(schema_file).read_text()) if schema_file else SCHEMA
    files = sorted(p for p in Path(folder).rglob(pattern) if p.is_file())
    llm = LLM(model)
    question += f" Answer with JSON that is valid for this schema: {json.dumps(schema)}"
    prompts = [prompt_of(llm, question, path.read_text(errors="replace")) for path in files]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS,
                            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    with open(out, "w") as file:
        for path, answer in zip(files, llm.generate(prompts, params)):
            sample = answer.outputs[0]
            file.write(json.dumps({"file": str(path), "answer": answer_of(sample), "prompt_tokens": len(answer.prompt_token_ids),
                                   "logprob": round(sample.cumulative_logprob, 3)}) + "\n")
    print(f"{len(files)} files")


if not 6 <= len(sys.argv) <= 7:
    sys.exit(__doc__)
main(*sys.argv[1:])
