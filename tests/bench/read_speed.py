#!/usr/bin/env python3
"""Measures how fast the machine reads memory, in GB/s: this bounds the time of a token, which reads every weight once.

    read_speed.py THREADS

Each thread computes the maximum of its own part of 1 GiB, several times. The best time counts. Needs numpy.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

BYTES = 1 << 30
ROUNDS = 7


def measure(threads):
    parts = np.array_split(np.ones(BYTES // 4, dtype=np.int32), threads)
    with ThreadPoolExecutor(threads) as pool:
        best = float("inf")
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - begin)
    return BYTES / best / 1e9


if __name__ == "__main__":
    print(f"{measure(int(sys.argv[1])):.1f}")
