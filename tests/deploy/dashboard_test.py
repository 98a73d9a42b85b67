"""Dashboard, recording rules and alerts on a real Prometheus that scrapes a server under `kvasir bench`: every query
answers with data, and every metric in it is one that the server has.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
sys.path[:0] = [str(ROOT / "tests"), str(MONITORING)]
from support import pypi  # noqa: E402
from support.certificates import Authority  # noqa: E402
from support.prometheus import Prometheus  # noqa: E402
from support.service import KVASIR, Service  # noqa: E402
from draw_dashboard import substituted  # noqa: E402

FLAGS = ["--tensor-parallel-size=2", "--sparse-selector=quest", "--sparse-token-budget=64", "--sparse-window-tokens=64",
         "--sparse-min-mass=0.9", "--sparse-reuse=interval", "--mass-sample-rate=1"]


def bench(address, ca):
    """The load of every test: two runs of prompts that differ, and a request that is refused."""
    for seed in (1, 2):
        subprocess.run([KVASIR, "bench", f"--server={address}", "--streams=4", "--requests=6", "--prompt-tokens=400",
                        "--max-tokens=8", f"--seed={seed}", "--quiet", f"--tls-ca-file={ca}"], check=True, stdout=subprocess.DEVNULL)


def dashboard_queries():
    panels = json.loads((MONITORING / "dashboards" / "kvasir.json").read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", ())]


def rules(name):
    groups = yaml.safe_load((MONITORING / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


class Dashboard(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        ca = Authority(cls.folder, "ca")
        cls.service = cls.enterClassContext(Service(flags=[
            *FLAGS, f"--kv-disk-path={cls.folder}/kv", *ca.issue("server").flags()]))
        cls.prometheus = cls.enterClassContext(Prometheus(
            {"kvasir": [cls.service.metrics_address], "kvasir-worker": cls.service.worker_metrics}, ca.certificate))
        cls.prometheus.wait_for("sum(up)", lambda answer: answer and answer[0][1] == 3)
        bench(cls.service.address, ca.certificate)
        # The last rule of each group has seen the bench.
        cls.prometheus.wait_for("model_name:kvasir_prefix_cache_hits:ratio_5m")
        cls.prometheus.wait_for("model_name:kvasir_kv_page_hits:ratio_5m")

    def expect_data(self, queries):
        """`queries`: (name, PromQL)."""
        self.assertGreater(len(queries), 0)
        silent = [f"{name}: {expr}" for name, expr in queries if not self.prometheus.query(substituted(expr, "1m"))]
        self.assertEqual([], silent, "no data:\n" + "\n".join(silent))

    def test_every_query_of_the_dashboard_answers_with_data(self):
        self.expect_data(dashboard_queries())

    def test_every_recording_rule_has_data(self):
        self.expect_data([(rule["record"], rule["record"]) for rule in rules("recording_rules.yml")])

    def test_no_alert_fires_under_the_bench(self):
        self.assertEqual([], self.prometheus.query('ALERTS{alertstate="firing"}'))

    # Each selector by itself: a misspelt label or metric in one arm of an expression is hidden by the others.
    def test_every_selector_of_rules_and_dashboard_has_data(self):
        pypi.use("promql-parser==0.12.0")
        from promql_parser import VectorSelector, parse, walk
        exprs = [expr for _, expr in dashboard_queries()]
        exprs += [rule["expr"] for name in ("recording_rules.yml", "alert_rules.yml") for rule in rules(name)]
        selectors = set()
        for expr in exprs:
            walk(parse(substituted(expr, "1m")),
                 lambda node: selectors.add(VectorSelector.prettify(node)) if isinstance(node, VectorSelector) else None)
        self.expect_data([("selector", selector) for selector in sorted(selectors)])

    def test_the_drawing_has_no_panel_without_data(self):
        path = pathlib.Path(self.folder) / "dashboard.svg"
        subprocess.run([sys.executable, MONITORING / "draw_dashboard.py", self.prometheus.url, path, "--seconds=30"], check=True)
        root = xml.etree.ElementTree.parse(path).getroot()
        words = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
        self.assertNotIn("no data", words)
        self.assertIn("Time to first token", words)

    def test_the_committed_dashboard_is_that_of_the_code(self):
        folder = pypi.environment("grafana-foundation-sdk==1769699998!10.1.0")
        subprocess.run([folder / "bin" / "python", MONITORING / "make_dashboard.py", "--check"], check=True)


if __name__ == "__main__":
    unittest.main(verbosity=2)
