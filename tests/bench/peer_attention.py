#!/usr/bin/env python3
"""Speed of dense attention of others, beside Kvasir's: decode of one and of many streams, chunks of 512 queries, and a
prompt's chunk of 8,192.

    attention_cuda_bench --rows=dense 1024 8192 32768 131072 > ours.log       # the same GPU, the same call
    tests/bench/peer_attention.py --ours=ours.log 1024 8192 32768 131072

The 8B shape (32 query and 8 KV heads of 128, bfloat16), random inputs, several sets in turn, medians of replays of a CUDA
graph. Queries are the last of their context. Peers that are not installed are named and left out:

    cuDNN, flash    PyTorch's backends: keys and values of a stream lie together. cuDNN's chunks of queries see the whole
                    context, but for a prompt's first chunk, which is causal
    flex            PyTorch's flex_attention, compiled for each shape: one stream, 64 streams and prompts
    FA3             FlashAttention-3, PyPI's fa3-fwd: keys and values of a stream lie together, and it is told that all
                    streams are of one length
    FI fa2, fa3     FlashInfer over pages of 64 tokens in random order: its batch wrappers for decode (with a CUDA graph;
                    on tensor cores) and prefill
    FI cores, XQA   the same pages: FlashInfer's decode without tensor cores, and TensorRT-LLM's kernel in FlashInfer

Every output is compared with that of flash. The table with --ours puts all of them beside the rows of attention_cuda_bench;
above 1, the last column says that ours is faster than the fastest of them.
"""

import argparse
import gc
import math
import multiprocessing
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
PAGE = 64
QUERIES = 512  # of a chunk
PROMPT = 8192  # queries of a prompt's chunk, as the service reads it
STREAMS = (8, 16, 32, 64)
REPLAYS = 31
SET_BYTES = 10 << 30
MOST_BATCH_TOKENS = 2 << 20
MOST_PROMPT_TOKENS = 131072
WORKSPACE_BYTES = 512 << 20
TOLERANCE = 0.02  # of an output, relative to its norm


@dataclass(frozen=True)
class Case:
    streams: int
    queries: int
    tokens: int

    def bytes(self):
        return self.streams * self.tokens * KV_HEADS * HEAD_DIM * 4

    def products(self):
        seen = self.tokens - (self.queries - 1) / 2  # on average by a query
        return 4 * self.streams * self.queries * seen * HEADS * HEAD_DIM

    def name(self):
        if self.queries == 1:
            return f"decode, {self.streams} streams" if self.streams > 1 else "decode"
        return f"{self.queries} queries"


