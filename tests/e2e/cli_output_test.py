"""What commands print for shells and programs: the release, help, completion that a real bash and zsh carry out, JSON."""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import BUILD, KVASIR, ROOT, Service  # noqa: E402
from support.tiny_model import make_tiny_model  # noqa: E402

from google.protobuf import json_format  # noqa: E402
from kvasir.v1 import generation_pb2  # noqa: E402


def run(*arguments):
    return subprocess.run([KVASIR, *arguments], capture_output=True, text=True, timeout=60, check=False)


class Release(unittest.TestCase):
    def test_both_programs_tell_the_release(self):
        release = re.search(r"project\(kvasir VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text()).group(1)
        self.assertEqual(run("--version").stdout, f"kvasir {release}\n")
        worker = subprocess.run([BUILD / "worker" / "kvasir-worker", "--version"], capture_output=True, text=True,
                                timeout=60, check=True)
        self.assertEqual(worker.stdout, f"kvasir-worker {release}\n")


class Help(unittest.TestCase):
    def test_help_of_a_command_is_that_of_its_flag(self):
        for command in ("serve", "generate", "status", "bench"):
            self.assertIn(f"  {command} ", run("help").stdout)
            self.assertEqual(run("help", command).stdout, run(command, "--help").stdout)
        self.assertEqual(run().stdout, run("--help").stdout)

    def test_an_unknown_command_is_a_usage_error(self):
        for arguments in (("help", "dance"), ("dance",), ("completion", "fish"), ("completion",)):
            failed = run(*arguments)
            self.assertEqual((failed.returncode, failed.stdout), (2, ""), arguments)
            self.assertIn(arguments[-1], failed.stderr)


class Completion(unittest.TestCase):
    def bash(self, *words):
        """Returns what bash offers after these words; the last one may be incomplete."""
        script = (f"source <({KVASIR} completion bash)\nCOMP_WORDS=({' '.join(map(repr, words))})\n"
                  f"COMP_CWORD={len(words) - 1}\n_kvasir\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"")
        return subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=60,
                              check=True).stdout.split()

    def test_bash_completes_commands_flags_and_values(self):
        self.assertEqual(self.bash("kvasir", "s"), ["serve", "status"])
        self.assertEqual(self.bash("kvasir", "serve", "--log-"), ["--log-level", "--log-format"])
        self.assertEqual(self.bash("kvasir", "serve", "--log-format", "j"), ["json"])
        self.assertEqual(self.bash("kvasir", "serve", "--device", "="), ["cpu", "cuda"])
        self.assertEqual(self.bash("kvasir", "serve", "--device", "=", "cu"), ["cuda"])
        self.assertIn("infinitehip", self.bash("kvasir", "serve", "--sparse-selector", ""))
        self.assertEqual(self.bash("kvasir", "help", "g"), ["generate"])
        self.assertEqual(self.bash("kvasir", "completion", ""), ["bash", "zsh"])
        self.assertEqual(self.bash("kvasir", "generate", "--device"), [])

    def test_bash_offers_every_flag_of_every_command(self):
        for command in ("serve", "generate", "status", "bench"):
            flags = set(re.findall(r"^  (--[a-z-]+)", run("help", command).stdout, re.MULTILINE)) - {"--config"}
            self.assertEqual(flags - set(self.bash("kvasir", command, "--")), set())

    @unittest.skipUnless(shutil.which("zsh"), "Debian's zsh is not installed")
    def test_zsh_completes_commands_flags_and_values(self):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "_kvasir").write_text(run("completion", "zsh").stdout)
            for typed, offered in (("kvasir st", "kvasir status"), ("kvasir serve --log-f", "--log-format"),
                                   ("kvasir serve --device=cu", "--device=cuda"), ("kvasir help ge", "generate")):
                with self.subTest(typed=typed):
                    self.zsh_offers(folder, typed, offered)

    @staticmethod
    def zsh_offers(folder, typed, offered):
        """Waits until an interactive zsh shows `offered` after `typed` and a tab."""
        script = f"""
zmodload zsh/zpty
zpty shell 'zsh -f -i'
zpty -w shell 'PS1=; fpath=({folder} $fpath); autoload -U compinit; compinit -u -D; print READY'
zpty -r -m shell out '*READY*READY*'
zpty -n -w shell $'{typed}\\t'
zpty -r -m shell out '*{offered}*'
zpty -d shell
"""
        subprocess.run(["zsh", "-f", "-c", script], capture_output=True, timeout=30, check=True)


