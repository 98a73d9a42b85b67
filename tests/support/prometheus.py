"""A real Prometheus with the configuration and rules of deploy/monitoring, on targets that a test names.

    with Prometheus({"kvasir": [service.metrics_address], "kvasir-worker": service.worker_metrics}) as prometheus:
        prometheus.wait_for("kvasir_num_requests_running")

Needs Debian's prometheus and python3-yaml.
"""

import json
import pathlib
import socket
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request

import yaml

MONITORING = pathlib.Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
INTERVAL = "200ms"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def configuration(targets, ca=None):
    """That of deploy/monitoring with other targets and shorter intervals; with the file of a CA by TLS."""
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL}
    config["rule_files"] = [str(MONITORING / name) for name in config["rule_files"]]
    assert [job["job_name"] for job in config["scrape_configs"]] == list(targets)
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": targets[job["job_name"]]}]
        if ca:
            job.update(scheme="https", tls_config={"ca_file": str(ca)})
    return config


class Prometheus:
    def __init__(self, targets, ca=None):
        """`targets`: lists of HOST:PORT by job, in the order of deploy/monitoring/prometheus.yml. `ca`: the file by which
        they are known, if they speak TLS."""
        self.folder = tempfile.TemporaryDirectory(prefix="kvasir-prometheus-")
        folder = pathlib.Path(self.folder.name)
        (folder / "prometheus.yml").write_text(json.dumps(configuration(targets, ca)))
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}"
        self.process = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address={address}", "--log.level=error"])

    def query(self, expr):
        """Returns [(labels, value)] of an instant query; [] while Prometheus does not answer yet."""
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query?query={urllib.parse.quote(expr)}", timeout=10) as reply:
                result = json.load(reply)["data"]["result"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # its database is not open yet
                return []
            raise
        except OSError:
            return []
        return [(one["metric"], float(one["value"][1])) for one in result]

    def wait_for(self, expr, accepts=bool, timeout_s=20):
        """Returns the answer of the query once `accepts` takes it, otherwise its last answer."""
        deadline = time.monotonic() + timeout_s
        answer = self.query(expr)
        while not accepts(answer) and time.monotonic() < deadline:
            time.sleep(0.1)
            answer = self.query(expr)
        return answer

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(20)
        self.folder.cleanup()
