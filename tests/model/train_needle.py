#!/usr/bin/env python3
"""Trains and examines the reference model.

    train_needle.py train OUTPUT --stages 512:100,1024:80,4096:90,8192:120     from scratch; window:seconds of training
    train_needle.py train OUTPUT --resume FOLDER --stages 32768:240 --learning-rate 3e-4
    train_needle.py eval FOLDER --lengths 2048,8192 --answers 256
    train_needle.py eval FOLDER --lengths 8192 --top 2048                      with selected keys, see evaluate_needle.py

OUTPUT needs tokenizer.json (train_tokenizer.py writes it) unless --resume brings one. Weights are saved there every
minute; a later run resumes from weights alone, with a fresh optimizer. Without a GPU everything runs, slowly.
"""

import argparse
import functools
import math
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Iterator, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.data import DataLoader, IterableDataset

import documents
from evaluate_needle import Selection, evaluate
from needle_data import ANSWER_WEIGHT, QUESTION_STRIDE, Encoder, batches, row_tokens
from needle_model import ModelConfig, Needle, Rope, load_model, rotate, save_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FINAL_SHARE = 0.05  # of the learning rate, at the end of the cosine
SAVE_SECONDS = 60
LOG_STEPS = 50
MASK_BLOCK = 128  # tokens


@dataclass(frozen=True)
class Stage:
    window: int  # tokens
    seconds: float


class Batches(IterableDataset):
    """Each worker process makes batches of its own seed."""

    def __init__(self, folder: Path, window: int, num_rows: int, seed: int):
        self._arguments = folder, window, num_rows
        self._seed = seed

    def __iter__(self) -> Iterator:
        folder, window, num_rows = self._arguments
        worker = torch.utils.data.get_worker_info()
        return batches(Encoder(folder), window, num_rows, self._seed * 1000 + (worker.id if worker else 0))


