"""A conversation over gRPC and with `kvasir chat`, in a pipe and on a terminal."""

import json
import os
import pathlib
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import KVASIR, Service, generation_pb2, read_stream  # noqa: E402
from support.tiny_model import make_tiny_model  # noqa: E402

TEMPLATE = ("{%- for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('No robots') }}{% endif %}"
            "{{ '<|' + m.role + '|>' + m.content + '\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")


class Terminal:
    """`kvasir chat` on a pseudo terminal."""

    def __init__(self, *flags):
        pid, self.fd = pty.fork()
        if pid == 0:
            os.execv(KVASIR, [str(KVASIR), "chat", *flags])
        self.pid, self.seen = pid, ""

    def write(self, text):
        os.write(self.fd, text.encode())

    def read_until(self, text, timeout=60):
        """Returns what is shown up to and with `text`."""
        end = time.monotonic() + timeout
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise AssertionError(f"no {text!r} in {self.seen!r}")
            self.seen += os.read(self.fd, 65536).decode(errors="replace")
        shown, self.seen = self.seen.split(text, 1)
        return shown + text

    def wait(self):
        """Returns the exit code."""
        try:
            while os.read(self.fd, 65536):
                pass
        except OSError:  # the other end is closed
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Chat(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="kvasir-chat-")
        model = make_tiny_model(pathlib.Path(cls.folder.name) / "model")
        (model / "chat_template.jinja").write_text(TEMPLATE)
        cls.service = Service(model=model)

    @classmethod
    def tearDownClass(cls):
        cls.service.stop()
        cls.folder.cleanup()

    def pipe(self, text, *flags):
        return subprocess.run([KVASIR, "chat", f"--server={self.service.address}", "--temperature=0", *flags],
                              input=text.encode(), capture_output=True, timeout=60, check=False)

    def test_a_conversation_is_the_text_that_the_template_makes(self):
        chat = generation_pb2.ChatInput(messages=json.dumps([{"role": "user", "content": "Grüße"}]))
        text = generation_pb2.TokenizeRequest(text="<|user|>Grüße\n<|assistant|>", add_special_tokens=False)
        ids = self.service.stub.Tokenize(text).token_ids
        self.assertEqual(self.service.stub.Tokenize(generation_pb2.TokenizeRequest(chat=chat)).token_ids, ids)
        request = generation_pb2.GenerateRequest(chat=chat)
        request.sampling.max_tokens, request.sampling.temperature = 4, 0
        self.assertEqual(read_stream(self.service.stub.Generate(request)).finish.usage.prompt_tokens, len(ids))

    def test_lines_of_a_pipe_are_messages(self):
        run = self.pipe("one\n\ntwo\n/context\n/nothing\n", "--max-tokens=3")
        self.assertEqual(run.returncode, 1)
        self.assertIn("there is no command /nothing", run.stderr.decode())
        self.assertRegex(run.stderr.decode(), r"\d+ of 8192 tokens: \d+ read, of which \d+ were cached, and \d+ answered")
        self.assertGreaterEqual(len(run.stdout.splitlines()), 2)

    def test_the_conversation_goes_with_each_message(self):
        def read(text):
            return int(self.pipe(text + "/context\n", "--max-tokens=1").stderr.decode().split("tokens: ")[1].split()[0])
        self.assertGreater(read("one\ntwo\n"), read("two\n"))
        self.assertEqual(read("one\n/clear\ntwo\n"), read("two\n"))
        self.assertGreater(read("/system Be kind to all.\ntwo\n"), read("two\n"))

    def test_a_context_precedes_the_conversation(self):
        document = " ".join(str(number) for number in range(200))
        create = subprocess.run([KVASIR, "context", "create", "--name=doc", f"--text={document}", "--wait",
                                 f"--server={self.service.address}"], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(create.returncode, 0, create.stderr)
        tokens = len(self.service.stub.Tokenize(generation_pb2.TokenizeRequest(text=document)).token_ids)

        def numbers(*flags):
            said = self.pipe("two\n/context\n", "--max-tokens=1", *flags).stderr.decode()
            return [int(number) for number in re.search(r"tokens: (\d+) read, of which (\d+) were cached", said).groups()]
        alone, _ = numbers()
        read, cached = numbers("--context=doc")
        self.assertGreater(tokens, 64, "no block of it can be cached")
        self.assertEqual(read, tokens + alone)
        self.assertGreaterEqual(cached, tokens // 64 * 64)
        self.assertIn("there is no context none", self.pipe("two\n", "--context=none").stderr.decode())

    def test_ctrl_c_stops_the_answer_and_not_the_program(self):
        terminal = Terminal(f"--server={self.service.address}", "--temperature=1", "--max-tokens=8000")
        terminal.read_until("> ")
        terminal.write("tell me all\n")
        terminal.read_until("tell me all\r\n")
        while len(terminal.seen) < 20:
            terminal.seen += os.read(terminal.fd, 65536).decode(errors="replace")
        terminal.write("\x03")
        terminal.read_until("\n> ")
        terminal.write("\x03")
        terminal.read_until("(/quit or Ctrl-D ends)")
        terminal.write("/policy\n")
        terminal.read_until("policies: default")
        terminal.write("/policy nope\n")
        terminal.read_until("there is no policy nope; use default")
        terminal.write("/quit\n")
        self.assertEqual(terminal.wait(), 0)


if __name__ == "__main__":
    unittest.main()
