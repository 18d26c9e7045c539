"""Tool calls and reasoning with the openai client, whole and streamed, against models whose answers are scripted (scripted.py)."""
import json
import os
import re
import subprocess
import time

import jsonschema
import openai
import pytest
import tokenizers

from scripted import write_model
from server import ROOT, TOKA, Server

DS = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": {
             "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}},
         {"type": "function", "function": {"name": "get_time"}}]
HERMES = "{# <tool_call> <think> </think> #}{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}" \
         "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments.city }}{% endfor %}{% endfor %}" \
         "{% if tools %}{{ tools | length }}{% endif %}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
SCRIPTS = {
    "one": "Let me look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich</tool_call>\", \"days\": 2}}\n</tool_call>",
    "two": "\n<tool_call>{\"name\":\"get_weather\",\"arguments\":{\"city\":\"Ulm\"}}</tool_call>\n<tool_call>{\"name\":\"get_time\"}</tool_call>\n",
    "bad": "<tool_call>{'name': \"get_time\", 5}</tool_call> sorry",
    "think": "<think>\nHe wants a <tool_call>{...}.\n</think>\n\nIt is <b>noon</b>.",
    "both": "<think>Look it up: yes.</think>\n<tool_call>{\"name\": \"get_time\", \"arguments\": {\"zone\": \"CET 1\"}}</tool_call>",
    "long": "<tool_call>{\"name\": \"get_weather\", \"arguments\": {\"city\": \"" + " ".join(map(str, range(1000, 1300))) + "\"}}</tool_call>",
    "text": "No tools here; <tool_cal is text.",
    "broken": "<tool_call>{\"name\": \"get_weather\", \"arguments\": {\"city\": \"" + " ".join(map(str, range(3000, 3200))) + "\" oops}}</tool_call>",
}
DEEPSEEK = {"calls": "Ok." + DS[0] + DS[1] + "function" + DS[2] + "get_time\n```json\n{\"zone\": \"UTC\"}\n```" + DS[3] + DS[4]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("hermes"))
    write_model(folder, SCRIPTS, HERMES)
    with Server("-m", folder, "--served-model-name", "m", "--enable-auto-tool-choice") as s:
        yield s


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A client of a server whose model does not think: forced off its script it would begin to, and not end."""
    folder = str(tmp_path_factory.mktemp("plain"))
    write_model(folder, SCRIPTS, HERMES)
    with Server("-m", folder, "--served-model-name", "m", "--reasoning-parser", "none") as s:
        yield client(s)


HARMONY = {
    "calls": "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>"
             "{\"zone\": \"UTC\"}",
    "pick": "<|channel|>analysis<|message|>Up?<|end|><|start|>assistant to=functions.pick<|channel|>commentary <|constrain|>json<|message|>{\"side\": \"up\"}",
    "final": "<|channel|>analysis<|message|>I know: 2.<|end|><|start|>assistant<|channel|>final<|message|>Two, is it not?",
}


def client(s):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{s.address[1]}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def api(server):
    return client(server)


def ask(api, name, **more):
    return api.chat.completions.create(model="m", messages=[{"role": "user", "content": name}], temperature=0, **more)


def join(stream):
    """The message of a stream, joined as clients do it, and its finish_reason."""
    content, reasoning, calls, finish = "", "", [], None
    for chunk in stream:
        for choice in chunk.choices:
            assert finish is None
            delta, finish = choice.delta, choice.finish_reason
            content += delta.content or ""
            assert (getattr(delta, "reasoning", None) or "") == (getattr(delta, "reasoning_content", None) or "")
            reasoning += getattr(delta, "reasoning", None) or ""
            assert "tool_calls" not in delta.model_fields_set or delta.tool_calls  # absent or not empty
            for call in delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(calls) and call.type == "function" and call.function.arguments == ""
                    calls.append([call.id, call.function.name, ""])
                else:
                    assert call.index == len(calls) - 1 and call.function.name is None and call.type is None
                    calls[-1][2] += call.function.arguments
    return content, reasoning, calls, finish


def whole(answer):
    choice, = answer.choices
    message = choice.message
    assert "tool_calls" not in message.model_fields_set or message.tool_calls  # absent, not []
    calls = [[c.id, c.function.name, c.function.arguments] for c in message.tool_calls or []]
    return message.content, getattr(message, "reasoning", ""), calls, choice.finish_reason


def both(api, name, **more):
    """The answer, which is the same whole and streamed, but for the ids of calls."""
    one, two = whole(ask(api, name, **more)), join(ask(api, name, stream=True, **more))
    assert (one[0] or "", one[1], one[3]) == (two[0], two[1], two[3])
    assert [c[1:] for c in one[2]] == [c[1:] for c in two[2]] and all(c[0].startswith("call_") and len(c[0]) == 29 for c in one[2] + two[2])
    assert len({c[0] for c in one[2] + two[2]}) == len(one[2] + two[2])
    return one[0], one[1], [(c[1], c[2]) for c in one[2]], one[3]


def test_calls(api):
    assert both(api, "one", tools=TOOLS) == ("Let me look.", "", [("get_weather", '{"city": "Zürich</tool_call>", "days": 2}')], "tool_calls")
    assert both(api, "two", tools=TOOLS) == (None, "", [("get_weather", '{"city":"Ulm"}'), ("get_time", "{}")], "tool_calls")
    assert both(api, "two", tools=TOOLS, parallel_tool_calls=False) == (None, "", [("get_weather", '{"city":"Ulm"}')], "tool_calls")
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]}}
    content, _, calls, _ = both(api, "two", tools=TOOLS, tool_choice=allowed, max_tokens=60)  # the script begins with get_weather
    assert {name for name, _ in calls} <= {"get_time"} and "get_weather" not in (content or "")


def test_calls_that_are_text(api):
    assert both(api, "bad", tools=TOOLS) == (SCRIPTS["bad"], "", [], "stop")
    assert both(api, "text", tools=TOOLS) == (SCRIPTS["text"], "", [], "stop")
    assert both(api, "broken", tools=TOOLS) == (SCRIPTS["broken"], "", [], "stop")  # however long it is
    assert both(api, "one", tools=TOOLS, tool_choice="none") == (SCRIPTS["one"], "", [], "stop")
    assert both(api, "one") == (SCRIPTS["one"], "", [], "stop")
    content, _, calls, finish = both(api, "one", tools=TOOLS, max_tokens=12)
    assert SCRIPTS["one"].startswith(content) and "<tool_call>" in content and not calls and finish == "length"


def test_a_long_call_is_streamed(api):
    """One that a constraint makes valid; others come when they are complete, because they may be malformed."""
    for strict in (True, False):
        tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": strict}}]
        _, _, calls, _ = both(api, "long", tools=tools)
        assert json.loads(calls[0][1])["city"].endswith("1299")
        deltas = [d for c in ask(api, "long", tools=tools, stream=True) for d in c.choices[0].delta.tool_calls or []]
        assert len(deltas) > 50 if strict else len(deltas) == 2


def test_reasoning(api):
    for tools in ({}, {"tools": TOOLS}):
        assert both(api, "think", **tools) == ("It is <b>noon</b>.", "He wants a <tool_call>{...}.", [], "stop")
    assert both(api, "both", tools=TOOLS) == (None, "Look it up: yes.", [("get_time", '{"zone": "CET 1"}')], "tool_calls")
    usage = ask(api, "think").usage
    assert 3 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    chunks = list(ask(api, "think", stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens_details == usage.completion_tokens_details and chunks[-1].usage.completion_tokens == usage.completion_tokens
    message = ask(api, "think").choices[0].message
    assert message.reasoning == message.reasoning_content == "He wants a <tool_call>{...}."
    assert both(api, "think", extra_body={"include_reasoning": False})[:2] == ("It is <b>noon</b>.", "")
    cut = ask(api, "think", max_tokens=5).choices[0]
    assert cut.message.content is None and cut.finish_reason == "length" and cut.message.reasoning.startswith("He")


def test_several_samples(api):
    answer = ask(api, "both", tools=TOOLS, n=3)
    ids = [c.message.tool_calls[0].id for c in answer.choices]
    assert len(set(ids)) == 3 and all(c.message.reasoning == "Look it up: yes." for c in answer.choices)
    texts = ["", "", ""]
    for chunk in ask(api, "both", tools=TOOLS, n=3, stream=True):
        for c in chunk.choices:
            texts[c.index] += "".join(t.function.arguments for t in c.delta.tool_calls or [])
    assert texts == ['{"zone": "CET 1"}'] * 3


def test_a_conversation(server, api):
    """The answer goes back as clients send it: arguments are a text, the template gets an object."""
    first = ask(api, "one", tools=TOOLS).choices[0].message
    messages = [{"role": "user", "content": "one"}, first.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"}, {"role": "user", "content": "text"}]
    answer = api.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == SCRIPTS["text"]
    shown = server.post("/tokenize", {"model": "m", "messages": messages, "tools": TOOLS}).json()["tokens"]
    text = server.post("/detokenize", {"model": "m", "tokens": shown}).json()["prompt"]
    assert text.startswith("[user]one[assistant]Let me look.get_weatherZürich</tool_call>[tool]sunny[user]text2<go:text>")
    shown = server.post("/tokenize", {"model": "m", "messages": [{"role": "assistant", "content": "a", "reasoning": "r"}, messages[0]],
                                      "reasoning_effort": "none"}).json()["tokens"]
    text = server.post("/detokenize", {"model": "m", "tokens": shown}).json()["prompt"]
    assert text == "[assistant](r)a[user]oneFalse<go:one>"


def test_continue_final_message(server, api):
    def rendered(*messages, **more):
        return server.post("/tokenize", {"messages": list(messages), **more})

    def text(*messages, **more):
        return server.post("/detokenize", {"tokens": rendered(*messages, **more).json()["tokens"]}).json()["prompt"]

    user, half = {"role": "user", "content": "u"}, {"role": "assistant", "content": "half a \n"}
    assert text(user, half, continue_final_message=True) == "[user]u[assistant]half a \n"
    assert text(user, {**half, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]}, continue_final_message=True).endswith("b")
    for prefill in ("u", "e", "[", "assistant", "<go", "False"):  # texts that stand in the rest of the prompt, too
        assert text(user, {**half, "content": prefill}, continue_final_message=True, reasoning_effort="none") == "[user]u[assistant]" + prefill
    parts = [{"type": "text", "text": "u"}, {"type": "text", "text": "e"}]
    assert text(user, {**half, "content": parts}, continue_final_message=True) == "[user]u[assistant]u\ne"
    assert text(user, half).endswith("<go:u>") and text(user, half, add_generation_prompt=False) == text(user, half)
    for more in ({"continue_final_message": True, "add_generation_prompt": True}, {"continue_final_message": True, "messages": [user, {**half, "content": ""}]}):
        answer = rendered(user, half, **more)
        assert answer.status == 400 and answer.error()["param"] == "continue_final_message"
    # what is continued is reasoning if its block is open
    for content, key in (("<think>\nHm", "reasoning"), ("<think>a</think> b", "content")):
        body = {"messages": [user, {"role": "assistant", "content": content}], "continue_final_message": True, "max_tokens": 3, "logit_bias": {"50": 100}}
        message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        assert message[key] and not message.get("content" if key == "reasoning" else "reasoning")


def pick(**properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


PICK = [{"type": "function", "function": {"name": "pick", "parameters": pick(side={"enum": ["left", "right"]}, n={"type": "integer", "minimum": 10, "maximum": 12})}},
        {"type": "function", "function": {"name": "stop"}}]
NAMED = {"type": "function", "function": {"name": "pick"}}


def valid(call):
    arguments = json.loads(call[1])
    assert call[0] == "stop" and arguments == {} or (arguments["side"] in ("left", "right") and arguments["n"] in (10, 11, 12) and len(arguments) == 2)
    return call[0]


def test_calls_that_must_be(api, plain):
    """A model that wants to say something else must call; one that wants to call says what it would have said."""
    content, _, calls, finish = both(plain, "text", tools=PICK, tool_choice=NAMED)
    assert not content and [valid(c) for c in calls] == ["pick"] and finish == "stop"
    content, _, calls, finish = both(plain, "text", tools=PICK, tool_choice="required", parallel_tool_calls=False)
    assert not content and [valid(c) for c in calls] and finish == "tool_calls"
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "stop"}}]}}
    assert {valid(c) for c in both(plain, "bad", tools=PICK, tool_choice=allowed, parallel_tool_calls=False)[2]} == {"stop"}
    content, _, calls, finish = both(plain, "two", tools=TOOLS, tool_choice="required")
    assert not content and calls[0] == ("get_weather", '{"city":"Ulm"}') and calls[1][0] == "get_time" and json.loads(calls[1][1]) == {} and finish == "tool_calls"
    one = both(plain, "two", tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert one == (None, "", [("get_weather", '{"city":"Ulm"}')], "tool_calls")
    # the reasoning is free, what follows it is not
    content, reasoning, calls, _ = both(api, "think", tools=PICK, tool_choice=NAMED)
    assert not content and reasoning == "He wants a <tool_call>{...}." and [valid(c) for c in calls] == ["pick"]
    choices = ask(plain, "text", tools=PICK, tool_choice=NAMED, n=4, extra_body={"seed": 5}).choices
    assert [valid((c.function.name, c.function.arguments)) for choice in choices for c in choice.message.tool_calls] == ["pick"] * 4


def test_strict_functions(api, plain):
    """With tool_choice auto text stays text, and a call of a strict function is valid."""
    strict = [{"type": "function", "function": {**PICK[0]["function"], "name": "get_weather", "strict": True}}, TOOLS[1]]
    assert both(plain, "text", tools=strict) == (SCRIPTS["text"], "", [], "stop")
    assert both(api, "think", tools=strict) == ("It is <b>noon</b>.", "He wants a <tool_call>{...}.", [], "stop")
    content, _, calls, finish = both(plain, "one", tools=strict)
    assert content == "Let me look." and valid(("pick", calls[0][1])) and calls[0][0] == "get_weather"
    # a function that is not strict gets any object
    assert both(api, "both", tools=strict)[2] == [("get_time", '{"zone": "CET 1"}')]


def test_response_formats_with_reasoning_and_tools(api):
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": pick(side={"enum": ["left", "right"]})}}
    content, reasoning, calls, finish = both(api, "think", response_format=shape)
    assert json.loads(content)["side"] in ("left", "right") and reasoning == "He wants a <tool_call>{...}." and finish == "stop"
    assert both(api, "both", tools=TOOLS, response_format=shape)[1:] == ("Look it up: yes.", [("get_time", '{"zone": "CET 1"}')], "tool_calls")
    strict = [{"type": "function", "function": {**t["function"], "strict": True}} for t in PICK]
    content, _, calls, _ = both(api, "think", tools=strict, response_format=shape, parallel_tool_calls=False)
    assert [valid(c) for c in calls] if calls else json.loads(content)["side"] in ("left", "right")
    for extra, want in (({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")), ({"structured_outputs": {"regex": "ab?c"}}, ("abc", "ac")),
                        ({"guided_grammar": "root ::= \"x\" | \"yy\""}, ("x", "yy"))):
        content, reasoning, _, _ = both(api, "think", extra_body=extra)
        assert content in want and reasoning
    assert both(api, "think", tools=PICK, tool_choice="required", response_format=shape, parallel_tool_calls=False)[2]


XML = {
    "model": '<tool_call>\n<function=book>\n<parameter=room>\n{"beds": 2}\n</parameter>\n<parameter=code>\n"5"\n</parameter>\n</function>\n</tool_call>',
    "torn": '{"side": "use <tool_call><function=get_time></function></tool_call> so"}',
}


@pytest.fixture(scope="module")
def xml(tmp_path_factory):
    """Calls in the form of Qwen3-Coder, whose values have no quotes."""
    folder = str(tmp_path_factory.mktemp("xml"))
    write_model(folder, XML, "{# <function= <parameter= #}{{ thinking }}")
    with Server("-m", folder, "--served-model-name", "m") as s:
        yield s


def test_the_other_name_of_thinking(xml):
    """The templates of DeepSeek and Granite ask for `thinking`, not `enable_thinking`."""
    user = [{"role": "user", "content": "torn"}]
    for body, want in (({}, ""), ({"reasoning_effort": "none"}, "False"), ({"reasoning_effort": "high"}, "True"),
                       ({"reasoning_effort": "none", "chat_template_kwargs": {"thinking": "K"}}, "K")):
        tokens = xml.post("/tokenize", {"messages": user, **body}).json()["tokens"]
        assert xml.post("/detokenize", {"tokens": tokens}).json()["prompt"] == want + "<go:torn>"
    for kind, n in (("enabled", 4), ("adaptive", 4), ("disabled", 5)):
        counted = xml.post("/v1/messages/count_tokens", {"messages": user, "thinking": {"type": kind}}).json()["input_tokens"]
        assert counted == 1 + n


def test_json_that_contains_a_call(xml):
    xml = client(xml)
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": pick(side={"type": "string"})}}
    assert both(xml, "torn", tools=TOOLS, response_format=shape) == (XML["torn"], "", [], "stop")
    assert [c[0] for c in both(xml, "torn", tools=TOOLS)[2]] == ["get_time"]


def test_types_that_a_schema_refers_to(xml):
    """As pydantic writes Optional[Model] and enums: an object is no string, and a string that looks like a number stays one."""
    xml = client(xml)
    room = {"$defs": {"Room": pick(beds={"type": "integer"}), "Code": {"enum": ["5", "6"]}},
            **pick(room={"anyOf": [{"$ref": "#/$defs/Room"}, {"type": "null"}]}, code={"$ref": "#/$defs/Code"}, side={"const": "7"})}
    for more in ({}, {"strict": True}):
        tools = [{"type": "function", "function": {"name": "book", "parameters": room, **more}}]
        for choice in ("auto", "required"):
            if choice == "auto" and not more:
                assert json.loads(both(xml, "model", tools=tools)[2][0][1])["room"] == {"beds": 2}
                continue
            call = json.loads(both(xml, "model", tools=tools, tool_choice=choice, parallel_tool_calls=False)[2][0][1])
            assert call["room"] == {"beds": 2} and call["code"] in ("5", "6") and call["side"] == "7", call


def test_types_under_a_root_that_joins_schemas(xml):
    """The parameters of anyOf, oneOf, allOf and $ref at the root keep their types."""
    xml = client(xml)
    one = pick(w={"const": 8}, l={"const": [1, 2]}, b={"const": True}, s={"const": "7"})
    seven = {"type": "object", "properties": {"s": {"type": "string"}}}
    defs = {"$defs": {"B": one, "C": {"allOf": [{"$ref": "#/$defs/B"}]}, "D": {"const": [1, 2]}}}
    for root in ({"type": "object", "anyOf": [one]}, {"oneOf": [one, {"type": "null"}]}, {"type": "object", "allOf": [one, {"properties": {"s": {"minLength": 1}}}]},
                 {"allOf": [{"$ref": "#/$defs/B"}], **defs}, {"$ref": "#/$defs/C", **defs}, {**seven, "anyOf": [{"$ref": "#/$defs/B"}], **defs},
                 {**pick(w={"const": 8}, l={"$ref": "#/$defs/D"}, b={"const": True}, s={"const": "7"}), **defs}):
        tools = [{"type": "function", "function": {"name": "f", "parameters": root}}]
        call, = both(xml, "torn", tools=tools, tool_choice="required", parallel_tool_calls=False)[2]
        assert json.loads(call[1]) == {"w": 8, "l": [1, 2], "b": True, "s": "7"}, (root, call)
    loop = {"anyOf": [{"$ref": "#"}] * 40, **pick(room={"type": "object"})}  # it ends
    answer = both(xml, "model", tools=[{"type": "function", "function": {"name": "book", "parameters": loop}}])
    assert json.loads(answer[2][0][1])["room"] == {"beds": 2}


def test_types_of_names_that_are_not_listed(xml):
    """Required names that only patternProperties or additionalProperties describe: a constraint writes their values by the same schemas."""
    xml = client(xml)
    schema = {"type": "object", "properties": {"": {"const": 1}, " k ": {"const": 2}}, "required": ["", " k ", "n_x", "s_x", "both_s", "z"], "patternProperties": {
        "^n_": {"const": 7}, "_x$": {"type": ["integer", "string"], "maxLength": 1}, "_s$": {"const": "5"}}, "additionalProperties": {"const": True}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    call, = both(xml, "torn", tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=600)[2]
    arguments = json.loads(call[1])
    jsonschema.validate(arguments, schema)
    assert arguments[""] == 1 and arguments[" k "] == 2 and arguments["both_s"] == "5" and arguments["z"] is True


def test_parameters_that_may_be_no_object(server, xml):
    """Arguments are an object: a schema that allows other types, too, gives one; one that allows none is refused where calls are constrained."""
    def body(parameters, **more):
        tools = [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": parameters}}]
        return {"messages": [{"role": "user", "content": "text"}], "tools": tools, "tool_choice": {"type": "function", "function": {"name": "f"}}, "temperature": 0, "thinking_token_budget": 0, **more}

    for s in (server, xml):  # server: its model thinks
        for types in (["object", "null"], ["null", "array", "object"], "object"):
            answer = s.post("/v1/chat/completions", body({**pick(a={"const": 1}), "type": types}, parallel_tool_calls=False, max_tokens=400)).json()
            call, = answer["choices"][0]["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"a": 1}
        for none in ({"type": "array"}, {"type": ["string", "null"]}, {"enum": [1, "a"]}, {"const": None}, {"$ref": "#/$defs/A", "$defs": {"A": {"type": "string"}}}):
            answer = s.post("/v1/chat/completions", body(none))
            assert answer.status == 400 and answer.error()["param"] == "tools" and "tools[1].function.parameters: 'f'" in answer.error()["message"], answer.body
            for choice in ("auto", {"type": "function", "function": {"name": "get_time"}}):
                assert s.post("/v1/chat/completions", body(none, tool_choice=choice)).status == 200


def test_thinking_budgets(api):
    for budget in (0, 1, 4):
        content, reasoning, _, _ = both(api, "think", extra_body={"thinking_token_budget": budget})
        assert len(reasoning or "") < len("He wants a <tool_call>{...}.") and (reasoning in (None, "", "H")) == (budget == 0)  # H is in the token that begins it
        usage = ask(api, "think", extra_body={"thinking_token_budget": budget}).usage
        assert budget <= usage.completion_tokens_details.reasoning_tokens <= budget + 12  # and the tokens of the end
    whole_thought = both(api, "think", extra_body={"thinking_token_budget": 50})
    assert whole_thought == both(api, "think") == both(api, "think", extra_body={"thinking_token_budget": -1})
    assert both(api, "text", extra_body={"thinking_token_budget": 0})[0] == SCRIPTS["text"]
    # the call comes earlier, and is complete
    _, reasoning, calls, _ = both(api, "think", tools=PICK, tool_choice=NAMED, extra_body={"thinking_token_budget": 3})
    assert 0 < len(reasoning) < 20 and [valid(c) for c in calls] == ["pick"]


def test_stop_strings_count_in_the_content(server, api):
    """Not in the reasoning, not in calls, as hosted APIs have it; whole, streamed, with n, and in the other routes."""
    assert both(api, "think", stop=["wants", "noon"]) == ("It is <b>", "He wants a <tool_call>{...}.", [], "stop")
    assert ask(api, "think", stop=["wants", "noon"]).choices[0].model_extra["stop_reason"] == "noon"
    assert both(api, "one", tools=TOOLS, stop=["city", "Z"]) == ("Let me look.", "", [("get_weather", '{"city": "Zürich</tool_call>", "days": 2}')], "tool_calls")
    assert both(api, "one", tools=TOOLS, stop=["look", "Z"], extra_body={"include_stop_str_in_output": True})[0] == "Let me look"
    assert both(api, "text", stop="here", extra_body={"min_tokens": 5})[0] == SCRIPTS["text"]
    ended = dict(name="request_success_total", label='finished_reason="stop"')
    begun = server.metric("generation_tokens_total"), server.metric(**ended)
    answer = ask(api, "long", stop=["1010 1"], n=5)  # the engine ends them: no further tokens are computed
    assert [c.message.content for c in answer.choices] == [SCRIPTS["long"][:SCRIPTS["long"].index("1010 1")]] * 5
    assert {c.model_extra["stop_reason"] for c in answer.choices} == {"1010 1"} and answer.usage.completion_tokens < 5 * 60
    server.wait_metric(want=begun[1] + 5, **ended)
    assert server.metric("generation_tokens_total") - begun[0] == answer.usage.completion_tokens
    answer = server.post("/v1/responses", {"input": "think", "stop": ["noon", "wants"]}).json()
    assert answer["status"] == "completed" and answer["output"][1]["content"][0]["text"] == "It is <b>"
    body = {"max_tokens": 900, "messages": [{"role": "user", "content": "think"}], "stop_sequences": ["wants", "noon"]}
    answer = server.post("/v1/messages", body).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "noon") and answer["content"][1]["text"] == "It is <b>"
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "think"}], "stop": ["x" * 5000]})
    assert answer.status == 400 and answer.error()["param"] == "stop"


def test_hostile_tools_touch_no_other_request(server, plain):
    """Too many functions, too deep ones, ones that are wrong: each is a 400, while other requests go on."""
    def functions(n, schema):
        return [{"type": "function", "function": {"name": f"f{i}", "parameters": schema, "strict": True}} for i in range(n)]

    deep = {"type": "null"}
    for _ in range(55):
        deep = {"type": "array", "items": deep}
    stream = plain.chat.completions.create(model="m", messages=[{"role": "user", "content": "long"}], tools=TOOLS, stream=True)
    first = next(iter(stream))
    for tools in (functions(3000, pick(a={"type": "string"}, b={"type": "string"})), functions(1, pick(a=deep)), functions(1, {"$ref": "#/nowhere"}),
                  functions(1, pick(a={"type": "string", "pattern": "(a{1,9999}){1,9999}(b|a{1,9999}){9999}$", "maxLength": 90000}))):
        answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "text"}], "tools": tools, "tool_choice": "required", "max_tokens": 9})
        assert answer.status == 400 and answer.error()["param"] == "tool_choice", answer.body
    assert first.choices and len(join(stream)[2]) == 1


def test_names_of_functions(plain):
    """OpenAI's, and those with a dot; a digit may come first."""
    for name in ("2fa", "get-it_2", "a.b", "x" * 64):
        tools = [{"type": "function", "function": {"name": name}}]
        call, = both(plain, "text", tools=tools, tool_choice="required", parallel_tool_calls=False)[2]
        assert call[0] == name and json.loads(call[1]) == {}


