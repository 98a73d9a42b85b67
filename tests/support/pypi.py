"""Packages of PyPI that Debian lacks, for tests: they are installed once into a virtual environment of the build folder.

    pypi.use("promql-parser==0.12.0")     # from now on `import promql_parser` works, or the test is skipped

A test is skipped, with pip's message, where they cannot be had.
"""

import fcntl
import hashlib
import os
import pathlib
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("KVASIR_BUILD", ROOT / "build" / "cpu")).resolve()
INSTALL_SECONDS = 240


def environment(*packages):
    """Returns the folder of a virtual environment that has the packages."""
    folder = BUILD / "pypi" / hashlib.sha256(" ".join(sorted(packages)).encode()).hexdigest()[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run beside each other
        complete = folder / "complete"
        if not complete.exists():
            install(folder, packages)
            complete.touch()
    return folder


def install(folder, packages):
    steps = ([sys.executable, "-m", "venv", "--clear", folder],
             [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])
    for step in steps:
        try:
            run = subprocess.run(step, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise unittest.SkipTest(f"PyPI does not answer: {' '.join(packages)}") from None
        if run.returncode != 0:
            last = (run.stderr or run.stdout).strip().splitlines()[-1:]
            raise unittest.SkipTest(f"cannot install {' '.join(packages)} from PyPI: {' '.join(last)}")


def use(*packages):
    """Makes the packages importable in this process."""
    [site] = environment(*packages).glob("lib/python3*/site-packages")
    if str(site) not in sys.path:
        sys.path.append(str(site))  # after Debian's own
