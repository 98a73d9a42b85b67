#!/usr/bin/env python3
"""Records the logits that transformers computes with the reference models (golden_logits.py):

    make_golden_logits.py needle-8k needle-32k

writes golden/needle-8k.safetensors and so on, beside this script. Run it again whenever the weights change; the test
reports when the files are out of date. The text is a generated document of mixed tasks, followed by questions with their
answers, and cut among them. Needs torch, transformers and tokenizers. Tests use only the recorded files.
"""

import argparse
import sys
from pathlib import Path

import tokenizers
import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import documents  # noqa: E402
import golden_logits  # noqa: E402

LENGTHS = (1, 65, 500, 8000)


def make_tokens(folder):
    """Returns a document with answered questions, as long as the longest run."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    document = documents.make_document("mixed", max(LENGTHS), num_questions=16, seed=1)
    answered = "".join(question.prompt + question.answer + "\n" for question in document.questions)
    answers = tokenizer.encode(answered, add_special_tokens=False).ids
    text = tokenizer.encode(document.text).ids[:max(LENGTHS) - len(answers) // 2]
    return torch.tensor((text + answers)[:max(LENGTHS)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a folder beside this script")
    transformers.utils.logging.disable_progress_bar()
    for model in parser.parse_args().models:
        path = HERE / "golden" / f"{model}.safetensors"
        path.parent.mkdir(exist_ok=True)
        golden_logits.record(HERE / model, make_tokens(HERE / model), LENGTHS, path)
        print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