def test_refusals(api):
    bad = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}}}]
    for tools, choice in ((TOOLS, {"type": "function", "function": {"name": "fly"}}), (TOOLS, "sometimes"), (None, "required"), ([], "required"), (bad, "required")):
        with pytest.raises(openai.BadRequestError) as e:
            ask(api, "one", tools=tools, tool_choice=choice) if tools is not None else ask(api, "one", tool_choice=choice)
        assert e.value.param == "tool_choice"
    assert "uniqueItems" in str(e.value)


@pytest.mark.parametrize("tools", [[7], [{}], [{"type": "function", "function": {"name": ""}}], [{"type": "function", "function": {"name": 5}}],
                                   [{"function": {"name": "get it"}}], [{"function": {"name": "zahl\u00fc"}}], [{"function": {"name": "a[b"}}], [{"function": {"name": "a\n"}}],
                                   [{"type": "retrieval", "function": {"name": "f"}}], [TOOLS[0], {"type": "custom", "custom": {"name": "f"}}],
                                   [{"type": "function", "function": {"name": "f", "parameters": "x"}}], [{"type": "function", "function": {"name": "f", "strict": "x"}}], {"type": "function"}, "f"])
def test_tools_that_are_none(server, tools):
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = server.post(path, {"messages": [{"role": "user", "content": "one"}], "tools": tools})
        assert answer.status == 400 and answer.error()["param"] == "tools", answer.body


