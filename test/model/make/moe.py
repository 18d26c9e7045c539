#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the embedded model's sister with experts: test/model_moe, a Mixtral in FP8. Its RECORD.md says what one run of it gave.

    python3 test/model/make/moe.py train                       one GPU, some four minutes on an H100: test/.build/moe.npz
    python3 test/model/make/moe.py pack                        rounds that to FP8 and writes test/model_moe
    python3 test/model/make/moe.py dense FOLDER                the numbers of test/model_moe as a float32 checkpoint
    python3 test/model/make/train.py --dir FOLDER judge        its accuracy by transformers

Needs what train.py needs. The sister begins as the embedded model: the columns of each MLP are dealt to the experts of a layer, seven
of 64 columns. A new router chooses two of them for each token. Then all weights are trained on, with a small loss that keeps the
experts equally busy (Fedus et al. 2021). While it trains, all experts are computed for all tokens, and those that were not chosen have
the weight 0: the experts together are as large as the MLP was.
"""
import argparse
import json
import os
import sys

import numpy as np

import train

sys.path.insert(0, os.path.dirname(train.MODEL))
import model_sisters as sisters                          # noqa: E402
import model_weights as mw                               # noqa: E402

FOLDER = os.path.join(os.path.dirname(train.MODEL), "model_moe")
TRAINED = os.path.join(os.path.dirname(train.MODEL), ".build", "moe.npz")
X, TOP, M = 7, 2, train.F // 7                           # experts, chosen ones, columns of one
BALANCE = 0.01                                           # weight of the loss that keeps experts equally busy


def build_experts(torch):
    nn, fn = torch.nn, torch.nn.functional

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(train.E, X, bias=False)
            nn.init.normal_(self.gate.weight, std=0.02)
            self.w1, self.w3, self.w2 = (nn.Linear(*n, bias=False) for n in [(train.E, X * M)] * 2 + [(X * M, train.E)])

        def forward(self, x):
            with torch.autocast(x.device.type, enabled=False):       # as in use: the router is float32
                scores = self.gate(x.float()).softmax(-1)
                best = scores.topk(TOP, -1)
                weight = torch.zeros_like(scores).scatter(-1, best.indices, best.values / best.values.sum(-1, keepdim=True))
                busy = (weight > 0).float().mean(0)
                self.cost = BALANCE * X / TOP * (busy * scores.mean(0)).sum()
            hidden = fn.silu(self.w1(x)) * self.w3(x)
            return self.w2((hidden.unflatten(-1, (X, M)) * weight[..., None].to(hidden.dtype)).flatten(-2))

    return Experts


def upcycled(torch):
    """The model with the weights of the embedded model. The two chosen experts stand for all seven, so w2 is seven times as large:
    the mean over the choices is the MLP's output."""
    model = train.build_model(torch, build_experts(torch))
    state = model.state_dict()
    for name, w in sisters.read_model()[1].items():
        name = name.removeprefix("model.")
        for old, new, factor in (("gate_proj", "w1", 1), ("up_proj", "w3", 1), ("down_proj", "w2", X)):
            if f"mlp.{old}" in name:
                name, w = name.replace(old, new), w * factor
        state[name] = torch.from_numpy(np.array(w))
    model.load_state_dict(state)
    return model


def cmd_train(args):
    model = train.train(args, upcycled)
    os.makedirs(os.path.dirname(args.out), exist_ok=True)
    np.savez(args.out, **{k: v.detach().float().cpu().numpy() for k, v in model.state_dict().items()})


def checkpoint(trained):
    """name -> matrix, as Mixtral has them."""
    out = {}
    for name, w in trained.items():
        layer, _, part = name.partition(".mlp.")
        part = part.removesuffix(".weight")
        if part == "gate":
            out[f"model.{layer}.block_sparse_moe.gate.weight"] = w
        elif part:
            for i in range(X):
                rows = w[:, i * M:(i + 1) * M] if part == "w2" else w[i * M:(i + 1) * M]
                out[f"model.{layer}.block_sparse_moe.experts.{i}.{part}.weight"] = np.ascontiguousarray(rows)
        else:
            out["model." + name] = w
    return out


def cmd_pack(args):
    with open(os.path.join(train.MODEL, "config.json")) as f:
        config = json.load(f)
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": X, "num_experts_per_tok": TOP,
               "intermediate_size": M, "sliding_window": None, "quantization_config": sisters.FP8_BLOCK}
    tensors = {}
    with np.load(args.out) as trained:
        for name, w in checkpoint(trained).items():
            tensors |= sisters.fp8_block(name, w)[0] if sisters.is_linear(name) else {name: ("BF16", mw.to_bits(w, "BF16"))}
    os.makedirs(FOLDER, exist_ok=True)
    train.write_json(FOLDER, "config.json", config)
    mw.write_safetensors(os.path.join(FOLDER, "model.safetensors"), tensors)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--dir", default=train.MODEL, help="where the tokenizer is (default: test/model)")
    p.add_argument("--out", default=TRAINED, help="the trained weights (default: test/.build/moe.npz)")
    sub = p.add_subparsers(dest="command", required=True)
    t = sub.add_parser("train")
    t.set_defaults(run=cmd_train)
    train.add_training_options(t, steps=11000, lr=2e-3)
    sub.add_parser("pack").set_defaults(run=cmd_pack)
    d = sub.add_parser("dense")
    d.add_argument("folder")
    d.set_defaults(run=lambda args: sisters.write("moe-fp8", args.folder, dense=True))
    args = p.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
