"""The requests that client libraries sent (clients.py recorded them in clients.jsonl) get the typed answers that the libraries want."""
import json
import os

import pytest

from clients import LEFT, RIGHT, SCRIPTS, TEMPLATE, Pick
from scripted import write_model
from server import Server

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "clients.jsonl")) as f:
    REQUESTS = [json.loads(line) for line in f]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("clients"))
    write_model(folder, SCRIPTS, TEMPLATE)
    with Server("-m", folder, "--served-model-name", "m") as s:
        yield s


@pytest.mark.parametrize("request_of_a_client", REQUESTS, ids=range(len(REQUESTS)))
def test_recorded_requests(server, request_of_a_client):
    body = request_of_a_client["body"]
    answer = server.post(request_of_a_client["path"], body)
    assert answer.status == 200, answer.body
    if request_of_a_client["path"] == "/v1/responses":
        asked, text = body["input"], answer.json()["output"][0]["content"][0]["text"]
    else:
        asked, message = body["messages"][0]["content"], answer.json()["choices"][0]["message"]
        text = message["tool_calls"][0]["function"]["arguments"] if body.get("tools") else message["content"]
        assert not (body.get("tools") and message["content"])
    value = Pick.model_validate_json(text)
    assert asked == "text" or value == {"call": LEFT, "json": RIGHT}[asked]
