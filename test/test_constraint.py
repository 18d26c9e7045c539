"""Constraints: random regular expressions against Python's re, random schemas against jsonschema, and requests over HTTP, in
batches and on the command line. Run through test/run.sh."""
import json
import math
import os
import random
import re
import select
import socket
import subprocess
import time

import pytest

import make_lark
from server import ROOT, Server, texts
from test_batch import SMALL, body, completion, run
from test_cli import PROBLEM, toka

HERE = os.path.dirname(os.path.abspath(__file__))
SCHEMA, OBJECT, CHOICE, REGEX, GBNF = 1, 2, 3, 4, 5  # toka_grammar.kind
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
          "required": ["name", "age"], "additionalProperties": False}


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    out = str(tmp_path_factory.mktemp("build") / "con_driver")
    flags = os.environ.get("TOKA_TEST_CFLAGS", "-O1").split()
    subprocess.run(["cc", "-std=c11", *flags, "-o", out, HERE + "/con_driver.c", "-lm", "-lpthread"], check=True)
    return out


def ask(driver, lines, *tokenizer):
    r = subprocess.run([driver, *tokenizer], input="".join(json.dumps(x) + "\n" for x in lines).encode(), stdout=subprocess.PIPE, check=True)
    return [json.loads(x) for x in r.stdout.splitlines()]


# ---- Regular expressions ----

def random_regex(rnd, depth=0):
    atoms = ["a", "b", "c", "é", "[ab]", "[^a]", ".", r"\d", r"\w", r"\s", "[a-c1]", r"\.", r"\x61"]
    kind = rnd.random()
    if depth > 3 or kind < 0.35:
        return rnd.choice(atoms)
    if kind < 0.6:
        return "".join(random_regex(rnd, depth + 1) for _ in range(rnd.randint(1, 3)))
    if kind < 0.75:
        return "(" + rnd.choice(["", "?:"]) + "|".join(random_regex(rnd, depth + 1) for _ in range(rnd.randint(1, 3))) + ")"
    inner = random_regex(rnd, depth + 1)
    inner = inner if len(inner) == 1 else f"({inner})"
    return inner + rnd.choice(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "{0,2}"])


def mutate(rnd, text, alphabet):
    text = list(text)
    for _ in range(rnd.randint(0, 2)):
        at = rnd.randint(0, len(text))
        text[at:at + rnd.randint(0, 1)] = rnd.choices(alphabet, k=rnd.randint(0, 2))
    return "".join(text)


def test_random_regexes_equal_re(driver):
    rnd = random.Random(1)
    lines = []
    for _ in range(1500):
        alphabet = "abcé1 .\n_Z"
        lines.append({"kind": REGEX, "grammar": random_regex(rnd), "texts": ["".join(rnd.choices(alphabet[:rnd.randint(1, 10)], k=rnd.randint(0, 6)))
                                                                             for _ in range(30)]})
    accepted = 0
    for line, got in zip(lines, ask(driver, lines)):
        want = [bool(re.fullmatch(line["grammar"], t, re.ASCII)) for t in line["texts"]]
        assert [a == -1 for a in got["accepted"]] == want, (line, got)
        accepted += sum(want)
    assert accepted > 2000


def test_random_patterns_equal_search(driver):
    """`pattern` of a schema is a search in the decoded text."""
    rnd = random.Random(2)
    lines, texts = [], []
    for _ in range(800):
        pattern = rnd.choice(["", "^", "^", "(^a|b)"]) + random_regex(rnd) + rnd.choice(["", "$", "$", "(c$|a)"])
        texts.append(["".join(rnd.choices('abcé1 "\\_Z', k=rnd.randint(0, 6))) for _ in range(30)])
        lines.append({"kind": SCHEMA, "grammar": json.dumps({"type": "string", "pattern": pattern}),
                      "texts": [json.dumps(t, ensure_ascii=False) for t in texts[-1]]})
    accepted = 0
    for line, text, got in zip(lines, texts, ask(driver, lines)):
        pattern = json.loads(line["grammar"])["pattern"]
        want = [bool(re.search(pattern, t, re.ASCII)) for t in text]
        if "error" in got:
            assert "no text" in got["error"] and not any(want), (line, got)
            continue
        assert [a == -1 for a in got["accepted"]] == want, (line, got)
        accepted += sum(want)
    assert accepted > 2000


def test_lengths_beside_a_pattern(driver):
    """Every text of a and b up to 7 characters is decided by re and its length; each is refused at the first byte with which no valid text
    begins."""
    rnd = random.Random(5)
    every = ["".join("ab"[n >> i & 1] for i in range(length)) for length in range(8) for n in range(1 << length)]

    def expression(depth):
        kind = rnd.random()
        if depth == 3 or kind < 0.3:
            return rnd.choice(["a", "b", "ab", "ba"])
        if kind < 0.7:
            return "".join(expression(depth + 1) for _ in range(rnd.randint(1, 3)))
        return "(" + "|".join(expression(depth + 1) for _ in range(rnd.randint(1, 3))) + ")" + rnd.choice(["*", "+", "?", "{2}", "{1,3}"])
    lines, wanted = [], []
    for _ in range(250):
        schema = {"type": "string", "pattern": f"^({expression(0)})$", "maxLength": rnd.randint(0, 7)}
        if rnd.random() < 0.6:
            schema["minLength"] = rnd.randint(0, 5)
        if rnd.random() < 0.2:
            schema["not"] = {"pattern": f"^({expression(1)})$"}
        valid = {json.dumps(t) for t in every if schema.get("minLength", 0) <= len(t) <= schema["maxLength"] and re.search(schema["pattern"], t)
                 and not ("not" in schema and re.search(schema["not"]["pattern"], t))}
        begins = {t[:i] for t in valid for i in range(len(t) + 1)}
        texts = [json.dumps(t) for t in every]
        lines.append({"kind": SCHEMA, "grammar": json.dumps(schema), "texts": texts})
        wanted.append(valid and [-1 if t in valid else next(i for i in range(len(t)) if t[:i + 1] not in begins) for t in texts])
    answers = ask(driver, lines)
    assert sum(bool(want) for want in wanted) > 120
    for line, want, got in zip(lines, wanted, answers):
        assert "no text" in got["error"] if not want else got.get("accepted") == want, (line["grammar"], got)


