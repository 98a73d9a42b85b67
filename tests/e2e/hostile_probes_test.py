"""Clients of /metrics that send requests in drips, or do not read answers, block neither probes nor scrapers."""

import pathlib
import sys
import time
import unittest
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.innocent_stream import InnocentStream  # noqa: E402
from support.raw_http2 import connect  # noqa: E402
from support.service import Service  # noqa: E402

SLOW_CLIENTS = 100


class Probes(unittest.TestCase):
    def test_slow_clients_blind_nobody_and_are_cut(self):
        with Service() as service:
            addresses = {"coordinator": service.metrics_address, "worker": service.worker_metrics[0]}
            with InnocentStream(service) as innocent:
                slow = {name: [connect(address) for _ in range(SLOW_CLIENTS)] for name, address in addresses.items()}
                request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"
                longest = {"/health": 0.0, "/metrics": 0.0}
                began = time.monotonic()
                for i in range(6):
                    for connection in sum(slow.values(), []):
                        try:
                            connection.send(request[i:i + 1])
                        except OSError:
                            pass  # the server has cut it
                    for address in addresses.values():
                        for path in longest:
                            asked = time.monotonic()
                            with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as reply:
                                self.assertEqual(reply.status, 200)
                                reply.read()
                            longest[path] = max(longest[path], time.monotonic() - asked)
                    time.sleep(max(0, began + 1.1 * (i + 1) - time.monotonic()))
            print(f"2 x {SLOW_CLIENTS} clients drip a byte a second: " +
                  ", ".join(f"{path} after {seconds:.3f} s at most" for path, seconds in longest.items()))
            for connection in sum(slow.values(), []):
                connection.settimeout(1)
                try:
                    self.assertEqual(connection.recv(1), b"", "a slow client is still connected")
                except ConnectionResetError:
                    pass
                connection.close()
            innocent.check(self, longest_gap_s=2)
            self.assertLess(max(longest.values()), 1)


if __name__ == "__main__":
    unittest.main(verbosity=2)