def test_special_tokens_and_flags(tmp_path):
    folder = str(tmp_path)
    write_model(folder, DEEPSEEK, "{# <｜tool▁sep｜> ```json #}{{ enable_thinking }}", special=DS)
    with Server("-m", folder, "--served-model-name", "m", "--default-chat-template-kwargs", '{"enable_thinking": "K"}') as s:
        api = client(s)
        assert both(api, "calls", tools=TOOLS) == ("Ok.", "", [("get_time", '{"zone": "UTC"}')], "tool_calls")
        assert both(api, "calls", tools=TOOLS, stop=["never"])[2] == [("get_time", '{"zone": "UTC"}')]
        assert ask(api, "calls").choices[0].message.content == "Ok.functionget_time\n```json\n{\"zone\": \"UTC\"}\n```"
        ids = s.post("/tokenize", {"messages": [{"role": "user", "content": "calls"}]}).json()["tokens"]
        assert s.post("/detokenize", {"tokens": ids}).json()["prompt"] == "K<go:calls>"
        # special tokens of the form, whatever the model wants
        assert [valid(c) for c in both(api, "calls", tools=PICK, tool_choice=NAMED)[2]] == ["pick"]
        answer = s.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "calls"}], "tools": PICK, "tool_choice": NAMED, "logprobs": True}).json()
        assert [t["token"] for t in answer["choices"][0]["logprobs"]["content"]][:2] in ([DS[0], DS[1]], [DS[0], "\n"], ["\n", DS[0]])
    with Server("-m", folder, "--tool-call-parser", "none") as s:
        answer = s.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "calls"}], "tools": PICK, "tool_choice": "required"})
        assert answer.status == 400 and answer.error()["param"] == "tool_choice" and "--tool-call-parser" in answer.error()["message"]
        answer = s.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "calls"}], "tools": TOOLS}).json()
        assert answer["choices"][0]["message"]["content"].startswith("Ok.function") and answer["choices"][0]["finish_reason"] == "stop"
    with Server("-m", folder, "--tool-call-parser", "hermes") as s:
        answer = s.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "calls"}], "tools": TOOLS}).json()
        assert "tool_calls" not in answer["choices"][0]["message"]


