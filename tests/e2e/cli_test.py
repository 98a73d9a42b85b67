"""Commands that are used wrongly print one line that helps, and exit with a code other than 0."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import KVASIR, Service  # noqa: E402
from support.tiny_model import make_tiny_model  # noqa: E402


class Commands(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="kvasir-cli-")
        cls.path = pathlib.Path(cls.folder.name)
        cls.ready_file = cls.path / "ready"
        cls.service = Service(model=make_tiny_model(cls.path / "model"))

    @classmethod
    def tearDownClass(cls):
        cls.service.stop()
        cls.folder.cleanup()

    def command(self, name, *flags, stdin=b"", server=None, **environment):
        run = subprocess.run([KVASIR, name, f"--server={server or self.service.address}", *flags], input=stdin,
                             capture_output=True, timeout=60, check=False, env={**os.environ, **environment})
        return run.returncode, run.stdout.decode(errors="replace"), run.stderr.decode(errors="replace").strip()

    def expect_refused(self, *words, name="generate", flags=(), stdin=b"", code=1):
        returned, output, error = self.command(name, *flags, stdin=stdin)
        self.assertEqual(returned, code, output + error)
        last = error.splitlines()[-1]
        self.assertRegex(last, r"^kvasir: [A-Z_]+: ")
        for word in words:
            self.assertIn(word, last)
        self.assertNotIn("libprotobuf", error)
        self.assertEqual(output.strip(), "")

    # Bug: the command aborted (134).
    def test_a_folder_is_no_prompt_file(self):
        self.expect_refused(str(self.path), "Is a directory", flags=[f"--prompt-file={self.path}"])
        self.expect_refused("Is a directory", name="bench", flags=[f"--documents={self.path}"])
        folder = os.open(self.path, os.O_RDONLY)
        run = subprocess.run([KVASIR, "generate", f"--server={self.service.address}", "--prompt-file=-"], stdin=folder,
                             capture_output=True, text=True, timeout=60, check=False)
        os.close(folder)
        self.assertEqual(run.returncode, 1)
        self.assertIn("standard input cannot be read: Is a directory", run.stderr)

    # Bug: the command printed libprotobuf's lines, and UNIMPLEMENTED without a message.
    def test_text_that_is_not_utf8(self):
        latin1 = "Grüße".encode("latin-1")
        self.expect_refused("the prompt is not UTF-8: byte 2 is 0xfc", "iconv", flags=["--prompt-file=-"], stdin=latin1)
        for flag in ("--stop", "--tenant", "--policy"):
            self.expect_refused(flag, "not UTF-8", flags=["--prompt=x", flag.encode() + b"=" + latin1])

    # Bug: the error said "the prompt has 1 tokens".
    def test_an_answer_that_leaves_no_room_for_a_prompt(self):
        self.expect_refused("sampling.max_tokens is 8192", "leaves no room for a prompt", "8191",
                            flags=["--prompt=hello", "--max-tokens=8192"])

    # Bug: it printed a table of zeros and exited with 0.
    def test_a_bench_without_an_answer_is_an_error(self):
        self.expect_refused("policy.name is 'nope'", name="bench",
                            flags=["--policy=nope", "--requests=2", "--prompt-tokens=10", "--max-tokens=2", "--quiet"])

    # Bug: the error was gRPC's message.
    def test_a_prompt_that_no_message_holds(self):
        self.expect_refused("the request has", "at most 67108864", flags=["--prompt-file=-"], stdin=b"x" * (65 << 20))

    # Bug: the second flag was dropped silently.
    def test_flags_that_are_given_twice(self):
        self.expect_refused("--prompt is given twice", flags=["--prompt=a", "--prompt=b"], code=2)
        self.expect_refused("one of --prompt and --prompt-file", flags=["--prompt=a", "--prompt-file=-"])
        whole = self.command("generate", "--prompt=hello", "--max-tokens=40", "--quiet")[1]
        first, second = whole[5:8], whole[20:23]
        for stops in ([first, second], [second, first]):
            cut = self.command("generate", "--prompt=hello", "--max-tokens=40", "--quiet",
                               *[f"--stop={stop}" for stop in stops])[1]
            self.assertEqual(cut.rstrip("\n"), whole[:whole.index(first)].rstrip("\n"))

    # Bug: such variables were ignored silently.
    def test_variables_that_are_no_flags(self):
        _, _, error = self.command("generate", "--prompt=hello", "--max-tokens=1", "--quiet", KVASIR_MAX_TOKNES="3",
                                   KVASIR_PORT="1")
        self.assertIn("KVASIR_MAX_TOKNES", error)
        self.assertNotIn("KVASIR_PORT", error)

    # Bug: every answer had seed 0.
    def test_the_server_chooses_a_seed_where_none_is_given(self):
        def answers(*flags):
            return {self.command("generate", "--prompt=hello", "--max-tokens=20", "--temperature=1", "--quiet",
                                 *flags)[1] for _ in range(3)}
        self.assertGreater(len(answers()), 1)
        self.assertEqual(len(answers("--seed=0")), 1)

    # Bug: a server that failed to start left another's file, and one that ended left its own.
    def test_a_ready_file_is_that_of_a_running_server(self):
        self.ready_file.write_text("grpc: 127.0.0.1:1\n")
        run = subprocess.run([KVASIR, "serve", f"--model={self.path}/none", f"--ready-file={self.ready_file}"],
                             capture_output=True, timeout=60, check=False)
        self.assertEqual(run.returncode, 1)
        self.assertFalse(self.ready_file.exists())
        with Service(model=self.path / "model") as service:
            ready = pathlib.Path(service.folder.name) / "ready"
            self.assertTrue(ready.exists())
            service.stop()
            self.assertFalse(ready.exists())


if __name__ == "__main__":
    unittest.main(verbosity=2)
