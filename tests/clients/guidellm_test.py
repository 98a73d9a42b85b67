"""guidellm, unmodified: a short benchmark of completions and of chat runs to its end, and every request succeeds.

guidellm needs torch, whose packages take gigabytes: install it by hand (`pip install guidellm==0.8.1`) and name the
program in KVASIR_GUIDELLM. Without it the test is skipped.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.chat_model import link_chat_model  # noqa: E402
from support.service import Service  # noqa: E402

GUIDELLM = os.environ.get("KVASIR_GUIDELLM")
REQUESTS, TOKENS = 12, 16


def run_guidellm(address, request_format, home):
    """Runs a benchmark of three streams. Returns its report."""
    prompts = pathlib.Path(home) / "prompts.jsonl"
    prompts.write_text("".join(  # a count of tokens makes it send ignore_eos
        json.dumps({"prompt": f"Once upon a time, number {i}", "output_tokens_count": TOKENS}) + "\n"
        for i in range(REQUESTS)))
    report = pathlib.Path(home) / "report.json"
    run = subprocess.run(
        [GUIDELLM, "run", "--disable-console-interactive",
         "--backend", f"kind=openai_http,target=http://{address},model=needle-8k,request_format={request_format}",
         "--profile", "kind=concurrent,streams=3", "--constraint", f"kind=max_requests,count={REQUESTS}",
         "--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={report}"],
        cwd=home, capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "HF_HOME": home, "HF_HUB_OFFLINE": "1"})
    if run.returncode != 0:
        raise AssertionError(f"guidellm ended with {run.returncode}:\n{(run.stdout + run.stderr)[-4000:]}")
    return json.loads(report.read_text())


@unittest.skipUnless(GUIDELLM, "KVASIR_GUIDELLM names no program of guidellm")
class GuideLlm(unittest.TestCase):
    def check(self, request_format):
        model = link_chat_model(self.enterContext(tempfile.TemporaryDirectory(prefix="kvasir-guidellm-")))
        home = self.enterContext(tempfile.TemporaryDirectory(prefix="kvasir-guidellm-"))
        with Service(model=model, flags=["--served-model-name=needle-8k"]) as service:
            report = run_guidellm(service.http_address, request_format, home)
        [benchmark] = report["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        self.assertEqual((totals["successful"], totals["errored"], totals["incomplete"]), (REQUESTS, 0, 0))
        for request in benchmark["requests"]["successful"]:
            self.assertEqual(request["output_tokens"], TOKENS)
            self.assertGreater(request["prompt_tokens"], 0)

    def test_completions(self):
        self.check("/v1/completions")

    def test_chat(self):
        self.check("/v1/chat/completions")


if __name__ == "__main__":
    unittest.main(verbosity=2)
