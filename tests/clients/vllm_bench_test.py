"""The files of `vllm bench serve`, unmodified, from vLLM's wheel: completions and chat, to the end and without failures.

The wheel has 340 MB: fetch it by hand (`pip download --no-deps --only-binary :all: vllm==0.33.0`) and name the file in
KVASIR_VLLM_WHEEL. Without it the test is skipped.
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
from support.chat_model import link_chat_model  # noqa: E402
from support.service import Service  # noqa: E402

WHEEL = os.environ.get("KVASIR_VLLM_WHEEL")
CLIENT = pathlib.Path(__file__).with_name("vllm_bench_client.py")
PACKAGES = ("aiohttp==3.14.5", "numpy==2.4.6", "pandas==3.1.1", "pillow==13.0.0", "pybase64==1.5.1",
            "regex==2026.11.19", "tokenizers==0.23.3", "tqdm==4.70.1")
REQUESTS, TOKENS = 12, 16


@unittest.skipUnless(WHEEL, "KVASIR_VLLM_WHEEL names no wheel of vLLM")
class VllmBench(unittest.TestCase):
    def check(self, backend, endpoint):
        python = pypi.environment(*PACKAGES) / "bin" / "python"
        model = link_chat_model(self.enterContext(tempfile.TemporaryDirectory(prefix="kvasir-vllm-")))
        home = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="kvasir-vllm-")))
        (home / "prompts.jsonl").write_text("".join(
            json.dumps({"prompt": f"Once upon a time, number {i}"}) + "\n" for i in range(REQUESTS)))
        with Service(model=model) as service:
            run = subprocess.run(
                [python, CLIENT, WHEEL, f"{model}/tokenizer.json", f"--base-url=http://{service.http_address}",
                 f"--backend={backend}", f"--endpoint={endpoint}", "--dataset-name=custom",
                 f"--dataset-path={home / 'prompts.jsonl'}", "--skip-chat-template", "--ignore-eos",
                 f"--num-prompts={REQUESTS}", f"--custom-output-len={TOKENS}", "--max-concurrency=4", "--save-result",
                 f"--result-dir={home}", "--result-filename=result.json", "--disable-tqdm"],
                capture_output=True, text=True, timeout=240, check=False)
        self.assertEqual(run.returncode, 0, (run.stdout + run.stderr)[-4000:])
        result = json.loads((home / "result.json").read_text())
        self.assertEqual((result["completed"], result["failed"]), (REQUESTS, 0))
        self.assertEqual(result["total_output_tokens"], REQUESTS * TOKENS)

    def test_completions(self):
        self.check("openai", "/v1/completions")

    def test_chat(self):
        self.check("openai-chat", "/v1/chat/completions")


if __name__ == "__main__":
    unittest.main(verbosity=2)