def test_answers_cut_inside_a_character(tmp_path):
    """max_tokens may cut the answer inside a character: its first bytes are no text, and the tags around a call stay tags."""
    text = "Oké ｜ " + DS[0] + DS[1] + "function" + DS[2] + 'get_time\n```json\n{"zone": "Zürich"}\n```' + DS[3] + DS[4]
    pieces = "".join(c if c < "\x80" else c.encode().decode("ascii", "surrogateescape") for c in text)
    write_model(str(tmp_path), {"calls": pieces}, "{# <｜tool▁sep｜> ```json #}")
    with Server("-m", str(tmp_path), "--served-model-name", "m") as s:
        api = client(s)
        n_all = ask(api, "calls", tools=TOOLS).usage.completion_tokens
        n_cut_after = 0
        for n in range(1, n_all + 1):
            content, _, calls, finish = both(api, "calls", tools=TOOLS, max_tokens=n)
            assert "\ufffd" not in (content or "") and text.startswith(content or "") and (finish == "length" or n == n_all)
            if calls:
                assert (content, calls) == ("Oké ｜", [("get_time", '{"zone": "Zürich"}')])
                n_cut_after += finish == "length"
        assert n_cut_after > 5


def test_ids_of_calls(tmp_path):
    """The templates of Mistral want nine letters and digits. Kimi K2 writes the ids itself, and reads them in its next prompt."""
    kimi = "".join(f'<|tool_call_begin|>functions.get_time:{i}<|tool_call_argument_begin|>{{"zone": "{z}"}}<|tool_call_end|>' for i, z in enumerate(("UTC", "CET")))
    write_model(str(tmp_path / "m"), {"calls": '[TOOL_CALLS]get_time[ARGS]{"zone": "UTC"}[TOOL_CALLS]get_weather[ARGS]{"city": "Ulm"}',
                                      "kimi": f"<|tool_calls_section_begin|>{kimi}<|tool_calls_section_end|>"}, "{# [TOOL_CALLS] [ARGS] #}")
    other = tmp_path / "kimi.jinja"
    other.write_text("{# <|tool_call_argument_begin|> #}{% for m in messages %}{{ m.tool_call_id }}{% for c in m.tool_calls %}{{ c.id }}{% endfor %}{% endfor %}"
                     "<go:{{ messages[-1].content }}>")
    for flags, name, form in (((), "calls", "[0-9A-Za-z]{9}"), (("--chat-template", str(other)), "kimi", "functions.get_time:[01]")):
        with Server("-m", str(tmp_path / "m"), "--served-model-name", "m", *flags) as s:
            api = client(s)
            for calls in (whole(ask(api, name, tools=TOOLS))[2], join(ask(api, name, tools=TOOLS, stream=True))[2]):
                assert len({i for i, _, _ in calls}) == 2 and all(re.fullmatch(form, i) for i, _, _ in calls), calls
            if flags:  # numbers go on behind those of the history
                for n in (1, 2):
                    old = [{"id": f"functions.get_time:{i}", "type": "function", "function": {"name": "get_time", "arguments": "{}"}} for i in range(n)]
                    body = {"messages": [{"role": "user", "content": name}, {"role": "assistant", "tool_calls": old}, {"role": "tool", "content": "12"}, {"role": "user", "content": name}], "tools": TOOLS}
                    for stream in (False, True):
                        ids = re.findall("functions.get_time:([0-9])", s.post("/v1/chat/completions", {**body, "stream": stream}).body.decode())
                        assert ids == [str(n), str(n + 1)]
                back = [{"role": "user", "content": name}, ask(api, name, tools=TOOLS).choices[0].message.model_dump(exclude_none=True),
                        {"role": "tool", "tool_call_id": "functions.get_time:0", "content": "kimi"}]
                tokens = s.post("/tokenize", {"messages": back}).json()["tokens"]
                assert s.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "functions.get_time:0functions.get_time:1functions.get_time:0<go:kimi>"


def test_templates_that_ask_for_descriptions(tmp_path):
    """Those of Hermes and Command R fail without descriptions, or without parameters: a tool gets empty ones, but only then."""
    write_model(str(tmp_path), {"calls": "Answer."}, "{% for t in tools %}{% set f = t.function %}{{ f.name + '(' + f.description + ')' }}{% for k, v in f.parameters.properties | items %}"
                "{{ k + ':' + v.type + '(' + v.description + ')' }}{% endfor %}{{ f.parameters | tojson | length }} {% endfor %}")
    user = [{"role": "user", "content": "calls"}]
    described = [{"type": "function", "function": {"name": "f", "description": "D", "parameters": {"properties": {"a": {"type": "string", "description": "A"}}}}}]
    with Server("-m", str(tmp_path)) as s:
        full = {**TOOLS[0]["function"]["parameters"], "properties": {"city": {"type": "string", "description": ""}, "days": {"type": "integer", "description": ""}}}
        n_full, n_given = len(json.dumps(full)), len(json.dumps(described[0]["function"]["parameters"]))
        for tools, want in ((TOOLS, f"get_weather(d)city:string()days:integer(){n_full} get_time()36 "), (described, f"f(D)a:string(A){n_given} ")):
            answer = s.post("/tokenize", {"messages": user, "tools": tools})
            assert answer.status == 200, answer.body
            assert s.post("/detokenize", {"tokens": answer.json()["tokens"]}).json()["prompt"] == want + "<go:calls>"
        bad = s.post("/tokenize", {"messages": user, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}}]})
        assert bad.status == 400 and "description" in bad.error()["message"]  # the first failure is told


def test_templates_that_show_one_call_a_message(tmp_path):
    """Those of Llama 3 fail at a message with several calls, which the model may write: each call becomes a message of its own."""
    form = "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}" \
           "{{ m.tool_calls[0].function.name }}{% endif %}{{ m.content }}{% endfor %}"
    strict = "{% for t in tools %}{{ t.function.name + t.function.description }}{% endfor %}"
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": f"f{i}", "arguments": "{}"}} for i in range(3)]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": f"r{i}"} for i in (1, 0, 2)]
    user = {"role": "user", "content": "u"}
    messages = [user, {"role": "assistant", "content": "Look.", "tool_calls": calls}, *results, {"role": "assistant", "content": "So."}, user]
    tools = [{"type": "function", "function": {"name": "f0", "parameters": {"type": "object", "properties": {}}}}]
    for name, template, head in (("a", form, ""), ("b", strict + form, "f0")):
        write_model(str(tmp_path / name), {"u": "Answer."}, template)
        with Server("-m", str(tmp_path / name)) as s:
            tokens = s.post("/tokenize", {"messages": messages, "tools": tools}).json()["tokens"]
            assert s.post("/detokenize", {"tokens": tokens}).json()["prompt"] == \
                head + "[user]u[assistant]f0Look.[tool]r0[assistant]f1[tool]r1[assistant]f2[tool]r2[assistant]So.[user]u<go:u>"
            assert s.post("/v1/chat/completions", {"messages": messages, "tools": tools}).json()["choices"][0]["message"]["content"] == "Answer."
            blocks = [{"type": "text", "text": "Look."}, *({"type": "tool_use", "id": c["id"], "name": c["function"]["name"], "input": {}} for c in calls)]
            answers = [{"type": "tool_result", "tool_use_id": r["tool_call_id"], "content": r["content"]} for r in results]
            chat = [user, {"role": "assistant", "content": blocks}, {"role": "user", "content": answers}, *messages[-2:]]
            flat = [{"name": "f0", "input_schema": {"type": "object", "properties": {}}}]
            assert s.post("/v1/messages/count_tokens", {"messages": chat, "tools": flat}).json()["input_tokens"] == len(tokens)


def test_phi4_mini(tmp_path):
    """Its template shows tools that are a text of the system message; calls are marked with special tokens."""
    text = '<|tool_call|>[{"name": "get_time", "arguments": {"zone": "UTC"}}]<|/tool_call|>'
    write_model(str(tmp_path), {"calls": text}, "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
                "{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}{{ '<|tool|>' + m['tools'] + '<|/tool|>' }}{% endif %}{{ '<|end|>' }}{% endfor %}",
                special=("<|tool_call|>", "<|/tool_call|>"))
    with Server("-m", str(tmp_path), "--served-model-name", "m") as s:
        api, user = client(s), {"role": "user", "content": "calls"}
        assert both(api, "calls", tools=TOOLS) == (None, "", [("get_time", '{"zone": "UTC"}')], "tool_calls")
        assert [valid(c) for c in both(api, "calls", tools=PICK, tool_choice=NAMED)[2]] == ["pick"]
        shown = '<|tool|>[{"name":"get_time"}]<|/tool|><|end|><|user|>calls<|end|><go:calls>'
        for messages, head in (([{"role": "system", "content": "S"}, user], "<|system|>S"), ([user], "<|system|>You are a helpful assistant with some tools.")):
            tokens = s.post("/tokenize", {"messages": messages, "tools": TOOLS[1:]}).json()["tokens"]
            assert s.post("/detokenize", {"tokens": tokens}).json()["prompt"] == head + shown
        tokens = s.post("/tokenize", {"messages": [user]}).json()["tokens"]
        assert s.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "<|user|>calls<|end|><go:calls>"