class Inputs:
    """Queries, and keys and values twice: of each stream together, and in pages."""

    def __init__(self, case):
        def random(heads, length):
            return torch.randn(case.streams, heads, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

        self.q, self.k, self.v = random(HEADS, case.queries), random(KV_HEADS, case.tokens), random(KV_HEADS, case.tokens)
        self.packed_q = self.q.transpose(1, 2).reshape(-1, HEADS, HEAD_DIM)
        pages = case.streams * case.tokens // PAGE
        self.pages = torch.empty(pages, 2, PAGE, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    def fill_pages(self, order):
        for side, values in enumerate((self.k, self.v)):
            for stream, row in enumerate(order):
                self.pages[row, side] = values[stream].transpose(0, 1).reshape(-1, PAGE, KV_HEADS, HEAD_DIM)


class PageTable:
    """The order of pages in memory, the same for all sets of a case."""

    def __init__(self, case):
        each = case.tokens // PAGE
        order = torch.randperm(case.streams * each, device="cuda", dtype=torch.int32)
        self.of_stream = order.view(case.streams, each)
        self.indices = order
        self.begins = torch.arange(case.streams + 1, device="cuda", dtype=torch.int32) * each
        self.last_tokens = torch.full((case.streams,), PAGE, device="cuda", dtype=torch.int32)
        self.lengths = torch.full((case.streams,), case.tokens, device="cuda", dtype=torch.int32)


def cudnn(case, table):
    causal = 1 < case.queries == case.tokens

    def run(inputs):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=causal, enable_gqa=True)
    return run


def flash(case, table):
    # The public function has no mask whose last query sees all of a longer context; the operator beneath it has.
    def run(inputs):
        return torch.ops.aten._scaled_dot_product_flash_attention(inputs.q, inputs.k, inputs.v, 0.0, case.queries > 1)[0]
    return run


def flex(case, table):
    if case.queries == QUERIES or case.streams not in (1, 64):
        return None
    mask = None
    if case.queries > 1:
        before = case.tokens - case.queries
        mask = create_block_mask(lambda b, h, q, k: q + before >= k, None, None, case.queries, case.tokens, _compile=True)
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda inputs: compiled(inputs.q, inputs.k, inputs.v, block_mask=mask, enable_gqa=True)


def fa3(case, table):
    from fa3_fwd_interface import flash_attn_with_kvcache

    def run(inputs):
        q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
        return flash_attn_with_kvcache(q, k, v, causal=True, num_splits=0).transpose(1, 2)
    return run


def workspace():
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def unpacked(out, case):
    return out.view(case.streams, case.queries, HEADS, HEAD_DIM).transpose(1, 2)


def flashinfer_decode(case, table, tensor_cores):
    import flashinfer
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), "NHD", use_cuda_graph=True, use_tensor_cores=tensor_cores, paged_kv_indptr_buffer=table.begins.clone(),
        paged_kv_indices_buffer=table.indices.clone(), paged_kv_last_page_len_buffer=table.last_tokens.clone(), backend="fa2")
    wrapper.plan(table.begins, table.indices, table.last_tokens, HEADS, KV_HEADS, HEAD_DIM, PAGE,
                 q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    return lambda inputs: unpacked(wrapper.run(inputs.packed_q, inputs.pages), case)


def flashinfer_prefill(case, table, backend):
    import flashinfer
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", backend=backend)
    queries = torch.arange(case.streams + 1, device="cuda", dtype=torch.int32) * case.queries
    wrapper.plan(queries, table.begins, table.indices, table.last_tokens, HEADS, KV_HEADS, HEAD_DIM, PAGE, causal=True,
                 q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    return lambda inputs: unpacked(wrapper.run(inputs.packed_q, inputs.pages), case)


def flashinfer_fa2(case, table):
    return flashinfer_decode(case, table, True) if case.queries == 1 else flashinfer_prefill(case, table, "fa2")


def flashinfer_fa3(case, table):
    return None if case.queries == 1 else flashinfer_prefill(case, table, "fa3")


def flashinfer_cores(case, table):
    return flashinfer_decode(case, table, False) if case.queries == 1 else None


def flashinfer_xqa(case, table):
    if case.queries > 1:
        return None
    import flashinfer
    space = workspace()

    def run(inputs):
        out = flashinfer.decode.xqa_batch_decode_with_kv_cache(
            inputs.packed_q, inputs.pages, space, table.of_stream, table.lengths, case.tokens,
            bmm1_scale=1 / math.sqrt(HEAD_DIM), kv_layout="NHD")
        return unpacked(out, case)
    return run


PEERS = {"cuDNN": cudnn, "flash": flash, "flex": flex, "FA3": fa3, "FI fa2": flashinfer_fa2, "FI fa3": flashinfer_fa3,
         "FI cores": flashinfer_cores, "FI XQA": flashinfer_xqa}


def median_microseconds(run, sets):
    def run_all():
        for inputs in sets:
            run(inputs)

    run_all()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all()
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


class Bench:
    """Measures one peer. It runs in a process of its own, so that a peer that crashes takes no other with it."""

    def __init__(self, name, seconds, results):
        self.name = name
        self.seconds = seconds
        self.results = results

    def run(self, cases):
        torch.manual_seed(1)
        started = time.monotonic()
        for case in cases:
            if time.monotonic() - started > self.seconds:
                print(f"{self.name} had its {self.seconds:.0f} seconds: {case} and those after it are left out", flush=True)
                return
            try:
                self.measure(case)
            except ImportError as error:
                print(f"absent: {self.name}: {error}", flush=True)
                return
            except Exception as error:  # a case that a peer cannot do leaves its cell empty, and the log says why
                print(f"{self.name} cannot do {case}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            if case is cases[0]:  # in which a peer may compile its modules
                started = time.monotonic()
            gc.collect()
            torch.cuda.empty_cache()

    def measure(self, case):
        table = PageTable(case)
        attend = PEERS[self.name](case, table)
        if attend is None:
            return
        sets = [Inputs(case) for _ in range(max(1, min(4, SET_BYTES // case.bytes())))]
        for inputs in sets:
            inputs.fill_pages(table.of_stream)
        sees_all = self.name == "cuDNN" and 1 < case.queries < case.tokens
        if not sees_all:
            self.check(attend(sets[0]), flash(case, table)(sets[0]))
        microseconds = median_microseconds(attend, sets)
        if sees_all:  # as long as it would take for the products that the others make
            microseconds *= case.products() / (4 * case.streams * case.queries * case.tokens * HEADS * HEAD_DIM)
        self.results.send((case, microseconds))
        print_row(self.name, case.streams, case.queries, case.tokens, f"{microseconds:.1f}",
                  f"{case.bytes() / microseconds / 1e6:.2f}", f"{case.products() / microseconds / 1e6:.0f}")

    @staticmethod
    def check(out, right):
        difference = ((out.float() - right.float()).norm() / right.float().norm()).item()
        if not difference < TOLERANCE:
            raise ValueError(f"its output differs from flash's by {difference:.3g} of the norm")


def measure_apart(name, seconds, cases):
    """Returns microseconds by case of a peer. A crash ends them."""
    context = multiprocessing.get_context("spawn")
    mine, results = context.Pipe(duplex=False)
    process = context.Process(target=run_peer, args=(name, seconds, results, cases))
    process.start()
    results.close()
    microseconds = {}
    try:
        while True:
            case, time_of_case = mine.recv()
            microseconds[case] = time_of_case
    except EOFError:
        process.join()
    if process.exitcode != 0:
        print(f"{name} ended with exit code {process.exitcode}", flush=True)
    return microseconds


def run_peer(name, seconds, results, cases):
    Bench(name, seconds, results).run(cases)


def print_beside(cases, peers, ours):
    used = [name for name in peers if peers[name]]
    print(f"\nMicroseconds on {torch.cuda.get_device_name()}.\n")
    print_row("attention", "tokens", "ours", *used, "fastest peer / ours")
    print("|" + "---|" * (len(used) + 4))
    for case in cases:
        times = [peers[name].get(case) for name in used]
        known = [microseconds for microseconds in times if microseconds]
        own = ours.get(case)
        print_row(case.name(), f"{case.tokens:,}", f"{own:,.1f}" if own else "", *(f"{t:,.1f}" if t else "" for t in times),
                  f"{min(known) / own:.2f}" if own and known else "")


def print_row(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def read_ours(path):
    """Returns microseconds by case of attention_cuda_bench's rows of dense attention at the model's positions."""
    ours = {}
    with open(path) as lines:
        for line in lines:
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if len(cells) == 7 and cells[1].isdecimal():
                name, queries, tokens = cells[0], int(cells[1]), int(cells[2])
                if name == "dense":
                    ours[Case(1, queries, tokens)] = float(cells[4])
                elif name.startswith("dense batch of "):
                    ours[Case(int(name.rsplit(" ", 1)[1]), queries, tokens)] = float(cells[4])
    return ours


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=int, nargs="*", default=[4096, 32768, 131072, 1048576],
                        help=f"lengths of contexts, multiples of {PAGE}")
    parser.add_argument("--ours", help="what attention_cuda_bench printed")
    parser.add_argument("--seconds", type=float, default=60, help="of each peer after its first row: then the others are left out")
    arguments = parser.parse_args()
    if any(tokens < PAGE or tokens % PAGE for tokens in arguments.tokens):
        sys.exit(f"lengths are multiples of {PAGE}")
    lengths = arguments.tokens
    cases = [Case(1, 1, tokens) for tokens in lengths]
    cases += [Case(1, queries, tokens) for queries in (PROMPT, QUERIES) for tokens in lengths
              if queries <= tokens and (queries == QUERIES or tokens <= MOST_PROMPT_TOKENS)]
    cases += [Case(streams, 1, tokens) for streams in reversed(STREAMS) for tokens in lengths
              if streams * tokens <= MOST_BATCH_TOKENS]
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    print_row("attention of", "streams", "queries", "tokens", "us", "TB/s", "TFLOP/s")
    print("|" + "---|" * 7, flush=True)
    peers = {name: measure_apart(name, arguments.seconds, cases) for name in PEERS}
    if arguments.ours:
        print_beside(cases, peers, read_ours(arguments.ours))


if __name__ == "__main__":
    main()
