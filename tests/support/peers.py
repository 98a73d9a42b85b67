"""Replicas that are each other's peers: what tests of them share."""

import random
import socket

from support.service import Service

BLOCK = 64
FLAGS = ["--kv-device-size-gb=0.05", "--kv-host-size-gb=0.2", "--mass-sample-rate=0", "--max-num-batched-tokens=512",
         "--max-model-len=8192", "--threads=1"]
OPTIONS = dict(max_tokens=8, ignore_eos=True)


def make_prompt(seed, tokens):
    rng = random.Random(seed)
    return [rng.randrange(3, 1400) for _ in range(tokens)]


def shared_tokens(tokens):
    """Those of a prompt that another replica can give: whole blocks, and one token is left to compute."""
    return (tokens - 1) // BLOCK * BLOCK


def free_ports(count):
    """Ports in a row that nobody listens on."""
    while True:
        first = random.randrange(20000, 32000)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue


def peer_blocks(service, result, rank=0):
    return sum(value for name, value in service.metrics(service.worker_metrics[rank]).items()
               if name.startswith("kvasir_peer_blocks_total") and f'result="{result}"' in name)


def fetched_bytes(service, ranks):
    return sum(value for rank in range(ranks) for name, value in service.metrics(service.worker_metrics[rank]).items()
               if name.startswith("kvasir_kv_transfer_bytes_total") and 'from="peer"' in name)


def serve(model, listen, peers, secret, *flags):
    """A server whose rank 0 listens on the port `listen`. `peers`: "PORT", or "PORT*N" for N ranks, of each replica."""
    return Service(model=model, flags=[*FLAGS, f"--peer-listen=127.0.0.1:{listen}", f"--peer-secret-file={secret}",
                                       f"--peers={','.join(f'127.0.0.1:{port}' for port in peers)}", *flags])