def test_harmony(tmp_path):
    write_model(str(tmp_path), HARMONY, "{# <|channel|> <|message|> #}{% for m in messages %}{{ m.thinking }}{% endfor %}<|start|>assistant")
    with Server("-m", str(tmp_path), "--served-model-name", "m") as s:
        api = client(s)
        assert both(api, "calls", tools=TOOLS) == (None, "Look it up.", [("get_time", '{"zone": "UTC"}')], "tool_calls")
        assert both(api, "final", tools=TOOLS) == ("Two, is it not?", "I know: 2.", [], "stop")
        assert both(api, "final") == ("Two, is it not?", "I know: 2.", [], "stop")
        # the reasoning is free, then there is a call, or JSON in the final channel
        content, reasoning, calls, finish = both(api, "pick", tools=PICK, tool_choice=NAMED)
        assert (content or "", reasoning, finish) == ("", "Up?", "stop") and [valid(c) for c in calls] == ["pick"]
        assert [(c[0], json.loads(c[1])) for c in both(api, "calls", tools=TOOLS, tool_choice="required")[2]] == [("get_time", {})]
        content, reasoning, _, _ = both(api, "final", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [17, 18]}}})
        assert content in ("17", "18") and reasoning == "I know: 2."
        content, reasoning, _, _ = both(api, "final", extra_body={"thinking_token_budget": 2})
        assert 0 < len(reasoning) < len("I know: 2.")


MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")


@pytest.mark.parametrize("special", [(), MARKS])
def test_harmony_marks_as_text(tmp_path, special):
    """An argument may spell a mark. Content may, too, if the model has tokens for the marks: then only these are marks."""
    spelled = '{"zone": "<\0|call|> \\"<\0|end|>"}', "Write <\0|end|> or <\0|message|>."
    texts = [text.replace("\0", "") for text in spelled]
    answers = (None, "", [("get_time", texts[0])], "tool_calls"), (texts[1] if special else "Write \n or <|message|>.", "", [], "stop")
    for head, text, want in zip(("commentary to=functions.get_time <|constrain|>json", "final"), spelled, answers):
        write_model(str(tmp_path), {"a": f"<|channel|>{head}<|message|>{text}"}, "{# <|channel|> <|message|> #}", special=special)
        with Server("-m", str(tmp_path), "--served-model-name", "m") as s:
            for more in ({}, {"stop": ["never"]}):
                assert both(client(s), "a", tools=TOOLS, **more) == want
            assert items(respond(client(s), "a", tools=FLAT))[0] == (("get_time", texts[0]) if want[2] else ("text", want[0]))
        if want[2]:
            continue
        shown = subprocess.run([TOKA, "-m", str(tmp_path), "-p", "a"], capture_output=True, text=True, check=True, env={**os.environ, "TOKA_DEVICE": "cpu"}).stdout
        assert shown == want[0] + "\n"


DATA = os.environ.get("TOKA_TEST_DATA", os.path.join(ROOT, "../shared/data"))
SUITE = os.path.join(DATA, "suites/harmony")


def suite(name):
    with open(f"{SUITE}/test_{name}.txt", encoding="utf-8") as f:
        return f.read()


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """GPT-OSS' own chat template; the answers are those of the suite that are token ids."""
    if not os.path.exists(SUITE):
        pytest.skip("no public test data")
    tokenizer = tokenizers.Tokenizer.from_file(f"{DATA}/tokenizers/gpt-oss/tokenizer.json")
    texts = {name: tokenizer.decode(list(map(int, suite(name).split())), skip_special_tokens=False) for name in ("simple_reasoning_response", "simple_tool_call")}
    folder = str(tmp_path_factory.mktemp("gpt-oss"))
    write_model(folder, texts, open(f"{DATA}/templates/openai-gpt-oss-120b.jinja", encoding="utf-8").read())
    with Server("-m", folder, "--served-model-name", "m") as s:
        yield s


def test_harmony_suite_answers(gpt_oss):
    api = client(gpt_oss)
    assert both(api, "simple_reasoning_response") == ("2 + 2 = 4.", 'User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.', [], "stop")
    tools = [{"type": "function", "function": {"name": "lookup_weather"}}]  # the template asks for a description
    assert both(api, "simple_tool_call", tools=tools) == (
        None, 'User asks: "What is the weather in Tokyo?" We need to use lookup_weather tool.', [("lookup_weather", '{"location": "Tokyo"}')], "tool_calls")


def weather(name, description, **properties):
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {
        "type": "object", "properties": properties, "required": list(properties)[:1]} if properties else None}}


CAPITAL, ROBOT = "What is the capital of the largest country in the world?", "Answer the user's questions like a robot."
TWO, NINE = {"role": "user", "content": "What is 2 + 2?"}, {"role": "user", "content": "What about 9 / 2?"}
UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"}
WEATHER = [weather("get_location", "Gets the location of the user."),
           weather("get_current_weather", "Gets the current weather in the provided location.",
                   location={"type": "string", "description": "The city and state, e.g. San Francisco, CA"}, format=UNIT),
           weather("get_multiple_weathers", "Gets the current weather in the provided list of locations.",
                   locations={"type": "array", "items": {"type": "string"}, "description": 'List of city and state, e.g. ["San Francisco, CA", "New York, NY"]'}, format=UNIT)]
LOOKUP = weather("lookup_weather", "Use this tool to lookup the weather in a given location. Call it with the parameter 'location', can be any textual "
                 "description of a location.", location={"type": "string"})
RENDERED = [*((f"simple_convo_{effort}_effort{end}", [{"role": "system", "content": ROBOT}][bool(end):] + [{"role": "user", "content": CAPITAL}], {"reasoning_effort": effort})
              for effort in ("low", "medium", "high") for end in ("", "_no_instruction")),
            ("simple_convo", [TWO], {}),
            ("dropping_cot_by_default", [TWO, {"role": "assistant", "reasoning": "It is 4.", "content": "2 + 2 equals 4."}, NINE], {}),
            ("no_tools", [], {}), ("browser_tool_only", [], {"chat_template_kwargs": {"builtin_tools": ["browser"]}}),
            ("browser_and_python_tool", [], {"chat_template_kwargs": {"builtin_tools": ["browser", "python"]}}),
            ("browser_and_function_tool", [], {"chat_template_kwargs": {"builtin_tools": ["browser"]}, "tools": [LOOKUP]}),
            ("render_functions_with_parameters", [{"role": "system", "content": "Always respond in riddles"}, {"role": "user", "content": "What is the weather like in SF?"}],
             {"reasoning_effort": "high", "tools": WEATHER})]


@pytest.mark.parametrize("name, messages, fields", RENDERED, ids=[r[0] for r in RENDERED])
def test_harmony_suite_prompts(gpt_oss, name, messages, fields):
    """What openai/harmony renders, but: the chat template of the model has today's date in each system message, line feeds at the end
    of the developer's and a comma behind a default; one function of the suite has schemas that it cannot show."""
    cut = lambda text: re.sub(r"Current date: .*\n", "", re.sub(r"// A function with various complex schemas(.|\n)*?=> any;\n\n", "", text)) \
        .replace("\n\n<|end|>", "<|end|>").replace(": celsius,", ": celsius").rstrip()
    messages = messages or [{"role": "user", "content": "-"}]
    tokens = gpt_oss.post("/tokenize", {"messages": messages, **fields}).json()["tokens"]
    prompt = gpt_oss.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    shown = cut(prompt[:prompt.rindex("<go:")].replace("<|start|>user<|message|>-<|end|>", ""))
    assert shown.endswith(cut(suite(name))) and (name.startswith("dropping") or shown == cut(suite(name)))


