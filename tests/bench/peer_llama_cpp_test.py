"""Tests of the figures that peer_llama_cpp.py computes from measured times."""

import unittest

import peer_llama_cpp as bench


class TablesTest(unittest.TestCase):
    def test_a_run_is_the_first_token_and_the_mean_of_the_gaps(self):
        run = bench.Run.of([2.0, 2.5, 3.0, 5.0])
        self.assertEqual((run.read, run.token), (2.0, 1.0))

    def test_streams_count_while_all_of_them_generate(self):
        answers = [([1.0, 3.0, 4.0, 5.0], ""), ([2.0, 3.0, 4.0, 6.0], "")]
        self.assertEqual(bench.together(answers), (2.0, 5 / 3))  # tokens at 3, 3, 4, 4 and 5

    def test_ratios_are_ours_over_the_faster_of_the_16_bit_types_in_each_column(self):
        runs = {("llama-f16", "dense"): [bench.Run(2.0, 0.010), bench.Run(9.0, 0.090), bench.Run(2.0, 0.010)],
                ("llama-bf16", "dense"): [bench.Run(4.0, 0.008)],
                ("llama-q8_0", "dense"): [bench.Run(1.0, 0.004)],
                ("kvasir-bf16", "dense"): [bench.Run(1.0, 0.016)],
                ("kvasir-bf16", "quest"): [bench.Run(0.1, 0.004)],
                ("kvasir-int8", "dense"): [bench.Run(1.0, 0.002)]}
        lines = bench.stream_table({2048: runs}, {("llama-f16", 2048, 1): "on"})
        self.assertEqual(lines[2], "| 2,048 | llama-f16 | flash on | 2.000 |  | 10.00 | 100.0 |  |")
        self.assertEqual(lines[5:], [
            "| 2,048 | kvasir-bf16 | dense | 1.000 | 0.50 | 16.00 | 62.5 | 2.00 |",
            "| 2,048 | kvasir-bf16 | quest 1,024 |  |  | 4.00 | 250.0 | 0.50 |",
            "| 2,048 | kvasir-int8 | dense | 1.000 | 1.00 | 2.00 | 500.0 | 0.50 |"])

    def test_a_side_without_its_peer_has_no_ratio(self):
        lines = bench.stream_table({64: {("kvasir-int8", "dense"): [bench.Run(1.0, 0.002)],
                                         ("llama-f16", "dense"): [bench.Run(1.0, 0.002)]}}, {})
        self.assertEqual(lines[2], "| 64 | kvasir-int8 | dense | 1.000 |  | 2.00 | 500.0 |  |")

    def test_of_several_streams_less_than_one_is_faster_too(self):
        runs = {("llama-f16", "dense"): [(2.0, 100.0)], ("kvasir-bf16", "dense"): [(1.0, 200.0)]}
        lines = bench.streams_table({512: runs}, 4, {})
        self.assertEqual(lines[3], "| 512 | kvasir-bf16 | dense | 1.000 | 0.50 | 200.0 | 0.50 |")


if __name__ == "__main__":
    unittest.main()
