"""What `cmake --install` writes is a serving root: programs, configuration that they read, units that systemd takes."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import BUILD, ROOT, Service  # noqa: E402

HARDENED = {"DynamicUser": "yes", "ProtectSystem": "strict", "NoNewPrivileges": "yes", "LimitMEMLOCK": "infinity",
            "LimitCORE": "0", "CapabilityBoundingSet": ""}
BASE_LIBRARIES = ("libc.so", "libm.so", "libgcc_s.so", "libstdc++.so")  # every Debian with libc6 and g++'s libraries has them
MOST_EXPOSURE = 2.5  # of 10, by systemd-analyze security


def run(*command, **options):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)


class Install(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.root = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-root-")))
        for component in ("runtime", "deploy"):
            done = run("cmake", "--install", BUILD, "--prefix", cls.root / "usr", "--component", component)
            if done.returncode != 0:
                raise AssertionError(done.stdout + done.stderr)
        cls.share = cls.root / "usr" / "share" / "kvasir"
        cls.kvasir = cls.root / "usr" / "bin" / "kvasir"

    def check(self, done):
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        return done.stdout

    def test_every_file_of_deploy_is_installed(self):
        for folder in ("config", "kubernetes", "monitoring"):
            source = ROOT / "deploy" / folder
            files = [path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
            self.assertGreater(len(files), 2)
            for path in files:
                installed = self.share / folder / path.relative_to(source)
                self.assertEqual(path.read_bytes(), installed.read_bytes())
                self.assertEqual(path.stat().st_mode & 0o111, installed.stat().st_mode & 0o111, installed)

    def test_the_packages_of_the_runtime_are_those_of_the_libraries(self):
        script = (ROOT / "deploy" / "install_packages.sh").read_text()
        listed = set(re.search(r"^runtime_packages=\(([^)]*)\)", script, re.M).group(1).split())
        needed = set()
        for program in (self.kvasir, self.root / "usr/bin/kvasir-worker"):
            paths = dict(re.findall(r"^\s*(\S+) => (\S+)", self.check(run("ldd", program)), re.M))
            for name in re.findall(r"\(NEEDED\).*\[(.*)\]", self.check(run("readelf", "-d", program))):
                if name in paths and not name.startswith(BASE_LIBRARIES):
                    path = pathlib.Path(paths[name]).resolve()
                    needed.add(self.check(run("dpkg", "-S", path)).split(":")[0])
        self.assertGreater(len(needed), 10)
        self.assertEqual(listed, needed)

    def test_example_configurations_are_read(self):
        for program, name in (([self.kvasir, "serve"], "serve.yaml"), ([self.root / "usr/bin/kvasir-worker"], "worker.yaml")):
            file = self.share / "config" / name
            printed = self.check(run(*program, "--config", file, "--print-config"))
            keys = re.findall(r"^([a-z-]+):", file.read_text(), re.M)
            self.assertGreater(len(keys), 4)
            self.assertEqual(sorted(keys), sorted(re.findall(r"^([a-z-]+):.*# file$", printed, re.M)))

    def test_the_root_serves_with_the_example_policies(self):
        with Service(program=self.kvasir, flags=[f"--policies={self.share}/config/policies.yaml"]) as service:
            self.assertIn(str(self.root), os.readlink(f"/proc/{service.process.pid}/exe"))
            for policy in ("long-context", "cheapest", "chat"):
                self.assertEqual(len(service.generate("hello", policy=policy, max_tokens=3, ignore_eos=True).token_ids), 3)

    def test_units_are_valid_and_hardened(self):
        units = self.root / "usr" / "lib" / "systemd" / "system"
        (units / "kvasir-worker@.service").rename(units / "kvasir-worker@0.service")
        # Units that ours name, and a root that has no others.
        for name in ("sysinit.target", "basic.target", "shutdown.target", "network-online.target", "multi-user.target"):
            (units / name).write_text(f"[Unit]\nDescription={name}\n")
        for name in ("kvasir.service", "kvasir-worker@0.service"):
            # Without a root systemd looks for the programs on this machine, where they are not installed.
            done = run("systemd-analyze", "verify", "--man=no", f"--root={self.root}", name)
            self.assertEqual((0, ""), (done.returncode, done.stderr))
            text = (units / name).read_text()
            for key, value in HARDENED.items():
                self.assertRegex(text, rf"(?m)^{key}={value}$")
            said = run("systemd-analyze", "security", "--offline=true", f"--root={self.root}", name).stdout
            exposure = float(re.search(r"Overall exposure level for \S+: ([\d.]+)", said).group(1))
            self.assertLess(exposure, MOST_EXPOSURE)

    def test_systemd_waits_longer_than_the_drain(self):
        unit = (ROOT / "deploy/systemd/kvasir.service").read_text()
        stop = int(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.M).group(1))
        drain = int(re.search(r"^shutdown-timeout: (\d+)$", (ROOT / "deploy/config/serve.yaml").read_text(), re.M).group(1))
        self.assertGreater(stop, drain + 30)  # a worker may write accepted blocks to disk for so long


if __name__ == "__main__":
    unittest.main(verbosity=2)