# ---- Grammars ----

def language(rules, longest):
    """The texts of each rule with at most so many characters: rules grow until nothing is new."""
    texts = {name: set() for name in rules}

    def join(left, right):
        return {a + b for a in left for b in right if len(a + b) <= longest}

    def of(symbol, quantifier):
        one = texts[symbol] if symbol in texts else {symbol}
        if quantifier == "?":
            return one | {""}
        many, last = {""} if quantifier else one, None
        while quantifier and many != last:
            last, many = many, many | join(many, one)
        return many
    while True:
        size = sum(map(len, texts.values()))
        for name, choices in rules.items():
            for choice in choices:
                out = {""}
                for symbol, quantifier in choice:
                    out = join(out, of(symbol, quantifier))
                texts[name] |= out
        if sum(map(len, texts.values())) == size:
            return texts


def test_random_grammars_equal_their_language(driver):
    """Rules call themselves on the left, also behind others that may match nothing."""
    rnd = random.Random(2)
    every = ["".join("ab"[n >> i & 1] for i in range(length)) for length in range(5) for n in range(1 << length)]
    lines, wanted = [], []
    for _ in range(500):
        rules = {name: [[(rnd.choice(["a", "b", "root", "x", "y"]), rnd.choice(["", "", "", "?", "*"])) for _ in range(rnd.choice([0, 1, 2, 2, 3]))]
                        for _ in range(rnd.randint(1, 3))] for name in ("root", "x", "y")}
        text = "".join(f"{name} ::= " + " | ".join(" ".join((f'"{x}"' if x in "ab" else x) + q for x, q in choice) or '""' for choice in choices) + "\n"
                       for name, choices in rules.items())
        lines.append({"kind": GBNF, "grammar": text, "texts": every})
        wanted.append(language(rules, 4)["root"])
    compared = 0
    for line, want, got in zip(lines, wanted, ask(driver, lines)):
        if "error" in got:
            assert not want and "there is no text that it allows" in got["error"], line["grammar"]
            continue
        assert all((t in want) == (at == -1) or at == -2 for t, at in zip(every, got["accepted"])), line["grammar"]
        compared += -2 not in got["accepted"]
    assert compared > 400, compared


# ---- Lark ----

def compare_lark(driver, cases):
    """cases: grammars, texts, and what llguidance says of each. Returns how many texts are accepted. A grammar with rules that no text can
    complete is refused by toka as soon as it goes on so, by llguidance at the end of the text."""
    accepted = n_left = 0
    answers = ask(driver, [{"kind": GBNF, "grammar": c["grammar"], "texts": c["texts"]} for c in cases])
    for line, got in zip(cases, answers):
        if "error" in got:
            n_left += 1
            assert "there is no text" in got["error"] and -1 not in line["accepted"], (line, got)
            continue
        for text, mine, other in zip(line["texts"], got["accepted"], line["accepted"]):
            assert mine == other or -1 < mine < other, (line["grammar"], text, mine, other)
            accepted += mine == -1
    assert n_left < len(cases) / 6 and all("error" not in got for got in answers[:len(make_lark.CORPUS)])
    return accepted


def test_lark_is_read_as_llguidance_reads_it(driver):
    cases = json.load(open(HERE + "/lark.json", encoding="utf-8"))
    assert len(cases) > 150 and compare_lark(driver, cases) > 180


def test_random_lark_grammars_equal_llguidance(driver):
    pytest.importorskip("llguidance")
    read, seed = make_lark.judge(), random.randrange(1 << 30)
    cases = [{"grammar": g, "texts": t, "accepted": [read(g, x) for x in t]} for g, t in make_lark.cases(seed)]
    print("seed", seed)
    compare_lark(driver, [c for c in cases if None not in c["accepted"]])


# ---- Schemas ----

TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}
NAMES = ["a", "b", "ab", "x", "é\""]


def random_schema(rnd, depth=0):
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"] + (["object", "array", "anyOf", "allOf", "types", "not", "oneOf", "if"] * 2 if depth < 3 else [])
    kind = rnd.choice(kinds)
    maybe = lambda p=0.5: rnd.random() < p  # noqa: E731
    inner = lambda: random_schema(rnd, depth + 1)  # noqa: E731
    if kind == "enum":
        return {"enum": [random_value(rnd, 2) for _ in range(rnd.randint(1, 3))]}
    if kind == "const":
        return {"const": random_value(rnd, 2)}
    if kind == "not":
        return {**inner(), "not": simple(rnd)}
    if kind == "if":
        return {**inner(), "if": simple(rnd), "then": inner(), **({"else": inner()} if maybe() else {})}
    if kind == "oneOf":
        return {kind: [simple(rnd) for _ in range(rnd.randint(1, 2))] + [inner()]}
    if kind in ("anyOf", "allOf"):
        return {kind: [inner() for _ in range(rnd.randint(1, 2))]}
    if kind == "types":
        return {"type": rnd.sample(["string", "integer", "null", "boolean"], 2)}
    s = {"type": kind}
    if kind == "string":
        if maybe():
            s["minLength"] = rnd.randint(0, 2)
        if maybe():
            s["maxLength"] = rnd.randint(1, 4)
        if maybe(0.3):
            s["pattern"] = rnd.choice(["^[ab]*$", "a", "^.b", "é$"])
    if kind in ("integer", "number"):
        if maybe():
            s[rnd.choice(["minimum", "exclusiveMinimum"])] = rnd.choice([-11, 0, 3, 9]) if kind == "integer" else rnd.choice([-1.5, 0, 0.25])
        if maybe():
            s[rnd.choice(["maximum", "exclusiveMaximum"])] = rnd.choice([0, 10, 105]) if kind == "integer" else rnd.choice([0.5, 2.25, 10])
        if maybe(0.3):
            s["multipleOf"] = rnd.choice([2, 3]) if kind == "integer" else rnd.choice([0.5, 0.25])
    if kind == "array":
        s["items"] = inner()
        if maybe(0.3):
            s["prefixItems"] = [inner() for _ in range(rnd.randint(1, 2))]
        if maybe():
            s["minItems"] = rnd.randint(0, 2)
        if maybe():
            s["maxItems"] = rnd.randint(1, 3)
        if maybe(0.25):
            s["contains"] = simple(rnd)
            if maybe():
                s[rnd.choice(["minContains", "maxContains"])] = rnd.randint(0, 2)
        if s.get("maxItems") == 1:
            s["uniqueItems"] = True
    if kind == "object" and maybe(0.2):
        s[rnd.choice(["dependencies", "dependentRequired"])] = {rnd.choice(NAMES): rnd.sample(NAMES, 1)}
        if "dependencies" in s:
            s["dependentSchemas"] = {rnd.choice(NAMES): {"properties": {rnd.choice(NAMES): inner()}}}
            del s["dependencies"]
    if kind == "object":
        s["properties"] = {n: inner() for n in rnd.sample(NAMES, rnd.randint(0, 3))}
        if maybe():
            s["required"] = rnd.sample(NAMES, rnd.randint(0, 2))
        if maybe():
            s["additionalProperties"] = rnd.choice([False, True, {"type": "integer"}])
        if maybe(0.3):
            s["patternProperties"] = {rnd.choice(["^a", "b$"]): inner()}
        if maybe(0.2):
            s["minProperties"] = rnd.randint(0, 2)
        if maybe(0.2):
            s["maxProperties"] = rnd.randint(1, 3)
        if maybe(0.2):
            s["propertyNames"] = rnd.choice([{"pattern": "^[ab]"}, {"maxLength": 1}, {"enum": ["a", "b", "ab"]}, {"const": "a"}, False, {"type": "null"}])
    return s


