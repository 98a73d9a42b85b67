"""OpenAI's Python package, unmodified, from PyPI: models, completions, chat, streams, errors, 64 streams at once.

The package is installed once, into a virtual environment of the build folder. Without it the test is skipped.
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support import pypi  # noqa: E402
from support.chat_model import link_chat_model  # noqa: E402
from support.service import Service  # noqa: E402

PACKAGE = "openai==3.57.0"
CLIENT = pathlib.Path(__file__).with_name("openai_client.py")


class OpenAi(unittest.TestCase):
    def test_the_package_runs_unmodified(self):
        python = pypi.environment(PACKAGE) / "bin" / "python"
        folder = link_chat_model(self.enterContext(tempfile.TemporaryDirectory(prefix="kvasir-openai-")))
        with Service(model=folder, flags=["--max-num-seqs=64", "--served-model-name=needle-8k"]) as service:
            run = subprocess.run([python, CLIENT, f"http://{service.http_address}/v1", "needle-8k"], capture_output=True,
                                 text=True, timeout=120)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        print(run.stdout.strip())


if __name__ == "__main__":
    unittest.main(verbosity=2)
