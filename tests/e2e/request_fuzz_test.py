"""Requests with random fields, each valid by itself, and random policies, against two workers.

A request may be refused (INVALID_ARGUMENT, ALREADY_EXISTS, RESOURCE_EXHAUSTED). Nothing else may happen: no group ends,
and a stream beside them gets the same tokens again and again, without an error. Servers differ in policies and
positions. KVASIR_FUZZ_REQUESTS is the number of requests (300), KVASIR_FUZZ_SEED the seed of the first server.

Bug that the first requests of such a run found: with a reuse rule and dense layers a prompt of 1 to 20 tokens ended the
group.
"""

import collections
import concurrent.futures
import json
import os
import pathlib
import random
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import Service, read_stream  # noqa: E402
from support.tiny_model import LAYERS, VOCAB, make_tiny_model  # noqa: E402

import grpc  # noqa: E402
from kvasir.v1 import generation_pb2, sparsity_pb2  # noqa: E402

REQUESTS = int(os.environ.get("KVASIR_FUZZ_REQUESTS", "300"))
SEED = int(os.environ.get("KVASIR_FUZZ_SEED", "1"))
REQUESTS_PER_SERVER = 100
CLIENTS = 8
TRAINED_TOKENS = 1024
REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.RESOURCE_EXHAUSTED}
SELECTORS = ("all", "streaming", "quest", "tokenselect", "hip", "infinitehip")
LEAST_WINDOW = {"3k": 512, "3k-fast": 512, "3k-flash": 512, "5k": 128}


def some(rng, *values):
    return rng.choice(values)


# ---- policies


def selector_message(rng, name):
    if name == "quest":
        return {"score": some(rng, "bound", "estimate")}
    if name == "tokenselect":
        return {"scope": some(rng, "group", "layer")}
    if name == "infinitehip":
        return {"preset": some(rng, *LEAST_WINDOW), "probe": some(rng, "digest", "centre", "first"),
                "scope": some(rng, "group", "layer")}
    return {}


def policy_part(rng):
    name = rng.choice(SELECTORS)
    options = selector_message(rng, name)
    least = LEAST_WINDOW[options["preset"]] if name == "infinitehip" else 1
    part = {name: options, "sink_tokens": some(rng, 0, 1, 64, 128, 500),
            "window_tokens": max(least, some(rng, 1, 2, 64, 100, 512)),
            "token_budget": some(rng, 1, 64, 200, 256, 2048), "dense_layers": some(rng, 0, 0, 1, LAYERS)}
    if name not in ("all", "streaming") and rng.random() < 0.3:
        part["layer_budgets"] = [{"first_layer": 0, "last_layer": 0, "token_budget": some(rng, 1, 128, 512)}]
    return name, part


def decode_part(rng, extension):
    name, part = policy_part(rng)
    chooses = name not in ("all", "streaming")
    estimates = extension != "self_extend"
    if chooses and rng.random() < 0.6:
        rule = some(rng, "interval", "cosine", "both")
        interval = some(rng, 1, 3, 8, 16)
        part["reuse"] = {"rule": rule, "interval": interval}
        part["window_tokens"] = max(part["window_tokens"], min(64, 4 * interval))
    if chooses and estimates and rng.random() < 0.3:
        part["top_p"] = some(rng, 0.1, 0.9, 1.0)
    if name != "all" and estimates and rng.random() < 0.4:
        actions = ("dense", "report") if name == "streaming" else ("dense", "widen", "report")
        part["quality"] = {"min_mass": some(rng, 0.1, 0.8, 1.0), "on_violation": rng.choice(actions)}
    elif name != "streaming" and estimates and rng.random() < 0.3:
        part["art"] = {"probe": some(rng, "normalised", "raw"), "guard": some(rng, "bounds", "none"),
                       "order": some(rng, "recency", "importance") if chooses else "recency"}
        part["patience"] = some(rng, 1, 5)
    return part


def policies(rng, extension):
    """Returns three policies as a policy file has them; JSON is YAML."""
    return [{"name": f"random-{i}", "prefill": policy_part(rng)[1], "decode": decode_part(rng, extension),
             "tail_tokens": some(rng, 0, 1, 64, 200)} for i in range(3)]


# ---- requests