def simple(rnd):
    """A schema that has an opposite."""
    return rnd.choice([{"type": rnd.choice(["string", "number", "object", "null"])}, {"required": rnd.sample(NAMES, rnd.randint(1, 2))},
                       {"properties": {rnd.choice(NAMES): {"const": rnd.choice([1, "a", None, True])}}}, {"enum": ["a", None, 2]}, {"const": "ab"},
                       {"type": "string", "pattern": "^a"}, {"minimum": 3}, {"type": "number", "exclusiveMaximum": 2.5}, {"minLength": 2}, {"maxItems": 1},
                       {"anyOf": [{"type": "string"}, {"required": ["a"]}]}, {"allOf": [{"type": "integer", "maximum": 9}, {"not": {"const": 2}}]}])


def random_value(rnd, depth=0):
    kind = rnd.randint(0, 4 if depth > 2 else 6)
    if kind == 5:
        return [random_value(rnd, depth + 1) for _ in range(rnd.randint(0, 3))]
    if kind == 6:
        return {n: random_value(rnd, depth + 1) for n in rnd.sample(NAMES, rnd.randint(0, 3))}
    return [None, rnd.choice([True, False]), rnd.choice([-12, -3, 0, 1, 2, 6, 9, 10, 104, 1000]), rnd.choice([-1.5, 0.25, 0.5, 0.75, 2.5, 10.25]),
            "".join(rnd.choices('abé"', k=rnd.randint(0, 4)))][kind]


def value_for(rnd, schema, depth=0):
    """A value that may well be valid."""
    if rnd.random() < 0.08 or depth > 5 or not isinstance(schema, dict):
        return random_value(rnd, depth)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rnd.choice(schema["enum"])
    for key in ("anyOf", "allOf", "oneOf"):
        if key in schema:
            return value_for(rnd, rnd.choice(schema[key]), depth + 1)
    kind = schema.get("type")
    if kind == "array":
        prefix = schema.get("prefixItems", [])
        return [value_for(rnd, prefix[i] if i < len(prefix) else schema.get("items"), depth + 1) for i in range(rnd.randint(0, 3))]
    if kind == "object":
        properties, required = schema.get("properties", {}), schema.get("required", [])
        names = list(properties) + [n for n in required if n not in properties] + rnd.sample(NAMES, rnd.randint(0, 1))
        return {n: value_for(rnd, properties.get(n, schema.get("additionalProperties", True)), depth + 1)
                for n in dict.fromkeys(names) if n in required or rnd.random() < 0.6}
    types = sum((t if isinstance(t := TYPES[k], tuple) else (t,) for k in (kind if isinstance(kind, list) else [kind]) if k), ())
    for _ in range(20):
        v = random_value(rnd, 3)
        if not types or isinstance(v, types):
            break
    return v


def in_order(schema, value):
    """Is the order of the members the one that is generated: as in `properties`, required names, others? The schemas that apply
    are not followed through anyOf and allOf, so those are left out."""
    return not any(k in json.dumps(schema) for k in ("anyOf", "allOf", "oneOf", '"if"', '"not"', "dependent", "contains")) and ordered(schema, value)


def ordered(schema, value):
    if not isinstance(schema, dict):
        return True
    if isinstance(value, list):
        prefix = schema.get("prefixItems", [])
        return all(ordered(prefix[i] if i < len(prefix) else schema.get("items"), v) for i, v in enumerate(value))
    if isinstance(value, dict):
        least, of_names = schema.get("minProperties", 0), schema.get("propertyNames") or {}
        more = of_names.get("enum", []) + ([of_names["const"]] if "const" in of_names else []) if least > 1 else []
        names = list(dict.fromkeys(list(schema.get("properties", {})) + list(schema.get("required", [])) + more))
        if len(names_of := [n for n in value if n in names]) + (len(value) > len(names_of)) < least:
            return False  # all other names count as one
        at = [names.index(n) if n in names else len(names) for n in value]
        own, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        of = {n: [own.get(n)] + [s for p, s in patterns.items() if re.search(p, n)] for n in value}
        return at == sorted(at) and all(ordered(s, v) for n, v in value.items() for s in of[n] + [schema.get("additionalProperties")])
    return True


