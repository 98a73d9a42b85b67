#!/usr/bin/env python3
"""Prefill and decode speed of the service beside Hugging Face transformers: same weights, same machine, same run.

transformers runs on the CPU in bf16 with scaled_dot_product_attention and as many threads as the service; both are warmed
up, and the two are measured in turn, so that a slow minute of the machine hits both. Needs torch and transformers.

    tests/bench/against_transformers.py --model tests/model/needle-8k --tokens 8000 --threads 2
"""

import argparse
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import ROOT, Service  # noqa: E402

import torch  # noqa: E402
from documents import make_document  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402


class Peer:
    """transformers with a KV cache, greedy."""

    def __init__(self, model, threads):
        torch.set_num_threads(threads)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa").eval()

    @torch.inference_mode()
    def measure(self, text, new_tokens):
        """(prompt tokens, prefill seconds, seconds a decoded token)."""
        ids = self.tokenizer(text, return_tensors="pt").input_ids
        start = time.perf_counter()
        out = self.model(ids, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        prefill = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(new_tokens):
            out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        return ids.shape[1], prefill, (time.perf_counter() - start) / new_tokens


def measure_service(service, text, new_tokens, tenant):
    """The same of the service, as its client sees it; a fresh tenant, so that nothing is cached."""
    answer = service.generate(text, max_tokens=new_tokens + 1, ignore_eos=True, tenant_id=tenant)
    assert answer.cached_tokens == 0
    times = answer.token_times
    return answer.finish.usage.prompt_tokens, times[0], (times[-1] - times[0]) / (len(times) - 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tests/model/needle-8k")
    parser.add_argument("--tokens", type=int, default=8000, help="tokens of the prompt (default 8000)")
    parser.add_argument("--new-tokens", type=int, default=64, help="decoded tokens a round (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds after one warm-up (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="threads of either (default 2)")
    arguments = parser.parse_args()
    texts = [make_document("multi_key", arguments.tokens, seed=seed).text for seed in range(arguments.rounds + 1)]
    peer = Peer(ROOT / arguments.model, arguments.threads)
    flags = [f"--threads={arguments.threads}", "--mass-sample-rate=0", "--max-num-batched-tokens=1024"]
    rows = {"transformers": [], "kvasir": []}
    with Service(arguments.model, flags) as service:
        for i, text in enumerate(texts):
            rows["transformers"].append(peer.measure(text, arguments.new_tokens))
            rows["kvasir"].append(measure_service(service, text, arguments.new_tokens, f"round-{i}"))
            print(f"round {i}: {rows['transformers'][-1]} {rows['kvasir'][-1]}", file=sys.stderr)
    print("| | prompt tokens | prefill, s | decode, ms a token |\n|---|---|---|---|")
    medians = {}
    for name, measured in rows.items():
        counted = measured[1:]  # the first warmed up
        medians[name] = [statistics.median(column) for column in zip(*counted)]
        tokens, prefill, decode = medians[name]
        print(f"| {name} | {tokens:.0f} | {prefill:.3f} | {1e3 * decode:.2f} |")
    ratios = [medians["transformers"][i] / medians["kvasir"][i] for i in (1, 2)]
    print(f"| ratio (larger: kvasir is faster) | | {ratios[0]:.2f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main()
