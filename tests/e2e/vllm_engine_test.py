"""vllm.grpc.engine.VllmEngine as a gateway calls it: answers equal to those of kvasir.v1.Generation, and what it asks and
this server lacks refused by name."""

import pathlib
import random
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import Service  # noqa: E402
from support.tiny_model import VOCAB, make_tiny_model  # noqa: E402

import grpc  # noqa: E402
from vllm.grpc import vllm_engine_pb2 as vllm  # noqa: E402
from vllm.grpc import vllm_engine_pb2_grpc  # noqa: E402

FLAGS = ["--mass-sample-rate=0", "--threads=1", "--kv-device-size-gb=0.02", "--kv-host-size-gb=0.05",
         "--max-model-len=1024", "--served-model-name=tiny"]
PROMPT = [random.Random(2).randrange(3, 1400) for _ in range(150)]


class VllmEngine(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-vllm-")))
        cls.model = make_tiny_model(folder / "model")
        cls.service = cls.enterClassContext(Service(model=cls.model, flags=FLAGS))
        cls.stub = vllm_engine_pb2_grpc.VllmEngineStub(cls.service.channel)

    @staticmethod
    def request(prompt=None, stream=True, request_id="", **sampling):
        sampling.setdefault("temperature", 0)
        sampling.setdefault("ignore_eos", True)
        bias = sampling.pop("logit_bias", {})
        request = vllm.GenerateRequest(request_id=request_id, stream=stream,
                                       sampling_params=vllm.SamplingParams(**sampling))
        for token, value in bias.items():
            request.sampling_params.logit_bias[token] = value
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokenized.input_ids.extend(prompt or PROMPT)
        return request

    def complete(self, **options):
        """Returns the one message of an answer that does not stream."""
        responses = list(self.stub.Generate(self.request(stream=False, **options)))
        self.assertEqual([r.WhichOneof("response") for r in responses], ["complete"])
        return responses[0].complete

    def refused(self, request):
        with self.assertRaises(grpc.RpcError) as refused:
            list(self.stub.Generate(request))
        return refused.exception

    def test_streamed_and_whole_answers_are_ours(self):
        for options in (dict(max_tokens=40), dict(max_tokens=30, temperature=0.9, seed=7, top_p=0.9, top_k=50),
                        dict(max_tokens=30, repetition_penalty=1.3, logit_bias={7: 5.0})):
            ours = self.service.generate(PROMPT, ignore_eos=True, **options).token_ids
            responses = list(self.stub.Generate(self.request(**options)))
            self.assertEqual({r.WhichOneof("response") for r in responses[:-1]}, {"chunk"})
            chunks, complete = [r.chunk for r in responses[:-1]], responses[-1].complete
            self.assertEqual([t for chunk in chunks for t in chunk.token_ids], ours)
            for chunk in chunks:
                self.assertEqual(chunk.completion_tokens, len(chunk.token_ids))
                self.assertEqual(chunk.prompt_tokens, len(PROMPT))
            self.assertEqual((complete.finish_reason, list(complete.output_ids), complete.completion_tokens),
                             ("length", [], len(ours)))
            whole = self.complete(**options)
            self.assertEqual(list(whole.output_ids), ours)
            self.assertEqual((whole.prompt_tokens, whole.completion_tokens), (len(PROMPT), len(ours)))
            self.assertGreaterEqual(whole.cached_tokens, 128)

    def test_text_stops_and_defaults(self):
        text = "Once upon a time"
        free = self.service.generate(text, max_tokens=12, ignore_eos=True)
        self.assertEqual(list(self.complete(prompt=text, max_tokens=12).output_ids), free.token_ids)
        token = free.token_ids[5]
        stopped = self.complete(prompt=text, max_tokens=12, stop_token_ids=[token])
        self.assertEqual((stopped.finish_reason, stopped.matched_token_id), ("stop", token))
        self.assertEqual(list(stopped.output_ids), free.token_ids[:free.token_ids.index(token) + 1])
        stop = free.text[3:5]
        by_text = self.complete(prompt=text, max_tokens=12, stop=[stop])
        self.assertEqual((by_text.finish_reason, by_text.matched_stop_str), ("stop", stop))
        rest = self.complete(prompt=PROMPT * 6 + PROMPT[:60])  # without max_tokens: to the end of the context
        self.assertEqual((rest.finish_reason, rest.completion_tokens), ("length", 1024 - 960))

    def test_logprobs_are_ours(self):
        ours = self.service.generate(PROMPT, max_tokens=8, ignore_eos=True, logprobs=3)
        whole = self.complete(max_tokens=8, logprobs=3, prompt_logprobs=2)
        output = whole.output_logprobs
        self.assertEqual(list(output.token_ids), ours.token_ids)
        self.assertEqual(list(output.token_logprobs), [t.logprob for t in ours.logprobs])
        self.assertEqual([list(top.token_ids) for top in output.top_logprobs],
                         [[t.token_id for t in token.top] for token in ours.logprobs])
        scores = whole.input_logprobs
        self.assertEqual(list(scores.token_ids), PROMPT)
        self.assertEqual([s.HasField("value") for s in scores.token_logprobs], [False] + [True] * (len(PROMPT) - 1))
        self.assertEqual([len(top.values) for top in scores.top_logprobs], [0] + [2] * (len(PROMPT) - 1))
        streamed = list(self.stub.Generate(self.request(max_tokens=8, logprobs=0, prompt_logprobs=0)))
        chunks = [r.chunk for r in streamed[:-1]]
        self.assertEqual([s.value for s in chunks[0].input_logprobs.token_logprobs],
                         [s.value for s in scores.token_logprobs])
        self.assertFalse(any(chunk.HasField("input_logprobs") for chunk in chunks[1:]))
        self.assertEqual([value for chunk in chunks for value in chunk.output_logprobs.token_logprobs],
                         list(output.token_logprobs))
        self.assertEqual(len(chunks[0].output_logprobs.top_logprobs), 0)

    def test_abort_ends_the_request_and_no_other(self):
        aborted = self.stub.Generate(self.request(request_id="one", max_tokens=800))
        other = self.stub.Generate(self.request(request_id="two", max_tokens=40))
        next(aborted)
        self.stub.Abort(vllm.AbortRequest(request_ids=["one", "nobody"]))
        with self.assertRaises(grpc.RpcError) as ended:
            list(aborted)
        self.assertEqual(ended.exception.code(), grpc.StatusCode.CANCELLED)
        self.assertEqual(list(other)[-1].complete.completion_tokens, 40)
        self.assertEqual(len(self.complete(request_id="one", max_tokens=3).output_ids), 3)
        deadline = time.monotonic() + 20
        while self.stub.GetServerInfo(vllm.GetServerInfoRequest()).active_requests > 0:
            self.assertLess(time.monotonic(), deadline, "the aborted request still runs")
            time.sleep(0.02)

    def test_a_second_request_of_an_id_is_refused_and_the_first_stays_abortable(self):
        first = self.stub.Generate(self.request(request_id="same", max_tokens=800))
        next(first)
        self.assertEqual(self.refused(self.request(request_id="same")).code(), grpc.StatusCode.ALREADY_EXISTS)
        self.stub.Abort(vllm.AbortRequest(request_ids=["same"]))
        with self.assertRaises(grpc.RpcError):
            list(first)

    def test_health_model_and_server(self):
        health = self.stub.HealthCheck(vllm.HealthCheckRequest())
        self.assertEqual((health.healthy, health.message), (True, ""))
        name = b"vllm.grpc.engine.VllmEngine"
        check = self.service.channel.unary_unary("/grpc.health.v1.Health/Check")
        self.assertEqual(check(b"\x0a" + bytes([len(name)]) + name), b"\x08\x01", "gRPC's own health: SERVING")
        model = self.stub.GetModelInfo(vllm.GetModelInfoRequest())
        self.assertEqual((model.model_path, model.served_model_name, model.model_type),
                         (str(self.model), "tiny", "llama"))
        self.assertEqual((model.is_generation, model.supports_vision, model.vocab_size), (True, False, VOCAB))
        self.assertEqual((model.max_context_length, model.max_req_input_len), (1024, 1023))
        self.complete(max_tokens=1)
        server = self.stub.GetServerInfo(vllm.GetServerInfoRequest())
        self.assertEqual((server.server_type, server.is_paused), ("vllm-grpc", False))
        self.assertAlmostEqual(server.last_receive_timestamp, time.time(), delta=60)

    def test_what_it_lacks_is_refused_by_name(self):
        unserved = [(f"sampling_params.{name}", self.request(**{name: value})) for name, value in (
            ("n", 2), ("json_schema", "{}"), ("regex", "a"), ("grammar", "g"), ("structural_tag", "t"),
            ("json_object", True), ("choice", vllm.ChoiceConstraint(choices=["a"])), ("truncate_prompt_tokens", 5),
            ("logprobs", -1), ("prompt_logprobs", -1))]
        for name, value in (("mm_inputs", vllm.MultimodalInputs()), ("media_refs", vllm.MediaRefs()),
                            ("kv_transfer_params", vllm.KvTransferParams()), ("kv_transfer_params_json", "{}"),
                            ("data_parallel_rank", 1), ("extra_mm_inputs", [vllm.MultimodalInputs()])):
            request = self.request()
            request.MergeFrom(vllm.GenerateRequest(**{name: value}))
            unserved.append((name, request))
        for name, request in unserved:
            error = self.refused(request)
            self.assertEqual(error.code(), grpc.StatusCode.UNIMPLEMENTED, name)
            self.assertIn(name, error.details())
        with self.assertRaises(grpc.RpcError) as refused:
            self.stub.Embed(vllm.EmbedRequest())
        self.assertEqual(refused.exception.code(), grpc.StatusCode.UNIMPLEMENTED)

    def test_hostile_numbers_are_refused(self):
        wrong = [dict(logprobs=21), dict(logprobs=-2), dict(prompt_logprobs=1 << 30), dict(prompt_logprobs=-(1 << 31)),
                 dict(temperature=float("nan")), dict(top_p=-1), dict(max_tokens=0), dict(max_tokens=(1 << 32) - 1),
                 dict(min_tokens=5, max_tokens=4), dict(logit_bias={-1: 1.0}), dict(logit_bias={VOCAB: 1.0}),
                 dict(prompt=[VOCAB]), dict(prompt=PROMPT * 7),
                 dict(prompt=[5] * 16385, prompt_logprobs=1), dict(stop=["x"] * 65)]
        for options in wrong:
            error = self.refused(self.request(**options))
            self.assertEqual(error.code(), grpc.StatusCode.INVALID_ARGUMENT, options)
        self.assertEqual(self.refused(vllm.GenerateRequest()).code(), grpc.StatusCode.INVALID_ARGUMENT)
        self.assertEqual(len(self.complete(max_tokens=3).output_ids), 3, "the server serves on")


if __name__ == "__main__":
    unittest.main(verbosity=2)