def test_random_schemas_equal_jsonschema(driver):
    """What jsonschema refuses is refused. What it accepts is accepted, if the members are in the order that is generated."""
    jsonschema = pytest.importorskip("jsonschema")
    rnd = random.Random(3)
    schemas, values, lines = [], [], []
    for _ in range(2500):
        schemas.append(random_schema(rnd))
        values.append([value_for(rnd, schemas[-1]) for _ in range(12)] + [random_value(rnd) for _ in range(3)])
        lines.append({"kind": SCHEMA, "grammar": json.dumps(schemas[-1]), "texts": [json.dumps(v, ensure_ascii=False) for v in values[-1]]})
    n_accepted = n_refused = n_errors = n_scalars = 0
    for schema, value, line, got in zip(schemas, values, lines, ask(driver, lines)):
        validator = jsonschema.Draft202012Validator(schema)
        valid = [validator.is_valid(v) for v in value]
        if "error" in got:
            n_errors += 1
            assert "not supported" in got["error"] or "supported only" in got["error"] or "two of them" in got["error"] or "too many schemas" in got["error"] or ("no text" in got["error"] and not any(valid)), (schema, got)
            continue
        for v, ok, at in zip(value, valid, got["accepted"]):
            if not ok:
                assert at != -1, (schema, v)
            elif in_order(schema, v) or not isinstance(v, (list, dict)):
                assert at == -1, (schema, v, at)
                n_scalars += not isinstance(v, (list, dict))
            n_accepted += at == -1
            n_refused += at != -1
    assert n_accepted > 5000 and n_refused > 5000 and n_errors < 900 and n_scalars > 3000, (n_accepted, n_refused, n_errors, n_scalars)


@pytest.mark.parametrize("draft", ["draft7", "draft2020-12"])
def test_official_suite(driver, draft):
    """JSON-Schema-Test-Suite: for each of its files the number of texts that are decided right, whose schema is refused, that are
    wrongly accepted, and wrongly refused, as in json_schema_suite.json. If that gets better, write the new numbers there."""
    folder = os.path.join(os.environ.get("TOKA_TEST_DATA", ROOT + "/../shared/data"), "suites/json-schema", draft)
    if not os.path.isdir(folder):
        pytest.skip("needs the JSON-Schema-Test-Suite in TOKA_TEST_DATA")
    files = {name[:-5]: json.load(open(os.path.join(folder, name))) for name in sorted(os.listdir(folder)) if name.endswith(".json")}
    lines = [{"kind": SCHEMA, "grammar": json.dumps(g["schema"]), "texts": [json.dumps(t["data"], ensure_ascii=False) for t in g["tests"]]}
             for groups in files.values() for g in groups]
    answers, found = iter(ask(driver, lines)), {}
    for name, groups in files.items():
        found[name] = [0, 0, 0, 0]
        for g, got in zip(groups, answers):
            for i, t in enumerate(g["tests"]):
                accepted = "error" not in got and got["accepted"][i] == -1
                found[name][1 if "error" in got else 0 if accepted == t["valid"] else 2 if accepted else 3] += 1
    assert found == json.load(open(HERE + "/json_schema_suite.json"))[draft], json.dumps(found)


def test_tokens_of_a_real_vocabulary(driver):
    """Token by token through the masks: the same answers as byte by byte."""
    lines = [{"kind": SCHEMA, "grammar": json.dumps(PERSON), "texts": ['{"name": "Tom", "age": 5}', '{"name": "Tom", "age": 500}', '{"name":"0123456789"}']},
             {"kind": OBJECT, "grammar": "", "texts": [json.dumps({"a": [1, {"b": "é\n"}], "c": -1.5e9}, indent=2), "[1]"]},
             {"kind": SCHEMA, "grammar": json.dumps({"type": "string", "maxLength": 3000}), "texts": ['"' + "word " * 600 + '"', '"' + "word " * 601 + '"']}]
    bytewise, tokens = ask(driver, lines), ask(driver, lines, ROOT + "/test/model/tokenizer.json")
    assert [[a == -1 for a in x["accepted"]] for x in bytewise] == [[a == -1 for a in x["accepted"]] for x in tokens] == [[True, False, False], [True, False], [True, False]]


# ---- Requests ----

FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
# field, value, what the text must be
REQUESTS = [("response_format", FORMAT, PERSON), ("response_format", {"type": "json_object", "schema": PERSON}, PERSON),
            ("guided_json", PERSON, PERSON), ("guided_json", json.dumps(PERSON), PERSON), ("json_schema", json.dumps(PERSON), PERSON),
            ("structured_outputs", {"json": PERSON, "disable_any_whitespace": True, "regex": None}, PERSON),
            ("structured_outputs", {"regex": "[a-z]{3}-[0-9]+x"}, "[a-z]{3}-[0-9]+x"), ("guided_regex", "a|bc", "a|bc"), ("regex", "a|bc", "a|bc"),
            ("structured_outputs", {"choice": ["yes", "no"]}, "yes|no"), ("guided_choice", ["yes"], "yes"),
            ("structured_outputs", {"grammar": 'root ::= "x" y\ny ::= [0-9]{2}'}, "x[0-9]{2}"), ("guided_grammar", 'root ::= "ab"', "ab"), ("ebnf", 'root ::= "ab"', "ab"),
            ("structured_outputs", {"grammar": '?start: sum ";"\nsum: sum "+" N | N\nN: "0".."9"~1..2\n%import common.WS_INLINE\n%ignore WS_INLINE'}, r"\d{1,2}(\s*\+\s*\d{1,2})*\s*;"),
            ("guided_grammar", 'start: ("a" | B)~2..3\nB: "b"i "!"', "(a|[bB]!){2,3}")]


def check_text(text, want):
    if isinstance(want, str):
        assert re.fullmatch(want, text), (text, want)
    else:
        v = json.loads(text)
        assert list(v) == ["name", "age"] and len(v["name"]) <= 9 and 0 <= v["age"] <= 120


@pytest.fixture(scope="module")
def server():
    s = Server("--max-num-seqs", "16", "--max-model-len", "256")
    yield s
    s.p.terminate()
    s.p.wait()


def streamed_texts(server, path, fields):
    """What each sample has said after each event of the stream."""
    texts = [[""] for _ in range(fields["n"])]
    for event in server.post(path, {**fields, "stream": True}).body.decode().split("\n\n"):
        if event.startswith("data: {"):
            for c in json.loads(event[6:])["choices"]:
                texts[c["index"]].append(texts[c["index"]][-1] + (c["delta"].get("content") or "" if "delta" in c else c["text"]))
    return texts


