#!/usr/bin/env python3
"""Draws docs/monitoring/dashboard.svg: a server of two workers with a disk tier under a minute of `kvasir bench`.

    KVASIR_BUILD=build/cpu tests/deploy/draw_dashboard_of_bench.py
"""

import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from support.certificates import Authority  # noqa: E402
from support.prometheus import Prometheus  # noqa: E402
from support.service import KVASIR, Service  # noqa: E402

FLAGS = ["--tensor-parallel-size=2", "--served-model-name=needle-8k", "--sparse-selector=quest", "--sparse-token-budget=512",
         "--sparse-min-mass=0.9", "--sparse-reuse=interval", "--mass-sample-rate=0.05", "--max-num-seqs=6"]


def bench(service, *more):
    subprocess.run([KVASIR, "bench", f"--server={service.address}", "--quiet", "--max-tokens=32", *more], check=True)


def main():
    with tempfile.TemporaryDirectory() as folder:
        documents = pathlib.Path(folder) / "documents.json"
        with open(documents, "w") as file:
            subprocess.run([sys.executable, ROOT / "tests/model/documents.py", "--tokens=2000", "--questions=6", "--seed=1"],
                           check=True, stdout=file)
        ca = Authority(folder, "ca")
        with Service(flags=[*FLAGS, f"--kv-disk-path={folder}/kv", *ca.issue("server").flags()]) as service, Prometheus(
                {"kvasir": [service.metrics_address], "kvasir-worker": service.worker_metrics}, ca.certificate) as prometheus:
            trust = f"--tls-ca-file={ca.certificate}"
            start = time.monotonic()
            bench(service, trust, "--streams=2", "--requests=10", "--prompt-tokens=1000")
            bench(service, trust, "--streams=10", "--requests=30", "--prompt-tokens=2000", "--seed=9")
            bench(service, trust, "--streams=6", "--requests=30", f"--documents={documents}")
            time.sleep(2)
            look = ROOT / "docs" / "monitoring" / "dashboard.svg"
            look.parent.mkdir(exist_ok=True)
            subprocess.run([sys.executable, ROOT / "deploy/monitoring/draw_dashboard.py", prometheus.url, look, "--window=5s",
                            f"--seconds={time.monotonic() - start}", "--title=Kvasir: needle-8k on two CPU workers, under kvasir bench"],
                           check=True)


if __name__ == "__main__":
    main()
