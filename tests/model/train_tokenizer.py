#!/usr/bin/env python3
"""Trains the reference model's tokenizer on generated documents and writes tokenizer.json and tokenizer_config.json.

Byte-level BPE with Qwen2's split rule, except that punctuation does not include a line end: each digit and each line end
is a separate token, so that a fact ends in the same full stop in a document and in an answer. <|begin_of_text|> comes
before each text. Every word of documents.py becomes one token. Deterministic.

    train_tokenizer.py OUTPUT_FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import documents

BEGIN, END, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
MAX_VOCABULARY = 2048
SPLIT_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                 r"| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+")


def training_texts() -> Iterator[str]:
    """Yields documents of all tasks with their questions: about 2 million tokens."""
    for task in documents.TASKS:
        num_questions = 1 if task in ("pass_key", "common_words") else 64
        for seed in range(12):
            document = documents.make_document(task, 28_000, num_questions, seed)
            yield document.text
            yield from (question.prompt + question.answer for question in document.questions)


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(training_texts(), trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY, special_tokens=[BEGIN, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))])
    return tokenizer


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN, "eos_token": END, "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