@pytest.mark.parametrize("field, value, want", REQUESTS)
def test_requests(server, field, value, want):
    for chat in (False, True):
        prompt = {"messages": [{"role": "user", "content": PROBLEM}]} if chat else {"prompt": PROBLEM}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        fields = {**prompt, field: value, "n": 3, "max_tokens": 150, "temperature": 1.5, "seed": 1, "logprobs": True if chat else 2}
        answer = json.loads(server.post(path, fields).body)
        assert "choices" in answer, answer
        choices = answer["choices"]
        texts = [c["message"]["content"] if chat else c["text"] for c in choices]
        for c, text in zip(choices, texts):
            if c["finish_reason"] == "stop":
                check_text(text, want)
        assert any(c["finish_reason"] == "stop" for c in choices)
        assert [pieces[-1] for pieces in streamed_texts(server, path, fields)] == texts


# Schemas without an end that is near: arrays of themselves, long strings, names in any number
ENDLESS = [{"type": "array", "items": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "minItems": 1}, {"type": "string", "minLength": 200, "pattern": "^([a-z]+ )+"},
           {"type": "object", "additionalProperties": {"type": ["integer", "string"]}, "minProperties": 1},
           {"type": "object", "properties": {"a": {"enum": ["x\n", "é", 1.5]}, "b": {"type": "string", "format": "date-time"}}, "required": ["b"]}]


def test_every_streamed_text_is_a_beginning(server, driver):
    """Each text of a stream, wherever max_tokens cuts it, is the beginning of a text that is accepted: the driver, which has no masks,
    reads it to its end. So each byte of each stream is one that may stand there."""
    asked, texts = [], []
    for i, (schema, tokens) in enumerate((s, t) for s in [PERSON, *ENDLESS] for t in (1, 4, 17, 60)):
        path, prompt = [("/v1/completions", {"prompt": PROBLEM}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROBLEM}]})][i % 2]
        fields = {**prompt, "guided_json": schema, "n": 6, "max_tokens": tokens, "temperature": 2, "seed": i, "presence_penalty": i % 3, "stop": ["zq"]}
        asked.append({"kind": SCHEMA, "grammar": json.dumps(schema)})
        texts.append([text for pieces in streamed_texts(server, path, fields) for text in pieces])
    answers = ask(driver, [{**line, "texts": some} for line, some in zip(asked, texts)])
    for line, some, answer in zip(asked, texts, answers):
        assert max(map(len, some)) > 0
        for text, at in zip(some, answer["accepted"]):
            assert at in (-1, len(text.encode())), (line["grammar"], text, at)


@pytest.mark.parametrize("fields, message", [
    ({"response_format": {"type": "structural_tag"}}, "response_format: structural_tag is not supported"),
    ({"response_format": {"type": "json_schema"}}, "response_format: json_schema: schema is missing"),
    ({"response_format": {"type": "xml"}}, "response_format: type: expected"),
    ({"response_format": {**FORMAT, "json_schema": {"schema": {"properties": {"a": {"uniqueItems": True}}}}}}, "response_format: JSON schema: /properties/a/uniqueItems"),
    ({"structured_outputs": {}}, "structured_outputs: expected json"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs: structural_tag is not supported"),
    ({"structured_outputs": {"regex": "a", "structural_tag": "{}"}}, "structured_outputs: structural_tag is not supported"),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": "no"}}, "structured_outputs: disable_any_whitespace: expected true or false"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": 5}}, "structured_outputs: whitespace_pattern: expected a text"),
    ({"structural_tag": "{}"}, "structural_tag is not supported"), ({"grammar": "root ::= x"}, "grammar is not supported"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs: the request has structured_outputs, too"),
    ({"guided_regex": "a", "guided_json": {}}, "the request has guided_json, too"),
    ({"guided_regex": "(a"}, "guided_regex: regex: ( without ) at byte 2"), ({"guided_choice": "a"}, "guided_choice: expected a list"),
    ({"guided_grammar": "start: x"}, "guided_grammar: grammar: the rule x is not defined, at line 1, column 8"),
    ({"guided_regex": "T+", "allowed_token_ids": [56]}, "guided_regex: constraint: nothing is left to draw, as allowed_token_ids forbids all tokens with which it"),
    ({"guided_json": {"properties": {"~a/": {"enum": 3}}}}, "guided_json: JSON schema: /properties/~0a~1/enum: expected a list"), ({"regex": 5}, "regex: expected a text")])
def test_errors(server, fields, message):
    a = server.post("/v1/completions", {"prompt": "x", **fields})
    assert a.status == 400 and message in a.error()["message"] and a.error()["param"] in fields
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status == 200


NONE_LEFT = {"guided_regex": "TTx", "allowed_token_ids": [55], "temperature": 0, "max_tokens": 9}  # 55 is T


def test_no_token_is_left(server, tmp_path):
    """Bans that leave no token in the middle of a text end it with the reason, in every kind of answer; a text that is complete has none."""
    for path, prompt in (("/v1/completions", {"prompt": PROBLEM}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROBLEM}]})):
        c = server.post(path, {**prompt, **NONE_LEFT}).json()["choices"][0]
        assert (c["message"]["content"] if "message" in c else c["text"], c["finish_reason"], c["stop_reason"]) == ("TT", "length", "nothing is left to draw")
        assert b'"stop_reason":"nothing is left to draw"' in server.post(path, {**prompt, **NONE_LEFT, "stream": True}).body
        c = server.post(path, {**prompt, **NONE_LEFT, "guided_regex": "TT"}).json()["choices"][0]
        assert (c["finish_reason"], c["stop_reason"]) == ("stop", None)
    a = body(run(tmp_path, [completion("a", PROBLEM, **NONE_LEFT), completion("b", PROBLEM, **{**NONE_LEFT, "guided_regex": "TT"})])["a"])
    assert (a["choices"][0]["finish_reason"], a["choices"][0]["stop_reason"]) == ("length", "nothing is left to draw")
    params = {"regex": "TTx", "allowed_token_ids": [55], "max_new_tokens": 9, "temperature": 0}
    for regex, want in (("TTx", {"type": "length", "length": 2, "message": "nothing is left to draw"}), ("TT", {"type": "stop", "matched": None})):
        a = server.post("/generate", {"text": PROBLEM, "sampling_params": {**params, "regex": regex}}).json()
        assert (a["text"], a["meta_info"]["finish_reason"]) == ("TT", want)
    quote = server.post("/tokenize", {"prompt": '"', "add_special_tokens": False}).json()["tokens"][-1]
    for const, left in (("TTx", True), ("TT", False)):
        form = {"format": {"type": "json_schema", "name": "x", "schema": {"const": const}}}
        fields = {"allowed_token_ids": [55, quote], "temperature": 0}
        sent = {**fields, "input": PROBLEM, "max_output_tokens": 9, "text": form}
        a = server.post("/v1/responses", sent).json()
        assert (a["status"], a["incomplete_details"]) == (("incomplete", {"reason": "nothing is left to draw"}) if left else ("completed", None)), a
        assert (b'"incomplete_details":{"reason":"nothing is left to draw"}' in server.post("/v1/responses", {**sent, "stream": True}).body) == left
        sent = {**fields, "messages": [{"role": "user", "content": PROBLEM}], "max_tokens": 9, "output_config": form}
        a = server.post("/v1/messages", sent).json()
        want = ("max_tokens", {"type": "none_left", "explanation": "nothing is left to draw"}) if left else ("end_turn", None)
        assert (a["content"][0]["text"], a["stop_reason"], a.get("stop_details")) == ('"TT' + '"' * (not left), *want), a
        assert (b'"stop_details":{"type":"none_left"' in server.post("/v1/messages", {**sent, "stream": True}).body) == left


