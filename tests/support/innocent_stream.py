"""An innocent stream beside an attack: a client that goes on reading tokens, and how long it had to wait for them.

    with InnocentStream(service) as innocent:
        attack()
    innocent.check(self, longest_gap_s=2)   # prints the longest gap; fails where the stream met an error
"""

import threading
import time

import grpc

ANSWER_TOKENS = 4000
AFTERWARDS = 20  # tokens that must still come when the attack is over


class InnocentStream:
    """Reads one answer after another on a connection of its own, from the first token before `with` goes on until the
    block ends. A gap is the time between two tokens, whether or not a new answer began in between."""

    def __init__(self, service):
        self._service = service
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._began = threading.Event()
        self._ending = False
        self._last = None
        self.tokens = 0
        self.longest_gap_s = 0.0
        self.error = None

    def _run(self):
        try:
            while not self._ending:
                stream = self._service.stream("Once upon a time", max_tokens=ANSWER_TOKENS, ignore_eos=True)
                for response in stream:
                    self._count(len(response.tokens.token_ids))
                    if self._ending:
                        stream.cancel()
                        break
        except grpc.RpcError as error:
            if not self._ending:
                self.error = error
        self._began.set()

    def _count(self, tokens):
        if tokens == 0:
            return
        now = time.monotonic()
        if self._last is not None:
            self.longest_gap_s = max(self.longest_gap_s, now - self._last)
        self._last = now
        self.tokens += tokens
        self._began.set()

    def __enter__(self):
        self._thread.start()
        self._began.wait(60)
        return self

    def __exit__(self, kind, value, trace):
        enough, deadline = self.tokens + AFTERWARDS, time.monotonic() + 20
        while kind is None and self.tokens < enough and self.error is None and time.monotonic() < deadline:
            time.sleep(0.005)
        ended = time.monotonic()
        self._ending = True
        self._thread.join(5)
        if self._last is not None:  # a stream that stands still at the end has a gap, too
            self.longest_gap_s = max(self.longest_gap_s, ended - self._last)

    def check(self, test, longest_gap_s):
        print(f"{test.id()}: innocent stream: {self.tokens} tokens, longest gap {self.longest_gap_s:.3f} s")
        test.assertIsNone(self.error, "the innocent stream ended with an error")
        test.assertGreater(self.tokens, 0)
        test.assertLess(self.longest_gap_s, longest_gap_s)
