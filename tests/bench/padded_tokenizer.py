"""A tokenizer for models that are only a shape: that of needle-8k, padded with words that no text has to the model's size."""

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
