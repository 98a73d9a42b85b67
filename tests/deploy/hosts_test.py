"""The overlay multi-host on three hosts: each container's command, environment, volumes, probes and hook as the manifest has
them, with processes in network namespaces. A worker dies and comes back elsewhere; the coordinator drains.
"""

import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from support.hosts import Container, Hosts, wait_until  # noqa: E402
from support.kubernetes import of_kind, render  # noqa: E402
from support.service import BUILD, KVASIR  # noqa: E402

MODEL = ROOT / "tests" / "model" / "needle-8k"
NAMESPACE = "default"
# Pods have memory and cores of their own; here they share those of one machine.
SMALL = {"KVASIR_KV_HOST_SIZE_GB": "0.2", "KVASIR_KV_DEVICE_SIZE_GB": "0.05", "KVASIR_KV_DISK_SIZE_GB": "0.1", "KVASIR_THREADS": "1"}


class Pod:
    """One pod of the group with its only container."""

    def __init__(self, cluster, index, address):
        self.cluster, self.index, self.address = cluster, index, address
        template = cluster.template["workerTemplate" if index else "leaderTemplate"]
        self.spec = template["spec"]
        [self.manifest] = self.spec["containers"]
        self.host = cluster.hosts.add(address)
        cluster.hosts.call_it(cluster.name_of(index), address)
        self.container = Container(cluster.hosts, self.host, self.command(), self.environment(), self.mounts())

    def variables(self):
        """What the controller and the manifest set, in this order."""
        found = {"LWS_LEADER_ADDRESS": self.cluster.name_of(0), "LWS_GROUP_SIZE": str(self.cluster.template["size"]),
                 "LWS_WORKER_INDEX": str(self.index)}
        for variable in self.manifest.get("env", ()):
            assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP", variable
            found[variable["name"]] = self.address
        return found

    def environment(self):
        return {**self.variables(), **SMALL}

    def command(self):
        words = [*self.manifest.get("command", ["kvasir"]), *self.manifest["args"]]  # kvasir: the image's entry point
        return [re.sub(r"\$\((\w+)\)", lambda match: self.variables()[match[1]], word) for word in words]

    def mounts(self):
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        found = {"/usr/local/bin": self.cluster.programs}
        for mount in self.manifest["volumeMounts"]:
            volume, target = volumes[mount["name"]], mount["mountPath"]
            if "projected" in volume:
                found[target] = self.cluster.config
            elif "secret" in volume:
                self.cluster.secret.chmod(volume["secret"]["defaultMode"])
                os.chown(self.cluster.secret, -1, self.spec["securityContext"]["fsGroup"])
                found[target] = self.cluster.secret.parent
            elif "persistentVolumeClaim" in volume:
                found[target] = self.cluster.models
            else:
                assert "emptyDir" in volume or "ephemeral" in volume, volume
                found[target] = "tmpfs"
        return found

    def probe(self, kind):
        """Whether the probe of the manifest is content now."""
        probe, script = self.manifest[kind], ROOT / "tests" / "support" / "probe.py"
        timeout = probe.get("timeoutSeconds", 1)
        if "grpc" in probe:
            asked = ["grpc", f"{self.address}:{probe['grpc']['port']}", probe["grpc"]["service"], timeout]
        else:
            [port] = [port["containerPort"] for port in self.manifest["ports"] if port["name"] == probe["httpGet"]["port"]]
            asked = ["http", f"http://{self.address}:{port}{probe['httpGet']['path']}", timeout]
        return self.cluster.hosts.on_node(sys.executable, script, *asked).returncode == 0

    def await_probe(self, kind, timeout_s=60):
        wait_until(lambda: self.probe(kind), timeout_s, f"{kind} of pod {self.index}\n{self.container.log()}")

    def await_not_ready(self, timeout_s=30):
        wait_until(lambda: not self.probe("readinessProbe"), timeout_s, f"pod {self.index} is ready\n{self.container.log()}")