def test_hostile_schemas_leave_the_others_alone():
    """Two workers: while schemas that take seconds are compiled, other requests are answered, also those with a constraint
    that is known. A client that leaves, and the end of the server, stop the compilation."""
    slow = {"type": "array", "items": [{"type": "string", "minLength": 2, "pattern": f"^((a|b)*a(a|b){{9}}|x{i})$"} for i in range(400)]}
    ask_slow = {"prompt": PROBLEM, "max_tokens": 5, "structured_outputs": {"json": slow}}
    known = {"prompt": PROBLEM, "max_tokens": 5, "temperature": 0, "structured_outputs": {"choice": ["yes", "no"]}}

    def post(fields):
        text = json.dumps(fields)
        return f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()
    with Server("--server-threads", "2") as s:
        want = s.post("/v1/completions", known).json()["choices"][0]["text"]
        assert want in ("yes", "no")
        clients = [socket.create_connection(s.address) for _ in range(12)]
        for client in clients:
            client.sendall(post({**ask_slow, "seed": 1}))
        start = time.monotonic()
        for _ in range(3):
            assert s.post("/v1/completions", known).json()["choices"][0]["text"] == want
            assert s.post("/v1/completions", {"prompt": PROBLEM, "max_tokens": 5}).status == 200
        assert time.monotonic() - start < 5
        for client in clients[2:]:
            client.close()
        s.stop()
        assert time.monotonic() - start < 20
        for client in clients[:2]:
            answer = client.recv(1 << 16)
            assert answer.startswith((b"HTTP/1.1 503", b"HTTP/1.1 400")), answer
            client.close()


TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {}}}
CONSTRAINTS = {"structural_tag": TAG, "grammar": "root ::= \"x\"", "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"},
               "guided_json": {}, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "root ::= \"x\"", "json_schema": "{}", "regex": "a", "ebnf": "root ::= \"x\""}