def load_batches(folder: Path, window: int, batch_tokens: int, seed: int) -> Iterator[Tensor]:
    num_rows = max(1, batch_tokens // row_tokens(window))
    loader = DataLoader(Batches(folder, window, num_rows, seed), batch_size=None, collate_fn=lambda batch: batch,
                        num_workers=max(1, (os.cpu_count() or 2) - 2), prefetch_factor=4)
    for batch in loader:
        yield torch.from_numpy(batch).to(DEVICE, non_blocking=True)


def visible(document: Tensor, question: Tensor) -> Callable[..., Tensor]:
    """Causal, within a document, and of questions only the own one. document and question are [rows, tokens]."""

    def mask(row, head, query, key):
        same_document = document[row, query] == document[row, key]
        readable = (question[row, key] == 0) | (question[row, key] == question[row, query])
        return (query >= key) & same_document & readable

    return mask


def dense_mask(document: Tensor, question: Tensor) -> Tensor:
    """`visible` as booleans [rows, 1, tokens, tokens]."""
    tokens = torch.arange(document.shape[1], device=document.device)
    rows = torch.arange(document.shape[0], device=document.device)
    return visible(document, question)(rows[:, None, None], 0, tokens[:, None], tokens)[:, None]


def block_mask(document: Tensor, question: Tensor) -> BlockMask:
    """`visible` for flex_attention: which blocks of MASK_BLOCK x MASK_BLOCK it must visit, and which it sees whole.

    Errs on the side of visiting; a question is shorter than a block.
    """
    documents_in = document.unflatten(1, (-1, MASK_BLOCK))
    first, last = documents_in.amin(-1), documents_in.amax(-1)
    in_document = (question == 0).unflatten(1, (-1, MASK_BLOCK))
    index = torch.arange(first.shape[1], device=document.device)
    distance = index[:, None] - index
    overlap = (first[:, :, None] <= last[:, None]) & (first[:, None] <= last[:, :, None])
    visited = overlap & (distance >= 0) & (in_document.any(-1)[:, None] | (distance <= 1))
    single = first == last
    whole = overlap & (distance > 0) & single[:, :, None] & (single & in_document.all(-1))[:, None]
    return BlockMask.from_kv_blocks(*_block_list(visited & ~whole), *_block_list(whole), BLOCK_SIZE=MASK_BLOCK,
                                    mask_mod=visible(document, question))


def _block_list(blocks: Tensor) -> Tuple[Tensor, Tensor]:
    """Of booleans [rows, blocks, blocks]: how many are set in each line, [rows, 1, blocks], and which, these first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


def loss_and_hits(model: Needle, rope: Rope, batch: Tensor, mask) -> Tuple[Tensor, Tensor]:
    """Weighted mean loss, and [2, tasks]: answer tokens said rightly, and all of them. mask: BlockMask or booleans."""
    tokens, targets, positions, _, question, weights = batch
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
    document, question = batch[3], batch[4]
    if DEVICE.type == "cuda":
        return _compiled_loss()(model, rope, batch, block_mask(document, question))
    return loss_and_hits(model, rope, batch, dense_mask(document, question))


class Schedule:
    """Learning rate: linear warm-up by steps, then a cosine by training time, over all stages."""

    def __init__(self, peak: float, warmup_steps: int, total_seconds: float):
        self._peak, self._warmup_steps, self._total_seconds = peak, warmup_steps, total_seconds

    def rate(self, step: int, seconds: float) -> float:
        progress = min(1.0, seconds / self._total_seconds)
        cosine = FINAL_SHARE + (1 - FINAL_SHARE) * (1 + math.cos(math.pi * progress)) / 2
        return self._peak * cosine * min(1.0, (step + 1) / self._warmup_steps)


class Trainer:
    def __init__(self, model: Needle, folder: Path, arguments: argparse.Namespace):
        self._model, self._folder, self._arguments = model, folder, arguments
        self._encoder = Encoder(folder)
        self._rope = Rope(model.config, DEVICE)
        matrices = [p for p in model.parameters() if p.dim() == 2]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
            lr=0.0, betas=(0.9, 0.95), fused=DEVICE.type == "cuda")
        self._stages: List[Stage] = arguments.stages
        self._schedule = Schedule(arguments.learning_rate, arguments.warmup_steps, sum(s.seconds for s in self._stages))
        self._step = 0
        self._began = self._saved_at = time.monotonic()

    def run(self) -> None:
        before = 0.0
        for index, stage in enumerate(self._stages):
            self._run_stage(stage, before, self._arguments.seed + index)
            before += stage.seconds
            self._save()
            self._report(stage.window)

    def _run_stage(self, stage: Stage, seconds_before: float, seed: int) -> None:
        """The clock of a stage starts when its first step, which compiles, is done."""
        loader = load_batches(self._folder, stage.window, self._arguments.batch_tokens, seed)
        start = None
        seconds, window = 0.0, _LogWindow()
        while seconds < stage.seconds:
            loss, hits = self._take_step(next(loader), seconds_before + seconds)
            window.add(loss, hits)
            if start is None:
                window.flush()
                start = time.monotonic()
                print(f"window {stage.window} compiled, {start - self._began:.0f}s in all", flush=True)
                continue
            if self._step % LOG_STEPS == 0:
                print(f"window {stage.window} step {self._step} {seconds:.0f}s {window.flush()}", flush=True)
            seconds = time.monotonic() - start
            if time.monotonic() - self._saved_at > SAVE_SECONDS:
                self._save()
        print(f"window {stage.window} ends at step {self._step}, {time.monotonic() - self._began:.0f}s in all", flush=True)

    def _take_step(self, batch: Tensor, seconds: float) -> Tuple[Tensor, Tensor]:
        for group in self._optimizer.param_groups:
            group["lr"] = self._schedule.rate(self._step, seconds)
        loss, hits = forward(self._model, self._rope, batch)
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

    def _report(self, window: int) -> None:
        if self._arguments.report_answers:
            report(self._folder, [window], documents.TASKS[:-1], self._arguments.report_answers, None)


class _LogWindow:
    """Means since the last flush; reading them waits for the GPU, adding does not."""

    def __init__(self):
        self._sums: List[Tuple[Tensor, Tensor]] = []
        self._since = time.monotonic()

    def add(self, loss: Tensor, hits: Tensor) -> None:
        self._sums.append((loss, hits))

    def flush(self) -> str:
        if not self._sums:
            return ""
        loss = torch.stack([loss for loss, _ in self._sums]).mean().item()
        right, answered = torch.stack([hits for _, hits in self._sums]).sum(0).tolist()
        milliseconds = 1000 * (time.monotonic() - self._since) / len(self._sums)
        rates = " ".join(f"{task} {right[i] / answered[i]:.3f}" for i, task in enumerate(documents.TASKS) if answered[i])
        self._sums, self._since = [], time.monotonic()
        return f"{milliseconds:.0f} ms/step loss {loss:.4f} answer tokens right: {rates}"


def report(folder: Path, lengths: List[int], tasks: Tuple[str, ...], answers: int, selection: Optional[Selection]) -> None:
    """Prints exact-answer rates of the weights in `folder`, as a markdown table."""
    model, encoder = load_model(folder).to(DEVICE, torch.bfloat16), Encoder(folder)
    print("| task |" + "".join(f" {length:,} |" for length in lengths))
    print("|---|" + "---|" * len(lengths))
    for task in tasks:
        scores = [evaluate(model, encoder, task, length, answers, selection=selection) for length in lengths]
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
    """512:100,1024:80 -> windows and seconds."""
    return [Stage(int(window), float(seconds)) for window, seconds in (part.split(":") for part in text.split(","))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    trainer = commands.add_parser("train")
    trainer.add_argument("folder", type=Path)
    trainer.add_argument("--stages", type=_stages, required=True, help="window:seconds,...")
    trainer.add_argument("--resume", type=Path, help="folder with weights to go on from")
    trainer.add_argument("--learning-rate", type=float, default=1e-3)
    trainer.add_argument("--warmup-steps", type=int, default=200)
    trainer.add_argument("--batch-tokens", type=int, default=131072)
    trainer.add_argument("--seed", type=int, default=1)
    trainer.add_argument("--report-answers", type=int, default=64, help="questions a task after each stage; 0 for none")
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