class Cluster:
    """Volumes and names of the group; starts its pods."""

    def __init__(self, hosts, folder):
        self.hosts = hosts
        objects = render("multi-host")
        [group] = of_kind(objects, "LeaderWorkerSet")
        self.name, self.template = group["metadata"]["name"], group["spec"]["leaderWorkerTemplate"]
        self.config, self.models, installed = folder / "config", folder / "models", folder / "installed"
        self.config.mkdir()
        for one in of_kind(objects, "ConfigMap"):
            for name, text in one["data"].items():
                (self.config / name).write_text(text)
        self.secret = folder / "group-secret" / "secret"
        self.secret.parent.mkdir()
        self.secret.write_text(secrets.token_hex(32))
        shutil.copytree(MODEL, self.models / "model")
        subprocess.run(["cmake", "--install", BUILD, "--prefix", installed, "--component", "runtime"], check=True,
                       stdout=subprocess.DEVNULL)
        self.programs = installed / "bin"
        folder.chmod(0o755)

    def name_of(self, index):
        """The host name that LeaderWorkerSet gives a pod of group 0 (subdomainPolicy Shared)."""
        pod = f"{self.name}-0" + (f"-{index}" if index else "")
        return f"{pod}.{self.name}.{NAMESPACE}"

    def generate(self, leader, tokens=4):
        """A client on the node."""
        return self.hosts.on_node(KVASIR, "generate", "--server", f"{leader.address}:50051", "--prompt", "Once upon a time",
                                  "--max-tokens", tokens, "--ignore-eos", "--quiet", "--timeout", 240)


class ThreeHosts(unittest.TestCase):
    def setUp(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="kvasir-cluster-")))
        self.cluster = Cluster(self.enterContext(Hosts()), folder)

    def start(self, index, address):
        pod = Pod(self.cluster, index, address)
        self.addCleanup(pod.container.close)
        return pod

    def expect_answer(self, leader):
        done = self.cluster.generate(leader)
        self.assertEqual(0, done.returncode, done.stderr + leader.container.log())

    def test_a_group_forms_loses_a_worker_and_drains(self):
        leader = self.start(0, "10.77.0.10")
        leader.await_probe("livenessProbe")
        self.assertFalse(leader.probe("startupProbe"))  # alive, but no worker is there
        workers = [self.start(1, "10.77.0.11"), self.start(2, "10.77.0.12")]
        for pod in (leader, *workers):
            pod.await_probe("livenessProbe")
            pod.await_probe("readinessProbe")
        self.assertTrue(leader.probe("startupProbe"))
        self.expect_answer(leader)
        self.lose_a_worker(leader, workers)
        self.drain(leader, workers)

    def lose_a_worker(self, leader, workers):
        """The pod of a worker is gone, and comes back with another address, which the name then has."""
        workers[1].container.signal(signal.SIGKILL)
        workers[1].container.wait(20)
        leader.await_not_ready()
        self.assertTrue(leader.probe("livenessProbe"))  # it must not be started again for this
        self.assertTrue(workers[0].probe("livenessProbe"))
        workers[1] = self.start(2, "10.77.0.22")
        for pod in (leader, *workers):
            pod.await_probe("readinessProbe", 90)
        self.expect_answer(leader)

    def drain(self, leader, workers):
        """As the kubelet ends a pod: the hook, then SIGTERM, while an answer is on its way."""
        answers = []
        client = threading.Thread(target=lambda: answers.append(self.cluster.generate(leader, 6000)))
        client.start()
        began = time.monotonic()
        hook = leader.manifest["lifecycle"]["preStop"]["exec"]["command"]
        self.assertEqual(0, leader.container.execute(*hook))
        self.assertTrue(leader.probe("readinessProbe"))  # requests that still come are served
        leader.container.signal(signal.SIGTERM)
        leader.await_not_ready()
        self.assertTrue(client.is_alive(), "the answer ended before the drain")
        refused = self.cluster.generate(leader)
        client.join()
        self.assertEqual(0, leader.container.wait(60), leader.container.log())
        self.assertLess(time.monotonic() - began, leader.spec["terminationGracePeriodSeconds"])
        self.assertEqual(0, answers[0].returncode, answers[0].stderr)
        self.assertNotEqual(0, refused.returncode)
        for worker in workers:
            self.assertTrue(worker.probe("livenessProbe"))
            worker.container.signal(signal.SIGTERM)
            self.assertEqual(0, worker.container.wait(worker.spec["terminationGracePeriodSeconds"]), worker.container.log())


if __name__ == "__main__":
    unittest.main(verbosity=2)
