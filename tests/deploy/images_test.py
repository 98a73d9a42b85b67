"""Containerfiles and compose.yaml agree with the tree: files that they copy exist, the image's user is that of the manifests,
and the server of compose.yaml takes its flags. image_steps.py carries out the steps, by hand.
"""

import json
import pathlib
import re
import subprocess
import sys
import unittest

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from support.service import KVASIR  # noqa: E402

DEPLOY = ROOT / "deploy"
LONGEST_END_OF_WORKERS = 30  # seconds, after the drain


def stages(path):
    """Returns lists of (instruction, rest), one a stage, with continued lines joined."""
    found = [[]]
    for line in path.read_text().replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            step = tuple(line.split(None, 1))
            if step[0] == "FROM":
                found.append([])
            found[-1].append(step)
    return found


class Images(unittest.TestCase):
    def setUp(self):
        self.files = sorted((DEPLOY / "images").glob("Containerfile.*"))
        self.assertEqual(["Containerfile.cpu", "Containerfile.cuda"], [path.name for path in self.files])

    def test_files_that_are_copied_exist(self):
        for path in self.files:
            copied = [rest.split()[0] for stage in stages(path) for name, rest in stage
                      if name == "COPY" and not rest.startswith("--from")]
            self.assertIn("deploy/install_packages.sh", copied)
            for source in copied:
                self.assertTrue((ROOT / source).exists(), source)

    def test_presets_and_packages_are_those_of_the_tree(self):
        presets = {preset["name"] for preset in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]}
        for path in self.files:
            text = path.read_text()
            self.assertTrue(set(re.findall(r"--preset (\S+)", text)) <= presets)
            build, last = stages(path)[-2], stages(path)[-1]
            self.assertTrue(any("install_packages.sh --build" in rest for _, rest in build))
            self.assertTrue(any("install_packages.sh --runtime" in rest for _, rest in last))

    def test_images_run_as_the_user_of_the_pods(self):
        pod = yaml.safe_load((DEPLOY / "kubernetes/base/deployment.yaml").read_text())["spec"]["template"]["spec"]["securityContext"]
        for path in self.files:
            said = dict(stages(path)[-1])
            self.assertEqual(f"{pod['runAsUser']}:{pod['runAsGroup']}", said["USER"])
            self.assertEqual('["kvasir"]', said["ENTRYPOINT"])
            self.assertIn(f"useradd --uid {pod['runAsUser']} ", path.read_text())

    def test_compose_starts_what_there_is(self):
        services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
        server = services["kvasir"]
        self.assertTrue((DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).exists())
        run = subprocess.run([KVASIR, *server["command"], "--print-config"], capture_output=True, text=True, check=False)
        self.assertEqual(0, run.returncode, run.stderr)
        value = {name: yaml.safe_load(text) for name, text in re.findall(r"^([a-z-]+): (.*?)  #", run.stdout, re.M)}
        volumes = [volume.rpartition(":ro")[0] or volume for volume in server["volumes"]]
        mounted = {volume.rpartition(":")[2] for volume in volumes}
        self.assertTrue({value["model"], value["policies"], value["kv-disk-path"]} <= mounted, mounted)
        for service in services.values():
            for volume in service["volumes"]:
                if volume.startswith("./"):
                    self.assertTrue((DEPLOY / volume.split(":")[0]).exists(), volume)
            for port in service.get("ports", ()):
                self.assertTrue(port.startswith("127.0.0.1:"), port)
        self.assertGreater(int(server["stop_grace_period"].rstrip("s")), value["shutdown-timeout"] + LONGEST_END_OF_WORKERS)


if __name__ == "__main__":
    unittest.main(verbosity=2)
