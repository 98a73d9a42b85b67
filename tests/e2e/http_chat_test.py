"""Chat over HTTP: real processes, real sockets, a tiny model with the template of SmolLM2."""

import json
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.chat_model import TEMPLATE  # noqa: E402
from support.http_client import ask, read_events  # noqa: E402
from support.service import Service  # noqa: E402
from support.tiny_model import make_tiny_model  # noqa: E402

CHAT = "/v1/chat/completions"
CONTEXT = 512
BEGIN, END = 0, 1  # the tokens that the template writes
SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Grüße <|end_of_text|>"}


def template():
    text = TEMPLATE.read_text()
    return text.replace("<|im_start|>", "<|begin_of_text|>").replace("<|im_end|>", "<|end_of_text|>")


class HttpChat(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvasir-http-chat-"))
        model = make_tiny_model(pathlib.Path(folder) / "model")
        (model / "chat_template.jinja").write_text(template())
        config = model / "tokenizer_config.json"
        known = json.loads(config.read_text()) if config.exists() else {}
        config.write_text(json.dumps({**known, "chat_template": "of tokenizer_config.json"}))
        cls.service = cls.enterClassContext(Service(model=model, flags=[f"--max-model-len={CONTEXT}"]))

    def chat(self, **body):
        reply = ask(self.service, "POST", CHAT, {"messages": [SYSTEM, HELLO], "temperature": 0, **body})
        self.assertEqual(reply.status, 200, reply.body)
        return reply.json

    def tokens(self, **body):
        reply = ask(self.service, "POST", "/tokenize", body)
        self.assertEqual(reply.status, 200, reply.body)
        return reply.json["tokens"]

    def refuse(self, param, **body):
        reply = ask(self.service, "POST", CHAT, {"messages": [HELLO], **body})
        self.assertEqual((reply.status, reply.error["param"]), (400, param), reply.body)
        return reply.error["message"]

    def test_the_template_that_serves_is_told(self):
        self.assertEqual(ask(self.service, "GET", "/tokenizer_info").json["chat_template"], template())

    def test_an_answer_is_the_completion_of_the_rendered_text(self):
        def plain(text):
            return self.tokens(prompt=text, add_special_tokens=False, parse_special_tokens=False)
        ids = self.tokens(messages=[SYSTEM, HELLO])
        self.assertEqual(ids, [BEGIN, *plain("system\nBe brief."), END, *plain("\n"),
                               BEGIN, *plain("user\nGrüße <|end_of_text|>"), END, *plain("\n"),
                               BEGIN, *plain("assistant\n")])
        answer = self.chat(max_tokens=6, ignore_eos=True)
        self.assertEqual((answer["object"], answer["id"][:9]), ("chat.completion", "chatcmpl-"))
        (choice,) = answer["choices"]
        same = ask(self.service, "POST", "/v1/completions",
                   {"prompt": ids, "temperature": 0, "max_tokens": 6, "ignore_eos": True}).json
        self.assertEqual(choice["message"], {"role": "assistant", "content": same["choices"][0]["text"], "refusal": None})
        self.assertEqual((choice["finish_reason"], choice["logprobs"]), ("length", None))
        self.assertEqual(answer["usage"]["prompt_tokens"], len(ids))
        self.assertEqual(answer["usage"]["completion_tokens"], 6)

    def test_a_stream_opens_with_the_role_and_has_an_event_a_token(self):
        whole = self.chat(max_tokens=5, ignore_eos=True)["choices"][0]["message"]["content"]
        stream = read_events(self.service, CHAT, {
            "messages": [SYSTEM, HELLO], "temperature": 0, "max_tokens": 5, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}})
        self.assertEqual({chunk["object"] for chunk in stream.chunks}, {"chat.completion.chunk"})
        opening, *tokens = [chunk["choices"][0] for chunk in stream.told]
        self.assertEqual(opening["delta"], {"role": "assistant", "content": ""})
        self.assertEqual(len(tokens), 5)
        self.assertEqual("".join(choice["delta"]["content"] for choice in tokens), whole)
        self.assertEqual([choice["finish_reason"] for choice in tokens], [None] * 4 + ["length"])
        self.assertEqual((stream.chunks[-1]["choices"], stream.chunks[-1]["usage"]["completion_tokens"]), ([], 5))

    def test_log_probabilities_name_tokens_texts_and_bytes(self):
        choice = self.chat(max_tokens=3, ignore_eos=True, logprobs=True, top_logprobs=2)["choices"][0]
        content = choice["logprobs"]["content"]
        self.assertEqual(len(content), 3)
        for token in content:
            self.assertEqual(len(token["top_logprobs"]), 2)
            self.assertEqual(token["top_logprobs"][0]["logprob"], token["logprob"])
            if not token["token"].startswith("bytes:"):
                self.assertEqual(bytes(token["bytes"]).decode(), token["token"])
        self.assertEqual(self.refuse("top_logprobs", top_logprobs=2),
                         'top_logprobs is 2; it needs "logprobs": true')

    def test_parts_of_text_are_the_text(self):
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two <|end_of_text|>"}]
        self.assertEqual(self.tokens(messages=[{"role": "user", "content": parts}]),
                         self.tokens(messages=[{"role": "user", "content": "one\ntwo <|end_of_text|>"}]))

    def test_several_answers_and_one_that_goes_on(self):
        answer = self.chat(n=3, temperature=1, seed=3, max_tokens=4, ignore_eos=True)
        self.assertEqual([choice["index"] for choice in answer["choices"]], [0, 1, 2])
        self.assertEqual(len({choice["message"]["content"] for choice in answer["choices"]}), 3)
        begun = [HELLO, {"role": "assistant", "content": "So it"}]
        ids = self.tokens(messages=begun, continue_final_message=True, add_generation_prompt=True)
        text = ask(self.service, "POST", "/detokenize", {"tokens": ids}).json["prompt"]
        self.assertTrue(text.endswith("assistant\nSo it"), text)

    def test_an_answer_may_fill_the_context_unless_it_is_told_less(self):
        prompt = [{"role": "user", "content": "word " * 20}]
        room = CONTEXT - len(self.tokens(messages=prompt))
        answer = self.chat(messages=prompt, ignore_eos=True, temperature=1, seed=1, min_tokens=40)
        self.assertEqual(answer["choices"][0]["finish_reason"], "length")
        self.assertEqual(answer["usage"]["completion_tokens"], room)
        self.assertEqual(self.chat(max_tokens=9, max_completion_tokens=2, ignore_eos=True)["usage"]["completion_tokens"], 2)

    def test_what_is_not_served_is_refused_with_its_place(self):
        image = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
        self.assertIn('messages[1].content[1] has type "image_url";',
                      self.refuse("messages", messages=[HELLO, {"role": "user", "content": image}]))
        self.assertIn("messages[0] has no role", self.refuse("messages", messages=[{"content": "x"}]))
        self.refuse("messages", messages=[])
        self.refuse("messages", messages="hello")
        self.refuse("tools", tools={})
        self.refuse("tool_choice", tool_choice="required", tools=[])
        self.refuse("functions", functions=[{"name": "f"}])
        self.refuse("response_format", response_format={"type": "json_object"})
        self.refuse("chat_template_kwargs", chat_template_kwargs=[1])
        self.refuse("max_completion_tokens", max_completion_tokens=-1)
        self.assertIn("max_tokens is 0", self.refuse("max_tokens", max_tokens=0))
        self.chat(response_format={"type": "text"}, tools=[], tool_choice="auto", max_tokens=1, store=True)


class WithoutTemplate(unittest.TestCase):
    def test_is_told_what_to_do(self):
        with tempfile.TemporaryDirectory(prefix="kvasir-http-chat-") as folder:
            with Service(model=make_tiny_model(pathlib.Path(folder) / "model")) as service:
                reply = ask(service, "POST", CHAT, {"messages": [HELLO]})
        self.assertEqual(reply.status, 400)
        self.assertIn("the model has no chat template", reply.error["message"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
