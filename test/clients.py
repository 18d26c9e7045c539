"""Client libraries against a toka server: calls that must be, results of tools, typed answers, streams; lm-evaluation-harness with
the tokenizer of the server. Needs the libraries (test/results/clients.md names their versions); each that is missing is skipped. Prints
the table.
  python test/clients.py [RECORD]    RECORD gets the requests that they send, for test_clients.py"""
import importlib.metadata
import json
import os
import sys
import tempfile
import urllib.request
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from pydantic import BaseModel  # noqa: E402

from scripted import write_model  # noqa: E402
from server import ROOT, Server  # noqa: E402

TEMPLATE = "{# <tool_call> #}{% for m in messages %}{{ m.content }}{% endfor %}"
CALL = "<tool_call>\n{\"name\": \"Pick\", \"arguments\": {\"side\": \"left\", \"n\": 11}}\n</tool_call>"
SCRIPTS = {"call": CALL, "json": "{\"side\": \"right\", \"n\": 10}", "text": "Nothing to pick."}


class Pick(BaseModel):
    """Picks a side."""
    side: Literal["left", "right"]
    n: int


LEFT, RIGHT = Pick(side="left", n=11), Pick(side="right", n=10)
TOOL = {"type": "function", "function": {"name": "Pick", "parameters": Pick.model_json_schema()}}
NAMED = {"type": "function", "function": {"name": "Pick"}}


def user(text):
    return [{"role": "user", "content": text}]


def post(url, body):
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})) as answer:
        return json.load(answer)


def use_openai(url):
    import openai
    api = openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0)
    parsed = api.chat.completions.parse(model="m", messages=user("json"), response_format=Pick).choices[0].message.parsed
    tools = [openai.pydantic_function_tool(Pick)]
    call = api.chat.completions.parse(model="m", messages=user("call"), tools=tools, tool_choice="required", parallel_tool_calls=False)
    response = api.responses.parse(model="m", input="json", text_format=Pick)
    with api.chat.completions.stream(model="m", messages=user("call"), tools=tools, tool_choice="required", parallel_tool_calls=False) as stream:
        done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
        assert [e.parsed_arguments for e in done] == [LEFT] and stream.get_final_completion().choices[0].finish_reason == "tool_calls"
    with api.responses.stream(model="m", input="json", text_format=Pick) as stream:
        assert stream.get_final_response().output_parsed == RIGHT
    return parsed == RIGHT and call.choices[0].message.tool_calls[0].function.parsed_arguments == LEFT and response.output_parsed == RIGHT


def use_anthropic(url):
    import anthropic
    api = anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)
    tools = [{"name": "Pick", "input_schema": Pick.model_json_schema()}]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "Pick"}):
        with api.messages.stream(model="m", max_tokens=200, messages=user("call"), tools=tools, tool_choice=choice) as stream:
            block, = stream.get_final_message().content
            if block.input != LEFT.model_dump():
                return False
    first = api.messages.create(model="m", max_tokens=200, messages=user("call"), tools=tools)
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "text"}
    history = user("call") + [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    return api.messages.create(model="m", max_tokens=200, messages=history, tools=tools).content[0].text == SCRIPTS["text"]


def use_litellm(url):
    import litellm
    litellm.suppress_debug_info = True
    same = dict(model="openai/m", api_base=url + "/v1", api_key="x")
    call = litellm.completion(messages=user("call"), tools=[TOOL], tool_choice=NAMED, **same).choices[0].message.tool_calls[0].function
    shaped = litellm.completion(messages=user("json"), response_format=Pick, **same).choices[0].message.content
    chunks = list(litellm.completion(messages=user("call"), tools=[TOOL], stream=True, **same))
    built = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0].function
    assert built.name == "Pick" and json.loads(built.arguments) == LEFT.model_dump()
    return json.loads(call.arguments) == LEFT.model_dump() and Pick.model_validate_json(shaped) == RIGHT


def use_langchain(url):
    from langchain_openai import ChatOpenAI
    chat = ChatOpenAI(model="m", base_url=url + "/v1", api_key="x", max_retries=0)
    bound = chat.bind_tools([Pick], tool_choice="required").invoke("call").tool_calls[0]["args"]
    first = chat.bind_tools([Pick]).invoke("call")
    answer = chat.bind_tools([Pick]).invoke([("user", "call"), first, {"role": "tool", "tool_call_id": first.tool_calls[0]["id"], "content": "text"}])
    assert answer.content == SCRIPTS["text"] and "".join(c.content for c in chat.stream("text")) == SCRIPTS["text"]
    methods = [chat.with_structured_output(Pick, method=m).invoke(text) for m, text in (("json_schema", "json"), ("function_calling", "call"))]
    return bound == LEFT.model_dump() and methods == [RIGHT, LEFT]


def use_instructor(url):
    import instructor
    import openai
    api = openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0)
    tools = instructor.from_openai(api, mode=instructor.Mode.TOOLS).chat.completions.create(model="m", messages=user("call"), response_model=Pick)
    shaped = [instructor.from_openai(api, mode=mode).chat.completions.create(model="m", messages=user("json"), response_model=Pick).model_dump()
              for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON)]
    return tools.model_dump() == LEFT.model_dump() and shaped == [RIGHT.model_dump()] * 2  # they are of types of its own


def use_pydantic_ai(url):
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=url + "/v1", api_key="x"))
    native = Agent(model, output_type=NativeOutput(Pick)).run_sync("json").output
    typed = Agent(model, output_type=Pick).run_sync("text").output  # by a call of a tool, which is required
    agent, called = Agent(model), []

    @agent.tool_plain(name="Pick")
    def pick(side: Literal["left", "right"], n: int) -> str:
        called.append(Pick(side=side, n=n))
        return "text"

    answer = agent.run_sync("call").output
    return native == RIGHT and isinstance(typed, Pick) and called == [LEFT] and answer == SCRIPTS["text"]