def test_no_route_leaves_out_a_constraint(server):
    """A field that is a constraint is done on a route, or it is a 400 whose param is its name: none is ignored as an unknown field."""
    message = [{"role": "user", "content": "x"}]
    routes = {"/v1/completions": {"prompt": "x", "max_tokens": 3}, "/v1/chat/completions": {"messages": message, "max_tokens": 3},
              "/v1/responses": {"input": "x", "max_output_tokens": 3}, "/v1/messages": {"messages": message, "max_tokens": 3},
              "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 3}}}
    done = {"/v1/completions": CONSTRAINTS.keys() - {"structural_tag", "grammar"}, "/v1/chat/completions": CONSTRAINTS.keys() - {"structural_tag", "grammar"}}
    cases = [(path, body, field, done.get(path, ())) for path, body in routes.items() for field in CONSTRAINTS]
    cases += [("/generate", routes["/generate"]["sampling_params"], field, ("json_schema", "regex", "ebnf")) for field in CONSTRAINTS]
    for path, body, field, taken in cases:
        fields = {**body, field: CONSTRAINTS[field]}
        a = server.post(path, {"text": "x", "sampling_params": fields} if "max_new_tokens" in fields else fields)
        if field in taken:
            assert a.status == 200, (path, field, a.body)
        else:
            assert a.status == 400 and f"{field} is not supported" in a.error()["message"], (path, field, a.body)
            assert path == "/v1/messages" or (a.error()["param"], a.error()["code"]) == (field, "unsupported_parameter"), (path, field, a.body)
    for path, field, body in (("/v1/responses", "text", {"text": {"format": TAG}}), ("/v1/messages", "output_config", {"output_config": {"format": TAG}}),
                              ("/v1/completions", "response_format", {"response_format": TAG}), ("/v1/chat/completions", "response_format", {"response_format": TAG})):
        a = server.post(path, {**routes[path], **body})
        assert a.status == 400 and a.error()["message"] == f"{field}: structural_tag is not supported"
        assert path == "/v1/messages" or a.error()["param"] == field


def test_strict_changes_nothing(server):
    """The schema holds as it is given, strict or not, also where OpenAI's rules for strict refuse it: a may be absent, c and d may come."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}}, "required": ["b"], "minProperties": 3, "maxProperties": 3,
              "patternProperties": {"^[cd]$": {"type": "null"}}, "additionalProperties": False}
    for path, prompt in (("/v1/completions", {"prompt": PROBLEM}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROBLEM}]})):
        texts = []
        for strict in ({"strict": True}, {"strict": False}, {}):
            fields = {**prompt, "response_format": {"type": "json_schema", "json_schema": {"name": "n", **strict, "schema": schema}}}
            choices = server.post(path, {**fields, "n": 12, "max_tokens": 120, "temperature": 2, "seed": 7}).json()["choices"]
            texts.append([c["message"]["content"] if "message" in c else c["text"] for c in choices if c["finish_reason"] == "stop"])
        values = [json.loads(t) for t in texts[0]]
        assert texts[0] == texts[1] == texts[2] and len(values) > 5 and all(v["b"] in ("x", "y") for v in values), texts
        assert any("a" in v for v in values) and any("a" not in v for v in values), texts


def large_schema(number, n_properties=8000):
    """A schema that takes long to compile; no other number has an equal one."""
    return {"properties": {k: {"properties": {f"{k}{number}_{i}": {"type": "string", "maxLength": i} for i in range(n_properties)}} for k in "ab"}}


def begin(server, body):
    c, data = server.connect(), json.dumps(body)
    return c.send(f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(data)}\r\n\r\n{data}")


def timed_stream(server):
    """The text of a streamed answer, the time to its first chunk, and to its end."""
    start = time.time()
    with begin(server, {"prompt": PROBLEM, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}) as c:
        assert c.head()[0] == 200
        chunks = c.chunks()
        body, first = next(chunks), time.time() - start
        return texts(body + b"".join(chunks))[0][0], first, time.time() - start


def beside_slow_ones(server, number):
    """Streams an answer while three constraints compile. Returns that, the connections of the three, and how many are answered."""
    slow = [begin(server, {"prompt": "x", "max_tokens": 1, "guided_json": large_schema(3 * number + i)}) for i in range(3)]
    assert server.get("/health").status == 200  # the requests were accepted before it
    got = timed_stream(server)
    return got, slow, len(select.select([c.s for c in slow], [], [], 0)[0])


def test_slow_constraints_hold_nobody_up():
    """While three constraints compile, which two threads cannot do at once, another request has its first token and its last before one
    of the three is answered. One of their clients leaves; the others get their answers."""
    with Server("--server-threads", "2", "--max-num-seqs", "16") as s:
        want, *alone = min((timed_stream(s) for _ in range(3)), key=lambda x: x[2])
        for number in range(5):  # tries: the machine may be busy with others
            (text, *took), slow, n_answered = beside_slow_ones(s, number)
            slow[2].close()
            assert text == want and [c.answer().status for c in slow[:2]] == [200, 200]
            s.wait_metric("num_requests_running", 0)
            if not n_answered and all(t < 20 * a + 0.2 for t, a in zip(took, alone)):
                break
        assert not n_answered and all(t < 20 * a + 0.2 for t, a in zip(took, alone)), (n_answered, took, alone)
        assert timed_stream(s)[0] == want


def test_batch_lines(tmp_path):
    lines = [completion(f"x{i}", PROBLEM, **{field: value}, max_tokens=150, seed=i) for i, (field, value, _) in enumerate(REQUESTS)]
    r = run(tmp_path, lines)
    for i, (_, _, want) in enumerate(REQUESTS):
        choice = body(r[f"x{i}"])["choices"][0]
        if choice["finish_reason"] == "stop":
            check_text(choice["text"], want)


def test_command_line(tmp_path):
    (tmp_path / "s.json").write_text(json.dumps(PERSON))
    (tmp_path / "g.gbnf").write_text('root ::= "[" n ("," n){1,2} "]"\nn ::= [0-9]{1,3}\n')
    say = lambda *flags: toka("-p", PROBLEM, "--temp", "1", "--max-tokens", "150", *flags)  # noqa: E731
    check_text(say("--json-schema", str(tmp_path / "s.json")).stdout.decode().rstrip("\n"), PERSON)
    check_text(say("--grammar", str(tmp_path / "g.gbnf")).stdout.decode().rstrip("\n"), r"\[[0-9]{1,3}(,[0-9]{1,3}){1,2}\]")
    (tmp_path / "g.lark").write_text('// a list\nstart: "[" N ("," N)~1..2 "]"\nN: "0".."9"~1..3\n')
    check_text(say("--grammar", str(tmp_path / "g.lark")).stdout.decode().rstrip("\n"), r"\[[0-9]{1,3}(,[0-9]{1,3}){1,2}\]")
    check_text(say("--regex", "[a-z]{3}-[0-9]{2}").stdout.decode().rstrip("\n"), "[a-z]{3}-[0-9]{2}")
    check_text(say("--choice", "yes", "--choice", "no").stdout.decode().rstrip("\n"), "yes|no")
    for flags, message in ((["--regex", "(a"], b"regex: ( without )"), (["--regex", "a", "--choice", "b"], b"exclude each other"),
                           (["--json-schema", str(tmp_path / "none")], b"none: No such file")):
        r = say(*flags)
        assert r.returncode == 1 and message in r.stderr


def test_white_space(tmp_path):
    """Between two tokens of JSON is nothing, one blank, or a line end and blanks or tabs, as toka help constraints says."""
    (tmp_path / "s.json").write_text('{"properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "object"}}}}')

    def status(text):
        return toka("grammar", "--json-schema", str(tmp_path / "s.json"), stdin=text).returncode
    tokens = ["{", '"a"', ":", "1", ",", '"b"', ":", "[", "{", "}", ",", "{", "}", "]", ",", '"c"', ":", "null", "}"]
    for between in ("", " ", "\n", "\r\n", "\n \t "):
        assert status(between.join(tokens)) == 0, between
    for between in ("  ", "\t", "\n\n", " \n"):
        for i in range(1, len(tokens)):
            assert status("".join(tokens[:i]) + between + "".join(tokens[i:])) == 1, (between, tokens[i - 1:i + 1])


def test_white_space_of_requests(server):
    """What stands between two tokens of JSON is what the request allows; disable_additional_properties forbids other names."""
    open_person = {k: v for k, v in PERSON.items() if k != "additionalProperties"}
    for more, allowed in (({}, r" |\r?\n[ \t]{0,40}"), ({"disable_any_whitespace": True}, None), ({"whitespace_pattern": ""}, None),
                          ({"whitespace_pattern": "  "}, "  "), ({"whitespace_pattern": r"\t{1,2}"}, "\t{1,2}"),
                          ({"json": open_person, "disable_additional_properties": True}, r" |\r?\n[ \t]{0,40}")):
        fields = {"prompt": "Tom", "n": 4, "max_tokens": 100, "temperature": 1.5, "seed": 1, "structured_outputs": {"json": PERSON, **more}}
        done = [c["text"] for c in server.post("/v1/completions", fields).json()["choices"] if c["finish_reason"] == "stop"]
        gaps = [g for t in done for g in re.findall(r"\s+", re.sub(r'"(\\.|[^"\\])*"', "#", t))]
        assert done and bool(gaps) == bool(allowed) and all(re.fullmatch(allowed, g) for g in gaps), (more, done)
        assert all(list(json.loads(t)) == ["name", "age"] for t in done), (more, done)


def test_grammar_command(tmp_path):
    date, schema, bench = ["--regex", "[0-9]{4}(-[0-9]{2}){2}"], tmp_path / "s.json", tmp_path / "bench.jsonl"
    lark = ["--grammar", str(tmp_path / "g.lark")]
    (tmp_path / "g.lark").write_text('start: start "+" A | A\nA: /[ab]+/\n%ignore " "\n')
    schema.write_text(json.dumps(PERSON))
    for flags, text, want in ((date, "2026-01-31", "accepted"), (date, "2026-01-3x", "refused at byte 9: expected 0 to 9"),
                              (date, "2026-01-310", "refused at byte 10: expected the end"), (date, "", "refused at byte 0: expected 0 to 9"),
                              (["--json-schema", str(schema)], '{"name": "A", "age": 121}', "refused at byte 23: expected \\x0A, \\x0D, \\x20, 0, }"),
                              (lark, "ab + b+a", "accepted"), (lark, "ab c", "refused at byte 3: expected the end, \\x20, +"), (lark, "a+", "refused at byte 2: expected \\x20, a to b"),
                              (["--choice", "yes", "--choice", "né"], "né", "accepted"),
                              (["--choice", "a", "--choice", "ab"], "ac", "refused at byte 1: expected the end, b")):
        r = toka("grammar", *flags, stdin=text)
        assert r.stdout.decode() == want + "\n" and r.returncode == (want != "accepted"), r
    for stdin, want in ((b"\xff", "refused at byte 0: expected \\x00 to \\x09, \\x0B to \\x7F, \\xC2 to \\xF4"), (b"a\xc3", "refused at byte 2: expected \\x80 to \\xBF")):
        assert toka("grammar", "--regex", ".+", stdin=stdin).stdout.decode() == want + "\n"  # no UTF-8: no tokens, byte by byte
    out = toka("grammar", *date, "--stats", stdin="2026-01-31").stdout.decode().splitlines()
    assert out[0] == "accepted" and out[1].startswith("compile, us: n 1,") and out[2].startswith("mask, us: n ")
    (tmp_path / "bad.lark").write_text('start: a\na: "x" (')
    for flags, message in (([], b"needs --json-schema"), (["--grammar", str(tmp_path / "bad.lark")], b"grammar: a bracket without its second one at line 2, column 9"), (["--regex", "("], b"( without )"), (["--maskbench", str(tmp_path / "none")], b"No such file"),
                           (["--maskbench", "-", "--regex", "a"], b"--maskbench has schemas of its own")):
        r = toka("grammar", *flags)
        assert r.returncode == 1 and message in r.stderr and not r.stdout
    # "order" is valid, but for the order of its members, also inside; a is a wrong acceptance, b a wrong rejection
    order = {"type": "object", "properties": {"z": {"type": "integer"}, "a": PERSON}, "required": ["a"]}
    tests = [(order, [({"a": {"age": 3, "name": "x"}, "z": 1}, True), ({"z": 1}, False), ({"a": {"age": 300, "name": "x"}, "z": 1}, False)]),
             ({"type": "integer"}, [(5, False)]), ({"type": "integer"}, [("x", True)]), ({"type": "nothing"}, [])]
    bench.write_text("".join(json.dumps({"name": f"n{i}", "schema": s, "tests": [{"data": d, "valid": v} for d, v in t]}) + "\n"
                             for i, (s, t) in enumerate(tests)))
    r = toka("grammar", "--maskbench", str(bench), "-v")
    assert r.stdout.decode().splitlines()[:4] == [
        "schemas 4: refused 1 (25.0 %), all texts read right 1", "texts 5, of which valid 2",
        "schemas with a wrong acceptance 1, with a wrong rejection 1 (members in the order of the file: 2)",
        "schemas whose indented texts are read differently 0"]
    assert [x.split(":")[0] for x in r.stderr.decode().splitlines()] == ["n0", "n1", "n2", "n3"]
    bench.write_text('{"schema": {}}')
    assert b"line 1: expected an object with schema and tests" in toka("grammar", "--maskbench", str(bench)).stderr


def test_draws_follow_the_renormalized_distribution(server):
    """The draws under a mask have the probabilities of the model, divided by the sum over what is allowed: a G-test
    with at most 8 degrees of freedom."""
    texts, n, count, seeds = [str(i) for i in range(1, 10)], 128, {}, 16
    raw = server.post("/v1/completions", {"prompt": PROBLEM, "max_tokens": 1, "temperature": 0, "logprobs": 20}).json()["choices"][0]["logprobs"]["top_logprobs"][0]
    known = [t for t in texts if t in raw]
    if len(known) < 3:
        pytest.skip("the model's likeliest tokens are no digits")
    for seed in range(seeds):
        r = server.post("/v1/completions", {"prompt": PROBLEM, "max_tokens": 2, "temperature": 1, "n": n, "seed": seed, "structured_outputs": {"choice": known}})
        for choice in r.json()["choices"]:
            count[choice["text"]] = count.get(choice["text"], 0) + 1
    p = {t: math.exp(raw[t]) for t in known}
    total = sum(p.values())
    g = 2 * sum(k * math.log(k / (n * seeds * p[t] / total)) for t, k in count.items())
    assert set(count) <= set(known) and sum(count.values()) == n * seeds and g < 40, (g, count, p)


def test_drafts_of_constraints():
    """Guesses that a constraint allows: the same answers as without, and /metrics counts them and says how long they took."""
    ask = {"prompt": "Tom has 12 apples. He buys 7 more apples. How many", "max_tokens": 60, "n": 3, "temperature": 0.5, "seed": 4, "logprobs": 1,
           "structured_outputs": {"regex": "([a-z]{2,8} ){2,20}[.]"}, "ignore_eos": True}
    found = []
    for flags in ([], ["--speculative-config", '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_min":1}']):
        with Server(*flags, env={"TOKA_DEBUG_DRAFTS": "1"}) as s:
            choices = s.post("/v1/completions", ask).json()["choices"]
            found.append([(c["text"], c["finish_reason"], c["logprobs"]["token_logprobs"]) for c in choices])
            assert (s.metric("spec_decode_num_draft_tokens_total") > 0) == (s.metric("engine_seconds_total", 'phase="draft"') > 0) == bool(flags)
    assert found[0] == found[1]
