"""Documents longer than the model was trained for, read at compact positions (--position-extension=streaming) and at
grouped positions (self_extend).

The reference model has a trained window of 8,192 tokens. Without the extension it answers hardly any of these questions
(tests/model/README.md).
"""

import json
import math
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import ROOT, Service  # noqa: E402

import grpc  # noqa: E402
from documents import make_document  # noqa: E402
from kvasir.v1 import generation_pb2  # noqa: E402

TRAINED_WINDOW = 8192
DOCUMENT = make_document("multi_key", 12000, num_questions=8, seed=7)
POLICIES = """
- name: dense
- name: wide
  prefill: {streaming: {}, sink_tokens: 256, window_tokens: 1024}
  decode: {quest: {}, sink_tokens: 256, window_tokens: 1024, token_budget: 7000}
"""
COMPACT = ["--position-extension=streaming", "--max-model-len=16384", "--sparse-selector=quest",
           "--sparse-prefill-selector=quest", "--sparse-token-budget=2048", "--sparse-sink-tokens=256",
           "--sparse-window-tokens=1024", "--mass-sample-rate=0"]
GROUPED = ["--position-extension=self_extend", "--self-extend-group-size=4", "--self-extend-window=1024",
           "--max-model-len=16384", "--sparse-selector=quest", "--sparse-token-budget=1024", "--sparse-sink-tokens=256",
           "--sparse-window-tokens=1024", "--mass-sample-rate=0.2"]
NATIVE = ["--allow-long-max-model-len", "--max-model-len=16384"]


def ask(service, question, **options):
    return service.generate(DOCUMENT.text + question.prompt, stop=".", max_tokens=24, **options)


def right(answers):
    return sum(a.text + "." == q.answer for a, q in zip(answers, DOCUMENT.questions))


class Served(unittest.TestCase):
    @classmethod
    def serve(cls, flags, policies):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(policies)
            file.flush()
            cls.service = cls.enterClassContext(Service(flags=[*flags, f"--policies={file.name}"]))

    def ask(self, question, **options):
        return ask(self.service, question, **options)

    def model_info(self):
        return self.service.stub.GetModelInfo(generation_pb2.GetModelInfoRequest())


class CompactPositions(Served):
    @classmethod
    def setUpClass(cls):
        cls.serve(COMPACT, POLICIES)

    def test_answers_beyond_the_trained_window(self):
        answers = [self.ask(question) for question in DOCUMENT.questions]
        self.assertGreaterEqual(right(answers), 7)
        self.assertGreater(answers[0].finish.usage.prompt_tokens, TRAINED_WINDOW + 3000)
        for answer in answers:
            report = answer.finish.attention
            self.assertGreater(report.decode_blocks_skipped.selected_out, report.decode_blocks_total / 2)
        for answer in answers[1:]:
            self.assertGreaterEqual(answer.cached_tokens, 11900, "the document was not found in the cache")

    def test_a_policy_that_attends_to_more_than_the_trained_window_is_refused(self):
        for policy, message in (("dense", "the prefill part of the policy must be sparse in all layers"),
                                ("wide", "the decode part of the policy attends to 8320 tokens")):
            with self.assertRaises(grpc.RpcError) as raised:
                self.ask(DOCUMENT.questions[0], policy=policy)
            self.assertEqual(raised.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
            self.assertIn(message, raised.exception.details())
            short = self.service.generate(DOCUMENT.text[:3000], max_tokens=4, policy=policy)
            self.assertEqual(len(short.token_ids), 4)

    def test_the_server_says_what_it_serves(self):
        info = self.model_info()
        self.assertEqual(info.max_context_length, 16384)
        self.assertEqual(info.trained_window, TRAINED_WINDOW)
        self.assertEqual(info.kv_form, "unrotated/bfloat16")


class GroupedPositions(Served):
    @classmethod
    def setUpClass(cls):
        cls.serve(GROUPED, "- name: dense\n")

    def test_any_policy_answers_beyond_the_trained_window(self):
        for policy in ("dense", "default"):
            answers = [self.ask(question, policy=policy, logprobs=1) for question in DOCUMENT.questions]
            self.assertGreaterEqual(right(answers), 7, policy)
            self.assertGreater(answers[0].finish.usage.prompt_tokens, TRAINED_WINDOW + 3000)
            for answer in answers:
                self.assertTrue(all(math.isfinite(token.logprob) for token in answer.logprobs))
                report = answer.finish.attention
                if policy == "default":
                    self.assertGreater(report.decode_blocks_skipped.selected_out, report.decode_blocks_total / 2)
                    self.assertGreater(report.decode_measured_mass.samples, 0)
                else:
                    self.assertEqual(report.decode_blocks_skipped.selected_out, 0)

    def test_without_groups_hardly_any_question_is_answered(self):
        with Service(flags=NATIVE) as service:
            self.assertLessEqual(right([ask(service, question) for question in DOCUMENT.questions]), 1)

    def test_the_server_says_what_it_serves(self):
        info = self.model_info()
        self.assertEqual(info.trained_window, 0)
        self.assertEqual(info.kv_form, "unrotated, groups of 4 behind 1024/bfloat16")


class KeptMass(unittest.TestCase):
    """The mass that the service measures agrees with an independent definition (tests/model/make_golden_masses.py)."""

    def test_mass_is_the_share_of_dense_attention_at_the_same_positions(self):
        golden = json.loads((ROOT / "tests" / "model" / "golden" / "masses.json").read_text())
        numbers = f"sink_tokens: {golden['sink']}, window_tokens: {golden['window']}, token_budget: {golden['budget']}"
        policies = "".join(f"- name: {selector}\n  decode: {{{selector}: {{}}, {numbers}}}\n  tail_tokens: 0\n"
                           for selector in {case["selector"] for case in golden["cases"]})
        for grouped in (False, True):
            flags = ["--dtype=float32", "--mass-sample-rate=1"]
            if grouped:
                flags += ["--position-extension=self_extend", f"--self-extend-group-size={golden['group_size']}",
                          f"--self-extend-window={golden['near']}"]
            with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
                file.write(policies)
                file.flush()
                with Service(flags=[*flags, f"--policies={file.name}"]) as service:
                    for case in [case for case in golden["cases"] if case["grouped"] == grouped]:
                        with self.subTest(grouped=grouped, selector=case["selector"]):
                            self.check(service, golden, case)

    def check(self, service, golden, case):
        steps, token = golden["steps"], golden["token"]
        answer = service.generate(golden["prompt"], policy=case["selector"], max_tokens=steps + 1, ignore_eos=True,
                                  logit_bias={token: 100})
        self.assertEqual(answer.token_ids, [token] * (steps + 1))
        mass = answer.finish.attention.decode_measured_mass
        self.assertEqual(mass.samples, case["samples"])
        self.assertAlmostEqual(mass.mean, case["mean"], delta=1e-4)
        self.assertAlmostEqual(mass.minimum, case["minimum"], delta=1e-4)


if __name__ == "__main__":
    unittest.main()
