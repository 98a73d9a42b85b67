"""Tests of documents.py."""

import re
import unittest

import documents

SHAPES = [(task, length, seed) for task in documents.TASKS for length, seed in ((512, 0), (2048, 1), (8128, 2))]


def make(task, length, seed=0, **options):
    num_questions = 1 if task in ("pass_key", "common_words") else 6
    return documents.make_document(task, length, num_questions, seed, **options)


class DocumentsTest(unittest.TestCase):
    def test_same_seed_same_document(self):
        for task in documents.TASKS:
            self.assertEqual(make(task, 1024, 7), make(task, 1024, 7))
            self.assertNotEqual(make(task, 1024, 7).text, make(task, 1024, 8).text)

    def test_has_exactly_the_length(self):
        for task, length, seed in SHAPES:
            document = make(task, length, seed)
            self.assertEqual(document.num_tokens, length, task)
            self.assertEqual(documents.count_tokens(document.text), length, task)

    def test_is_never_longer_under_another_count(self):
        for task, length, seed in SHAPES:
            document = make(task, length, seed, count_tokens=lambda text: -(-len(text) // 3))
            self.assertLessEqual(document.num_tokens, length)
            self.assertGreater(document.num_tokens, length - 64)

    def test_refuses_facts_that_do_not_fit(self):
        with self.assertRaisesRegex(ValueError, "raise the length or ask fewer"):
            documents.make_document("multi_key", 100, 20)

    def test_refuses_more_questions_than_a_task_has(self):
        with self.assertRaisesRegex(ValueError, "answers 1 question, 2 asked"):
            documents.make_document("pass_key", 1000, 2)

    def test_questions_differ(self):
        for task, length, seed in SHAPES:
            questions = make(task, length, seed).questions
            self.assertEqual(len(set(question.prompt for question in questions)), len(questions))

    def test_answers_have_the_form(self):
        for task, length, seed in SHAPES:
            for question in make(task, length, seed).questions:
                self.assertRegex(question.answer, r"^ [^.\n]+\.$")

    def test_names_are_unique(self):
        text = documents.make_document("multi_key", 300_000, 1, tokens_per_fact=64).text
        self.assert_unique(re.findall(r"number for (\S+) is", text), 4000)

    def test_keys_are_unique(self):
        text = documents.make_document("key_value", 300_000, 1).text
        self.assert_unique(re.findall(r"value of (\S+) is", text), 4000)

    def test_variables_are_unique(self):
        text = documents.make_document("variable_tracing", 300_000, 1).text
        self.assert_unique(re.findall(r"Variable (\S+) equals", text), 2000)

    def assert_unique(self, names, at_least):
        self.assertGreater(len(names), at_least)
        self.assertEqual(len(set(names)), len(names))

    def test_facts_state_the_answers(self):
        for task in ("multi_key", "key_value", "pass_key"):
            for length in (512, 8128):
                document = make(task, length)
                for question in document.questions:
                    fact = question.prompt.split("? ")[1] + question.answer
                    self.assertEqual(document.text.count(fact), 1)

    def test_chains_lead_to_the_answers(self):
        document = make("variable_tracing", 8128)
        values = dict(re.findall(r"Variable (\S+) equals (\S+)\.\n", document.text))
        hops = set()
        for question in document.questions:
            variable = re.search(r"variable (\S+) equal\?", question.prompt)[1]
            spelled = []
            while variable in values:
                spelled.append(f"{variable} equals {values[variable]}")
                variable = values[variable]
            hops.add(len(spelled))
            self.assertTrue((", ".join(spelled) + ".").endswith(question.answer))
            self.assertTrue(question.answer.endswith(f"{variable}."))
        self.assertEqual(hops, {2, 3})

    def test_the_common_word_is_most_common(self):
        for seed in range(20):
            for length in (300, 2048, 8128):
                document = make("common_words", length, seed)
                words = re.findall(r"word of the hour is (\w+)\.", document.text)
                counts = sorted(((words.count(word), word) for word in set(words)), reverse=True)
                self.assertEqual(document.questions[0].answer, f" {counts[0][1]}.")
                self.assertTrue(len(counts) == 1 or counts[0][0] >= 1.5 * counts[1][0], counts)

    def test_mixed_asks_all_tasks(self):
        document = documents.make_document("mixed", 4096, 12)
        self.assertEqual({question.task for question in document.questions}, set(documents.TASKS) - {"mixed"})

    def test_a_prompt_starts_new_tokens(self):
        """The split rule never joins the line end of a document with the letter a prompt begins with."""
        for task, length, seed in SHAPES:
            document = make(task, length, seed)
            self.assertTrue(document.text.endswith(".\n"))
            for question in document.questions:
                self.assertRegex(question.prompt, r"^[A-Z]")


if __name__ == "__main__":
    unittest.main()