class Json(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        cls.service = cls.enterClassContext(Service(model=make_tiny_model(pathlib.Path(folder) / "model")))

    def command(self, name, *flags):
        return run(name, f"--server={self.service.address}", *flags)

    def test_status_is_the_answers_of_the_server(self):
        told = json.loads(self.command("status", "--json").stdout)
        server = json_format.ParseDict(told["server"], generation_pb2.GetServerInfoResponse())
        asked = self.service.stub.GetServerInfo(generation_pb2.GetServerInfoRequest())
        for info in (server, asked):
            info.ClearField("uptime")
        self.assertEqual(server, asked)
        self.assertEqual([tier["tier"] for tier in told["server"]["tiers"]], ["TIER_DEVICE", "TIER_HOST"])
        model = json_format.ParseDict(told["model"], generation_pb2.GetModelInfoResponse())
        self.assertEqual(model, self.service.stub.GetModelInfo(generation_pb2.GetModelInfoRequest()))

    def test_bench_is_one_object_of_numbers(self):
        told = json.loads(self.command("bench", "--json", "--quiet", "--streams=2", "--requests=4", "--prompt-tokens=50",
                                       "--max-tokens=5").stdout)
        self.assertEqual((told["requests"], told["failed"], told["errors"]), (4, 0, {}))
        self.assertEqual((told["generated_tokens"], told["prompt_tokens"], told["cached_prompt_tokens"]), (20, 200, 0))
        for name, samples in (("time_to_first_token_ms", 4), ("inter_token_latency_ms", 16)):
            self.assertEqual(told[name]["samples"], samples)
            self.assertLessEqual(told[name]["p50"], told[name]["p99"])
            self.assertGreater(told[name]["mean"], 0)
        self.assertAlmostEqual(told["generated_tokens_per_s"] * told["seconds"], 20, places=6)

    def test_bench_beside_a_long_prompt_is_one_object_too(self):
        told = json.loads(self.command("bench", "--json", "--quiet", "--streams=2", "--prompt-tokens=50", "--max-tokens=5",
                                       "--long-prompt-tokens=2000").stdout)
        self.assertEqual((told["streams"], told["long_prompt_tokens"]), (2, 2000))
        self.assertEqual(told["held"], told["inter_token_latency_while_reading_ms"]["p99"] <= told["bound_ms"])

    def test_generate_takes_logprobs_and_biases(self):
        plain = self.command("generate", "--prompt=hello", "--max-tokens=3", "--ignore-eos", "--logprobs=2", "--quiet")
        lines = re.findall(r"^  token +(\d+)  logprob +-\d+\.\d+  (\d+): -\d+\.\d+  \d+: -\d+\.\d+$", plain.stderr, re.M)
        self.assertEqual(len(lines), 3, plain.stderr)
        self.assertEqual([token for token, _ in lines], [top for _, top in lines])  # greedy
        banned = lines[0][0]
        biased = self.command("generate", "--prompt=hello", "--max-tokens=3", "--ignore-eos", "--logprobs=0", "--quiet",
                              f"--logit-bias={banned}=-100")
        self.assertNotIn(banned, re.findall(r"token +(\d+)", biased.stderr))


class TokenizerOfAnotherModel(unittest.TestCase):
    def refused(self, change):
        with tempfile.TemporaryDirectory() as folder:
            model = make_tiny_model(pathlib.Path(folder) / "model")
            config = json.loads((model / "config.json").read_text())
            change(config, model)
            (model / "config.json").write_text(json.dumps(config))
            failed = run("serve", f"--model={model}", "--port=0", "--metrics-port=0")
            self.assertEqual(failed.returncode, 1)
            self.assertIn("the tokenizer does not fit the model", failed.stderr)
            return failed.stderr

    def test_ids_beyond_the_vocabulary(self):
        self.assertRegex(self.refused(lambda config, _: config.update(vocab_size=1000)), r"it has the token 1\d{3} \(")

    def test_an_end_of_text_that_is_no_token(self):
        def change(config, model):
            config.update(eos_token_id=1472, vocab_size=1600)
            (model / "generation_config.json").unlink()
        self.assertIn("eos_token_id is 1472", self.refused(change))


if __name__ == "__main__":
    unittest.main(verbosity=2)
