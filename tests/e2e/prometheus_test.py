"""A real Prometheus scrapes every process of the service."""

import json
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import Service  # noqa: E402


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Prometheus(unittest.TestCase):
    def test_scrapes_coordinator_and_workers(self):
        with Service(flags=["--tensor-parallel-size=2"]) as service, tempfile.TemporaryDirectory() as folder:
            generated = len(service.generate("hello", max_tokens=5, ignore_eos=True).token_ids)
            targets = [service.metrics_address, *service.worker_metrics]
            config = pathlib.Path(folder) / "prometheus.yml"
            config.write_text("global: {scrape_interval: 200ms, scrape_timeout: 200ms}\nscrape_configs:\n"
                              f"- {{job_name: kvasir, static_configs: [{{targets: {json.dumps(targets)}}}]}}\n")
            address = f"127.0.0.1:{free_port()}"
            prometheus = subprocess.Popen(
                ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data",
                 f"--web.listen-address={address}", "--log.level=error"])
            try:
                self.assertEqual(self.wait_for(address, 'sum(up{job="kvasir"})', len(targets)), len(targets))
                self.assertEqual(self.wait_for(address, "kvasir_generation_tokens_total", generated), generated)
            finally:
                prometheus.terminate()
                prometheus.wait(20)

    @staticmethod
    def wait_for(address, query, expected):
        """The query's value once it is `expected`, or what it was after 20 s."""
        deadline = time.monotonic() + 20
        value = None
        while value != expected and time.monotonic() < deadline:
            try:
                url = f"http://{address}/api/v1/query?query={urllib.request.quote(query)}"
                with urllib.request.urlopen(url) as reply:
                    result = json.load(reply)["data"]["result"]
                value = float(result[0]["value"][1]) if result else None
            except OSError:
                pass
            time.sleep(0.1)
        return value


if __name__ == "__main__":
    unittest.main(verbosity=2)
