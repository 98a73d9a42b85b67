"""Training rows for the reference model: documents with their questions, packed.

A row has examples one after the other. An example is a document followed by several questions with answers. All
questions of a document begin at the same position, right after it, and see only the document and themselves
(`visible` in train_needle.py), as if each were a separate request.

    row        | B document ..... | question answer E | question answer E | B document ... | question answer E | pad
    position     0 1 2 ...... n-1   n n+1 ...           n n+1 ...           0 1 ...          m m+1 ...
    document     1 1 1 ...... 1     1 1 1               1 1 1               2 2 ...          2 2 ...             0
    question     0 0 0 ...... 0     9 9 9               17 17 17            0 0 ...          8 8 ...             0
    reach        r r r ...... r     all                 all                 all              all                 0

Half of the documents are read with the attention sink and a window of `reach` tokens, as a service reads a long prompt.
Their questions see the whole document.
"""

import random
import re
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional

import numpy as np
from tokenizers import Tokenizer

import documents
from train_tokenizer import BEGIN, END, PAD

ROOM = 64  # tokens after a document for the longest question and its answer
SINK = 128  # first tokens of a document, which are always attended to
WHOLE = 2 ** 30  # reach of tokens that see everything before them
REACHES = (256, 1024)  # shortest and longest window that a document is read with
QUESTION_STRIDE = 8  # question = QUESTION_STRIDE * (1 + index) + index of its task in documents.TASKS
NUM_CHANNELS = 7  # of a batch, see batches()

# Loss weights in percent. common_words has one answer token per document and other tasks have hundreds: without a larger
# weight of its word, counting would be learnt last.
DOCUMENT_WEIGHT, PROMPT_WEIGHT, ANSWER_WEIGHT, WORD_WEIGHT, STOP_WEIGHT = 2, 5, 100, 3000, 50

TASK_SHARES = {"mixed": 30, "multi_key": 12, "key_value": 27, "variable_tracing": 21, "common_words": 20, "pass_key": 3}
MAX_QUESTIONS = 128  # per document
QUESTION_TOKENS = 27  # of an average question and its answer
# Tokens per fact, and parts of names; None is the default of documents.py. A selection from a document sixteen times as
# long looks like dense facts with similar names.
DENSITIES, PARTS = (None, None, 24, 40, 80), (None, None, 24, 48, 96)


class Encoder:
    """The tokenizer of a folder with a cache of pieces: fast on generated text, the same tokens on any ASCII."""

    def __init__(self, folder: Path):
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._pieces: Dict[str, List[int]] = {}
        self._split = re.compile(documents.PIECE_PATTERN).findall
        self.begin, self.end, self.pad = (self._tokenizer.token_to_id(token) for token in (BEGIN, END, PAD))
        self.vocab_size = self._tokenizer.get_vocab_size()

    def __call__(self, text: str) -> List[int]:
        """Returns the tokens of ASCII `text`, without begin-of-text."""
        tokens: List[int] = []
        for piece in self._split(text):
            ids = self._pieces.get(piece)
            if ids is None:
                ids = self._pieces[piece] = self._tokenizer.encode(piece, add_special_tokens=False).ids
            tokens += ids
        return tokens

    def decode(self, tokens: List[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def row_tokens(window: int) -> int:
    """Returns the tokens of a row for documents up to `window`: a multiple of 128, with room for their questions."""
    return -(-(window + max(256, window // 2)) // 128) * 128


def batches(encoder: Encoder, window: Callable[[], int], num_rows: int, size: int, seed: int) -> Iterator[np.ndarray]:
    """Yields endless batches int32 [7, rows, size]: tokens, targets, positions, document, question, weight (percent), reach.

    window() is the most tokens of a document with one of its questions. It is called before each batch.
    """
    rng = random.Random(seed)
    while True:
        batch = np.zeros((NUM_CHANNELS, num_rows, size), np.int32)
        batch[:2] = encoder.pad
        for row in range(num_rows):
            _fill_row(rng, encoder, window(), batch[:, row])
        yield batch


def _fill_row(rng: random.Random, encoder: Encoder, window: int, row: np.ndarray) -> None:
    start, document_id = 0, 1
    while row.shape[1] - start >= 320:
        longest = min(window - ROOM, (row.shape[1] - start) * 4 // 5)
        shortest = min(192, longest) if rng.random() < 0.4 else int(longest * 0.75)
        start = _put_example(rng, encoder, rng.randint(shortest, longest), row, start, document_id)
        document_id += 1


def _put_example(rng: random.Random, encoder: Encoder, length: int, row: np.ndarray, start: int, document_id: int) -> int:
    """Writes one example at `start`, with as many questions as fit. Returns where it ends."""
    document = _document(rng, length, row.shape[1] - start)
    tokens = [encoder.begin] + encoder(document.text)
    end = start + len(tokens)
    reach = rng.randint(*REACHES) if rng.random() < 0.5 else WHOLE
    _put_segment(row, start, tokens, position=0, document=document_id, question=0, weights=DOCUMENT_WEIGHT, reach=reach)
    for index, question in enumerate(document.questions):
        prompt, answer = encoder(question.prompt), encoder(question.answer)
        size = len(prompt) + len(answer) + 1
        if end + size > row.shape[1]:
            break
        answer_weight = WORD_WEIGHT if question.task == "common_words" else ANSWER_WEIGHT
        weights = [PROMPT_WEIGHT] * (len(prompt) - 1) + [answer_weight] * (len(answer) - 1) + [STOP_WEIGHT] * 2
        _put_segment(row, end, prompt + answer + [encoder.end], position=len(tokens), document=document_id,
                     question=QUESTION_STRIDE * (1 + index) + documents.TASKS.index(question.task), weights=weights,
                     reach=WHOLE)
        end += size
    return end


def _document(rng: random.Random, length: int, room: int) -> documents.Document:
    task = rng.choices(list(TASK_SHARES), list(TASK_SHARES.values()))[0]
    num_questions = 1
    if task not in ("pass_key", "common_words"):
        tokens_per_question = 64 if task == "variable_tracing" else 40
        num_questions = min(MAX_QUESTIONS, max(2, (room - length) // QUESTION_TOKENS), length // tokens_per_question)
    density: Optional[int] = rng.choice(DENSITIES) if task in ("multi_key", "key_value") else None
    enough_parts = [parts for parts in PARTS if parts is None or parts ** 2 * min(DENSITIES[2:]) > length]
    parts = rng.choice(enough_parts) if task in ("multi_key", "key_value", "variable_tracing") else None
    return documents.make_document(task, length - 1, num_questions, rng.getrandbits(48), tokens_per_fact=density, num_parts=parts)


def _put_segment(row: np.ndarray, start: int, tokens: List[int], position: int, document: int, question: int,
                 weights, reach: int) -> None:
    """Writes tokens that predict the next ones. Weights are of the predictions, one less than the tokens."""
    end = start + len(tokens)
    row[0, start:end] = tokens
    row[1, start:end - 1] = tokens[1:]
    row[2, start:end] = np.arange(position, position + len(tokens))
    row[3, start:end] = document
    row[4, start:end] = question
    row[5, start:end - 1] = weights
    row[6, start:end] = reach
