"""Folders of models that are only a shape, with a tokenizer: that of needle-8k, padded with words that no text has to the
model's size."""

import json
import pathlib
import shutil

SOURCE = pathlib.Path(__file__).resolve().parents[1] / "model" / "needle-8k"


def write_padded_tokenizer(folder, vocab_size):
    tokenizer = json.loads((SOURCE / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words.update({f"unused-{token}": token for token in range(len(words), vocab_size)})
    (pathlib.Path(folder) / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(SOURCE / "tokenizer_config.json", folder)


def copy_shape(shape, folder):
    """Writes the shape of the model in folder `shape`, with a tokenizer, into `folder`."""
    config = pathlib.Path(shape) / "config.json"
    shutil.copy(config, folder)
    write_padded_tokenizer(folder, json.loads(config.read_text())["vocab_size"])
