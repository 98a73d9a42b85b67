"""Instruction sets of the CPU kernels: each one that this machine has can be forced, is named, and answers."""

import pathlib
import platform
import re
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import KVASIR, ROOT, Service  # noqa: E402

from documents import make_document  # noqa: E402
from kvasir.v1 import generation_pb2  # noqa: E402

DOCUMENT = make_document("pass_key", 700, num_questions=1, seed=5)
ANOTHER_MACHINES = "neon" if platform.machine() == "x86_64" else "avx2"


def refusal():
    return subprocess.run([str(KVASIR), "serve", f"--model={ROOT}/tests/model/needle-8k", f"--cpu-isa={ANOTHER_MACHINES}",
                           "--port=0", "--http-port=0", "--metrics-port=0"], capture_output=True, text=True, timeout=60)


class CpuIsa(unittest.TestCase):
    def test_one_that_the_machine_lacks_is_refused_with_those_it_has(self):
        refused = refusal()
        self.assertEqual(refused.returncode, 1)
        self.assertRegex(refused.stderr, f"cpu-isa is '{ANOTHER_MACHINES}'; this machine takes auto, portable")

    def test_each_of_the_machine_answers_and_is_named(self):
        names = re.search(r"takes auto, (.*)", refusal().stderr).group(1).strip().split(", ")
        self.assertIn("portable", names)
        question = DOCUMENT.questions[0]
        for name in names:
            with self.subTest(name), Service(flags=[f"--cpu-isa={name}"]) as service:
                worker = service.stub.GetServerInfo(generation_pb2.GetServerInfoRequest()).workers[0]
                self.assertRegex(worker.device, f"attention {name}, products ")
                service.wait_for_log(worker.device)
                if name in ("portable", "avx2"):
                    self.assertNotIn("avx512", worker.device)
                answer = service.generate(DOCUMENT.text + question.prompt, stop=".", max_tokens=24)
                self.assertEqual(answer.text + ".", question.answer)


if __name__ == "__main__":
    unittest.main()
