"""How a server starts, refuses to start, and ends."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import KVASIR, ROOT, Service  # noqa: E402

import grpc  # noqa: E402
from kvasir.v1 import generation_pb2  # noqa: E402

MODEL = ROOT / "tests" / "model" / "needle-8k"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"  # grpc.health.v1.HealthCheckResponse{status}
READINESS = b"\x0a\x14kvasir.v1.Generation"


def health(service, request):
    return service.channel.unary_unary("/grpc.health.v1.Health/Check")(request)


class Drain(unittest.TestCase):
    def start_a_long_answer(self, service, max_tokens):
        stream = service.stream("Once upon a time", max_tokens=max_tokens, ignore_eos=True)
        next(stream)
        return stream

    def sigterm(self, service):
        service.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        while health(service, READINESS) == SERVING:
            self.assertLess(time.monotonic(), deadline, "still ready after SIGTERM")
            time.sleep(0.01)

    def test_sigterm_lets_running_requests_end_and_refuses_new_ones(self):
        with Service() as service:
            self.assertEqual(health(service, READINESS), SERVING)
            stream = self.start_a_long_answer(service, 1500)
            self.sigterm(service)
            self.assertEqual(health(service, READINESS), NOT_SERVING)
            self.assertEqual(health(service, b""), SERVING)  # alive
            info = service.stub.GetServerInfo(generation_pb2.GetServerInfoRequest())
            self.assertEqual(info.state, generation_pb2.SERVER_STATE_DRAINING)
            with self.assertRaises(grpc.RpcError) as raised:
                service.generate("hello", max_tokens=1)
            self.assertEqual(raised.exception.code(), grpc.StatusCode.UNAVAILABLE)
            self.assertIn("draining", raised.exception.details())
            responses = list(stream)
            self.assertEqual(sum(len(r.tokens.token_ids) for r in responses), 1500)
            self.assertEqual(responses[-1].WhichOneof("event"), "finish")
            self.assertEqual(service.process.wait(60), 0)

    def test_a_second_sigterm_stops_at_once(self):
        with Service(flags=["--shutdown-timeout=3600"]) as service:
            stream = self.start_a_long_answer(service, 8000)
            self.sigterm(service)
            service.process.send_signal(signal.SIGTERM)
            with self.assertRaises(grpc.RpcError) as raised:
                for _ in stream:
                    pass
            self.assertEqual(raised.exception.code(), grpc.StatusCode.UNAVAILABLE)
            self.assertEqual(service.process.wait(60), 0)

    def test_when_the_time_to_drain_is_over_requests_end_with_unavailable(self):
        with Service(flags=["--shutdown-timeout=0.1"]) as service:
            stream = self.start_a_long_answer(service, 8000)
            service.process.send_signal(signal.SIGTERM)
            with self.assertRaises(grpc.RpcError) as raised:
                for _ in stream:
                    pass
            self.assertEqual(raised.exception.code(), grpc.StatusCode.UNAVAILABLE)
            self.assertEqual(service.process.wait(60), 0)


class BadModel(unittest.TestCase):
    """A hostile model folder gives a clear error and exit code 1, never a crash, a hang or a server."""

    def serve(self, edit):
        with tempfile.TemporaryDirectory(prefix="kvasir-bad-model-") as name:
            folder = pathlib.Path(name)
            for file in MODEL.iterdir():
                if file.suffix == ".safetensors":
                    os.symlink(file, folder / file.name)
                else:
                    shutil.copy(file, folder / file.name)
            edit(folder)
            return subprocess.run([KVASIR, "serve", f"--model={folder}", "--port=0", "--http-port=0", "--metrics-port=0"],
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False)

    def expect_refused(self, what, edit):
        with self.subTest(what=what):
            run = self.serve(edit)
            self.assertEqual(run.returncode, 1, run.stdout)
            last = run.stdout.strip().splitlines()[-1]
            self.assertRegex(last, r"^kvasir: (INVALID_ARGUMENT|FAILED_PRECONDITION|NOT_FOUND|RESOURCE_EXHAUSTED|UNIMPLEMENTED): ")
            self.assertIn(what, last)
            self.assertNotIn("ended (signal", run.stdout, "a worker crashed")

    def test_config_json_out_of_its_ranges(self):
        cases = [
            ("num_hidden_layers", {"num_hidden_layers": 2**31}),
            ("num_hidden_layers", {"num_hidden_layers": -1}),
            ("head_dim", {"head_dim": 0}),
            ("max_position_embeddings", {"max_position_embeddings": 1}),
            ("num_key_value_heads", {"num_key_value_heads": 3}),
            ("rope_theta", {"rope_theta": -1}),
            ("hidden_size", {"hidden_size": 2**40}),
            ("vocab_size", {"vocab_size": 0}),
            ("rms_norm_eps", {"rms_norm_eps": "x"}),
            ("model_type", {"model_type": "gpt_neox"}),
        ]
        for what, change in cases:
            def edit(folder, change=change):
                path = folder / "config.json"
                path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
            self.expect_refused(what, edit)
        self.expect_refused("config.json", lambda folder: (folder / "config.json").write_text('{"rope_theta": NaN}'))
        self.expect_refused("config.json", lambda folder: (folder / "config.json").unlink())

    def test_tokenizer_json_that_is_hostile(self):
        def edit_model(change):
            def edit(folder):
                path = folder / "tokenizer.json"
                tokenizer = json.loads(path.read_text())
                change(tokenizer["model"])
                path.write_text(json.dumps(tokenizer))
            return edit

        def cyclic(model):
            first = next(iter(model["vocab"]))
            model["merges"] = [["", first]]

        cases = [
            ("merge", edit_model(cyclic)),
            ("vocab", edit_model(lambda model: model["vocab"].update({"far": 2**31}))),
            ("tokenizer.json", lambda folder: (folder / "tokenizer.json").write_text("[" * 100000)),
            ("tokenizer.json", lambda folder: (folder / "tokenizer.json").write_text("{}")),
            ("tokenizer.json", lambda folder: (folder / "tokenizer.json").unlink()),
        ]
        for what, edit in cases:
            self.expect_refused(what, edit)

    def test_weights_that_are_cut_off_or_missing(self):
        def cut(folder):
            path = folder / "model.safetensors"
            data = path.read_bytes()[:100000]
            path.unlink()
            path.write_bytes(data)
        self.expect_refused("safetensors", cut)
        self.expect_refused("safetensors", lambda folder: (folder / "model.safetensors").unlink())


if __name__ == "__main__":
    unittest.main(verbosity=2)