def overrides(rng, part):
    """Returns numbers for a part of a policy, each in its range; mostly those that a request may override."""
    numbers = {"sink_tokens": some(rng, 1, 128, 5000, 1 << 20),
               "window_tokens": some(rng, 1, 2, 63, 64, 128, 512, 513, 1 << 20),
               "token_budget": some(rng, 1, 63, 64, 65, 5000, 1 << 24), "dense_layers": some(rng, 1, 2, 3, 1024),
               "top_p": some(rng, 1e-6, 0.5, 1.0), "patience": some(rng, 1, 7, 1 << 20),
               "reuse": {"interval": some(rng, 1, 2, 8, 31, 64), "theta": some(rng, 0.01, 0.9, 1.0),
                         "theta_force": some(rng, 0.0, 0.5, 1.0), "max_age": some(rng, 1, 64)},
               "quality": {"min_mass": some(rng, 0.01, 0.9, 1.0), "max_budget_tokens": some(rng, 0, 0, 1 << 24),
                           "on_violation": some(rng, "dense", "widen", "report")},
               "layer_budgets": [{"first_layer": first, "last_layer": some(rng, first, first, 1023),
                                  "token_budget": some(rng, 1, 64, 1 << 24)}
                                 for first in sorted(rng.sample(range(3), some(rng, 1, 1, 2)))]}
    if rng.random() < 0.9:
        declared = {"patience": "art", "top_p": "top_p", "reuse": "reuse", "quality": "quality"}
        for name, needed in declared.items():
            if needed not in part:
                del numbers[name]
        if "all" in part or "streaming" in part:
            del numbers["layer_budgets"]
        if "window_tokens" in part:
            numbers["window_tokens"] = max(numbers["window_tokens"], part["window_tokens"])
    return sparsity_pb2.AttentionPolicy(**{name: value for name, value in numbers.items() if rng.random() < 0.3})


def random_text(rng):
    alphabet = some(rng, "ab ", "The quick brown fox. ", "äß€漢字🦊\u0301", "\n\t\0\x7f", "<|endoftext|><s></s>")
    return "".join(rng.choice(alphabet) for _ in range(some(rng, 1, 5, 20, 300)))


def random_sampling(rng, sampling):
    fields = {
        "temperature": (0, 1e-30, 0.7, 1, 100), "top_p": (1e-6, 0.5, 1), "top_k": (0, 1, 50, 1 << 20),
        "min_p": (0, 0.1, 1), "frequency_penalty": (-2, 0, 2), "presence_penalty": (-2, 0, 2),
        "repetition_penalty": (0.01, 1, 100), "skip_special_tokens": (False, True), "ignore_eos": (False, True),
        "logprobs": (0, 1, 20), "prompt_logprobs": (0, 1, 20), "logprobs_text": (False, True),
        "seed": (0, 1, (1 << 64) - 1), "include_stop_str_in_output": (False, True)}
    for name, values in fields.items():
        if rng.random() < 0.4:
            setattr(sampling, name, rng.choice(values))
    sampling.max_tokens = some(rng, 1, 2, 5, 30)
    sampling.min_tokens = rng.randint(0, sampling.max_tokens)
    if rng.random() < 0.2:
        sampling.stop.extend(random_text(rng)[:50] or "x" for _ in range(some(rng, 1, 3, 64)))
    if rng.random() < 0.2:
        sampling.stop_token_ids.extend(rng.randrange(VOCAB) for _ in range(some(rng, 1, 20, 256)))
    if rng.random() < 0.2:
        for token in rng.sample(range(VOCAB), some(rng, 1, 20, 1024)):
            sampling.logit_bias.add(token_id=token, bias=some(rng, -100, -1, 0, 100))


def random_request(rng, declared):
    """Returns a request. `declared` has the parts of the server's policies by name."""
    request = generation_pb2.GenerateRequest(request_id=some(rng, *[""] * 30, "twin", "\u00e9" * 20),
                                             tenant_id=some(rng, "", "a", "b" * 128))
    if rng.random() < 0.3:
        request.text = random_text(rng)
    else:
        length = some(rng, 1, 2, 3, rng.randint(1, 20), 63, 64, 65, rng.randint(100, 700), rng.randint(700, 1000),
                      rng.randint(1000, 2000))
        # Some share their beginning and find it in the cache.
        first = random.Random(7) if rng.random() < 0.3 else rng
        request.token_ids.ids.extend(first.randrange(VOCAB) for _ in range(length))
    random_sampling(rng, request.sampling)
    request.policy.name = rng.choice(list(declared))
    policy = declared[request.policy.name]
    if rng.random() < 0.5:
        request.policy.prefill_overrides.CopyFrom(overrides(rng, policy["prefill"]))
    if rng.random() < 0.7:
        request.policy.decode_overrides.CopyFrom(overrides(rng, policy["decode"]))
    return request


