"""The requests that client libraries sent (clients.py recorded them in clients.jsonl) get the answers that the libraries want: typed
ones, calls, and what follows the result of a tool; whole and streamed."""
import json
import os

import pytest

from clients import CLIENTS, LEFT, RIGHT, SCRIPTS, TEMPLATE, Pick
from scripted import write_model
from server import ROOT, Server

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "clients.jsonl")) as f:
    REQUESTS = [json.loads(line) for line in f]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """By the name of the model: one with scripts, and the embedded one, for lm-evaluation-harness."""
    folder = str(tmp_path_factory.mktemp("clients"))
    write_model(folder, SCRIPTS, TEMPLATE)
    with Server("-m", folder, "--served-model-name", "m") as m, Server("-m", os.path.join(ROOT, "test/model"), "--served-model-name", "tiny") as tiny:
        yield {"m": m, "tiny": tiny}


def send(server, path, body):
    """The answer. That of a stream is joined from its events."""
    answer = server.post(path, body)
    assert answer.status == 200, answer.body
    if not body.get("stream"):
        return answer.json()
    events = [json.loads(line[6:]) for line in answer.body.decode().split("\n") if line.startswith("data: {")]
    if path == "/v1/responses":
        return events[-1]["response"]
    if path == "/v1/messages":
        text = "".join(e["delta"].get("partial_json", e["delta"].get("text", "")) for e in events if e["type"] == "content_block_delta")
        return {"content": [{"input": json.loads(text)} if text.startswith("{") else {"text": text}]}
    deltas = [c["delta"] for e in events for c in e["choices"]]
    calls = "".join(t["function"]["arguments"] for d in deltas for t in d.get("tool_calls", []))
    return {"choices": [{"message": {"content": "".join(d.get("content") or "" for d in deltas), **({"tool_calls": [{"function": {"arguments": calls}}]} if calls else {})}}]}


def check_scores(body, answer):
    """As the harness reads them: a token of the answer, behind those of the prompt."""
    choice, = answer["choices"]
    if "echo" not in body:
        assert choice.get("text", choice.get("message", {}).get("content"))
        return
    scores = choice["logprobs"]["token_logprobs"]
    assert len(scores) == len(body["prompt"][0]) + 1 and scores[0] is None and all(s < 0 for s in scores[1:]) and len(choice["logprobs"]["top_logprobs"]) == len(scores)


def test_every_library_has_requests():
    assert [name for i, name in enumerate(r["client"] for r in REQUESTS) if not i or REQUESTS[i - 1]["client"] != name] == [name for name, _ in CLIENTS]


@pytest.mark.parametrize("path, body", [(r["path"], r["body"]) for r in REQUESTS], ids=[f"{i}-{r['client']}" for i, r in enumerate(REQUESTS)])
def test_recorded_requests(servers, path, body):
    answer = send(servers[body["model"]], path, body)
    if body["model"] == "tiny":
        check_scores(body, answer)
        return
    asked, tools = body.get("input"), body.get("tools")
    if asked is None:
        last = body["messages"][-1]["content"]
        asked = last if isinstance(last, str) else last[0].get("content") or last[0]["text"]
    if path == "/v1/responses":
        text = answer["output"][0]["content"][0]["text"]
    elif path == "/v1/messages":
        block, = answer["content"]
        text = json.dumps(block["input"]) if "input" in block else block["text"]
    else:
        message = answer["choices"][0]["message"]
        text = message["tool_calls"][0]["function"]["arguments"] if message.get("tool_calls") else message["content"]
        assert not (message.get("tool_calls") and message["content"])
    if asked == "text" and (not tools or body.get("tool_choice", "auto") == "auto"):
        assert text == SCRIPTS["text"]
    else:
        value = Pick.model_validate_json(text)
        assert asked == "text" or value == {"call": LEFT, "json": RIGHT}[asked.strip().split("\n")[0]]
