"""The reference model with a chat template, which it was not trained for: for tests of how chat is told, not of what."""

import pathlib

from support.tiny_model import make_tiny_model

TESTS = pathlib.Path(__file__).resolve().parents[1]
TEMPLATE = TESTS / "coordinator" / "chat" / "templates" / "smollm2.jinja"


def link_chat_model(folder):
    """Fills the folder with links to the model's files and the template. Returns the folder."""
    for file in (TESTS / "model" / "needle-8k").iterdir():
        (pathlib.Path(folder) / file.name).symlink_to(file)
    (pathlib.Path(folder) / "chat_template.jinja").symlink_to(TEMPLATE)
    return folder


def link_chat_model_that_refuses(folder):
    """The same, with a template that refuses roles that it does not know, naming them."""
    link_chat_model(folder)
    template = pathlib.Path(folder) / "chat_template.jinja"
    template.unlink()
    template.write_text("{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
                        "{{ raise_exception('There is no role ' ~ m.role) }}{% endif %}{% endfor %}" + TEMPLATE.read_text())
    return folder


def make_tiny_chat_model(folder):
    """A tiny model of random weights with the template, whose marks are that model's special tokens. Returns its folder."""
    model = make_tiny_model(folder)
    text = TEMPLATE.read_text()
    (model / "chat_template.jinja").write_text(
        text.replace("<|im_start|>", "<|begin_of_text|>").replace("<|im_end|>", "<|end_of_text|>"))
    return model
