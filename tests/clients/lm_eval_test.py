"""lm_eval, unmodified, from PyPI: its local-completions give the log likelihoods and the accuracy of transformers.

Twenty questions with four answers, on SmolLM2. choices/smollm2.json holds what transformers gives (make_golden.py).
KVASIR_SMOLLM2 names the model's folder, which deploy/fetch_smollm2.sh writes; without it the test is skipped.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support import pypi  # noqa: E402
from support.service import Service  # noqa: E402

PACKAGE = "lm_eval[api]==0.4.13"
CHOICES = pathlib.Path(__file__).with_name("choices")
MODEL = os.environ.get("KVASIR_SMOLLM2")


def run_lm_eval(service, home):
    """Runs the task. Returns the accuracy and the log likelihoods of the answers, in the order of the questions."""
    program = pypi.environment(PACKAGE) / "bin" / "lm_eval"
    run = subprocess.run(
        [program, "--model", "local-completions", "--model_args",
         f"model=smollm2,base_url=http://{service.http_address}/v1/completions,num_concurrent=2",
         "--tasks", "choices.yaml", "--batch_size", "8", "--log_samples", "--output_path", home],
        cwd=CHOICES, capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "HF_HOME": home, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
    if run.returncode != 0:
        raise AssertionError(f"lm_eval ended with {run.returncode}:\n{(run.stdout + run.stderr)[-4000:]}")
    [samples] = pathlib.Path(home).rglob("samples_*.jsonl")
    [results] = pathlib.Path(home).rglob("results_*.json")
    questions = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    scores = [[float(answer[0]) for answer in question["filtered_resps"]] for question in questions]
    return json.loads(results.read_text())["results"]["choices"]["acc,none"], scores


class LmEval(unittest.TestCase):
    @unittest.skipUnless(MODEL, "KVASIR_SMOLLM2 names no folder that deploy/fetch_smollm2.sh has written")
    def test_answers_score_as_with_transformers(self):
        golden = json.loads((CHOICES / "smollm2.json").read_text())
        right = [json.loads(line)["answer"] for line in (CHOICES / "questions.jsonl").read_text().splitlines()]
        home = self.enterContext(tempfile.TemporaryDirectory(prefix="kvasir-lm-eval-"))
        with Service(model=MODEL, flags=["--served-model-name=smollm2"]) as service:
            accuracy, scores = run_lm_eval(service, home)

        def distances(others):
            return [abs(a - b) for row, other in zip(golden["float32"], others) for a, b in zip(row, other)]

        self.assertEqual([len(row) for row in scores], [4] * len(right))
        ours, tolerance = distances(scores), distances(golden["bfloat16"])
        print(f"log likelihoods differ from float32 by at most {max(ours):.4f}, {sum(ours) / len(ours):.4f} on average; "
              f"transformers' own in bfloat16 by {max(tolerance):.4f} and {sum(tolerance) / len(tolerance):.4f}")
        self.assertLess(max(ours), max(tolerance))
        self.assertLess(sum(ours), 1.25 * sum(tolerance))
        expected = [row.index(max(row)) == answer for row, answer in zip(golden["float32"], right)]
        self.assertEqual(accuracy, sum(expected) / len(expected))


if __name__ == "__main__":
    unittest.main(verbosity=2)
