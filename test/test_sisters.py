"""The embedded model in other weight formats, and with its MLPs cut into experts (test/model_sisters.py), answers the held-out problems
nearly as well as before. So does its sister that was trained with experts (test/model_moe). Run through test/run.sh."""
import json
import os
import re
import subprocess

import pytest

import model_sisters
from server import ROOT, TOKA

ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}, "TOKA_DEVICE": "cpu"}
N_FAST, N_EDITED, N_ALL = 20, 60, 500
# The share of wrong answers that is allowed. Measured: 0 of 500, by the model and by the numbers of each format in float32.
WRONG = {"fp8-block": 0.004, "fp8-channel": 0.004, "int4-32": 0.02, "mixtral": 0.004, "glm4moe": 0.004, "glm4moe-fp8": 0.004,
         "moe-fp8": 0.004}
# What toka does not do yet. Each must be refused with one sentence; when it is done, that test fails, and the name goes.
NOT_YET = set()


def problems(n):
    with open(os.path.join(ROOT, "test", "model", "heldout.jsonl")) as f:
        return [json.loads(line) for line in f][:n]


def answer(text):
    found = re.findall(r"The answer is (-?\d+)", text)
    return found[-1] if found else None


def run_batch(folder, lines):
    text = "".join(json.dumps({"custom_id": str(i), "messages": [{"role": "user", "content": x["prompt"]}], "temperature": 0,
                               "max_tokens": 160}) + "\n" for i, x in enumerate(lines))
    return subprocess.run([TOKA, "batch", "-q", "-m", str(folder), "--served-model-name", "m", "-i", "-", "-o", str(folder / "out")],
                          input=text, env=ENV, cwd=ROOT, capture_output=True, text=True, timeout=500)


def count_wrong(folder, n):
    lines = problems(n)
    r = run_batch(folder, lines)
    assert r.returncode == 0, r.stderr
    wrong = 0
    for line in (folder / "out").read_text().splitlines():
        result = json.loads(line)
        text = result["response"]["body"]["choices"][0]["message"]["content"]
        wrong += answer(text) != str(lines[int(result["custom_id"])]["answer"])
    return wrong


@pytest.mark.parametrize("name, n, dense", [
    *((x, N_FAST, False) for x in WRONG), *(pytest.param(x, N_ALL, False, marks=pytest.mark.slow) for x in WRONG),
    *(pytest.param(x, N_ALL, True, marks=pytest.mark.slow) for x in ("fp8-block", "fp8-channel", "int4-32", "moe-fp8"))])
def test_sister(tmp_path, name, n, dense):
    """dense: the same numbers in float32, which shows what the format itself costs."""
    model_sisters.write(name, tmp_path, dense)
    if name in NOT_YET and not dense:
        r = run_batch(tmp_path, [])
        assert r.returncode == 1 and len(r.stderr.splitlines()) == 1, r.stderr
        return
    assert count_wrong(tmp_path, n) <= WRONG[name] * n


# ---- One wrong number of the trained experts shows ----

def expert(layer, i, part):
    return f"model.layers.{layer}.block_sparse_moe.experts.{i}.{part}.weight"


def swap_experts(config, tensors):
    for part in ("w1", "w2", "w3"):
        for end in ("", "_scale_inv"):
            a, b = expert(0, 0, part) + end, expert(0, 1, part) + end
            tensors[a], tensors[b] = tensors[b], tensors[a]


def swap_routes(config, tensors):
    name = "model.layers.4.block_sparse_moe.gate.weight"
    dtype, bits = tensors[name]
    tensors[name] = (dtype, bits[[1, 0, 2, 3, 4, 5, 6]])


def one_scale(config, tensors):
    name = expert(2, 2, "w2") + "_scale_inv"
    scale = model_sisters.mw.from_bits(tensors[name][1], "F32").copy()
    scale[0, 0] *= 16
    tensors[name] = ("F32", model_sisters.mw.to_bits(scale, "F32"))


def one_expert_a_token(config, tensors):
    config["num_experts_per_tok"] = 1


def no_order_of_experts(config, tensors):
    """Each layer's experts are one place off."""
    for layer in range(config["num_hidden_layers"]):
        for part in ("w1", "w2", "w3"):
            for end in ("", "_scale_inv"):
                names = [expert(layer, i, part) + end for i in range(7)]
                tensors.update(zip(names, [tensors[x] for x in names[1:] + names[:1]]))


EDITS = [swap_experts, swap_routes, one_scale, one_expert_a_token, no_order_of_experts]


@pytest.mark.parametrize("edit", EDITS, ids=lambda x: x.__name__)
def test_wrong_expert(tmp_path, edit):
    model_sisters.write("moe-fp8", tmp_path, edit=edit)
    assert count_wrong(tmp_path, N_EDITED) > 0
