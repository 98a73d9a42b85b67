#!/usr/bin/env python3
"""Carries out deploy/images/Containerfile.cpu without a container engine, and serves from the root that it makes. By hand: it
downloads about 100 MB of Debian's packages and needs root, mmdebstrap, overlayfs and network namespaces.

    apt-get install mmdebstrap && KVASIR_BUILD=build/cpu tests/deploy/image_steps.py [--base DEBIAN.tar]

The stage that compiles is not carried out: its result is installed from the build folder, by the same command. Every step
of the last stage runs in a root of Debian 12 as it is written; then the entry point serves as the image's user, in a
read-only root, and answers a client on another host.
"""

import argparse
import json
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from support.hosts import USER, Container, Hosts, wait_until  # noqa: E402
from support.service import BUILD, KVASIR  # noqa: E402

FILE = ROOT / "deploy" / "images" / "Containerfile.cpu"
ADDRESS = "10.77.0.10"


def last_stage():
    """Returns (instruction, rest) of the last stage."""
    lines = [line for line in FILE.read_text().replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    steps = [tuple(line.split(None, 1)) for line in lines]
    begins = [i for i, (name, _) in enumerate(steps) if name == "FROM"]
    return steps[begins[-1]:], [rest for name, rest in steps[begins[0]:begins[-1]] if name == "RUN"]


def make_base(root, tar):
    if tar is None:
        tar = root.parent / "base.tar"
        subprocess.run(["mmdebstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", tar], check=True)
    subprocess.run(["tar", "--extract", "--file", tar, "--directory", root, "--exclude=./dev/*"], check=True)
    for path in ("etc/resolv.conf", "etc/apt/apt.conf.d"):  # how this machine reaches Debian's packages
        target = root / path
        if (pathlib.Path("/") / path).is_dir():
            shutil.copytree(pathlib.Path("/") / path, target, dirs_exist_ok=True)
        else:
            shutil.copy(pathlib.Path("/") / path, target)


def run_in(root, command):
    script = f'mount -t proc proc {root}/proc && mount --rbind /dev {root}/dev && exec chroot {root} sh -ec "$1"'
    subprocess.run(["unshare", "--mount", "bash", "-ec", script, "run", command], check=True)


def carry_out(root, steps, compiled):
    """Returns what the image says about its start."""
    image = {}
    for name, rest in steps:
        print(f"== {name} {rest}", flush=True)
        if name == "RUN":
            run_in(root, rest)
        elif name == "COPY" and rest.startswith("--from=build"):
            [install] = re.findall(r"cmake --install \S+ (--prefix .*)$", compiled[-1])
            options = shlex.split(install.replace("--prefix /usr", f"--prefix {root}/usr"))
            subprocess.run(["cmake", "--install", BUILD, *options], check=True, stdout=subprocess.DEVNULL)
        elif name == "COPY":
            source, target = rest.split()
            shutil.copy(ROOT / source, root / target.lstrip("/"))
        else:
            image[name] = rest
    return image


def serve(root, image, scratch):
    assert image["USER"] == f"{USER}:{USER}", image
    shutil.copytree(ROOT / "tests" / "model" / "needle-8k", scratch / "models" / "model")
    with Hosts() as hosts:
        command = [*json.loads(image["ENTRYPOINT"]), "serve", "--model=/models/model", "--host=0.0.0.0", "--allow-anonymous",
                   "--kv-host-size-gb=0.5", "--kv-disk-path=/var/lib/kvasir", "--kv-disk-size-gb=0.1"]
        container = Container(hosts, hosts.add(ADDRESS), command, {"HOME": "/"},
                              {"/models": scratch / "models", "/tmp": "tmpfs", image["VOLUME"]: "tmpfs"}, root)
        try:
            probe = [sys.executable, ROOT / "tests/support/probe.py", "http", f"http://{ADDRESS}:9400/health", "1"]
            wait_until(lambda: container.process.poll() is not None or hosts.on_node(*probe).returncode == 0, 60, "ready")
            answer = hosts.on_node(KVASIR, "generate", "--server", f"{ADDRESS}:50051", "--prompt", "Once", "--max-tokens", 8,
                                   "--ignore-eos")
            print(answer.stdout, answer.stderr, container.log(), sep="\n")
            assert answer.returncode == 0, "no answer"
            container.signal(signal.SIGTERM)
            assert container.wait(90) == 0, container.log()
        finally:
            container.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=pathlib.Path, help="a root of Debian 12 as a tar; made by mmdebstrap when not given")
    base = parser.parse_args().base
    steps, compiled = last_stage()
    with tempfile.TemporaryDirectory(prefix="kvasir-image-") as folder:
        scratch = pathlib.Path(folder)
        scratch.chmod(0o755)
        root = scratch / "root"
        root.mkdir()
        make_base(root, base)
        image = carry_out(root, steps, compiled)
        serve(root, image, scratch)
    print("the image serves")


if __name__ == "__main__":
    main()
