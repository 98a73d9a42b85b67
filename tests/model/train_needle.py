#!/usr/bin/env python3
"""Trains and examines the reference model.

    train_needle.py train OUTPUT --stages 512:200,1024:100,2048:100,8192:160   from scratch; window:seconds of training
    train_needle.py train OUTPUT --resume FOLDER --stages 32768:240 --learning-rate 3e-4
    train_needle.py eval FOLDER --lengths 2048,8192 --answers 256
    train_needle.py eval FOLDER --lengths 8192 --top 2048                      with selected keys, see evaluate_needle.py

A stage ends early once LEARNED_RATE of its answer tokens are right; the rest of its time goes to the last stage. OUTPUT
needs tokenizer.json (train_tokenizer.py writes it) unless --resume has one. Weights are saved there every minute. A later
run resumes from weights only, with a new optimizer. Without a GPU everything runs, slowly.
"""

import argparse
import functools
import math
import multiprocessing
import os
import shutil
import time
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Callable, Iterator, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.data import DataLoader, IterableDataset

import documents
from evaluate_needle import Selection, evaluate
from needle_data import ANSWER_WEIGHT, QUESTION_STRIDE, SINK, Encoder, batches, row_tokens
from needle_model import ModelConfig, Needle, Rope, load_model, rotate, save_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LEARNED_RATE = 0.99
SAVE_SECONDS = 60
LOG_STEPS = 100
MASK_BLOCK = 128  # tokens


@dataclass(frozen=True)
class Stage:
    window: int  # tokens
    seconds: float  # longest time


class Batches(IterableDataset):
    """Each worker process makes batches from its own seed, with documents up to `window`, which may grow."""

    def __init__(self, folder: Path, window: Synchronized, num_rows: int, size: int, seed: int):
        self._folder, self._window, self._shape, self._seed = folder, window, (num_rows, size), seed

    def __iter__(self) -> Iterator:
        worker = torch.utils.data.get_worker_info()
        seed = self._seed * 1000 + (worker.id if worker else 0)
        return batches(Encoder(self._folder), lambda: self._window.value, *self._shape, seed)


def load_batches(dataset: Batches) -> Iterator[Tensor]:
    loader = DataLoader(dataset, batch_size=None, collate_fn=lambda batch: batch,
                        num_workers=max(1, (os.cpu_count() or 2) - 2), prefetch_factor=2)
    for batch in loader:
        yield torch.from_numpy(batch).to(DEVICE, non_blocking=True)


def visible(batch: Tensor) -> Callable[..., Tensor]:
    """A token sees itself and earlier tokens of its document, within its reach or at the sink, and of questions its own."""
    _, _, position, document, question, _, reach = batch

    def mask(row, head, query, key):
        same_document = document[row, query] == document[row, key]
        readable = (question[row, key] == 0) | (question[row, key] == question[row, query])
        in_reach = (query - key < reach[row, query]) | (position[row, key] < SINK)
        return (query >= key) & same_document & readable & in_reach

    return mask


def dense_mask(batch: Tensor) -> Tensor:
    """Returns `visible` as booleans [rows, 1, tokens, tokens]."""
    rows, tokens = (torch.arange(size, device=batch.device) for size in batch.shape[1:])
    return visible(batch)(rows[:, None, None], 0, tokens[:, None], tokens)[:, None]


def block_mask(batch: Tensor) -> BlockMask:
    """Returns `visible` for flex_attention: which blocks of MASK_BLOCK x MASK_BLOCK it must visit, and which it sees whole.

    It may visit more than needed. A question is shorter than a block.
    """
    _, _, position, document, question, _, reach = (channel.unflatten(1, (-1, MASK_BLOCK)) for channel in batch)
    first, last = document.amin(-1), document.amax(-1)
    index = torch.arange(first.shape[1], device=batch.device)
    distance = index[:, None] - index
    overlap = (first[:, :, None] <= last[:, None]) & (first[:, None] <= last[:, :, None])
    in_document = question == 0
    in_sink = position < SINK
    reached = ((distance - 1) * MASK_BLOCK < reach.amax(-1)[:, :, None]) | in_sink.any(-1)[:, None]
    reached_whole = ((distance + 1) * MASK_BLOCK <= reach.amin(-1)[:, :, None]) | in_sink.all(-1)[:, None]
    visited = overlap & (distance >= 0) & (in_document.any(-1)[:, None] | (distance <= 1)) & reached
    single = first == last
    whole = visited & (distance > 0) & single[:, :, None] & (single & in_document.all(-1))[:, None] & reached_whole
    return BlockMask.from_kv_blocks(*_block_list(visited & ~whole), *_block_list(whole), BLOCK_SIZE=MASK_BLOCK,
                                    mask_mod=visible(batch))


