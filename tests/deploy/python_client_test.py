"""The Python package is installed by pip as its README says, and used against the real server: its own checks
(python_client_checks.py) and the snippets of its README. Skipped where PyPI cannot be had.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from support import pypi  # noqa: E402
from support.certificates import Authority  # noqa: E402
from support.service import Service  # noqa: E402

PACKAGES = ("grpcio==1.62.3", "grpcio-tools==1.62.3", "protobuf==4.25.9", "googleapis-common-protos==1.63.2", "setuptools==69.5.1",
            "wheel==0.45.1", "mypy==1.11.2", "types-protobuf==4.25.0.20240417")
# gRPC's packages and its generated stubs have no types.
MYPY = """[mypy]
strict = True
ignore_missing_imports = True
disallow_untyped_calls = False
disallow_any_generics = False
warn_return_any = False
[mypy-kvasir.v1.*]
ignore_errors = True
"""
SOURCE = ROOT / "deploy" / "python"
TLS_CLIENT = """
import asyncio, sys, kvasir
address, ca, stranger, certificate, key = sys.argv[1:]
pair = {"tls_cert_file": certificate, "tls_key_file": key}
with kvasir.Client(address, tls_ca_file=ca, **pair) as client:
    print(client.model_info().name, end=" ")

async def ask():
    async with kvasir.AsyncClient(address, tls_ca_file=ca, **pair) as client:
        print((await client.model_info()).name, end=" ")

asyncio.run(ask())
for files in ({"tls_ca_file": stranger, **pair}, {"tls_ca_file": ca}):
    with kvasir.Client(address, retry=kvasir.Retry(attempts=1), **files) as client:
        try:
            client.model_info()
        except kvasir.Unavailable:
            print("refused", end=" ")
try:
    kvasir.Client(address, **pair)
except ValueError:
    print("files")
"""


class PythonClient(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.python = pypi.environment(*PACKAGES) / "bin" / "python"
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-python-")))
        # A copy, since setuptools builds in the folder of the sources.
        shutil.copytree(SOURCE, cls.folder / "deploy" / "python")
        shutil.copytree(ROOT / "proto", cls.folder / "proto")
        installed = cls.folder / "installed"
        subprocess.run([cls.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
                        "--no-build-isolation", "--no-index", f"--target={installed}", cls.folder / "deploy" / "python"], check=True)
        cls.environment = {"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin"}
        cls.service = cls.enterClassContext(Service(flags=["--sparse-selector=streaming", "--sparse-window-tokens=64"]))

    def run_python(self, *arguments):
        run = subprocess.run([self.python, *map(str, arguments)], env=self.environment, capture_output=True, text=True, timeout=120,
                             check=False)
        self.assertEqual(0, run.returncode, run.stdout + run.stderr)
        return run.stdout + run.stderr

    def test_checks_on_the_real_server(self):
        said = self.run_python(ROOT / "tests" / "deploy" / "python_client_checks.py", self.service.address)
        self.assertRegex(said, r"Ran \d\d tests")

    def test_certificates_are_taken_from_files(self):
        ca, stranger = Authority(self.folder, "ca"), Authority(self.folder, "stranger")
        server, client = ca.issue("server"), ca.issue("client")
        with Service(flags=[*server.flags(), f"--tls-client-ca-file={ca.certificate}"], ready_timeout_s=60) as service:
            script = self.folder / "tls.py"
            script.write_text(TLS_CLIENT)
            said = self.run_python(script, service.address, ca.certificate, stranger.certificate, client.certificate, client.key)
        self.assertIn("needle-8k needle-8k refused refused files\n", said)  # beside what gRPC says of handshakes

    def test_snippets_of_the_readme_run(self):
        snippets = re.findall(r"```python\n(.*?)```", (SOURCE / "README.md").read_text(), re.S)
        self.assertEqual(3, len(snippets))
        for snippet in snippets:
            said = self.run_python("-c", snippet.replace("127.0.0.1:50051", self.service.address))
            self.assertGreater(len(said), 20)

    def test_types_hold(self):
        config = self.folder / "mypy.ini"
        config.write_text(MYPY)
        self.run_python("-m", "mypy", "--config-file", config, "--cache-dir", self.folder / "mypy", "-p", "kvasir")


if __name__ == "__main__":
    unittest.main(verbosity=2)
