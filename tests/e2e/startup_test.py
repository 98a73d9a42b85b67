"""A server that cannot start, or cannot serve its configuration, says why once and exits with code 1 within 30 s.

Bug: starting was tried again for ever after UNIMPLEMENTED, and when workers did not answer.
"""

import json
import pathlib
import re
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
from support.service import KVASIR, Service  # noqa: E402
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

    def serve(self, *flags, model=None, metrics_port=0):
        command = [str(KVASIR), "serve", f"--model={model or self.model}", "--port=0", "--http-port=0",
                   f"--metrics-port={metrics_port}",
                   *flags]
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
        """Returns a copy of the model with a changed config.json."""
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
            ("layer_types", {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
                             "layer_types": ["linear_attention"] * 6}),
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

    # Bug: UNIMPLEMENTED, as for other models, was tried again for ever.
    def test_a_tensor_of_a_type_that_is_not_read(self):
        model = self.edited({})
        path = model / "model.safetensors"
        data = path.read_bytes()
        begin = data.index(b'"model.norm.weight"')
        at = data.index(b'"dtype"', begin)
        end = data.index(b",", at)
        entry = data[at:end]
        dtype = entry.split(b":")[1].strip().strip(b'"')
        # Spaces keep the header's length.
        other = entry.replace(b'"' + dtype + b'"', b'"U8"'.ljust(len(dtype) + 2))
        self.assertEqual(len(entry), len(other))
        path.write_bytes(data[:at] + other + data[end:])
        self.expect_end(self.serve(model=model), "model.norm.weight", "U8")

    def expect_ready(self, *flags, model=None):
        with Service(model=model or self.model, flags=list(flags)) as service:
            service.generate("hello", max_tokens=1)
            return service.log()

    def test_the_machine_says_how_much_kv_there_is(self):
        log = self.expect_ready()
        fits = [int(number) for number in re.search(
            r"KV fits (\d+) tokens: device (\d+), host (\d+), disk (\d+)", log).groups()]
        # At most 16 contexts of 8,192 tokens for each of 16 sequences, and more than one context.
        self.assertLessEqual(fits[0], 16 * 16 * 8192)
        self.assertGreater(fits[0], 8192)
        self.assertEqual(fits[3], 0)

    # Bug: the server advertised 131,072 tokens when KV held 14,976.
    def test_a_context_that_kv_does_not_hold_is_refused_with_flags_that_help(self):
        output, _ = self.expect_end(self.serve("--kv-host-size-gb=0.002"), "the context has 8192 tokens")
        match = re.search(r"KV holds (\d+); lower --max-model-len to (\d+), or give each worker ([0-9.]+) GB by "
                          r"--kv-host-size-gb", output)
        self.assertTrue(match, output)
        self.expect_ready("--kv-host-size-gb=0.002", f"--max-model-len={match.group(2)}")
        self.expect_ready(f"--kv-host-size-gb={match.group(3)}")

    # Bug: the server started, and refused every request beyond 8,192 tokens.
    def test_a_context_that_no_policy_can_serve_is_refused_with_flags_that_help(self):
        longer = ["--position-extension=streaming", "--max-model-len=32768"]
        self.expect_end(self.serve(*longer), "no policy can serve the context of 32768 tokens", "--sparse-selector",
                        "--sparse-prefill-selector", "lower --max-model-len to 8192")
        # Sparse decoding alone does not help, and neither does a window that is too large.
        self.expect_end(self.serve(*longer, "--sparse-selector=quest"), "no policy can serve", "prefill")
        sparse = [*longer, "--sparse-selector=quest", "--sparse-prefill-selector=streaming"]
        self.expect_end(self.serve(*sparse, "--sparse-window-tokens=9000"), "no policy can serve", "window")
        self.expect_ready(*sparse)
        policies = pathlib.Path(self.folder.name) / "policies.yaml"
        part = "{streaming: {}, sink_tokens: 64, window_tokens: 512}"
        policies.write_text(f"- name: long\n  prefill: {part}\n  decode: {part}\n")
        self.expect_ready(*longer, f"--policies={policies}")

    def test_a_device_that_is_not_there(self):
        self.expect_end(self.serve("--device=cuda"), "cuda")

    def test_a_worker_that_cannot_start_is_quoted(self):
        taken = socket.socket()
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with taken:
            port = taken.getsockname()[1]
            self.expect_end(self.serve(metrics_port=port - 1), f"cannot listen on 127.0.0.1:{port}")

    def test_workers_that_nobody_has_started(self):
        port, metrics_port = unused_port(), unused_port()
        server = self.serve(f"--workers=127.0.0.1:{port}", "--startup-timeout=3", metrics_port=metrics_port)
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
        """The other program accepts connections and sends nothing."""
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            server = self.serve(f"--workers=127.0.0.1:{other.getsockname()[1]}", "--startup-timeout=3")
            self.expect_end(server, "no answer within 3s")


if __name__ == "__main__":
    unittest.main(verbosity=2)