def _block_list(blocks: Tensor) -> Tuple[Tensor, Tensor]:
    """Returns, for booleans [rows, blocks, blocks], the number set in each line, [rows, 1, blocks], and the indices of a
    line, set ones first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


def loss_and_hits(model: Needle, rope: Rope, batch: Tensor, mask) -> Tuple[Tensor, Tensor]:
    """Returns the weighted mean loss, and [2, tasks]: right answer tokens, and all. `mask`: BlockMask or booleans."""
    tokens, targets, positions, _, question, weights, _ = batch
    tables = tuple(table[:, None] for table in rope.tables(positions))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = rotate(q, tables), rotate(k, tables)
        if isinstance(mask, Tensor):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens, attend).float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten().long(), reduction="none")
    flat_weights = weights.flatten().float()
    answered = (flat_weights >= ANSWER_WEIGHT).float()
    right = (logits.argmax(-1) == targets).flatten().float() * answered
    task = question.flatten().long() % QUESTION_STRIDE
    hits = torch.zeros(2, QUESTION_STRIDE, device=tokens.device).index_add(1, task, torch.stack((right, answered)))
    return (losses * flat_weights).sum() / flat_weights.sum(), hits


@functools.lru_cache(None)
def _compiled_loss() -> Callable[..., Tuple[Tensor, Tensor]]:
    return torch.compile(loss_and_hits, dynamic=False)


def forward(model: Needle, rope: Rope, batch: Tensor) -> Tuple[Tensor, Tensor]:
    if DEVICE.type == "cuda":
        return _compiled_loss()(model, rope, batch, block_mask(batch))
    return loss_and_hits(model, rope, batch, dense_mask(batch))


class Schedule:
    """Learning rate: a linear warm-up by steps, then a cosine from peak to end over the training time."""

    def __init__(self, peak: float, end: float, warmup_steps: int, total_seconds: float):
        self._peak, self._end, self._warmup_steps, self._total_seconds = peak, end, warmup_steps, total_seconds

    def rate(self, step: int, seconds: float) -> float:
        progress = min(1.0, seconds / self._total_seconds)
        rate = self._end + (self._peak - self._end) * (1 + math.cos(math.pi * progress)) / 2
        return rate * min(1.0, (step + 1) / self._warmup_steps)


class Trainer:
    def __init__(self, model: Needle, folder: Path, arguments: argparse.Namespace):
        self._model, self._folder = model, folder
        self._encoder = Encoder(folder)
        self._rope = Rope(model.config, DEVICE)
        matrices = [p for p in model.parameters() if p.dim() == 2]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
            lr=0.0, betas=(0.9, 0.95), fused=DEVICE.type == "cuda")
        self._stages: List[Stage] = arguments.stages
        self._total_seconds = sum(stage.seconds for stage in self._stages)
        self._schedule = Schedule(arguments.learning_rate, arguments.end_rate, arguments.warmup_steps, self._total_seconds)
        self._window = multiprocessing.Value("i", self._stages[0].window)
        size = row_tokens(max(stage.window for stage in self._stages))  # the largest of all stages: one compilation serves all
        self._batches = load_batches(Batches(folder, self._window, max(1, arguments.batch_tokens // size), size, arguments.seed))
        self._step = 0
        self._log = _Log()

    def run(self) -> None:
        """Trains. The clock starts after the first step, which compiles."""
        self._log.add(*self._take_step(0.0))
        self._log.flush()
        self._start = self._saved_at = time.monotonic()
        for stage in self._stages[:-1]:
            self._run_stage(stage.window, self._seconds() + stage.seconds, until_learned=True)
        self._run_stage(self._stages[-1].window, self._total_seconds, until_learned=False)
        self._save()

    def _seconds(self) -> float:
        return time.monotonic() - self._start

    def _run_stage(self, window: int, end: float, until_learned: bool) -> None:
        self._window.value = window
        while self._seconds() < min(end, self._total_seconds):
            self._log.add(*self._take_step(self._seconds()))
            if self._step % LOG_STEPS == 0:
                line, rate = self._log.flush()
                print(f"window {window} step {self._step} {self._seconds():.0f}s {line}", flush=True)
                if until_learned and rate > LEARNED_RATE:
                    return
            if time.monotonic() - self._saved_at > SAVE_SECONDS:
                self._save()

    def _take_step(self, seconds: float) -> Tuple[Tensor, Tensor]:
        for group in self._optimizer.param_groups:
            group["lr"] = self._schedule.rate(self._step, seconds)
        loss, hits = forward(self._model, self._rope, next(self._batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._step += 1
        return loss.detach(), hits

    def _save(self) -> None:
        encoder = self._encoder
        save_model(self._model, self._folder, encoder.begin, encoder.end, encoder.pad)
        self._saved_at = time.monotonic()


class _Log:
    """Means since the last flush. Reading them waits for the GPU, adding does not."""

    def __init__(self):
        self._sums: List[Tuple[Tensor, Tensor]] = []
        self._since = time.monotonic()

    def add(self, loss: Tensor, hits: Tensor) -> None:
        self._sums.append((loss, hits))

    def flush(self) -> Tuple[str, float]:
        """Returns a line for people, and the lowest of the tasks' rates of right answer tokens."""
        loss = torch.stack([loss for loss, _ in self._sums]).mean().item()
        right, answered = torch.stack([hits for _, hits in self._sums]).sum(0).tolist()
        rates = {task: right[i] / answered[i] for i, task in enumerate(documents.TASKS) if answered[i]}
        milliseconds = 1000 * (time.monotonic() - self._since) / len(self._sums)
        self._sums, self._since = [], time.monotonic()
        line = " ".join(f"{task} {rate:.3f}" for task, rate in rates.items())
        return (f"{milliseconds:.0f} ms/step loss {loss:.4f} answer tokens right: {line}",
                min(rates.values()))


