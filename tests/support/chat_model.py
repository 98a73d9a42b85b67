"""The reference model with a chat template, which it was not trained for: for tests of how chat is told, not of what."""

import pathlib

TESTS = pathlib.Path(__file__).resolve().parents[1]
TEMPLATE = TESTS / "coordinator" / "chat" / "templates" / "smollm2.jinja"


def link_chat_model(folder):
    """Fills the folder with links to the model's files and the template. Returns the folder."""
    for file in (TESTS / "model" / "needle-8k").iterdir():
        (pathlib.Path(folder) / file.name).symlink_to(file)
    (pathlib.Path(folder) / "chat_template.jinja").symlink_to(TEMPLATE)
    return folder
