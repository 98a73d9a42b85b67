#!/usr/bin/env python3
"""Bandwidth of bodies between two processes (peer_bandwidth) beside ucx_perftest's puts of the same size, over each
transport, in turns on the same machine: tests/bench/peer_bandwidth.py --build build/cpu"""

import argparse
import os
import re
import socket
import statistics
import subprocess
import time

# Puts over TCP on loopback are slow in UCX 1.13, so fewer.
COUNTS = {"sm": 4000, "tcp": 400}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def perftest_put(transport, size, count):
    """MB/s of ucx_perftest's put_bw."""
    environment = dict(os.environ, UCX_TLS=f"{transport},self", UCX_NET_DEVICES="lo", UCX_WARN_UNUSED_ENV_VARS="n")
    port = str(free_port())
    server = subprocess.Popen(["ucx_perftest", "-p", port], env=environment, stdout=subprocess.DEVNULL)
    try:
        time.sleep(1)  # it says nowhere that it listens
        client = subprocess.run(["ucx_perftest", "127.0.0.1", "-p", port, "-t", "ucp_put_bw", "-s", str(size), "-n", str(count),
                                 "-w", str(max(1, count // 10)), "-f"], env=environment, check=True, capture_output=True, text=True)
    finally:
        server.kill()
        server.wait()
    numbers = [float(number) for number in re.findall(r"\d+\.\d+|\d+", client.stdout.splitlines()[-1])]
    return numbers[-3]  # iterations, latencies (3), MB/s (average, overall), messages a second (2)


def bodies(build, transport, size, count):
    transports = "tcp" if transport == "tcp" else f"{transport},tcp"  # links are opened over TCP
    ran = subprocess.run([f"{build}/tests/bench/peer_bandwidth", transports, str(size), str(count)], check=True,
                         capture_output=True, text=True)
    return float(ran.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default="build/cpu")
    parser.add_argument("--size", type=int, default=1 << 20, help="bytes of a body")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print("| transport | bodies, MB/s | puts of ucx_perftest, MB/s | share |\n|---|---|---|---|")
    for transport, count in COUNTS.items():
        pairs = [(bodies(args.build, transport, args.size, count), perftest_put(transport, args.size, count))
                 for _ in range(args.rounds)]
        ours, puts = (statistics.median(column) for column in zip(*pairs))
        print(f"| {transport} | {ours:.0f} | {puts:.0f} | {ours / puts:.2f} |", flush=True)


if __name__ == "__main__":
    main()
