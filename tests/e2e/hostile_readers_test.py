"""Answers that nobody reads are dropped after --client-timeout, and their bytes are bounded until then."""

import pathlib
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.innocent_stream import InnocentStream  # noqa: E402
from support.raw_http2 import RawConnection, message_head  # noqa: E402
from support.service import NO_FLOOD, SLOWER, Service, make_request  # noqa: E402

GENERATE = "/kvasir.v1.Generation/Generate"
READERS = 6


class Readers(unittest.TestCase):
    def wait_until(self, service, what, is_so):
        deadline = time.monotonic() + 40 * SLOWER
        while not is_so(service.metric("kvasir_num_requests_running")):
            self.assertLess(time.monotonic(), deadline, what)
            time.sleep(0.1)

    @unittest.skipIf(NO_FLOOD, "tokens come too slowly")
    def test_answers_that_nobody_reads_are_dropped(self):
        with Service(flags=["--client-timeout=2"]) as service:
            request = make_request("Once upon a time", max_tokens=3000, ignore_eos=True, logprobs=20).SerializeToString()
            connections = [RawConnection(service.address) for _ in range(READERS)]
            with InnocentStream(service) as innocent:
                streams = []
                for connection in connections:
                    streams.append(connection.call(GENERATE))
                    connection.send(streams[-1], message_head(len(request)) + request, end=True)
                self.wait_until(service, "all run", lambda running: running == 1 + READERS)
                self.wait_until(service, "all have ended", lambda running: running <= 1)
                ended = [connection.await_end(stream, timeout_s=5) != b"" or stream in connection.reset
                         for connection, stream in zip(connections, streams)]
            print(f"{sum(ended)} of {READERS} answers that nobody reads were dropped")
            innocent.check(self, longest_gap_s=5)
            self.assertEqual(ended, [True] * READERS)
            for connection in connections:
                connection.close()


if __name__ == "__main__":
    unittest.main(verbosity=2)
