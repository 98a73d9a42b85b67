"""A real Prometheus scrapes every process of the service."""

import pathlib
import re
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.prometheus import Prometheus as RealPrometheus  # noqa: E402
from support.service import ROOT, Service  # noqa: E402


LAYERS, KV_HEADS_OF_RANK = 6, 2  # of the reference model on two workers
PROCESSES = ("unix:", "/tmp", "worker-")  # never in a label: each start would make another series


def labels(service, address, name):
    """Returns the labels of every series of one metric."""
    found = re.findall(rf"^{name}\{{(.*)\}} ", service.metrics_text(address), re.MULTILINE)
    return sorted((dict(re.findall(r'(\w+)="([^"]*)"', series)) for series in found), key=str)


class Prometheus(unittest.TestCase):
    # Bugs: workers named the model by its folder; the label of ranks was `rank` in some series and `tp_rank` in others.
    def test_series_of_coordinator_and_workers_join(self):
        with Service(flags=["--tensor-parallel-size=2", "--served-model-name=needle"]) as service:
            workers = [series for address in service.worker_metrics
                       for series in labels(service, address, "kvasir_selection_memory_bytes")]
            self.assertEqual(workers, [{"model_name": "needle", "tp_rank": str(rank)} for rank in range(2)])
            self.assertEqual(labels(service, None, "kvasir_worker_up"), workers)
            for address in (None, *service.worker_metrics):
                for word in PROCESSES:
                    self.assertNotIn(word, service.metrics_text(address))

    # Bug: the labels called them pages.
    def test_the_sizes_of_tiers_are_blocks(self):
        with Service(flags=["--tensor-parallel-size=2"]) as service:
            [config] = labels(service, None, "kvasir_cache_config_info")
            self.assertEqual([name for name in config if "page" in name], [])
            for tier in ("device", "host"):
                for address in service.worker_metrics:
                    pages = sum(value for series, value in service.metrics(address).items()
                                if series.startswith("kvasir_kv_tier_pages{") and f'tier="{tier}"' in series)
                    blocks = pages // (LAYERS * KV_HEADS_OF_RANK)  # the device tier may hold parts of another block
                    self.assertEqual(blocks, int(config[f"num_{tier}_blocks"]))

    # Bugs: the prompt's tail, which is decoding, counted as prefill in the request's summary; the mass of prompts was
    # mixed with that of answers.
    def test_requests_and_metrics_agree_about_phases(self):
        flags = ["--tensor-parallel-size=2", "--sparse-selector=quest", "--sparse-prefill-selector=streaming",
                 "--sparse-token-budget=64", "--sparse-window-tokens=64", "--mass-sample-rate=1"]
        with Service(flags=flags) as service:
            report = service.generate(list(range(3, 1003)), max_tokens=9, ignore_eos=True).finish.attention

            def sums(name, phase):
                return sum(value for address in service.worker_metrics
                           for series, value in service.metrics(address).items()
                           if series.startswith(name + "{") and f'phase="{phase}"' in series)
            for phase in ("prefill", "decode"):
                self.assertEqual(getattr(report, f"{phase}_blocks_total"), sums("kvasir_attention_blocks_total", phase))
                skipped = sum(value for _, value in getattr(report, f"{phase}_blocks_skipped").ListFields())
                self.assertEqual(skipped, sums("kvasir_attention_blocks_skipped_total", phase))
                self.assertGreater(skipped, 0)
                mass = getattr(report, f"{phase}_measured_mass")
                self.assertEqual(mass.samples, sums("kvasir_attention_mass_kept_ratio_count", phase))
                self.assertAlmostEqual(mass.mean * mass.samples, sums("kvasir_attention_mass_kept_ratio_sum", phase),
                                       delta=1e-4 * mass.samples)
                self.assertNotEqual(mass.samples, 0)

    # Bug: it asked the coordinator for metrics that the workers serve, and printed none of them.
    def test_the_quick_start_asks_each_process_for_its_own_metrics(self):
        script = (ROOT / "deploy" / "quickstart.sh").read_text()
        with Service(flags=["--tensor-parallel-size=2"]) as service:
            for role, addresses in (("coordinator", [service.metrics_address]), ("worker", service.worker_metrics)):
                names = re.search(rf"^{role}_metrics=\(([^)]*)\)", script, re.MULTILINE).group(1).split()
                for address in addresses:
                    self.assertEqual(self.print_metrics(address, *names).returncode, 0)
            missing = self.print_metrics(service.metrics_address, "kvasir_attention_blocks_total")
            self.assertEqual(missing.returncode, 1)
            self.assertIn("does not serve kvasir_attention_blocks_total", missing.stderr)

    @staticmethod
    def print_metrics(*arguments):
        return subprocess.run([sys.executable, ROOT / "deploy" / "print_metrics.py", *arguments], capture_output=True,
                              text=True, timeout=60, check=False)

    def test_scrapes_coordinator_and_workers(self):
        with Service(flags=["--tensor-parallel-size=2"]) as service:
            generated = len(service.generate("hello", max_tokens=5, ignore_eos=True).token_ids)
            targets = {"kvasir": [service.metrics_address], "kvasir-worker": service.worker_metrics}
            with RealPrometheus(targets) as prometheus:
                for query, expected in (("sum(up)", 3), ("kvasir_generation_tokens_total", generated)):
                    answer = prometheus.wait_for(query, lambda found, value=expected: [v for _, v in found] == [value])
                    self.assertEqual([value for _, value in answer], [expected])


if __name__ == "__main__":
    unittest.main(verbosity=2)
