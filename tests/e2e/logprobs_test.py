"""Log probabilities as clients see them: of prompts, on one rank and two, cached or not, and with the tokens' texts."""

import math
import pathlib
import sys
import threading
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import Service  # noqa: E402

import grpc  # noqa: E402
from documents import make_document  # noqa: E402

DOCUMENT = make_document("multi_key", 3000, num_questions=2, seed=3)
FLAGS = ["--mass-sample-rate=0", "--max-num-seqs=4"]


def score(service, prompt, top=0, **options):
    """Returns the prompt's token ids, their log probabilities (the first is None), the most probable tokens at each
    place as a list of maps, and the answer."""
    ids, logprobs, tops = [], [None], [None]
    answer = []
    for response in service.stream(prompt, prompt_logprobs=top, max_tokens=1, ignore_eos=True, **options):
        kind = response.WhichOneof("event")
        if kind == "prompt_logprobs":
            part = response.prompt_logprobs
            assert not answer, "scores of the prompt come before the answer"
            if part.HasField("first_token_id"):
                assert not ids
                ids.append(part.first_token_id)
            assert part.index == len(ids) == len(logprobs)
            ids += part.token_ids
            logprobs += part.logprobs
            k = part.top_count
            assert len(part.top_token_ids) == len(part.top_logprobs) == k * len(part.logprobs)
            tops += [dict(zip(part.top_token_ids[i * k:(i + 1) * k], part.top_logprobs[i * k:(i + 1) * k]))
                     for i in range(len(part.logprobs))]
        elif kind == "tokens":
            answer += response.tokens.token_ids
        elif kind == "finish":
            finish = response.finish
    return ids, logprobs, tops, answer, finish


class OneRank(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.service = cls.enterClassContext(Service(flags=FLAGS))

    def test_a_generated_text_scores_as_it_was_generated(self):
        prompt = DOCUMENT.text[:1500]
        answer = self.service.generate(prompt, max_tokens=60, ignore_eos=True, logprobs=3)
        head, *_ = score(self.service, prompt)
        ids, logprobs, tops, _, _ = score(self.service, head + answer.token_ids, top=3)
        self.assertEqual(ids, head + answer.token_ids)
        for i, (token, generated) in enumerate(zip(answer.token_ids, answer.logprobs)):
            place = len(head) + i
            self.assertAlmostEqual(logprobs[place], generated.logprob, delta=0.05)  # bfloat16
            self.assertEqual(next(iter(tops[place])), token, "greedy takes the largest")
            self.assertAlmostEqual(tops[place][token], logprobs[place], delta=1e-6)

    def test_the_whole_of_a_long_prompt_is_scored_and_a_distribution_at_every_place(self):
        ids, logprobs, tops, answer, finish = score(self.service, DOCUMENT.text, top=20, tenant_id="long")
        self.assertEqual(len(ids), finish.usage.prompt_tokens)
        self.assertEqual(len(answer), 1)
        for token, logprob, top in zip(ids[1:], logprobs[1:], tops[1:]):
            self.assertTrue(math.isfinite(logprob) and logprob <= 0)
            self.assertEqual(len(top), 20)
            self.assertEqual(list(top.values()), sorted(top.values(), reverse=True))
            self.assertLess(sum(math.exp(value) for value in top.values()), 1.0001)
            self.assertTrue(top.get(token, logprob) == logprob <= max(top.values()))

    def test_a_cached_prompt_is_computed_again_to_the_same_bits_and_cached_for_others(self):
        prompt = DOCUMENT.text[:1200]
        first = score(self.service, prompt, top=2, tenant_id="twice")
        again = score(self.service, prompt, top=2, tenant_id="twice")
        self.assertEqual(first[:4], again[:4])
        self.assertEqual(again[4].usage.cached_tokens.device + again[4].usage.cached_tokens.host, 0)
        plain = self.service.generate(prompt, max_tokens=1, ignore_eos=True, tenant_id="twice")
        self.assertGreater(plain.cached_tokens, 200)
        self.assertEqual(plain.token_ids, first[3])

    def test_others_are_answered_the_same_meanwhile(self):
        prompts = [DOCUMENT.text[i * 50:i * 50 + 700] for i in range(4)]
        expected = [self.service.generate(p, max_tokens=10, ignore_eos=True, tenant_id="alone").token_ids
                    for p in prompts]
        answers = [None] * 4

        def run(i):
            answers[i] = self.service.generate(prompts[i], max_tokens=10, ignore_eos=True, tenant_id=f"beside{i}",
                                               **({"prompt_logprobs": 20} if i % 2 else {})).token_ids
        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(answers, expected)

    def test_short_prompts(self):
        self.assertEqual(score(self.service, [5])[1], [None])
        ids, logprobs, tops, _, _ = score(self.service, [5, 6], top=1)
        self.assertEqual((ids, len(logprobs), len(tops[1])), ([5, 6], 2, 1))

    def test_numbers_out_of_range_are_refused_by_name(self):
        for top in (21, 1 << 31, (1 << 32) - 1):
            with self.assertRaises(grpc.RpcError) as refused:
                self.service.generate("hi", prompt_logprobs=top)
            self.assertEqual(refused.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
            self.assertIn("sampling.prompt_logprobs", refused.exception.details())

    def test_texts_of_tokens(self):
        parts = 0
        for seed in range(8):
            answer = self.service.generate("ä漢🦊" * 40, max_tokens=20, ignore_eos=True, logprobs=20, logprobs_text=True,
                                           temperature=2.0, seed=seed, skip_special_tokens=False)
            joined = b""
            for logprobs in answer.logprobs:
                joined += logprobs.token.text.encode() or logprobs.token.part
                for top in logprobs.top:
                    self.assertIsNotNone(top.token.WhichOneof("content"))
                    parts += top.token.WhichOneof("content") == "part"
            self.assertEqual(joined.decode(errors="replace"), answer.text)
        self.assertGreater(parts, 0, "premise: some of 3,200 likely tokens are parts of characters")
        plain = self.service.generate("hi", max_tokens=1, ignore_eos=True, logprobs=1)
        self.assertFalse(plain.logprobs[0].HasField("token"))


class TwoRanks(unittest.TestCase):
    def test_score_as_one(self):
        with Service(flags=FLAGS) as one:
            ids, expected, *_ = score(one, DOCUMENT.text[:2000])
        with Service(flags=[*FLAGS, "--tensor-parallel-size=2"]) as two:
            found_ids, found, *_ = score(two, DOCUMENT.text[:2000])
        self.assertEqual(found_ids, ids)
        differences = [abs(a - b) for a, b in zip(expected[1:], found[1:])]
        self.assertLess(max(differences), 0.5)  # bfloat16, sums in another order; improbable tokens differ most
        self.assertLess(sum(differences) / len(differences), 0.05)


if __name__ == "__main__":
    unittest.main(verbosity=2)
