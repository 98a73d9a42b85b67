#!/usr/bin/env python3
"""Speed of any server that answers POST /v1/completions in streams: ours, or vLLM on the same card with the same model.

    tests/bench/openai_bench.py --url=http://127.0.0.1:8000 --lengths=8000,32000,130000 --batches=1024x64,8192x8

Prompts are random token ids, no two alike; answers are greedy and of full length. The first table has a row for each
length: the median of rounds of one stream alone. The second has a row for each batch, TOKENSxSTREAMS that begin at once:
median over streams of a stream's mean gap, and tokens a second from the first request to the last token.

vLLM's side of the comparison, random weights of the shape and a tokenizer in FOLDER (padded_tokenizer.copy_shape):

    vllm serve FOLDER --load-format=dummy --no-enable-prefix-caching --max-num-batched-tokens=8192
    kvasir serve --model=FOLDER --load-format=dummy --enable-prefix-caching=false --max-num-batched-tokens=8192
"""

import argparse
import http.client
import json
import random
import statistics
import sys
import threading
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass, field

VOCABULARY = range(1000, 100_000)


@dataclass
class Stream:
    """Seconds are those of time.monotonic()."""
    started: float = 0
    events: list = field(default_factory=list)
    tokens: int = 0

    def first(self):
        return self.events[0] - self.started

    def gap(self):
        return (self.events[-1] - self.events[0]) / (self.tokens - 1)


class Client:
    def __init__(self, url, timeout_s):
        self.address = urllib.parse.urlparse(url).netloc
        self.timeout_s = timeout_s
        self.seed = 0
        self.wait_until_ready(url)
        with urllib.request.urlopen(f"{url}/v1/models", timeout=timeout_s) as reply:
            self.model = json.load(reply)["data"][0]["id"]

    def wait_until_ready(self, url):
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    return
            except OSError as error:
                if time.monotonic() > deadline:
                    sys.exit(f"{url} is not ready after {self.timeout_s} s: {error}")
            time.sleep(0.5)

    def prompt(self, tokens):
        self.seed += 1
        return random.Random(self.seed).choices(VOCABULARY, k=tokens)

    def ask(self, prompt, max_tokens):
        """Reads a stream to its end."""
        body = json.dumps({"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
                           "stream": True, "stream_options": {"include_usage": True}})
        connection = http.client.HTTPConnection(self.address, timeout=self.timeout_s)
        stream = Stream(started=time.monotonic())
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {reply.read()[:500]}")
        for line in reply:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            now = time.monotonic()
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"])
            if event.get("choices"):
                stream.events.append(now)
            elif event.get("usage"):
                stream.tokens = event["usage"]["completion_tokens"]
        connection.close()
        if stream.tokens != max_tokens:
            raise RuntimeError(f"{stream.tokens} of {max_tokens} tokens came")
        return stream

    def ask_together(self, prompts, max_tokens):
        streams, failures = [], []

        def run(prompt):
            try:
                streams.append(self.ask(prompt, max_tokens))
            except Exception as error:  # told by the caller's thread
                failures.append(error)

        threads = [threading.Thread(target=run, args=(prompt,)) for prompt in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return streams


def print_row(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def print_head(*cells):
    print()
    print_row(*cells)
    print("|" + "---|" * len(cells), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--lengths", default="8000,32000,130000", help="prompt tokens of one stream")
    parser.add_argument("--batches", default="1024x1,1024x8,1024x16,1024x32,1024x64,8192x8", help="TOKENSxSTREAMS, ...")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer in a batch; half as many alone")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the server to be ready, and for each answer")
    arguments = parser.parse_args()
    client = Client(arguments.url, arguments.timeout)
    client.ask_together([client.prompt(1000) for _ in range(4)], 16)
    print_head("prompt tokens", "to the first token, ms", "then between tokens, ms")
    for tokens in (int(text) for text in arguments.lengths.split(",") if text):
        rounds = [client.ask(client.prompt(tokens), arguments.max_tokens // 2) for _ in range(arguments.rounds)]
        print_row(tokens, f"{1e3 * statistics.median(r.first() for r in rounds):.1f}",
                  f"{1e3 * statistics.median(r.gap() for r in rounds):.2f}")
    print_head("streams", "of tokens", "to the first token, p50, ms", "between tokens, ms", "tokens a second")
    for text in arguments.batches.split(",") if arguments.batches else ():
        tokens, count = (int(number) for number in text.split("x"))
        prompts = [client.prompt(tokens) for _ in range(count)]
        begin = time.monotonic()
        streams = client.ask_together(prompts, arguments.max_tokens)
        rate = count * arguments.max_tokens / (max(s.events[-1] for s in streams) - begin)
        print_row(count, tokens, f"{1e3 * statistics.median(s.first() for s in streams):.0f}",
                  f"{1e3 * statistics.median(s.gap() for s in streams):.2f}", f"{rate:.0f}")


if __name__ == "__main__":
    main()
