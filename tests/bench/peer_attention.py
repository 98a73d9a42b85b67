#!/usr/bin/env python3
"""Speed of dense attention of PyTorch's cuDNN and flash backends: decode and a prefill chunk of 512 queries. Kvasir's
kernels are compared with these figures.

    tests/bench/peer_attention.py [TOKENS ...]     default: 4096 32768 131072 1048576

One sequence of the 8B shape (32 query and 8 KV heads of 128, bfloat16), random inputs, several sets in turn, medians of
replays of a CUDA graph. Run it on the same GPU and in the same run as attention_cuda_bench.
"""

import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
QUERIES = 512  # of a prefill chunk; here all see the whole context
REPLAYS = 31
SET_BYTES = 20 << 30


def median_microseconds(sets):
    def run():
        for q, k, v in sets:
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for replay in range(REPLAYS + 5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if replay >= 5:
            times.append(begin.elapsed_time(end))
    return 1000 * statistics.median(times) / len(sets)


def main():
    lengths = [int(text) for text in sys.argv[1:]] or [4096, 32768, 131072, 1048576]
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    print("| backend | queries | tokens | us | TB/s | TFLOP/s |\n|---|---|---|---|---|---|")
    for tokens in lengths:
        for queries in (1, QUERIES):
            report(queries, tokens)


def report(queries, tokens):
    set_bytes = tokens * KV_HEADS * HEAD_DIM * 4
    count = max(1, min(4, SET_BYTES // set_bytes))
    shapes = ((HEADS, queries), (KV_HEADS, tokens), (KV_HEADS, tokens))
    sets = [tuple(torch.randn(1, heads, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for heads, length in shapes)
            for _ in range(count)]
    products = 4 * queries * tokens * HEADS * HEAD_DIM
    for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        with sdpa_kernel(backend):
            microseconds = median_microseconds(sets)
        print(f"| {name} | {queries} | {tokens} | {microseconds:.1f} | {set_bytes / microseconds / 1e6:.2f} "
              f"| {products / microseconds / 1e6:.0f} |", flush=True)


if __name__ == "__main__":
    main()
