"""Embeddings and scores against sentence-transformers and transformers (test/embeddings.json, made by make_embeddings.py): over
HTTP, through the openai client, in batches. Run through test/run.sh."""
import base64
import json
import math
import os
import subprocess
import time

import numpy as np
import pytest

import model_weights as mw
from server import ROOT, TOKA, Server

SPECS = json.load(open(os.path.join(ROOT, "test", "embeddings.json"), encoding="utf-8"))
PATHS = {"embed": "/v1/embeddings", "score": "/v1/score", "rerank": "/v1/rerank"}
ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}, "TOKA_DEVICE": "cpu"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, spec in SPECS.items():
        mw.write_whole(root / name, spec)
    return root


@pytest.fixture(scope="module")
def servers(folders):
    opened = {}

    def get(name, *flags):
        key = (name, *flags)
        if key not in opened:
            opened[key] = Server("-m", str(folders / name), "--served-model-name", name, *flags)
        return opened[key]

    yield get
    for server in opened.values():
        server.stop()


def rows(spec, prompt):
    return np.frombuffer(base64.b64decode(spec["vectors"][prompt]), "<f4").reshape(len(spec["texts"]), -1)


def send(server, path, body):
    answer = server.post(path, json.dumps(body).encode())
    return answer.status, json.loads(answer.body)


def ask(server, kind, **body):
    status, answer = send(server, PATHS[kind], body)
    assert status == 200, answer
    return answer


def vectors_of(answer):
    assert [d["index"] for d in answer["data"]] == list(range(len(answer["data"])))
    return np.array([d["embedding"] for d in answer["data"]], np.float32)


STEPS = {"whole": [], "chunks": ["--max-num-batched-tokens", "16", "--max-num-seqs", "3"], "plain": ["--device", "plain"],
         "stages": ["--pipeline-parallel-size", "2"], "replicas": ["--data-parallel-size", "2"]}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", [n for n, s in SPECS.items() if "vectors" in s])
def test_vectors(servers, name, steps):
    """Equal to sentence-transformers, with each prompt of the folder, in any steps."""
    spec, server = SPECS[name], servers(name, *STEPS[steps])
    for prompt in spec["vectors"]:
        answer = ask(server, "embed", input=spec["texts"], **({"prompt_name": prompt} if prompt else {}))
        np.testing.assert_allclose(vectors_of(answer), rows(spec, prompt), atol=1e-4)
        assert answer["object"] == "list" and answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 40


def test_forms_of_input(servers):
    spec, server = SPECS["last"], servers("last")
    want = rows(spec, "")
    one = ask(server, "embed", input=spec["texts"][0])
    np.testing.assert_allclose(vectors_of(one)[0], want[0], atol=1e-4)
    tokens = [send(server, "/tokenize", {"prompt": text})[1]["tokens"] for text in spec["texts"]]
    assert one["usage"]["prompt_tokens"] == len(tokens[0])
    np.testing.assert_allclose(vectors_of(ask(server, "embed", input=tokens)), want, atol=1e-4)
    np.testing.assert_allclose(vectors_of(ask(server, "embed", input=tokens[1]))[0], want[1], atol=1e-4)
    packed = ask(server, "embed", input=spec["texts"], encoding_format="base64")
    np.testing.assert_allclose([np.frombuffer(base64.b64decode(d["embedding"]), "<f4") for d in packed["data"]], want, atol=1e-4)
    many = vectors_of(ask(server, "embed", input=[t for _ in range(400) for t in spec["texts"]]))
    assert np.array_equal(many, np.tile(many[:5], (400, 1)))


def test_dimensions(servers):
    """Cut, then normalized; not normalized if the folder or the body says so."""
    spec = SPECS["last"]
    cut = rows(spec, "")[:, :10]
    got = vectors_of(ask(servers("last"), "embed", input=spec["texts"], dimensions=10))
    np.testing.assert_allclose(got, cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-4)
    spec = SPECS["mean"]
    got = vectors_of(ask(servers("mean"), "embed", input=spec["texts"], dimensions=10))
    np.testing.assert_allclose(got, rows(spec, "")[:, :10], atol=1e-4)
    unit = vectors_of(ask(servers("mean"), "embed", input=spec["texts"], normalize=True))
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-5)


