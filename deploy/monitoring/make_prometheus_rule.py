#!/usr/bin/env python3
"""Writes the rules of this folder as a PrometheusRule for the Prometheus operator. Needs python3-yaml.

    deploy/monitoring/make_prometheus_rule.py [--check]

--check writes nothing and exits with 1 when the file is not what the rules give.
"""

import argparse
import pathlib
import sys

import yaml

MONITORING = pathlib.Path(__file__).resolve().parent
FILE = MONITORING.parent / "kubernetes" / "components" / "monitoring" / "prometheus_rule.yaml"
HEAD = "# Written by deploy/monitoring/make_prometheus_rule.py from recording_rules.yml and alert_rules.yml.\n"


def made():
    groups = [group for name in ("recording_rules.yml", "alert_rules.yml")
              for group in yaml.safe_load((MONITORING / name).read_text())["groups"]]
    return HEAD + yaml.safe_dump({"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule",
                                  "metadata": {"name": "kvasir"}, "spec": {"groups": groups}}, sort_keys=False, width=1000)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is there, write nothing")
    if not parser.parse_args().check:
        FILE.write_text(made())
    elif FILE.read_text() != made():
        sys.exit(f"{FILE.name} is not what the rules give; run deploy/monitoring/make_prometheus_rule.py")


if __name__ == "__main__":
    main()
