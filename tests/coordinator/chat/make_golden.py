"""Writes golden.json: what `transformers` renders for templates/*.jinja x conversations.py.

    python3 make_golden.py                   with Jinja2 as transformers configures it
    python3 make_golden.py --transformers    with transformers itself; changes nothing, fails on a difference

A rendering is {"text": ..} or {"error": ..}. The error's text is kept where the template raises it.
"""

import datetime
import json
import pathlib
import sys

from conversations import CONVERSATIONS
from snippets import SNIPPETS

HERE = pathlib.Path(__file__).resolve().parent
NOW = datetime.datetime(2026, 1, 5, 13, 4, 5)
SNIPPET_DATA = ("", [{"role": "user", "content": "x"}], None, {}, False)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def jinja_renderer():
    """Returns render(template, messages, tools, add_generation_prompt, variables)."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": NOW.strftime}

    def prepared(message):
        """As transformers changes messages: no null members, reasoning under several names."""
        message = {key: value for key, value in message.items() if value is not None}
        reasoning = next((message[k] for k in ("reasoning_content", "thinking", "reasoning") if k in message), None)
        return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}

    def render(template, messages, tools, add_generation_prompt, variables):
        return environment.from_string(template).render(
            messages=[prepared(m) for m in messages], tools=tools, documents=None,
            add_generation_prompt=add_generation_prompt, **{**TOKENS, **variables})

    return render


def transformers_renderer():
    import transformers.utils.chat_template_utils as utils
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    class Fixed(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return NOW

    utils.datetime = Fixed
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)

    def render(template, messages, tools, add_generation_prompt, variables):
        return tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False,
                                             add_generation_prompt=add_generation_prompt, **variables)

    return render


def rendering(render, template, conversation):
    from jinja2.exceptions import TemplateError
    _, messages, tools, variables, add_generation_prompt = conversation
    try:
        return {"text": render(template, messages, tools, add_generation_prompt, variables)}
    except TemplateError as error:
        return {"error": str(error) if type(error) is TemplateError else ""}
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return {"error": ""}


def dumped(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def lines(value):
    """JSON with a line for each element of a list."""
    if isinstance(value, dict):
        return "{" + ",\n".join(f"{dumped(key)}:{lines(element)}" for key, element in value.items()) + "}"
    return "[\n" + ",\n".join(dumped(element) for element in value) + "]" if isinstance(value, list) else dumped(value)


def main():
    real = sys.argv[1:] == ["--transformers"]
    render = transformers_renderer() if real else jinja_renderer()
    templates = {path.stem: path.read_text(encoding="utf-8") for path in sorted((HERE / "templates").glob("*.jinja"))}
    golden = {
        "unix_seconds": int(NOW.replace(tzinfo=datetime.timezone.utc).timestamp()),
        "conversations": [{
            "name": name, "messages": json.dumps(messages, ensure_ascii=False),
            "tools": "" if tools is None else json.dumps(tools, ensure_ascii=False),
            "variables": json.dumps(variables) if variables else "", "add_generation_prompt": prompt,
        } for name, messages, tools, variables, prompt in CONVERSATIONS],
        "renderings": {name: [rendering(render, template, c) for c in CONVERSATIONS]
                       for name, template in templates.items()},
    }
    golden["snippets"] = [[s, rendering(render, s, SNIPPET_DATA).get("text")] for s in SNIPPETS]
    text = "{" + ",\n".join(f"{dumped(key)}:{lines(value)}" for key, value in golden.items()) + "}\n"
    path = HERE / "golden.json"
    if not real:
        path.write_text(text, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != text:
        sys.exit("golden.json differs from what transformers renders")
    print(f"{len(templates)} templates x {len(CONVERSATIONS)} conversations")


if __name__ == "__main__":
    main()