def test_openai_client(servers):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{servers('last').address[1]}/v1", api_key="-", max_retries=0)
    answer = client.embeddings.create(model="last", input=SPECS["last"]["texts"])  # asks for base64
    np.testing.assert_allclose([d.embedding for d in answer.data], rows(SPECS["last"], ""), atol=1e-4)
    answer = client.embeddings.create(model="last", input="x", encoding_format="float", dimensions=5)
    assert len(answer.data[0].embedding) == 5 and answer.usage.total_tokens > 0
    with pytest.raises(openai.BadRequestError, match="input: text 1 is empty"):
        client.embeddings.create(model="last", input=["x", ""])
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="x")


BAD = [
    ({}, "input: missing"), ({"input": ""}, "is empty"), ({"input": []}, "no text"), ({"input": ["a", ""]}, "text 1 is empty"),
    ({"input": [[]]}, "no tokens"), ({"input": 3}, "input: expected"), ({"input": [[1], "a", None]}, "input: expected"),
    ({"input": {"a": 1}}, "input: expected"), ({"input": "a", "dimensions": 0}, "dimensions: 0"), ({"input": "a", "dimensions": 65}, "1 to 64"),
    ({"input": "a", "dimensions": 1.5}, "dimensions"), ({"input": "a", "encoding_format": "int8"}, "float or base64"),
    ({"input": ["a"] * 2049}, "at most 2048"), ({"input": "a " * 3000}, "at most 512 fit"), ({"input": [1024]}, "vocabulary has 1024"),
    ({"input": [-1]}, "no token id"), ({"input": [1 << 40]}, "no token id"), ({"input": "a", "prompt_name": "none"}, "no prompt 'none'"),
    ({"input": "a", "messages": [{"role": "user"}]}, "messages is not supported"), ({"input": "a", "normalize": 1}, "true or false"),
    ({"input": "a", "truncate_prompt_tokens": 5}, "not supported"), ({"input": "a", "embed_dtype": "float16"}, "not supported")]


def test_bad_requests(servers):
    server = servers("last")
    for body, message in BAD:
        status, answer = send(server, PATHS["embed"], body)
        assert status == 400 and message in answer["error"]["message"], (body, answer)
        assert answer["error"]["type"] == "invalid_request_error" and answer["error"]["param"], (body, answer)
    assert send(server, PATHS["embed"], {"input": "a " * 3000})[1]["error"]["code"] == "context_length_exceeded"
    for path in ("/v1/completions", "/v1/chat/completions"):  # it has no LM head
        status, answer = send(server, path, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]})
        assert status == 400, answer
    assert "no LM head" in send(server, "/v1/completions", {"prompt": "a"})[1]["error"]["message"]
    status, answer = send(servers("reranker"), PATHS["embed"], {"input": "a"})
    assert status == 400 and "is a reranker" in answer["error"]["message"] and answer["error"]["code"] == "unsupported_parameter"
    for body, message in [({"text_1": "a"}, "text_2: missing"), ({"text_2": "a"}, "text_1: missing"), ({"text_1": [], "text_2": "a"}, "text_1: 0"),
                          ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "one or as many"), ({"text_1": 1, "text_2": "a"}, "text_1: expected"),
                          ({"queries": "a", "documents": [["b"]]}, "documents: expected"), ({"documents": "a", "queries": 1}, "queries: expected"), ({"text_1": "a", "text_2": ["b"] * 2049}, "1 to 2048")]:
        for name in ("last", "reranker"):
            status, answer = send(servers(name), PATHS["score"], body)
            assert status == 400 and message in answer["error"]["message"] and answer["error"]["param"] in body | {"text_1": 0, "text_2": 0}, (body, answer)
    long = "a " * 3000  # the error names the field that the request has
    for body, param in [({"text_1": "a", "text_2": long}, "text_2"), ({"queries": "a", "documents": [long]}, "documents"), ({"text_1": long, "text_2": "a"}, "text_1"),
                        ({"queries": [long], "documents": "a"}, "queries")]:
        assert send(servers("last"), PATHS["score"], body)[1]["error"]["param"] == param
    assert send(servers("reranker"), PATHS["score"], {"text_1": "a", "text_2": long})[1]["error"]["param"] == "text_2"


