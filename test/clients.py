"""Client libraries against a toka server: calls that must be, typed answers, streams. Needs the libraries (test/results/clients.md names
their versions); each that is missing is skipped. Prints the table.
  python test/clients.py [RECORD]    RECORD gets the requests that they send, for test_clients.py"""
import importlib.metadata
import json
import os
import sys
import tempfile
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from pydantic import BaseModel  # noqa: E402

from scripted import write_model  # noqa: E402
from server import Server  # noqa: E402

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


def use_openai(url):
    import openai
    api = openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0)
    parsed = api.chat.completions.parse(model="m", messages=user("json"), response_format=Pick).choices[0].message.parsed
    tools = [openai.pydantic_function_tool(Pick)]
    call = api.chat.completions.parse(model="m", messages=user("call"), tools=tools, tool_choice="required", parallel_tool_calls=False)
    response = api.responses.parse(model="m", input="json", text_format=Pick)
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
    return True


def use_litellm(url):
    import litellm
    same = dict(model="openai/m", api_base=url + "/v1", api_key="x")
    call = litellm.completion(messages=user("call"), tools=[TOOL], tool_choice=NAMED, **same).choices[0].message.tool_calls[0].function
    shaped = litellm.completion(messages=user("json"), response_format=Pick, **same).choices[0].message.content
    return json.loads(call.arguments) == LEFT.model_dump() and Pick.model_validate_json(shaped) == RIGHT


def use_langchain(url):
    from langchain_openai import ChatOpenAI
    chat = ChatOpenAI(model="m", base_url=url + "/v1", api_key="x", max_retries=0)
    bound = chat.bind_tools([Pick], tool_choice="required").invoke("call").tool_calls[0]["args"]
    methods = [chat.with_structured_output(Pick, method=m).invoke(text) for m, text in (("json_schema", "json"), ("function_calling", "call"))]
    return bound == LEFT.model_dump() and methods == [RIGHT, LEFT]


def use_instructor(url):
    import instructor
    import openai
    api = openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0)
    tools = instructor.from_openai(api, mode=instructor.Mode.TOOLS).chat.completions.create(model="m", messages=user("call"), response_model=Pick)
    shaped = instructor.from_openai(api, mode=instructor.Mode.JSON_SCHEMA).chat.completions.create(model="m", messages=user("json"), response_model=Pick)
    return (tools.model_dump(), shaped.model_dump()) == (LEFT.model_dump(), RIGHT.model_dump())  # they are of types of its own


def use_pydantic_ai(url):
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=url + "/v1", api_key="x"))
    native = Agent(model, output_type=NativeOutput(Pick)).run_sync("json").output
    typed = Agent(model, output_type=Pick).run_sync("text").output  # by a call of a tool, which is required
    return native == RIGHT and isinstance(typed, Pick)


def use_outlines(url):
    import openai
    import outlines
    model = outlines.from_openai(openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0), "m")
    return Pick.model_validate_json(model("json", Pick)) == RIGHT


CLIENTS = [("openai", use_openai), ("anthropic", use_anthropic), ("litellm", use_litellm), ("langchain-openai", use_langchain),
           ("instructor", use_instructor), ("pydantic-ai-slim", use_pydantic_ai), ("outlines", use_outlines)]


def record(sent):
    """Appends what every library sends to a list: all of them use httpx."""
    import httpx

    def keep(request):
        if request.method == "POST":
            sent.append({"path": request.url.path, "body": json.loads(request.content)})

    for kind in (httpx.Client, httpx.AsyncClient):
        def send(self, request, *args, _send=kind.send, **more):
            keep(request)
            return _send(self, request, *args, **more)
        kind.send = send


def main():
    folder, failed, sent = tempfile.mkdtemp(), 0, []
    record(sent)
    write_model(folder, SCRIPTS, TEMPLATE)
    print("| library | version | result |\n|---|---|---|")
    with Server("-m", folder, "--served-model-name", "m") as s:
        for name, use in CLIENTS:
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                print(f"| {name} | | not installed |")
                continue
            try:
                result = "passed" if use(f"http://127.0.0.1:{s.address[1]}") else "wrong answer"
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
