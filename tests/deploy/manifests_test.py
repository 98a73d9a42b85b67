"""Kubernetes manifests: every overlay renders, each object has only fields that its kind has, and the objects agree with each
other, with the programs and with the rules of deploy/monitoring.
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from support import pypi  # noqa: E402
from support.kubernetes import KUBERNETES, OVERLAYS, of_kind, pod_templates, render  # noqa: E402
from support.service import BUILD, KVASIR  # noqa: E402

COMPONENTS = {"monitoring": ("PodMonitor", "PrometheusRule"), "autoscaling": ("HorizontalPodAutoscaler",), "gateway": ("InferencePool", "HTTPRoute"), "tls": ()}
SCHEMAS = {"LeaderWorkerSet": "leader_worker_set", "PodMonitor": "pod_monitor", "PrometheusRule": "prometheus_rule",
           "InferencePool": "inference_pool", "HTTPRoute": "http_route"}
KUBERNETES_VERSION = "1.33"
LONGEST_END_OF_WORKERS = 30  # seconds, local ones after the drain
LONGEST_END_OF_A_WORKER = 60  # seconds, one of its own (docs/bounds.md)
PROGRAMS = {"kvasir": KVASIR, "kvasir-worker": BUILD / "worker" / "kvasir-worker"}


def components_of(overlay):
    """A group of hosts has no Deployment, which these components are for."""
    return sorted(set(COMPONENTS) - {"autoscaling", "tls"}) if overlay.startswith("multi-host") else sorted(COMPONENTS)


def config_file(objects, folder):
    """Writes the ConfigMaps as the pods see them; returns the folder."""
    for one in of_kind(objects, "ConfigMap"):
        for name, text in one["data"].items():
            (pathlib.Path(folder) / name).write_text(text)
    return folder


class Manifests(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.objects = {overlay: render(overlay, components_of(overlay)) for overlay in OVERLAYS}

    def test_objects_are_strictly_valid(self):
        pypi.use("kubernetes-validate==1.37.0")
        import jsonschema
        import kubernetes_validate
        checked = set()
        for objects in self.objects.values():
            for one in objects:
                checked.add(one["kind"])
                if one["kind"] in SCHEMAS:
                    schema = ROOT / "tests" / "deploy" / "schemas" / f"{SCHEMAS[one['kind']]}.yaml"
                    jsonschema.validate(one, yaml.safe_load(schema.read_text()))
                else:
                    kubernetes_validate.validate(one, KUBERNETES_VERSION, strict=True)
            for name, template in pod_templates(objects):
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **template["metadata"]}, "spec": template["spec"]}
                kubernetes_validate.validate(pod, KUBERNETES_VERSION, strict=True)
        self.assertTrue(checked >= {"Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget", *SCHEMAS}, checked)

    def test_pods_are_confined(self):
        for objects in self.objects.values():
            for _, template in pod_templates(objects):
                spec = template["spec"]
                self.assertEqual((True, 10001), (spec["securityContext"]["runAsNonRoot"], spec["securityContext"]["runAsUser"]))
                self.assertFalse(spec["automountServiceAccountToken"])
                self.assertFalse(spec["enableServiceLinks"])  # KVASIR_PORT would be taken for --port
                for container in spec["containers"]:
                    self.assertEqual(container["securityContext"], {
                        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}})

    def test_names_and_labels_lead_somewhere(self):
        for objects in self.objects.values():
            maps = {one["metadata"]["name"] for one in of_kind(objects, "ConfigMap")}
            pods = [template["metadata"]["labels"] for _, template in pod_templates(objects)]
            for _, template in pod_templates(objects):
                named = {source["configMap"]["name"] for volume in template["spec"]["volumes"]
                         for source in volume.get("projected", {}).get("sources", ())}
                self.assertTrue(named <= maps, (named, maps))
                mounted = {mount["name"] for container in template["spec"]["containers"] for mount in container["volumeMounts"]}
                self.assertEqual(mounted, {volume["name"] for volume in template["spec"]["volumes"]})
            selectors = [one["spec"]["selector"] for one in of_kind(objects, "Service")]
            selectors += [one["spec"]["selector"]["matchLabels"] for kind in ("PodDisruptionBudget", "PodMonitor", "Deployment")
                          for one in of_kind(objects, kind)]
            selectors += [one["spec"]["podSelector"]["matchLabels"] for one in of_kind(objects, "NetworkPolicy")]
            selectors += [one["spec"]["selector"]["matchLabels"] for one in of_kind(objects, "InferencePool")]
            self.assertGreater(len(selectors), 3)
            for selector in selectors:
                self.assertTrue(any(selector.items() <= labels.items() for labels in pods), selector)

    def test_every_metrics_port_is_scraped(self):
        for objects in self.objects.values():
            [monitor] = of_kind(objects, "PodMonitor")
            scraped = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
            for _, template in pod_templates(objects):
                ports = {port["name"] for container in template["spec"]["containers"] for port in container["ports"]}
                self.assertTrue({name for name in ports if name == "metrics" or name.startswith("worker-")} <= scraped, ports)

    def test_flags_and_files_are_those_of_the_programs(self):
        for objects in self.objects.values():
            with tempfile.TemporaryDirectory() as folder:
                config_file(objects, folder)
                for _, template in pod_templates(objects):
                    [container] = template["spec"]["containers"]
                    words = [*container.get("command", ["kvasir"]), *container["args"]]
                    arguments = [word.replace("/etc/kvasir", folder).replace("$(POD_IP)", "10.0.0.1") for word in words[1:]]
                    run = subprocess.run([PROGRAMS[words[0]], *arguments, "--print-config"], capture_output=True, text=True, check=False)
                    self.assertEqual(0, run.returncode, run.stderr)
                    self.check_ports(container, run.stdout)

    def check_ports(self, container, config):
        """The ports of a container are those that its program listens on."""
        value = {name: yaml.safe_load(text) for name, text in re.findall(r"^([a-z-]+): (.*?)  #", config, re.M)}
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        if "listen" in value:
            self.assertEqual(ports, {"worker": int(value["listen"].rpartition(":")[2]), "worker-0": value["metrics-port"]})
            return
        local = 0 if value["workers"] else value["tensor-parallel-size"]
        first = value["metrics-port"]
        self.assertEqual(ports, {"grpc": value["port"], "http": value["http-port"], "metrics": first,
                                 **{f"worker-{i}": first + 1 + i for i in range(local)}})
        gpus = int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
        self.assertEqual(gpus, local if value["device"] == "cuda" else 0)

    def test_probes_of_ports_with_tls_speak_tls(self):
        for objects in self.objects.values():
            for _, template in pod_templates(objects):
                [container] = template["spec"]["containers"]
                speaks_tls = any(argument.startswith("--tls-cert-file") for argument in container["args"])
                probes = [container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe") if name in container]
                self.assertGreater(len(probes), 0)
                for probe in probes:
                    self.assertEqual("HTTPS" if speaks_tls else "HTTP",
                                     "gRPC" if speaks_tls and "grpc" in probe else probe.get("httpGet", {}).get("scheme", "HTTP"))

    def test_metrics_of_ports_with_tls_are_scraped_by_tls(self):
        known = {"scheme": "https", "tlsConfig": {"ca": {"secret": {"name": "kvasir-tls", "key": "ca.crt"}}, "serverName": "kvasir"}}
        found = set()
        for objects in self.objects.values():
            for _, template in pod_templates(objects):
                speaks_tls = any(word.startswith("--tls-cert-file") for word in template["spec"]["containers"][0]["args"])
                found.add(speaks_tls)
                [monitor] = of_kind(objects, "PodMonitor")
                for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                    self.assertEqual(known if speaks_tls else {},
                                     {name: endpoint[name] for name in ("scheme", "tlsConfig") if name in endpoint})
        self.assertEqual({True, False}, found)

    def test_a_group_has_as_many_workers_as_ranks(self):
        for overlay in ("multi-host", "multi-host-gpu"):
            [group] = of_kind(self.objects[overlay], "LeaderWorkerSet")
            template = group["spec"]["leaderWorkerTemplate"]
            [container] = template["leaderTemplate"]["spec"]["containers"]
            self.assertIn(f"--tensor-parallel-size={template['size'] - 1}", container["args"])
            [port] = [port["containerPort"] for port in template["workerTemplate"]["spec"]["containers"][0]["ports"] if port["name"] == "worker"]
            self.assertIn(f"--workers=lws:{port}", container["args"])
            # Its controller makes a Service of its name.
            self.assertNotIn(group["metadata"]["name"], [one["metadata"]["name"] for one in of_kind(self.objects[overlay], "Service")])

    def test_pods_may_end_in_their_own_time(self):
        drain = int(yaml.safe_load((KUBERNETES / "base" / "serve.yaml").read_text())["shutdown-timeout"])
        for objects in self.objects.values():
            for name, template in pod_templates(objects):
                [container] = template["spec"]["containers"]
                if name == "worker":
                    needed = LONGEST_END_OF_A_WORKER
                else:
                    sleep, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
                    self.assertEqual("sleep", sleep)
                    needed = int(seconds) + drain + LONGEST_END_OF_WORKERS
                self.assertGreater(template["spec"]["terminationGracePeriodSeconds"], needed, name)

    def test_the_rules_are_those_of_deploy_monitoring(self):
        subprocess.run([sys.executable, ROOT / "deploy/monitoring/make_prometheus_rule.py", "--check"], check=True)


if __name__ == "__main__":
    unittest.main(verbosity=2)