def test_scores(servers):
    """A reranker: the probability of the one token of two. Vectors: their cosine."""
    spec, server = SPECS["reranker"], servers("reranker")
    queries, documents = zip(*spec["pairs"])
    answer = ask(server, "score", text_1=list(queries), text_2=list(documents))
    np.testing.assert_allclose([d["score"] for d in answer["data"]], spec["scores"], atol=1e-4)
    tokens = [send(server, "/tokenize", {"prompt": text, "add_special_tokens": False})[1]["tokens"] for text in spec["rendered"]]
    assert answer["usage"]["total_tokens"] == sum(map(len, tokens))
    first = ask(server, "score", queries=queries[0], documents=list(documents[:2]))["data"]
    assert send(server, "/score", {"text_1": queries[0], "text_2": list(documents[:2])})[1]["data"] == first
    assert [d["score"] for d in first] == [d["score"] for d in answer["data"][:2]] and first[1]["index"] == 1
    unit = rows(SPECS["last"], "query")[:1] @ rows(SPECS["last"], "document").T
    texts = SPECS["last"]["texts"]
    answer = ask(servers("last"), "score", text_1=texts[0], text_2=texts)
    np.testing.assert_allclose([d["score"] for d in answer["data"]], unit[0], atol=1e-4)
    both = ask(servers("last"), "score", text_1=texts, text_2=texts)
    np.testing.assert_allclose([d["score"] for d in both["data"]],
                               (rows(SPECS["last"], "query") * rows(SPECS["last"], "document")).sum(1), atol=1e-4)


def test_rerank(servers):
    server, documents = servers("reranker"), ["Tom has 3 apples.", "Each box holds 12 eggs.", "Tom has 3 apples.", "x"]
    scores = [d["score"] for d in ask(server, "score", text_1="How many eggs?", text_2=documents)["data"]]
    order = sorted(range(4), key=lambda i: (-scores[i], i))
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        status, answer = send(server, path, {"query": "How many eggs?", "documents": documents})
        assert status == 200 and [r["index"] for r in answer["results"]] == order
    assert [r["relevance_score"] for r in answer["results"]] == [scores[i] for i in order]
    assert [r["document"]["text"] for r in answer["results"]] == [documents[i] for i in order]
    short = ask(server, "rerank", query="How many eggs?", documents=[{"text": d} for d in documents], top_n=2, return_documents=False)
    assert [list(r) for r in short["results"]] == [["index", "relevance_score"]] * 2 and short["usage"] == answer["usage"]


def test_shared_prefix_is_computed_once(servers):
    """Documents of one query share the tokens before the document."""
    server = servers("reranker", "--max-num-seqs", "4")
    query = "How many eggs are in the box? " * 20
    before = server.metric("prefix_cache_hits_total")
    answer = ask(server, "rerank", query=query, documents=[f"{i} eggs" for i in range(12)])
    found = server.metric("prefix_cache_hits_total") - before
    assert found > 0.7 * answer["usage"]["total_tokens"], (found, answer["usage"])


