#!/usr/bin/env python3
"""Measures causal prefill attention of PyTorch (cuDNN and flash) at the shapes of `gpu_attn bench`; prints one JSON object per line."""

import json

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench_peers import graph_us


def prefill(head, rows, heads=32, kv_heads=8):
    """Causal self-attention of `rows` tokens: with grouped kv heads, and with one kv head per query head."""
    q = torch.randn(1, heads, rows, head, device="cuda", dtype=torch.bfloat16)
    for kv in (kv_heads, heads):
        k, v = (torch.randn(1, kv, rows, head, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            try:
                with sdpa_kernel(backend):
                    us = graph_us(lambda i: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv != heads), 8, 7)
            except RuntimeError:  # the backend does not take this shape
                continue
            flops = 4 * heads * head * rows * (rows + 1) / 2
            yield {"peer": name, "case": f"prefill of {rows} rows behind 0", "D": head, "kv_heads": kv, "us": round(us, 2),
                   "tflop_s": round(flops / us * 1e-6, 1)}


def main():
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))
    for head in (64, 96, 128):
        for rows in (1024, 4096, 16384):
            for line in prefill(head, rows):
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
