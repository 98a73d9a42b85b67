"""Streams that run beside faults, each again and again, and are compared with a clean run token by token.

A load is a list of requests. `Clean` is what they are answered by a service without faults; `Streams` asks them all the
time and keeps what went wrong, and when clients were told to wait and got their next token. A client whose server is lost asks
the next one to go on with the answer, if it is told to.
"""

import random
import threading
import time
from dataclasses import dataclass, field
from typing import List

import grpc

PROMPTS = random.Random(5)


def prompt(tokens):
    return [PROMPTS.randrange(3, 1400) for _ in range(tokens)]


def load(context):
    """Long in prefill, long in decode, and every state that a stream has beside its tokens: a random generator by index,
    penalties, log probabilities of prompt and answer, a least number of tokens. `context`: tokens of the longest."""
    return [
        dict(prompt=prompt(200), max_tokens=200, ignore_eos=True),
        dict(prompt=prompt(100), max_tokens=150, ignore_eos=True, temperature=1.0, top_p=0.95, seed=11, logprobs=2,
             presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.1),
        dict(prompt=prompt(context - 60), max_tokens=60, ignore_eos=True),
        dict(prompt=prompt(context // 2 - 60), max_tokens=60, ignore_eos=True, prompt_logprobs=1, temperature=0.8, seed=12),
        dict(prompt=prompt(64 * 5), max_tokens=150, min_tokens=100, temperature=1.2, seed=13),
    ]


@dataclass
class Answer:
    """What a client has of one stream. `repeated` and `missing` count tokens by their indices."""
    token_ids: List[int] = field(default_factory=list)
    text: str = ""
    logprobs: List[float] = field(default_factory=list)
    prompt_logprobs: List[float] = field(default_factory=list)
    reason: str = ""
    repeated: int = 0
    missing: int = 0
    error: str = ""

    def comparable(self):
        return (self.token_ids, self.text, self.logprobs, self.prompt_logprobs, self.reason)


class Streams:
    def __init__(self, group, load, resume=False):
        self.group, self.load, self.resume = group, load, resume
        self.mu = threading.Lock()
        self.recoveries = []  # (loss was told, stream is as far as before): its next token, or so much of its prompt read
        self.next_tokens = []  # seconds from a loss that was told to the next token
        self.answers = []     # (number of the request, answer)
        self.asked_again = 0  # times that a client asked for the rest of an answer
        self.running = [0] * len(load)  # tokens of the stream that runs now
        self.waits = [None] * len(load)  # when the client was told to wait, until its stream is as far as before
        self.tokenless = [None] * len(load)  # the same, until its next token
        self.ending = threading.Event()
        self.threads = [threading.Thread(target=self._run, args=(i,)) for i in range(len(load))]

    def ask(self, i):
        answer = Answer()
        deadline = time.monotonic() + 120
        while not answer.reason:
            answer.error = ""
            try:
                for response in self.group.service.stream(timeout_s=120, resume=answer.token_ids, **self.load[i]):
                    self._take(i, response, answer)
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel of a server that is gone
                if not self._is_lost(error) or time.monotonic() > deadline:
                    answer.error = f"{error.code().name}: {error.details()}"
                    break
                self._wait(i, answer)
        return answer

    def _is_lost(self, error):
        """Whether a client that resumes asks again."""
        return self.resume and (isinstance(error, ValueError)
                                or error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED))

    def _wait(self, i, answer):
        now = time.monotonic()
        with self.mu:
            self.waits[i] = self.waits[i] or now
            self.tokenless[i] = self.tokenless[i] or now
        if not answer.token_ids:  # asked from the beginning
            answer.prompt_logprobs = []
        self.asked_again += 1
        time.sleep(0.02)

    def _take(self, i, response, answer):
        now = time.monotonic()
        kind = response.WhichOneof("event")
        if kind == "progress" and response.progress.waits_for_worker:
            with self.mu:
                self.waits[i] = self.waits[i] or now
                self.tokenless[i] = self.tokenless[i] or now
        elif kind == "progress":  # sent only when as much of the prompt is read as ever before
            self._goes_on(i, now)
        elif kind == "prompt_logprobs":
            scores = response.prompt_logprobs
            if scores.index != len(answer.prompt_logprobs) + 1:
                answer.repeated += 1
            answer.prompt_logprobs += scores.logprobs
        elif kind == "tokens":
            new = response.tokens
            answer.repeated += max(0, len(answer.token_ids) - new.index) if new.token_ids else 0
            answer.missing += max(0, new.index - len(answer.token_ids)) if new.token_ids else 0
            answer.token_ids += new.token_ids
            answer.text += new.text
            answer.logprobs += [l.logprob for l in new.logprobs]
            with self.mu:
                self.running[i] = len(answer.token_ids)
                if self.tokenless[i] is not None:
                    self.next_tokens.append(now - self.tokenless[i])
                    self.tokenless[i] = None
            self._goes_on(i, now)
        elif kind == "finish":
            answer.reason = (response.finish.reason, response.finish.matched_stop_str, response.finish.matched_token_id)

    def _goes_on(self, i, now):
        with self.mu:
            if self.waits[i] is not None:
                self.recoveries.append((self.waits[i], now))
                self.waits[i] = None

    def clean(self):
        """Asks each request once; returns the answers."""
        answers = [self.ask(i) for i in range(len(self.load))]
        for answer in answers:
            assert not answer.error, answer.error
        return answers

    def _run(self, i):
        while not self.ending.is_set():
            with self.mu:
                self.running[i] = 0
            answer = self.ask(i)
            with self.mu:
                self.waits[i] = self.tokenless[i] = None
                self.answers.append((i, answer))
            if answer.error.startswith("UNAVAILABLE: no worker group"):  # refused, as new requests are meanwhile
                time.sleep(0.02)

    def all_run(self):
        """Whether no client waits for the token after a loss: a request that sees three without one ends."""
        with self.mu:
            return all(wait is None for wait in self.tokenless)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.ending.set()
        for thread in self.threads:
            thread.join()
