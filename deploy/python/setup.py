"""Writes the message classes of proto/ into the package while it is built; everything else is in pyproject.toml."""

import pathlib
import subprocess
import sys

from setuptools import setup
from setuptools.command.build_py import build_py

PROTO = pathlib.Path(__file__).resolve().parents[2] / "proto"
FILES = ("kvasir/v1/sparsity.proto", "kvasir/v1/generation.proto", "kvasir/v1/contexts.proto")


class BuildWithMessages(build_py):
    def run(self):
        super().run()
        target = pathlib.Path(self.build_lib)
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", f"--python_out={target}", f"--pyi_out={target}",
                        f"--grpc_python_out={target}", *FILES], check=True)
        (target / "kvasir" / "v1" / "__init__.py").touch()


setup(cmdclass={"build_py": BuildWithMessages})
