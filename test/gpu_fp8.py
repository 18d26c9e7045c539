#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares whole FP8 models on a GPU with the references of test/models/, which transformers computed in float32 with the same weights
and without quantizing activations.

Run:  python3 test/gpu_fp8.py GPU_MODEL [NAME ...]     on a machine with a GPU, from the repository root
      GPU_MODEL is the program made of test/gpu_model.c (test/run.sh builds it as test/.build/gpu_model).

The GPU rounds activations to e4m3, which has 3 bits of mantissa: each product has an error of about 2^-5 of its size, so logits of these
small networks are off by some percent.
"""
import base64
import json
import os
import subprocess
import sys
import tempfile

import numpy as np

import model_weights as mw

# relative L2 distance of all logits that plain code with the same rounding of activations has (a row scale found from the row, or the
# static scale)
ROUNDING = {"fp8-block": 8.4e-2, "fp8-block-edge": 4.8e-2, "fp8-dynamic": 4.6e-2, "fp8-static": 7.7e-2, "ct-fp8-block": 8.1e-2,
            "ct-fp8-channel": 5.2e-2, "ct-fp8-static": 4.1e-2, "fbgemm-fp8": 4.8e-2, "modelopt-fp8": 7.1e-2, "modelopt-fp8-file": 3.4e-2}
MAX_ERROR, MAX_ROW_ERROR = 1.4, 3                        # times that: of all logits, and of those of one position


def logits(program, folder, ids, device):
    out = os.path.join(folder, "out")
    with open(os.path.join(folder, "ids"), "w") as f:
        f.write(" ".join(map(str, ids)))
    subprocess.run([program, "logits", folder, f.name, out, device], check=True)
    return np.fromfile(out, dtype=np.float32).reshape(len(ids), -1).astype(np.float64)


def distance(got, want):
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def compare(program, name, tmp):
    spec, got, want = mw.load(name), [], []
    folder = os.path.join(tmp, name)
    mw.write(folder, spec)
    for case in spec["cases"]:
        rows = np.frombuffer(base64.b64decode(case["logits"]), "<f4").reshape(len(case["positions"]), -1)
        want.append(rows.astype(np.float64))
        got.append(logits(program, folder, case["prompt"], "cuda")[case["positions"]])
    got, want = np.concatenate(got), np.concatenate(want)
    error, worst = distance(got, want), max(distance(a, b) for a, b in zip(got, want))
    agree = float((got.argmax(1) == want.argmax(1)).mean())
    ok = bool(error <= MAX_ERROR * ROUNDING[name] and worst <= MAX_ROW_ERROR * ROUNDING[name])
    print(f"{'ok    ' if ok else 'FAILED'} {name:20} relative L2 {error:.2e}, worst of {len(got)} positions {worst:.2e}, same argmax "
          f"{100 * agree:.0f} %", flush=True)
    return ok


def main():
    program, names = sys.argv[1], sys.argv[2:] or ROUNDING
    with tempfile.TemporaryDirectory() as tmp:
        results = [compare(program, name, tmp) for name in names]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed, 0 skipped")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