def report(folder: Path, lengths: List[int], tasks: Tuple[str, ...], answers: int, selection: Optional[Selection]) -> None:
    """Prints exact-answer rates of the weights in `folder` as a Markdown table."""
    pool = multiprocessing.Pool()  # it forks, so before the GPU is used
    model, encoder = load_model(folder).to(DEVICE, torch.bfloat16), Encoder(folder)
    print("| task |" + "".join(f" {length:,} |" for length in lengths))
    print("|---|" + "---|" * len(lengths))
    for task in tasks:
        scores = [evaluate(model, encoder, task, length, answers, selection=selection, pool=pool) for length in lengths]
        print(f"| {task} |" + "".join(f" {score} |" for score in scores), flush=True)


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.resume:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(arguments.resume / name, folder / name)
        model = load_model(arguments.resume)
    else:
        vocab_size = -(-Encoder(folder).vocab_size // 64) * 64
        model = Needle(ModelConfig(vocab_size=vocab_size))
    model.config = replace(model.config, window=max([model.config.window] + [stage.window for stage in arguments.stages]))
    Trainer(model.to(DEVICE), folder, arguments).run()


def _stages(text: str) -> List[Stage]:
    """Reads windows and seconds: 512:100,1024:80."""
    return [Stage(int(window), float(seconds)) for window, seconds in (part.split(":") for part in text.split(","))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    trainer = commands.add_parser("train")
    trainer.add_argument("folder", type=Path)
    trainer.add_argument("--stages", type=_stages, required=True, help="window:seconds,...")
    trainer.add_argument("--resume", type=Path, help="folder with weights to go on from")
    trainer.add_argument("--learning-rate", type=float, default=1e-3, help="at the beginning, after the warm-up")
    trainer.add_argument("--end-rate", type=float, default=5e-5, help="learning rate at the end")
    trainer.add_argument("--warmup-steps", type=int, default=200)
    trainer.add_argument("--batch-tokens", type=int, default=65536)
    trainer.add_argument("--seed", type=int, default=1)
    examiner = commands.add_parser("eval")
    examiner.add_argument("folder", type=Path)
    examiner.add_argument("--lengths", type=lambda text: [int(part) for part in text.split(",")], default=[8192])
    examiner.add_argument("--tasks", type=lambda text: tuple(text.split(",")), default=documents.TASKS[:-1])
    examiner.add_argument("--answers", type=int, default=256)
    examiner.add_argument("--top", type=int, help="select so many keys; default: dense attention")
    examiner.add_argument("--window", type=int, default=512, help="window of selected attention, tokens")
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.command == "train":
        train(arguments)
    else:
        selection = None if arguments.top is None else Selection(arguments.top, arguments.window)
        report(arguments.folder, arguments.lengths, arguments.tasks, arguments.answers, selection)


if __name__ == "__main__":
    main()