def test_harmony_suite_conversation(gpt_oss):
    """The reasoning before a call stays until there is a final answer, also for the items of /v1/responses; ids of calls are not shown."""
    want = suite("does_not_drop_if_ongoing_analysis").split("<|channel|>commentary")[0]
    call = {"id": "c", "type": "function", "function": {"name": "lookup_weather", "arguments": '{"location": "San Francisco"}'}}
    thought, result = re.search(r"analysis<\|message\|>(.*?)<", want)[1], '{"temperature": 20, "description": "sunny"}'
    messages = [{"role": "user", "content": "What is the weather in SF?"}, {"role": "assistant", "reasoning": thought, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": result}]
    tokens = gpt_oss.post("/tokenize", {"messages": messages}).json()["tokens"]
    prompt = gpt_oss.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert want in prompt and prompt.endswith(f'<|message|>{json.dumps(result)}<|end|><|start|>assistant<go:{result}>')
    items = [messages[0], {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]},
             {"type": "function_call", "call_id": "c", **call["function"]}, {"type": "function_call_output", "call_id": "c", "output": result}]
    assert gpt_oss.post("/v1/responses", {"input": items, "max_output_tokens": 1}).json()["usage"]["input_tokens"] == len(tokens)


def test_harmony_history(gpt_oss):
    """A message with a reasoning, a preamble and two calls is shown as openai/harmony renders it, and the results behind their calls. A text
    that spells a mark is text: the prompt has no more special tokens than without it."""
    def show(messages, **more):
        tokens = gpt_oss.post("/tokenize", {"messages": messages, **more})
        assert tokens.status == 200, tokens.body
        text = gpt_oss.post("/detokenize", {"tokens": tokens.json()["tokens"]}).json()["prompt"]
        return text[text.index("<|start|>user"):text.rindex("<|start|>assistant")]

    def calls(*names):
        return [{"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": '{"a": %d}' % i}} for i, name in enumerate(names)]

    def results(*ids):
        return [{"role": "tool", "tool_call_id": f"c{i}", "content": f"r{i}"} for i in ids]

    def call(name, i):
        return f'<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{{"a": {i}}}<|call|>' \
               f'<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"r{i}"<|end|>'

    user, said = {"role": "user", "content": "u"}, "<|start|>user<|message|>u<|end|>"
    thought, preamble = "<|start|>assistant<|channel|>analysis<|message|>R<|end|>", "<|start|>assistant<|channel|>commentary<|message|>P<|end|>"
    for fields, head in (({"reasoning": "R", "content": "P"}, thought + preamble), ({"reasoning_content": "R"}, thought), ({"content": "P"}, preamble),
                         ({"content": [{"type": "text", "text": "P"}], "thinking": "R"}, thought + preamble), ({"content": "", "reasoning": ""}, ""), ({"content": None}, "")):
        for order in ((0, 1), (1, 0)):
            message = {"role": "assistant", **fields, "tool_calls": calls("f", "g")}
            assert show([user, message, *results(*order), user]) == said + head + call("f", 0) + call("g", 1) + said, fields
        nameless = [{**r, "tool_call_id": ""} for r in results(0, 1)]
        assert show([user, {"role": "assistant", **fields, "tool_calls": calls("f", "g")}, *nameless]) == said + head + call("f", 0) + call("g", 1)
        assert show([user, {"role": "assistant", **fields, "tool_calls": calls("f")}, *results(0)]) == said + head + call("f", 0)
        final = [{"role": "assistant", "content": "F"}, user]  # the template drops what led to it
        assert show([user, {"role": "assistant", **fields, "tool_calls": calls("f")}, *results(0), *final]) == \
            said + call("f", 0) + "<|start|>assistant<|channel|>final<|message|>F<|end|>" + said
    many = [{"id": "x", "function": {"name": "f", "arguments": "{}"}}] * 300
    assert show([user, {"role": "assistant", "tool_calls": many}, *results(*range(300))]).count("<|call|>") == 300
    # the same conversation by the other routes
    n = len(gpt_oss.post("/tokenize", {"messages": [user, {"role": "assistant", "reasoning": "R", "content": "P", "tool_calls": calls("f", "g")}, *results(0, 1)]}).json()["tokens"])
    flat = [user, {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]}, {"role": "assistant", "content": "P"},
            *({"type": "function_call", "call_id": c["id"], **c["function"]} for c in calls("f", "g")), *({"type": "function_call_output", "call_id": f"c{i}", "output": f"r{i}"} for i in (0, 1))]
    assert gpt_oss.post("/v1/responses", {"input": flat, "max_output_tokens": 1}).json()["usage"]["input_tokens"] == n
    blocks = [{"type": "thinking", "thinking": "R", "signature": ""}, {"type": "text", "text": "P"}, *({"type": "tool_use", "id": f"c{i}", "name": f, "input": {"a": i}} for i, f in enumerate("fg"))]
    answers = [{"type": "tool_result", "tool_use_id": f"c{i}", "content": f"r{i}"} for i in (0, 1)]
    assert gpt_oss.post("/v1/messages/count_tokens", {"messages": [user, {"role": "assistant", "content": blocks}, {"role": "user", "content": answers}]}).json()["input_tokens"] == n


def test_harmony_instructions(gpt_oss):
    """All messages of the system and the developer are shown, where they stand; the chat template shows only the first."""
    user = {"role": "user", "content": "u"}
    messages = [{"role": "system", "content": "S"}, {"role": "developer", "content": [{"type": "text", "text": "D"}, {"type": "text", "text": "\"D2\""}]}, user,
                {"role": "system", "content": "E"}, user]
    tokens = gpt_oss.post("/tokenize", {"messages": messages}).json()["tokens"]
    prompt = gpt_oss.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    told = lambda text: "<|start|>developer<|message|># Instructions\n\n" + text + "<|end|>"
    said = "<|start|>user<|message|>u<|end|>"
    assert prompt[prompt.index("<|start|>developer"):] == told("S\n\n") + told('D\n"D2"') + said + told("E") + said + "<|start|>assistant<go:u>"
    flat = [{"role": "developer", "content": [{"type": "input_text", "text": "D"}, {"type": "input_text", "text": "\"D2\""}]}, user, {"role": "system", "content": "E"}, user]
    assert gpt_oss.post("/v1/responses", {"instructions": "S", "input": flat, "max_output_tokens": 1}).json()["usage"]["input_tokens"] == len(tokens)
    bad = gpt_oss.post("/v1/chat/completions", {"messages": [*messages, {"role": "developer", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]})
    assert bad.status == 400 and bad.error()["param"] == "messages"
    for content in ([{"type": "image_url", "image_url": {"url": "x"}}], 5):
        call = {"role": "assistant", "content": content, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
        bad = gpt_oss.post("/v1/chat/completions", {"messages": [user, call]})
        assert bad.status == 400 and bad.error()["param"] == "messages"


@pytest.fixture(scope="module")
def gpt_oss_tokens(tmp_path_factory):
    """The template and the marks of GPT-OSS, which are special tokens here."""
    if not os.path.exists(SUITE):
        pytest.skip("no public test data")
    folder = str(tmp_path_factory.mktemp("gpt-oss-tokens"))
    write_model(folder, {"u": "Answer."}, open(f"{DATA}/templates/openai-gpt-oss-120b.jinja", encoding="utf-8").read(), special=MARKS)
    with Server("-m", folder, "--served-model-name", "m") as s:
        yield s


def test_harmony_history_spells_marks(gpt_oss_tokens):
    """Text of a message that spells a mark is no special token of the prompt, wherever it stands; it is shown as it is."""
    s, spelled = gpt_oss_tokens, "<|call|><|start|>x<|channel|>analysis<|message|>"
    special = s.post("/tokenize", {"prompt": "".join(MARKS), "add_special_tokens": False}).json()["tokens"]
    assert len(special) == len(MARKS)

    def chat(text, **more):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text, text: [text]})}}
        return {"messages": [{"role": "system", "content": text}, {"role": "user", "content": text}, {"role": "assistant", "content": text, "reasoning": text, "tool_calls": [call]},
                             {"role": "tool", "tool_call_id": "c", "content": text}, {"role": "user", "content": "u"}],
                "tools": [{"type": "function", "function": {"name": "f", "description": text}}], **more}

    shown = s.post("/tokenize", chat("x")).json()["tokens"]
    assert s.post("/tokenize", chat("x", add_special_tokens=True)).json()["tokens"] == shown  # this tokenizer adds none
    counts = []
    for text in (spelled, "x", "\ufdd0\ufdd1", "<|call|>\ufdd0<|end|>"):
        tokens = s.post("/tokenize", chat(text)).json()["tokens"]
        counts.append([tokens.count(i) for i in special])
        prompt = s.post("/detokenize", {"tokens": tokens}).json()["prompt"]
        shown = text.replace("\ufdd0", "\ufffd").replace("\ufdd1", "\ufffd")
        assert text == "x" or prompt.count(shown) == 9, prompt
    assert counts[1:] == counts[:1] * 3
    half = {"role": "assistant", "content": "a <|end|> b"}
    tokens = s.post("/tokenize", {"messages": [{"role": "user", "content": "u"}, half], "continue_final_message": True}).json()["tokens"]
    assert s.post("/detokenize", {"tokens": tokens}).json()["prompt"].endswith("a <|end|> b") and tokens.count(special[1]) == 2


# ---- Responses ----

FLAT = [{"type": "function", "name": t["function"]["name"], "parameters": t["function"].get("parameters")} for t in TOOLS]


def items(response):
    """The items of a response, short."""
    out = []
    for item in response.output:
        assert item.status in ("completed", "incomplete")
        if item.type == "message":
            assert item.role == "assistant" and len(item.content) == 1
            out.append(("text", item.content[0].text))
        elif item.type == "reasoning":
            out.append(("reasoning", item.content[0].text))
        else:
            assert item.call_id.startswith("call_") and item.type == "function_call"
            out.append((item.name, item.arguments))
    return out


def streamed(stream):
    """The events of a stream of Responses, checked: items open and close in turn, deltas join to the items."""
    joined, n, final = [], 0, None
    for event in stream:
        assert event.sequence_number == n and final is None
        n += 1
        kind = event.type.removeprefix("response.")
        if n <= 2:
            assert kind == ("created", "in_progress")[n - 1] and event.response.output == [] and event.response.status == "in_progress"
        elif kind == "output_item.added":
            assert event.output_index == len(joined) and event.item.status == "in_progress"
            joined.append([event.item.id, ""])
        elif kind.endswith(".delta"):
            assert event.item_id == joined[-1][0] and event.output_index == len(joined) - 1
            joined[-1][1] += event.delta
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event.text == joined[-1][1]
        elif kind == "function_call_arguments.done":
            assert event.arguments == joined[-1][1]
        elif kind == "content_part.done":
            assert event.part.text == joined[-1][1]
        elif kind == "output_item.done":
            assert event.item.id == joined[-1][0]
            joined[-1].append(event.item.status)
        elif kind in ("completed", "incomplete"):
            final = event.response
            assert final.status == kind
        else:
            assert kind == "content_part.added"
    assert [x[1] for x in joined] == [x[1] for x in items(final)] and [(x[0], x[2]) for x in joined] == [(x.id, x.status) for x in final.output]
    return final


def respond(api, name, **more):
    one = api.responses.create(model="m", input=name, temperature=0, **more)
    two = streamed(api.responses.create(model="m", input=name, temperature=0, stream=True, **more))
    assert [x.status for x in one.output] == [x.status for x in two.output]
    assert items(one) == items(two) and one.status == two.status and one.usage.output_tokens == two.usage.output_tokens > 0
    assert one.id.startswith("resp_") and one.usage.total_tokens == one.usage.input_tokens + one.usage.output_tokens
    return one


def test_responses(api):
    answer = respond(api, "one", tools=FLAT)
    assert items(answer) == [("text", "Let me look."), ("get_weather", '{"city": "Zürich</tool_call>", "days": 2}')]
    assert answer.status == "completed" and answer.output_text == "Let me look." and answer.error is None
    assert items(respond(api, "two", tools=FLAT)) == [("get_weather", '{"city":"Ulm"}'), ("get_time", "{}")]
    assert items(respond(api, "two", tools=FLAT, parallel_tool_calls=False)) == [("get_weather", '{"city":"Ulm"}')]
    answer = respond(api, "think", reasoning={"effort": "high"}, instructions="Be brief.", include=["reasoning.encrypted_content"])
    assert items(answer) == [("reasoning", "He wants a <tool_call>{...}."), ("text", "It is <b>noon</b>.")]
    assert answer.usage.output_tokens_details.reasoning_tokens > 3
    cut = respond(api, "text", max_output_tokens=3)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens" and SCRIPTS["text"].startswith(cut.output_text)
    assert items(respond(api, "long", tools=FLAT))[0][0] == "get_weather"
    # only the item that was cut is incomplete
    for n, want in ((5, ["incomplete"]), (14, ["completed", "incomplete"]), (500, ["completed", "completed"])):
        assert [x.status for x in respond(api, "think", max_output_tokens=n).output] == want
    assert items(respond(api, "broken", tools=FLAT)) == [("text", SCRIPTS["broken"])]


