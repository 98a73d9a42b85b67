"""Metrics of a running server beside docs/operations.md: every metric, label and meaning of its table is exported, and
nothing that the table lacks. promtool finds nothing to complain of. Series tell warm from cold requests and policies apart,
and prompt tokens are counted while a prompt is read."""

import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import ROOT, Service  # noqa: E402

SAMPLE = re.compile(r"^([a-z0-9_]+)(?:\{([^}]*)\})? ", re.MULTILINE)
ROW = re.compile(r"^\| `((?:kvasir|process)_[a-z0-9_]+)` \| (.*) \| (coordinator|worker|both) \| (.*) \|$", re.MULTILINE)
WITH_TLS_ONLY = {"kvasir_tls_certificate_expiry_timestamp_seconds"}  # tests/e2e/tls_test.py
POLICIES = """
- name: contract
  prefill: {all: {}, sink_tokens: 64, window_tokens: 64}
  decode: {quest: {}, sink_tokens: 64, window_tokens: 64, token_budget: 64, quality: {min_mass: 0.5}}
"""


def documented(process):
    """Returns (labels, meaning) by the name of the metric."""
    text = (ROOT / "docs" / "operations.md").read_text()
    return {name: (frozenset(re.findall(r"`(\w+)`", labels)), meaning)
            for name, labels, where, meaning in ROW.findall(text) if where in (process, "both")}


def exported(text):
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    histograms = re.findall(r"^# TYPE (\S+) histogram$", text, re.MULTILINE)
    found = {}
    for name, labels in SAMPLE.findall(text):
        base = next((h for h in histograms if re.fullmatch(h + "_(bucket|sum|count)", name)), name)
        names = frozenset(re.findall(r'(\w+)="', labels)) - {"le"}
        found.setdefault(base, set()).add((names, helps[base]))
    return found


class Metrics(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        policies = pathlib.Path(folder) / "policies.yaml"
        policies.write_text(POLICIES)
        cls.service = cls.enterClassContext(Service(flags=[
            "--tensor-parallel-size=2", f"--policies={policies}", f"--kv-disk-path={folder}/disk", "--mass-sample-rate=1",
            "--max-num-batched-tokens=128"]))

    def value(self, name, **labels):
        return sum(value for series, value in self.service.metrics().items()
                   if series.split("{")[0] == name and all(f'{k}="{v}"' in series for k, v in labels.items()))

    def worker_value(self, name, **labels):
        return sum(value for address in self.service.worker_metrics
                   for series, value in self.service.metrics(address).items()
                   if series.split("{")[0] == name and all(f'{k}="{v}"' in series for k, v in labels.items()))

    def test_the_table_of_the_documents_is_what_is_exported(self):
        for process, addresses in (("coordinator", [None]), ("worker", self.service.worker_metrics)):
            expected = {name: {row} for name, row in documented(process).items() if name not in WITH_TLS_ONLY}
            self.assertGreater(len(expected), 30)
            for address in addresses:
                self.assertEqual(exported(self.service.metrics_text(address)), expected)

    def test_promtool_finds_nothing_to_complain_of(self):
        for address in (None, *self.service.worker_metrics):
            run = subprocess.run(["promtool", "check", "metrics"], input=self.service.metrics_text(address),
                                 capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual((run.returncode, run.stdout + run.stderr), (0, ""))

    def test_warm_and_cold_first_tokens_are_told_apart_by_policy(self):
        name = "kvasir_time_to_first_token_seconds_count"
        before = {(p, c): self.value(name, policy=p, cache=c) for p in ("default", "contract") for c in ("hit", "miss")}
        prompt = list(range(3, 303))
        for policy in ("default", "contract", "contract"):
            self.service.generate(prompt, policy=policy, tenant_id="warm-" + policy, max_tokens=3, ignore_eos=True)
        after = {key: self.value(name, policy=key[0], cache=key[1]) for key in before}
        self.assertEqual({key: after[key] - before[key] for key in before},
                         {("default", "hit"): 0, ("default", "miss"): 1, ("contract", "hit"): 1, ("contract", "miss"): 1})
        self.assertGreaterEqual(self.value("kvasir_inter_token_latency_seconds_count", policy="contract"), 4)
        self.assertIn('le="0.0005"', self.service.metrics_text())

    def test_attention_is_counted_by_policy(self):
        def blocks(policy):
            return self.worker_value("kvasir_attention_blocks_total", policy=policy)
        before = blocks("default"), blocks("contract")
        self.service.generate(list(range(3, 503)), policy="contract", tenant_id="counted", max_tokens=3, ignore_eos=True)
        self.assertEqual(blocks("default"), before[0])
        self.assertGreater(blocks("contract"), before[1])
        self.assertGreater(self.worker_value("kvasir_mass_contract_total", policy="contract"), 0)
        self.assertEqual(self.worker_value("kvasir_mass_contract_total", policy="default"), 0)

    def test_prompt_tokens_are_counted_while_they_are_read(self):
        before = self.service.metric("kvasir_prompt_tokens_total")
        stream = self.service.stream(list(range(3, 1003)) * 4, tenant_id="reading", max_tokens=500, ignore_eos=True)
        counts = [self.service.metric("kvasir_prompt_tokens_total") - before
                  for response in stream if response.WhichOneof("event") == "progress"]
        self.assertEqual(counts, sorted(counts))
        self.assertTrue(any(0 < count < 4000 for count in counts), counts)
        self.assertEqual(self.service.metric("kvasir_prompt_tokens_total") - before, 4000)

    def test_misses_have_a_reason_and_add_up(self):
        names = ("kvasir_prefix_cache_queries_total", "kvasir_prefix_cache_hits_total", "kvasir_prefix_cache_misses_total")
        before = [self.service.metric(name) for name in names]
        absent, unshared = (self.value(names[2], miss_reason=reason) for reason in ("absent", "unshared"))
        prompt = list(range(3, 303))  # 4 blocks of 64 tokens and 44 more
        for _ in range(2):
            self.service.generate(prompt, tenant_id="misses", max_tokens=2, ignore_eos=True)
        queries, hits, misses = (self.service.metric(name) - old for name, old in zip(names, before))
        self.assertEqual((queries, hits, misses), (600, 256, 344))
        self.assertEqual(self.value(names[2], miss_reason="absent") - absent, 256)
        self.assertEqual(self.value(names[2], miss_reason="unshared") - unshared, 88)

    def test_the_process_is_described(self):
        for address, pid in ((None, self.service.process.pid),):
            values = self.service.metrics(address)
            self.assertLess(abs(values["process_start_time_seconds"] - time.time()), 600)
            statm = pathlib.Path(f"/proc/{pid}/statm").read_text().split()
            self.assertAlmostEqual(values["process_resident_memory_bytes"] / (int(statm[1]) * 4096), 1, delta=0.2)
            fds = len(list(pathlib.Path(f"/proc/{pid}/fd").iterdir()))
            self.assertAlmostEqual(values["process_open_fds"], fds, delta=5)
            self.assertGreater(values["process_cpu_seconds_total"], 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
