"""Every alert fires, does not fire, and ends, as promtool plays it; every alert says what to do about it.

Needs promtool (Debian's prometheus) and python3-yaml; no build.
"""

import collections
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import yaml

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from alert_cases import CASES  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
RULES = [MONITORING / "recording_rules.yml", MONITORING / "alert_rules.yml"]
RUNBOOK = "docs/operations.md"


def alerts():
    groups = yaml.safe_load(RULES[1].read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def played(series, alert, expected):
    """A test of promtool: the alerts that are expected, by time."""
    return {"interval": "1m", "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "alert_rule_test": [{"eval_time": time, "alertname": alert, "exp_alerts": found} for time, found in expected]}


def tests_of(case):
    firing = {"exp_labels": {**case.labels, "severity": case.severity},
              "exp_annotations": {"summary": case.summary, "runbook": f"{RUNBOOK}#{case.alert.lower()}"}}
    times = (case.pending, case.fires, case.over)
    return [played(case.series, case.alert, [(case.pending, []), (case.fires, [firing]), (case.over, [])]),
            played(case.quiet, case.alert, [(time, []) for time in times])]


class AlertRules(unittest.TestCase):
    def promtool(self, *arguments):
        run = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)
        self.assertEqual(0, run.returncode, run.stdout + run.stderr)

    def test_configuration_and_rules_are_valid(self):
        self.promtool("check", "rules", *RULES)
        self.promtool("check", "config", MONITORING / "prometheus.yml")

    def test_each_alert_fires_and_is_quiet_and_ends(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "alerts.yml"
            path.write_text(json.dumps({"rule_files": list(map(str, RULES)), "evaluation_interval": "1m",
                                        "tests": [test for case in CASES for test in tests_of(case)]}))
            self.promtool("test", "rules", path)

    def test_each_alert_is_played(self):
        self.assertEqual(sorted(alerts()), sorted(case.alert for case in CASES))
        self.assertGreaterEqual(len(CASES), 12)

    def test_each_alert_has_a_paragraph_in_the_runbook(self):
        text = (ROOT / RUNBOOK).read_text()
        headings = collections.Counter(line.split()[1] for line in text.splitlines() if line.startswith("### Kvasir"))
        self.assertEqual(headings, collections.Counter(list(alerts())))
        for name, rule in alerts().items():
            self.assertEqual(rule["annotations"]["runbook"], f"{RUNBOOK}#{name.lower()}")
            paragraph = text.split(f"### {name}\n")[1].split("\n#")[0]
            self.assertGreater(len(paragraph.split()), 15, name)


if __name__ == "__main__":
    unittest.main(verbosity=2)
