#!/usr/bin/env python3
"""Prefill and decode speed of the service beside Hugging Face transformers: same weights, same machine, same run.

transformers runs in bfloat16 with scaled_dot_product_attention, on a CPU with as many threads as the service. Both are
warmed up and measured in turn, so that a slow minute of the machine affects both. Needs torch and transformers.

    tests/bench/against_transformers.py --model tests/model/needle-8k --tokens 8000 --threads 2
    tests/bench/against_transformers.py --model tests/model/shapes/llama-3.1-8b --dummy --device cuda \\
        --tokens 8000,32000,130000 --flags="--max-num-batched-tokens=4096 --kv-device-size-gb=20 --kv-host-size-gb=20"

With --dummy, both have random weights of the same number and shape, and prompts have random tokens. The service still
needs a tokenizer, and gets that of another model.
"""

import argparse
import pathlib
import random
import shlex
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import ROOT, Service  # noqa: E402

import torch  # noqa: E402
from documents import make_document  # noqa: E402
from padded_tokenizer import copy_shape  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402


class Peer:
    """transformers with a KV cache and greedy sampling."""

    def __init__(self, arguments):
        torch.set_num_threads(arguments.threads)
        self.device = arguments.device
        folder = ROOT / arguments.model
        options = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
        if arguments.dummy:
            with torch.device(self.device):
                self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), **options).eval()
        else:
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
            self.model = AutoModelForCausalLM.from_pretrained(folder, **options).to(self.device).eval()

    def _now(self):
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @torch.inference_mode()
    def measure(self, prompt, new_tokens, streams=1):
        """Returns (prompt tokens, prefill seconds, seconds per decoded token) of so many equal streams, a static batch."""
        ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        start = self._now()
        out = self.model(torch.tensor([ids] * streams, device=self.device), use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        prefill = self._now() - start
        start = self._now()
        for _ in range(new_tokens):
            out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        return len(ids), prefill, (self._now() - start) / new_tokens


def measure_service(service, prompt, new_tokens, tenant):
    """Returns the same of the service, as its client sees it. Each tenant is new, so that nothing is cached."""
    answer = service.generate(prompt, max_tokens=new_tokens + 1, ignore_eos=True, tenant_id=tenant)
    assert answer.cached_tokens == 0
    times = answer.token_times
    return answer.finish.usage.prompt_tokens, times[0], (times[-1] - times[0]) / (len(times) - 1)


def make_prompts(arguments, tokens):
    """Returns a prompt to warm up, and one for each round."""
    seeds = range(arguments.rounds + 1)
    if arguments.dummy:
        return [random.Random(f"{tokens} {seed}").choices(range(1000, 100_000), k=tokens) for seed in seeds]
    return [make_document("multi_key", tokens, seed=seed).text for seed in seeds]


def print_table(rows):
    medians = {}
    for name, measured in rows.items():
        medians[name] = [statistics.median(column) for column in zip(*measured[1:])]
        tokens, prefill, decode = medians[name]
        print(f"| {name} | {tokens:.0f} | {prefill:.3f} | {1e3 * decode:.2f} |")
    ratios = [medians["transformers"][i] / medians["kvasir"][i] for i in (1, 2)]
    print(f"| ratio (larger: kvasir is faster) | | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tests/model/needle-8k")
    parser.add_argument("--dummy", action="store_true", help="random weights: the model's folder has its shape only")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tokens", default="8000", help="tokens of the prompt, one or several lengths (default 8000)")
    parser.add_argument("--new-tokens", type=int, default=64, help="decoded tokens a round (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds after one warm-up (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="threads of either (default 2)")
    parser.add_argument("--flags", default="--max-num-batched-tokens=1024", help="more flags of the service")
    arguments = parser.parse_args()
    flags = [f"--threads={arguments.threads}", "--mass-sample-rate=0", f"--device={arguments.device}",
             *shlex.split(arguments.flags)]
    model = arguments.model
    with tempfile.TemporaryDirectory(prefix="kvasir-shape-") as folder:
        if arguments.dummy:
            flags += ["--load-format=dummy", "--dtype=bfloat16"]
            copy_shape(ROOT / model, folder)
            model = folder
        measure_all(arguments, model, flags)


def measure_all(arguments, model, flags):
    peer = Peer(arguments)
    lengths = [int(tokens) for tokens in arguments.tokens.split(",")]
    with Service(model, flags) as service:
        print("| | prompt tokens | prefill, s | decode, ms a token |\n|---|---|---|---|")
        for tokens in lengths:
            rows = {"transformers": [], "kvasir": []}
            for i, prompt in enumerate(make_prompts(arguments, tokens)):
                rows["transformers"].append(peer.measure(prompt, arguments.new_tokens))
                rows["kvasir"].append(measure_service(service, prompt, arguments.new_tokens, f"{tokens}-{i}"))
                print(f"round {i}: {rows['transformers'][-1]} {rows['kvasir'][-1]}", file=sys.stderr)
            print_table(rows)


if __name__ == "__main__":
    main()
