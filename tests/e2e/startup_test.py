"""A server that cannot start says why, once, and exits with code 1 within 30 s.

Bug: what is not implemented was tried again for ever, and so were workers that did not answer.
"""

import json
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import KVASIR  # noqa: E402
from support.tiny_model import make_tiny_model  # noqa: E402

LONGEST_S = 30


def unused_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Startup(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="kvasir-startup-")
        cls.model = make_tiny_model(pathlib.Path(cls.folder.name) / "model")

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def serve(self, *flags, model=None):
        command = [str(KVASIR), "serve", f"--model={model or self.model}", "--port=0", "--metrics-port=0", *flags]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def expect_end(self, server, *words, code=1):
        begun = time.monotonic()
        try:
            output, _ = server.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            server.kill()
            output, _ = server.communicate()
            self.fail(f"the server has not given up after {LONGEST_S} s:\n{output[-2000:]}")
        self.assertEqual(server.returncode, code, output)
        last = output.strip().splitlines()[-1]
        self.assertRegex(last, r"^kvasir: [A-Z_]+: ")
        for word in words:
            self.assertIn(word, last)
        return output, time.monotonic() - begun

    def edited(self, change):
        """A copy of the model with a changed config.json."""
        model = pathlib.Path(tempfile.mkdtemp(dir=self.folder.name)) / "model"
        shutil.copytree(self.model, model)
        path = model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        return model

    def test_models_that_are_not_implemented(self):
        cases = [
            ("Mixtral", {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}),
            ("fp8", {"quantization_config": {"quant_method": "fp8"}}),
            ("longrope", {"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}}),
            ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
            ("sliding_window", {"sliding_window": 64, "use_sliding_window": True}),
        ]
        for word, change in cases:
            with self.subTest(word):
                output, _ = self.expect_end(self.serve(model=self.edited(change)), word)
                told = [line for line in output.splitlines() if word in line and "stream ended" not in line]
                self.assertEqual(len(told), 1, output)

    def test_a_tensor_is_missing(self):
        model = self.edited({})
        path = model / "model.safetensors"
        data = path.read_bytes()
        name, other = b"model.norm.weight", b"model.nope.weight"
        self.assertIn(name, data)
        path.write_bytes(data.replace(name, other, 1))
        self.expect_end(self.serve(model=model), "model.norm.weight")

    def test_a_device_that_is_not_there(self):
        self.expect_end(self.serve("--device=cuda"), "cuda")

    def test_a_worker_that_cannot_start_is_quoted(self):
        taken = socket.socket()
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with taken:
            port = taken.getsockname()[1]
            server = subprocess.Popen(
                [str(KVASIR), "serve", f"--model={self.model}", "--port=0", f"--metrics-port={port - 1}"],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self.expect_end(server, f"cannot listen on 127.0.0.1:{port}")

    def test_workers_that_nobody_has_started(self):
        port, metrics_port = unused_port(), unused_port()
        server = self.serve(f"--workers=127.0.0.1:{port}", "--startup-timeout=3", f"--metrics-port={metrics_port}")
        health = ""
        deadline = time.monotonic() + 3
        while "no answer yet" not in health and time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/health", timeout=5)
            except urllib.error.HTTPError as error:
                self.assertEqual(error.code, 503)
                health = error.read().decode()
            except urllib.error.URLError:
                pass
            time.sleep(0.05)
        self.assertIn(f"no answer yet from worker 0 (127.0.0.1:{port})", health)
        _, seconds = self.expect_end(server, f"no answer within 3s from worker 0 (127.0.0.1:{port})",
                                     "--startup-timeout")
        self.assertLess(seconds, 10)

    def test_a_worker_of_another_program(self):
        """It accepts connections and says nothing."""
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            server = self.serve(f"--workers=127.0.0.1:{other.getsockname()[1]}", "--startup-timeout=3")
            self.expect_end(server, "no answer within 3s")


if __name__ == "__main__":
    unittest.main(verbosity=2)
