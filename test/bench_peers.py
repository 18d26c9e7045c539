#!/usr/bin/env python3
"""bench_peers.py - compares toka's GEMMs with PyTorch's (cuBLAS): same shapes, same GPU, measured in turns.

    python3 test/bench_peers.py PATH/TO/gpu_gemm [SHAPE ...] [--json] [--min-M 256]
    ./toka bench ops --json >ops.json; python3 test/bench_peers.py --ops ops.json

SHAPE is a part of a line like "Llama-3.1-8B qkv+ M=512;"; without SHAPE, all shapes run. --ops reads toka's times of 1 to 128 rows
from a file and measures torch's product of the same shape.

For each shape, `gpu_gemm bench --paced` measures toka's GEMM, and then this program measures torch.mm. Both capture a CUDA graph of
many calls over random buffers that together do not fit the L2 cache, and take the median of its replays. toka's GEMM includes its
epilogue: SwiGLU in gate_up, the residual in down and o+, RoPE and the KV append in qkv+. torch computes only the product, with bf16
output. The ratio is torch's time divided by toka's: above 1, toka is faster.
"""
import argparse
import json
import math
import re
import statistics
import subprocess
import sys

import torch


def graph_us(op, calls, replays):
    """Median microseconds of a call op(i), measured on replays of a graph of `calls` calls."""
    op(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            op(i)
    times = []
    for i in range(replays + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def torch_us(n, k, m, replays=9):
    """Median microseconds of y[m][n] = x[m][k] w[n][k]^T."""
    copies = min(24, 1 + (200 << 20) // (2 * (n * k + m * k + m * n)))
    rows = []
    for _ in range(copies):
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / math.sqrt(k)
        rows.append((x, w, torch.empty(m, n, device="cuda", dtype=torch.bfloat16)))
    calls = max(copies, min(200, int(1.5e-3 / (2.0 * m * n * k / 6e14 + 3e-6))) // copies * copies)

    def product(i):
        x, w, y = rows[i % copies]
        torch.mm(x, w.t(), out=y)

    return graph_us(product, calls, replays)


def pairs(binary, shapes):
    """Yields the JSON rows of gpu_gemm, with torch's time in "torch_us"."""
    torch.zeros(1, device="cuda")
    ours = subprocess.Popen([binary, "bench", "--paced", *shapes], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while True:
        ours.stdin.write("\n")
        ours.stdin.flush()
        line = ours.stdout.readline()
        if not line.startswith("{"):
            break
        row = json.loads(line)
        row["torch_us"] = torch_us(row["N"], row["K"], row["M"])
        row["ratio"] = row["torch_us"] / row["us"]
        yield row
    ours.stdin.close()
    if ours.wait() != 0:
        sys.exit("bench_peers.py: %s ended with status %d: %s" % (binary, ours.returncode, line))


def small_m(path):
    """1 to 128 rows: compares torch with a table of `toka bench ops --json`."""
    rows = json.load(open(path))
    print("# read bandwidth %.2f TB/s; share: time of moving W, x and y at this bandwidth, divided by the time" % rows[0]["tbps"])
    print("%-14s %-8s %7s %6s %4s %9s %6s %9s %6s %6s" % ("model", "GEMM", "N", "K", "M", "us", "share", "torch us", "share", "ratio"))
    for r in rows:
        shape = re.fullmatch(r"M=(\d+) (\d+)x(\d+)", r["shape"])
        if r["op"] not in ("qkv", "o", "gate_up", "down") or not shape or int(shape[1]) > 128:
            continue
        m, n, k = map(int, shape.groups())
        us = torch_us(n, k, m)
        print("%-14s %-8s %7d %6d %4d %9.2f %5.0f%% %9.2f %5.0f%% %6.3f" % (
            r["model"], r["op"], n, k, m, r["us"], 100 * r["share"], us, 100 * r["share"] * r["us"] / us, us / r["us"]), flush=True)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("binary", nargs="?")
    args.add_argument("--ops", metavar="FILE", help="compare GEMMs of 1 to 128 rows with this output of `toka bench ops --json`")
    args.add_argument("shapes", nargs="*", help="parts of lines, see above")
    args.add_argument("--json", action="store_true", help="one line of JSON per shape")
    args.add_argument("--min-M", type=int, default=512, help="the mean at the end covers shapes with at least this many rows")
    a = args.parse_args()
    print("# %s, torch %s, CUDA %s" % (torch.cuda.get_device_name(), torch.__version__, torch.version.cuda))
    if a.ops:
        small_m(a.ops)
        return
    if not a.binary:
        args.error("expected PATH/TO/gpu_gemm or --ops FILE")
    ratios = []
    if not a.json:
        print("%-14s %-8s %7s %6s %6s %9s %8s %9s %6s  %s" % (
            "model", "GEMM", "N", "K", "M", "us", "TFLOP/s", "torch us", "ratio", "BN/split/mc"))
    for r in pairs(a.binary, a.shapes):
        if r["M"] >= a.min_M:
            ratios.append(r["ratio"])
        if a.json:
            print(json.dumps(r), flush=True)
        else:
            print("%-14s %-8s %7d %6d %6d %9.2f %8.1f %9.2f %6.3f  %d/%d/%d" % (
                r["model"], r["gemm"], r["N"], r["K"], r["M"], r["us"], r["tflops"], r["torch_us"], r["ratio"], r["bn"],
                r["split"], r["mc"]) + (" apart" if r["apart"] else ""), flush=True)
    if ratios:
        print("# M >= %d: %d shapes, geometric mean %.3f, minimum %.3f" % (
            a.min_M, len(ratios), math.exp(statistics.fmean(map(math.log, ratios))), min(ratios)))


if __name__ == "__main__":
    main()