class Innocent(threading.Thread):
    """Repeats one request. Any answer other than the first is an error."""

    def __init__(self, service):
        super().__init__(daemon=True)
        self.service, self.ending, self.error = service, threading.Event(), None
        self.answers, self.longest_gap_s = 0, 0.0

    def run(self):
        first = None
        while not self.ending.is_set() and self.error is None:
            try:
                answer = self.service.generate([5, 6, 7, 8, 9], max_tokens=60, ignore_eos=True)
            except grpc.RpcError as error:
                self.error = f"{error.code()}: {error.details()}"
                return
            first = first or answer.token_ids
            if answer.token_ids != first:
                self.error = f"answer {self.answers} differs"
            times = [0.0] + answer.token_times
            self.longest_gap_s = max([self.longest_gap_s] + [b - a for a, b in zip(times, times[1:])])
            self.answers += 1

    def stop(self):
        self.ending.set()
        self.join(120)


def default_policy(rng):
    """Returns flags for the policy named default, and its parts."""
    selector = some(rng, "all", "quest", "hip", "infinitehip")
    dense_layers = some(rng, 0, 1, 2)
    flags = [f"--sparse-selector={selector}", "--sparse-token-budget=256", f"--sparse-dense-layers={dense_layers}"]
    decode = {selector: {}}
    if selector != "all":
        flags.append(f"--sparse-reuse={some(rng, 'interval', 'both')}")
        decode["reuse"] = {}
    return flags, {"prefill": {"all": {}}, "decode": decode}


class RandomRequests(unittest.TestCase):
    def configure(self, rng, folder):
        """Returns flags, and the policies that they declare."""
        extension = some(rng, "none", "none", "streaming", "self_extend")
        path = pathlib.Path(folder) / "policies.yaml"
        declared = policies(rng, extension)
        beyond = extension == "streaming" and rng.random() < 0.7
        if beyond:  # at least one policy must serve contexts beyond the trained length
            part = {"streaming": {}, "sink_tokens": 64, "window_tokens": 256}
            declared[-1].update(prefill=part, decode=part)
        path.write_text(json.dumps(declared))
        flags, default = default_policy(rng)
        flags += ["--tensor-parallel-size=2", "--dtype=float32", "--threads=1", f"--policies={path}",
                  f"--position-extension={extension}", f"--max-num-seqs={some(rng, 4, 16)}", "--mass-sample-rate=0.05",
                  f"--kv-host-size-gb={some(rng, 2, 0.0015)}"]  # 0.0015 is 2,900 tokens: sequences are preempted
        flags.append(f"--max-model-len={2048 if beyond else TRAINED_TOKENS}")
        if extension == "self_extend":
            flags.append("--self-extend-window=256")  # it must be shorter than the trained length
        return flags, {"": default, "default": default, **{policy["name"]: policy for policy in declared}}

    def run_server(self, seed, count):
        rng = random.Random(seed)
        with tempfile.TemporaryDirectory(prefix="kvasir-fuzz-") as name:
            model = make_tiny_model(pathlib.Path(name) / "model", seed=1)
            config = model / "config.json"
            config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": TRAINED_TOKENS}))
            flags, declared = self.configure(rng, name)
            with Service(model=model, flags=flags) as service:
                innocent = Innocent(service)
                innocent.start()
                failed = []

                def send(request):
                    try:
                        read_stream(service.stub.Generate(request, timeout=300))
                        return "OK"
                    except grpc.RpcError as error:
                        if error.code() not in REFUSALS:
                            failed.append(f"{error.code()}: {error.details()}\n{request}")
                        return error.code().name

                with concurrent.futures.ThreadPoolExecutor(CLIENTS) as clients:
                    ends = collections.Counter(clients.map(send, [random_request(rng, declared) for _ in range(count)]))
                innocent.stop()
                context = f"seed {seed}: {' '.join(flags)}"
                self.assertEqual([], failed[:3], context)
                self.assertIsNone(innocent.error, context)
                self.assertNotIn("no worker group", service.log(), context)
                return ends, innocent

    def test_end_alone(self):
        ends, answers, gap, begun = collections.Counter(), 0, 0.0, time.monotonic()
        for i in range(0, REQUESTS, REQUESTS_PER_SERVER):
            more, innocent = self.run_server(SEED + i // REQUESTS_PER_SERVER, min(REQUESTS_PER_SERVER, REQUESTS - i))
            ends += more
            answers += innocent.answers
            gap = max(gap, innocent.longest_gap_s)
            print(f"{i + sum(more.values())} requests: {dict(ends)}; beside them {answers} answers, "
                  f"longest gap {gap:.2f} s; {time.monotonic() - begun:.0f} s", flush=True)
        self.assertGreater(ends["OK"], REQUESTS // 2, "most requests were refused")


if __name__ == "__main__":
    unittest.main()