def test_a_response_repeats_the_request(server, api):
    """As OpenAI's does, in each event that has a response."""
    shape = {"format": {"type": "json_schema", "name": "x", "schema": pick(side={"enum": ["left", "right"]}), "strict": True}}
    asked = {"tools": FLAT, "tool_choice": {"type": "function", "name": "get_time"}, "instructions": "Be brief.", "metadata": {"a": "b"}, "user": "u",
             "reasoning": {"effort": "high", "summary": "auto"}, "parallel_tool_calls": True, "prompt_cache_key": "k", "safety_identifier": "s",
             "truncation": "auto", "max_output_tokens": 300, "temperature": 0.5, "text": {"verbosity": "medium"}}
    want = {**asked, "reasoning": {"effort": "high", "summary": None}, "text": {"format": {"type": "text"}, "verbosity": "medium"}}
    plain = {"tools": [], "tool_choice": "auto", "instructions": None, "metadata": {}, "user": None, "reasoning": {"effort": None, "summary": None},
             "parallel_tool_calls": True, "truncation": "disabled", "max_output_tokens": None, "previous_response_id": None, "store": False,
             "text": {"format": {"type": "text"}, "verbosity": "medium"}, "background": False, "top_logprobs": 0}
    for body, expected in ((asked, want), ({"text": shape}, {"text": {**shape, "verbosity": "medium"}}), ({"tools": None, "text": None}, plain), ({}, plain)):
        body = {"model": "m", "input": "one", **body}
        answers = [server.post("/v1/responses", body).json()]
        lines = server.post("/v1/responses", {**body, "stream": True}).body.decode().split("\n")
        answers += [r for r in (json.loads(line[6:]).get("response") for line in lines if line.startswith("data: ")) if r]
        assert len(answers) == 4 and all({k: a[k] for k in expected} == expected for a in answers), answers[0]
    parsed = api.responses.create(model="m", input="one", text=shape, tools=FLAT, tool_choice="none", reasoning={"effort": "low"})
    assert parsed.text.format.name == "x" and parsed.tools[0].name == "get_weather" and parsed.tool_choice == "none" and parsed.reasoning.effort == "low"


def test_truncation(server):
    """auto drops the oldest turns, as few as possible; the instructions and the last turn stay. Else a long input is a 400."""
    def shown(kept, **more):
        items = [{"role": "developer", "content": "D"}, {"role": "assistant", "content": "hello"}]
        for i in range(30, 50):
            items += [{"role": "user", "content": f"{i} " + "ab " * 100}, {"type": "function_call", "call_id": f"c{i}", "name": "get_time", "arguments": "{}"},
                      {"type": "function_call_output", "call_id": f"c{i}", "output": f"r{i}"}]
        return server.post("/v1/responses", {"instructions": "I", "input": items[:2] * (kept == 20) + items[:1] * (kept < 20) + items[2 + 3 * (20 - kept):], "tools": FLAT,
                                             "max_output_tokens": 1, **more})

    sizes = [None, *(shown(kept).json()["usage"]["input_tokens"] for kept in range(1, 6))]
    limit = server.get("/v1/models").json()["data"][0]["max_model_len"]
    whole = shown(20)
    assert whole.status == 400 and whole.error()["code"] == "context_length_exceeded" and shown(20, truncation="disabled").status == 400
    answer = shown(20, truncation="auto").json()
    n_turn = sizes[5] - sizes[4]
    want = (limit - 1 - sizes[1]) // n_turn + 1
    assert answer["truncation"] == "auto" and answer["usage"]["input_tokens"] == sizes[1] + (want - 1) * n_turn, (answer["usage"], sizes, limit)
    # max_output_tokens have room, too
    assert shown(20, truncation="auto", max_output_tokens=limit - sizes[2] - 1).json()["usage"]["input_tokens"] == sizes[2]
    assert shown(2, truncation="auto", max_output_tokens=limit - sizes[2]).json()["usage"]["input_tokens"] == sizes[2]
    last = shown(20, truncation="auto", max_output_tokens=limit - sizes[1] + 1)
    assert last.status == 400 and last.error()["code"] == "context_length_exceeded"
    bad = server.post("/v1/responses", {"input": "one", "truncation": "some"})
    assert bad.status == 400 and bad.error()["param"] == "truncation"


FLAT_PICK = [{"type": "function", "name": t["function"]["name"], "parameters": t["function"].get("parameters")} for t in PICK]


def test_constraints_of_responses(api, plain):
    shape = {"format": {"type": "json_schema", "name": "x", "schema": pick(side={"enum": ["left", "right"]})}}
    for text, check in ((shape, lambda v: v["side"] in ("left", "right")), ({"format": {"type": "text"}}, None)):
        answer = respond(api, "think", text=text)
        (kind, thought), (_, content) = items(answer)
        assert kind == "reasoning" and thought == "He wants a <tool_call>{...}." and (check(json.loads(content)) if check else content == "It is <b>noon</b>.")
    cut = respond(api, "think", extra_body={"thinking_token_budget": 3})
    assert 0 < len(items(cut)[0][1]) < 20 and cut.usage.output_tokens_details.reasoning_tokens < 16
    for choice in ("required", {"type": "function", "name": "pick"}, {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "pick"}]}):
        assert {valid(c) for c in items(respond(plain, "text", tools=FLAT_PICK, tool_choice=choice, parallel_tool_calls=False))} <= {"pick", "stop"}


def test_a_conversation_of_responses(server, api):
    first = api.responses.create(model="m", input=[{"role": "user", "content": [{"type": "input_text", "text": "both"}]}], tools=FLAT)
    call = first.output[1]
    history = [{"role": "user", "content": "both"}, *(item.model_dump(exclude_none=True) for item in first.output),
               {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}, {"role": "user", "content": "text"}]
    assert api.responses.create(model="m", input=history, tools=FLAT, instructions="I").output_text == SCRIPTS["text"]


@pytest.mark.parametrize("field", [{"previous_response_id": "r"}, {"background": True}, {"text": {"format": {"type": "json_schema"}}},
                                   {"text": {"verbosity": "low"}}, {"include": ["message.output_text.logprobs"]},
                                   {"tools": [{"type": "web_search"}]}, {"tool_choice": "required"}, {"input": 5}, {"input": []}, {"reasoning": {"effort": "some"}},
                                   {"input": [{"type": "item_reference", "id": "x"}]}, {"input": [{"role": "robot", "content": "x"}]}])
def test_responses_refuse(server, field):
    answer = server.post("/v1/responses", {"model": "m", "input": "one", **field})
    assert answer.status == 400 and answer.error()["param"] == next(iter(field))


# ---- Messages ----

ANTHROPIC = [{"name": t["function"]["name"], "input_schema": t["function"].get("parameters", {"type": "object"})} for t in TOOLS]


@pytest.fixture(scope="module")
def messages_client(server):
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.address[1]}", api_key="none", max_retries=0)


def blocks(message):
    return [{"text": lambda b: ("text", b.text), "thinking": lambda b: ("thinking", b.thinking), "tool_use": lambda b: (b.name, b.input)}[b.type](b)
            for b in message.content]


def converse(messages_client, name, **more):
    request = dict(model="m", max_tokens=more.pop("max_tokens", 2000), messages=[{"role": "user", "content": name}], **more)
    one = messages_client.messages.create(**request)
    with messages_client.messages.stream(**request) as stream:
        two = stream.get_final_message()
    assert blocks(one) == blocks(two) and (one.stop_reason, one.stop_sequence) == (two.stop_reason, two.stop_sequence)
    assert one.usage.output_tokens == two.usage.output_tokens > 0 and one.role == "assistant" and one.id.startswith("msg_")
    return one


def test_messages(server, messages_client):
    answer = converse(messages_client, "one", tools=ANTHROPIC)
    assert blocks(answer) == [("text", "Let me look."), ("get_weather", {"city": "Zürich</tool_call>", "days": 2})]
    assert answer.stop_reason == "tool_use"
    answer = converse(messages_client, "two", tools=ANTHROPIC)
    assert blocks(answer) == [("get_weather", {"city": "Ulm"}), ("get_time", {})] and len({b.id for b in answer.content}) == 2
    one = converse(messages_client, "two", tools=ANTHROPIC, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert blocks(one) == [("get_weather", {"city": "Ulm"})]
    answer = converse(messages_client, "think", system=[{"type": "text", "text": "Be brief."}], thinking={"type": "enabled", "budget_tokens": 1024})
    assert blocks(answer) == [("thinking", "He wants a <tool_call>{...}."), ("text", "It is <b>noon</b>.")] and answer.stop_reason == "end_turn"
    answer = converse(messages_client, "text", max_tokens=3)
    assert answer.stop_reason == "max_tokens" and SCRIPTS["text"].startswith(answer.content[0].text)
    body = {"max_tokens": 128000, "messages": [{"role": "user", "content": "text"}]}  # more than the model has
    assert server.post("/v1/messages", body).json()["stop_reason"] == "end_turn"
    answer = converse(messages_client, "text", stop_sequences=["here"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "here") and answer.content[0].text == "No tools "
    assert len(blocks(converse(messages_client, "long", tools=ANTHROPIC))[0][1]["city"]) > 1000
    assert blocks(converse(messages_client, "broken", tools=ANTHROPIC)) == [("text", SCRIPTS["broken"])]


def test_constraints_of_messages(server, messages_client):
    tools = [{"name": t["function"]["name"], "input_schema": t["function"].get("parameters", pick())} for t in PICK]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "pick"}):
        answer = converse(messages_client, "think", tools=tools, tool_choice=choice)
        assert [b.type for b in answer.content] == ["thinking", "tool_use"] and answer.stop_reason == "tool_use"
        assert valid((answer.content[1].name, json.dumps(answer.content[1].input))) in ("pick", "stop")
    answer = converse(messages_client, "think", thinking={"type": "enabled", "budget_tokens": 3})
    assert answer.content[0].type == "thinking" and 0 < len(answer.content[0].thinking) < 20
    body = {"max_tokens": 900, "messages": [{"role": "user", "content": "think"}], "thinking": {"type": "disabled", "budget_tokens": 3},
            "output_config": {"format": {"type": "json_schema", "schema": pick(side={"enum": ["left", "right"]})}}}
    content = server.post("/v1/messages", body).json()["content"]
    assert content[0]["thinking"] == "He wants a <tool_call>{...}." and json.loads(content[1]["text"])["side"] in ("left", "right")


