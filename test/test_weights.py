"""Model folders as other programs write them: tensors at any byte, names that share a tensor. Whole programs; run through
test/run.sh."""
import glob
import json
import os
import shutil
import struct
import subprocess

import pytest

from server import ROOT, TOKA

ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}, "TOKA_DEVICE": "cpu"}
LINES = "".join(json.dumps({"custom_id": str(i), "prompt": list(range(3, 9 + i)), "max_tokens": 8, "ignore_eos": True, "logprobs": 3,
                            "temperature": i % 2}) + "\n" for i in range(6))


def copy_model(name, folder):
    shutil.copytree(os.path.join(ROOT, "test", name), folder, ignore=shutil.ignore_patterns("make", "golden*", "*.jsonl", "*.md"))
    return folder


def read_weights(path):
    data = path.read_bytes()
    n = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:8 + n]), data[8 + n:]


def write_weights(path, header, data, odd=0):
    """`odd`: the data begins so many bytes behind a multiple of 8."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8 + odd)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def answers(model, tmp_path):
    """What a batch of token ids gives, sorted: bytes that depend on the weights alone."""
    out = tmp_path / f"{os.path.basename(model)}.out"
    r = subprocess.run([TOKA, "batch", "-q", "-m", str(model), "--served-model-name", "m", "-i", "-", "-o", str(out)], input=LINES,
                       env=ENV, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert r.returncode == 0 and not r.stderr, r.stderr
    return sorted(out.read_text().splitlines())


# ---- Tensors at any byte ----

@pytest.mark.parametrize("name", ["model", "fixtures/llama-odd", "fixtures/llama-bias", "fixtures/llama-linear-old", "fixtures/qwen3",
                                  "fixtures/qwen2-yarn-sharded", "fixtures/llama-llama3-sharded"])
def test_header_of_any_length(tmp_path, name):
    """Of shards each its own, one as it was."""
    want = answers(copy_model(name, tmp_path / "as_it_was"), tmp_path)
    for first in 1, 3, 6:
        model = copy_model(name, tmp_path / f"odd{first}")
        for i, path in enumerate(sorted(glob.glob(str(model / "*.safetensors")))):
            path = model / path
            write_weights(path, *read_weights(path), odd=(first + 5 * i) % 8)
        assert answers(model, tmp_path) == want


def test_tensor_of_odd_length_ahead(tmp_path):
    """What no model uses may lie between its tensors."""
    want = answers(copy_model("fixtures/qwen3", tmp_path / "as_it_was"), tmp_path)
    model = copy_model("fixtures/qwen3", tmp_path / "odd")
    header, data = read_weights(model / "model.safetensors")
    moved, out = {"mask": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}, b"\1\2\3"
    for i, (key, tensor) in enumerate(header.items()):
        if key != "__metadata__":
            part = data[slice(*tensor["data_offsets"])]
            moved[key] = {**tensor, "data_offsets": [len(out), len(out) + len(part)]}
            out += part
            moved[f"scale{i}"] = {"dtype": "BOOL", "shape": [1], "data_offsets": [len(out), len(out) + 1]}
            out += b"\1"
    write_weights(model / "model.safetensors", moved, out)
    assert answers(model, tmp_path) == want


# ---- Names that share a tensor ----

@pytest.mark.parametrize("metadata", [{}, {"format": "pt", "model.embed_tokens.weight": "lm_head.weight"}])
def test_tied_model_that_stores_only_its_head(tmp_path, metadata):
    want = answers(copy_model("fixtures/llama-tied", tmp_path / "as_it_was"), tmp_path)
    model = copy_model("fixtures/llama-tied", tmp_path / "head_only")
    header, data = read_weights(model / "model.safetensors")
    header["lm_head.weight"] = header.pop("model.embed_tokens.weight")
    write_weights(model / "model.safetensors", {**header, "__metadata__": metadata}, data)
    assert answers(model, tmp_path) == want


@pytest.mark.parametrize("tied", [True, False])
def test_names_in_the_metadata(tmp_path, tied):
    """Two of one layer's matrices are one, as save_model leaves them; a head that config.json does not call tied, too."""
    whole = copy_model("fixtures/llama-tied", tmp_path / "whole")
    header, data = read_weights(whole / "model.safetensors")
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    part = data[slice(*header[gate]["data_offsets"])]
    a, b = header[up]["data_offsets"]
    write_weights(whole / "model.safetensors", header, data[:a] + part + data[b:])
    shared = copy_model("fixtures/llama-tied", tmp_path / "shared")
    less = {key: dict(t) for key, t in header.items() if key not in (up, "__metadata__")}
    for t in less.values():
        t["data_offsets"] = [at - (b - a) * (at >= b) for at in t["data_offsets"]]
    metadata = {"format": "pt", up: gate, "lm_head.weight": "model.embed_tokens.weight"}
    write_weights(shared / "model.safetensors", {"__metadata__": metadata, **less}, data[:a] + data[b:])
    config = json.loads((shared / "config.json").read_text())
    assert config["tie_word_embeddings"]
    (shared / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    assert answers(shared, tmp_path) == answers(whole, tmp_path)