def test_folder_that_is_not_supported(folders, tmp_path):
    """What toka does not compute is named; the rest of the model works."""
    spec = json.loads(json.dumps(SPECS["mean"]))
    cases = {"Dense": lambda f: f["modules.json"].append({"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}),
             "weightedmean": lambda f: f.update({"1_Pooling/config.json": {"pooling_mode": "weightedmean"}}),
             "pooling_mode_max_tokens": lambda f: f.update({"1_Pooling/config.json": {"pooling_mode_max_tokens": True}}),
             "include_prompt": lambda f: f["1_Pooling/config.json"].update(include_prompt=False),
             "not inside": lambda f: f["modules.json"][1].update(path="../last/1_Pooling"),
             "expected a list": lambda f: f.update({"modules.json": {}})}
    for i, (message, edit) in enumerate(cases.items()):
        changed = json.loads(json.dumps(spec))
        edit(changed["files"])
        mw.write_whole(tmp_path / str(i), changed)
        server = Server("-m", str(tmp_path / str(i)))
        status, answer = send(server, PATHS["embed"], {"input": "a"})
        assert status == 400 and message in answer["error"]["message"], (message, answer)
        assert send(server, "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
        server.stop()


def test_encoders_are_refused_by_name(folders, tmp_path):
    for name, edit, message in [("bert", {"architectures": ["BertModel"], "model_type": "bert"}, "BertModel"),
                                ("bi", {"is_causal": False}, "is_causal"), ("gemma", {"use_bidirectional_attention": True}, "bidirectional")]:
        spec = json.loads(json.dumps(SPECS["last"]))
        spec["config"].update(edit)
        mw.write_whole(tmp_path / name, spec)
        r = subprocess.run([TOKA, "-m", str(tmp_path / name), "-p", "x"], capture_output=True, text=True, env=ENV)
        assert r.returncode == 1 and message in r.stderr and len(r.stderr.splitlines()) == 1, r.stderr


def test_batch(folders, servers, tmp_path):
    """Each kind in `toka batch`, in both forms of lines."""
    texts, pairs = SPECS["last"]["texts"], SPECS["reranker"]["pairs"]

    def batch(name, lines):
        (tmp_path / "in").write_text("".join(json.dumps(x) + "\n" for x in lines))
        (tmp_path / "out").unlink(missing_ok=True)
        r = subprocess.run([TOKA, "batch", "-m", str(folders / name), "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "-q"],
                           capture_output=True, text=True, env=ENV, timeout=120)
        return r, {x["custom_id"]: x for x in map(json.loads, (tmp_path / "out").read_text().splitlines())}

    r, out = batch("last", [{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": texts}},
                            {"id": "b", "input": texts[1], "dimensions": 7}, {"id": "c", "text_1": texts[0], "text_2": texts},
                            {"id": "d", "input": ""}, {"id": "e", "input": "a", "stream": True}])
    np.testing.assert_allclose(vectors_of(out["a"]["response"]["body"]), rows(SPECS["last"], ""), atol=1e-4)
    assert len(out["b"]["response"]["body"]["data"][0]["embedding"]) == 7
    want = ask(servers("last"), "score", text_1=texts[0], text_2=texts)["data"]
    np.testing.assert_allclose([d["score"] for d in out["c"]["response"]["body"]["data"]], [d["score"] for d in want], atol=1e-6)
    assert "is empty" in out["d"]["error"]["message"]
    r, out = batch("reranker", [{"custom_id": "a", "method": "POST", "url": "/v1/score", "body": {"text_1": q, "text_2": d}} | {"custom_id": q + d}
                                for q, d in pairs] + [{"id": "r", "query": "How many eggs?", "documents": ["x", "y"]}]
                   + [{"custom_id": url, "method": "POST", "url": url, "body": {"query": "How many eggs?", "documents": ["x", "y"]}} for url in ("/rerank", "/v1/rerank")]
                   + [{"custom_id": "/score", "method": "POST", "url": "/score", "body": {"text_1": pairs[0][0], "text_2": pairs[0][1]}}])
    np.testing.assert_allclose([out[q + d]["response"]["body"]["data"][0]["score"] for q, d in pairs], SPECS["reranker"]["scores"], atol=1e-4)
    assert out["/rerank"]["response"]["body"]["results"] == out["/v1/rerank"]["response"]["body"]["results"]
    np.testing.assert_allclose(out["/score"]["response"]["body"]["data"][0]["score"], SPECS["reranker"]["scores"][0], atol=1e-4)
    assert len(out["r"]["response"]["body"]["results"]) == 2 and r.returncode == 0, r.stderr


def test_batches_of_scores(folders, servers, tmp_path):
    """/v1/batches with the endpoints of a reranker."""
    openai = pytest.importorskip("openai")
    bodies = {"/v1/score": {"text_1": "How many eggs?", "text_2": ["x", "y"]}, "/v1/rerank": {"query": "How many eggs?", "documents": ["x", "y"], "top_n": 1}}
    with Server("-m", str(folders / "reranker"), "--served-model-name", "reranker", "--files-dir", str(tmp_path)) as server:
        api = openai.OpenAI(base_url=f"http://127.0.0.1:{server.address[1]}/v1", api_key="-", max_retries=0)
        for route, body in (*bodies.items(), *((r.removeprefix("/v1"), b) for r, b in bodies.items())):
            line = json.dumps({"custom_id": "a", "method": "POST", "url": route, "body": body})
            file = api.files.create(file=("in.jsonl", line.encode()), purpose="batch")
            batch = api.batches.create(input_file_id=file.id, endpoint=route, completion_window="24h")
            for _ in range(200):
                if batch.status in ("completed", "failed"):
                    break
                time.sleep(0.05)
                batch = api.batches.retrieve(batch.id)
            answer, want = json.loads(api.files.content(batch.output_file_id).text)["response"]["body"], send(server, route, body)[1]
            assert batch.status == "completed" and {**answer, "id": 0, "created": 0} == {**want, "id": 0, "created": 0}


def test_scores_are_probabilities(servers):
    scores = [d["score"] for d in ask(servers("reranker"), "score", text_1="q", text_2=[str(i) for i in range(40)])["data"]]
    assert all(0 < s < 1 for s in scores) and not any(map(math.isnan, scores)) and len(set(scores)) > 30


def test_command_line(folders, servers, tmp_path):
    """toka embed: a line of JSON for each line of text."""
    def embed(*words, stdin=None):
        return subprocess.run([TOKA, "embed", "-m", str(folders / "last"), "-q", *words], input=stdin, capture_output=True, text=True, env=ENV)

    texts = [t.strip() for t in SPECS["last"]["texts"]]
    want = vectors_of(ask(servers("last"), "embed", input=texts, prompt_name="query", dimensions=9))
    r = embed("--prompt-name", "query", "--dimensions", "9", stdin="\n".join(texts) + "\n")
    np.testing.assert_allclose([json.loads(line) for line in r.stdout.splitlines()], want, atol=1e-6)
    assert len(json.loads(embed("-p", "x").stdout)) == 64 and embed("-p", "x", "--no-special").returncode == 0
    for r, message in [(embed("-p", "x", "--prompt-name", "none"), "no prompt 'none'"), (embed(stdin="a\n\nb"), "line 2 is empty"),
                       (embed("-p", "x", "--dimensions", "65"), "dimensions"), (embed(stdin="a " * 3000), "at most 512")]:
        assert r.returncode == 1 and message in r.stderr and not r.stdout and len(r.stderr.splitlines()) == 1, r.stderr


def test_score_tokens(folders, servers, tmp_path):
    """A reranker's folder without modules.json: --score-tokens names the two tokens. The prompt is then that of Qwen3-Reranker."""
    spec = {k: v for k, v in SPECS["reranker"].items() if k not in ("files", "template")}
    mw.write_whole(tmp_path / "plain", spec)
    server = Server("-m", str(tmp_path / "plain"))
    status, answer = send(server, PATHS["score"], {"text_1": "a", "text_2": "b"})
    assert status == 400 and "does not say how it scores" in answer["error"]["message"]
    vocabulary = json.load(open(os.path.join(ROOT, "test", "model", "tokenizer.json"), encoding="utf-8"))["model"]["vocab"]
    words = [word for word, i in sorted(vocabulary.items(), key=lambda x: x[1]) if i in (400, 401)]
    server.stop()
    with_tokens = Server("-m", str(tmp_path / "plain"), "--score-tokens", ",".join(words))
    score = ask(with_tokens, "score", text_1="How many?", text_2="12", instruction="Judge it")["data"][0]["score"]
    text = ('<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the '
            'answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Judge it\n<Query>: How many?\n<Document>: 12<|im_end|>\n'
            '<|im_start|>assistant\n<think>\n\n</think>\n\n')
    logprobs = []
    for token in (400, 401):  # scores the prompt with each of the two tokens at its end
        tokens = send(with_tokens, "/tokenize", {"prompt": text, "add_special_tokens": False})[1]["tokens"]
        body = {"prompt": tokens + [token], "max_tokens": 0, "prompt_logprobs": 0}
        last = send(with_tokens, "/v1/completions", body)[1]["choices"][0]["prompt_logprobs"][-1]
        logprobs.append(last[str(token)]["logprob"])
    assert abs(score - 1 / (1 + math.exp(logprobs[1] - logprobs[0]))) < 1e-5
    with_tokens.stop()
    r = subprocess.run([TOKA, "serve", "-m", str(tmp_path / "plain"), "--score-tokens", "yes"], capture_output=True, text=True, env=ENV)
    assert r.returncode == 1 and "expected two tokens" in r.stderr