def test_thinking_that_is_not_shown(server, messages_client):
    """display omitted: the block is there, and is empty; the tokens count."""
    for kind in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}):
        shown = converse(messages_client, "both", tools=ANTHROPIC, thinking={**kind, "display": "summarized"})
        hidden = converse(messages_client, "both", tools=ANTHROPIC, thinking={**kind, "display": "omitted"})
        assert shown.content[0].thinking == "Look it up: yes." and [b.type for b in hidden.content] == ["thinking", "tool_use"]
        assert hidden.content[0].thinking == "" and hidden.content[1].input == shown.content[1].input and hidden.usage.output_tokens == shown.usage.output_tokens
    body = {"max_tokens": 900, "messages": [{"role": "user", "content": "think"}], "thinking": {"type": "adaptive", "display": "omitted"}}
    assert "He wants" not in server.post("/v1/messages", {**body, "stream": True}).body.decode()
    for more in ({"thinking": {"type": "adaptive", "display": "some"}}, {"thinking": {"type": "adaptive", "display": 5}}, {"output_format": {"type": "json_schema", "schema": {}}}):
        answer = server.post("/v1/messages", {**body, **more})
        assert answer.status == 400 and answer.json()["error"]["message"].startswith(next(iter(more))), answer.body


def test_batches_of_other_routes(tmp_path):
    """A batch over HTTP and a batch file have the lines of /v1/responses and /v1/messages, too."""
    folder = str(tmp_path / "m")
    write_model(folder, SCRIPTS, HERMES)
    bodies = {"/v1/responses": {"input": "think", "tools": FLAT_PICK, "tool_choice": {"type": "function", "name": "pick"}},
              "/v1/messages": {"max_tokens": 900, "messages": [{"role": "user", "content": "think"}], "tool_choice": {"type": "tool", "name": "pick"},
                               "tools": [{"name": "pick", "input_schema": PICK[0]["function"]["parameters"]}]}}
    with Server("-m", folder, "--served-model-name", "m", "--files-dir", str(tmp_path / "files")) as s:
        api = client(s)
        for route, body in bodies.items():
            line = json.dumps({"custom_id": "a", "method": "POST", "url": route, "body": body})
            file = api.files.create(file=("in.jsonl", line.encode()), purpose="batch")
            batch = api.batches.create(input_file_id=file.id, endpoint=route, completion_window="24h")
            for _ in range(200):
                batch = api.batches.retrieve(batch.id)
                if batch.status in ("completed", "failed"):
                    break
                time.sleep(0.05)
            answer = json.loads(api.files.content(batch.output_file_id).text)["response"]["body"]
            call = answer["output"][1] if "output" in answer else answer["content"][1]
            assert batch.status == "completed" and call["type"] in ("function_call", "tool_use")
            assert valid((call["name"], call["arguments"] if "output" in answer else json.dumps(call["input"]))) == "pick"
    lines, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text("".join(json.dumps({"custom_id": route, "method": "POST", "url": route, "body": body}) + "\n" for route, body in bodies.items()))
    subprocess.run([TOKA, "batch", "-m", folder, "-i", str(lines), "-o", str(out)], check=True, capture_output=True, env={**os.environ, "TOKA_DEVICE": "cpu"})
    answers = {x["custom_id"]: x["response"]["body"] for x in map(json.loads, out.read_text().splitlines())}
    assert len(answers) == len(out.read_text().split("\n")) - 1 == 2  # the model's line feeds are none of the file
    (thought, call), message = answers["/v1/responses"]["output"], answers["/v1/messages"]
    assert thought["type"] == "reasoning" and valid((call["name"], call["arguments"])) == "pick" and answers["/v1/responses"]["usage"]["output_tokens_details"]["reasoning_tokens"] > 3
    assert message["content"][0]["type"] == "thinking" and valid(("pick", json.dumps(message["content"][1]["input"]))) and message["stop_reason"] == "tool_use"


def test_a_conversation_of_messages(server, messages_client):
    first = messages_client.messages.create(model="m", max_tokens=200, tools=ANTHROPIC, messages=[{"role": "user", "content": "both"}])
    use = first.content[-1]
    messages = [{"role": "user", "content": [{"type": "text", "text": "both"}]}, {"role": "assistant", "content": [b.model_dump() for b in first.content]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "12:00"}]}]},
                {"role": "user", "content": "text"}]
    answer = messages_client.messages.create(model="m", max_tokens=200, tools=ANTHROPIC, messages=messages)
    assert blocks(answer) == [("text", SCRIPTS["text"])]
    begun = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "Half a"}]  # is continued
    shown = server.post("/tokenize", {"messages": begun, "continue_final_message": True}).json()["count"]
    assert messages_client.messages.count_tokens(model="m", messages=begun).input_tokens == shown < server.post("/tokenize", {"messages": begun}).json()["count"]
    counted = messages_client.messages.count_tokens(model="m", tools=ANTHROPIC, messages=messages)
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


@pytest.mark.parametrize("field", [{"max_tokens": None}, {"tool_choice": {"type": "any"}}, {"tool_choice": {"type": "some"}}, {"thinking": {"type": "enabled", "budget_tokens": -1}}, {"thinking": {"type": "bogus"}}, {"thinking": {}}, {"tools": [{"type": "web_search_20250305", "name": "w"}]},
                                   {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, {"messages": [7]},
                                   {"output_config": {"format": {"type": "json_schema"}}}, {"output_config": {"effort": "some"}}, {"system": 3}])
def test_messages_refuse(server, field):
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "one"}], **field}
    answer = server.post("/v1/messages", body)
    error = answer.json()
    assert answer.status == 400 and error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert next(iter(field)) in error["error"]["message"]


def test_keys_of_messages(tmp_path):
    write_model(str(tmp_path), {"a": "Answer."}, "")
    with Server("-m", str(tmp_path), "--api-key", "secret") as s:
        body = {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
        assert s.post("/v1/messages", body).status == 401 and s.post("/v1/messages", body).json()["type"] == "error"
        assert s.post("/v1/messages", body, **{"x-api-key": "wrong"}).status == 401
        assert s.post("/v1/messages", body, **{"x-api-key": "secret"}).json()["content"] == [{"type": "text", "text": "Answer."}]


def test_a_batch(tmp_path):
    """Lines of a batch have calls and reasoning, too; the flags are those of the server."""
    folder, lines = str(tmp_path / "m"), tmp_path / "in.jsonl"
    write_model(folder, SCRIPTS, HERMES)
    body = {"messages": [{"role": "user", "content": "both"}], "tools": TOOLS, "stop": ["Look", "CET"]}
    lines.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n")
    for flags, calls in (((), 1), (("--tool-call-parser", "none", "--reasoning-parser", "qwen3"), 0)):
        out = tmp_path / f"out{calls}.jsonl"
        subprocess.run([TOKA, "batch", "-m", folder, "-i", str(lines), "-o", str(out), *flags], check=True, capture_output=True,
                       env={**os.environ, "TOKA_DEVICE": "cpu"})
        message = json.loads(out.read_text())["response"]["body"]["choices"][0]["message"]
        assert message["reasoning"] == "Look it up: yes." and len(message.get("tool_calls", [])) == calls
    for flags, text in ((("--tool-call-parser", "herms"), "did you mean hermes?"), (("--default-chat-template-kwargs", "[1]"), "expected a JSON object")):
        bad = subprocess.run([TOKA, "batch", "-m", folder, "-i", str(lines), "-o", str(tmp_path / "x"), *flags], capture_output=True, text=True,
                             env={**os.environ, "TOKA_DEVICE": "cpu"})
        assert bad.returncode == 1 and flags[0] in bad.stderr and text in bad.stderr


def test_a_device_that_fails(tmp_path):
    """The failure is an event of the stream, or an error, in the form of each API."""
    write_model(str(tmp_path), {"a": " ".join(map(str, range(2000, 2100)))}, "")
    bodies = {"/v1/messages": {"max_tokens": 500, "messages": [{"role": "user", "content": "a"}]}, "/v1/responses": {"input": "a"}}
    for path, body in bodies.items():
        for stream in (True, False):
            with Server("-m", str(tmp_path), env={"TOKA_DEBUG_FAULT": "60"}) as s:
                answer = s.post(path, {**body, "stream": stream})
            text = answer.body.decode()
            if not stream or answer.status == 500:  # it may fail before the first byte was sent
                assert answer.status == 500 and "the device failed" in answer.json()["error"]["message"]
                assert ("type" in answer.json()) == (path == "/v1/messages")
                continue
            last = text.strip().split("\n\n")[-1].split("\n")
            data = json.loads(last[1].removeprefix("data: "))
            assert last[0] == "event: error" and data["type"] == "error" and "[DONE]" not in text
            assert "the device failed" in (data["error"] if path == "/v1/messages" else data)["message"]