def use_outlines(url):
    import openai
    import outlines
    model = outlines.from_openai(openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0), "m")
    return Pick.model_validate_json(model("json", Pick)) == RIGHT


HARNESS = [{"problem": "Tom has 12 apples.", "choices": [" He buys 7 more apples.", " Each box holds", " She"], "gold": 0},
           {"problem": "Each box holds 6 eggs.", "choices": [" How many eggs", " x"], "gold": 0}]


def use_lm_eval(url):
    """Log-probabilities and greedy texts of the embedded model, as the harness reads them, are those of the server's other routes."""
    import lm_eval
    from lm_eval.tasks import TaskManager
    folder = tempfile.mkdtemp()
    with open(os.path.join(folder, "docs.json"), "w") as f:
        f.write("".join(json.dumps(doc) + "\n" for doc in HARNESS))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": os.path.join(folder, "docs.json")}}, "test_split": "test",
              "doc_to_text": "{{problem}}", "target_delimiter": ""}
    scored = {**common, "task": "scored", "output_type": "multiple_choice", "doc_to_target": "{{gold}}", "doc_to_choice": "{{choices}}"}
    made = {**common, "task": "made", "output_type": "generate_until", "doc_to_target": "-", "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12}}
    for task in (scored, made):
        with open(os.path.join(folder, task["task"] + ".yaml"), "w") as f:
            json.dump(task, f)  # JSON is YAML

    def evaluate(kind, path, tasks, **more):
        out = lm_eval.simple_evaluate(model=kind, model_args={"model": "tiny", "base_url": url + path, **more}, tasks=tasks, limit=2, verbosity="ERROR",
                                      task_manager=TaskManager(include_path=folder, include_defaults=False), apply_chat_template="chat" in kind)
        return [[r[0] for r in s["filtered_resps"]] if t == "scored" else s["filtered_resps"][0] for t in tasks for s in out["samples"][t]]

    scores = evaluate("local-completions", "/v1/completions", ["scored", "made"], tokenizer_backend="remote")
    texts = evaluate("local-chat-completions", "/v1/chat/completions", ["made"], eos_string="<|endoftext|>")
    for i, doc in enumerate(HARNESS):
        for choice, score in zip(doc["choices"], scores[i]):
            body = {"model": "tiny", "prompt": doc["problem"] + choice, "max_tokens": 0, "echo": True, "logprobs": 0, "add_special_tokens": False}
            logprobs = post(url + "/v1/completions", body)["choices"][0]["logprobs"]
            want = sum(p for p, at in zip(logprobs["token_logprobs"], logprobs["text_offset"]) if at >= len(doc["problem"]))
            assert abs(want - score) < 1e-3, (want, score)
        for path, text in (("/v1/completions", scores[2 + i]), ("/v1/chat/completions", texts[i])):
            body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "stop": ["\n\n"], "prompt": doc["problem"], "messages": user(doc["problem"])}
            body.pop("messages" if path == "/v1/completions" else "prompt")
            body.update({"add_special_tokens": False} if path == "/v1/completions" else {})
            choice = post(url + path, body)["choices"][0]
            assert text == choice.get("text", choice.get("message", {}).get("content")), (path, text, choice)
    return True


CLIENTS = [("openai", use_openai), ("anthropic", use_anthropic), ("litellm", use_litellm), ("langchain-openai", use_langchain),
           ("instructor", use_instructor), ("pydantic-ai-slim", use_pydantic_ai), ("outlines", use_outlines), ("lm_eval", use_lm_eval)]


def record(sent, current):
    """Appends what every library sends to a list, with the library's name, current[-1]: they use httpx or httpx2, the harness requests."""
    import importlib

    def keep(path, content):
        sent.append({"client": current[-1], "path": path, "body": json.loads(content)})

    for name in ("httpx", "httpx2"):
        module = importlib.import_module(name)
        for kind in (module.Client, module.AsyncClient):
            def send(self, request, *args, _send=kind.send, **more):
                if request.method == "POST":
                    keep(request.url.path, request.content)
                return _send(self, request, *args, **more)
            kind.send = send
    session = importlib.import_module("requests").Session

    def send_prepared(self, request, *args, _send=session.send, **more):
        if request.method == "POST" and "/v1/" in request.url:
            keep(request.path_url, request.body)
        return _send(self, request, *args, **more)

    session.send = send_prepared


def main():
    os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", HF_DATASETS_OFFLINE="1")
    folder, failed, sent, current = tempfile.mkdtemp(), 0, [], []
    if len(sys.argv) > 1:
        record(sent, current)
    write_model(folder, SCRIPTS, TEMPLATE)
    model = os.path.join(ROOT, "test", "model")
    print("| library | version | result |\n|---|---|---|")
    with Server("-m", folder, "--served-model-name", "m") as s, Server("-m", model, "--served-model-name", "tiny") as tiny:
        for name, use in CLIENTS:
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                print(f"| {name} | | not installed |")
                continue
            current.append(name)
            try:
                result = "passed" if use(f"http://127.0.0.1:{(tiny if name == 'lm_eval' else s).address[1]}") else "wrong answer"
            except Exception as e:  # any failure of a library is a row
                result = f"{type(e).__name__}: {str(e)[:150]}".replace("\n", " ")
            failed += result != "passed"
            print(f"| {name} | {version} | {result} |", flush=True)
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as f:
            f.write("".join(json.dumps(r) + "\n" for r in sent))
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
