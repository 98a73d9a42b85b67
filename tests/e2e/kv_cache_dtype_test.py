"""KV of 8 bits under the real service: --kv-cache-dtype=fp8 and int8.

An answer has the same tokens and log-probabilities whether its KV was computed, cached in memory, read from disk by
another process or computed again after a preemption, for one rank and two; and `kvasir status` says that a token takes
half of what it takes in bfloat16.
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import KVASIR, Service  # noqa: E402
from support.tiny_model import make_tiny_model  # noqa: E402

FLAGS = ["--dtype=float32", "--mass-sample-rate=0", "--threads=1", "--kv-device-size-gb=0.002", "--kv-host-size-gb=0.01",
         "--max-num-batched-tokens=128"]
PROMPT = [3 + (i * i + i // 7) % 1400 for i in range(700)]
STORED_TOKENS = 640  # of the prompt: whole blocks


class KvCacheDType(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-kv-dtype-")))
        cls.model = make_tiny_model(cls.folder / "model")

    def serve(self, dtype, *flags):
        return Service(model=self.model, flags=[*FLAGS, f"--kv-cache-dtype={dtype}", *flags])

    @staticmethod
    def ask(service, max_tokens=40, **options):
        answer = service.generate(PROMPT, max_tokens=max_tokens, ignore_eos=True, logprobs=1, **options)
        return answer.token_ids, [entry.logprob for entry in answer.logprobs], answer.finish.usage.cached_tokens

    def test_an_answer_is_the_same_wherever_its_kv_comes_from(self):
        for dtype in ("fp8", "int8"):
            for ranks in (1, 2):
                store = self.folder / f"{dtype}-{ranks}"  # ranks of another number would find what is in it
                with self.subTest(dtype=dtype, ranks=ranks):
                    flags = [f"--kv-disk-path={store}", "--kv-disk-size-gb=1", f"--tensor-parallel-size={ranks}"]
                    with self.serve(dtype, *flags) as service:
                        computed = self.ask(service)
                        self.assertEqual(computed[2].device + computed[2].host + computed[2].disk, 0)
                        cached = self.ask(service)
                        self.assertEqual(cached[2].device + cached[2].host, STORED_TOKENS)
                    with self.serve(dtype, *flags) as service:
                        restored = self.ask(service)
                        self.assertEqual(restored[2].disk, STORED_TOKENS)
                    self.assertEqual(computed[:2], cached[:2])
                    self.assertEqual(computed[:2], restored[:2])

    def test_a_store_of_another_type_is_refused_and_left_alone(self):
        store = self.folder / "other"
        flags = [f"--kv-disk-path={store}", "--kv-disk-size-gb=1"]
        with self.serve("fp8_e4m3", *flags) as service:
            expected = self.ask(service)
        for dtype in ("int8", "bfloat16"):
            with self.subTest(dtype), self.assertRaises(RuntimeError) as raised:
                self.serve(dtype, *flags)
            self.assertIn("kv_disk_path", str(raised.exception))
        with self.serve("fp8", *flags) as service:
            found = self.ask(service)
            self.assertEqual((found[:2], found[2].disk), (expected[:2], STORED_TOKENS))

    def test_status_says_that_a_token_takes_half(self):
        sizes, forms, blocks = {}, {}, {}
        for dtype in ("bfloat16", "fp8", "int8"):
            with self.serve(dtype) as service:
                self.ask(service, max_tokens=1)
                run = subprocess.run([KVASIR, "status", f"--server={service.address}"], capture_output=True, text=True,
                                     check=True)
                sizes[dtype] = int(re.search(r"(?m)^KV +([\d,]+) bytes a token", run.stdout)[1].replace(",", ""))
                forms[dtype] = re.search(r"KV (\S+?),", run.stdout)[1]
                metrics = service.metrics(service.metrics_address)
                info = next(key for key in metrics if key.startswith("kvasir_cache_config_info"))
                blocks[dtype] = int(re.search(r'num_host_blocks="(\d+)"', info)[1])
        # 2 layers, 2 KV heads of 16: K and V of 2 bytes an element, or 1 and a byte of scale.
        self.assertEqual(sizes, {"bfloat16": 256, "fp8": 136, "int8": 136})
        self.assertEqual(forms, {"bfloat16": "rotated/bfloat16", "fp8": "rotated/fp8_e4m3", "int8": "rotated/int8"})
        self.assertEqual(blocks["fp8"], blocks["int8"])
        self.assertGreater(blocks["fp8"], blocks["bfloat16"])

    def test_an_unknown_type_is_refused(self):
        run = subprocess.run([KVASIR, "serve", f"--model={self.model}", "--kv-cache-dtype=fp4"], capture_output=True, text=True,
                             check=False)
        self.assertNotEqual(run.returncode, 0)
        self.assertIn("kv-cache-dtype", run.stderr)
        for choice in ("fp8", "fp8_e4m3", "int8"):
            self.assertIn(choice, run.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
